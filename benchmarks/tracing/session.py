"""What runs on every host of a lab: one traced stream, after what is known of it has been written down."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import penstock
from benchmarks.tracing.cases import HOSTS, shares_of_work
from penstock.deploy.split import SplitStage
from penstock.deploy.worker import work
from penstock.graph.cuts import Cuts
from penstock.graph.graph import count_work
from penstock.group.entry import join_torchrun
from penstock.group.world import World
from penstock.pipeline import Pipeline
from penstock.report.stream_account import make_account
from penstock.tracing.trace import read_run
from penstock.wire import FEEDER
from penstock.zoo.models.models import ZooModel, load_model

_BURN = "while True: pass"


def main() -> None:
    """Do what the session's JSON file says and write the result beside it; other ranks work."""
    file = Path(sys.argv[1])
    session = json.loads(file.read_text())
    with join_torchrun(followed=True) as world, _busy(session["busy"] == world.rank):
        if world.rank != FEEDER:
            work(world)
            return
        result = account_for(world, session, Path(session["folder"] or file.parent / "run"))
        file.with_suffix(".result.json").write_text(json.dumps(result))


@contextlib.contextmanager
def _busy(wanted: bool) -> Iterator[None]:
    """Let another process of this host compute all the time."""
    if not wanted:
        yield
        return
    other = subprocess.Popen([sys.executable, "-c", _BURN])
    try:
        yield
    finally:
        other.kill()
        other.wait()


def account_for(world: World, session: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Stream once to warm up and once to count, and return the account."""
    zoo = load_model(session["model"], whole=True)
    measured = _measure_before(world, zoo, folder) if session["name"] == "tiny model" else {}
    with _pipeline(world, zoo, session, folder) as pipe:
        known = _know(pipe) | measured
        for count in (2 * HOSTS, session["num_images"]):
            for _ in pipe.stream(_images(zoo, count)):
                pass
    account = make_account(read_run(folder))
    return {
        "known": known, "num_times": account.num_times, "speedup": account.speedup, "alone_s": account.baseline_s,
        "lines": {line.key: line.times for line in account.lines}, "first": account.largest.key,
        "why": {line.key: line.why for line in account.lines},
    }  # fmt: skip


def _pipeline(world: World, zoo: ZooModel, session: dict[str, Any], folder: Path | None) -> Pipeline:
    return Pipeline(
        zoo.module, (zoo.example_args[0][:1],), stages=HOSTS, cuts=session["cuts"] or None, threads=1,
        weights=zoo.weights, world=world, trace=folder,
    )  # fmt: skip


def _images(zoo: ZooModel, count: int) -> Iterator[Any]:
    return (zoo.example_args[0][:1] for _ in range(count))


def _know(pipe: Pipeline) -> dict[str, float]:
    """Describe what the settings say: the largest stage's part of the work, and what crosses the cuts."""
    graph = pipe.graph
    sizes = graph.sizes(1)
    bounds = [0, *(cut.position for cut in pipe.cuts), len(graph.ops)]
    parts = shares_of_work(count_work(graph, sizes), bounds)
    named = Cuts(graph).find_all([cut.name for cut in pipe.cuts])
    return {"share": max(parts), "message_bytes": max(cut.num_bytes(sizes) for cut in named)}


def _measure_before(world: World, zoo: ZooModel, folder: Path) -> dict[str, float]:
    """Measure the model's stages in turn on this host, and what messages cost a host that feeds and holds a stage.

    In stages, as the account has them: the model's own module takes longer. Counted operations do not say what part of
    the seconds the largest stage has, where operations are this small.
    """
    torch.set_num_threads(1)
    image = zoo.example_args[0][:1]
    stages = penstock.split(zoo.module, (image,), stages=HOSTS, weights=zoo.weights).stages
    for _ in range(20):
        _run_stages(stages, image)
    taken, begin_s = [], time.perf_counter()
    while time.perf_counter() - begin_s < 1.0:
        taken.append(_run_stages(stages, image))
    alone_s = (time.perf_counter() - begin_s) / len(taken)
    cpu_s = [sum(column) for column in zip(*taken, strict=True)]
    overhead_cpu_s = _feeding_cpu_s(world, folder.with_name(f"{folder.name}, before"))
    return {"alone_s": alone_s, "share": max(cpu_s) / sum(cpu_s), "overhead_cpu_s": overhead_cpu_s}


def _run_stages(stages: Sequence[SplitStage], image: Tensor) -> list[float]:
    """Run the stages on an image; return the CPU seconds of each."""
    tensors: Sequence[Tensor] = (image,)
    taken = []
    for stage in stages:
        began_s = time.thread_time()
        tensors = stage(*tensors)
        taken.append(time.thread_time() - began_s)
    return taken


def _feeding_cpu_s(world: World, folder: Path, num: int = 300) -> float:
    """Return what a host that feeds, holds a stage and collects takes beside computing and loading; messages are small.

    With messages and layers of the tiny model's size; those of `measure_messages` are larger, and fill the caches.
    """
    layers = [layer for _ in range(8) for layer in (nn.Linear(192, 768), nn.Linear(768, 192))]
    model = nn.Sequential(*layers).eval()
    example = torch.zeros(17, 192)  # a message as large as the tiny model's
    with Pipeline(model, (example,), cuts=["8:before"], threads=1, world=world, trace=folder) as pipe:
        for count in (20, num):
            for _ in pipe.stream(example for _ in range(count)):
                pass
        stage = pipe.last_report.stages[0]
    load_cpu_s = sum(span.cpu_s for span in read_run(folder).spans if span.kind == "load")
    return (stage.cpu_s - stage.compute_cpu_s - load_cpu_s) / num


if __name__ == "__main__":
    main()
