"""Find a model's repeated blocks, and the pieces that hold its parameters, from module paths alone."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from penstock.errors import CutError
from penstock.graph.cuts import Span, module_spans
from penstock.graph.graph import Graph

_INDEXED = re.compile(r"(?:.*\.)?\d+(?:@\d+)?|.*@\d+")


def find_blocks(graph: Graph, work: Sequence[float]) -> list[Span]:
    """Return the repeated blocks in order: the most numerous class of numbered modules that does half the work.

    For DeiT the twelve of `blocks.0` to `blocks.11`, for T5 those of encoder and decoder, for Swin the
    24 of all four levels. Raises `CutError` where a model has no such class.
    """
    spans = module_spans(graph)
    kinds: dict[str, list[Span]] = defaultdict(list)
    called_again = {path.partition("@")[0] for path in spans if "@" in path}
    for path, span in spans.items():
        if span.stop > span.start and (_INDEXED.fullmatch(path) or path in called_again):
            kinds[span.call.kind].append(span)
    total = sum(work)
    candidates = [
        sorted(group, key=lambda span: span.start)
        for group in map(_outermost, kinds.values())
        if len(group) > 1 and sum(sum(work[span.start : span.stop]) for span in group) >= total / 2
    ]
    if not candidates:
        raise CutError(f"{graph.model} has no repeated blocks that do half of its work; use the policy 'balanced'")
    return max(candidates, key=lambda group: (len(group), -min(span.depth for span in group)))


def _outermost(group: list[Span]) -> list[Span]:
    """Leave out spans inside other spans of the same class."""
    kept: list[Span] = []
    for span in sorted(group, key=lambda span: (span.start, -span.stop, span.depth)):
        if not kept or span.start >= kept[-1].stop:
            kept.append(span)
    return kept


def parameter_pieces(graph: Graph, blocks: Sequence[Span]) -> tuple[list[int], list[int]]:
    """Return the pieces that hold parameters, as start positions and bytes, in order.

    A piece is a child of a repeated block (norm, attention, MLP), or any other operation with
    parameters. A parameter counts where it is first used.
    """
    spans = module_spans(graph)
    pieces: dict[int, int] = {}
    sizes = {state.value.name: state.value.num_bytes({}) for state in graph.states if state.kind == "parameter"}
    home = _piece_starts(spans, blocks)
    for position, op in enumerate(graph.ops):
        for name in op.uses():
            size = sizes.pop(name, 0)  # later uses of the same parameter are free
            if size:
                start = home.get(position, position)
                pieces[start] = pieces.get(start, 0) + size
    starts = sorted(pieces)
    return starts, [pieces[start] for start in starts]


def _piece_starts(spans: Mapping[str, Span], blocks: Sequence[Span]) -> dict[int, int]:
    """Map positions inside a block's child module to the child's first position."""
    home: dict[int, int] = {}
    for block in blocks:
        for span in spans.values():
            if span.depth == block.depth + 1 and block.start <= span.start and span.stop <= block.stop:
                home.update(dict.fromkeys(range(span.start, span.stop), span.start))
    return home
