"""Models of transformers: by local directory, by hub name or by model type, and example inputs."""

import inspect
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from penstock.errors import ModelError
from penstock.text import nearest, one_line
from penstock.zoo.models.hub import fetch_from_hub
from penstock.zoo.models.meta import build_on_meta
from penstock.zoo.optional import optional_import
from penstock.zoo.weights.weight_files import names_of_labels
from penstock.zoo.weights.weights import RandomWeights

_ADVICE = "give a local directory with config.json, or a model type such as hf:gpt2"
# heads for model types whose configuration names none: the first that exists
_HEADS = (
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_MAPPING",
)
Head = Literal["language", "sentences", "images"]
_WANTED: dict[Head, str] = {
    "language": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "sentences": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
    "images": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
}
_SEQUENCE_HEADS = ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING", *_HEADS)
Task = Literal["image", "text", "other"]
_MAX_LENGTH = 128
_LAYERS = re.compile(r"(^|_)(layers?|blocks|experts|depths?)$")  # fields that count modules
_MOST_LAYERS, _SHARED_LAYERS = 10_000, 512
_BATCH_SIZE = 2  # of an example


def hf_directory(name: str, pretrained: bool) -> Path | None:
    """Return the directory of a model's files, or None if the name is only a model type.

    For a hub name files are looked up in the local cache, then downloaded: the configuration always, the weights only
    if `pretrained`.

    >>> hf_directory("gpt2", pretrained=False) is None
    True

    Raises `ModelError` if the directory does not exist, the hub cannot be reached, or a file is missing there.
    """
    directory = Path(name).expanduser()
    if directory.is_dir():
        if (directory / "adapter_config.json").is_file():
            raise ModelError(
                f"{directory} has adapters of PEFT, not a model; load it with AutoPeftModelForCausalLM, and save the "
                "result of merge_and_unload() with save_pretrained"
            )
        if not (directory / "config.json").is_file():
            raise ModelError(f"config.json not found in {directory}; give a directory made by save_pretrained")
        return directory
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(f"directory {name} not found; check the path")
    types = optional_import("transformers", "text").CONFIG_MAPPING
    if name in types and not pretrained:
        return None
    model = f"hf:{name}"
    advice = {} if pretrained else {"advice": _ADVICE + nearest(name, types.keys())}
    found = fetch_from_hub(model, name, ["config.json"], "text", **advice)
    with suppress(ModelError):  # most text models have none
        fetch_from_hub(model, name, ["preprocessor_config.json"], "text")
    if pretrained:
        weights = fetch_from_hub(model, name, ["model.safetensors", "model.safetensors.index.json"], "text")
        if weights.suffix == ".json":
            for shard in sorted(set(json.loads(weights.read_text())["weight_map"].values())):
                fetch_from_hub(model, name, [shard], "text")
    return found.parent


def hf_config(name: str, directory: Path | None, options: Mapping[str, object]) -> Any:
    """Return a model's configuration with the given fields changed.

    >>> hf_config("gpt2", None, {"n_layer": 2}).n_layer
    2

    Raises `ModelError` for a field that the configuration does not have, with the nearest names, and for a
    configuration that transformers refuses.
    """
    transformers = optional_import("transformers", "text")
    check_claims(name, options)
    try:
        if directory is not None:
            # before transformers makes lists of a value for each layer
            check_claims(name, json.loads((directory / "config.json").read_text(encoding="utf-8-sig")))
        if directory is None:
            known = transformers.CONFIG_MAPPING[name]()
        else:
            known = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except ModelError:
        raise
    except Exception as problem:  # an invalid config.json may raise anything
        raise ModelError(f"transformers cannot read the configuration of {name} ({one_line(problem)})") from problem
    for key in options:
        if not hasattr(known, key):
            raise ModelError(f"{key} not found in the configuration of {name}{nearest(key, known.to_dict())}")
    options = {**_tokens_outside(known, options), **options}
    try:
        # created again rather than changed: some fields are computed from others
        config = type(known)(**options) if directory is None else type(known).from_pretrained(directory, **options)
    except Exception as problem:
        raise ModelError(f"hf:{name} cannot have {dict(options)} ({one_line(problem)})") from problem
    if getattr(config, "use_cache", False):
        config.use_cache = False
    if options.get("dtype") is None:
        config.dtype = torch.float32
    return config


def check_claims(name: str, fields: Mapping[str, Any], num_tensors: int | None = None) -> None:
    """Raise `ModelError` for a configuration of more layers than its weights have tensors, before they are built.

    A layer has at least a tensor, except for layers that are shared: some hundreds are never too many.
    """
    limit = _MOST_LAYERS if num_tensors is None else max(num_tensors, _SHARED_LAYERS)
    for key, value in fields.items():
        if isinstance(value, Mapping):
            check_claims(name, value, num_tensors)
        elif _LAYERS.search(str(key)):
            for each in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(each, (int, float)) and each > limit:
                    has = "a model" if num_tensors is None else f"one with weights of {num_tensors} tensors"
                    raise ModelError(f"{key} of {name} is {each:.10g}, but {has} has at most {limit}; correct it")


def _tokens_outside(known: Any, options: Mapping[str, object]) -> dict[str, None]:
    """Return the special tokens that a smaller vocabulary does not have, each with None instead of its number."""
    size = options.get("vocab_size")
    if not isinstance(size, int):
        return {}
    numbers = {name: getattr(known, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {name: None for name, number in numbers.items() if isinstance(number, int) and number >= size}


def build_hf(name: str, config: Any, seed: int, head: Head | None = None) -> tuple[nn.Module, RandomWeights]:
    """Build a transformers model with parameters on the meta device and the requested head; return its random weights.

    Attention is PyTorch's own (`sdpa`) if the model supports it, else transformers' eager attention. Parameters are
    float32 by default; see the option `dtype`.

    >>> build_hf("gpt2", hf_config("gpt2", None, {"n_layer": 2}), seed=0)[0].config.n_layer
    2

    Raises `ModelError` if transformers has no class for the configuration or cannot build it.
    """
    model_class = _model_class(name, config, head)

    def build(attention: str) -> tuple[nn.Module, RandomWeights]:
        return build_on_meta(lambda: model_class._from_config(config, attn_implementation=attention), seed)

    try:
        try:
            return build("sdpa")
        except (ValueError, ImportError) as problem:
            if "attention" not in str(problem).lower():
                raise
            return build("eager")
    except Exception as problem:  # inconsistent configurations may raise anything
        raise ModelError(f"transformers cannot build hf:{name} ({one_line(problem)})") from problem


def hf_class_names(config: Any, module: nn.Module) -> tuple[str, ...] | None:
    """Return the names of a classifier's classes, or None if its configuration has none.

    >>> hf_class_names(config, module)  # doctest: +SKIP
    ('cat', 'dog')
    """
    labels: dict[int, str] = getattr(config, "id2label", None) or {}
    return names_of_labels(labels) if "Classification" in type(module).__name__ else None


def _model_class(name: str, config: Any, wanted: Head | None) -> Any:
    transformers = optional_import("transformers", "text")
    for architecture in config.architectures or () if wanted is None else ():
        found = getattr(transformers, architecture, None)
        if found is not None:
            return found
    auto = optional_import("transformers.models.auto.modeling_auto", "text")
    encodes = getattr(config, "is_encoder_decoder", False)
    heads: tuple[str, ...] = _SEQUENCE_HEADS if encodes else _HEADS
    if wanted is not None:
        heads = heads[:1] if encodes and wanted == "language" else (_WANTED[wanted],)
    for head in heads:
        mapping = getattr(auto, head)
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, (list, tuple)) else found
    what = f"model class for {wanted} of" if wanted else "model class for"
    raise ModelError(f"transformers has no {what} hf:{name} ({type(config).__name__}); choose another model")


def hf_example(
    name: str, config: Any, module: Any, seed: int, size: tuple[int, int] | None = None
) -> tuple[dict[str, Tensor], Task]:
    """Make the keyword arguments of one forward pass of two samples, and return them with their kind.

    `size` is the height and width of images, if it is not that of the configuration.

    >>> sorted(hf_example("gpt2", config, module, seed=0)[0])  # doctest: +SKIP
    ['attention_mask', 'input_ids']

    Raises `ModelError` for a model that takes neither images, text nor sound, or images of another size.
    """
    generator = torch.Generator().manual_seed(seed)
    if size is not None and getattr(config, "image_size", None) is not None and size != hf_image_size(config):
        own, option = ("x".join(map(str, each)) for each in (hf_image_size(config), size))
        raise ModelError(f"{name} takes images of {own}; for {option} give image_size={option} in MODEL")
    accepted = inspect.signature(module.forward).parameters
    main = module.main_input_name
    if main == "pixel_values":
        return {main: _image(config, generator, size)}, "image"
    if main == "input_ids":
        example = _text(config, accepted, generator)
        if "pixel_values" in accepted and getattr(config, "vision_config", None) is not None:
            example["pixel_values"] = _image(config.vision_config, generator)
        return example, "text"
    if main == "input_values":
        return {main: torch.randn(_BATCH_SIZE, 16_000, generator=generator)}, "other"
    if main == "input_features" and hasattr(config, "max_source_positions"):
        shape = (_BATCH_SIZE, config.num_mel_bins, 2 * config.max_source_positions)
        example = {main: torch.randn(shape, generator=generator)}
        if "decoder_input_ids" in accepted:
            example["decoder_input_ids"] = torch.zeros(_BATCH_SIZE, 8, dtype=torch.long)
        return example, "other"
    raise ModelError(
        f"no example input is available for hf:{name}, which takes {main}; give package.module:function that returns "
        "the module and its example_args"
    )


def hf_image_size(config: Any) -> tuple[int, int]:
    """Return the height and width of images in a configuration.

    >>> hf_image_size(transformers.ViTConfig(image_size=32))  # doctest: +SKIP
    (32, 32)

    Without a size in the configuration it is 224; nothing is raised.
    """
    size = getattr(config, "image_size", None) or getattr(getattr(config, "vision_config", None), "image_size", None)
    if isinstance(size, (list, tuple)):
        return int(size[0]), int(size[-1])
    return (int(size), int(size)) if isinstance(size, int) else (224, 224)


def _image(config: Any, generator: torch.Generator, size: tuple[int, int] | None = None) -> Tensor:
    channels = getattr(config, "num_channels", None) or 3
    return torch.randn(_BATCH_SIZE, channels, *(size or hf_image_size(config)), generator=generator)


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
