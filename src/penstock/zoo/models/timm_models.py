"""timm models by name, and checkpoints read as timm reads them."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ModelError
from penstock.text import nearest, one_line
from penstock.zoo.models.hub import as_safetensors, fetch_from_hub, fetch_url
from penstock.zoo.models.meta import build_on_meta
from penstock.zoo.optional import optional_import
from penstock.zoo.weights.weight_files import FileWeights
from penstock.zoo.weights.weights import RandomWeights, TensorWeights, Weights

# options of timm that read files, which may be pickled, or download them
_FILES = frozenset({"checkpoint_path", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"})
_HUB_FILES = ("model.safetensors", "pytorch_model.bin")


def build_timm(name: str, options: Mapping[str, object], seed: int) -> tuple[nn.Module, RandomWeights]:
    """Build a timm model with parameters on the meta device, and return it with its random weights.

    >>> build_timm("vit_tiny_patch16_224", {"depth": 2}, seed=0)[0].embed_dim
    192

    Raises `ModelError` for a name unknown to timm, with the nearest names, and for options that the model rejects.
    """
    timm = optional_import("timm", "vision")
    base = name.partition(".")[0]
    if not timm.is_model(base):
        raise ModelError(f"model {name} not found in timm{nearest(base, timm.list_models())}")
    for option in _FILES.intersection(options):
        raise ModelError(
            f"a timm model's weights must be given by --weights or --pretrained; got {option}; leave it out"
        )
    try:
        module, drawn = build_on_meta(lambda: timm.create_model(name, pretrained=False, **options), seed)
    except Exception as problem:  # timm's builders raise any exception on invalid options
        raise ModelError(f"timm cannot build {name} with {dict(options)} ({one_line(problem)})") from problem
    if "in_chans" in options:
        module.__dict__["in_chans"] = options["in_chans"]  # few models record it
    return module, drawn


def timm_checkpoint(name: str, module: nn.Module) -> Path:
    """Return the published checkpoint of a timm model as a safetensors file, downloading it if necessary.

    >>> timm_checkpoint("resnet18", build_timm("resnet18", {}, seed=0)[0])  # doctest: +SKIP

    Raises `ModelError` if the model has no published checkpoint or it cannot be downloaded.
    """
    config = _pretrained_config(module)
    if config.get("hf_hub_id") and config.get("custom_load") != "hf":
        file = config.get("hf_hub_filename")
        names = (file,) if file else _HUB_FILES
        return as_safetensors(fetch_from_hub(f"timm:{name}", config["hf_hub_id"], names, "vision"))
    if config.get("url") and not config.get("custom_load"):
        return as_safetensors(fetch_url(f"timm:{name}", config["url"]))
    raise ModelError(f"timm publishes no checkpoint of {name} that can be read; leave --pretrained out")


def timm_weights(name: str, module: nn.Module, path: Path, check: Callable[[Weights], Weights]) -> Weights:
    """Read a checkpoint for a timm model, with the model's own names or timm's mapping.

    `check` returns the weights that fit the module, or raises. A tensor that timm only renames stays memory-mapped; a
    tensor that timm computes, such as a resized position embedding, is kept in memory.

    >>> timm_weights("deit_tiny_patch16_224", module, Path("deit.safetensors"), check)  # doctest: +SKIP

    Raises `ModelError` if the checkpoint fits in neither way; the message is about the model's own names.
    """
    source = FileWeights(path)
    try:
        return check(source)
    except ModelError as direct:
        for rules in (None, *_filters(name)):
            try:
                return check(_mapped(source, module, rules))
            except Exception:  # noqa: S112 - other models' rules fail in any way; the direct error is raised below
                continue
        raise ModelError(f"{path} does not fit timm:{name}: {direct}") from direct


def timm_input_size(module: nn.Module, wanted: tuple[int, int] | None = None) -> tuple[int, int, int]:
    """Return channels, height and width of the images that a timm model takes, or is to take.

    >>> timm_input_size(build_timm("vit_tiny_patch16_224", {"img_size": 32}, seed=0)[0])
    (3, 32, 32)

    Raises `ModelError` for another size than that of a model whose size is fixed.
    """
    channels, height, width = _pretrained_config(module).get("input_size") or (3, 224, 224)
    embed = getattr(module, "patch_embed", None)
    size = getattr(embed, "img_size", None) or getattr(module, "img_size", None)
    if isinstance(size, tuple) and len(size) == 2:
        height, width = size
    elif isinstance(size, int):
        height = width = size
    if wanted is not None:
        if size is not None and wanted != (height, width):
            option = "x".join(map(str, wanted))
            raise ModelError(
                f"the model takes images of {height}x{width}; for {option} give img_size={option} in MODEL"
            )
        height, width = wanted
    first = next((layer for layer in module.modules() if isinstance(layer, nn.Conv2d)), None)
    # the first convolution sees the image unless the model folds pixels into channels before it
    if first is not None and embed is not None and first.in_channels < 16:
        channels = first.in_channels
    return int(getattr(module, "in_chans", channels)), int(height), int(width)


def timm_class_names(module: nn.Module) -> tuple[str, ...] | None:
    """Return the class names of a timm model's checkpoint, or None if unknown.

    >>> timm_class_names(build_timm("resnet18", {}, seed=0)[0])[0]
    'tench, Tinca tinca'
    """
    data = optional_import("timm.data", "vision")
    config = _pretrained_config(module)
    num_classes = getattr(module, "num_classes", None)
    if config.get("label_names") and len(config["label_names"]) == num_classes:
        return tuple(map(str, config["label_names"]))
    subset = data.infer_imagenet_subset(module)
    if not subset:
        return None
    info = data.ImageNetInfo(subset)
    if info.num_classes() != num_classes:
        return None
    return tuple(str(info.index_to_description(index)) for index in range(info.num_classes()))


def imagenet_synsets(num_classes: int) -> tuple[str, ...]:
    """Return the synsets of the classes of ImageNet-1k, -12k or -21k, by their number; empty for other numbers.

    >>> imagenet_synsets(1000)[:2], imagenet_synsets(10)
    (('n01440764', 'n01443537'), ())
    """
    data = optional_import("timm.data", "vision")
    subset = data.infer_imagenet_subset({"num_classes": num_classes})
    return tuple(data.ImageNetInfo(subset).label_names()) if subset else ()


def _pretrained_config(module: nn.Module) -> dict[str, Any]:
    return dict(getattr(module, "pretrained_cfg", None) or {})


def _filters(name: str) -> list[Callable[..., Any]]:
    """Return the functions with which timm rewrites checkpoints of this model's family."""
    models = optional_import("timm.models", "vision")
    home = sys.modules[models.model_entrypoint(name.partition(".")[0]).__module__]
    return [value for key, value in vars(home).items() if "filter" in key and "_fn" in key and callable(value)]


def _mapped(source: Weights, module: nn.Module, rules: Callable[..., Any] | None) -> Weights:
    """Run timm's loader on memory-mapped tensors and capture the tensors that it would load."""
    models = optional_import("timm.models", "vision")
    config = _pretrained_config(module)
    caught: dict[str, Tensor] = {}

    def catch(state: Mapping[str, Tensor], **_options: object) -> object:
        caught.update(state)
        return torch.nn.modules.module._IncompatibleKeys([], [])

    config.update(state_dict={name: source.load(name) for name in source.names()}, source="", file=None, hf_hub_id=None)
    module.__dict__["load_state_dict"] = catch
    try:
        num_classes = config.get("num_classes")  # another number is rejected by our own check
        models.load_pretrained(
            module, pretrained_cfg=config, num_classes=num_classes, in_chans=timm_input_size(module)[0], filter_fn=rules
        )
    finally:
        del module.__dict__["load_state_dict"]
    return TensorWeights(caught)
