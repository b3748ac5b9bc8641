"""Transforms from a picture to a model's input tensor."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from penstock.errors import ModelError
from penstock.text import one_line
from penstock.zoo.models.hf_models import hf_image_size
from penstock.zoo.models.timm_models import timm_input_size
from penstock.zoo.optional import optional_import

if TYPE_CHECKING:
    from PIL.Image import Image

Transform = Callable[["Image"], Tensor]


def timm_transform(module: nn.Module) -> Transform:
    """Return timm's evaluation transform for a model, at the size that the model takes.

    >>> timm_transform(module)(image).shape  # doctest: +SKIP
    torch.Size([3, 224, 224])

    Raises `ModelError` when timm is not installed.
    """
    data = optional_import("timm.data", "vision")
    config = data.resolve_model_data_config(module, args={"input_size": timm_input_size(module)})
    channels = config["input_size"][0]
    for key in ("mean", "std"):
        if len(config[key]) != channels:
            config[key] = (sum(config[key]) / len(config[key]),) * channels
    transform: Transform = data.create_transform(**config, is_training=False)
    if channels != 1:
        return transform

    def grey(image: "Image") -> Tensor:
        return transform(image.convert("L"))

    return grey


def hf_transform(config: Any, directory: Path | None) -> Transform | None:
    """Return the transform of a transformers model, or None if it takes no images.

    It is made from the directory's preprocessor_config.json if that exists; otherwise it is the model type's default,
    at the configuration's image size.

    >>> hf_transform(config, None)(image).shape  # doctest: +SKIP
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

    def transform(image: "Image") -> Tensor:
        values: Tensor = processor(images=image, return_tensors="pt")["pixel_values"][0]
        return values

    return transform


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
