"""A hundred random mishaps in short streams.

Each ends in a named error in time or in a completed stream; what was written until then is right, in
order and without a gap; nothing is left behind (see conftest).
"""

import json
import os
import random
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import psutil
import pytest
import torch
from torch import Tensor, nn

from penstock.deploy.deployment import Deployment
from penstock.engine.driver import Microbatch
from penstock.errors import DeviceLost, PenstockError, RunError
from penstock.group.entry import start_local
from penstock.pipeline import Pipeline
from penstock.recipes.predictions import PredictionFile
from penstock.transport.faulty import FAULTS_VARIABLE, Fault, write_faults
from tests.fewer import first
from tests.worlds import Divided, divided_tower, memory_world, poison, tower_inputs

NUM_MICROBATCHES = 10
NUM_WORKERS = 3
MessageKind = Literal["drop", "delay", "duplicate", "corrupt", "close"]
MESSAGE_KINDS: list[MessageKind] = ["drop", "delay", "duplicate", "corrupt", "close"]


@pytest.fixture(scope="module")
def thirds() -> Divided:
    return divided_tower(3)


def run(
    deployment: Deployment, divided: Divided, path: Path, poisoned: tuple[int, int] | None = None
) -> PenstockError | None:
    """Stream into a file and close; check what is in the file whatever happens, and give what did."""
    inputs = tower_inputs(NUM_MICROBATCHES)
    with torch.no_grad():
        expected = [divided.model(*microbatch) for microbatch in inputs]
    if poisoned is not None:
        inputs[poisoned[0]] = poison(inputs[poisoned[0]], poisoned[1])

    def feed() -> Iterator[Microbatch]:
        for x, rows in inputs:
            yield [x, rows], {"batch": len(x)}

    failure = None
    try:
        with PredictionFile(path) as file:
            for index, (output,) in enumerate(deployment.stream(feed())):
                assert torch.equal(output, expected[index])
                file.write({"image": str(index), "prediction": float(output.sum())})
        deployment.close()
    except PenstockError as error:
        failure = error
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    assert rows == [{"image": str(i), "prediction": float(expected[i].sum())} for i in range(len(rows))]
    assert failure is not None or len(rows) == NUM_MICROBATCHES
    return failure


@pytest.mark.parametrize("seed", first(22, range(88)))
def test_faults_over_memory_transport_end_in_time(thirds: Divided, tmp_path: Path, seed: int) -> None:
    chosen = random.Random(seed)
    kind = chosen.choice([*MESSAGE_KINDS, "exception"])
    microbatch = chosen.randrange(NUM_MICROBATCHES)
    rank = chosen.randint(0, NUM_WORKERS)
    faults = []
    if kind != "exception":
        faults = [Fault(kind=kind, rank=rank, message=microbatch, delay_s=0.05, seed=seed)]  # type: ignore[arg-type]
    poisoned = (microbatch, max(0, 2 * rank - 1)) if kind == "exception" else None
    begin = time.perf_counter()
    with memory_world(NUM_WORKERS, faults) as world:
        deployment = thirds.deploy(world.feeder, stall_s=0.3)
        error = run(deployment, thirds, tmp_path / "rows", poisoned)
        if error is not None:
            deployment.close()
    assert time.perf_counter() - begin < 5.0
    check(error, kind)


def check(error: PenstockError | None, kind: str) -> None:
    """Only what does no harm may pass: a slow message, or one repeated behind all others."""
    if error is None:
        assert kind in {"delay", "duplicate"}
    else:
        assert kind != "delay"
        assert "stage" in str(error) or "connection" in str(error)


REAL = ["stop", "kill", "exception", *MESSAGE_KINDS, "stop", "kill", "kill", "exception"]


@pytest.mark.parametrize("number", first(4, range(len(REAL))), ids=REAL)
def test_faults_over_processes_end_in_time(thirds: Divided, tmp_path: Path, number: int) -> None:
    chosen = random.Random(number)
    kind = REAL[number]
    rank = chosen.choice([1, 2])
    microbatch = chosen.randrange(NUM_MICROBATCHES)
    faults = []
    if kind in MESSAGE_KINDS:
        faults = [Fault(kind=kind, rank=rank, message=microbatch, delay_s=0.5, seed=number)]
    world = start_local(2, {FAULTS_VARIABLE: write_faults(faults)})
    world.reason_s = 2.0
    assert world.workers is not None
    victim = psutil.Process(world.workers.pids[rank - 1])
    try:
        deployment = thirds.deploy(world, stall_s=3.0 if kind in MESSAGE_KINDS else 60.0)
        if kind in {"stop", "kill"}:
            victim.send_signal(signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
        begin = time.perf_counter()
        poisoned = (microbatch, chosen.choice([0, 2, 4])) if kind == "exception" else None
        error = run(deployment, thirds, tmp_path / "rows", poisoned)
        assert time.perf_counter() - begin < 12.0
        check(error, kind)
        if kind in {"stop", "kill"}:
            assert isinstance(error, DeviceLost)
            assert str(error).startswith(f"worker {rank}")
        if error is None:
            world.dismiss()
        else:
            deployment.abandon()
    finally:
        world.close(0.0 if world.health.failure is not None else 5.0)


class Hungry(nn.Module):
    """Asks for memory in proportion to its input's second row count."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(torch.relu(self.first(x)))
        outer = y.reshape(-1, 1) * y.reshape(1, -1)
        result: Tensor = outer.sum(dim=1).reshape(y.shape)
        return result


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="limits of other processes are Linux's")
def test_a_worker_out_of_memory_is_named() -> None:
    rows = 4096  # the product takes a gigabyte
    with Pipeline(Hungry().eval(), (torch.zeros(rows, 4),), stages=2, threads=1) as pipe:
        assert pipe._streaming.world.workers is not None
        list(pipe.stream([torch.ones(2, 4)]))
        for pid in pipe._streaming.world.workers.pids:
            limit = psutil.Process(pid).memory_info().vms + 2**28
            resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))
        with pytest.raises(RunError, match=r"stage \d, microbatch 0: operation \w+ failed: .*memory"):
            list(pipe.stream([torch.ones(rows, 4)]))
        assert os.environ.get(FAULTS_VARIABLE) is None
