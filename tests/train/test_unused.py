"""Parameters that the forward pass does not use, as DINOv2's mask token: as in a plain loop, they are left alone."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file
from torch import Tensor, nn

import penstock
from penstock.group.world import World
from penstock.train.captured import Captured
from penstock.train.checkpoint import load_checkpoint, save_checkpoint
from penstock.train.save import save_model
from tests.fewer import first
from tests.models import seeded
from tests.trainers import Batch, by_hand, errors, in_threads, make_trainer, train

MASK = "dinov2.embeddings.mask_token"
WAYS: list[tuple[int, dict[str, Any]]] = [(2, {"stages": 2}), (1, {"stages": 1}), (2, {"stages": 1, "replicas": 2})]

pytestmark = pytest.mark.usefixtures("one_thread")


def dinov2(mask: float = 3.0) -> nn.Module:
    import transformers

    config = transformers.Dinov2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8, num_labels=3
    )
    model = seeded(transformers.Dinov2ForImageClassification, config)
    nn.init.constant_(model.get_parameter(MASK), mask)
    return model.train()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return dinov2()


@pytest.fixture(scope="module")
def captured(model: nn.Module) -> Captured:
    return Captured(model, (torch.zeros(2, 3, 16, 16),))


def batches(num: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(4, 3, 16, 16, generator=generator), torch.randint(0, 3, (4,), generator=generator))
        for _ in range(num)
    ]


def loss(output: Any, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.logits, labels)


def decaying(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.5)


@pytest.mark.parametrize(("size", "settings"), WAYS)
def test_used_parameters_train_as_in_a_plain_loop(
    model: nn.Module, captured: Captured, size: int, settings: dict[str, Any]
) -> None:
    captured.check_trainable()
    replicas = settings.get("replicas", 1)
    got = train(captured, size, batches(3), decaying, loss, microbatches=2, **settings)
    expected = by_hand(model, batches(3), decaying, loss, [2] * replicas)
    assert got[0] == pytest.approx(expected[0], rel=1e-6)
    assert MASK not in expected[1], "a plain loop gives it no gradient"
    assert expected[1].keys() == got[1].keys()
    assert max(errors(expected[1], got[1]).values()) < 1e-5
    assert max(errors(expected[2], got[2]).values()) < 1e-5
    assert torch.equal(expected[2][MASK], torch.full((1, 16), 3.0)), "nor does weight decay change it"


@pytest.mark.parametrize(("size", "settings"), first(1, WAYS))
def test_unused_parameters_are_saved_and_resumed(
    model: nn.Module, captured: Captured, tmp_path: Path, size: int, settings: dict[str, Any]
) -> None:
    def script(world: World) -> None:
        trainer = make_trainer(captured, world, microbatches=2, **settings)
        optimizer = trainer.optimizer(decaying)
        images, labels = batches(1)[0]
        rows = trainer.now.placed.grid.rows(4)[trainer.now.placed.replica_index]
        trainer.train_step(images[rows.start : rows.stop], labels[rows.start : rows.stop], loss)
        optimizer.step()
        save_model(trainer, tmp_path / "model.safetensors")
        save_checkpoint(trainer, tmp_path / "one", optimizer)
        trainer.close()

    in_threads(size, script)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == model.state_dict().keys()
    assert torch.equal(saved[MASK], torch.full((1, 16), 3.0))
    other = Captured(dinov2(mask=7.0), (torch.zeros(2, 3, 16, 16),))

    def resume(world: World) -> None:
        trainer = make_trainer(other, world, stages=2)
        load_checkpoint(trainer, tmp_path / "one", trainer.optimizer(decaying))
        save_model(trainer, tmp_path / "resumed.safetensors")
        trainer.close()

    in_threads(2, resume)
    resumed = load_file(tmp_path / "resumed.safetensors")
    assert all(torch.equal(resumed[name], tensor) for name, tensor in saved.items())


def test_unused_parameters_are_named_once(model: nn.Module, capsys: pytest.CaptureFixture[str]) -> None:
    with penstock.Pipeline(deepcopy(model), torch.zeros(2, 3, 16, 16)) as pipe:
        optimizer = pipe.optimizer(decaying)
        for images, labels in batches(2):
            pipe.train_step(images, labels, loss)
            optimizer.step()
            optimizer.zero_grad()
    said = [line for line in capsys.readouterr().err.splitlines() if MASK in line]
    assert len(said) == 1
    assert said[0].startswith("note: the forward pass of Dinov2ForImageClassification does not use " + MASK)
