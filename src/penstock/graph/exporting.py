"""Exports of captures: symbolic dimensions, the lock, what older versions of PyTorch need, and why an export fails."""

import contextlib
import inspect
import linecache
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from penstock.errors import CaptureError
from penstock.values import BATCH

# held during captures, which turn mkldnn, cudnn and nnpack off, and while torch settings are read
EXPORTING = threading.RLock()


def fast_layers(model: nn.Module) -> list[str]:
    """Return the class names of modules that use PyTorch's fast path when no gradients are computed.

    The conditions are taken from `torch.nn.modules.transformer` and `activation`, as far as they depend only on
    modules.

    >>> fast_layers(nn.TransformerEncoderLayer(8, 2, batch_first=True).eval())
    ['TransformerEncoderLayer']
    """
    if not torch.backends.mha.get_fastpath_enabled():
        return []
    found, inner = [], set()
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            inner.add(module.self_attn)
            if _fits(module.self_attn) and module.activation_relu_or_gelu and module.norm1.eps == module.norm2.eps:
                found.append(type(module).__name__)
        elif isinstance(module, nn.MultiheadAttention) and module not in inner and _fits(module):
            found.append(type(module).__name__)
    return list(dict.fromkeys(found))


def _fits(attention: nn.MultiheadAttention) -> bool:
    plain = attention.bias_k is None and attention.bias_v is None and not attention.add_zero_attn
    return (
        not attention.training
        and attention.batch_first
        and attention.in_proj_bias is not None
        and plain
        and attention._qkv_same_embed_dim
        and attention.num_heads % 2 == 0
    )


@contextlib.contextmanager
def ordered_multiples() -> Iterator[None]:
    """Within the context, PyTorch 2.10 and 2.11 simplify min(12x, 24x) to 12x, as newer versions do.

    Otherwise torch.export guards on this where it compares strides, and refuses other lengths for a model whose heads
    share keys, such as Llama. Hold `EXPORTING`.
    """
    import sympy  # only captures need it
    from torch.utils._sympy import functions

    base: Any = functions.MinMaxBase
    if hasattr(base, "_collapse_known_multiplicative_terms"):
        yield
        return
    inherited = base._collapse_arguments.__func__

    def collapse(cls: Any, /, args: Any, **assumptions: Any) -> Any:
        found = inherited(cls, args, **assumptions)
        if len(found) == 2:
            (one, factor), (other, same) = (each.as_coeff_Mul() for each in found)
            if factor == same and factor.is_nonnegative and one != other:
                return frozenset([sympy.Mul((min if cls is functions.Min else max)(one, other), factor)])
        return found

    base._collapse_arguments = classmethod(collapse)
    try:
        yield
    finally:
        base._collapse_arguments = classmethod(inherited)


_LONGEST = 240
_NOT_THE_MODELS = (str(Path(torch.__file__).parent), contextlib.__file__, "<")
_WITHOUT = "; use torch.where in place of an if, or give Pipeline a list of modules, one a stage, which streams only"
# torch's long messages, and short replacements
_KNOWN = (
    (r"Could not guard on data-dependent expression", "it branches on the values of a tensor"),
    (r"Could not extract specialized \w+ from data-dependent", "it takes a size from the values of a tensor"),
)


def export_reason(error: BaseException) -> str:
    """Return the one-line reason why a model does not export, with the line of the model's code if known.

    Example:
        "it branches on the values of a tensor (gate.py:12: if score.item() > 0.5:); use torch.where in place of ..."
    """
    words = _first_words(error)
    way_out = _WITHOUT if words in {known for _, known in _KNOWN} else ""
    return _shorten(words) + _place(error) + way_out


def is_of_sizes(error: BaseException) -> bool:
    """Return whether an export failed because the model does not accept all batch sizes."""
    return bool(re.search(r"Constraints violated|specialized it to be a constant|generated guard", str(error)))


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
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_NOT_THE_MODELS)]
    inside = [frame for frame in frames if Path(frame.filename).parent != Path(__file__).parent]
    if not inside:
        return ""
    frame = inside[-1]
    return _show(frame.filename, frame.lineno, frame.line)


def place_of(node: fx.Node) -> str:
    """Return the line of the model's code that an operation of an export comes from, in parentheses, or ""."""
    found = re.findall(r'File "([^"]+)", line (\d+), in .*\n\s*(.*)', node.meta.get("stack_trace") or "")
    own = [line for line in found if not line[0].startswith(_NOT_THE_MODELS)]
    return _show(*own[-1]) if own else ""


def _show(file: str, number: object, code: str | None) -> str:
    return f" ({Path(file).name}:{number}{f': {code}' if code else ''})"


# torch.export treats sizes 0 and 1 as constants, and so do some models with 2
_EXAMPLE_ROWS = 3
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")
_TRIED = (3, 4, 5, 7, 16, 33, 1000)  # batch sizes that a guard must allow
_CODE = 80  # characters of a line in a message


def batch_rows(labels: object, arguments: object, keywords: object) -> int | None:
    """Return the batch size of a call with these labels; None if no input has a batch."""
    for leaf, label in zip(pytree.tree_leaves((arguments, keywords)), pytree.tree_leaves(labels), strict=True):
        if BATCH in label.names:
            return int(leaf.shape[label.names.index(BATCH)])
    return None


def _example_rows(inputs: Sequence[tuple[tuple[str | int, ...], Any]], declared: Mapping[str | int, int]) -> int | None:
    """Return the size of the batch in the first input that is declared to have it, or in the first tensor."""
    for keys, argument in inputs:
        dims = [declared[key] for key in keys if key in declared] or ([] if declared else [0])
        for leaf in pytree.tree_leaves(argument) if dims else ():
            if isinstance(leaf, Tensor) and leaf.dim() > 0:
                return int(leaf.shape[dims[0]])
    return None


def _has_batch(leaf: object, rows: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows


def widen_rows(tree: Any, labels: Any, rows: int) -> Any:
    """Repeat the example's rows so that the batch size cannot be mistaken for a constant."""
    if rows >= _EXAMPLE_ROWS:
        return tree

    def widen(leaf: Any, label: _Labels) -> Any:
        if BATCH not in label.names:
            return leaf
        dim = label.names.index(BATCH)
        repeats = [-(-_EXAMPLE_ROWS // max(rows, 1)) if place == dim else 1 for place in range(leaf.dim())]
        return leaf.repeat(repeats).narrow(dim, 0, _EXAMPLE_ROWS).contiguous()

    leaves, spec = pytree.tree_flatten(tree)
    return pytree.tree_unflatten([widen(*pair) for pair in zip(leaves, pytree.tree_leaves(labels), strict=True)], spec)


@dataclass(frozen=True, slots=True)
class _Labels:
    """The symbol of each dimension of an input, None for a fixed dimension; empty for a non-tensor value."""

    names: tuple[str | None, ...] = ()


def label_inputs(
    model: nn.Module,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    dynamic: Mapping[str, Mapping[str | int, int]],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the symbols of each input's dimensions; the result has the structure of the call."""
    names = _parameter_names(model, len(arguments))
    _check_dynamic(dynamic, names, keywords)
    declared = dynamic.get(BATCH, {})
    inputs = [*zip(enumerate(names), arguments, strict=True), *(((key,), x) for key, x in keywords.items())]
    rows = _example_rows(inputs, declared)

    def label(leaf: Any, *keys: str | int) -> _Labels:
        if not isinstance(leaf, Tensor):
            return _Labels()
        own = set(keys) & declared.keys()
        named: dict[int, str] = {0: BATCH} if rows is not None and not own and _has_batch(leaf, rows) else {}
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


def dynamic_shapes(
    model: nn.Module,
    labels: tuple[tuple[Any, ...], dict[str, Any]],
    dynamic: Mapping[str, object],
    limits: Mapping[str, int] | None = None,
) -> object:
    """Convert labels to the dynamic shapes of torch.export."""
    dims = {name: Dim(name, max=(limits or {}).get(name)) for name in (BATCH, *dynamic)}

    def of(label: _Labels) -> Any:
        return {i: dims[name] if name else Dim.STATIC for i, name in enumerate(label.names)} or None

    return _merge(model, *pytree.tree_map(of, labels))


def limits_in(error: CaptureError) -> dict[str, int]:
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


@contextmanager
def watched_sizes(inputs: Any) -> Iterator[list[str]]:
    """Collect the lines, inside the context, that allow only some batch sizes; `inputs` are those of the export.

    Example:
        with watched_sizes((args, kwargs)) as lines:
            model(*args, **kwargs)
        lines       # ["net.py:12: for row in x"]
    """
    lines: list[str] = []
    sizes: list[Any] = [n for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) for n in leaf.shape[:1]]
    size = next((n for n in sizes if isinstance(n, torch.SymInt)), None)
    if size is None:
        yield lines
        return
    env: Any = size.node.shape_env
    symbol = size.node.expr
    # torch before 2.11 has only the first
    names = [name for name in ("evaluate_expr", "evaluate_sym_node") if hasattr(env, name)]

    def watch(evaluate: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            known = len(env.guards)
            made = evaluate(*args, **kwargs)
            if any(_excludes(guard.expr, symbol) for guard in env.guards[known:]):
                lines.append(_line(sys._getframe(1)))
            return made

        return call

    for name in names:
        setattr(env, name, watch(getattr(env, name)))
    try:
        yield lines
    finally:
        for name in names:
            delattr(env, name)


def _excludes(guard: Any, symbol: Any) -> bool:
    import sympy  # workers, which capture nothing, must not load it

    return guard.free_symbols == {symbol} and any(guard.subs(symbol, number) == sympy.false for number in _TRIED)


def _line(frame: FrameType | None) -> str:
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    if frame is None:
        return ""
    file, number = frame.f_code.co_filename, frame.f_lineno
    return f"{Path(file).name}:{number}: {linecache.getline(file, number).strip()[:_CODE]}"
