"""Labels and batches in the containers of a user: cut by row, or refused by name."""

import collections
import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import DataLoader

import penstock
from penstock import trees
from penstock.errors import UsageError
from penstock.group.world import World
from penstock.train.batches import RowCut
from penstock.train.captured import Captured
from penstock.train.loader import Loader
from tests.models import seeded
from tests.trainers import in_threads, make_trainer


class Pair(NamedTuple):
    """Labels by name."""

    classes: Any
    names: Any


@dataclasses.dataclass
class Labels:
    """Labels by field."""

    classes: Any


class Encoding(collections.UserDict[str, Any]):
    """A mapping with an attribute, as a tokenizer's."""

    def __init__(self, data: dict[str, Any], kind: str) -> None:
        super().__init__(data)
        self.kind = kind


X = torch.arange(4)
BOXES = [{"boxes": torch.full((count, 2), float(count))} for count in (3, 1, 4, 2)]
NAMES = ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (X, X[2:]),
        (NAMES, ["c", "d"]),
        (tuple(NAMES), ("c", "d")),
        ([3, 1, 2, 0], [2, 0]),
        (BOXES, BOXES[2:]),
        ([torch.zeros(k) for k in range(4)], [torch.zeros(2), torch.zeros(3)]),
        ([X, NAMES], [X[2:], ["c", "d"]]),
        ([X, X, X, X], [X[2:]] * 4),  # as many tensors as rows: each is taken for labels of all rows
        ([NAMES] * 4, [NAMES] * 2),
        ({"a": X, "b": {"c": BOXES}, "weight": 0.5}, {"a": X[2:], "b": {"c": BOXES[2:]}, "weight": 0.5}),
        (Pair(X, NAMES), Pair(X[2:], ["c", "d"])),
        (Labels(X), Labels(X[2:])),
        (np.arange(4), np.arange(2, 4)),
        (["one", "two", "three"], ["one", "two", "three"]),
        (None, None),
    ],
)
def test_labels_are_cut_by_rows(labels: Any, expected: Any) -> None:
    found = RowCut().parts(labels, 4, [range(2), range(2, 4)])[1]
    assert trees.structure(found) == trees.structure(expected)
    for one, other in zip(trees.leaves(found), trees.leaves(expected), strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else np.array_equal(one, other)


def test_a_mapping_keeps_type_order_and_attributes() -> None:
    found = RowCut().parts(Encoding({"b": X, "a": X}, "tokens"), 4, [range(2), range(2, 4)])[0]
    assert (type(found), found.kind, list(found)) == (Encoding, "tokens", ["b", "a"])


def test_an_earlier_batch_tells_what_is_not_certain() -> None:
    pairs = [("a", "b", "c"), ("d", "e", "f")]  # of three rows: the first and the second words
    cut = RowCut()
    assert cut.parts(pairs, 3, [range(1), range(1, 3)])[0] == [("a",), ("d",)]
    assert cut.parts([("a", "b"), ("d", "e")], 2, [range(1), range(1, 2)])[0] == [("a",), ("d",)]


@pytest.mark.parametrize(
    "labels", [X[:3], torch.tensor(1), [X[:3], X[:3], X[:3]], object(), {"a": {1, 2}}, X.float().to_sparse()]
)
def test_labels_without_rows_are_refused(labels: Any) -> None:
    with pytest.raises(UsageError):
        RowCut().parts(labels, 4, [range(2), range(2, 4)])


def test_a_dict_of_boxes_for_each_row_has_the_loss_of_plain_pytorch() -> None:
    model = seeded(nn.Sequential, nn.Linear(4, 2)).train()
    inputs = torch.randn(4, 4)

    def loss_fn(output: Tensor, labels: list[dict[str, Tensor]]) -> Tensor:
        rows = [
            F.mse_loss(row.expand_as(each["boxes"]), each["boxes"]) for row, each in zip(output, labels, strict=True)
        ]
        return torch.stack(rows).mean()

    expected = float(loss_fn(model(inputs), BOXES).detach())
    with penstock.Pipeline(model, inputs, microbatches=2) as pipe:
        assert float(pipe.train_step(inputs, BOXES, loss_fn)) == pytest.approx(expected, rel=1e-6)


class Tower(nn.Module):
    """Three layers over a named input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x: Tensor) -> Any:
        return self.layers(x)


def collate(rows: list[Tensor]) -> Encoding:
    return Encoding({"x": torch.stack(rows)}, "tokens")


def test_a_process_that_loads_nothing_gets_rows_of_any_mapping() -> None:
    captured = Captured(seeded(Tower).train(), (), {"x": torch.zeros(2, 4)})
    data: Any = list(torch.randn(8, 4))

    def script(world: World) -> list[float]:
        trainer = make_trainer(captured, world, stages=3, microbatches=4)
        loader = Loader(trainer, DataLoader(data, batch_size=4, collate_fn=collate))
        losses = [float(trainer.train_step(batch, None, lambda output, _: output.pow(2).mean())) for batch in loader]
        trainer.close()
        return losses

    found = in_threads(3, script)
    plain = [float(seeded(Tower)(torch.stack(data[i : i + 4])).pow(2).mean().detach()) for i in (0, 4)]
    assert found[0] == found[1] == found[2] == pytest.approx(plain, rel=1e-6)
