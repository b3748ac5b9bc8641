"""What a model does backward in Python, and without gradients, happens in stages as in one process."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from penstock.errors import CaptureError, PenstockError
from penstock.graph.capture import capture
from penstock.graph.cuts import Cuts
from penstock.train.captured import Captured
from tests.fewer import long
from tests.models import OLD_TORCH
from tests.trainers import by_hand, errors, train

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(3, (8,), generator=torch.Generator().manual_seed(1))
WAYS: list[tuple[int, dict[str, Any]]] = [
    (1, {"checkpointing": True}),
    (3, {"stages": 3}),
    (2, {"stages": 2, "schedule": "zero-bubble"}),
]


class Reverse(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return -gradients[0] * ctx.factor, None


class Sign(Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(_ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


class Scaled(Function):
    """Saves its inputs, takes a size and a weight, and returns a tuple with what is no tensor."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, width: int) -> tuple[Tensor, None, Tensor]:
        return x * weight, None, (x * width).detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0], inputs[1])
        ctx.mark_non_differentiable(output[2])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        return gradients[0] * weight * 0.5, (gradients[0] * x).sum(0), None


class Bounded(Function):
    """Changes gradients by more than a factor."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, *gradients: Any) -> Any:
        return gradients[0].clamp(-0.005, 0.005)


class Doubles(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(_ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


Middle = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """Three linear layers, with something of a user's own between the first two."""

    def __init__(self, middle: Middle) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.rand(4) + 0.5)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.third(F.gelu(self.second(self.middle(self, self.first(x)) * self.scale)))
        return out


def net(middle: Middle = lambda _, h: h) -> Net:
    torch.manual_seed(3)
    return Net(middle).train()


def hooked(_: Net, h: Tensor) -> Tensor:
    used_before = h * 2
    h.register_hook(lambda g: g * 0.25)
    h.register_hook(lambda _g: None)
    return h + used_before


def bounds(_: Net, h: Tensor) -> Tensor:
    h.register_hook(lambda g: g.clamp(-0.005, 0.005))
    return h


def clamps(module: Net, h: Tensor) -> Tensor:
    with torch.no_grad():
        module.second.weight.clamp_(-0.2, 0.2)
    return h


def copies(module: Net, h: Tensor) -> Tensor:
    with torch.no_grad():
        module.second.weight.copy_(F.normalize(module.second.weight, dim=1))
        torch.clamp(module.second.weight, -0.2, 0.2, out=module.second.weight)
    return h


def decays(module: Net, h: Tensor) -> Tensor:
    with torch.no_grad():
        module.second.weight.mul_(0.9)
        module.second.weight.view(16).sub_(0.1)
    return h


def clamps_data(module: Net, h: Tensor) -> Tensor:
    module.second.weight.data.clamp_(-0.2, 0.2)
    module.second.weight.data[0] = 0.1
    return h


def divides(_: Net, h: Tensor) -> Tensor:
    with torch.no_grad():
        largest = h.abs().amax(1, keepdim=True)
        same = h
        with torch.enable_grad():
            tripled = h * 3
    return h / largest + tripled + same


def infers(_: Net, h: Tensor) -> Tensor:
    with torch.inference_mode():
        torch.zeros(3).add_(1)
        h.sum()
    return h


@torch.no_grad()
def without(h: Tensor) -> Tensor:
    return h.relu()


MIDDLES: dict[str, Middle] = {
    "reversal": lambda _, h: Reverse.apply(h, 2.0),
    "estimator": lambda _, h: h + Sign.apply(h),
    "bounds": lambda _, h: Bounded.apply(h),
    "hook that bounds": bounds,
    "saves": lambda m, h: Scaled.apply(h, m.scale, h.shape[1])[0],
    "a size of the batch": lambda m, h: Scaled.apply(h, m.scale, h.shape[0])[0].view(h.shape),
    "twice": lambda _, h: Reverse.apply(Reverse.apply(h, 2.0), h.shape[1] * 1.0),
    "hook": hooked,
    "clamp": clamps,
    "copy": copies,
    "decay": decays,
    "data": clamps_data,
    "no_grad": divides,
    "decorated": lambda _, h: h + without(h),
    "inference_mode": infers,
    "reentrant": lambda m, h: checkpoint(lambda x: torch.tanh(m.first(x)), h, use_reentrant=True),
}
if not OLD_TORCH:
    MIDDLES["checkpoint"] = lambda m, h: checkpoint(lambda x: torch.tanh(m.first(x)), h, use_reentrant=False)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def plain(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    """The losses, the first step's gradients and the trained tensors of PyTorch with whole batches."""
    twin = copy.deepcopy(model)
    optimizer = sgd(list(twin.parameters()))
    losses: list[float] = []
    first: dict[str, Tensor] = {}
    for rows, labels in batches:
        loss = F.cross_entropy(twin(rows), labels)
        loss.backward()
        losses.append(float(loss.detach()))
        first = first or {name: p.grad.clone() for name, p in twin.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return losses, first, dict(twin.named_parameters()) | dict(twin.named_buffers())


def assert_trains_alike(model: nn.Module, ways: list[tuple[int, dict[str, Any]]] = WAYS, parts: int = 1) -> None:
    batches = [(ROWS, LABELS), (ROWS.flip(0), LABELS.flip(0))]
    expected = plain(model, batches) if parts == 1 else by_hand(model, batches, sgd, F.cross_entropy, [parts])
    captured = Captured(copy.deepcopy(model), (ROWS,))
    for size, settings in ways:
        got = train(captured, size, batches, sgd, F.cross_entropy, microbatches=4, **settings)
        assert got[0] == pytest.approx(expected[0], rel=1e-6)
        assert set(got[1]) == set(expected[1])
        assert max(errors(expected[1], got[1]).values()) < 1e-5, settings
        assert max(errors(expected[2], got[2]).values()) < 1e-5, settings


ALIKE = {"estimator", "bounds", "hook that bounds", "twice", "copy", "decay", "decorated", "reentrant"}


@pytest.mark.parametrize("name", [long(name) if name in ALIKE else name for name in MIDDLES])
def test_functions_between_stages_train_as_in_one_process(name: str) -> None:
    assert_trains_alike(net(MIDDLES[name]))


@pytest.mark.parametrize("of", ["second", "", long("first"), long("third")])
def test_backward_hooks_of_modules(of: str) -> None:
    model = net()
    module: Any = model.get_submodule(of)
    module.register_full_backward_pre_hook(lambda _m, given: (given[0] * 0.5,))
    module.register_full_backward_hook(lambda _m, found, _given: tuple(g if g is None else g * 3 for g in found))
    assert_trains_alike(model, WAYS if of else WAYS[:1])
    assert bool(capture(model, (ROWS,)).allowed) == bool(of)


@pytest.mark.parametrize("normalized", [torch.nn.utils.spectral_norm, parametrizations.spectral_norm])
def test_spectral_norm_in_both_forms(normalized: Callable[[nn.Module], nn.Module]) -> None:
    model = net()
    model.second = normalized(model.second)  # type: ignore[assignment]
    assert_trains_alike(model, parts=4)


@pytest.mark.parametrize("loss_fn", [lambda out, y: F.cross_entropy(out, y, reduction="sum"), F.cross_entropy])
def test_hooks_see_the_gradient_of_the_loss_of_the_batch(loss_fn: Any) -> None:
    model = net(bounds)
    twin = copy.deepcopy(model)
    loss_fn(twin(ROWS), LABELS).backward()
    expected = {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}
    for size, settings in ((1, {"microbatches": 4}), (2, {"replicas": 2, "stages": 1, "microbatches": 2})):
        _, gradients, _ = train(Captured(model, (ROWS,)), size, [(ROWS, LABELS)], sgd, loss_fn, **settings)
        assert max(errors(expected, gradients).values()) < 1e-5


def test_hook_runs_in_each_step_with_its_tensor() -> None:
    seen: list[tuple[int, ...]] = []

    def watch(_: Net, h: Tensor) -> Tensor:
        h.register_hook(lambda g: seen.append(tuple(g.shape)))
        return h

    captured = Captured(net(watch), (ROWS,))
    train(captured, 2, [(ROWS, LABELS)] * 3, sgd, F.cross_entropy, stages=2, microbatches=4)
    assert seen == [(2, 4)] * 12
    assert "first:after" not in [cut.name for cut in Cuts(captured.graph)]


def derives(_: Net, h: Tensor) -> Tensor:
    return h + torch.autograd.grad(h.pow(2).sum(), h, create_graph=True)[0]


def retains(_: Net, h: Tensor) -> Tensor:
    h.retain_grad()
    return h


def goes_back(_: Net, h: Tensor) -> Tensor:
    h.sum().backward()
    return h


def assigns(module: Net, h: Tensor) -> Tensor:
    module.first.weight.data = module.first.weight * 2
    return h


def hooks_a_parameter(module: Net, h: Tensor) -> Tensor:
    module.first.weight.register_hook(lambda g: g)
    return h


def hooks_a_node(_: Net, h: Tensor) -> Tensor:
    h.grad_fn.register_hook(lambda *_: None)  # type: ignore[union-attr]
    return h


def in_place(_: Net, h: Tensor) -> Tensor:
    found: Tensor = Doubles.apply(h)
    return found


@pytest.mark.parametrize(
    "middle",
    [derives, retains, goes_back, assigns, hooks_a_parameter, hooks_a_node, in_place],
    ids=lambda m: m.__name__,
)
def test_uncapturable_hook_is_refused_with_its_line(middle: Middle) -> None:
    with pytest.raises(CaptureError, match=r"\(test_autograd\.py:\d+: ") as raised:
        Captured(net(middle), (ROWS,))
    assert "\n" not in str(raised.value)


def test_hooks_that_pytorch_has_deprecated_are_refused() -> None:
    model = net()
    model.second.register_backward_hook(lambda *_: None)
    with pytest.raises(CaptureError, match="second"):
        Captured(model, (ROWS,))


def test_capture_leaves_torch_and_the_model_as_they_were() -> None:
    apply, enter = vars(Function)["apply"], torch.inference_mode.__enter__
    model = net(hooked)
    for middle in (hooked, derives):
        model.middle = middle
        try:
            capture(model, (ROWS,))
        except CaptureError:
            assert middle is derives
        assert vars(Function)["apply"] is apply
        assert torch.inference_mode.__enter__ is enter
        assert "_call_impl" not in vars(model)


def test_an_evaluation_needs_no_hooks() -> None:
    model = net(hooked).eval()
    assert not capture(model, (ROWS,)).callbacks


class Normalized(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), norm, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.norm(self.first(x)))
        return found


def test_no_microbatch_is_too_short_for_batch_norm() -> None:
    torch.manual_seed(0)
    model = Normalized(nn.BatchNorm1d(4)).train()
    rows, labels = ROWS[:5], LABELS[:5]
    loss, gradients, tensors = train(
        Captured(copy.deepcopy(model), (ROWS,)), 1, [(rows, labels)], sgd, F.cross_entropy, microbatches=4
    )
    expected = by_hand(model, [(rows, labels)], sgd, F.cross_entropy, [2])
    assert loss == pytest.approx(expected[0])
    assert max(errors(expected[1], gradients).values()) < 1e-5
    assert torch.equal(tensors["norm.running_var"], expected[2]["norm.running_var"])


def test_batch_norm_of_one_row_fails_as_in_torch() -> None:
    model = Normalized(nn.BatchNorm1d(4)).train()
    with pytest.raises(PenstockError, match=r"more than 1 value per channel .*\[1, 4\]"):
        train(Captured(model, (ROWS,)), 1, [(ROWS[:1], LABELS[:1])], sgd, F.cross_entropy, microbatches=1)
    assert not model.norm.get_buffer("running_var").isnan().any()
