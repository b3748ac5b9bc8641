"""Check that weights fit a model; read them, or a transformers checkpoint, with the model's own names and dtypes.

A model with narrowed layers has their sizes in its weights file, and a newly built model is narrowed to these.
"""

import re
from collections.abc import Collection, Mapping
from copy import deepcopy
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from penstock.errors import ModelError
from penstock.text import nearest, one_line
from penstock.zoo.optional import optional_import
from penstock.zoo.weights.quantized import QuantizedWeights
from penstock.zoo.weights.weights import Expected, JoinedWeights, RenamedWeights, Shape, TensorWeights, Weights

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
        name
        for name in sorted(unused)
        for layer, _, leaf in [name.rpartition(".")]
        if (layer in layers or (quantized and leaf not in {"weight", "bias"}))
        and leaf not in _COMPUTED
        and not any(re.search(pattern, name) for pattern in ignored)
    ]
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


def hf_weights(module: Any, source: Weights) -> Weights:
    """Read a checkpoint for a model of transformers as `from_pretrained` would, one tensor at a time.

    Legacy names, a missing or superfluous base-model prefix and the model's own conversions (such as
    experts stored one by one) are mapped; a converted tensor is computed when it is loaded.

    >>> hf_weights(module, FileWeights(Path("gpt2"))).shape("transformer.wte.weight")  # doctest: +SKIP
    (50257, 768)

    Raises `ModelError` when a conversion fails, or a layer does not take a tensor.
    """
    loading = optional_import("transformers.core_model_loading", "text")
    mapping = optional_import("transformers.conversion_mapping", "text")
    steps = mapping.get_model_conversion_mapping(module)
    renamings = [step for step in steps if isinstance(step, loading.WeightRenaming)]
    converters = [step for step in steps if isinstance(step, loading.WeightConverter)]
    state = module.state_dict()
    rename: dict[str, str] = {}
    groups: dict[str, list[tuple[str, str]]] = {}
    unused: dict[str, str] = {}
    quantized = isinstance(source, QuantizedWeights)
    for key in sorted(source.names(), key=loading.dot_natural_key):
        prefix = module.base_model_prefix
        name, pattern = loading.rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = key, None
        if name not in state:
            # AutoGPTQ gives every layer a bias, of zeros if the model has none
            if not (quantized and name.endswith(".bias") and not source.load(key).any()):
                unused[name] = key
            continue
        if pattern is None:
            rename[name] = key
        else:
            groups.setdefault(name, []).append((pattern, key))
    ignored = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    refuse_unused(unused, state.keys(), ignored, quantized=quantized)
    by_pattern = {pattern: step for step in converters for pattern in step.source_patterns}
    converted = [_Group(module, source, by_pattern[keys[0][0]], name, keys) for name, keys in groups.items()]
    return JoinedWeights(*converted, RenamedWeights(source, {**unused, **rename}))


class _Group(TensorWeights):
    """The tensors that one conversion makes from one or several tensors of a file."""

    def __init__(self, module: nn.Module, source: Weights, step: Any, name: str, keys: list[tuple[str, str]]) -> None:
        self._module, self._source, self._step, self._name, self._keys = module, source, step, name, keys
        # run once on tensors without values, which gives names, shapes and dtypes at no cost
        super().__init__(
            self._convert(lambda key: torch.empty(source.shape(key), dtype=source.dtype(key), device="meta"))
        )

    def load(self, name: str) -> Tensor:
        self._find(name)
        return self._convert(self._source.load)[name]

    def _convert(self, load: Any) -> dict[str, Tensor]:
        step = deepcopy(self._step)
        try:
            for pattern, key in self._keys:
                step.add_tensor(self._name, key, pattern, load(key))
            made = step.convert(self._name, model=self._module, config=self._module.config)
        except ModelError:
            raise
        except Exception as problem:
            raise ModelError(f"the weights of {self._name} cannot be converted ({one_line(problem)})") from problem
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


KEY = "penstock.shapes"  # in the metadata of a safetensors file

Sizes = dict[str, dict[str, int | list[int]]]


def changed_sizes(original: nn.Module, narrowed: nn.Module) -> Sizes:
    """Return the integer attributes of each module that differ between a model and its narrowed version.

    >>> changed_sizes(nn.Linear(8, 4), nn.Linear(6, 4))
    {'': {'in_features': 6}}
    """
    found: Sizes = {}
    modules = dict(narrowed.named_modules())
    for path, module in original.named_modules():
        if path not in modules:
            raise ModelError(
                f"a narrowed model must have all modules of the original; {path} not found; only narrow its layers"
            )
        now = _sizes_of(modules[path])
        for name, before in _sizes_of(module).items():
            value = now.get(name, before)
            if type(value) is type(before) and value != before:
                found.setdefault(path, {})[name] = value if isinstance(value, int) else list(value)
    return found


def write_sizes(sizes: Sizes) -> dict[str, str]:
    """Return the sizes of a narrowed model as metadata of a weights file."""
    return {KEY: msgspec.json.encode(sizes).decode()}


def read_sizes(metadata: Mapping[str, str]) -> Sizes | None:
    """Read the sizes of a narrowed model from a weights file's metadata; None without them.

    Raises `ModelError` for invalid text.
    """
    if KEY not in metadata:
        return None
    try:
        return msgspec.json.decode(metadata[KEY], type=Sizes)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ModelError(f"the file's {KEY} cannot be read ({error}); write the narrowed model again") from None


def narrow(module: nn.Module, sizes: Sizes, shapes: Mapping[str, Shape]) -> None:
    """Narrow a model in place to the sizes and tensor shapes of a file; tensors lose their values.

    Example:
        narrow(model, {"fc": {"out_features": 6}}, {"fc.weight": (6, 8), "fc.bias": (6,)})

    Raises `ModelError` for a module or attribute that the model does not have, and for anything that grows.
    """
    modules = dict(module.named_modules())
    for path, attributes in sizes.items():
        if path not in modules:
            raise ModelError(f"the weights were narrowed at {path!r}, which the model does not have; {_OTHER}")
        known = _sizes_of(modules[path])
        for name, value in attributes.items():
            before = known.get(name)
            given = value if isinstance(value, int) else tuple(value)
            if before is None or type(given) is not type(before) or not _at_most(given, before):
                raise ModelError(f"the weights narrow {path}.{name} from {before!r} to {value!r}; {_OTHER}")
            setattr(modules[path], name, given)
    made: dict[int, Any] = {}  # tied parameters stay one
    for path, owner in module.named_modules(remove_duplicate=False):
        for kept in (owner._parameters, owner._buffers):
            _cut(path, kept, shapes, made)


_OTHER = "use the model from which they were made"


def _cut(path: str, kept: dict[str, Any], shapes: Mapping[str, Shape], made: dict[int, Any]) -> None:
    for leaf, tensor in kept.items():
        name = f"{path}.{leaf}" if path else leaf
        if tensor is None or name not in shapes or tuple(tensor.shape) == shapes[name]:
            continue
        if len(shapes[name]) != tensor.dim() or not _at_most(shapes[name], tuple(tensor.shape)):
            raise ModelError(f"the weights narrow {name} from {tuple(tensor.shape)} to {shapes[name]}; {_OTHER}")
        if id(tensor) not in made:
            values = torch.empty(shapes[name], dtype=tensor.dtype, device=tensor.device)
            new = nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values
            made[id(tensor)] = made[id(new)] = new
        kept[leaf] = made[id(tensor)]


def _sizes_of(module: nn.Module) -> dict[str, int | tuple[int, ...]]:
    """Return a module's own attributes that are integers or tuples of integers."""
    return {name: value for name, value in vars(module).items() if not name.startswith("_") and _is_size(value)}


def _is_size(value: object) -> bool:
    if isinstance(value, tuple):
        return bool(value) and all(_is_size(item) and not isinstance(item, tuple) for item in value)
    return isinstance(value, int) and not isinstance(value, bool)


def _at_most(value: int | Collection[int], before: Any) -> bool:
    if isinstance(value, int):
        return bool(1 <= value <= before)
    return len(value) == len(before) and all(1 <= new <= old for new, old in zip(value, before, strict=True))
