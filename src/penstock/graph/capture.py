"""Capture of a model's forward pass as a graph of operators, with a symbolic batch size."""

import contextlib
import inspect
import io
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from penstock.errors import CaptureError
from penstock.graph.callbacks import recorded_callbacks
from penstock.graph.exports import EXPORTING
from penstock.graph.fast_paths import fast_layers
from penstock.graph.graph import Graph
from penstock.graph.older_torch import ordered_multiples
from penstock.graph.translate import translate
from penstock.tensors import moved
from penstock.terminal.notes import note
from penstock.values import BATCH

# torch.export treats sizes 0 and 1 as constants, and so do some models with 2
_Inputs = tuple[tuple[Any, ...], dict[str, Any]]
_EXAMPLE_ROWS = 3
_LONGEST = 240
_TORCH = str(Path(torch.__file__).parent)
_EXPERTS = "batched_mm"
_WITHOUT = "; use torch.where in place of an if, or give Pipeline a list of modules, one a stage, which streams only"
# torch's long messages, and short replacements
_KNOWN = (
    (r"Could not guard on data-dependent expression", "it branches on the values of a tensor"),
    (r"Could not extract specialized \w+ from data-dependent", "it takes a size from the values of a tensor"),
)


def capture(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic: Mapping[str, Mapping[str | int, int]] | None = None,
    largest: Mapping[str, int] | None = None,
) -> Graph:
    """Capture a model's forward pass as a graph that runs at any batch size.

    The first dimension of every tensor input that has the batch's size becomes the symbol `batch`. Parameters may be on
    the meta device: they are never read; the example is moved to the model's device. A model that fixes its batch size
    is captured at the example's batch size, stored as `Graph.fixed_batch`.

    A model in training mode is captured for training: with dropout, updates of statistics, parts without gradients, and
    custom autograd functions and hooks (see `callbacks.py`). A Hugging Face model that would return its KV cache
    (`config.use_cache`) is captured without the cache, and a mixture of experts with `batched_mm`.

    `dynamic` declares further symbolic dimensions: for each name, input names or positions and their dimension, as in
    `{"sequence": {"input_ids": 1, "attention_mask": 1}}`. `largest` gives the largest size of such a dimension that the
    model accepts; a limit that is not given is found by a second export.

    Example:
        graph = capture(timm.create_model("deit_small_patch16_224").eval(), (torch.randn(2, 3, 224, 224),))

    Raises:
        CaptureError: the model does not export; the message has torch's reason in one line.
    """
    if fast := fast_layers(model):
        note(
            f"{type(model).__name__} is captured without PyTorch's fast path of {', '.join(fast)}, which computes "
            "other values for padded rows; to compare outputs, call torch.backends.mha.set_fastpath_enabled(False)"
        )
    arguments, keywords = _beside(model, (tuple(args), dict(kwargs or {})))
    rows = _batch_rows(arguments, keywords)
    with (
        EXPORTING, ordered_multiples(), fake_parameters(model), _as_one_pass(model),
        torch.set_grad_enabled(model.training),
    ):  # fmt: skip
        if rows is None:
            return _export(model, arguments, keywords, None, fixed_batch=None)
        wide_arguments, wide_keywords = (_widen(x, rows) for x in (arguments, keywords))
        labels = _label(model, wide_arguments, wide_keywords, dynamic or {})
        shapes = _dynamic_shapes(model, labels, dynamic or {}, largest)
        try:
            return _export(model, wide_arguments, wide_keywords, shapes, labels, fixed_batch=None)
        except CaptureError as error:
            limits = _limits(error) if dynamic else {}
            if dynamic and not limits:
                raise
        if limits:
            shapes = _dynamic_shapes(model, labels, dynamic or {}, {**(largest or {}), **limits})
            return _export(model, wide_arguments, wide_keywords, shapes, labels, fixed_batch=None)
        # retry at the example's own batch size, which is right only if the model requires it; its error is more useful
        # than an error about rows that the caller did not pass
        return _export(model, arguments, keywords, None, fixed_batch=rows)


def _export(
    model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], shapes: object,
    labels: tuple[tuple[Any, ...], dict[str, Any]] | None = None, *, fixed_batch: int | None,
) -> Graph:  # fmt: skip
    try:
        # suppress torch's output of the graph if an export fails; the error is one line
        with (
            warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()), recorded_callbacks(model) as recorder
        ):  # fmt: skip
            warnings.simplefilter("ignore")
            exported: ExportedProgram = torch.export.export(
                model, arguments, keywords, dynamic_shapes=shapes, strict=False
            )
    # exceptions of the model's own code propagate through torch.export, so any exception can mean "does not export"
    except Exception as error:
        raise CaptureError(f"{type(model).__name__} cannot be captured: {_export_reason(error)}") from error
    for text in recorder.notes:
        note(text)
    return translate(
        exported, model, _in_order(exported, labels), fixed_batch=fixed_batch, callbacks=recorder.callbacks,
        left=recorder.left,
    )  # fmt: skip


def _in_order(
    exported: ExportedProgram, labels: tuple[tuple[Any, ...], dict[str, Any]] | None
) -> list[tuple[str | None, ...]]:
    """Return the labels in the order of the exported inputs; without labels, no dimension has a symbol."""
    if labels is None:
        return [()] * exported.call_spec.in_spec.num_leaves
    positional, keyword = labels
    ordered = {name: keyword[name] for name in exported.call_spec.in_spec.child(1).context or []}
    return [leaf.names for leaf in pytree.tree_leaves((positional, ordered))]


@contextlib.contextmanager
def _as_one_pass(model: nn.Module) -> Iterator[None]:
    """Configure a Hugging Face model to compute a single pass with PyTorch operators only.

    It returns no KV cache, which is not a tensor. Experts of a mixture are computed by batched matrix products: the
    alternatives use a custom operator, or branch on values.
    """
    # the model itself, or a model inside a caller's module
    mixture: Any = next((each for each in model.modules() if hasattr(each, "_can_set_experts_implementation")), model)
    experts = getattr(getattr(mixture, "config", None), "_experts_implementation", None)
    # encoder and decoder may have separate configurations
    configs = {id(each): each for each in (getattr(module, "config", None) for module in model.modules())}
    caching: list[Any] = [each for each in configs.values() if getattr(each, "use_cache", None)]
    has_experts: Callable[[], bool] = getattr(mixture, "_can_set_experts_implementation", bool)
    changes = experts != _EXPERTS and has_experts()
    try:
        for each in caching:
            each.use_cache = False
        if changes:
            mixture.set_experts_implementation(_EXPERTS)
            note(
                f"{type(mixture).__name__} is captured with its experts computed by {_EXPERTS} instead of {experts}; "
                f"to compare outputs, call set_experts_implementation({_EXPERTS!r})"
            )
        yield
    finally:
        for each in caching:
            each.use_cache = True
        if changes:
            mixture.set_experts_implementation(experts)


@contextlib.contextmanager
def fake_parameters(model: nn.Module) -> Iterator[None]:
    """Within the context, replace parameters on the meta device by fake CPU parameters."""
    owners = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.device.type == "meta"
    ]
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(duck_shape=False))
    stand_ins: dict[int, nn.Parameter] = {}
    try:
        for module, name, parameter in owners:
            if id(parameter) not in stand_ins:  # tied parameters stay tied
                with mode:
                    fake = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="cpu")
                stand_ins[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
            module._parameters[name] = stand_ins[id(parameter)]
        yield
    finally:
        for module, name, parameter in owners:
            module._parameters[name] = parameter


def _beside(model: nn.Module, inputs: _Inputs) -> _Inputs:
    """Return the example's inputs on the device that has all of the model's tensors; as they are if several have."""
    homes = {tensor.device for tensor in (*model.parameters(), *model.buffers()) if tensor.device.type != "meta"}
    if len(homes) != 1:
        return inputs
    found: _Inputs = pytree.tree_map_only(Tensor, lambda tensor: moved(tensor, *homes), inputs)
    return found


def _batch_rows(arguments: object, keywords: object) -> int | None:
    """Return the batch size: the first dimension of the first tensor input with dimensions."""
    for leaf in pytree.tree_leaves((arguments, keywords)):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return int(leaf.shape[0])
    return None


def _has_batch(leaf: object, rows: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows


def _widen(tree: Any, rows: int) -> Any:
    """Repeat the example's rows so that the batch size cannot be mistaken for a constant."""

    def widen(leaf: Any) -> Any:
        if not _has_batch(leaf, rows):
            return leaf
        repeats = -(-_EXAMPLE_ROWS // max(rows, 1))
        return leaf.repeat(repeats, *[1] * (leaf.dim() - 1))[:_EXAMPLE_ROWS]

    return tree if rows >= _EXAMPLE_ROWS else pytree.tree_map(widen, tree)


@dataclass(frozen=True, slots=True)
class _Labels:
    """The symbol of each dimension of an input, None for a fixed dimension; empty for a non-tensor value."""

    names: tuple[str | None, ...] = ()


def _label(
    model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any],
    dynamic: Mapping[str, Mapping[str | int, int]],
) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """Return the symbols of each input's dimensions; the result has the structure of the call."""
    rows = _batch_rows(arguments, keywords)
    names = _parameter_names(model, len(arguments))
    _check_dynamic(dynamic, names, keywords)

    def label(leaf: Any, *keys: str | int) -> _Labels:
        if not isinstance(leaf, Tensor):
            return _Labels()
        named: dict[int, str] = {0: BATCH} if rows is not None and _has_batch(leaf, rows) else {}
        for name, places in dynamic.items():
            named |= {places[key] % leaf.dim(): name for key in keys if key in places}
        return _Labels(tuple(named.get(dimension) for dimension in range(leaf.dim())))

    positional = tuple(
        pytree.tree_map(lambda leaf, keys=keys: label(leaf, *keys), argument)
        for keys, argument in zip(enumerate(names), arguments, strict=True)
    )
    keyword = {
        name: pytree.tree_map(lambda leaf, key=name: label(leaf, key), argument) for name, argument in keywords.items()
    }
    return positional, keyword


def _check_dynamic(
    dynamic: Mapping[str, Mapping[str | int, int]], names: Sequence[str], keywords: Mapping[str, Any]
) -> None:
    known = {*range(len(names)), *names, *keywords}
    for name, places in dynamic.items():
        for key in places:
            if key not in known:
                raise CaptureError(
                    f"dynamic dimension {name!r} names the input {key!r}, but the inputs are "
                    f"{', '.join([*names, *keywords])}"
                )


def _dynamic_shapes(
    model: nn.Module, labels: tuple[tuple[Any, ...], dict[str, Any]], dynamic: Mapping[str, object],
    limits: Mapping[str, int] | None = None,
) -> object:  # fmt: skip
    """Convert labels to the dynamic shapes of torch.export."""
    dims = {name: Dim(name, max=(limits or {}).get(name)) for name in (BATCH, *dynamic)}

    def of(label: _Labels) -> Any:
        return {i: dims[name] if name else Dim.STATIC for i, name in enumerate(label.names)} or None

    return _merge(model, *pytree.tree_map(of, labels))


def _limits(error: CaptureError) -> dict[str, int]:
    """Extract the largest sizes that torch.export would accept, for example because of a position table."""
    found = re.findall(r"(\w+) = Dim\('\w+',(?: min=\d+,)? max=(\d+)\)", str(error.__cause__))
    return {name: int(limit) for name, limit in found}


def _parameter_names(model: nn.Module, count: int) -> list[str]:
    parameters = list(inspect.signature(model.forward).parameters.values())
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:count]
    return names + [f"input{index}" for index in range(len(names), count)]


def _merge(model: nn.Module, positional: tuple[Any, ...], keyword: dict[str, Any]) -> object:
    """Merge dynamic shapes as the signature requires: by name, `*args` as a tuple and `**kwargs` as a dict."""
    merged: dict[str, Any] = {}
    rest, remaining = list(positional), dict(keyword)
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            merged[parameter.name], rest = tuple(rest), []
        elif parameter.kind is parameter.VAR_KEYWORD:
            if remaining:
                merged[parameter.name] = remaining
            remaining = {}
        elif rest:
            merged[parameter.name] = rest.pop(0)
        elif parameter.name in remaining:
            merged[parameter.name] = remaining.pop(parameter.name)
    return merged


def _export_reason(error: BaseException) -> str:
    """Return the one-line reason why a model does not export, with the line of the model's code if known.

    Example:
        "it branches on the values of a tensor (gate.py:12: if score.item() > 0.5:); use torch.where in place of ..."
    """
    words = _first_words(error)
    way_out = _WITHOUT if words in {known for _, known in _KNOWN} else ""
    return _shorten(words) + _place(error) + way_out


def _first_words(error: BaseException) -> str:
    text = str(error)
    for pattern, words in _KNOWN:
        if re.search(pattern, text):
            return words
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if lines and lines[0].startswith("Constraints violated"):  # the next lines list the violations
        lines = [line.removeprefix("- ") for line in lines if line.startswith("- ")] or lines
    if not lines:
        return type(error).__name__
    first = lines[0]
    return f"{first} {lines[1]}" if first[-1] in ",:" and len(lines) > 1 else first


def _shorten(text: str) -> str:
    """Truncate a long text to one line, at the end of a sentence if there is one."""
    if len(text) <= _LONGEST:
        return text
    sentence = text.rfind(". ", 0, _LONGEST)
    return text[:sentence] if sentence > 0 else text[:_LONGEST] + "..."


def _place(error: BaseException) -> str:
    """Return the deepest line of the traceback outside of torch: the model's line, not the capture's."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((_TORCH, "<"))]
    inside = [frame for frame in frames if Path(frame.filename).parent != Path(__file__).parent]
    if not inside:
        return ""
    frame = inside[-1]
    code = f": {frame.line}" if frame.line else ""
    return f" ({Path(frame.filename).name}:{frame.lineno}{code})"
