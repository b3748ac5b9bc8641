"""Models of functions named on the command line: the user's own, and torchvision's."""

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.errors import ModelError
from penstock.text import nearest, note, one_line
from penstock.zoo.data.preprocess import Preprocess, Transform, config_transform, guarded, hf_transform, timm_transform
from penstock.zoo.models.hf_models import hf_class_names
from penstock.zoo.models.timm_models import timm_class_names
from penstock.zoo.optional import optional_import

_TORCHVISION = "torchvision.models"
_PARTS = ("module", "example", "transform", "class_names")


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionModel:
    """The result of a model function: a module, arguments of an example call, transform of images, class names."""

    module: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any]
    transform: Callable[[Any], Tensor] | None = None
    class_names: tuple[str, ...] | None = None


def find_function(name: str) -> Callable[[], object]:
    """Import the function that `package.module:function` names, from the current directory first.

    >>> find_function("collections:Counter")()
    Counter()

    Raises `ModelError` if the module cannot be imported or has no such function.
    """
    module_name, _, attribute = name.partition(":")
    here = str(Path.cwd())
    try:
        module = _import_from(here, module_name)
    except ModuleNotFoundError as problem:
        if problem.name is None or not f"{module_name}.".startswith(f"{problem.name}."):
            raise ModelError(f"{module_name} cannot be imported ({one_line(problem)})") from problem
        raise ModelError(
            f"module {problem.name} not found in {here} or the installed packages; a model must be timm:NAME, "
            "hf:NAME_OR_PATH or package.module:function"
        ) from problem
    except Exception as problem:  # the user's module can fail in any way
        raise ModelError(
            f"{module_name} cannot be imported ({type(problem).__name__}: {one_line(problem)})"
        ) from problem
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ModelError(f"function {attribute} not found in {module_name}{nearest(attribute, vars(module))}")
    found: Callable[[], object] = function
    return found


def _import_from(folder: str, module_name: str) -> ModuleType:
    """Import a module, from this folder if the folder has it.

    Only the named module is preferably imported from the folder. That module may import others next to it, even at a
    later call, so the folder stays on the path, but as the last entry: a `torch.py` or `json.py` in it never shadows
    another module.
    """
    if folder not in sys.path:
        sys.path.append(folder)
    importlib.invalidate_caches()
    package = module_name.partition(".")[0]
    spec = PathFinder.find_spec(package, [folder])
    if package not in sys.modules and spec is not None and spec.loader is not None:
        module = sys.modules[package] = module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[package]
            raise
    return importlib.import_module(module_name)


def call_function(name: str, function: Callable[[], object]) -> FunctionModel:
    """Call a model function, which returns a module, a tuple with example arguments, or a dict with more.

    >>> call_function("m:f", lambda: (nn.Identity(), (1,))).args
    (1,)
    >>> call_function("m:f", lambda: {"module": nn.Identity(), "class_names": ["cat", "dog"]}).class_names
    ('cat', 'dog')

    Raises `ModelError` when the function fails or returns something else. Errors that mention the meta device pass
    through.
    """
    try:
        made = function()
    except (RuntimeError, NotImplementedError) as problem:
        if "meta" in str(problem).lower():
            raise
        raise _failed(name, problem) from problem
    except Exception as problem:  # the user's function can fail in any way
        raise _failed(name, problem) from problem
    if isinstance(made, Mapping) and "module" in made:
        return _of_parts(name, made)
    parts = made if isinstance(made, tuple) else (made,)
    module, args, kwargs = (*parts, *((), {})[len(parts) - 1 :]) if 1 <= len(parts) <= 3 else (None, (), {})
    if not isinstance(module, nn.Module) or not isinstance(args, (tuple, list)) or not isinstance(kwargs, Mapping):
        raise ModelError(
            f"{name} returned {_describe(made)}; it must return a module, (module, example_args), (module, "
            f"example_args, example_kwargs) with a tuple and a dict, or a dict with {', '.join(_PARTS)}"
        )
    return FunctionModel(module=module, args=tuple(args), kwargs=dict(kwargs))


def _of_parts(name: str, parts: Mapping[str, Any]) -> FunctionModel:
    """Check the parts of a model that a function returned as a dict."""
    unknown = next((part for part in parts if part not in _PARTS), None)
    if unknown is not None:
        raise ModelError(f"{name} returned a part {unknown!r}; the parts of a model are {', '.join(_PARTS)}")
    module, example, transform, names = map(parts.get, _PARTS)
    args = (example,) if isinstance(example, Tensor) else example if isinstance(example, (tuple, list)) else ()
    kwargs = example if isinstance(example, Mapping) else {}
    kinds = {
        "module": (isinstance(module, nn.Module), "a torch.nn.Module"),
        "example": (example is None or bool(args or kwargs), "a tensor, a tuple of arguments or a dict of them"),
        "transform": (transform is None or callable(transform), "a function from a PIL image to a tensor"),
        "class_names": (
            names is None or (isinstance(names, Sequence) and all(isinstance(each, str) for each in names)),
            "a list of texts",
        ),
    }
    for part, (right, kind) in kinds.items():
        if not right:
            raise ModelError(f"the {part} that {name} returned must be {kind}; got {_describe(parts.get(part))}")
    return FunctionModel(
        module=parts["module"],
        args=tuple(args),
        kwargs=dict(kwargs),
        transform=transform,
        class_names=None if names is None else tuple(names),
    )


def is_torchvision(function: Callable[..., object]) -> bool:
    """Return True for a function of torchvision, whose weights are random unless it is told which to load."""
    return str(getattr(function, "__module__", "")).startswith(_TORCHVISION)


def takes_num_classes(function: Callable[..., object]) -> bool:
    """Return True if a model function has the option `num_classes`."""
    if is_torchvision(function):
        return True
    try:
        return "num_classes" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # of some built-in callables
        return False


def count_outputs(made: FunctionModel) -> int:
    """Return the number of class scores of a module, without computing them; 0 if there are none."""
    state = [*made.module.named_parameters(remove_duplicate=False), *made.module.named_buffers(remove_duplicate=False)]
    args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (made.args, dict(made.kwargs)))
    try:
        with torch.no_grad():
            output = torch.func.functional_call(made.module, {n: t.to("meta") for n, t in state}, args, kwargs)
    except Exception:  # a module may need values, and may fail in any way; capture reports it
        return 0
    logits = getattr(output, "logits", output)
    scores = (leaf for leaf in pytree.tree_leaves(logits) if isinstance(leaf, Tensor) and leaf.dim() == 2)
    return next((leaf.shape[1] for leaf in scores if leaf.is_floating_point()), 0)


def torchvision_preset(
    function: Callable[..., object], chosen: object
) -> tuple[str, dict[str, Any], tuple[str, ...]] | None:
    """Return torchvision's weights of a classifier: name, preparation of pictures in timm's words, and class names.

    These are the `chosen` weights, or its default ones. None for functions of others.
    """
    if not is_torchvision(function):
        return None
    try:
        known = optional_import(_TORCHVISION, "vision").get_model_weights(function)
    except ValueError:  # a class, or a function of the user's
        return None
    name = str(chosen).replace(f"{known.__name__}.", "")
    weights = known.__members__.get(name, known.DEFAULT)
    preset = weights.transforms()
    if type(preset).__name__ != "ImageClassification":
        return None
    (height, *width), (resized, *_) = preset.crop_size, preset.resize_size
    config = {
        # timm rounds the size of the picture down
        "input_size": (3, height, *(width or [height])),
        "crop_pct": height / (resized + 0.5),
        "crop_mode": "center",
        "mean": tuple(preset.mean),
        "std": tuple(preset.std),
        "interpolation": preset.interpolation.value,
    }
    return str(weights), config, tuple(weights.meta["categories"])


def _failed(name: str, problem: Exception) -> ModelError:
    return ModelError(f"{name} failed ({type(problem).__name__}: {one_line(problem)}); call it in Python to see where")


def _describe(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(item).__name__ for item in value)})"
    return type(value).__name__


def pictures_of(
    name: str, function: Any, chosen: object, made: FunctionModel, how: Preprocess
) -> tuple[Transform | None, tuple[str, ...] | None]:
    """Return the transform and the class names of a function's model: its own, or those of its library."""
    module, given = made.module, how != Preprocess()
    example: Any = next(iter([*made.args, *made.kwargs.values()]), None)
    shape = tuple(example.shape[1:]) if isinstance(example, Tensor) and example.dim() == 4 else None
    if made.transform is not None:
        if given:
            raise ModelError(f"{name} returned its own transform of images; leave preprocess out")
        return guarded(made.transform, name), made.class_names
    preset = torchvision_preset(function, chosen)
    if preset is not None:
        weights, known, names = preset
        if chosen is None and not given:
            note(
                f"images are prepared as for torchvision's {weights} (resized to "
                f"{int(known['input_size'][1] / known['crop_pct'])}, {known['interpolation']}); preprocess changes it"
            )
        size = how.size or known["input_size"][1:]
        return config_transform({**known, "input_size": (3, *size)}, how), made.class_names or names
    if getattr(module, "pretrained_cfg", None):
        return timm_transform(module, how, shape if how.size is None else None), made.class_names or timm_class_names(
            module
        )
    config = getattr(module, "config", None)
    if config is not None and getattr(module, "main_input_name", None) == "pixel_values":
        directory = Path(str(getattr(config, "name_or_path", "") or ""))
        transform = hf_transform(config, directory if directory.is_dir() else None, how)
        return transform, made.class_names or hf_class_names(config, module)
    if how.size is None or how.mean is None or how.std is None:
        if given:
            raise ModelError(f"preprocess needs size, mean and std for {name}, which has no transform of its own")
        return None, made.class_names
    channels = shape[0] if shape else max(len(how.mean), len(how.std), 3 if len(how.mean) == 1 else 1)
    own = {
        "input_size": (channels, *how.size),
        "crop_pct": 1.0,
        "crop_mode": "center",
        "mean": how.mean,
        "std": how.std,
        "interpolation": "bilinear",
    }
    return config_transform(own, how), made.class_names


def example_of(made: FunctionModel, pixels: Tensor, seed: int) -> dict[str, Any]:
    """Return the example arguments of a model that takes such pictures."""
    example = torch.randn(2, *pixels.shape, generator=torch.Generator().manual_seed(seed))
    named = getattr(made.module, "main_input_name", None) == "pixel_values"
    return {"kwargs": {"pixel_values": example}} if named else {"args": (example,)}
