"""Transforms from a picture to a model's input tensor."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta
from torch import Tensor, nn

from penstock.errors import DataError, ModelError
from penstock.text import one_line
from penstock.zoo.models.hf_models import hf_image_size
from penstock.zoo.models.timm_models import timm_input_size
from penstock.zoo.optional import optional_import

if TYPE_CHECKING:
    from PIL.Image import Image

Transform = Callable[["Image"], Tensor]
PREPROCESS = "penstock.preprocess"  # in the metadata of a safetensors file
_EXAMPLE = "mean=0.5,0.5,0.5,std=0.5,size=224x320,crop_pct=0.9,crop_mode=squash,interpolation=bicubic"
_MOST_RESIZED = 2**25
_Length = Annotated[int, Meta(ge=1, le=2**14)]


class Preprocess(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The preparation of pictures, in timm's words, as far as it differs from the model's own.

    Pictures are resized to `size` (height and width) divided by `crop_pct`, and cropped in the center.
    """

    mean: tuple[Annotated[float, Meta(gt=-1e3, lt=1e3)], ...] | None = None
    std: tuple[Annotated[float, Meta(gt=0, lt=1e3)], ...] | None = None
    size: tuple[_Length, _Length] | None = None
    crop_pct: Annotated[float, Meta(gt=0, le=1)] | None = None
    crop_mode: Literal["center", "squash", "border"] | None = None
    interpolation: Literal["nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"] | None = None


def write_preprocess(text: str | None) -> dict[str, str]:
    """Return the metadata that stores the preparation of pictures in a weights file."""
    return {PREPROCESS: text} if text else {}


def read_preprocess(text: str | None) -> Preprocess:
    """Read the options of `preprocess`.

    >>> read_preprocess("mean=0.5,0.4,0.3,size=224x320").size
    (224, 320)

    Raises `ModelError` for options that do not exist or have other values.
    """
    fields: dict[str, list[str]] = {}
    try:
        for part in text.split(",") if text else ():
            key, equals, value = part.rpartition("=")
            if equals and key.strip() in fields:
                raise ValueError(f"{key.strip()} is given twice")
            # the numbers of a mean are divided by commas, too
            values = fields.setdefault(key.strip(), []) if equals else list(fields.values())[-1]
            values.append(value.strip())
        given: dict[str, Any] = {
            key: values if key in ("mean", "std") or len(values) > 1 else values[0] for key, values in fields.items()
        }
        if isinstance(size := given.get("size"), str):
            given["size"] = size.split("x") if "x" in size else [size, size]
        return msgspec.convert(given, Preprocess, strict=False)
    except (ValueError, IndexError) as problem:
        raise ModelError(f"preprocess must be as in {_EXAMPLE}; got {text!r} ({one_line(problem)})") from None


def timm_transform(module: nn.Module, options: Preprocess, input_size: tuple[int, ...] | None = None) -> Transform:
    """Return timm's evaluation transform for a model, at the size that the model takes, with other options.

    >>> timm_transform(module, Preprocess())(image).shape  # doctest: +SKIP
    torch.Size([3, 224, 224])

    Raises `ModelError` when timm is not installed.
    """
    data = optional_import("timm.data", "vision")
    size = input_size or timm_input_size(module, options.size)
    return config_transform(data.resolve_model_data_config(module, args={"input_size": size}), options)


def config_transform(config: Mapping[str, Any], options: Preprocess) -> Transform:
    """Return the evaluation transform of a configuration of timm's; pictures for one channel become grey."""
    made, channels = dict(config), config["input_size"][0]
    made |= {
        key: value for key in ("crop_pct", "crop_mode", "interpolation") if (value := getattr(options, key)) is not None
    }
    for key in ("mean", "std"):
        made[key] = _for_channels(key, getattr(options, key), config[key], channels)
    transform: Transform = optional_import("timm.data", "vision").create_transform(**made, is_training=False)
    return (lambda image: transform(image.convert("L"))) if channels == 1 else transform


def hf_transform(config: Any, directory: Path | None, options: Preprocess) -> Transform | None:
    """Return the transform of a transformers model with other options, or None if it takes no images.

    It is made from the directory's preprocessor_config.json if that exists; otherwise it is the model type's default,
    at the configuration's image size.

    >>> hf_transform(config, None, Preprocess())(image).shape  # doctest: +SKIP
    torch.Size([3, 224, 224])

    Raises `ModelError` if preprocessor_config.json cannot be read.
    """
    if directory is not None and (directory / "preprocessor_config.json").is_file():
        transformers = optional_import("transformers", "text")
        try:
            processor = transformers.AutoImageProcessor.from_pretrained(directory, trust_remote_code=False)
        except Exception as problem:  # an invalid file may raise anything
            raise ModelError(
                f"{directory / 'preprocessor_config.json'} cannot be read ({one_line(problem)})"
            ) from problem
    else:
        processor = _default_processor(config)
    if processor is None:
        return None
    channels = getattr(config, "num_channels", None) or 3
    others = _other_arguments(processor, options, channels, options.size or hf_image_size(config))

    def transform(image: "Image") -> Tensor:
        given = image.convert("L") if channels == 1 else image
        values: Tensor = processor(images=given, return_tensors="pt", **others)["pixel_values"][0]
        return values

    return transform


def _other_arguments(processor: Any, options: Preprocess, channels: int, size: tuple[int, int]) -> dict[str, Any]:
    """Return the arguments of a processor's call that replace its own configuration."""
    others: dict[str, Any] = {"do_convert_rgb": False} if channels == 1 else {}
    for key in ("mean", "std"):
        given, own = getattr(options, key), getattr(processor, f"image_{key}", None)
        if given is not None or (own is not None and len(own) != channels):
            others |= {f"image_{key}": list(_for_channels(key, given, own or (), channels)), "do_normalize": True}
    if options.interpolation is not None:
        others["resample"] = optional_import("PIL.Image", "vision").Resampling[options.interpolation.upper()]
    height, width = size
    if options.crop_mode is not None or options.crop_pct is not None:
        squashed = options.crop_mode == "squash"
        if options.crop_mode == "border" or (not squashed and height != width):
            raise ModelError(
                f"transformers cannot crop to {height}x{width} with borders or from the shorter edge; give "
                "crop_mode=squash in preprocess"
            )
        scaled = [math.floor(each / (options.crop_pct or 1.0)) for each in size]
        resized = {"height": scaled[0], "width": scaled[1]} if squashed else {"shortest_edge": scaled[0]}
        others |= {"size": resized, "do_center_crop": True, "crop_size": {"height": height, "width": width}}
    elif options.size is not None:
        others |= _sizes(processor, height, width)
    return others


def _for_channels(name: str, given: Sequence[float] | None, own: Sequence[float], channels: int) -> tuple[float, ...]:
    """Return a number for each channel: one is for all, and the model's own are averaged for other channels."""
    if given is not None and len(given) not in (1, channels):
        raise ModelError(f"preprocess {name} must be one number or {channels}; got {len(given)}")
    numbers = tuple(given or own)
    return numbers if len(numbers) == channels else (sum(numbers) / len(numbers),) * channels


def guarded(transform: Transform, name: str) -> Transform:
    """Return a transform of the user's; its errors, which may be any, are those of one picture."""

    def call(image: "Image") -> Tensor:
        try:
            return transform(image)
        except Exception as problem:
            raise DataError(f"the transform of {name} failed ({type(problem).__name__}: {one_line(problem)})") from None

    return call


def check_resized(size: tuple[int, int], length: int) -> int:
    """Return the pixels that a picture of this width and height is resized to if its shorter edge gets a length.

    Raises `DataError` for a picture so narrow that these are too many.
    """
    num_pixels = int((length * 8 / 7) ** 2 * max(size) / max(1, min(size)))  # at a usual crop of 7/8
    if num_pixels > _MOST_RESIZED:
        raise DataError(
            f"the image has {size[0]}x{size[1]} pixels, which become {num_pixels} with a shorter edge of "
            f"{length}, more than {_MOST_RESIZED}; crop it"
        )
    return num_pixels


def bounded(transform: Transform, length: int, image: "Image") -> Tensor:
    """Apply a transform; raises `DataError` as `check_resized`."""
    check_resized(image.size, length)
    return transform(image)


def try_transform(transform: Transform) -> Any:
    """Return what a transform makes of a grey picture."""
    return transform(optional_import("PIL.Image", "vision").new("RGB", (256, 224), (128, 128, 128)))


def _default_processor(config: Any) -> Any:
    """Return the model type's own processor, sized for the configuration."""
    auto = optional_import("transformers.models.auto.image_processing_auto", "text")
    if type(config) not in auto.IMAGE_PROCESSOR_MAPPING:
        return None
    choices = auto.IMAGE_PROCESSOR_MAPPING[type(config)]
    if isinstance(choices, dict):
        choices = [choices.get("torchvision"), choices.get("pil")]
    for choice in choices if isinstance(choices, (list, tuple)) else [choices]:
        if choice is None:
            continue
        try:
            return choice(**_sizes(choice(), *hf_image_size(config)))
        except (ImportError, TypeError, ValueError):
            continue
    return None


def _sizes(processor: Any, height: int, width: int) -> dict[str, dict[str, int]]:
    """Return the processor's size options, scaled such that its output is height by width."""
    size = dict(processor.size)
    exact = {"height": height, "width": width}
    crop = getattr(processor, "crop_size", None)
    crops = crop is not None and bool(getattr(processor, "do_center_crop", False))
    ratio = height / dict(crop or exact)["height"] if crops else 1.0
    options: dict[str, dict[str, int]] = {"crop_size": exact} if crops else {}
    if size.get("shortest_edge"):
        options["size"] = {"shortest_edge": round(size["shortest_edge"] * ratio) if crops else height}
    elif size.get("height"):
        options["size"] = {key: round(size[key] * ratio) for key in exact} if crops else exact
    return options
