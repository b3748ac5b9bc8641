"""Check that an optimizer updates each parameter independently, which stages in several processes require."""

import inspect
from collections import OrderedDict, defaultdict
from typing import Any

import torch

from penstock.errors import UsageError

_STEPS = 3  # some optimizers combine parameters only from the second step on


def check_separable(optimizer: torch.optim.Optimizer) -> None:
    """Check that an optimizer can be split over processes that hold different parameters.

    Raises `UsageError` if the optimizer needs a closure, such as LBFGS, or if its update of a parameter depends on the
    gradients of other parameters, which is tested on a copy with two small parameters.
    """
    name = type(optimizer).__name__
    advice = "use stages=1, with replicas, or an optimizer that works parameter by parameter, such as AdamW"
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise UsageError(f"{name} needs the loss and all parameters together, which are in several processes; {advice}")
    try:
        alone, beside = _changed(optimizer, 1.0), _changed(optimizer, 100.0)
    # an error on the copy does not show that the optimizer combines parameters
    except Exception:
        return
    if not torch.equal(alone, beside):
        raise UsageError(f"{name} combines parameters, which are in several processes; {advice}")


def _changed(optimizer: torch.optim.Optimizer, other_gradient: float) -> torch.Tensor:
    """Return a small parameter after some steps, optimized together with a parameter of this gradient."""
    first, second = (torch.nn.Parameter(torch.tensor([[1.0, -2.0], [0.5, 3.0]])) for _ in range(2))
    twin: Any = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer))
    twin.state = defaultdict(dict)
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(twin, hooks, OrderedDict())
    settings = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    twin.param_groups = [{**settings, "params": [first, second]}]
    for step in range(_STEPS):
        first.grad = torch.tensor([[0.3, -0.1], [0.2, 0.05]]) / (step + 1)
        second.grad = torch.full((2, 2), other_gradient) * (step + 1)
        twin.step()
    return first.detach()
