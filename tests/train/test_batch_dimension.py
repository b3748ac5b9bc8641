"""Inputs and outputs whose rows are not in dimension 0."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import penstock
from penstock.errors import UsageError
from penstock.graph.capture import capture
from penstock.graph.rows import check_rows
from penstock.group.world import World
from tests.fewer import long
from tests.trainers import in_threads

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, LENGTH, WIDTH = 6, 5, 4


class SequenceFirst(nn.Module):
    """An encoder of [length, batch, width]; `pools` over the length."""

    def __init__(self, *, pools: bool) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0)
        self.head, self.pools = nn.Linear(WIDTH, 3), pools

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(self.layer(x))
        return made.mean(0) if self.pools else made


class States(nn.Module):
    """An LSTM with initial states of [layers, batch, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, state: Any) -> Tensor:
        made: Tensor = self.head(self.lstm(x, state)[0][:, -1])
        return made


class Positions(nn.Module):
    """Positions in three axes, of [3, batch, length], as of multi-modal models."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(LENGTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        for axis, table in enumerate(self.tables):
            x = x + table(positions[axis])
        made: Tensor = self.head(x.tanh().mean(1))
        return made


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def positions(rows: int) -> Tensor:
    return torch.randint(0, LENGTH, (3, rows, LENGTH), generator=torch.Generator().manual_seed(7))


def states(rows: int) -> tuple[Tensor, Tensor]:
    return drawn(2, rows, WIDTH), drawn(2, rows, WIDTH).cos()


CASES: dict[str, Any] = {
    "sequence": (SequenceFirst(pools=True), lambda rows: (drawn(LENGTH, rows, WIDTH),), {"x": 1}),
    "square": (SequenceFirst(pools=True), lambda rows: (drawn(ROWS, rows, WIDTH),), {0: -2}),
    "states": (States(), lambda rows: (drawn(rows, LENGTH, WIDTH), states(rows)), {"state": 1}),
    "layers like rows": (States(), lambda rows: (drawn(rows, LENGTH, WIDTH), states(rows)), {"state": 1, "x": 0}),
    "positions": (Positions(), lambda rows: (drawn(rows, LENGTH, WIDTH), positions(rows)), {"positions": 1}),
}
LABELS = torch.arange(ROWS) % 3


def plain(model: nn.Module, inputs: Any) -> dict[str, Tensor]:
    model = copy.deepcopy(model).train()
    F.cross_entropy(model(*inputs), LABELS).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("rows", [2, long(1), long(4)])
@pytest.mark.parametrize("microbatches", [4, long(1)])
@pytest.mark.parametrize("name", CASES)
def test_each_microbatch_has_its_own_rows(name: str, microbatches: int, rows: int) -> None:
    model, make, dim = CASES[name]
    inputs = make(ROWS)
    pipe = penstock.Pipeline(
        copy.deepcopy(model).train(), make(rows), dynamic={"batch": dim}, microbatches=microbatches
    )
    pipe.train_step(inputs, LABELS, F.cross_entropy)
    for key, gradient in plain(model, inputs).items():
        torch.testing.assert_close(dict(pipe.named_parameters())[key].grad, gradient, rtol=1e-4, atol=1e-6)
    expected = copy.deepcopy(model).eval()(*inputs)
    torch.testing.assert_close(pipe(*inputs), expected, rtol=1e-4, atol=1e-5)
    assert pipe.evaluate(inputs, LABELS, F.cross_entropy) == pytest.approx(float(F.cross_entropy(expected, LABELS)))
    pipe.close()


@pytest.mark.parametrize("name", ["sequence", long("states")])
def test_other_batch_dimensions_train_in_stages_and_replicas(name: str) -> None:
    model, make, dim = CASES[name]
    wanted = plain(model, make(ROWS))

    def script(world: World, replicas: int, part: slice) -> None:
        inputs = make(ROWS)
        if name == "sequence":
            inputs = (inputs[0][:, part],)
        else:
            inputs = (inputs[0][part], tuple(state[:, part] for state in inputs[1]))
        with penstock.Pipeline(
            copy.deepcopy(model).train(), make(3), dynamic={"batch": dim}, microbatches=2, world=world,
            stages=2 // replicas, replicas=replicas,
        ) as pipe:  # fmt: skip
            pipe.train_step(inputs, LABELS[part], F.cross_entropy)
            for key, parameter in pipe.named_parameters():
                torch.testing.assert_close(parameter.grad, wanted[key], rtol=1e-4, atol=1e-6)

    in_threads(2, lambda world: script(world, 1, slice(None)))
    in_threads(2, lambda world: script(world, 2, slice(0, 3) if world.rank == 0 else slice(3, 6)))


@pytest.mark.parametrize("size", [4, long(1), long(6)])
def test_a_stream_cuts_and_joins_in_the_same_dimension(size: int) -> None:
    model, x = SequenceFirst(pools=False).eval(), drawn(LENGTH, ROWS, WIDTH)
    with penstock.Pipeline(model, x, dynamic={"batch": {"x": 1}}, stages=1) as pipe:
        found = pipe(x, microbatch_size=size)
    assert found.shape == (LENGTH, ROWS, 3)
    torch.testing.assert_close(found, model(x), rtol=1e-4, atol=1e-5)


def test_training_predicts_in_the_same_dimension() -> None:
    model, x = SequenceFirst(pools=False), drawn(LENGTH, ROWS, WIDTH)
    pipe = penstock.Pipeline(copy.deepcopy(model).train(), x, dynamic={"batch": {"x": 1}}, microbatches=4)
    torch.testing.assert_close(pipe(x), copy.deepcopy(model).eval()(x), rtol=1e-4, atol=1e-5)
    square = drawn(ROWS, ROWS, WIDTH)
    pipe.close()
    labels = torch.zeros(ROWS, ROWS)
    pipe = penstock.Pipeline(copy.deepcopy(model).train(), square, dynamic={"batch": {"x": 1}}, microbatches=2)
    with pytest.raises(UsageError, match=r"\[6, 6\]"):
        pipe.train_step(square, labels, lambda out, y: (out[..., 0] - y).square().mean())
    pipe.close()


def test_rows_that_are_mixed_along_that_dimension_are_found() -> None:
    class Mixes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x - x.mean(1, keepdim=True)).sum(0)

    graph = capture(Mixes(), (drawn(LENGTH, ROWS, WIDTH),), dynamic={"batch": {"x": 1}})
    with pytest.raises(UsageError, match="mixes rows"):
        check_rows(graph, {"batch": ROWS}, "")
