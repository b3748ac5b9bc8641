"""What a training takes along when its arrangement changes: optimizers, gradients, statistics; and what it refuses."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file
from torch import Tensor, nn

from penstock.deploy.run_options import Trace
from penstock.engine.placement import Grid, Replica
from penstock.errors import UsageError
from penstock.graph.cuts import Cuts
from penstock.group.world import World
from penstock.train.captured import Captured
from penstock.train.checkpoint import load_checkpoint, save_checkpoint
from penstock.train.migration import fix_microbatches, migrate
from penstock.train.save import save_model
from penstock.train.trainer import Trainer, evaluate
from tests.learners import LOSSES, batches, captured, cast
from tests.models import seeded
from tests.train.test_migration import MICROBATCHES, Way, rearrange
from tests.trainers import errors, gathered, in_threads, make_trainer, take_rows

DOUBLE = torch.float64
# devices' numbers of stages: all three, one alone, two others, replicas, all three again
PIPELINES = [None, Way(0, (((1,), 4),)), Way(0, (((2, 1), 4),)), Way(0, (((1, 1, 1), 4),))]
REPLICAS = [None, Way(0, (((1,), 4),)), Way(0, (((1,), 1), ((1, 1), 3))), Way(0, (((1, 1, 1), 4),))]
ORDERS = [[0, 1, 2], [2, 0, 1], [1, 2, 0], [2, 1, 0]]


def momentum(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-3)


def in_two_groups(make: Callable[[Any], torch.optim.Optimizer]) -> Callable[[Sequence[nn.Parameter]], Any]:
    """Vectors learn at half the rate, and without decay."""

    def made(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = make(
            [{"params": [p for p in parameters if p.dim() > 1]}, {"params": [p for p in parameters if p.dim() < 2]}]
        )
        optimizer.param_groups[1]["lr"] = optimizer.param_groups[0]["lr"] / 2
        optimizer.param_groups[1]["weight_decay"] = 0.0
        return optimizer

    return made


def check_optimizer(trainer: Trainer, optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    """The same groups, with the parameters that are here and train, each with its state, and nothing else."""
    assert optimizer is trainer.optimizers[0]
    assert all(now is was for now, was in zip(optimizer.param_groups, groups, strict=True))
    own = [p for p in trainer.now.tensors.parameters.values() if p.requires_grad]
    members = [p for group in groups for p in group["params"] if p.numel()]
    assert {id(p) for p in members} == {id(p) for p in own}
    assert len(members) == len(own)
    assert all(p.dim() > 1 for p in groups[0]["params"] if p.numel())
    assert all(p.dim() < 2 for p in groups[1]["params"])
    assert {id(p) for p in optimizer.state} <= {id(p) for p in own}


def learn(
    whole: Captured, name: str, size: int, ways: Sequence[Way | None], make: Any
) -> tuple[list[float], dict[str, Tensor], set[int]]:
    """Train in threads; gives losses, what was learned, and the ranks that had no stage at some time and later did."""
    given = cast(batches(name, len(ways), rows=8), DOUBLE)

    def script(world: World) -> Any:
        trainer = make_trainer(whole, world, replicas=1, stages=size, microbatches=MICROBATCHES, seed=3)
        fix_microbatches(trainer)
        optimizer = trainer.optimizer(in_two_groups(make))
        groups = list(optimizer.param_groups)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        losses, held = [], []
        for step, (way, (inputs, labels)) in enumerate(zip(ways, given, strict=True)):
            if way is not None:
                rearrange(trainer, whole, Way(way.frozen, (((1,), 4),)) if size == 1 else way,
                          ORDERS[step] if size > 1 else [0])  # fmt: skip
            check_optimizer(trainer, optimizer, groups)
            held.append(len(trainer.now.tensors.stages))
            rows = trainer.now.placed.grid.rows(8)[trainer.now.placed.replica_index]
            loss = trainer.train_step(take_rows(inputs, rows), take_rows(labels, rows), LOSSES[name])
            losses.append(float(loss))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            rate = groups[0]["lr"]
            assert groups[1]["lr"] == pytest.approx(rate / 2)
            assert rate == pytest.approx(groups[0]["initial_lr"] * 0.9 ** (step + 1))
        assert scheduler.optimizer is optimizer
        buffers = {n: t for n, t in trainer.now.tensors.others.items() if n in whole.names}
        trainer.close()
        came_back = 0 in held and any(held[held.index(0) :])
        return losses, gathered(trainer, lambda p: p) | buffers, came_back

    results = in_threads(size, script)
    learned: dict[str, Tensor] = {}
    for losses, tensors, _ in results:
        assert losses == results[0][0], "the loss is not the same everywhere"
        learned |= tensors
    return results[0][0], learned, {rank for rank, result in enumerate(results) if result[2]}


@pytest.mark.parametrize("make", [momentum, adamw])
@pytest.mark.parametrize(("name", "ways"), [("gpt2", REPLICAS), ("unet", PIPELINES)])
def test_an_optimizer_is_the_same_object_with_its_groups_and_its_state(
    name: str, ways: list[Way | None], make: Any
) -> None:
    whole = captured(name, DOUBLE)
    losses, expected, _ = learn(whole, name, 1, ways, make)
    found, learned, came_back = learn(whole, name, 3, ways, make)
    assert losses == pytest.approx(found, rel=1e-9)
    assert came_back, "no process was without a stage and had one again"
    assert expected.keys() <= learned.keys()
    assert max(errors(expected, {n: learned[n] for n in expected}).values()) < 1e-9


def test_lost_momentum_changes_the_weights() -> None:
    """The test above would fail if state were lost on the way."""
    whole = captured("gpt2", DOUBLE)
    _, kept, _ = learn(whole, "gpt2", 1, [None] * 3, momentum)
    _, lost, _ = learn(whole, "gpt2", 1, [None] * 3, lambda groups: torch.optim.SGD(groups, lr=0.05))
    assert max(errors(kept, lost).values()) > 1e-3


@pytest.mark.parametrize("frozen", [0, 2])
def test_pending_gradients_move_with_the_placement(frozen: int) -> None:
    whole = captured("bert", DOUBLE)
    (inputs, labels), (others, other_labels) = cast(batches("bert", 2, rows=8), DOUBLE)

    def learned(size: int, way: Way | None) -> tuple[list[float], dict[str, Tensor]]:
        def script(world: World) -> Any:
            trainer = make_trainer(whole, world, replicas=1, stages=size, microbatches=MICROBATCHES)
            fix_microbatches(trainer)
            optimizer = trainer.optimizer(momentum)
            norms = []
            for step in range(2):
                trainer.train_step(inputs, labels, LOSSES["bert"])
                if step and way is not None:
                    rearrange(trainer, whole, way, [2, 1, 0] if size > 1 else [0])
                if step:  # onto the gradients that are there
                    rows = trainer.now.placed.grid.rows(8)[trainer.now.placed.replica_index]
                    trainer.train_step(take_rows(others, rows), take_rows(other_labels, rows), LOSSES["bert"])
                norms.append(float(trainer.clip_grad_norm_(0.1)))
                optimizer.step()
                optimizer.zero_grad()
            trainer.close()
            return norms, gathered(trainer, lambda p: p)

        results = in_threads(size, script)
        assert all(result[0] == results[0][0] for result in results)
        return results[0][0], {name: tensor for result in results for name, tensor in result[1].items()}

    norms, expected = learned(1, Way(frozen, (((1,), 4),)) if frozen else None)
    found, moved = learned(3, Way(frozen, (((1,), 2), ((1,), 2))))
    assert norms == pytest.approx(found, rel=1e-9)
    assert max(errors(expected, moved).values()) < 1e-9


def test_gradients_of_frozen_layers_are_dropped() -> None:
    whole = captured("deit", DOUBLE)
    ((inputs, labels),) = cast(batches("deit", 1, rows=8), DOUBLE)

    def script(world: World) -> tuple[float, float]:
        trainer = make_trainer(whole, world, stages=1, microbatches=MICROBATCHES)
        trainer.optimizer(momentum)
        trainer.train_step(inputs, labels, F.cross_entropy)
        left = whole.frozen(1).trainable
        wanted = sum(
            float((p.grad**2).sum()) for n, p in trainer.named_parameters() if n in left and p.grad is not None
        )
        rearrange(trainer, whole, Way(1, (((1,), 4),)), [0])
        norm = float(trainer.clip_grad_norm_(1e9))
        trainer.close()
        return norm, wanted**0.5

    ((norm, wanted),) = in_threads(1, script)
    assert norm == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("other", "values"),
    [
        (in_two_groups(momentum), r"\d groups .*rank"),
        (lambda groups: torch.optim.SGD(groups, lr=0.025, momentum=0.9), r"'lr': 0\.0\d+.*'lr': 0\.0"),
    ],
)
def test_optimizers_with_other_groups_are_refused_before_anything_moves(other: Any, values: str) -> None:
    whole = captured("deit", DOUBLE)
    given = cast(batches("deit", 2, rows=8), DOUBLE)

    def script(world: World) -> Any:
        trainer = make_trainer(whole, world, stages=3, microbatches=MICROBATCHES)
        optimizer = trainer.optimizer(other if world.rank == 1 else momentum)
        losses = []
        for inputs, labels in given:
            losses.append(float(trainer.train_step(inputs, labels, F.cross_entropy)))
            optimizer.step()
            optimizer.zero_grad()
            now, parameters = trainer.now, dict(trainer.named_parameters())
            with pytest.raises(UsageError, match=values) as refusal:
                rearrange(trainer, whole, Way(0, (((1,), 4),)), [2, 1, 0])
            assert "\n" not in str(refusal.value)
            assert trainer.now is now
            assert all(parameters[name] is parameter for name, parameter in trainer.named_parameters())
        trainer.close()
        return losses

    first, *others = in_threads(3, script)
    assert len(first) == 2
    assert all(losses == first for losses in others)
    assert first[1] != first[0]


def test_a_training_that_is_traced_keeps_its_arrangement(tmp_path: Path) -> None:
    whole = captured("deit", DOUBLE)
    ((inputs, labels),) = cast(batches("deit", 1, rows=8), DOUBLE)

    def script(world: World) -> None:
        trainer = make_trainer(whole, world, stages=2, microbatches=MICROBATCHES, trace=Trace(tmp_path / "trace"))
        with pytest.raises(UsageError, match="a trace must have one plan"):
            rearrange(trainer, whole, Way(0, (((1,), 4),)), [1, 0])
        trainer.train_step(inputs, labels, F.cross_entropy)
        trainer.close()

    in_threads(2, script)


def least_bytes(trainer: Trainer, before: Any, slots: int) -> int:
    """The bytes that ranks hold now and lacked, with AdamW's slots and its number of steps."""
    total = 0
    for state in trainer.now.captured.graph.states:
        fresh = set(trainer.now.tensors.holders(state.source)) - set(before.holders(state.source))
        num_bytes = state.value.num_bytes({})
        total += len(fresh) * (num_bytes * (1 + slots) + (4 if slots else 0))
    return total


@pytest.mark.parametrize("to", [
    (Replica((1, 0, 2), (1, 0, 2), 4),),
    (Replica((0, 1, 2), (2, 2, 2), 4),),
    (Replica((0,), (0, 0, 0), 2), Replica((1, 2), (1, 1, 2), 2)),
    (Replica((0, 1, 2), (0, 1, 2), 4),),
])  # fmt: skip
def test_only_missing_weights_are_sent(to: tuple[Replica, ...]) -> None:
    """A model of 1 MB: beside what ranks lacked less than 2% goes over."""
    made = seeded(nn.Sequential, *(nn.Linear(180, 180) for _ in range(8))).train()
    whole = Captured(made, (torch.zeros(2, 180),))
    rows = torch.randn(8, 180)

    def script(world: World) -> tuple[int, int]:
        trainer = make_trainer(whole, world, stages=3, microbatches=MICROBATCHES)
        fix_microbatches(trainer)
        optimizer = trainer.optimizer(adamw)
        trainer.train_step(rows, rows, F.mse_loss)
        optimizer.step()
        optimizer.zero_grad()
        cuts, before = Cuts(whole.graph), trainer.now.tensors
        moved = migrate(trainer, trainer.now.placed.moved(Grid(to), [cuts[2], cuts[4]]))
        trainer.close()
        return moved.moved_bytes, least_bytes(trainer, before, slots=2)

    for moved_bytes, least in in_threads(3, script):
        assert least <= moved_bytes <= least + 0.02 * 1e6


@pytest.mark.parametrize("name", ["unet", "bert"])
def test_evaluation_and_the_saved_model_are_those_of_one_process(name: str, tmp_path: Path) -> None:
    whole = captured(name, DOUBLE)
    given = cast(batches(name, 3, rows=8), DOUBLE)
    ways = [Way(1, (((1, 1), 4),)), Way(2, (((1, 2), 4),)), Way(3, (((1, 1, 1), 4),))]

    def learned(size: int, path: Path) -> tuple[list[float], dict[str, Tensor]]:
        def script(world: World) -> list[float]:
            trainer = make_trainer(whole, world, replicas=1, stages=size, microbatches=MICROBATCHES)
            fix_microbatches(trainer)
            optimizer = trainer.optimizer(adamw)
            found = []
            for (inputs, labels), way, order in zip(given, ways, ORDERS, strict=False):
                found.append(evaluate(trainer, inputs, labels, LOSSES[name]))
                trainer.train_step(inputs, labels, LOSSES[name])
                optimizer.step()
                optimizer.zero_grad()
                rearrange(trainer, whole, way if size > 1 else Way(way.frozen, (((1,), 4),)), order[:size] if size > 1
                          else [0])  # fmt: skip
            found.append(evaluate(trainer, *given[0], LOSSES[name]))
            save_model(trainer, path)
            trainer.close()
            return found

        results = in_threads(size, script)
        assert all(result == results[0] for result in results)
        return results[0], load_file(path)

    losses, expected = learned(1, tmp_path / "one.safetensors")
    found, saved = learned(3, tmp_path / "three.safetensors")
    assert losses == pytest.approx(found, rel=1e-9)
    assert expected.keys() == saved.keys() == whole.names.keys()
    for key, tensor in expected.items():
        assert torch.allclose(tensor.double(), saved[key].double(), rtol=1e-9, atol=1e-12), key


def test_statistics_of_frozen_layers_are_saved_unchanged(tmp_path: Path) -> None:
    """In evaluation nothing uses how many batches were seen, but the module's state_dict has it."""
    whole = captured("unet", DOUBLE)
    given = cast(batches("unet", 3, rows=8), DOUBLE)
    layers = [cut.name for cut in whole.layers].index("down2:before") + 1

    def script(world: World) -> None:
        trainer = make_trainer(whole, world, stages=2, microbatches=MICROBATCHES)
        fix_microbatches(trainer)
        for step, (inputs, labels) in enumerate(given):
            if step:
                rearrange(trainer, whole, Way(layers, (((1, 1), 4),)), [1, 0] if step == 1 else [0, 1])
            trainer.train_step(inputs, labels, F.mse_loss)
        save_model(trainer, tmp_path / "model.safetensors")
        trainer.close()

    in_threads(2, script)
    saved = load_file(tmp_path / "model.safetensors")
    seen = {key: int(tensor) for key, tensor in saved.items() if key.endswith("num_batches_tracked")}
    assert seen["down1.norm.num_batches_tracked"] == MICROBATCHES
    assert {count for key, count in seen.items() if not key.startswith("down1.")} == {3 * MICROBATCHES}


def test_a_checkpoint_of_frozen_layers_goes_on_in_another_arrangement(tmp_path: Path) -> None:
    whole = captured("unet", DOUBLE)
    given = cast(batches("unet", 4, rows=8), DOUBLE)
    frozen = [cut.name for cut in whole.layers].index("down2:before") + 1
    one, two = Way(frozen, (((1, 1), 4),)), Way(frozen, (((2, 1), 4),))

    def script(world: World, steps: range, folder: Path | None) -> tuple[list[float], dict[str, Tensor]]:
        trainer = make_trainer(whole, world, stages=2, microbatches=MICROBATCHES)
        fix_microbatches(trainer)
        optimizer = trainer.optimizer(adamw)
        losses = []
        for step in steps:
            if step in {1, steps.start}:
                rearrange(trainer, whole, Way(0, (((1, 1), 4),)) if not step else one if step == 1 else two, [step % 2,
                          1 - step % 2])  # fmt: skip
            if step == steps.start and step:
                load_checkpoint(trainer, tmp_path / "kept", optimizer)
            inputs, labels = given[step]
            losses.append(float(trainer.train_step(inputs, labels, F.mse_loss)))
            optimizer.step()
            optimizer.zero_grad()
            if folder is not None and step == 1:
                save_checkpoint(trainer, folder, optimizer)
        save_model(trainer, tmp_path / "model.safetensors")
        trainer.close()
        return losses, load_file(tmp_path / "model.safetensors") if world.rank == 0 else {}

    losses, wanted = in_threads(2, lambda world: script(world, range(4), tmp_path / "kept"))[0]
    found, saved = in_threads(2, lambda world: script(world, range(2, 4), None))[0]
    assert found == pytest.approx(losses[2:], rel=1e-9)
    assert wanted.keys() == saved.keys()
    for key, tensor in wanted.items():
        assert torch.allclose(tensor.double(), saved[key].double(), rtol=1e-9, atol=1e-12), key
