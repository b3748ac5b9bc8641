"""Gradients of tensors before the pipeline: an encoder, a soft prompt, an input that requires a gradient."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import penstock
from penstock.errors import UsageError
from penstock.group.world import World
from tests.trainers import in_threads

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, WIDTH = 6, 4
LABELS = torch.arange(ROWS) % 3


class Model(nn.Module):
    """Adds a prompt that all rows share, and uses its input again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, prompt: Tensor) -> Tensor:
        y = self.first(x + prompt).tanh()
        y = self.third(self.second(y).tanh())
        made: Tensor = self.head(y + x)
        return made


MODEL, ENCODER = Model().double().train(), nn.Linear(WIDTH, WIDTH).double()
GIVEN = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).double()
PROMPT = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(2)).double()
LOSSES: dict[str, Any] = {
    "mean": F.cross_entropy,
    "sum": lambda out, y: F.cross_entropy(out, y, reduction="sum"),
    "pair": lambda out, y: (F.cross_entropy(out, y, reduction="sum"), len(y)),
    "weighted": lambda out, y: F.cross_entropy(out, y, torch.tensor([1.0, 2.0, 3.0]).double()),
}


def leaves() -> tuple[nn.Module, Tensor]:
    return copy.deepcopy(ENCODER), PROMPT.clone().requires_grad_()


def inputs_of(encoder: nn.Module, prompt: Tensor) -> tuple[Tensor, Tensor]:
    return encoder(GIVEN), prompt.mean(0)


def by_hand(loss_fn: Any, steps: int = 1) -> list[Tensor]:
    encoder, prompt = leaves()
    model = copy.deepcopy(MODEL)
    for _ in range(steps):
        loss = loss_fn(model(*inputs_of(encoder, prompt)), LABELS)
        (loss[0] / loss[1] if isinstance(loss, tuple) else loss).backward()
    return [p.grad for p in (*encoder.parameters(), prompt) if p.grad is not None]


def in_pipe(loss_fn: Any, steps: int = 1, **settings: Any) -> list[Tensor]:
    encoder, prompt = leaves()
    with penstock.Pipeline(copy.deepcopy(MODEL), (GIVEN, PROMPT[0]), **settings) as pipe:
        for _ in range(steps):
            features, shared = inputs_of(encoder, prompt)
            features.retain_grad()
            pipe.train_step((features, shared), LABELS, loss_fn)
            assert features.grad is not None
            assert features.grad.any()
        return [p.grad for p in (*encoder.parameters(), prompt) if p.grad is not None]


def check(found: list[Tensor], loss: str, steps: int = 1) -> None:
    wanted = by_hand(LOSSES[loss], steps)
    assert len(found) == len(wanted) == 3
    for pair in zip(found, wanted, strict=True):
        torch.testing.assert_close(*pair)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("microbatches", [1, 4])
def test_an_encoder_and_a_prompt_learn(microbatches: int, loss: str) -> None:
    check(in_pipe(LOSSES[loss], microbatches=microbatches, steps=2), loss, steps=2)


@pytest.mark.parametrize(("schedule", "checkpointing"), [("gpipe", False), ("1f1b", True), ("zero-bubble", False)])
def test_input_gradients_are_on_every_rank(schedule: str, checkpointing: bool) -> None:
    def script(world: World) -> list[Tensor]:
        return in_pipe(
            LOSSES["mean"], stages=3, microbatches=3, schedule=schedule, world=world, checkpointing=checkpointing
        )

    for found in in_threads(3, script):
        check(found, "mean")


def test_hooks_in_the_model_see_the_same() -> None:
    model = copy.deepcopy(MODEL)
    model.second.register_full_backward_hook(lambda *_: None)
    encoder, prompt = leaves()
    with penstock.Pipeline(model, (GIVEN, PROMPT[0]), microbatches=3) as pipe:
        pipe.train_step(inputs_of(encoder, prompt), LABELS, F.cross_entropy)
    check([p.grad for p in (*encoder.parameters(), prompt) if p.grad is not None], "mean")


def frozen(model: Model) -> Model:
    model.first.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("change", "size", "settings", "value"),
    [(lambda m: m, 2, {"stages": 1, "replicas": 2}, "replicas=1"), (frozen, 2, {"cuts": ["first:after"]}, "stages=1")],
)
def test_a_gradient_that_would_be_wrong_is_refused(change: Any, size: int, settings: Any, value: str) -> None:
    def script(world: World) -> None:
        model = change(copy.deepcopy(MODEL))
        with penstock.Pipeline(model, (GIVEN, PROMPT[0]), world=world, microbatches=2, **settings) as pipe:
            features = GIVEN.clone().requires_grad_()
            with pytest.raises(UsageError, match=f"'x'.*{value}"):
                pipe.train_step((features, PROMPT[0]), LABELS, F.cross_entropy)
            pipe.train_step((features.detach(), PROMPT[0]), LABELS, F.cross_entropy)  # the way out

    in_threads(size, script)
    if value == "stages=1":
        with penstock.Pipeline(frozen(copy.deepcopy(MODEL)), (GIVEN, PROMPT[0]), microbatches=2) as pipe:
            pipe.train_step((GIVEN.clone().requires_grad_(), PROMPT[0]), LABELS, F.cross_entropy)


def test_inputs_that_differ_between_ranks_are_refused() -> None:
    def script(world: World) -> None:
        with penstock.Pipeline(copy.deepcopy(MODEL), (GIVEN, PROMPT[0]), world=world, stages=2) as pipe:
            with pytest.raises(UsageError, match=r"\['x'\] on rank 0 and \[\] on rank 1"):
                pipe.train_step((GIVEN.clone().requires_grad_(world.rank == 0), PROMPT[0]), LABELS, F.cross_entropy)
            assert all(p.grad is None for _, p in pipe.named_parameters())

    in_threads(2, script)


def test_labels_of_a_graph_are_refused_for_several_microbatches() -> None:
    targets = ENCODER(GIVEN)
    with (
        penstock.Pipeline(copy.deepcopy(MODEL), (GIVEN, PROMPT[0]), microbatches=2) as pipe,
        pytest.raises(UsageError, match="detach"),
    ):
        pipe.train_step((GIVEN, PROMPT[0]), targets, lambda out, y: (out - y[:, :3]).square().mean())
