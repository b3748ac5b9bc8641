"""Checkpoints of transformers read lazily, with the model's current names and layouts."""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ModelError
from penstock.text import one_line
from penstock.zoo.optional import optional_import
from penstock.zoo.weights.fit import refuse_unused
from penstock.zoo.weights.quantized import QuantizedWeights
from penstock.zoo.weights.weights import JoinedWeights, RenamedWeights, TensorWeights, Weights


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
