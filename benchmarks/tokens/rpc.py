"""llama.cpp over RPC beside this project, on the same four hosts of a lab, in turns."""

import json
import shlex
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.labs import lab_text, show
from benchmarks.serving.in_lab import ask, served
from penstock.cluster.lab import lab_session, read_lab

_HOSTS = 4
_CPU = 0.35
_PORT = 50052
_PROMPT = "Once upon a time there was"
_PROMPT_TOKENS, _NEW = 6, 48
_COUNTS = (1, 8)


def beside_rpc(model: str, gguf: Path, programs: Path, runtimes: Sequence[str], turns: int) -> list[dict[str, Any]]:
    """Generate with llama.cpp's RPC servers and with `penstock serve`, one sequence and eight.

    `programs` is the folder with llama.cpp's `ggml-rpc-server` and `llama-batched-bench`. Tokens per second include the
    prompts; both have run the same prompts before.
    """
    rates: dict[tuple[str, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as place:
        lab = Path(place) / "lab.toml"
        lab.write_text(lab_text("rpc", [_CPU] * _HOSTS, memory="2 GiB"))
        for _ in range(turns):
            for count, rate in _llama(lab, gguf, programs).items():
                rates.setdefault(("llama.cpp", count), []).append(rate)
            for runtime in runtimes:
                for count, rate in _ours(Path(place), model, runtime).items():
                    rates.setdefault((runtime, count), []).append(rate)
    return [
        {"what": what, "sequences": count, "tokens_per_s": round(statistics.median(values), 2),
         "all": [round(value, 2) for value in values]}
        for (what, count), values in rates.items()
    ]  # fmt: skip


def _llama(lab: Path, gguf: Path, programs: Path) -> dict[int, float]:
    output = lab.with_suffix(".jsonl")
    servers = ",".join(f"host{number}:{_PORT}" for number in range(_HOSTS))
    serve = f"{shlex.quote(str(programs / 'ggml-rpc-server'))} -H 0.0.0.0 -p {_PORT} -t 1"
    bench = (
        f"{shlex.quote(str(programs / 'llama-batched-bench'))} -m {shlex.quote(str(gguf))} --rpc {servers} -ngl 99 "
        f"-t 1 -c 1024 -b 512 -npp {_PROMPT_TOKENS} -ntg {_NEW} -npl {','.join(map(str, _COUNTS))} "
        "--output-format jsonl"
    )
    script = f"if [ $RANK = 0 ]; then {serve} & sleep 5; {bench} > {shlex.quote(str(output))}; else exec {serve}; fi"
    with (
        lab_session(read_lab(lab)) as hosts,
        hosts.start(["sh", "-c", script], output=show, end_together="first") as run,
    ):
        run.wait(timeout_s=900)
    rows = [json.loads(line) for line in output.read_text().splitlines() if line.startswith("{")]
    return {row["pl"]: row["pl"] * row["tg"] / row["t"] for row in rows}


def _ours(place: Path, model: str, runtime: str) -> dict[int, float]:
    slots = -(-max(_COUNTS) // _HOSTS)
    body = {"prompt": _PROMPT, "max_tokens": _NEW, "temperature": 0, "ignore_eos": True}
    found = {}
    with served(model, _HOSTS, place, f"--set=slots={slots}", "--max-length", 128, "--runtime", runtime) as (_, within):
        for count in _COUNTS:
            ask(within, [body] * count, count)
            said = ask(within, [body] * count, count)
            found[count] = sum(len(answer["came_s"]) for answer in said["answers"]) / said["seconds"]
    return found
