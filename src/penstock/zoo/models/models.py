"""A model's name to the model itself: module, example inputs, weights and what belongs to them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.errors import ModelError
from penstock.zoo.data.preprocess import Transform, hf_transform, timm_transform
from penstock.zoo.models.functions import call_function, find_function
from penstock.zoo.models.hf_inputs import Task, hf_example
from penstock.zoo.models.hf_models import Head, build_hf, hf_class_names, hf_config, hf_directory
from penstock.zoo.models.meta import (
    build_on_meta,
    load_buffers,
    materialize,
    move_to_meta,
    parameter_aliases,
    parameter_shapes,
    persistent_buffers,
)
from penstock.zoo.models.model_names import parse_name
from penstock.zoo.models.timm_models import (
    build_timm,
    timm_checkpoint,
    timm_class_names,
    timm_input_size,
    timm_weights,
)
from penstock.zoo.weights.fit import check_weights
from penstock.zoo.weights.hf_weights import hf_weights
from penstock.zoo.weights.weight_files import FileWeights
from penstock.zoo.weights.weights import JoinedWeights, ModuleWeights, RandomWeights, TensorWeights, Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooModel:
    """A model ready to be captured.

    The module is in eval mode. Its parameters are on the meta device unless it was loaded whole; its
    buffers are real. `weights` has every parameter and buffer under each of its names.
    """

    name: str
    module: nn.Module
    example_args: tuple[Any, ...]
    example_kwargs: dict[str, Any]
    weights: Weights
    transform: Transform | None = None
    class_names: tuple[str, ...] | None = None
    task: Task = "other"


def load_model(
    name: str, *, weights: Path | None = None, pretrained: bool = False, seed: int = 0, whole: bool = False,
    head: Head | None = None,
) -> ZooModel:  # fmt: skip
    """Turn a model's name into a model, without holding its weights unless `whole`.

    `timm:NAME` and `hf:NAME_OR_PATH` may be followed by options, `,key=value`. `hf:` takes a directory
    with config.json, whose safetensors are used when there are any; a model type of transformers such
    as `gpt2` or `bert`, which gives its default configuration when `pretrained` is not asked for; or a
    hub name. `package.module:function` is called without arguments and returns a module,
    `(module, example_args)` or `(module, example_args, example_kwargs)`.

    Weights come from `weights`, else from the published checkpoint when `pretrained`, else from the
    model's own directory or function, else they are random and depend on `seed` only. `head` asks for what
    an `hf:` model is to do, whatever its configuration names.

    >>> model = load_model("timm:vit_tiny_patch16_224,depth=2,num_classes=10")
    >>> model.example_args[0].shape, model.weights.shape("head.weight")
    (torch.Size([2, 3, 224, 224]), (10, 192))

    Raises `ModelError` when the name is not known, a library is missing, or the weights cannot be had
    or do not fit.
    """
    if weights is not None and pretrained:
        raise ModelError("weights come from one place; give either --weights or --pretrained")
    source, colon, rest = name.partition(":")
    if not colon or not source or not rest:
        raise ModelError(f"a model is timm:NAME, hf:NAME_OR_PATH or package.module:function, not {name!r}")
    if source == "hf":
        model = _load_hf(name, weights, pretrained, seed, head)
    else:
        model = (_load_timm if source == "timm" else _load_function)(name, weights, pretrained, seed)
    if whole:
        materialize(model.module, model.weights)
    return model


def _load_timm(name: str, weights: Path | None, pretrained: bool, seed: int) -> ZooModel:
    base, options = parse_name(name.removeprefix("timm:"))
    module = build_timm(base, options, seed)
    if pretrained:
        weights = timm_checkpoint(base, module)
    found = timm_weights(base, module, weights, lambda source: _fitted(module, source)) if weights else None
    generator = torch.Generator().manual_seed(seed)
    return ZooModel(
        name=name,
        module=module,
        example_args=(torch.randn(2, *timm_input_size(module), generator=generator),),
        example_kwargs={},
        weights=_complete(module, found, seed),
        transform=timm_transform(module),
        class_names=timm_class_names(module),
        task="image",
    )


def _load_hf(name: str, weights: Path | None, pretrained: bool, seed: int, head: Head | None) -> ZooModel:
    base, options = parse_hf(name.removeprefix("hf:"))
    directory = hf_directory(base, pretrained)
    config = hf_config(base, directory, options)
    module = build_hf(base, config, seed, head)
    if weights is None and directory is not None and _has_weights(directory):
        weights = directory
    found = _fitted(module, hf_weights(module, weights)) if weights else None
    example, task = hf_example(base, config, module, seed)
    return ZooModel(
        name=name,
        module=module,
        example_args=(),
        example_kwargs=dict(example),
        weights=_complete(module, found, seed),
        transform=hf_transform(config, directory) if "pixel_values" in example else None,
        class_names=hf_class_names(config, module),
        task=task,
    )


def _load_function(name: str, weights: Path | None, pretrained: bool, seed: int) -> ZooModel:
    if pretrained:
        raise ModelError(f"{name} has no published checkpoint; give --weights or load it in the function")
    function = find_function(name)
    made: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = []

    def build() -> nn.Module:
        made[:] = [call_function(name, function)]
        return made[0][0]

    if weights is None:
        # the function may load values of its own: they are the weights
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = build().eval()
        parameter_shapes(module)
        found: Weights = ModuleWeights(module)
        move_to_meta(module)
    else:
        module = _build_for_file(build, seed)
        found = _fitted(module, FileWeights(weights))
    _, args, kwargs = made[0]
    return ZooModel(
        name=name,
        module=module,
        example_args=args,
        example_kwargs=kwargs,
        weights=_complete(module, found, seed),
    )


def _build_for_file(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    module = build_on_meta(build, seed)
    parameter_shapes(module)
    return module


def _fitted(module: nn.Module, source: Weights) -> Weights:
    """Return a checkpoint under the module's names, and put its buffers into the module."""
    buffers = {path: owner._buffers[leaf] for path, (owner, leaf) in persistent_buffers(module).items()}
    shapes = {name: (tuple(buffer.shape), buffer.dtype) for name, buffer in buffers.items() if buffer is not None}
    # positions and counters are computed by the module itself, so many checkpoints leave them out
    computed = [name for name, (_, dtype) in shapes.items() if not dtype.is_floating_point]
    expected = {**parameter_shapes(module), **shapes}
    fitted = check_weights(source, expected, parameter_aliases(module), computed)
    load_buffers(module, fitted)
    return fitted


def _complete(module: nn.Module, found: Weights | None, seed: int) -> Weights:
    """Return weights for every parameter, from a checkpoint or random, and the module's buffers."""
    if found is None:
        found = RandomWeights(parameter_shapes(module), seed, parameter_aliases(module))
    return JoinedWeights(found, TensorWeights(dict(module.named_buffers(remove_duplicate=False))))


def parse_hf(text: str) -> tuple[str, dict[str, object]]:
    """Split a model of transformers into its name and options; a directory may have a comma in its name."""
    return (text, {}) if Path(text).expanduser().is_dir() else parse_name(text)


def _has_weights(directory: Path) -> bool:
    """Return whether a directory holds weights, in any form; a pickled form is refused when it is read."""
    return any(
        True
        for pattern in ("*.safetensors", "pytorch_model*.bin", "*.safetensors.index.json")
        for _ in directory.glob(pattern)
    )
