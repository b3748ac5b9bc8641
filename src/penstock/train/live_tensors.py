"""The tensors of the caller's module as they are now: stages follow `p.data = ...` and assigned buffers."""

from collections import defaultdict
from collections.abc import Mapping

from torch import Tensor, nn

from penstock.errors import UsageError
from penstock.train.shared_module import SharedModule


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
