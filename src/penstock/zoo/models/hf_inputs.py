"""Example inputs for models of transformers: what one microbatch of two looks like."""

import inspect
from typing import Any, Literal

import torch
from torch import Tensor

from penstock.errors import ModelError

Task = Literal["image", "text", "other"]

_MAX_LENGTH = 128
_BATCH_SIZE = 2


def hf_example(name: str, config: Any, module: Any, seed: int) -> tuple[dict[str, Tensor], Task]:
    """Make the keyword arguments of one forward pass of two samples, and say what kind they are.

    >>> sorted(hf_example("gpt2", config, module, seed=0)[0])  # doctest: +SKIP
    ['attention_mask', 'input_ids']

    Raises `ModelError` for a model that takes neither images, text nor sound.
    """
    generator = torch.Generator().manual_seed(seed)
    accepted = inspect.signature(module.forward).parameters
    main = module.main_input_name
    if main == "pixel_values":
        return {main: _image(config, generator)}, "image"
    if main == "input_ids":
        example = _text(config, accepted, generator)
        if "pixel_values" in accepted and getattr(config, "vision_config", None) is not None:
            example["pixel_values"] = _image(config.vision_config, generator)
        return example, "text"
    if main == "input_values":
        return {main: torch.randn(_BATCH_SIZE, 16_000, generator=generator)}, "other"
    if main == "input_features" and hasattr(config, "max_source_positions"):
        shape = (_BATCH_SIZE, config.num_mel_bins, 2 * config.max_source_positions)
        sound = torch.randn(shape, generator=generator)
        ids = torch.zeros(_BATCH_SIZE, 8, dtype=torch.long)
        return {
            main: sound,
            **({"decoder_input_ids": ids} if "decoder_input_ids" in accepted else {}),
        }, "other"
    raise ModelError(
        f"no example input is known for hf:{name}, which takes {main}; "
        "give package.module:function that returns the module and its example_args"
    )


def hf_image_size(config: Any) -> tuple[int, int]:
    """Return the height and width of the images that a configuration speaks of.

    >>> hf_image_size(transformers.ViTConfig(image_size=32))  # doctest: +SKIP
    (32, 32)

    Nothing is raised; without a size in the configuration it is 224.
    """
    size = getattr(config, "image_size", None) or getattr(getattr(config, "vision_config", None), "image_size", None)
    if isinstance(size, (list, tuple)):
        return int(size[0]), int(size[-1])
    return (int(size), int(size)) if isinstance(size, int) else (224, 224)


def _image(config: Any, generator: torch.Generator) -> Tensor:
    channels = getattr(config, "num_channels", None) or 3
    return torch.randn(_BATCH_SIZE, channels, *hf_image_size(config), generator=generator)


def _text(config: Any, accepted: Any, generator: torch.Generator) -> dict[str, Tensor]:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = getattr(text, "vocab_size", None) or getattr(config, "vocab_size", None) or 2
    limit = getattr(text, "max_position_embeddings", None) or _MAX_LENGTH
    # some positions are offset by the padding index, as in RoBERTa: stay two below the limit
    length = min(_MAX_LENGTH, max(1, int(limit) - 2))
    shape = (_BATCH_SIZE, length)
    example = {"input_ids": torch.randint(0, vocabulary, shape, generator=generator)}
    if "attention_mask" in accepted:
        example["attention_mask"] = torch.ones(shape, dtype=torch.long)
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted:
        example["decoder_input_ids"] = torch.randint(0, vocabulary, shape, generator=generator)
    return example
