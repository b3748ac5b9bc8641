"""Optimizers of stages: each parameter must be updated by itself, and an optimizer may have no parameters here."""

import contextlib
import functools
import inspect
import threading
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from penstock.errors import UsageError
from penstock.tensors import HOST

_patching = threading.RLock()  # threads may play processes
_checks: list[Callable[[torch.optim.Optimizer], None]] = []  # of this process's trainings, before each step
_STEPS = 3  # some optimizers combine parameters only from the second step on


def check_separable(optimizer: torch.optim.Optimizer) -> None:
    """Check that an optimizer can be split over processes that hold different parameters.

    Raises `UsageError` if the optimizer needs a closure, such as LBFGS, if its update of a parameter depends on the
    gradients of other parameters, which is tested on a copy with two small parameters, or if it cannot be tested.
    """
    name = type(optimizer).__name__
    advice = "use stages=1, with replicas, or an optimizer that works parameter by parameter, such as AdamW"
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    # by this name, SAM and its relatives climb along the gradients of all parameters
    if hasattr(optimizer, "first_step") or (closure is not None and closure.default is closure.empty):
        raise UsageError(f"{name} needs the loss and all parameters together, which are in several processes; {advice}")
    own = next((p.device for group in optimizer.param_groups for p in group["params"]), HOST)
    try:
        try:
            alone, beside = _changed(optimizer, 1.0, HOST), _changed(optimizer, 100.0, HOST)
        # some options are for one kind of device
        except Exception:
            if own.type in (HOST.type, "meta"):
                raise
            alone, beside = _changed(optimizer, 1.0, own), _changed(optimizer, 100.0, own)
    # whatever the optimizer raises, nothing has shown that it works parameter by parameter
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        raise UsageError(
            f"{name} must work parameter by parameter, since these are in several processes, but its step fails on two "
            f"small parameters and without a closure ({reason}); {advice}"
        ) from error
    if not torch.equal(alone, beside):
        raise UsageError(f"{name} combines parameters, which are in several processes; {advice}")


def check_at_steps(is_divided: Callable[[torch.optim.Optimizer], bool]) -> Callable[[], None]:
    """Check each optimizer for which `is_divided` returns True before its first step, as those of `model.parameters()`.

    Returns a function that ends this.
    """
    _hook()
    checked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def check(optimizer: torch.optim.Optimizer) -> None:
        if optimizer not in checked and is_divided(optimizer):
            check_separable(optimizer)
            checked.add(optimizer)

    _checks.append(check)
    return functools.partial(_checks.remove, check)


@functools.cache
def _hook() -> None:
    """Let torch call all checks before each step, for good: a step fails while a hook is removed in another thread."""

    def check_all(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for check in list(_checks):
            check(optimizer)

    register_optimizer_step_pre_hook(check_all)


def _changed(optimizer: torch.optim.Optimizer, other_gradient: float, device: torch.device) -> torch.Tensor:
    """Return a small parameter after some steps, optimized together with a parameter of this gradient."""
    begin = torch.tensor([[1.0, -2.0], [0.5, 3.0]], device=device)
    first, second = (torch.nn.Parameter(begin.clone()) for _ in range(2))
    twin = _twin(optimizer, [first, second], {})
    for step in range(_STEPS):
        first.grad = torch.tensor([[0.3, -0.1], [0.2, 0.05]], device=device) / (step + 1)
        second.grad = torch.full_like(begin, other_gradient) * (step + 1)
        twin.step()
    if torch.equal(first.detach(), begin):
        raise ValueError("it changes none of them")
    return first.detach()


def _twin(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], groups: dict[int, Any]) -> Any:
    """Return a copy of an optimizer, and of those that it wraps, for other parameters, without state and hooks.

    `groups` are the groups of copies by the id of their originals: an optimizer may share them with one that it wraps.
    """
    twin: Any = object.__new__(type(optimizer))
    settings = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    if "lr" in settings and not settings["lr"]:  # before a warm-up
        settings["lr"] = 0.1
    made = groups.setdefault(id(optimizer.param_groups), [{**settings, "params": parameters}])
    for key, value in vars(optimizer).items():
        vars(twin)[key] = _twin(value, parameters, groups) if isinstance(value, torch.optim.Optimizer) else value
    vars(twin).pop("step", None)  # a scheduler puts one there that steps the original
    twin.state = defaultdict(dict)
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(twin, hooks, OrderedDict())
    twin.param_groups = made
    return twin


def nothing() -> nn.Parameter:
    """Return a parameter without elements, which no step changes; with two dimensions, as Muon needs them."""
    return nn.Parameter(torch.zeros(0, 0))


@contextlib.contextmanager
def empty_allowed(allowed: bool) -> Iterator[None]:
    """Within the context, an optimizer of an empty list of parameters gets one without elements, if `allowed`."""
    if not allowed:
        yield
        return
    with _patching:
        begin = torch.optim.Optimizer.__init__

        def call(self: torch.optim.Optimizer, params: Any, defaults: dict[str, Any]) -> None:
            begin(self, params if isinstance(params, torch.Tensor) else list(params) or [nothing()], defaults)

        torch.optim.Optimizer.__init__ = call  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.optim.Optimizer.__init__ = begin  # type: ignore[method-assign]


def drop_elsewhere(optimizer: torch.optim.Optimizer) -> None:
    """Remove parameters that other processes hold, which are on the meta device here."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.is_meta:
                optimizer.state.pop(parameter, None)
        group["params"][:] = [parameter for parameter in group["params"] if not parameter.is_meta]
    if optimizer.param_groups and is_empty(optimizer):
        optimizer.param_groups[0]["params"][:] = [nothing()]


def is_empty(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has no elements to update."""
    return not any(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])
