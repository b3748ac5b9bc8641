"""Modules with parameters on the meta device, or in temporary files, so that a large model takes no memory."""

import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from penstock.errors import ModelError
from penstock.files import reserve
from penstock.text import one_line
from penstock.units import format_bytes
from penstock.zoo.weights.weights import Expected, RandomWeights, Weights

_MARK = "_penstock_on_meta"
_CREATING = frozenset({torch.empty, torch.full, torch.ones, torch.rand, torch.randn, torch.zeros})
_LEAST_BYTES = 2**18  # of a tensor in a file


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Create every parameter that this thread registers on the meta device; buffers stay real.

    A parameter registered under several names stays one parameter. Other threads are not affected.

    >>> with meta_parameters():
    ...     layer = nn.BatchNorm1d(3)
    >>> layer.weight.device.type, layer.running_mean.device.type
    ('meta', 'cpu')
    """
    owner = threading.get_ident()

    def replace(_module: nn.Module, _name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        return _on_meta(parameter) if threading.get_ident() == owner else None

    handle = register_module_parameter_registration_hook(cast(Callable[..., None], replace))
    try:
        yield
    finally:
        handle.remove()


def build_on_meta(build: Callable[[], nn.Module], seed: int) -> tuple[nn.Module, RandomWeights]:
    """Build a module in eval mode with meta parameters and real buffers, and return it with its random weights.

    These are the values that `build` draws after `torch.manual_seed(seed)`; they are drawn when they are first loaded.
    A module whose initialization reads its own parameters, or that may have random buffers, is first built with values.
    The global random state is unchanged.

    >>> module, weights = build_on_meta(lambda: nn.Linear(2, 2), seed=0)
    >>> module.weight.device.type, weights.load("weight").device.type
    ('meta', 'cpu')

    Raises as `build` does, and `ModelError` for a lazy module.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        try:
            with meta_parameters():
                module = build()
            drew = not torch.equal(before, torch.get_rng_state())
            whole = any(b.device.type == "meta" or (drew and b.is_floating_point()) for b in module.buffers())
        except (RuntimeError, NotImplementedError) as problem:
            if "meta" not in str(problem).lower():
                raise
            whole = True
        if whole:
            module = draw(build, seed)
    parameter_shapes(module)
    move_to_meta(module)
    return module.eval(), RandomWeights(module, partial(draw, build, seed))


def draw(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build a module in eval mode with values, as after `torch.manual_seed(seed)`, without changing the global state.

    Large tensors are in temporary files without names, which are removed together with the tensors.

    >>> torch.equal(draw(lambda: nn.Linear(2, 2), seed=0).weight, draw(lambda: nn.Linear(2, 2), seed=0).weight)
    True

    Raises as `build` does, and `ModelError` if the disk of temporary files has too little space.
    """
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), _LargeInFiles():
        torch.manual_seed(seed)
        return build().eval()


class _LargeInFiles(TorchFunctionMode):
    """Create large tensors in memory-mapped temporary files, which the system can write out if memory is short."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func not in _CREATING or type(made) is not Tensor or made.device.type != "cpu" or made.requires_grad:
            return made
        if made.layout != torch.strided or made.nbytes < _LEAST_BYTES or "out" in (kwargs or {}):
            return made
        try:
            with tempfile.NamedTemporaryFile() as file:
                reserve(file, made.nbytes)
                storage = torch.UntypedStorage.from_file(file.name, shared=True, nbytes=made.nbytes)
        except (OSError, RuntimeError) as problem:
            raise ModelError(
                f"a random tensor needs {format_bytes(made.nbytes)} in {tempfile.gettempdir()} ({one_line(problem)}); "
                "set TMPDIR to a folder with more space, or give weights"
            ) from problem
        mapped = torch.empty(0, dtype=made.dtype).set_(storage, 0, made.shape, made.stride())  # type: ignore[arg-type]
        return mapped if func is torch.empty else mapped.copy_(made)


def move_to_meta(module: nn.Module) -> None:
    """Move a module's parameters to the meta device; tied parameters stay tied.

    >>> layer = nn.Linear(2, 2)
    >>> move_to_meta(layer)
    >>> layer.weight.device.type
    'meta'
    """
    for owner in module.modules():
        for leaf, parameter in owner._parameters.items():
            if parameter is not None:
                owner._parameters[leaf] = _on_meta(parameter)


def materialize(module: nn.Module, weights: Weights) -> None:
    """Set every parameter of a module to its values; tied parameters stay tied.

    >>> layer, weights = build_on_meta(lambda: nn.LayerNorm(2), seed=0)
    >>> materialize(layer, weights)
    >>> layer.weight
    Parameter containing:
    tensor([1., 1.], requires_grad=True)

    Raises `ModelError` when the weights lack a parameter.
    """
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # keeps both alive, so that no id is used twice
    for path, owner in module.named_modules():
        for leaf, parameter in owner._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                values = weights.load(f"{path}.{leaf}" if path else leaf)
                real = nn.Parameter(values.clone(), requires_grad=parameter.requires_grad)
                made[id(parameter)] = made[id(real)] = (parameter, real)
            owner._parameters[leaf] = made[id(parameter)][1]


def load_buffers(module: nn.Module, weights: Weights) -> None:
    """Copy the persistent buffers that the weights contain into a module.

    >>> norm = nn.BatchNorm1d(1)
    >>> load_buffers(norm, TensorWeights({**norm.state_dict(), "running_mean": torch.tensor([5.0])}))
    >>> norm.running_mean
    tensor([5.])
    """
    present = set(weights.names())
    for name, (owner, leaf) in persistent_buffers(module).items():
        buffer = owner._buffers[leaf]
        if buffer is not None and name in present:
            owner._buffers[leaf] = weights.load(name).to(buffer.dtype).clone()


def persistent_buffers(module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return the buffers that a checkpoint of the module contains: name to owner and attribute.

    >>> sorted(persistent_buffers(nn.BatchNorm1d(1)))
    ['num_batches_tracked', 'running_mean', 'running_var']
    """
    return {
        f"{path}.{leaf}" if path else leaf: (owner, leaf)
        for path, owner in module.named_modules(remove_duplicate=False)
        for leaf, buffer in owner._buffers.items()
        if buffer is not None and leaf not in owner._non_persistent_buffers_set
    }


def parameter_shapes(module: nn.Module) -> Expected:
    """Return the shape and dtype of each parameter, under each of its names.

    >>> parameter_shapes(nn.Linear(2, 3))["weight"]
    ((3, 2), torch.float32)

    Raises `ModelError` for a lazy module, whose shapes are not known yet.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name, parameter in parameters.items():
        if nn.parameter.is_lazy(parameter):
            raise ModelError(f"the parameter {name} has no shape yet; run the model once first")
    return {name: (tuple(parameter.shape), parameter.dtype) for name, parameter in parameters.items()}


def parameter_aliases(module: nn.Module) -> dict[str, str]:
    """Map every further name of a tied parameter to its first name.

    >>> parameter_aliases(nn.Linear(2, 3))
    {}
    """
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            aliases[name] = first[id(parameter)]
    return aliases


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.device.type == "meta" or nn.parameter.is_lazy(parameter):
        return parameter
    known: nn.Parameter | None = getattr(parameter, _MARK, None)
    if known is None:
        known = nn.Parameter(torch.empty_like(parameter.data, device="meta"), parameter.requires_grad)
        known.__dict__.update(parameter.__dict__)
        setattr(parameter, _MARK, known)
    return known
