"""Run with `python -m benchmarks.compiled --json FILE [--kind inference|training] [--only TEXT]`.

The runtime `compiled` beside `eager` on the CPU, one thread: outputs of 20 architectures, and one training step of 10
in two stages with two microbatches, without dropout. Errors are relative to eager. Speeds are medians: of CPU
seconds of calls in turns for inference, of steps for training, eager before and after compiled. Seconds of the first
call or training, which compiles, are apart. `--only` selects architectures whose name contains a text.
"""

import argparse
import json
import logging
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.coverage import ours
from benchmarks.coverage.architectures import Architecture, architectures
from benchmarks.coverage.training import loss_of, without_dropout
from penstock.deploy.state import load_state
from penstock.graph.call import bind_inputs
from penstock.graph.capture import capture
from penstock.graph.cuts import divide
from penstock.measure.profiler import relative_error
from penstock.runtime.registry import EAGER, RuntimeChoice
from penstock.train.captured import Captured
from penstock.zoo.weights.weights import ModuleWeights
from tests.learners import sgd
from tests.trainers import errors, train

INFERENCE = (
    "timm:deit_tiny_patch16_224", "timm:swin_tiny_patch4_window7_224", "timm:resnet18", "timm:mobilenetv3_small_100",
    "timm:convnext_atto", "timm:mixer_s32_224", "timm:levit_128s", "timm:repvgg_a0", "hf:BertConfig", "hf:AlbertConfig",
    "hf:GPT2Config", "hf:GPTNeoXConfig", "hf:LlamaConfig", "hf:Qwen3Config", "hf:MistralConfig", "hf:T5Config",
    "hf:BartConfig", "hf:WhisperConfig", "hf:ViTConfig", "hf:CLIPConfig",
)  # fmt: skip
TRAINING = (
    "timm:resnet18", "timm:mixer_s32_224", "hf:BertConfig", "hf:AlbertConfig", "hf:GPT2Config", "hf:LlamaConfig",
    "hf:T5Config", "hf:BartConfig", "hf:ViTConfig", "hf:SwinConfig",
)  # fmt: skip
_CLOSE, _TURNS, _ROWS = 1e-5, 9, 4
_COMPILED = RuntimeChoice("compiled")


def main() -> None:
    """Measure every architecture, write the rows and the summary."""
    parser = argparse.ArgumentParser(prog="benchmarks.compiled", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where to write rows and summary")
    parser.add_argument("--only", default="", help="only architectures whose name contains this")
    parser.add_argument("--kind", choices=("inference", "training"), help="only one of the two")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    known = {architecture.name: architecture for architecture in architectures()}
    rows = []
    for kind, names, measure in (("inference", INFERENCE, infer), ("training", TRAINING, step)):
        for name in names if options.kind in {None, kind} else ():
            if options.only not in name:
                continue
            rows.append({"kind": kind, "architecture": name} | _tried(measure, known[name]))
            print(json.dumps(rows[-1]), flush=True)
            options.json.write_text(json.dumps({"rows": rows, "summary": summarize(rows)}, indent=1) + "\n")
    print(json.dumps(summarize(rows)))


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Count the close ones of each kind; ratios are times of eager over times of compiled."""
    found: dict[str, Any] = {}
    for kind in dict.fromkeys(row["kind"] for row in rows):
        own = [row for row in rows if row["kind"] == kind]
        measured = [row for row in own if row["refused"] is None]
        speeds = sorted(row["speed"] for row in measured)
        found[kind] = {
            "architectures": len(own),
            "close": sum(row["error"] < _CLOSE for row in measured),
            "largest_error": max((row["error"] for row in measured), default=None),
            "speed": {"least": speeds[0], "median": statistics.median(speeds), "most": speeds[-1]} if speeds else None,
            "compile_s": sum(row["compile_s"] for row in measured),
        }
    return found


def _tried(measure: Callable[[Architecture], dict[str, Any]], architecture: Architecture) -> dict[str, Any]:
    torch.manual_seed(0)
    # a benchmark of coverage records whatever goes wrong
    try:
        return {"refused": None} | measure(architecture)
    except Exception as error:
        return {"refused": ours.one_line(error)}


def infer(architecture: Architecture) -> dict[str, Any]:
    """Return the largest error of the outputs, and how many times as fast as eager a compiled model is."""
    model, inputs = architecture.build().eval(), architecture.inputs(_ROWS)
    graph = capture(model, (), inputs)
    program = divide(graph, [])[0]
    weights = {state.value.name: load_state(graph, state, ModuleWeights(model)) for state in graph.states}
    eager, compiled = (choice.load(program, weights) for choice in (EAGER, _COMPILED))
    tensors, sizes = bind_inputs(graph, (), inputs)
    with torch.inference_mode():
        begin = time.perf_counter()
        outputs = compiled(sizes, tensors)
        compile_s = time.perf_counter() - begin
        pairs = zip(eager(sizes, tensors), outputs, strict=True)
        error = max(relative_error(x, y) for x, y in pairs if x.is_floating_point())
        return {"error": error, "compile_s": compile_s} | _in_turns(
            lambda: eager(sizes, tensors), lambda: compiled(sizes, tensors)
        )


def step(architecture: Architecture) -> dict[str, Any]:
    """Return the largest error of a step's loss, gradients and weights, and the speed of the last of its steps."""
    model, inputs = without_dropout(architecture.build().train()), architecture.inputs(_ROWS)
    captured = Captured(model, (), {name: tensor[:2] for name, tensor in inputs.items()})

    def run(choice: RuntimeChoice, steps: int) -> tuple[Any, float]:
        """Train for n steps; returns the results, and the median seconds of a step after the first."""
        begins: list[float] = []

        def loss(output: Any, labels: Any) -> Any:
            begins.append(time.perf_counter())
            return loss_of(output, labels)

        batches = [(inputs, torch.zeros(_ROWS))] * steps
        found = train(captured, 2, batches, sgd, loss, microbatches=2, stages=2, runtime=choice)
        return found, statistics.median(b - a for a, b in zip(begins[2::2], begins[4::2], strict=False))

    wanted, _ = run(EAGER, 3)
    begin = time.perf_counter()
    given, _ = run(_COMPILED, 3)
    compile_s = time.perf_counter() - begin
    error = max(abs(given[0][0] / wanted[0][0] - 1), *(max(errors(wanted[i], given[i]).values()) for i in (1, 2)))
    before_s, compiled_s, after_s = (run(choice, _TURNS)[1] for choice in (EAGER, _COMPILED, EAGER))
    eager_s = (before_s + after_s) / 2
    return {
        "error": error, "speed": eager_s / compiled_s, "eager_s": eager_s, "compiled_s": compiled_s,
        "compile_s": compile_s,
    }  # fmt: skip


def _in_turns(eager: Callable[[], Any], compiled: Callable[[], Any]) -> dict[str, Any]:
    seconds: list[tuple[float, float]] = []
    for _ in range(_TURNS):
        times = []
        for call in (eager, compiled):
            begin = time.process_time()
            call()
            times.append(time.process_time() - begin)
        seconds.append((times[0], times[1]))
    eager_s, compiled_s = (statistics.median(column) for column in zip(*seconds, strict=True))
    return {"speed": eager_s / compiled_s, "eager_s": eager_s, "compiled_s": compiled_s}


if __name__ == "__main__":
    main()
