"""The caller's module during training: it shares its parameters with this process's stages, which follow changes."""

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import UsageError

_ELSEWHERE = "_penstock_parameters_elsewhere"


class TensorElsewhere(Tensor):
    """A parameter of another process, or what was computed from it, without values: its use raises `UsageError`."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute shapes, and replace torch's errors about the meta device."""
        try:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        except (RuntimeError, NotImplementedError, TypeError) as error:
            raise UsageError(
                f"{getattr(func, '__name__', func)} needs the values of a parameter that another process holds; use "
                "pipe.named_parameters(), whose values are here, pipe.clip_grad_norm_ or pipe.save, or train with "
                "stages=1 and replicas"
            ) from error


class SharedModule:
    """A module whose parameters and buffers are the same objects as the tensors of this process's stages.

    So a loss that penalizes `model.parameters()`, an optimizer of these parameters, their hooks and the module itself
    use the trained values. Parameters that only other processes hold move to the meta device, where using them fails.

    Example:
        shared = SharedModule(model)
        weight = shared.parameter("fc.weight", trained)     # model.fc.weight, with the values of `trained`
        shared.keep(["fc.weight"])                          # move all others to the meta device
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        first: dict[int, str] = {}
        self._owners: dict[str, list[tuple[dict[str, Any], str]]] = {}
        for path, owner in module.named_modules(remove_duplicate=False):
            for tensors in (owner._parameters, owner._buffers):
                for leaf, tensor in tensors.items():
                    if tensor is not None:
                        name = first.setdefault(id(tensor), f"{path}.{leaf}" if path else leaf)
                        self._owners.setdefault(name, []).append((tensors, leaf))
        self._elsewhere: set[str] = set()

    def parameter(self, name: str, tensor: Tensor) -> nn.Parameter:
        """Return the module's parameter of this name, backed by the memory of `tensor`."""
        own = self.now(name)
        if own.device.type == "meta" or own.dtype != tensor.dtype or not isinstance(own, nn.Parameter):
            return self._put(name, nn.Parameter(tensor, own.requires_grad))
        own.data = tensor
        return own

    def put_back(self, name: str, kept: nn.Parameter) -> None:
        """Let the module have a parameter that this process holds, if a placement that failed has moved it away."""
        if isinstance(self.now(name), TensorElsewhere):
            self._put(name, kept)

    def buffer(self, name: str, tensor: Tensor) -> bool:
        """Back the module's buffer of this name with the memory of `tensor`; return False if it cannot be."""
        own = self.now(name)
        if own.dtype != tensor.dtype or own.device.type == "meta":
            return False
        own.data = tensor
        return True

    def keep(self, held: Collection[str]) -> None:
        """Move parameters that this process does not hold to the meta device."""
        parameters = {name for name in self._owners if isinstance(self.now(name), nn.Parameter)}
        self._elsewhere = parameters - set(held)
        self.keep_elsewhere()
        if self._elsewhere and not hasattr(self._module, _ELSEWHERE):
            setattr(self._module, _ELSEWHERE, True)
            self._module.register_state_dict_pre_hook(_refuse_state)

    def keep_elsewhere(self) -> None:
        """Move parameters of other processes to the meta device again if the caller has assigned values to them."""
        for name in self._elsewhere:
            own = self.now(name)
            if own.device.type != "meta":
                without = own.detach().to("meta").as_subclass(TensorElsewhere)
                self._put(name, nn.Parameter(without, own.requires_grad))

    def is_elsewhere(self, name: str) -> bool:
        """Return True if a parameter was moved to the meta device, perhaps for a placement that failed meanwhile."""
        return name in self._elsewhere

    def mark_gradients(self) -> None:
        """Set meta gradients on parameters of other processes, so that a sum over all gradients fails."""
        for name in self._elsewhere:
            own = self.now(name)
            if own.requires_grad:
                own.grad = torch.empty_like(own)

    def now(self, name: str) -> Tensor:
        """Return the module's current parameter or buffer of this name.

        Raises `UsageError` if the module has none, or if it is no longer the same under all its names.
        """
        found: Tensor | None = None
        for tensors, leaf in self._owners[name]:
            tensor = tensors.get(leaf)
            if tensor is None or (found is not None and tensor is not found):
                what = "was removed from the model" if tensor is None else "is no longer shared by the same modules"
                raise UsageError(
                    f"the tensor {name} {what} after the pipeline was created; change the model before, or create a "
                    "new pipeline of the changed model"
                )
            found = tensor
        if found is None:
            raise KeyError(name)
        return found

    def _put(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        for tensors, leaf in self._owners[name]:
            tensors[leaf] = parameter
        return parameter


def check_whole(module: nn.Module) -> None:
    """Raise `UsageError` if other processes hold some of a trained module's parameters."""
    if hasattr(module, _ELSEWHERE):
        raise UsageError(
            f"some parameters of this {type(module).__name__} are in other processes, which trained it too; "
            "save it with pipe.save, and load that file into a new module"
        )


def _refuse_state(module: nn.Module, *_: Any) -> None:
    check_whole(module)


class LiveTensors:
    """Tensors of stage programs that share memory with the model's tensors, by name.

    In one process an assignment such as `p.data = p.data.clamp(-1, 1)` counts in the next forward. It gives the
    parameter other memory, so the tensors of the programs are pointed at that memory, too.

    Example:
        live.add("fc.weight", leaf)       # shares memory with model.fc.weight
        live.follow("fc.weight", model.fc.weight)
    """

    def __init__(self) -> None:
        self._views: dict[str, list[Tensor]] = defaultdict(list)

    def add(self, name: str, view: Tensor) -> Tensor:
        """Register and return a tensor that shares memory with the model's tensor of this name."""
        self._views[name].append(view)
        return view

    def follow(self, name: str, now: Tensor) -> None:
        """Point the registered tensors at the memory of `now`.

        Raises `UsageError` if it has another shape, dtype or device.
        """
        views = self._views.get(name)
        if not views or now.is_set_to(views[0]):
            return
        check_alike(name, now, views[0])
        for view in views:
            view.data = now.data


def follow_parameters(parameters: dict[str, nn.Parameter], shared: SharedModule) -> None:
    """Replace parameters by those that the caller's module has now under these names.

    Raises `UsageError` if a parameter was removed, has another shape, or is shared by other modules than before.
    """
    changed = {
        name: now
        for name, own in parameters.items()
        if (now := shared.now(name)) is not own and not shared.is_elsewhere(name)
    }
    for name, now in changed.items():
        check_alike(name, now, parameters[name])
        if not isinstance(now, nn.Parameter):
            raise UsageError(f"{name} is no longer a parameter; assign an nn.Parameter, or create a new pipeline")
        parameters[name] = now
    if changed and len({id(parameter) for parameter in parameters.values()}) < len(parameters):
        raise UsageError(
            f"{', '.join(changed)} became the same tensor as another parameter after the pipeline was created; share "
            "them before, or create a new pipeline"
        )


def follow_unused(unused: dict[str, Tensor], shared: SharedModule, names: Mapping[str, object]) -> None:
    """Replace tensors that no stage uses by those that the caller's module has now."""
    for name in names:
        if name in unused and not (now := shared.now(name)).is_set_to(unused[name]):
            check_alike(name, now, unused[name])
            unused[name] = now.detach()


def check_alike(name: str, now: Tensor, was: Tensor) -> None:
    """Raise `UsageError` unless a tensor has the shape, dtype and device that it had when the stages were made."""
    if (now.shape, now.dtype, now.device) != (was.shape, was.dtype, was.device):
        raise UsageError(
            f"the model's {name} was {_format(was)} when the pipeline was created and is {_format(now)} now; change it "
            "before, or create a new pipeline"
        )


def _format(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"
