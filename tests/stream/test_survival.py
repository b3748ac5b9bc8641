"""Streams that go on without a device that was lost, and with one that comes: results once, in order, the same bits."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from penstock.deploy import jobs, state
from penstock.deploy.run_options import OnLoss
from penstock.errors import DeviceLost, RunError, UsageError
from penstock.graph.ops import State
from penstock.group.entry import start_local
from penstock.group.world import World
from penstock.pipeline import Pipeline
from tests.fewer import long
from tests.processes import PROGRAMS, ROOT, free_port, run_groups
from tests.worlds import Tower, tower, tower_inputs

pytestmark = pytest.mark.usefixtures("one_thread")


def world_of(pipe: Pipeline) -> World:
    return pipe._streaming.world


def pids_of(pipe: Pipeline) -> list[int]:
    workers = world_of(pipe).workers
    assert workers is not None
    return workers.pids


def feed(num: int, at: dict[int, Callable[[], None]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Microbatches in one buffer that is used again, with things that happen in between."""
    x, rows = (tensor.clone() for tensor in tower_inputs(1)[0])
    for index, (own_x, own_rows) in enumerate(tower_inputs(num)):
        at.get(index, lambda: None)()
        x.copy_(own_x)
        rows.copy_(own_rows)
        yield x, rows
        time.sleep(0.002)


def check(outputs: list[Tensor], model: Tower) -> None:
    with torch.no_grad():
        expected = [model(*each) for each in tower_inputs(len(outputs))]
    assert all(torch.equal(found, wanted) for found, wanted in zip(outputs, expected, strict=True))


def test_stream_survives_two_lost_devices(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model, sent = tower(), state.send_state
    names: list[set[str]] = []

    def sending(transport: object, states: list[State], *args: object) -> None:
        names.append({each.source for each in states})
        sent(transport, states, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(jobs, "send_state", sending)
    with Pipeline(model, tower_inputs(1)[0], stages=3, threads=1, on_loss="continue") as pipe:
        pids = pids_of(pipe)
        killing = {30: lambda: os.kill(pids[1], signal.SIGKILL), 90: lambda: os.kill(pids[0], signal.SIGKILL)}
        outputs = list(pipe.stream(feed(150, killing)))
        check(outputs, model)
        assert len(outputs) == 150 == pipe.last_report.num_microbatches
        assert [change.devices for change in pipe.changes] == [("worker-1", "worker-3"), ("worker-3",)]
        assert all("was killed by signal 9" in change.why for change in pipe.changes)
        assert pipe.last_report.num_rows == 300
        # a tensor that somebody who needs it holds already is not sent again
        first, second, third, *again, last = names
        assert sum(len(each) for each in again) == len(second) + len(first | third) - len(first) - len(third)
        assert last == (first | second | third) - third - again[1]
        # the next stream finds the stages where they are
        check(list(pipe.stream(feed(5, {}))), model)
        assert pipe.changes == []
        # what fails in the model fails anywhere: nobody is lost, and nothing is tried again
        x, rows = tower_inputs(1)[0]
        with pytest.raises(RunError, match="stage 0, microbatch 3"):
            list(pipe.stream([(x, rows)] * 3 + [(x, rows + 1000)]))
        assert pipe.changes == []
    assert "worker-1, worker-3 after" in capfd.readouterr().err


def test_texts_of_any_length_after_a_loss() -> None:
    """What else than the batch varies is as large as in the example also where the stages have been placed again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 8), *(nn.Linear(8, 8) for _ in range(6))).eval()
    texts = [torch.randint(20, (2, 1 + index % 12)) for index in range(60)]

    def fed(pids: list[int]) -> Iterator[Tensor]:
        for index, text in enumerate(texts):
            if index == 20:
                os.kill(pids[1], signal.SIGKILL)
            yield text
            time.sleep(0.002)

    example = torch.zeros(2, 12, dtype=torch.int64)
    dynamic: dict[str, dict[str | int, int]] = {"length": {0: 1}}
    with Pipeline(model, (example,), dynamic=dynamic, stages=3, threads=1, on_loss="continue") as pipe:
        outputs = list(pipe.stream(fed(pids_of(pipe))))
        assert len(pipe.changes) == 1
    with torch.no_grad():
        assert all(torch.equal(found, model(text)) for found, text in zip(outputs, texts, strict=True))


def test_last_lost_device_ends_the_stream() -> None:
    with Pipeline(tower(), tower_inputs(1)[0], stages=1, threads=1, on_loss="continue") as pipe:
        done: list[Tensor] = []
        killing = {20: lambda: os.kill(pids_of(pipe)[0], signal.SIGKILL)}
        with pytest.raises(DeviceLost, match="no device is left"):
            done.extend(pipe.stream(feed(60, killing)))
        assert 10 <= len(done) <= 20
        check(done, tower())


@pytest.mark.long
def test_suspended_worker_rejoins() -> None:
    model = tower()
    with Pipeline(model, tower_inputs(1)[0], stages=2, threads=1, on_loss="continue") as pipe:
        pid = pids_of(pipe)[0]
        outputs: list[Tensor] = []
        started: list[float] = []

        def stop() -> None:
            os.kill(pid, signal.SIGSTOP)
            started.append(time.monotonic())

        def back() -> bool:
            return len(pipe.changes) > 1 or time.monotonic() - started[0] > 40.0

        def until_back() -> Iterator[tuple[Tensor, Tensor]]:
            yield from feed(30, {20: stop})
            index = 30
            while not back():
                if pipe.changes:
                    os.kill(pid, signal.SIGCONT)
                time.sleep(0.02)
                yield tower_inputs(index + 1)[index]
                index += 1
            yield from tower_inputs(index + 30)[index:]

        outputs.extend(pipe.stream(until_back()))
        check(outputs, model)
        assert pipe.changes[0].devices == ("worker-2",)
        assert set(pipe.changes[1].devices) == {"worker-1", "worker-2"}
        assert pipe.changes[1].why == "a device has joined"


def test_a_new_device_is_waited_for() -> None:
    model = tower()
    with Pipeline(model, tower_inputs(1)[0], stages=2, threads=1, on_loss=OnLoss("wait", wait_s=60.0)) as pipe:
        joining: list[subprocess.Popen[str]] = []

        def lose_one() -> None:
            os.kill(pids_of(pipe)[1], signal.SIGKILL)
            command = [sys.executable, "-m", "penstock", "worker", "--join", pipe.joins_at or ""]
            env = {**os.environ, "PYTHONPATH": f"{ROOT}/src", "PENSTOCK_HOST": "board7"}
            joining.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))

        outputs = list(pipe.stream(feed(60, {20: lose_one})))
        check(outputs, model)
        assert [change.devices for change in pipe.changes] == [("worker-1", "board7")]
        resent = world_of(pipe).names
        assert resent[2] == "a newcomer on board7"
    out, _ = joining[0].communicate(timeout=20)
    assert joining[0].returncode == 0
    assert re.match(r".* the run at /\S+:\d+\nthe run is over", out)


def test_worker_lost_during_placement_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sent = tower(), state.send_state
    worlds: list[World] = []

    def sending(transport: object, *args: object) -> None:
        if len(worlds) == 1:
            worlds.append(worlds[0])
            assert worlds[0].workers is not None
            os.kill(worlds[0].workers.pids[2], signal.SIGKILL)
        sent(transport, *args)  # type: ignore[arg-type]

    def start(num_workers: int, *, again: bool) -> World:
        worlds.append(start_local(num_workers, again=again))
        return worlds[0]

    monkeypatch.setattr("penstock.stream.division.start_local", start)
    monkeypatch.setattr(jobs, "send_state", sending)
    with Pipeline(model, tower_inputs(1)[0], stages=3, threads=1, on_loss="continue") as pipe:
        check(list(pipe.stream(feed(20, {}))), model)
        assert pipe._streaming.deployment.world.transport.size == 3


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"on_loss": "hope"}, "stop, continue, wait; got 'hope'"),
        ({"on_loss": "continue", "trace": "somewhere"}, "leave trace or on_loss out"),
    ],
)
def test_options_that_do_not_fit(asked: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Pipeline(tower(), tower_inputs(1)[0], stages=2, **asked)  # type: ignore[arg-type]


def test_wait_for_must_be_positive() -> None:
    with pytest.raises(UsageError, match=r"got 0\.0"):
        OnLoss("wait", wait_s=0.0)


def test_modules_cannot_be_moved() -> None:
    with pytest.raises(UsageError, match="leave on_loss out"):
        Pipeline([torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)], torch.ones(1, 8), on_loss="continue")


@pytest.mark.board
@pytest.mark.parametrize("how", ["late", long("at once")])
def test_the_same_script_in_every_process(tmp_path: Path, how: str) -> None:
    """Also where one finds that it cannot reach all of the next group, once others have."""
    told = tmp_path / "told.json"
    (ended,) = run_groups(PROGRAMS / "survivors.py", [(3, [str(told), str(free_port()), how])], 90.0)
    assert [end.status for end in ended] == [0, -signal.SIGKILL, 0]
    assert json.loads(told.read_text()) == [True, 60, 0]  # nothing changed during the last stream
