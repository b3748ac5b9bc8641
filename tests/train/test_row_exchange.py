"""Rows are loaded by one process: inputs fit their labels whatever the ranks draw, list or split."""

import json
import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.data import Subset
from transformers import BatchEncoding

from penstock import trees
from penstock.errors import TransportError, UsageError
from penstock.group.world import World
from penstock.random_states import RandomStates
from penstock.train.agreement import captured_values, data_identity
from penstock.train.batch_document import Absent, StandIn
from penstock.train.captured import Captured
from penstock.train.loader import Loader
from penstock.train.trainer import evaluate, predict
from penstock.transport.base import LOADED, send_bytes
from tests.fewer import long
from tests.models import seeded
from tests.processes import PROGRAMS, run_groups
from tests.programs import rows
from tests.trainers import in_threads, make_trainer

PROGRAM = Path(rows.__file__)
WIDE = rows.WIDE


@pytest.mark.parametrize("size", [3, long(2)])
def test_inputs_fit_their_labels_whatever_ranks_draw(size: int, tmp_path: Path) -> None:
    run_groups(PROGRAM, [(size, [str(tmp_path)])], deadline_s=240.0)
    for rank in range(size):
        losses = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert losses.keys() == {case.__name__ for case in rows.CASES}
        assert {name: sum(found) for name, found in losses.items()} == dict.fromkeys(losses, 0.0)


@pytest.mark.parametrize(
    ("case", "named"),
    [
        ("drawn_elsewhere", "'share'"),
        ("drawn_in_an_own_loop", "random"),
        ("one_row_more", "17 rows"),
        ("values_used", r"float32 \[\]"),
    ],
)
def test_numbers_that_differ_between_ranks_end_the_step_in_one_line(case: str, named: str) -> None:
    ended = run_groups(PROGRAM, [(2, [case, named])], deadline_s=120.0)
    assert [each.status for each in ended[0]] == [0, 0]


@pytest.fixture(scope="module")
def captured() -> Captured:
    model = seeded(torch.nn.Sequential, torch.nn.Linear(WIDE, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    return Captured(model.train(), (torch.zeros(2, WIDE),))


def test_evaluation_and_outputs_use_the_rows_of_the_rank_that_loads(captured: Captured) -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(6, WIDE, generator=generator), torch.randn(6, 4, generator=generator)

    def script(world: World) -> Any:
        trainer = make_trainer(captured, world, stages=world.transport.size, microbatches=2)
        own = (x, y) if world.rank == 0 else (x.flip(0), y.roll(1, 0))  # a loop of the caller's that shuffles alone
        found = [float(trainer.train_step(*own, F.mse_loss)), evaluate(trainer, *own, F.mse_loss)]
        output = predict(trainer, own[0])
        trainer.close()
        return found, output

    ((expected, output),) = in_threads(1, script)
    for found, outputs in in_threads(3, script):
        assert found == pytest.approx(expected, rel=1e-6)
        assert torch.allclose(outputs, output, atol=1e-6)


@dataclass
class Own:
    image: Tensor
    kind: Any


@pytest.mark.parametrize(
    "collate",
    [
        lambda x, y: {"x": x, "y": y, "n": 3, "names": ["a", None, 1.5]}, lambda x, y: [x, (y, float("nan"))],
        lambda x, y: BatchEncoding({"input_ids": y, "pixel_values": x}), lambda x, y: Own(x, y),
        lambda x, y: {"x": x, "numbers": y.numpy(), ("a", 1): y}, lambda x, y: torch.return_types.max((x, y)),
    ],
)  # fmt: skip
def test_containers_arrive_as_they_were_collated(collate: Any, captured: Captured) -> None:
    def batch(rows: list[Any]) -> Any:
        return collate(*torch.utils.data.default_collate(rows))

    def script(world: World) -> Any:
        trainer = make_trainer(captured, world, stages=2)
        data = [(torch.full((WIDE,), float(n)), n) for n in range(3)]
        (found,) = Loader(trainer, data, batch_size=3, collate_fn=batch)
        trainer.close()
        return found

    here, there = in_threads(2, script)
    assert type(there) is type(here) or not isinstance(here, (dict, list, Own, BatchEncoding))
    assert repr(there).count("StandIn") == 1
    assert [leaf.tolist() for leaf in _small(there)] == [leaf.tolist() for leaf in _small(here)] != []


def _small(tree: Any) -> list[Any]:
    return [leaf for leaf in trees.leaves(tree) if isinstance(leaf, (Tensor, np.ndarray)) and leaf.ndim == 1]


def test_replicas_need_the_same_data(captured: Captured) -> None:
    def script(world: World, order: Any) -> None:
        trainer = make_trainer(captured, world, replicas=2)
        try:
            list(Loader(trainer, order(world.rank), batch_size=4))
        finally:
            trainer.close(wait=False)

    rows_of: Any = [(torch.zeros(WIDE), n) for n in range(8)]
    for order, name in (
        (lambda rank: Subset(rows_of, [rank, 1 - rank, 2, 3]), "indices"),
        (lambda rank: rows_of[::-1] if rank else rows_of, "rows"),
    ):
        with pytest.raises(UsageError, match=name):
            in_threads(2, partial(script, order=order))


def test_identity_of_data_looks_at_what_decides_rows() -> None:
    class Files:
        def __init__(self, files: list[Any]) -> None:
            self.samples = files
            self.cache: list[Any] = [None] * len(files)

        def __len__(self) -> int:
            return len(self.samples)

    first, second = Files([("/a/x/1.png", 0), ("/a/x/2.png", 0)]), Files([("/b/x/1.png", 0), ("/b/x/2.png", 0)])
    assert data_identity(first) == data_identity(second)
    second.cache[0] = torch.zeros(2)  # a row that was read
    assert data_identity(first) == data_identity(second)
    second.samples.reverse()
    assert data_identity(first) != data_identity(second)
    assert data_identity(Subset(first, [0, 1])) != data_identity(Subset(first, [1, 0]))  # type: ignore[arg-type]


def test_random_states_move_to_another_process() -> None:
    states = RandomStates()
    kept, digests = json.loads(json.dumps(states.read())), states.digests()
    drawn = random.random(), float(np.random.rand()), float(torch.rand(1))
    assert states.digests().items().isdisjoint(digests.items())
    states.write(kept)
    assert states.digests() == digests
    assert (random.random(), float(np.random.rand()), float(torch.rand(1))) == drawn


def test_loss_values_come_from_the_last_stage() -> None:
    count, share, order, seen, mean = 0, 0.5, torch.arange(3), [0.5], torch.zeros(2)

    def loss(_output: Tensor, _labels: Tensor, factor: float = 2.0) -> float:
        nonlocal count
        count += 1
        seen.append(float(count))  # on the rank of the last stage alone
        mean.mul_(0.9).add_(0.1)
        return share * factor + float(order.sum())

    loss(order, order)

    found = captured_values(loss)
    assert found.keys() == {"share", "order", "factor"}
    assert (found["share"], found["factor"]) == ("0.5", "2.0")
    order = torch.arange(3).flip(0)
    assert captured_values(loss)["order"] != found["order"]


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x.mean().item(), lambda x: bool((x > 0).any()), lambda x: x.numpy(), lambda x: x.tolist(),
        lambda x: float(x.sum()),
        lambda x: x[x > 0], torch.nonzero, torch.unique, lambda x: np.asarray(x), lambda x: f"{x.sum():.2f}",
        lambda x: torch.zeros(4, 3).add_(x), lambda x: torch.equal(x, x), lambda x: x.unsqueeze_(0),
        lambda x: sorted([x.sum(), x.mean()]), lambda x: torch.save(x, "/dev/null"),
    ],
)  # fmt: skip
def test_stand_ins_name_the_rank_that_has_their_values(use: Any) -> None:
    with pytest.raises(UsageError, match="the desk"):
        use(StandIn(torch.empty(4, 3, device="meta"), "the desk"))


def test_stand_ins_compute_shapes() -> None:
    x = StandIn(torch.empty(4, 3, device="meta"), "the desk")
    mask = torch.tensor([True, False, True, False])
    order = torch.randperm(4)
    for made, shape in (
        (x[:2], (2, 3)), (x[mask], (2, 3)), (0.5 * x + 0.5 * x[order], (4, 3)), (x.to("cpu").half(), (4, 3)),
        (torch.cat([x, torch.zeros(1, 3)]), (5, 3)), (torch.rand(4, 1) * x, (4, 3)), (x.mul_(2), (4, 3)),
        (x.softmax(-1).argmax(1), (4,)), (x.pin_memory(), (4, 3)), (next(iter(x)), (3,)),
    ):  # fmt: skip
        assert isinstance(made, StandIn)
        assert tuple(made.shape) == shape
    assert torch.zeros_like(x).tolist() == [[0.0] * 3] * 4
    assert "the desk" in f"{x}"
    torch.manual_seed(0)
    drawn = [F.dropout(torch.ones(4, 3)), torch.randn(4, 3), torch.rand(1)]
    torch.manual_seed(0)
    assert isinstance(F.dropout(x), StandIn)
    assert torch.equal(torch.randn_like(x), drawn[1])
    assert torch.equal(torch.rand(1), drawn[2])


def test_an_object_that_was_not_sent_names_where_it_is() -> None:
    with pytest.raises(UsageError, match="Image of the batch is only on the desk"):
        _ = Absent("Image", "the desk").size


@pytest.mark.parametrize(
    "sent",
    [
        b"[]", b"{", b'{"batch": {}, "states": {}, "x": 1}', b'{"batch": {"list": 3}, "states": {}}',
        b'{"batch": {"tensor": ["float32", [-1], [1]], "sent": true}, "states": {}}',
        b'{"batch": {"tensor": ["float32", [1], []], "sent": true}, "states": {}}',
        b'{"batch": {"tensor": ["object", [1], [1]], "sent": true}, "states": {}}',
        b'{"batch": {"tensor": ["float32", [99999999999999], [1]], "sent": true}, "states": {}}',
        b'{"batch": {"dict": [{"value": 1}], "keys": []}, "states": {}}',
        b'{"batch": {"value": 1}, "states": {"torch": "x"}, "random": {"python": [1, 2]}}',
    ],
)  # fmt: skip
def test_a_forged_batch_is_refused_in_one_line(sent: bytes, captured: Captured) -> None:
    def script(world: World) -> None:
        trainer = make_trainer(captured, world, stages=2)
        world.random_states = trainer.world.random_states = RandomStates()
        try:
            if world.rank:
                trainer.exchange.batch(trainer.now.placed, 1, list, list)
            else:
                send_bytes(world.transport, sent, 1, LOADED)
        finally:
            trainer.close(wait=False)

    with pytest.raises(TransportError, match=r"start again|limit"):
        in_threads(2, script)


def test_a_rank_that_fails_to_load_ends_the_others() -> None:
    with pytest.raises(AssertionError, match=r"row\.png"):
        run_groups(PROGRAMS / "failing_rows.py", [(2, [])], deadline_s=120.0)
