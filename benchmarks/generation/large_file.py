"""A Llama of 1.1 billion parameters in a GGUF file, random and in the layout that llama.cpp calls Q4_K_M.

Run with `python -m benchmarks.generation.large_file FOLDER --json FILE [--memory MB]`, as root: four hosts of a lab
generate with it, each of which has too little memory for it, as `penstock fits` counts beforehand.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import transformers

from benchmarks.labs import lab_text
from penstock.cluster.lab import lab_session, read_lab
from penstock.cluster.lab.machine import this_machine
from penstock.plan.candidates import PlanRequest
from penstock.plan.choose import choose
from penstock.plan.needs import fit
from penstock.recipes.profiled import count_inference
from penstock.resources import anonymous_bytes
from penstock.spec.cluster import Cluster, Device
from penstock.spec.plan import write_plan
from tests.generate.tokens import save_model
from tests.test_packing import raw_weight
from tests.zoo.test_gguf import write_gguf

SIZES = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 2048,
}  # fmt: skip
_WORDS = 32_000
_RUNTIME, _LENGTH, _NEW, _CPU = "onnxruntime:stored", 256, 8, 0.4
_PART = 0.9  # of a host, for which is planned
# every third layer, and the first and last eighth, have values and the feed-forward's output in 6 bits
_BETTER = [layer for layer in range(22) if layer < 2 or layer >= 19 or (layer - 2) % 3 == 2]
PACKINGS = {
    **{f"blk.{layer}.{name}": "Q6_K" for layer in _BETTER for name in ("attn_v", "ffn_down")},
    **dict.fromkeys(
        ("token_embd", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"), "Q4_K"
    ),
    "output": "Q6_K",
}


def write_large(folder: Path) -> Path:
    """Write the file unless it is there, and return its path."""
    target = folder / "large-Q4_K_M.gguf"
    if target.exists():
        return target
    save_model(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    # one more is added when the file is written
    tokenizer.add_tokens([f"word{number} " for number in range(_WORDS - 1 - len(tokenizer))])
    tokenizer.save_pretrained(folder)
    part = folder / "part.gguf"
    write_gguf(folder, part, PACKINGS, hole=SIZES)
    for number, tensor in enumerate(gguf.GGUFReader(part, "r+").tensors):
        if tensor.tensor_type.name == "F32":
            tensor.data[:] = 1.0
        else:
            inputs, rows = (int(x) for x in tensor.shape)
            raw = raw_weight(tensor.tensor_type.name, rows, inputs, 3e-4).numpy()
            # ONNX Runtime would keep equal weights once
            np.copyto(tensor.data, np.roll(raw, number, 0).reshape(tensor.data.shape))
    return part.rename(target)


def main() -> None:
    """Say what one host and four of so much memory can do, and generate on the four."""
    parser = argparse.ArgumentParser(prog="benchmarks.generation.large_file", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the file is, or is written")
    parser.add_argument("--json", type=Path, required=True, help="where to write the result")
    parser.add_argument("--memory", type=int, default=600, help="memory of a host, in MB")
    parser.add_argument("--only-fits", action="store_true", help="run nothing")
    given = parser.parse_args()
    model = f"gguf:{write_large(given.folder)}"
    costs = count_inference(model, max_length=_LENGTH, runtime=_RUNTIME)
    request = PlanRequest(rows=(1,), replicas=False, alternate=False)
    hosts = [Device(name=f"host{n}", speed=_CPU, memory_bytes=round(_PART * given.memory * 10**6)) for n in range(4)]
    one, four = (fit(costs, Cluster(devices=tuple(hosts[:count])), request, 1) for count in (1, 4))
    found: dict[str, Any] = {"one_host": one.reason, "four_hosts": four.reason or "fits"}
    if not four.reason:
        found["needs_mb"] = {stage.device: round(stage.total / 1e6) for stage in four.stages}
        if not given.only_fits:
            plan = choose(costs, Cluster(devices=tuple(hosts)), request).plan
            write_plan(given.folder / "plan.json", plan)
            found |= _run(given.folder, model, given.memory)
    print(json.dumps(found, indent=1))
    given.json.write_text(json.dumps(found, indent=1) + "\n")


def _run(folder: Path, model: str, memory: int) -> dict[str, Any]:
    """Generate on four hosts with this plan; returns the tokens and the most anonymous memory of each host."""
    lab = folder / "lab.toml"
    lab.write_text(lab_text("large", [_CPU] * 4, memory=f"{memory} MB"))
    peaks: dict[str, int] = {}
    command = ["generate", model, "--plan", folder / "plan.json", "--cluster", lab, "--prompt", "A pipe",
               "--max-new-tokens", _NEW, "--json", folder / "out.json"]  # fmt: skip
    with lab_session(read_lab(lab)):
        cgroups = this_machine().cgroups
        with subprocess.Popen([sys.executable, "-m", "penstock", *map(str, command)]) as process:
            while process.poll() is None:
                for host in (f"host{number}" for number in range(4)):
                    held = sum(anonymous_bytes(pid) or 0 for pid in cgroups.processes("large", host))
                    peaks[host] = max(peaks.get(host, 0), round(held / 1e6))
                time.sleep(0.02)
        killed = sum(cgroups.oom_kills("large", f"host{number}") for number in range(4))
    said = json.loads((folder / "out.json").read_text()) if process.returncode == 0 else {}
    return {"status": process.returncode, "peaks_mb": peaks, "killed": killed, "tokens_per_s": said.get("tokens_per_s"),
            "tokens": [row.get("tokens") for row in said.get("rows", ())]}  # fmt: skip


if __name__ == "__main__":
    main()
