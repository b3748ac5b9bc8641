"""An elastic training learns what one process learns that freezes alike, computes everything and moves nothing."""

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.elastic.elastic_training import ElasticTraining
from penstock.elastic.freezing import ByHand, Guarded
from penstock.errors import RunError
from penstock.train.checkpoint import load_checkpoint, save_checkpoint
from penstock.train.loader import Loader
from penstock.train.trainer import Trainer, evaluate
from tests.elastic.trainings import (
    LAYERS,
    SAMPLES,
    Outcome,
    Step,
    adamw,
    alone,
    assert_same,
    assert_same_history,
    files_in,
    images,
    sgd,
    train_elastically,
    vit,
)
from tests.fewer import examples, first, long

FREEZE = [0, 2, 4, 4, 6]
EXACT, SINGLE = (torch.float64, adamw), (torch.float32, sgd)

pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def _expected(how: tuple[torch.dtype, Any]) -> Outcome:
    dtype, make = how
    return alone(vit(dtype), images(dtype), FREEZE, epochs=6, make=make)


@pytest.mark.parametrize(
    ("size", "how", "changed"),
    [
        (3, EXACT, {}),
        long(1, EXACT, {}),
        long(3, SINGLE, {"hosts": ["a", "b", "a"], "cluster": None}),
        long(3, EXACT, {"replicate": False}),
        long(2, EXACT, {"arranged": {"stages": 4, "schedule": "interleaved"}}),
        long(3, SINGLE, {"arranged": {"stages": 3, "schedule": "zero-bubble"}, "replicate": False}),
    ],
)
def test_elastic_training_matches_one_process(
    size: int, how: tuple[torch.dtype, Any], changed: dict[str, Any], tmp_path: Path
) -> None:
    dtype, make = how
    expected = _expected(how)
    found = train_elastically(vit(dtype), size, images(dtype), FREEZE, epochs=6, make=make, folder=tmp_path, **changed)
    assert_same(expected, found)
    assert found.samples == [list(range(SAMPLES))] * 6
    assert [(change.epoch, change.frozen_layers) for change in found.changes] == list(enumerate([*FREEZE, 6]))
    assert any(change.cached for change in found.changes)
    assert tmp_path.exists(), "the folder is the user's"
    assert not list(tmp_path.iterdir())


def test_replicas_that_are_not_alike_go_on_with_their_microbatches(tmp_path: Path) -> None:
    arranged = {"stages": 2, "replicas": 2}  # of two devices, and of one
    expected = alone(vit(), images(), [0, 4], epochs=3, arranged={"microbatches": 8})
    found = train_elastically(vit(), 3, images(), [0, 4], epochs=3, folder=tmp_path, arranged=arranged)
    assert_same(expected, found)


def test_a_cache_of_bfloat16_is_close(tmp_path: Path) -> None:
    expected = _expected(EXACT)
    found = train_elastically(vit(), 3, images(), FREEZE, epochs=6, folder=tmp_path, cache_dtype="bfloat16")
    first = 3 * next(change.epoch for change in found.changes if change.cached)
    assert found.losses[:first] == pytest.approx(expected.losses[:first], rel=1e-9)
    assert found.losses[first:] == pytest.approx(expected.losses[first:], rel=1e-2)
    assert found.losses[first:] != pytest.approx(expected.losses[first:], rel=1e-5)


@settings(max_examples=examples(3), suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(freeze=st.lists(st.integers(0, LAYERS), min_size=1, max_size=5), pipelined=st.booleans())
@example(freeze=[6, 6, 3], pipelined=False)
def test_any_layers_may_be_frozen_and_thawed(freeze: list[int], pipelined: bool, tmp_path: Path) -> None:
    epochs = len(freeze) + 1
    expected = alone(vit(), images(), freeze, epochs=epochs)
    found = train_elastically(vit(), 2, images(), freeze, epochs=epochs, folder=tmp_path, replicate=not pipelined)
    # the cache rounds to float32, and AdamW divides by gradients near zero: a bias is off by 1.5e-5, all else by 2e-7
    assert_same(expected, found, tolerance=1e-4)
    assert not list(tmp_path.iterdir())


def test_thawed_layers_are_cached_again_or_not_at_all(tmp_path: Path) -> None:
    freeze = [0, 4, 2, 2, 0, 0]
    found = train_elastically(vit(), 2, images(), freeze, epochs=6, folder=tmp_path)
    assert [change.cached for change in found.changes] == [False, True, True, True, False, False]
    assert "caches 2 layers" in found.changes[2].why
    assert "reads 2 layers" in found.changes[3].why
    assert_same(alone(vit(), images(), freeze, epochs=6), found)


def _doubled(step: Step, *, in_place: bool) -> Tensor:
    """Change some batches of each epoch once layers are frozen."""
    if step.epoch < 2 or step.number % 2:
        return step.train()
    return step.train(step.inputs.mul_(2) if in_place else step.inputs * 2)


def _twice(step: Step) -> Tensor:
    step.train()
    return step.train()


def _own_rows(step: Step) -> Tensor:
    """Train on rows of another loader too."""
    other = Loader(step.trainer, images(seed=9, count=8), batch_size=8)
    for inputs, labels in other:
        step.trainer.train_step(inputs, labels, F.cross_entropy)
    return step.train()


def _evaluated(step: Step) -> Tensor:
    """Look at other rows before the step."""
    for inputs, labels in Loader(step.trainer, images(seed=9, count=8), batch_size=8):
        evaluate(step.trainer, inputs, labels, F.cross_entropy)
    return step.train()


@pytest.mark.parametrize(
    "loop",
    first(2, [partial(_doubled, in_place=True), _own_rows, partial(_doubled, in_place=False), _twice, _evaluated]),
)
def test_rows_loaded_otherwise_are_computed(loop: Any, tmp_path: Path) -> None:
    """Also where one process has the layers that are cached, and another one the last."""
    expected = alone(vit(), images(), [0, 4], epochs=3, loop=loop)
    found = train_elastically(vit(), 2, images(), [0, 4], epochs=3, loop=loop, folder=tmp_path, replicate=False)
    assert [change.cached for change in found.changes] == [False, True, True]
    assert_same(expected, found)


def test_a_loop_that_changes_every_batch_has_no_cache(tmp_path: Path) -> None:
    def loop(step: Step) -> Tensor:
        return step.train(step.inputs * 2)

    expected = alone(vit(), images(), [0, 4], epochs=3, loop=loop)
    found = train_elastically(vit(), 2, images(), [0, 4], epochs=3, loop=loop, folder=tmp_path)
    assert not any(change.cached for change in found.changes)
    assert_same(expected, found)


def _grouped(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Weights and biases in groups of their own."""
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        ],
        lr=1e-3,
    )


def test_freezing_that_is_taken_back(tmp_path: Path) -> None:
    policy = Guarded(ByHand([0, 4]), then="take back")
    accuracies = [0.7, 0.6, 0.6, 0.6, 0.6]
    groups: list[dict[str, float]] = [{} for _ in accuracies]

    def between(trainer: Trainer, elastic: ElasticTraining, epoch: int) -> None:
        elastic.validated(accuracy=accuracies[epoch])
        (optimizer,) = trainer.optimizers
        decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
        trained = trainer.now.captured.trainable
        groups[epoch] |= {name: decay[id(p)] for name, p in trainer.now.tensors.parameters.items() if name in trained}

    found = train_elastically(vit(), 2, images(), policy, epochs=5, make=_grouped, between=between, folder=tmp_path)
    assert [record.frozen_layers for record in found.history] == [0, 4, 0, 0, 0]
    assert [record.accuracy for record in found.history] == accuracies
    assert len(groups[1]) < len(groups[0])
    assert (
        groups[2] == groups[0] == {n: 0.1 if t.dim() > 1 else 0.0 for n, t in found.weights.items() if n in groups[0]}
    )
    assert min(found.history[3].gradient_norms) > 0, "they train again"
    assert_same(alone(vit(), images(), [0, 4, 0, 0, 0], epochs=5, make=_grouped), found)


@cache
def _whole() -> Outcome:
    return alone(vit(), images(), [0, 2, 4, 6], epochs=5)


class _TornError(Exception):
    """The run ends here."""


@pytest.mark.parametrize(
    ("place", "sizes"),
    [((2, 1), (3, 1)), ((2, 2), (2, 2)), long((1, 2), (2, 3)), long((2, 0), (2, 2)), long((3, 2), (1, 2))],
)
def test_a_checkpoint_at_any_batch_goes_on_as_the_training_did(
    place: tuple[int, int], sizes: tuple[int, int], tmp_path: Path
) -> None:
    """The last batch of an epoch, 2, is where the epoch is over for the loader but not for the loop."""
    freeze = [0, 2, 4, 6]
    whole = _whole()
    folder = tmp_path / "checkpoint"

    def save(step: Step) -> Tensor:
        trainer = step.trainer
        if (step.epoch, step.number) > place:
            raise _TornError
        loss = step.train()
        if (step.epoch, step.number) == place:
            (optimizer,) = trainer.optimizers
            optimizer.step()
            optimizer.zero_grad()
            save_checkpoint(trainer, folder, optimizer, None, step.elastic._loader)
        return loss

    with pytest.raises((_TornError, RunError)):
        train_elastically(vit(), sizes[0], images(), freeze, epochs=5, loop=save, folder=tmp_path / "cache")
    done = 3 * place[0] + place[1] + 1
    rest = train_elastically(vit(), sizes[1], images(), freeze, epochs=5, folder=tmp_path / "cache", resume=folder)
    assert rest.losses == pytest.approx(whole.losses[done:], rel=1e-5)
    assert_same_history(whole, rest)


def test_an_earlier_checkpoint_is_loaded_while_layers_are_cached(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"

    def between(trainer: Trainer, elastic: ElasticTraining, epoch: int) -> None:
        (optimizer,) = trainer.optimizers
        if epoch == 0:
            save_checkpoint(trainer, folder, optimizer, None, elastic._loader)
        elif epoch == 2 and len(elastic.changes) == 3:
            load_checkpoint(trainer, folder, optimizer, None, elastic._loader)
            assert elastic.frozen_layers == 0

    found = train_elastically(vit(), 2, images(), [0, 4], epochs=3, folder=tmp_path / "cache", between=between)
    assert [(change.epoch, change.cached) for change in found.changes] == [
        (0, False), (1, True), (2, True), (1, True), (2, True),
    ]  # fmt: skip
    assert found.losses[9:] == pytest.approx(found.losses[3:9], rel=1e-5)
    assert [record.epoch for record in found.history] == [0, 1, 2]
    assert files_in(tmp_path / "cache") == []
