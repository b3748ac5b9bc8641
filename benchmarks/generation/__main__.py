"""Run with `python -m benchmarks.generation --json FILE [--model hf:FOLDER] [--quick] [--only PART]`.

`equal` and `invariant` need nothing but this repository. `--model` is a folder with a language model and its tokenizer,
for the speeds: one process beside `model.generate`, and, as root, one and four hosts of a lab with 0.35 of a core each;
and for `fits`: hosts without enough memory for the whole model.
`--runtime` is that of the speeds.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.generation.fits import fits
from benchmarks.generation.prompt_speed import prompt_speed
from benchmarks.labs import generate, lab_text
from penstock.generate.generator import Generator
from tests.generate.decoders import FAMILIES, decoder, expected, prompts

_LENGTHS = (5, 1, 33, 70)
_NEW = 40
_CPU = 0.35
_SLOTS = 4  # of a lane: four lanes of them are 16 requests
_PROMPTS = ("The capital of France is", "Once upon a time there was", "Water boils at", "A penstock is a pipe that")


def main() -> None:
    """Compare tokens, measure speeds, and write rows and summary."""
    parser = argparse.ArgumentParser(prog="benchmarks.generation", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where to write rows and summary")
    parser.add_argument("--model", help="hf:FOLDER, for speeds")
    parser.add_argument("--quick", action="store_true", help="one family of eight, 8 requests")
    parser.add_argument("--only", choices=["equal", "alone", "lab", "prompts", "fits"], help="one part")
    parser.add_argument("--runtime", default="eager", help="such as onnxruntime, for speeds")
    parser.add_argument("--cut", default="balanced", help="policy of the cuts for prompts, such as equal-blocks")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    if given.only in {None, "equal"}:
        found["families"] = [family(name) for name in list(FAMILIES)[:: 8 if given.quick else 1]]
        found["invariant"] = invariant(20 if given.quick else 200)
    if given.model and given.only in {None, "alone"}:
        found["alone"] = beside_transformers(given.model, given.runtime)
    if given.model and given.only in {None, "lab"}:
        found["lab"] = in_lab(given.model, (1, 4), 8 if given.quick else 16, given.runtime)
    if given.model and given.only in {None, "prompts"}:
        found["prompts"] = prompt_speed(given.model, (1, 4), given.runtime, given.cut)
    if given.model and given.only in {None, "fits"}:
        with tempfile.TemporaryDirectory() as place:
            found["fits"] = fits(given.model, _PROMPTS[0], Path(place))
    found["summary"] = summarize(found)
    given.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found["summary"]))


def summarize(found: dict[str, Any]) -> dict[str, Any]:
    """Count what is equal, and divide speeds."""
    summary: dict[str, Any] = {}
    if "families" in found:
        summary |= {
            "families": len(found["families"]),
            "equal": sum(row["equal"] for row in found["families"]),
            "invariant": found["invariant"]["equal"],
            "requests": found["invariant"]["requests"],
        }
    summary |= {f"vs_hf_{row['sequences']}": row["ratio"] for row in found.get("alone", ())}
    if "lab" in found:
        one, four = found["lab"]
        summary["speedup_4"] = round(four["tokens_per_s"] / one["tokens_per_s"], 3)
        summary["equal_in_lab"] = one["texts"] == four["texts"]
    if "prompts" in found:
        one, four = (row["prompt_tokens_per_s"] for row in found["prompts"])
        summary |= {"prompt_tokens_per_s": one, "prompt_tokens_per_s_4": four, "prompt_speedup_4": round(four / one, 3)}
    if "fits" in found:
        summary |= {name: found["fits"][name] for name in ("host_mib", "needs_mib", "one_host", "stages")}
        summary["equal_where_one_does_not_fit"] = found["fits"]["equal"]
    return summary


def family(name: str) -> dict[str, Any]:
    """Generate with one to four stages, and compare with `model.generate`, and log-probabilities with each other."""
    model, given = decoder(name), prompts(*_LENGTHS)
    row: dict[str, Any] = {"family": name, "equal": False, "error": None}
    # a benchmark of coverage records whatever goes wrong
    try:
        wanted = [expected(model, prompt, max_new_tokens=_NEW, do_sample=False) for prompt in given]
        logprobs = []
        equal = True
        for stages in (1, 2, 3, 4):
            with Generator(model, stages=stages, slots=3, max_length=128) as generator:
                requests = [generator.submit(prompt, max_new_tokens=_NEW) for prompt in given]
                equal &= [request.result() for request in requests] == wanted
                logprobs.append([request.logprobs for request in requests])
        row["equal"] = equal and all(each == logprobs[0] for each in logprobs)
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"[:300]
    return row


def invariant(num_requests: int) -> dict[str, Any]:
    """Answer requests alone, and together in random order through one, two and four stages; compare all bits."""
    model, choose = decoder("llama"), random.Random(0)
    given = prompts(*(choose.randrange(1, 80) for _ in range(num_requests)))
    new = [choose.randrange(1, 40) for _ in given]
    found = []
    for stages, together in ((1, False), (1, True), (2, True), (4, True)):
        with Generator(model, stages=stages, slots=4, max_length=128) as generator:
            order = list(range(num_requests))
            choose.shuffle(order)
            requests = {}
            for index in order:
                requests[index] = generator.submit(
                    given[index], max_new_tokens=new[index], do_sample=index % 2 == 1, seed=index
                )
                if not together:
                    requests[index].result()
            found.append([(requests[i].result(), requests[i].logprobs) for i in range(num_requests)])
    return {"requests": num_requests, "equal": all(each == found[0] for each in found)}


def beside_transformers(name: str, runtime: str) -> list[dict[str, Any]]:
    """Measure one process with one thread beside `model.generate`, one sequence and eight, in turns."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = name.removeprefix("hf:")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = []
    for count in (1, 8):
        ids = torch.tensor([tokenizer(_PROMPTS[0])["input_ids"]] * count)
        settings: dict[str, Any] = {"max_new_tokens": 32, "min_new_tokens": 32, "do_sample": False}
        ours, theirs = [], []
        with Generator(model, stages=1, slots=count, lanes=1, max_length=128, runtime=runtime) as generator:
            generator.generate(ids, **settings)
            for _ in range(3):
                begin = time.perf_counter()
                expected_ids = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
                middle = time.perf_counter()
                found = generator.generate(ids, **settings)
                end = time.perf_counter()
                theirs.append(count * 32 / (middle - begin))
                ours.append(count * 32 / (end - middle))
        rows.append({
            "sequences": count, "tokens_per_s": max(ours), "transformers_tokens_per_s": max(theirs),
            "ratio": round(max(ours) / max(theirs), 3), "equal": bool(torch.equal(expected_ids, found)),
        })  # fmt: skip
    return rows


def in_lab(name: str, counts: tuple[int, ...], num_requests: int, runtime: str) -> list[dict[str, Any]]:
    """Measure `penstock generate` on so many hosts of a lab, all with as many sequences in flight."""
    rows = []
    asked = [_PROMPTS[i % len(_PROMPTS)] for i in range(num_requests)]
    with tempfile.TemporaryDirectory() as place:
        for count in counts:
            lab = Path(place) / "lab.toml"
            lab.write_text(lab_text("generation", [_CPU] * count, memory="4 GiB"))
            said = generate(
                lab, name, asked, "--stages", count, "--set", f"slots={_SLOTS}", "--max-new-tokens", 24,
                "--max-length", 128, "--runtime", runtime,
            )  # fmt: skip
            rows.append({"hosts": count, "requests": num_requests, "tokens_per_s": said["tokens_per_s"],
                         "texts": [row["text"] for row in said["rows"]]})  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
