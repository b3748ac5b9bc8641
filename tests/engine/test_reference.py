"""What a stage takes by itself, as a device that runs the whole model would come back to it."""

import hashlib
import threading
from typing import Any, cast

import pytest
import torch

from penstock.deploy.state import load_state
from penstock.engine.reference import measure_baseline
from penstock.runtime.eager import Runtime
from penstock.runtime.registry import StageRuntime
from penstock.tracing.record import RECORDING_BYTES
from penstock.transport.messages import DATA, Message
from penstock.zoo.weights.weights import ModuleWeights
from tests.processes import PROGRAMS, run_python
from tests.worlds import divided_tower, tower_inputs


def first_stage() -> Runtime:
    halves = divided_tower(2)
    program, weights = halves.programs[0][0], ModuleWeights(halves.model)
    return Runtime(program, {s.value.name: load_state(halves.graph, s, weights) for s in program.states})


def test_copied_runtime_has_separate_weights() -> None:
    runtime, inputs = first_stage(), tower_inputs(1)[0]
    copy = runtime.copied()
    with torch.inference_mode():
        expected = runtime({"batch": 2}, list(inputs))
        given = copy({"batch": 2}, list(inputs))
    assert all(torch.equal(a, b) for a, b in zip(expected, given, strict=True))
    assert copy.weight_bytes == runtime.weight_bytes > 0
    pairs = zip(runtime.bind({"batch": 2}).registers, copy.bind({"batch": 2}).registers, strict=True)
    assert all(a.data_ptr() != b.data_ptr() for a, b in pairs if isinstance(a, torch.Tensor))


class Counted:
    """A stage's runtime that lists itself, and each of its copies, when it runs."""

    def __init__(self, runtime: Runtime, ran: list["Counted"]) -> None:
        self._runtime, self._ran = runtime, ran
        self.program, self.device, self.weight_bytes = runtime.program, runtime.device, runtime.weight_bytes

    def copied(self) -> "Counted":
        return Counted(self._runtime.copied(), self._ran)

    def __call__(self, sizes: Any, inputs: Any) -> list[torch.Tensor]:
        self._ran.append(self)
        return self._runtime(sizes, inputs)


@pytest.mark.parametrize(("room", "expected"), [(2**26, 4), (2, 3), (1, 2), (0, 1)])
def test_copies_stand_in_for_the_other_stages(room: int, expected: int) -> None:
    ran: list[Counted] = []
    runtime = Counted(first_stage(), ran)
    message = Message(DATA, 0, (2,), list(tower_inputs(1)[0]))
    with torch.inference_mode():
        alone = measure_baseline(
            7, [cast(StageRuntime, runtime)], {0: message}, {0: 1}, others=3, alone_s=0.0,
            scratch_bytes=room * runtime.weight_bytes,
        )  # fmt: skip
    assert alone.stage == 7
    assert alone.seconds > 0
    assert len(set(ran)) == expected


def test_other_threads_do_not_count_as_stage_time() -> None:
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            hashlib.sha256(bytes(2**22))  # lets other threads run meanwhile

    others = [threading.Thread(target=work) for _ in range(2)]
    for other in others:
        other.start()
    try:
        message = Message(DATA, 0, (2,), list(tower_inputs(1)[0]))
        with torch.inference_mode():
            alone = measure_baseline(0, [first_stage()], {0: message}, {0: 1})
    finally:
        over.set()
        for other in others:
            other.join()
    # of one thread they cannot be more; those of the process would be nearly twice as many on two cores
    assert 0 < alone.cpu_s <= alone.seconds


@pytest.mark.long
@pytest.mark.fresh
def test_recording_memory_does_not_grow_with_cut_sets() -> None:
    # with a threshold of its own the allocator gives back what was freed; else it keeps up to 30 MB, each time another
    # number, where a stream would have left room
    allocator = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "131072"}
    ended = run_python(str(PROGRAMS / "recorded_microbatches.py"), deadline_s=120.0, env=allocator)
    assert ended.status == 0, ended.stderr
    assert int(ended.stdout) < RECORDING_BYTES
