"""States keep their types over JSON, and over a checkpoint."""

import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as lr

import penstock
from penstock.errors import UsageError
from penstock.train.plain_values import decode, encode
from tests.models import seeded


def same(one: Any, other: Any) -> bool:
    """Return whether two values have the same types and bits, at every depth."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or bool(one != one and other != other)


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, 0.1, "text", b"bytes", 1 + 2j, math.inf, -math.inf, math.nan, [1, [2.5, "x"]], (0.9, (1, 2)),
        {1: "a", (2, 3): "b", None: "c", 0.5: "d"}, {":tuple": 1}, {"a": {":x": [1]}}, {}, [], (),
        Counter({2: 1, 4: 2}), OrderedDict([("b", 1), ("a", 2)]), {1, 2}, frozenset({"a"}), deque([1, 2], maxlen=3),
        defaultdict(list, {1: [2]}), torch.float16, torch.device("cpu"), torch.tensor(2.5), torch.arange(6).view(2, 3),
        torch.zeros(0, 3), torch.tensor([True, False]), torch.ones(2, dtype=torch.bfloat16), np.float32(1.5),
        np.int64(7), np.arange(4.0).reshape(2, 2), np.zeros((0,)),
    ],
    ids=repr,
)  # fmt: skip
def test_value_round_trips_through_json(value: Any) -> None:
    assert same(decode(json.loads(json.dumps(encode(value, "state")))), value)


@pytest.mark.parametrize("value", [object(), {"f": len}, [np.array(["a"])], torch.eye(2).to_sparse()])
def test_value_without_json_form_is_named(value: Any) -> None:
    with pytest.raises(UsageError, match="state"):
        encode(value, "state")


def test_unknown_document_is_not_a_value() -> None:
    with pytest.raises(ValueError, match="module"):
        decode({":module": "os"})


def sequential(optimizer: torch.optim.Optimizer) -> Any:
    return lr.SequentialLR(
        optimizer, [lr.LinearLR(optimizer, 0.5, total_iters=2), lr.MultiStepLR(optimizer, [1, 3])], [2]
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: lr.MultiStepLR(optimizer, [2, 4], gamma=0.1),
        sequential,
        lambda optimizer: lr.ChainedScheduler([lr.MultiStepLR(optimizer, [2, 4]), lr.ExponentialLR(optimizer, 0.9)]),
        lambda optimizer: lr.OneCycleLR(optimizer, 0.5, total_steps=9),
        lambda optimizer: lr.CyclicLR(optimizer, 0.01, 0.1, step_size_up=2, cycle_momentum=False),
        lambda optimizer: lr.LambdaLR(optimizer, lambda step: 0.5**step),
    ],
)
def test_a_scheduler_goes_on_as_if_there_had_been_no_checkpoint(
    tmp_path: Path, make: Callable[[torch.optim.Optimizer], Any]
) -> None:
    def run(*, stops: bool) -> list[float]:
        rates: list[float] = []
        for begin, end in [(0, 3), (3, 6)] if stops else [(0, 6)]:
            with penstock.Pipeline(seeded(nn.Linear, 4, 2).train(), torch.zeros(2, 4)) as pipe:
                optimizer = pipe.optimizer(lambda parameters: torch.optim.AdamW(parameters, lr=0.1, betas=(0.8, 0.9)))
                scheduler = make(optimizer)
                if begin:
                    pipe.load_checkpoint(tmp_path, optimizer, scheduler)
                    assert all(type(group["betas"]) is tuple for group in optimizer.param_groups)
                for _ in range(begin, end):
                    pipe.train_step(torch.ones(2, 4), None, lambda output, _: output.pow(2).mean())
                    optimizer.step()
                    scheduler.step()
                    rates.append(optimizer.param_groups[0]["lr"])
                pipe.save_checkpoint(tmp_path, optimizer, scheduler)
        return rates

    assert run(stops=True) == run(stops=False)


def test_a_state_that_cannot_be_kept_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with penstock.Pipeline(seeded(nn.Linear, 4, 2).train(), torch.zeros(2, 4)) as pipe:
        optimizer = pipe.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        scheduler = lr.StepLR(optimizer, 2)
        scheduler.kept = object()  # type: ignore[attr-defined]
        with pytest.raises(UsageError, match="object"):
            pipe.save_checkpoint(tmp_path / "new", optimizer, scheduler)
        optimizer.param_groups[0]["function"] = len
        with pytest.raises(UsageError, match="function"):
            pipe.save_checkpoint(tmp_path / "new", optimizer)
    assert not (tmp_path / "new").exists()
