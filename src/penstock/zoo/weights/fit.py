"""Check that weights fit a model, and read them with the model's own names and dtypes."""

import re
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from penstock.errors import ModelError
from penstock.text import nearest
from penstock.zoo.weights.weights import Expected, RenamedWeights, Shape, Weights

_NUM_SHOWN = 3
# buffers that older checkpoints store, and modules compute
_COMPUTED = {
    "inv_freq",
    "masked_bias",
    "position_ids",
    "token_type_ids",
    "num_batches_tracked",
    "relative_position_index",
}


def check_weights(
    weights: Weights, expected: Expected, aliases: Mapping[str, str] | None = None, optional: Collection[str] = ()
) -> Weights:
    """Compare weights with a model's expected tensors and return them under exactly the model's names.

    A floating-point tensor fits with any floating-point dtype: it is converted when loaded. Tensors of layers that the
    model does not have are left out. `aliases` maps each further name of a tied tensor to its first name; the weights
    need only one of these names. Names in `optional` are left out if they are missing or do not fit.

    >>> source = TensorWeights({"bias": torch.zeros(3, dtype=torch.float16)})
    >>> check_weights(source, {"bias": ((3,), torch.float32)}).load("bias").dtype
    torch.float32

    Raises `ModelError` with the first tensors that are missing, differ in shape or kind, or belong to a layer that does
    not take them, and the number of further ones.
    """
    sources = _sources(set(weights.names()), expected, aliases or {})
    for name in optional:
        source = sources.get(name)
        if source and not _fits(weights.shape(source), weights.dtype(source), *expected[name]):
            del sources[name]
    missing = [name for name in expected if name not in sources and name not in optional]
    if missing:
        unused = set(weights.names()) - set(sources.values())
        hint = nearest(missing[0], unused, otherwise="; give the model the options that the weights were made with")
        raise ModelError(f"the weights lack {_some(missing, len(expected))} of the model{hint}")
    wrong = [
        f"{name} ({_describe(weights.shape(source), weights.dtype(source))} in the weights, "
        f"{_describe(*expected[name])} in the model)"
        for name, source in sources.items()
        if not _fits(weights.shape(source), weights.dtype(source), *expected[name])
    ]
    if wrong:
        raise ModelError(
            f"the weights do not fit the model: {_some(wrong, len(expected))}; "
            "give the model the options that the weights were made with"
        )
    refuse_unused(set(weights.names()) - set(sources.values()) - set(expected), expected)
    return _Checked(weights, sources, {name: dtype for name, (_, dtype) in expected.items()})


def refuse_unused(
    unused: Collection[str], expected: Collection[str], ignored: Collection[str] = (), *, quantized: bool = False
) -> None:
    """Raise `ModelError` for a tensor of a layer of the model that does not take it, such as a scale or a bias.

    Without it the layer would compute something else. Tensors of other layers, such as another head, may be left out;
    so may those that match one of the patterns `ignored`, and buffers that modules compute themselves. Of a `quantized`
    checkpoint only weights and biases of other layers may be left out.
    """
    layers = {name.rpartition(".")[0] for name in expected} - {""}
    lost = [
        name for name in sorted(unused) for layer, _, leaf in [name.rpartition(".")]
        if (layer in layers or (quantized and leaf not in {"weight", "bias"})) and leaf not in _COMPUTED
        and not any(re.search(pattern, name) for pattern in ignored)
    ]  # fmt: skip
    if lost:
        raise ModelError(
            f"the weights have {_some(lost, len(unused))} that the model's layers do not take: they are of another "
            "kind of layer, such as a quantized one; give the model the options that the weights were made with, or an "
            "unquantized checkpoint"
        )


class _Checked(RenamedWeights):
    """Weights under a model's names, converted to its dtypes on load."""

    def __init__(self, weights: Weights, sources: dict[str, str], dtypes: dict[str, torch.dtype]) -> None:
        super().__init__(weights, sources)
        self._dtypes = dtypes

    def dtype(self, name: str) -> torch.dtype:
        self._find(name)
        return self._dtypes[name]

    def load(self, name: str) -> Tensor:
        return super().load(name).to(self._dtypes[name])


def _sources(present: set[str], expected: Expected, aliases: Mapping[str, str]) -> dict[str, str]:
    """Return for each name which tensor of the weights is used; tied names use the same tensor."""
    groups: dict[str, list[str]] = {}
    for name in expected:
        groups.setdefault(aliases.get(name, name), []).append(name)
    found: dict[str, str] = {}
    for names in groups.values():
        source = next((name for name in names if name in present), None)
        if source is not None:
            found.update(dict.fromkeys(names, source))
    return {name: found[name] for name in expected if name in found}


def _fits(shape: Shape, dtype: torch.dtype, expected_shape: Shape, expected_dtype: torch.dtype) -> bool:
    both_floating = dtype.is_floating_point and expected_dtype.is_floating_point
    return shape == expected_shape and (both_floating or dtype == expected_dtype)


def _describe(shape: Shape, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"


def _some(items: list[str], num_expected: int) -> str:
    text = ", ".join(items[:_NUM_SHOWN])
    num_more = len(items) - _NUM_SHOWN
    return f"{text} and {num_more} more of {num_expected} tensors" if num_more > 0 else text
