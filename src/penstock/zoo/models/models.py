"""Load a model by name: module, example inputs, weights, and what belongs to them; names with options."""

import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.errors import ModelError
from penstock.text import note, one_line
from penstock.zoo.data.preprocess import (
    PREPROCESS,
    Preprocess,
    Transform,
    bounded,
    hf_transform,
    read_preprocess,
    timm_transform,
    try_transform,
)
from penstock.zoo.models import hf_models as hf
from penstock.zoo.models import meta
from penstock.zoo.models import timm_models as timm
from penstock.zoo.models.functions import (
    FunctionModel,
    call_function,
    count_outputs,
    example_of,
    find_function,
    is_torchvision,
    pictures_of,
    takes_num_classes,
)
from penstock.zoo.models.gguf_models import load_gguf
from penstock.zoo.weights.fit import KEY, check_weights, hf_weights, narrow, read_sizes
from penstock.zoo.weights.quantized import read_quantized, take_quantization
from penstock.zoo.weights.weight_files import FileWeights, names_beside, read_classes
from penstock.zoo.weights.weights import JoinedWeights, ModuleWeights, TensorWeights, Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooModel:
    """A model ready for capture.

    The module is in eval mode. Its parameters are on the meta device unless it was loaded whole; its buffers are real.
    `weights` has every parameter and buffer under each of its names; `is_random` tells that no weights were given.
    `initial` has the values that the model's constructor draws after `torch.manual_seed(seed)`.
    `preprocess` has the options that pictures are prepared with, instead of the model's own.
    """

    name: str
    module: nn.Module
    example_args: tuple[Any, ...]
    example_kwargs: dict[str, Any]
    weights: Weights
    initial: Weights
    transform: Transform | None = None
    class_names: tuple[str, ...] | None = None
    task: hf.Task = "other"
    is_random: bool = False
    preprocess: str | None = None
    num_classes: int = 0  # 0 if unknown

    @property
    def picture_shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return tuple([*self.example_args, *self.example_kwargs.values()][0].shape[1:])

    def pictures(self) -> Transform:
        """Return the transform from a picture to an input.

        Raises `ModelError` naming what the model lacks to take pictures, and if the transform does not fit.
        """
        inputs = [*self.example_args, *self.example_kwargs.values()]
        if self.transform is not None and len(inputs) != 1:
            raise ModelError(f"a classifier of images takes one input; the example of {self.name} has {len(inputs)}")
        if self.transform is None or self.task != "image":
            if self.name.partition(":")[0] in _LIBRARIES:
                raise ModelError(f"{self.name} does not take images; give an image classification model")
            raise ModelError(
                f"{self.name} returned no transform of images; return a dict with module and transform (and example, "
                "class_names), or give --set preprocess=... with size, mean and std"
            )
        shape = self.picture_shape
        try:
            found = tuple(try_transform(self.transform).shape)
        except Exception as problem:  # of a model of other channels, or of the user's
            found, reason = (), f" ({one_line(problem)})"
        else:
            reason = ""
        if found != shape:
            made = f"become {'x'.join(map(str, found))}" if found else f"cannot be prepared{reason}"
            way = "another size" if found[:1] == shape[:1] else "a model of 3 channels, or of 1 for grey images"
            raise ModelError(
                f"{self.name} takes inputs of {'x'.join(map(str, shape))}, but images {made}; give {way}, or "
                "package.module:function with a transform of its own"
            )
        return partial(bounded, self.transform, max(shape))


def load_model(
    name: str,
    *,
    weights: str | Path | None = None,
    pretrained: bool = False,
    seed: int = 0,
    whole: bool = False,
    head: hf.Head | None = None,
    preprocess: str | None = None,
) -> ZooModel:
    """Load a model by name, without its weights in memory unless `whole`.

    All names but `gguf:` may be followed by options, `,key=value`. `hf:` takes a directory with config.json, and uses
    its safetensors files if there are any; a model type of transformers such as `gpt2` or `bert`, with its default
    configuration unless `pretrained`; or a hub name. `gguf:` takes a .gguf file, or an installed package that contains
    one. `package.module:function`, called with its options as keyword arguments, returns a module,
    `(module, example_args)`, `(module, example_args, example_kwargs)`, or a dict with `module` and, as far as needed,
    `example`, `transform` (from a PIL image to a tensor) and `class_names`.

    Weights are read from `weights`, else from the published checkpoint if `pretrained`, else from the model's own
    directory or function. Otherwise they are those of the model's constructor after `torch.manual_seed(seed)`, drawn
    when they are first loaded. `head` overrides the head in an `hf:`
    model's configuration. Weights with class names in their metadata determine the model's number of classes, and their
    names; a config.json next to them may name as many classes as the model has. `preprocess` has the options of
    `preprocess`; weights that were trained with some keep them.

    >>> model = load_model("timm:vit_tiny_patch16_224,depth=2,num_classes=10")
    >>> model.example_args[0].shape, model.weights.shape("head.weight")
    (torch.Size([2, 3, 224, 224]), (10, 192))

    Raises `ModelError` if the name is unknown, a library is missing, or the weights cannot be read or do not fit.
    """
    weights = Path(weights) if weights is not None else None
    if weights is not None and pretrained:
        raise ModelError("only one source of weights is possible; give either --weights or --pretrained")
    source, colon, rest = name.partition(":")
    if not colon or not source or not rest:
        wanted = "timm:NAME, hf:NAME_OR_PATH, gguf:FILE or package.module:function"
        raise ModelError(f"a model must be {wanted}; got {name!r}")
    metadata = FileWeights(weights).metadata if weights is not None else {}
    classes, preprocess = read_classes(metadata), preprocess or metadata.get(PREPROCESS)
    options = read_preprocess(preprocess)
    counted = with_classes(name, len(classes)) if classes is not None else name
    if classes is not None and classes_in(counted) not in (None, len(classes)):
        raise ModelError(
            f"the number of classes must be that of {weights}, {len(classes)}; got {classes_in(name)} in {name}; "
            "leave that option out"
        )
    if source == "gguf":
        model = _load_gguf(name, weights, pretrained)
    elif source == "hf":
        model = _load_hf(counted, weights, pretrained, seed, head, options)
    else:
        model = (_load_timm if source == "timm" else _load_function)(counted, weights, pretrained, seed, options)
    if classes is None and weights is not None:
        beside = names_beside(weights)
        classes = beside if beside and len(beside) == model.num_classes else None
    if classes is not None:
        model = replace(model, name=name, class_names=classes)
    model = replace(model, preprocess=preprocess)
    if whole:
        meta.materialize(model.module, model.weights)
    return model


def _load_timm(name: str, weights: Path | None, pretrained: bool, seed: int, how: Preprocess) -> ZooModel:
    base, options = parse_name(name.removeprefix("timm:"))
    module, drawn = timm.build_timm(base, options, seed)
    if pretrained:
        weights = timm.timm_checkpoint(base, module)
    found = timm.timm_weights(base, module, weights, lambda source: _fitted(module, source)) if weights else None
    example = _noise(timm.timm_input_size(module, how.size), seed)
    return ZooModel(
        name=name,
        module=module,
        example_args=(example,),
        example_kwargs={},
        weights=_complete(module, found) if found else drawn,
        initial=drawn,
        transform=timm_transform(module, how),
        class_names=timm.timm_class_names(module),
        task="image",
        is_random=found is None,
        num_classes=count_classes(module),
    )


def _load_hf(
    name: str, weights: Path | None, pretrained: bool, seed: int, head: hf.Head | None, how: Preprocess
) -> ZooModel:
    base, options = parse_hf(name.removeprefix("hf:"))
    directory = hf.hf_directory(base, pretrained)
    config = hf.hf_config(base, directory, options)
    quantization, own = take_quantization(config), weights is None
    if weights is None and directory is not None and _has_weights(directory):
        weights = directory
    found, source = None, FileWeights(weights) if weights is not None else None
    checkpoint = None if source is None else read_quantized(name, source, quantization, own=own)
    hf.check_claims(name, config.to_dict(), None if source is None else len(source.names()))
    module, drawn = hf.build_hf(base, config, seed, head)
    if source is not None and checkpoint is not None:
        # names in a narrowed model's checkpoint never need to be mapped
        named = source if KEY in source.metadata else hf_weights(module, checkpoint)
        _untie(module, named)
        found = _fitted(module, named)
    example, task = hf.hf_example(base, config, module, seed, how.size)
    return ZooModel(
        name=name,
        module=module,
        example_args=(),
        example_kwargs=dict(example),
        weights=_complete(module, found) if found else drawn,
        initial=drawn,
        task=task,
        class_names=hf.hf_class_names(config, module),
        transform=hf_transform(config, directory, how) if "pixel_values" in example else None,
        is_random=found is None,
        num_classes=count_classes(module),
    )


def _noise(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return an example of two inputs."""
    return torch.randn(2, *shape, generator=torch.Generator().manual_seed(seed))


def _untie(module: nn.Module, given: Weights) -> None:
    """Give a tied parameter values of its own if the checkpoint has them, as transformers does."""
    names = set(given.names())
    for alias, first in meta.parameter_aliases(module).items():
        if {alias, first} <= names and not torch.equal(given.load(alias), given.load(first)):
            owner, _, leaf = alias.rpartition(".")
            layer = module.get_submodule(owner)
            setattr(layer, leaf, nn.Parameter(torch.empty_like(layer.get_parameter(leaf))))
            note(
                f"the checkpoint has a tensor of its own for {alias}, which its config.json ties to {first}; it is used"
            )


def _load_gguf(name: str, weights: Path | None, pretrained: bool) -> ZooModel:
    if weights is not None or pretrained:
        raise ModelError(f"{name} has its weights in the file; leave --weights and --pretrained out")
    module, given = load_gguf(name)
    found = _fitted(module, given)
    example, task = hf.hf_example(name, module.config, module, 0)
    whole = _complete(module, found)
    return ZooModel(
        name=name, module=module, example_args=(), example_kwargs=dict(example), weights=whole, initial=whole, task=task
    )


def _load_function(name: str, weights: Path | None, pretrained: bool, seed: int, how: Preprocess) -> ZooModel:
    if pretrained:
        raise ModelError(
            f"{name} has no published checkpoint; give --weights, or load weights in the function that makes the "
            "model (torchvision's do with the option ,weights=DEFAULT)"
        )
    base, options = parse_name(name)
    function = find_function(base)
    made: list[FunctionModel] = []

    def build() -> nn.Module:
        made[:] = [call_function(name, partial(function, **options))]
        return made[0].module

    if weights is None:
        # the function may have loaded values itself: these are the weights
        module = meta.draw(build, seed)
        meta.parameter_shapes(module)
        found: Weights = ModuleWeights(module)
        initial = found
        meta.move_to_meta(module)
    else:
        module, initial = meta.build_on_meta(build, seed)
        found = _complete(module, _fitted(module, FileWeights(weights)))
    transform, names = pictures_of(name, function, options.get("weights"), made[0], how)
    if transform is not None and not made[0].args and not made[0].kwargs:
        made[0] = replace(made[0], **example_of(made[0], try_transform(transform), seed))
    num_classes = count_outputs(made[0]) or count_classes(module)
    if made[0].class_names is not None and len(names or ()) != num_classes:
        raise ModelError(f"{name} returned {len(names or ())} class_names for {num_classes} outputs; name each output")
    return ZooModel(
        name=name, module=module, example_args=made[0].args, example_kwargs=dict(made[0].kwargs),
        weights=found, initial=initial, transform=transform, task="other" if transform is None else "image",
        class_names=names if names and len(names) == num_classes else None, num_classes=num_classes,
        is_random=weights is None and options.get("weights") is None and is_torchvision(function),
    )  # fmt: skip


def _fitted(module: nn.Module, source: Weights) -> Weights:
    """Return a checkpoint under the module's names, and load its buffers into the module.

    A checkpoint of a narrowed model, marked in its header, also narrows the module.
    """
    sizes = read_sizes(source.metadata) if isinstance(source, FileWeights) else None
    if sizes is not None:
        narrow(module, sizes, {name: source.shape(name) for name in source.names()})
    buffers = {path: owner._buffers[leaf] for path, (owner, leaf) in meta.persistent_buffers(module).items()}
    shapes = {name: (tuple(buffer.shape), buffer.dtype) for name, buffer in buffers.items() if buffer is not None}
    # positions and counters are computed by the module itself, so many checkpoints leave them out
    computed = [name for name, (_, dtype) in shapes.items() if not dtype.is_floating_point]
    expected = {**meta.parameter_shapes(module), **shapes}
    fitted = check_weights(source, expected, meta.parameter_aliases(module), computed)
    meta.load_buffers(module, fitted)
    return fitted


def _complete(module: nn.Module, found: Weights) -> Weights:
    """Return a checkpoint's weights together with the module's buffers."""
    return JoinedWeights(found, TensorWeights(dict(module.named_buffers(remove_duplicate=False))))


def _has_weights(directory: Path) -> bool:
    """Return True if a directory contains weights in any format; pickled weights are refused when they are read."""
    patterns = ("*.safetensors", "pytorch_model*.bin", "*.safetensors.index.json")
    return any(next(directory.glob(pattern), None) is not None for pattern in patterns)


# models by name, with their option for the number of classes; others are functions
_LIBRARIES = {"timm": "num_classes", "hf": "num_labels", "gguf": None}


def with_classes(name: str, num_classes: int) -> str:
    """Add the number of classes to a model's name, unless it has one.

    >>> with_classes("timm:resnet18", 10), with_classes("hf:vit,num_labels=4", 10)
    ('timm:resnet18,num_classes=10', 'hf:vit,num_labels=4')
    """
    option = _option_of_classes(name)
    return name if option is None or classes_in(name) is not None else f"{name},{option}={num_classes}"


def count_classes(module: nn.Module) -> int:
    """Return the number of classes of a timm or transformers model, or 0 if it does not have one."""
    return int(getattr(module, "num_classes", getattr(getattr(module, "config", None), "num_labels", 0)) or 0)


def classes_in(name: str) -> int | None:
    """Return the number of classes in a model's name, or None.

    >>> classes_in("timm:resnet18,num_classes=10"), classes_in("timm:resnet18")
    (10, None)
    """
    option = _option_of_classes(name)
    found = parse_hf(name.partition(":")[2])[1].get(option) if option is not None else None
    return found if isinstance(found, int) else None


def _option_of_classes(name: str) -> str | None:
    """Return the option for the number of classes of a model, or None if it has none."""
    source = name.partition(":")[0]
    if source in _LIBRARIES:
        return _LIBRARIES[source]
    return "num_classes" if takes_num_classes(find_function(parse_name(name)[0])) else None


def parse_hf(text: str) -> tuple[str, dict[str, object]]:
    """Split a model of transformers into its name and options; a directory may have a comma in its name."""
    return (text, {}) if Path(text).expanduser().is_dir() else parse_name(text)


def parse_name(text: str) -> tuple[str, dict[str, object]]:
    """Split `NAME,key=value,...` into the name and its options.

    Raises `ModelError` if an option has no key, no `=` or is given twice.

    >>> parse_name("vit_tiny_patch16_224,num_classes=10,drop_rate=0.1")
    ('vit_tiny_patch16_224', {'num_classes': 10, 'drop_rate': 0.1})
    """
    name, *parts = text.split(",")
    options: dict[str, object] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        key = key.strip()
        if not equals or not key.isidentifier() or key in options:
            raise ModelError(f"an option of a model must be key=value, each key once; got {part!r} in {text!r}")
        options[key] = parse_value(value.strip())
    return name.strip(), options


def parse_value(text: str) -> object:
    """Read an option's value: an integer, a number, true, false, none, a size such as 224x320, or the text itself.

    >>> [parse_value(text) for text in ("12", "1e-5", "true", "none", "224x320", "gelu")]
    [12, 1e-05, True, None, (224, 320), 'gelu']
    """
    if re.fullmatch(r"[0-9]+x[0-9]+", text):
        return tuple(map(int, text.split("x")))
    words: dict[str, object] = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text
