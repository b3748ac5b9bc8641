"""What runs on every host of a lab: one run in which recording goes on and off, block by block.

    blocks    on off off on on off off on ...      pairs (on, off): the order is balanced
    in each   . . . . m m m m m m                  the first microbatches, after the switch, are left out

Both halves of a pair lie within seconds of each other in one process, so a machine that drifts does so for both.
"""

import io
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.nn import functional

import penstock
from benchmarks.tracing.cases import HOSTS, TINY
from penstock.deploy.worker import work
from penstock.engine.job import StagesJob
from penstock.engine.observer import ProfileWindow
from penstock.engine.tracers import StageTracer
from penstock.group.entry import join_torchrun
from penstock.group.world import World
from penstock.pipeline import Pipeline
from penstock.plan.schedule.schedules import Action
from penstock.terminal.live import LiveView
from penstock.wire import FEEDER
from penstock.zoo.models.models import load_model

BLOCK, LEFT_OUT = 10, 4
_PICTURES = 200


def is_on(block: int) -> bool:
    """Return whether a block is recorded: on, off, off, on, and again.

    >>> [is_on(block) for block in range(8)]
    [True, False, False, True, True, False, False, True]
    """
    return block % 4 in (0, 3)


class Blocks:
    """Switches one process's recording as its stage's microbatches come, and keeps what each block took.

    With `profile` torch's profiler in place of the recording, of every microbatch of a block.
    """

    def __init__(self, *, profile: bool = False) -> None:
        self._profile = profile
        self.tracers: list[StageTracer] = []
        self.streams: list[list[tuple[float, float]]] = []  # of each block: seconds, and CPU seconds of the process
        self._began = (0.0, 0.0)

    def come_to(self, microbatch: int) -> None:
        """Do what is due before a microbatch."""
        block, place = divmod(microbatch, BLOCK)
        if place == 0:
            if block == 0:
                self.streams.append([])
            else:
                self.streams[-1].append(_since(self._began))
            for tracer in self.tracers:
                self._switch(tracer, is_on(block))
        elif place == LEFT_OUT:
            self._began = _now()

    def _switch(self, tracer: StageTracer, on: bool) -> None:
        if self._profile:
            # each block's own, since a window keeps only so many operations
            tracer.own.observer.profile = ProfileWindow(tracer.recorder, first=0, count=sys.maxsize) if on else None
        else:
            tracer.record(on)

    def follow(self) -> None:
        """Stand in the way of everything that this process's stages are told to do, and of what records them."""
        schedule, make = StagesJob.schedule, StageTracer.__init__

        def scheduled(job: StagesJob, rank: int) -> Iterator[Action]:
            for action in schedule(job, rank):
                self.come_to(action.microbatch)
                yield action

        def made(tracer: StageTracer, *args: Any, **options: Any) -> None:
            make(tracer, *args, **options)
            self.tracers.append(tracer)

        StagesJob.schedule = scheduled  # type: ignore[method-assign, assignment]
        StageTracer.__init__ = made  # type: ignore[method-assign, assignment]


def main() -> None:
    """Do what the session's JSON file says; every rank writes what its blocks took."""
    file = Path(sys.argv[1])
    session = json.loads(file.read_text())
    torch.set_num_threads(1)
    taken = _KINDS[session["kind"]](session, file.parent / "run")
    file.with_suffix(f".{taken[0]}.json").write_text(json.dumps(taken[1]))


def stream(session: dict[str, Any], folder: Path) -> tuple[int, list[tuple[float, float]]]:
    """Stream images through a stage on every host."""
    blocks = Blocks(profile=session["profile"])
    blocks.follow()
    with join_torchrun(followed=True) as world:
        if world.rank == FEEDER:
            _feed(world, session, folder)
        else:
            work(world)
    return world.rank, max(blocks.streams, key=len)  # the others are the first one, to warm up, and the end


def _feed(world: World, session: dict[str, Any], folder: Path) -> None:
    zoo = load_model(session["model"], whole=True)
    image = zoo.example_args[0][:1]
    with Pipeline(
        zoo.module, (image,), stages=world.transport.size, threads=1, weights=zoo.weights, world=world, trace=folder
    ) as pipe:
        for count in (2 * BLOCK, session["num_blocks"] * BLOCK):
            for _ in pipe.stream(image for _ in range(count)):
                pass


def train(session: dict[str, Any], folder: Path) -> tuple[int, list[tuple[float, float]]]:
    """Train two replicas of two stages; a block is a step."""
    zoo = load_model(session["model"], whole=True)
    images, labels = torch.randn(session["rows"], *zoo.example_args[0].shape[1:]), torch.zeros(session["rows"]).long()
    pipe = penstock.Pipeline(zoo.module.train(), images, stages=2, replicas=2, microbatches=4, threads=1, trace=folder)
    optimizer = pipe.optimizer(lambda parameters: torch.optim.AdamW(parameters, lr=3e-4))
    tracer = pipe.trainer.tracer
    if tracer is None:
        raise RuntimeError("nothing is traced here")
    taken = []
    for number in range(-4, session["num_blocks"]):  # the first ones make connections and buffers
        on = is_on(max(0, number))
        tracer.record(on)
        pipe.trainer.tracer = tracer if on else None
        began = _now()
        pipe.train_step(images, labels, loss_fn=functional.cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
        if number >= 0:
            taken.append(_since(began))
    pipe.trainer.tracer = tracer
    rank = int(pipe.trainer.world.rank)
    pipe.close()
    return rank, taken


def live() -> list[float]:
    """Draw the live view of four stages of this machine again and again; return the CPU seconds of each picture."""
    zoo = load_model(TINY, whole=True)
    image = zoo.example_args[0][:1]
    taken = []
    with Pipeline(zoo.module, (image,), stages=HOSTS, threads=1) as pipe:
        console = Console(file=io.StringIO(), force_terminal=True)
        view = LiveView(console, pipe.stage_states, total=40, unit="images")
        for _ in pipe.stream(image for _ in range(40)):
            view.advance()
        for _ in range(_PICTURES):
            time.sleep(0.05)  # as cold as between two pictures
            began_s = time.thread_time()
            console.print(view.render())
            taken.append(time.thread_time() - began_s)
    return taken


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _since(began: tuple[float, float]) -> tuple[float, float]:
    return time.perf_counter() - began[0], time.process_time() - began[1]


_KINDS = {"stream": stream, "training": train}

if __name__ == "__main__":
    main()
