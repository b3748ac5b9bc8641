"""Methods that only some processes call are one line on all of them, which names both calls."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from penstock.engine import stall
from penstock.errors import RunError, UsageError
from penstock.group.calls import Calls, describe_wait, find_mismatch
from penstock.group.world import World
from penstock.pipeline import Pipeline
from tests.fewer import long
from tests.trainers import in_threads

X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3


def make(world: World, **settings: Any) -> Pipeline:
    """Two stages of a small model, unless the settings say otherwise."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).train()
    return Pipeline(model, X, world=world, **(settings or {"stages": 2, "microbatches": 2}))


def step(pipe: Pipeline) -> Tensor:
    loss: Tensor = pipe.train_step(X, Y, F.cross_entropy)
    return loss


CALLS: dict[str, Callable[[Pipeline, Path], Any]] = {
    "evaluate": lambda pipe, _: pipe.evaluate(X, Y, F.cross_entropy),
    "save": lambda pipe, folder: pipe.save(folder / "model.safetensors"),
    "save_checkpoint": lambda pipe, folder: pipe.save_checkpoint(folder / "checkpoint"),
    "clip_grad_norm_": lambda pipe, _: pipe.clip_grad_norm_(1.0),
    "close": lambda pipe, _: pipe.close(),
}


def run(own: Callable[[Pipeline], object], rank: int, settings: dict[str, Any], then: int = 1) -> list[str]:
    """Have one of two processes call something by itself; returns what each of them was told."""

    def script(world: World) -> str:
        try:
            with make(world, **settings) as pipe:
                step(pipe)
                if world.rank == rank:
                    own(pipe)
                for _ in range(then):
                    step(pipe)
        except (RunError, UsageError) as error:
            return str(error)
        return ""

    return in_threads(2, script)


@pytest.mark.parametrize("settings", [{"stages": 2, "microbatches": 2}, {"replicas": 2}])
@pytest.mark.parametrize("rank", [0, long(1)])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_one_process_is_named_on_both(name: str, rank: int, settings: dict[str, Any], tmp_path: Path) -> None:
    begin = time.monotonic()
    told = run(lambda pipe: CALLS[name](pipe, tmp_path), rank, settings)
    assert time.monotonic() - begin < 30
    named = [line for line in told if name in line and "train_step" in line]
    assert named, told
    assert all(f"rank {each}" in line for line in named for each in (0, 1))
    if name != "close":  # whoever closed it is told that it is closed
        assert len(named) == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_extra_step_of_a_rank_is_named(rank: int) -> None:
    told = run(step, rank, {"stages": 2, "microbatches": 2}, then=0)
    assert any("close" in line and "train_step" in line for line in told)


def test_calls_of_the_same_number_are_compared() -> None:
    names = ["a", "b", "c"]
    assert find_mismatch({0: "3 save", 1: "3 save", 2: "4 evaluate"}, names) is None
    assert find_mismatch({0: "", 1: "3 save"}, names) is None
    line = find_mismatch({0: "3 save", 1: "", 2: "3 evaluate"}, names)
    assert line is not None
    assert "rank 0 (a) calls save where rank 2 (c) calls evaluate" in line


def test_calls_without_a_number_are_not_compared() -> None:
    assert find_mismatch({0: "0 save", 1: "0 evaluate"}, ["a", "b"]) is None


def test_stall_needs_a_waiting_and_an_absent_rank() -> None:
    names = ["a", "b", "c"]
    line = describe_wait({0: "3 train_step", 1: "3 train_step", 2: ""}, {0: False, 1: True, 2: False}, names)
    assert line is not None
    assert line.startswith("rank 1 (b) is in train_step")
    assert line.endswith("rank 2 (c)")
    assert describe_wait({0: "3 train_step", 1: ""}, {0: False, 1: False}, names) is None
    assert describe_wait({0: "3 train_step", 1: "3 train_step"}, {0: True, 1: True}, names) is None


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_hangs_in_its_own_code_is_named(
    rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stall, "TELL_S", 0.2)
    assert run(lambda _: time.sleep(1.5), rank, {"stages": 2, "microbatches": 2}) == ["", ""]
    line = next(line for line in capsys.readouterr().err.splitlines() if "train_step" in line)
    assert f"waits for rank {rank} " in line
    assert f"rank {1 - rank} " in line.partition("waits for")[0]


def test_documents_of_different_calls_are_refused() -> None:
    calls = Calls()
    with calls.entered("save"):
        mine = calls.marked({"written": True})
        assert calls.checked([mine, mine], ["a", "b"]) == [mine, mine]
        with pytest.raises(UsageError, match="evaluate"):
            calls.checked([mine, {"call": "evaluate"}], ["a", "b"])


def by_finally(pipe: Pipeline, work: Callable[[], object]) -> None:
    try:
        work()
    finally:
        pipe.close()


def by_except(pipe: Pipeline, work: Callable[[], object]) -> None:
    try:
        work()
    except BaseException:
        pipe.close()
        raise


def by_closing(pipe: Pipeline, work: Callable[[], object]) -> None:
    with contextlib.closing(pipe):
        work()


def by_stack(pipe: Pipeline, work: Callable[[], object]) -> None:
    with contextlib.ExitStack() as stack:
        stack.callback(pipe.close)
        work()


CASES = [
    *((way, ValueError("no such file")) for way in (by_finally, by_except, by_closing, by_stack)),
    *((by_finally, error) for error in (SystemExit(3), KeyError("x"), KeyboardInterrupt())),
]


@pytest.mark.parametrize("rank", [1, long(0)])
@pytest.mark.parametrize(("way", "error"), CASES)
def test_closing_after_an_error_names_the_error(way: Any, rank: int, error: BaseException) -> None:
    def script(world: World) -> BaseException | None:
        pipe = make(world)

        def work() -> None:
            step(pipe)
            if world.rank == rank:
                raise error
            step(pipe)
            step(pipe)

        try:
            way(pipe, work)
        except BaseException as found:
            return found
        return None

    found = in_threads(2, script)
    assert found[rank] is error
    assert isinstance(found[1 - rank], RunError)
    assert f"rank {rank}: {type(error).__name__}" in str(found[1 - rank])
    assert "if rank == 0" not in str(found[1 - rank])


def test_an_error_within_a_call_is_named_too() -> None:
    def script(world: World) -> str:
        pipe = make(world)
        try:
            by_finally(pipe, lambda: pipe.train_step(X, Y[: 4 if world.rank else 8], F.cross_entropy))
        except (RunError, UsageError) as error:
            return str(error)
        return ""

    other, own = in_threads(2, script)
    assert own.startswith("the labels are (4,)")
    assert f"rank 1: UsageError: {own[:20]}" in other


def test_all_ranks_may_end_by_an_exception(tmp_path: Path) -> None:
    def script(world: World) -> None:
        pipe = make(world, stages=2, microbatches=2, trace=tmp_path / "trace")
        try:
            step(pipe)
            raise StopIteration(f"enough, says {world.rank}")
        except StopIteration:
            pipe.close()

    in_threads(2, script)
    assert list((tmp_path / "trace").iterdir())
