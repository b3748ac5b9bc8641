"""Modules with parameters on the meta device, so that a large model takes no memory."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from penstock.errors import ModelError
from penstock.zoo.weights.weights import Expected, Weights

_MARK = "_penstock_on_meta"


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


def build_on_meta(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build a module in eval mode with meta parameters and real buffers.

    A module whose initialization reads its own parameters is first built with values. The global random state is
    unchanged; random buffers depend on the seed.

    >>> build_on_meta(lambda: nn.Linear(2, 2), seed=0).weight.device.type
    'meta'

    Raises as `build` does.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            with meta_parameters():
                module = build()
            whole = any(buffer.device.type == "meta" for buffer in module.buffers())
        except (RuntimeError, NotImplementedError) as problem:
            if "meta" not in str(problem).lower():
                raise
            whole = True
        if whole:
            torch.manual_seed(seed)
            module = build()
    move_to_meta(module)
    return module.eval()


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

    >>> with meta_parameters():
    ...     layer = nn.Linear(2, 2)
    >>> materialize(layer, RandomWeights(parameter_shapes(layer), seed=0))
    >>> layer.bias
    Parameter containing:
    tensor([0., 0.], requires_grad=True)

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
