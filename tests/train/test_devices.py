"""Training where stages compute elsewhere than on the CPU: everything lies there, and the numbers are the same."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file
from torch import Tensor

import penstock
from penstock.errors import UsageError
from penstock.group.world import World
from penstock.tensors import HOST
from penstock.train.captured import Captured
from penstock.train.checkpoint import load_checkpoint, save_checkpoint
from penstock.train.save import save_model
from penstock.train.trainer import evaluate, predict
from tests.fewer import long
from tests.learners import LOSSES, adamw, batches, captured, sgd
from tests.models import gpt2
from tests.pretend import MOST_BYTES, module
from tests.trainers import error, errors, in_threads, make_trainer, train

CLOSE = 1e-5
WAYS: list[tuple[int, dict[str, Any]]] = [
    (2, {"stages": 2, "checkpointing": True}),
    (2, {"stages": 4, "schedule": "interleaved"}),
    (4, {"stages": 2, "replicas": 2, "schedule": "zero-bubble"}),
]

pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def drops_out() -> Captured:
    return Captured(gpt2().train(), (), {"input_ids": torch.zeros(2, 9, dtype=torch.long)})


def _host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


@pytest.mark.parametrize("size", [1, 2])
def test_no_stage_waits_for_all_that_is_queued_on_its_device(size: int, pretended: torch.device) -> None:
    settled = module.num_settled

    def script(world: World) -> tuple[float, float]:
        trainer = make_trainer(captured("unet", torch.float32), world, device=pretended, microbatches=4, stages=size)
        ((images, labels),) = batches("unet", 1, rows=8)
        trainer.train_step(images, labels, LOSSES["unet"])
        trainer.close()
        return trainer.last_step.forward_s, trainer.last_step.backward_s

    assert min(seconds for report in in_threads(size, script) for seconds in report) > 0
    assert module.num_settled == settled


def test_microbatches_are_queued_without_reading_losses(pretended: torch.device) -> None:
    reads: list[int] = []

    def loss(output: Any, labels: Tensor) -> Any:
        reads.append(module.num_read)
        return LOSSES["unet"](output, labels)

    def script(world: World) -> None:
        trainer = make_trainer(captured("unet", torch.float32), world, device=pretended, microbatches=4)
        for images, labels in batches("unet", 2, rows=8):
            trainer.train_step(images, labels, loss)
        trainer.close()

    in_threads(1, script)
    assert len(set(reads[-4:])) == 1


@pytest.mark.parametrize("name", ["unet", long("gpt2")])
def test_every_way_has_the_numbers_of_one_process(name: str, pretended: torch.device) -> None:
    given = batches(name, 2, rows=8)
    way: dict[str, Any] = {"microbatches": 4, "device": pretended}
    alone = train(captured(name, torch.float32), 1, given, sgd, LOSSES[name], **way)
    on_cpu = train(captured(name, torch.float32), 1, given, sgd, LOSSES[name], microbatches=4)
    assert max(errors(on_cpu[1], _host(alone[1])).values()) < CLOSE
    for size, settings in WAYS:
        way["microbatches"] = 4 // settings.get("replicas", 1)
        losses, gradients, tensors = train(
            captured(name, torch.float32), size, given, sgd, LOSSES[name], **way, **settings
        )
        assert {t.device for t in (*gradients.values(), *tensors.values())} == {pretended}
        assert losses == pytest.approx(alone[0], rel=1e-6)
        assert max(errors(_host(alone[1]), _host(gradients)).values()) < CLOSE, settings
        if settings.get("replicas", 1) == 1:  # of several, the statistics are those of the first one
            assert max(errors(_host(alone[2]), _host(tensors)).values()) < CLOSE, settings


def test_dropout_is_drawn_again_whatever_the_stages(pretended: torch.device) -> None:
    tokens = torch.arange(72).view(8, 9) % 80
    given = [(tokens, tokens)] * 2

    def loss(output: Any, labels: Tensor) -> Tensor:
        return F.cross_entropy(output.logits.transpose(1, 2), labels)

    inputs = [({"input_ids": rows}, labels) for rows, labels in given]
    found = [
        train(drops_out(), size, inputs, sgd, loss, microbatches=2, seed=3, device=pretended, **settings)[0]
        for size, settings in [(1, {}), (2, {"stages": 2, "checkpointing": True})]
    ]
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


def _go(device: torch.device, size: int, folder: Path, *, begin: str = "", end: str = "", **settings: Any) -> list[Any]:
    """Three steps of AdamW with clipping, from a checkpoint or to one; gives what each process found."""
    whole, given = captured("deit", torch.float32), batches("deit", 6, rows=8)

    def script(world: World) -> Any:
        trainer = make_trainer(whole, world, microbatches=2, device=device, **settings)
        optimizer = trainer.optimizer(adamw)
        if begin:
            load_checkpoint(trainer, folder / begin, optimizer)
        losses, norms = [], []
        for inputs, labels in given[trainer.step :][:3]:
            losses.append(float(trainer.train_step(inputs, labels, F.cross_entropy)))
            norms.append(float(trainer.clip_grad_norm_(0.5)))
            assert {p.grad.device for _, p in trainer.named_parameters() if p.grad is not None} == {device}
            optimizer.step()
            optimizer.zero_grad()
        for parameter, state in optimizer.state.items():
            assert {key: tensor.device for key, tensor in state.items()} == {
                "step": HOST,
                "exp_avg": parameter.device,
                "exp_avg_sq": parameter.device,
            }
        assert {t.device for t in (*trainer.now.tensors.parameters.values(), *trainer.now.tensors.others.values())} <= {
            device
        }
        if end:
            save_checkpoint(trainer, folder / end, optimizer)
            save_model(trainer, folder / f"{end}.safetensors")
        output = predict(trainer, given[0][0])
        evaluated = evaluate(trainer, *given[0], F.cross_entropy)
        peak = trainer.last_step.peak_memory_bytes
        trainer.close()
        return losses, norms, output, evaluated, peak

    return in_threads(size, script)


def test_a_checkpoint_goes_on_on_another_device(tmp_path: Path, pretended: torch.device) -> None:
    there = _go(pretended, 2, tmp_path, end="there", stages=2)
    here = _go(HOST, 1, tmp_path, end="here")
    assert there[0][0] == pytest.approx(here[0][0], rel=1e-5)
    assert there[0][1] == pytest.approx(here[0][1], rel=1e-4)
    assert {result[2].device for result in there} == {HOST}
    assert error(here[0][2], there[0][2]) < 1e-4
    assert there[0][3] == pytest.approx(here[0][3], rel=1e-5)
    assert there[0][4] == MOST_BYTES
    saved, expected = load_file(tmp_path / "there.safetensors"), load_file(tmp_path / "here.safetensors")
    assert max(errors(expected, saved).values()) < 1e-2  # AdamW amplifies float32 noise
    onwards = [_go(HOST, 2, tmp_path, begin="there", stages=2), _go(pretended, 1, tmp_path, begin="here")]
    assert onwards[0][0][0] == pytest.approx(onwards[1][0][0], rel=1e-4)


def test_a_pipeline_that_trains_needs_a_gpu_that_is_there() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU on this machine")
    with pytest.raises(UsageError, match=r"is a GPU, and torch .* finds none"):
        penstock.Pipeline(torch.nn.Linear(2, 2).train(), torch.zeros(2, 2), device="cuda")
    with pytest.raises(UsageError, match="got 'tpu'"):
        penstock.Pipeline(torch.nn.Linear(2, 2).eval(), torch.zeros(2, 2), device="tpu")
