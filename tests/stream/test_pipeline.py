"""Pipelines over real processes: the same numbers, and every way in which a stream may end."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import timm
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import ImageClassifierOutput

from penstock.errors import DeviceLost, RunError, UsageError
from penstock.group.entry import start_local
from penstock.group.world import World
from penstock.pipeline import Pipeline
from penstock.stream.streaming_pipeline import threads_per_stage
from tests.fewer import long
from tests.processes import PROGRAMS, Running, run_groups, run_python
from tests.worlds import poison, tower, tower_inputs

WIDTH = 16


@pytest.fixture(scope="module")
def vit() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=3, num_classes=10)
    return model.eval()


def images(*batches: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(batch, 3, 32, 32, generator=generator) for batch in batches]


def serially(model: nn.Module, inputs: list[Any]) -> list[Any]:
    """The reference: one process, the same microbatches, one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            return [model(x) for x in inputs]
    finally:
        torch.set_num_threads(threads)


def stumble(pipe: Pipeline) -> None:
    """A loop whose body fails."""
    for _ in pipe.stream(tower_inputs(20)):
        raise ZeroDivisionError


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6])
def test_the_same_bits_for_any_number_of_stages(world: World, vit: nn.Module, stages: int) -> None:
    inputs = images(3, 3, 3, 2, 1, 1, 1)
    with Pipeline(vit, (inputs[0],), stages=stages, threads=1, world=world) as pipe:
        assert len(pipe.cuts) == stages - 1
        for stream in (inputs, images(1, 1, 1, 1)):
            outputs = list(pipe.stream(stream))
            assert len(outputs) == len(stream)
            assert all(torch.equal(a, b) for a, b in zip(outputs, serially(vit, stream), strict=True))
        assert sum(stage.num_microbatches for stage in pipe.last_report.stages) == 4 * stages
        assert pipe.last_report.num_rows == 4
        states = [state for state in pipe.stage_states() if state.computes]
        assert len(states) == stages
        assert all(0 <= state.queue <= 4 and state.busy_s >= 0 for state in states)


def test_one_batch_of_any_size(world: World, vit: nn.Module) -> None:
    batch = images(7)[0]
    with Pipeline(vit, (batch[:3],), stages=2, threads=1, world=world) as pipe:
        assert torch.equal(pipe(batch, microbatch_size=3), torch.cat(serially(vit, list(batch.split(3)))))
        assert torch.equal(pipe(batch), torch.cat(serially(vit, list(batch.split(1)))))
        with pytest.raises(UsageError, match="batch is empty"):
            pipe(batch[:0])


def test_streams_that_end_early_or_badly_leave_the_pipe_ready(world: World) -> None:
    model, inputs = tower(), tower_inputs(40)
    expected = [model(*microbatch) for microbatch in inputs]

    def failing() -> Iterator[Any]:
        yield from inputs[:5]
        raise KeyError("no such image")

    with Pipeline(model, inputs[0], stages=3, threads=1, world=world) as pipe:

        def check() -> None:
            outputs = list(pipe.stream(inputs[:8]))
            assert all(torch.equal(a, b) for a, b in zip(outputs, expected[:8], strict=True))

        assert list(pipe.stream([])) == []
        for count, _ in enumerate(pipe.stream(inputs)):
            if count == 2:
                break
        check()
        with pytest.raises(KeyError, match="no such image"):
            list(pipe.stream(failing()))
        check()
        with pytest.raises(TypeError):
            list(pipe.stream(3))  # type: ignore[arg-type]
        check()
        with pytest.raises(ZeroDivisionError):
            stumble(pipe)
        check()
        too_large = tower_inputs(1, batch=3)[0]
        with pytest.raises(UsageError, match="batch 3 is larger than the example's 2"):
            list(pipe.stream([inputs[0], too_large]))
        with pytest.raises(UsageError, match="called with 1 positional inputs"):
            list(pipe.stream([inputs[0][0]]))
        check()
        first = pipe.stream(inputs)
        next(first)
        with pytest.raises(UsageError, match="another stream is running"):
            list(pipe.stream(inputs))
        first.close()  # type: ignore[attr-defined]
        check()
    with pytest.raises(UsageError, match="the pipeline is closed"):
        list(pipe.stream(inputs))
    pipe.close()


class Structured(nn.Module):
    """Keyword inputs, an input changed in place, and several outputs in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor, scale: Tensor | None = None) -> dict[str, Any]:
        x.mul_(2.0)
        y = torch.relu_(self.first(x)).masked_fill(mask, 0.0)
        z = self.second(y)
        if scale is not None:
            z = z * scale
        return {"last": z, "all": (x + 0, y.t()), "norm": z.norm()}


def test_keywords_structures_and_in_place_changes(world: World) -> None:
    torch.manual_seed(0)
    model = Structured().eval()
    calls = [
        {"x": torch.randn(2, WIDTH), "mask": torch.rand(2, WIDTH) > 0.5, "scale": torch.rand(2, 1)} for _ in range(4)
    ]
    expected = [model(**{name: value.clone() for name, value in call.items()}) for call in calls]
    before = [call["x"].clone() for call in calls]
    with Pipeline(model, (), {k: v.clone() for k, v in calls[0].items()}, stages=2, threads=1, world=world) as pipe:
        outputs = list(pipe.stream(calls))
        with pytest.raises(UsageError, match=r"\[\]"):
            pipe(microbatch_size=1, **calls[0])
    for given, wanted in zip(outputs, expected, strict=True):
        assert given.keys() == wanted.keys()
        assert torch.equal(given["last"], wanted["last"])
        assert torch.equal(given["norm"], wanted["norm"])
        assert all(torch.equal(a, b) for a, b in zip(given["all"], wanted["all"], strict=True))
    assert all(torch.equal(call["x"], x) for call, x in zip(calls, before, strict=True)), "the caller's input changed"


class Output(nn.Module):
    """Gives what transformers' models give."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, 3)

    def forward(self, pixel_values: Tensor) -> ImageClassifierOutput:
        hidden = torch.relu(self.first(pixel_values))
        return ImageClassifierOutput(logits=self.second(hidden), hidden_states=(pixel_values * 1, hidden))


def test_model_outputs(world: World) -> None:
    model = Output().eval()
    x = torch.randn(4, WIDTH)
    with Pipeline(model, (), {"pixel_values": x}, stages=2, threads=1, world=world) as pipe:
        (output,) = pipe.stream([{"pixel_values": x}])
        whole = pipe(pixel_values=x, microbatch_size=2)
    assert isinstance(output, ImageClassifierOutput)
    assert torch.equal(output.logits, model(x).logits)
    assert len(output.hidden_states) == 2
    assert torch.allclose(whole.logits, output.logits)


def test_threads_per_stage(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.stream.streaming_pipeline.available_cores", lambda: 12)
    assert threads_per_stage(world) == 4
    with Pipeline(tower(), tower_inputs(1)[0], stages=2, threads=1, world=world) as pipe:
        assert pipe._streaming.threads == 1
        assert pipe._streaming.deployment.pipelines[0].job.threads == 1


def test_two_pipelines_at_once_and_a_worker_that_is_killed(capfd: pytest.CaptureFixture[str]) -> None:
    model, inputs = tower(), tower_inputs(30)
    with Pipeline(model, inputs[0], stages=1, threads=1) as one, Pipeline(model, inputs[0], stages=1) as other:
        pairs = list(zip(one.stream(inputs), other.stream(reversed(inputs)), strict=True))
        for (a, b), x, y in zip(pairs, inputs, reversed(inputs), strict=True):
            assert torch.equal(a, model(*x))
            assert torch.equal(b, model(*y))
        assert one._streaming.world.workers is not None
        os.kill(one._streaming.world.workers.pids[0], signal.SIGKILL)
        begin = time.perf_counter()
        with pytest.raises(DeviceLost, match=r"worker 1 was killed by signal 9 .*\(stage 0\)"):
            list(one.stream(inputs))
        assert time.perf_counter() - begin < 3.0
        begin = time.perf_counter()
        one.close()
        assert time.perf_counter() - begin < 2.0
        with pytest.raises(ZeroDivisionError), other:
            stumble(other)
    assert "Traceback" not in capfd.readouterr().err


SCRIPT = """
import torch, penstock
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).eval()
inputs = [torch.randn(2, 8) for _ in range(5)]
with penstock.Pipeline(model, (inputs[0],), stages=1, threads=1) as pipe:
    outputs = list(pipe.stream(inputs))
assert all(torch.equal(a, model(b)) for a, b in zip(outputs, inputs))
print("fine")
"""


@pytest.mark.board
@pytest.mark.parametrize("way", ["stdin", long("-c")])
def test_script_without_main_guard_streams(way: str) -> None:
    arguments = ["-c", SCRIPT] if way == "-c" else ["-"]
    finished = run_python(*arguments, stdin=SCRIPT if way == "stdin" else "", deadline_s=60.0)
    assert (finished.status, finished.stdout) == (0, "fine\n"), finished.stderr


def test_workers_end_when_their_parent_is_killed() -> None:
    with Running([sys.executable, str(PROGRAMS / "endless_stream.py")], deadline_s=60.0) as parent:
        assert parent.line() == "running"
        workers = parent.children()
        assert len(workers) == 1
        parent.kill()
        _, alive = psutil.wait_procs(workers, timeout=10.0)
        assert not alive


@pytest.mark.board
def test_pipeline_works_under_torchrun() -> None:
    script = str(PROGRAMS / "stream_under_torchrun.py")
    finished = run_python(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, deadline_s=120.0
    )
    assert finished.status == 0, finished.stderr
    assert finished.stdout.count("fine") == 2


def test_a_process_without_a_stage_is_refused() -> None:
    ended = run_groups(PROGRAMS / "idle_rank.py", [(3, [])], 120.0)
    assert [process.status for group in ended for process in group] == [0, 0, 0]


@pytest.mark.fresh
def test_failed_start_ends_soon() -> None:
    x = tower_inputs(1)[0]
    with pytest.raises(UsageError, match="needs the model"):
        Pipeline(None, x)
    with pytest.raises(UsageError):
        Pipeline(tower(), x, stages=500)
    begin = time.perf_counter()
    with pytest.raises(RunError, match="worker 1 ended with status 1 before"):
        start_local(1, {"PYTHONMALLOC": "nonsense"})
    assert time.perf_counter() - begin < 30.0


def test_a_failing_operation_ends_the_workers_and_is_named() -> None:
    inputs = tower_inputs(12)
    inputs[6] = poison(inputs[6], 5)
    threads = threading.active_count()
    named = r"worker 2: stage 1, microbatch 6: operation embedding"
    with pytest.raises(RunError, match=named), Pipeline(tower(), inputs[0], stages=2, threads=1) as pipe:
        list(pipe.stream(inputs))
    assert threading.active_count() <= threads
