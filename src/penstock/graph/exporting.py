"""Exports of captures: their lock, what older versions of PyTorch need, and why a model does not export."""

import contextlib
import re
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

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
        not attention.training and attention.batch_first and attention.in_proj_bias is not None and plain
        and attention._qkv_same_embed_dim and attention.num_heads % 2 == 0
    )  # fmt: skip


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
