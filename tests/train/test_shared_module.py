"""The caller's module is the one that is trained."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from penstock.errors import UsageError
from penstock.pipeline import Pipeline

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(3, (8,), generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 3)
        self.never = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(torch.tanh(self.norm(self.first(x))))
        return found


def net() -> Net:
    torch.manual_seed(2)
    return Net().train()


@pytest.fixture
def model() -> Net:
    return net()


@pytest.fixture
def pipe(model: Net) -> Iterator[Pipeline]:
    with Pipeline(model, ROWS, microbatches=1) as pipe:
        yield pipe


def step(pipe: Pipeline, loss_fn: Any = F.cross_entropy) -> float:
    return float(pipe.train_step(ROWS, LABELS, loss_fn))


def plain(model: nn.Module, loss_fn: Any = F.cross_entropy) -> dict[str, Tensor]:
    """The gradients of one step in plain PyTorch."""
    twin = copy.deepcopy(model)
    loss_fn(twin(ROWS), LABELS).backward()
    return {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}


def assert_gradients(model: nn.Module, expected: dict[str, Tensor]) -> None:
    given = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert given.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(given[name], gradient, rtol=1e-5, atol=1e-7)


def test_an_optimizer_of_the_models_parameters_trains_it(model: Net) -> None:
    twin = copy.deepcopy(model)
    before, reference = (torch.optim.AdamW(m.parameters(), lr=0.05) for m in (model, twin))
    with Pipeline(model, ROWS, microbatches=1) as pipe:
        for _ in range(4):
            step(pipe)
            before.step()
            before.zero_grad()
            F.cross_entropy(twin(ROWS), LABELS).backward()
            reference.step()
            reference.zero_grad()
    for name, tensor in twin.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=1e-5, atol=1e-6)
    assert torch.allclose(model.eval()(ROWS), twin.eval()(ROWS), atol=1e-5)


def test_hooks_of_parameters_run_once_in_a_step(model: Net) -> None:
    seen: list[Tensor] = []
    model.first.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
    model.last.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    expected = plain(model)  # a copy has no hooks
    with Pipeline(model, ROWS, microbatches=1) as pipe:
        model.last.weight.register_hook(lambda g: g * 0)
        step(pipe)
    hooked = {"first.weight": expected["first.weight"].clamp(-0.01, 0.01), "last.weight": 0 * expected["last.weight"]}
    assert_gradients(model, expected | hooked)
    assert len(seen) == 1
    assert torch.equal(seen[0], expected["last.bias"])


def test_hooks_over_several_parameters(model: Net) -> None:
    seen: list[int] = []
    torch.autograd.graph.register_multi_grad_hook(
        list(model.parameters())[:2], lambda gradients: seen.append(len(gradients))
    )
    with Pipeline(model, ROWS, microbatches=4) as pipe:
        step(pipe)
        step(pipe)
    assert seen == [2, 2]


def test_a_parameter_that_is_frozen_meanwhile_stays(model: Net, pipe: Pipeline) -> None:
    dict(pipe.named_parameters())["first.weight"].requires_grad_(False)
    step(pipe)
    assert model.first.weight.grad is None
    assert model.last.weight.grad is not None


def test_unfreezing_a_parameter_is_refused(model: Net) -> None:
    model.first.weight.requires_grad_(False)
    with Pipeline(model, ROWS, microbatches=1) as pipe:
        step(pipe)
        model.first.weight.requires_grad_(True)
        with pytest.raises(UsageError, match=r"first\.weight"):
            step(pipe)


@pytest.mark.parametrize("change", ["eval", "forward hook", "backward hook"])
def test_a_change_after_the_capture_is_refused(model: Net, pipe: Pipeline, change: str) -> None:
    step(pipe)
    if change == "eval":
        model.norm.eval()
    elif change == "forward hook":
        model.norm.register_forward_hook(lambda *_: None)
    else:
        model.norm.register_full_backward_hook(lambda *_: None)
    with pytest.raises(UsageError, match="norm"):
        step(pipe)


def test_a_backward_hook_that_is_removed_is_not_called_any_more(model: Net) -> None:
    seen: list[int] = []
    handle = model.last.register_full_backward_hook(lambda *_: seen.append(1))
    with Pipeline(model, ROWS, microbatches=1) as pipe:
        step(pipe)
        handle.remove()
        step(pipe)
    assert len(seen) == 1


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_penalty_on_parameters_is_part_of_the_loss(schedule: str, microbatches: int) -> None:
    model = net()
    model.norm.eval()  # whose statistics are those of a microbatch

    def penalized(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y) + 0.1 * sum(p.abs().sum() for p in model.parameters())

    twin = copy.deepcopy(model)
    (F.cross_entropy(twin(ROWS), LABELS) + 0.1 * sum(p.abs().sum() for p in twin.parameters())).backward()
    with Pipeline(model, ROWS, microbatches=microbatches, schedule=schedule) as pipe:
        step(pipe, penalized)
        assert_gradients(model, {name: p.grad for name, p in twin.named_parameters() if p.grad is not None})
        step(pipe, penalized)
        model.first.weight.register_hook(lambda g: g)
        with pytest.raises(UsageError, match=r"first\.weight"):
            step(pipe, penalized)


def test_a_loss_with_parameters_of_its_own_is_trained_alone() -> None:
    model = net()
    model.norm.eval()
    center = nn.Parameter(torch.zeros(3))

    def centered(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out - center, y)

    twin = copy.deepcopy(model)
    centered(twin(ROWS), LABELS).backward()
    expected, center.grad = center.grad, None
    with Pipeline(model, ROWS, microbatches=4) as pipe:
        step(pipe, centered)
    torch.testing.assert_close(center.grad, expected)
