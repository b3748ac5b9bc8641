"""Callbacks: Python code called by autograd, recorded in a captured graph as calls of the caller's objects.

torch.export records the forward computation as operators. Custom `autograd.Function`s, tensor hooks and modules'
backward hooks define the backward in Python, so a graph of operators alone would drop them. Capture of a model in
training mode records each as an operation `penstock.callback` with the number of a `Callback`; the training runtime
calls it again with real tensors, so that autograd sees it:

    forward(x):   h = linear(x)          ops:  linear
                  h.register_hook(f)           callback 0   runs  h.register_hook(f)
                  y = Reverse.apply(h)         callback 1   runs  Reverse.apply(h)

Every process of a training run has the model, so callbacks are never sent, and a program with a callback cannot be read
back.
"""

import contextlib
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import BackwardHook, RemovableHandle

from penstock.errors import CaptureError
from penstock.graph.exporting import watched_sizes
from penstock.graph.live_module import Reads, recorded_reads
from penstock.graph.side_effects import call_without_draws, left_attributes, unresized_buffers

Run = Callable[[list[Tensor], list[int]], list[Tensor]]


@dataclass(frozen=True, slots=True)
class Callback:
    """One call of the caller's Python code: `run` takes tensors and sizes, and returns tensors.

    `keeps` is set if it returns its arguments, `with_producer` if it must run in the stage that produces its tensors;
    `since` is the number of an earlier callback that must run in the same stage.
    """

    name: str
    run: Run
    keeps: bool = False
    with_producer: bool = False
    since: int | None = None


_LIBRARY = torch.library.Library("penstock", "DEF")
_LIBRARY.define("callback(Tensor[] tensors, SymInt[] sizes, int number) -> Tensor[]")


def _run_recorded(tensors: Sequence[Tensor], sizes: Sequence[int], number: int) -> list[Tensor]:
    recorder = _RECORDER.get()
    if recorder is None:
        raise CaptureError("penstock.callback can run only in two places: during capture, or in a training stage")
    versions = [tensor._version for tensor in tensors]
    with recorder.inside():
        made = recorder.callbacks[number].run(list(tensors), list(sizes))
    if [tensor._version for tensor in tensors] != versions:
        raise CaptureError(
            f"{recorder.callbacks[number].name} writes to its inputs; return new tensors instead of mark_dirty"
        )
    return made


_LIBRARY.impl("callback", _run_recorded, "CompositeImplicitAutograd")
torch.fx.node.has_side_effect(torch.ops.penstock.callback.default)


@dataclass
class CallbackRecorder:
    """The callbacks of one capture, in the order of their calls, and notes for the caller."""

    trains: bool
    callbacks: list[Callback] = field(default_factory=list)
    notes: dict[str, None] = field(default_factory=dict)
    left: dict[str, Any] = field(default_factory=dict)  # assigned attributes of modules, from `left_attributes`
    reads: Reads = field(default_factory=dict)  # attributes of modules that the forward read
    fixing: list[str] = field(default_factory=list)  # lines that allow only some batch sizes
    is_inside: bool = False  # True within a callback, whose inner calls are not recorded

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Do not record calls inside the block."""
        was, self.is_inside = self.is_inside, True
        try:
            yield
        finally:
            self.is_inside = was

    def call(self, callback: Callback, tensors: Sequence[Tensor], sizes: Sequence[Any] = ()) -> list[Tensor]:
        """Record a callback and return its results for fake tensors."""
        self.callbacks.append(callback)
        made: list[Tensor] = torch.ops.penstock.callback(list(tensors), list(sizes), len(self.callbacks) - 1)
        return made


_RECORDER: ContextVar[CallbackRecorder | None] = ContextVar("penstock_recorder", default=None)


@contextlib.contextmanager
def recorded_callbacks(model: nn.Module) -> Iterator[CallbackRecorder]:
    """Record the callbacks of the forward passes of `model` inside the context.

    Example:
        with recorded_callbacks(model) as recorder:
            exported = torch.export.export(model, args)
        recorder.callbacks

    Raises `CaptureError`, naming the construct, if neither a callback nor a graph can represent it.
    """
    recorder = CallbackRecorder(model.training)
    if model.training:
        _check_hooks(model)
    call: Callable[..., Any] = model._call_impl  # the forward pass with the model's own hooks

    def watched(*args: Any, **kwargs: Any) -> Any:
        with (
            _replaced(recorder),
            _Intercept(recorder),
            unresized_buffers(model),
            left_attributes(model) as left,
            recorded_reads() as reads,
            watched_sizes((args, kwargs)) as recorder.fixing,
        ):
            made = call_without_draws(model, call, *args, **kwargs)
        recorder.left.update(left)
        recorder.reads = reads
        return made

    token = _RECORDER.set(recorder)
    vars(model)["_call_impl"] = watched
    try:
        yield recorder
    finally:
        _RECORDER.reset(token)
        del vars(model)["_call_impl"]


def _check_hooks(model: nn.Module) -> None:
    """Raise `CaptureError` for hooks that PyTorch has deprecated."""
    everywhere = torch_module._global_backward_hooks and torch_module._global_is_full_backward_hook is False
    for name, module in model.named_modules():
        if everywhere or (module._backward_hooks and module._is_full_backward_hook is False):
            raise CaptureError(
                f"{name or type(model).__name__} has a hook of register_backward_hook, which sees only the module's "
                "last operation; use register_full_backward_hook"
            )


@contextlib.contextmanager
def _replaced(recorder: CallbackRecorder) -> Iterator[None]:
    """Replace constructs that bypass torch functions: custom functions, modules' hooks, inference mode."""
    apply, enter, leave = vars(Function)["apply"], _MODE.__enter__, _MODE.__exit__
    change_saved = saved_tensors_hooks.__enter__

    def record(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        plain = functools.partial(apply.__get__(None, cls))
        if _RECORDER.get() is not recorder or recorder.is_inside or not recorder.trains:
            return plain(*args, **kwargs)
        if issubclass(cls, CheckpointFunction):
            return _without_checkpointing(recorder, *args)
        return _record_function(recorder, cls.__name__, plain, args, kwargs)

    def enter_saved(hooks: saved_tensors_hooks) -> None:
        if type(hooks) is saved_tensors_hooks:  # subclasses such as `save_on_cpu` change only where a tensor is stored
            raise CaptureError(
                "the forward pass uses saved_tensors_hooks; change saved tensors in an autograd.Function instead"
            )
        change_saved(hooks)

    try:
        if recorder.trains:
            Function.apply = classmethod(record)
            vars(torch_module)["BackwardHook"] = functools.partial(_RecordedHook, recorder)
            # tensors of inference mode cannot be traced; use no_grad, which computes the same values
            _MODE.__enter__, _MODE.__exit__ = _enter_no_grad, _leave_no_grad  # type: ignore[method-assign]
            saved_tensors_hooks.__enter__ = enter_saved  # type: ignore[method-assign]
        yield
    finally:
        Function.apply = apply
        vars(torch_module)["BackwardHook"] = BackwardHook
        _MODE.__enter__, _MODE.__exit__ = enter, leave  # type: ignore[method-assign]
        saved_tensors_hooks.__enter__ = change_saved  # type: ignore[method-assign]


_MODE = torch.inference_mode


def _enter_no_grad(mode: Any) -> None:
    mode.was = torch.is_grad_enabled()
    torch.set_grad_enabled(mode.was and not mode.mode)


def _leave_no_grad(mode: Any, *_: object) -> None:
    torch.set_grad_enabled(mode.was)


def _without_checkpointing(recorder: CallbackRecorder, run: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
    """Call a function that the model checkpoints, without recomputation, which affects memory but not results."""
    recorder.notes[
        "the model's own activation checkpointing has no effect in a pipeline; to recompute activations, use "
        "checkpointing=True"
    ] = None
    return run(*args)


def _record_function(
    recorder: CallbackRecorder, name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Record a call with any arguments; return its result, with tensors of the graph."""
    leaves, spec = pytree.tree_flatten((tuple(args), kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    sizes = [leaf for leaf in leaves if isinstance(leaf, torch.SymInt)]
    returned: list[tuple[list[Any], Any]] = []

    def run(given: list[Tensor], given_sizes: list[int]) -> list[Tensor]:
        rest, rest_sizes = iter(given), iter(given_sizes)
        filled = [
            next(rest) if isinstance(leaf, Tensor) else next(rest_sizes) if isinstance(leaf, torch.SymInt) else leaf
            for leaf in leaves
        ]
        again, keywords = pytree.tree_unflatten(filled, spec)
        made, structure = pytree.tree_flatten(function(*again, **keywords))
        returned[:] = [(made, structure)]
        return [leaf for leaf in made if isinstance(leaf, Tensor)]

    made = iter(recorder.call(Callback(name, run), tensors, sizes))
    ((outputs, structure),) = returned
    returned.clear()
    return pytree.tree_unflatten([next(made) if isinstance(x, Tensor) else x for x in outputs], structure)


class _RecordedHook:
    """Replacement for `torch.utils.hooks.BackwardHook` during a capture: its two calls become two callbacks.

    A microbatch runs the hooks that the module has at that time.
    """

    def __init__(self, recorder: CallbackRecorder, module: nn.Module, *_hooks: object) -> None:
        self._recorder, self._module = recorder, module
        self._opened = 0
        self._now = threading.local()  # the real hook for the current microbatch

    def setup_input_hook(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Record the hook's call before the module's forward."""

        def run(*given: Any) -> Any:
            full, _ = self._module._get_backward_hooks()
            self._now.hook = BackwardHook(self._module, full, self._module._get_backward_pre_hooks())
            return self._now.hook.setup_input_hook(given)

        self._opened = len(self._recorder.callbacks)
        made = tuple(_record_function(self._recorder, "register_full_backward_hook", run, args, {}))
        self._recorder.callbacks[-1] = replace(self._recorder.callbacks[-1], keeps=True)
        return made

    def setup_output_hook(self, result: Any) -> Any:
        """Record the hook's call after the module's forward."""
        if not isinstance(result, (Tensor, tuple)):
            return result  # PyTorch ignores results of other types, with a warning

        def run(given: Any) -> Any:
            return self._now.hook.setup_output_hook(given)

        made = _record_function(self._recorder, "register_full_backward_hook", run, (result,), {})
        self._recorder.callbacks[-1] = replace(self._recorder.callbacks[-1], keeps=True, since=self._opened)
        return made


class _Intercept(TorchFunctionMode):
    """Intercepts calls of the model that a graph of operators cannot represent."""

    def __init__(self, recorder: CallbackRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record a call as a callback, reject it, or pass it on."""
        if not self._recorder.is_inside:
            if func == Tensor.register_hook:
                return self._register_hook(*args, **(kwargs or {}))
            if func == _property("data").__get__:
                return self._data(args[0])
            if getattr(func, "__name__", "") == "_pack_padded_sequence":
                raise CaptureError(
                    "the forward pass uses pack_padded_sequence, whose sizes are values of a tensor; give the layer "
                    "the padded rows, and take each row's last output with gather"
                )
            if kwargs and isinstance(kwargs.get("generator"), torch.Generator):
                raise CaptureError(
                    "the forward pass draws from a torch.Generator of its own; leave generator out, since a pipeline "
                    "seeds each operation, or make the random numbers an input"
                )
            if func == _property("data").__set__:
                raise CaptureError("the forward pass uses an assignment to .data; use copy_ under torch.no_grad")
            if self._recorder.trains and (advice := _REFUSED.get(func)):
                raise CaptureError(f"the forward pass uses {advice}")
        return func(*args, **(kwargs or {}))

    def _register_hook(self, tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
        handle = _Handle(OrderedDict())
        if not self._recorder.trains:
            return handle
        if tensor.is_leaf and tensor.requires_grad:
            raise CaptureError(
                "the forward pass calls register_hook of a parameter, once more in each pass; call it once, outside"
            )
        if not tensor.requires_grad:
            raise CaptureError("cannot register a hook on a tensor that doesn't require gradient")

        def run(tensors: list[Tensor], _: list[int]) -> list[Tensor]:
            if tensors[0].requires_grad:
                tensors[0].register_hook(hook)
            return []

        with self._recorder.inside():
            callbacks = self._recorder.callbacks
            callbacks.append(Callback("register_hook", lambda _tensors, _sizes: [], keeps=True, with_producer=True))
            torch.ops.penstock.callback([tensor], [], len(callbacks) - 1)
            callbacks[-1] = replace(callbacks[-1], run=run)
        return handle

    def _data(self, tensor: Tensor) -> Tensor:
        if not self._recorder.trains:
            return tensor.detach()
        (made,) = self._recorder.call(Callback("data", lambda tensors, _: [tensors[0].data], keeps=True), [tensor])
        return made


class _Handle(RemovableHandle):
    """The handle of a hook that is registered again in every forward pass."""

    def remove(self) -> None:
        """Raise `CaptureError`, since a graph runs the hook in every pass."""
        raise CaptureError("the forward pass removes a hook that it registered; decide inside the hook instead")


def _property(name: str) -> Any:
    return getattr(Tensor, name)


_REFUSED: dict[Any, str] = {
    torch.autograd.grad: "torch.autograd.grad; compute that derivative in an autograd.Function, or in loss_fn",
    torch.autograd.backward: "torch.autograd.backward; return the loss instead, and train_step runs the backward",
    Tensor.backward: "Tensor.backward; return the loss instead, and train_step runs the backward",
    Tensor.retain_grad: "retain_grad, whose gradient could not be read; use register_hook, which receives it",
    _property("grad_fn").__get__: "grad_fn; use register_hook of the tensor",
    Tensor.register_post_accumulate_grad_hook: "register_post_accumulate_grad_hook; call it once, outside",
}
