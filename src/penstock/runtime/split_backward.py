"""A backward pass in two halves: for the inputs immediately, for the weights later, without repeated work.

When the chain from the outputs to the inputs meets a branch that leads only to weights, the first half keeps the
gradient that arrived at the branch, and the second half continues from it:

    outputs ──▶ add ──▶ linear ──▶ gelu ──▶ linear ──▶ inputs        first half: the chain
                          │ (kept)             │ (kept)
                          ▼                    ▼
                        weights              weights                 second half: the branches

A branch that is entered in several places is computed completely in the first half; if its gradient would then be
counted twice, so are all weights. `TrainingRuntime` makes a separate node for every place, so this only happens for
operators that use a weight several times internally. After Qi et al. 2023, Zero Bubble Pipeline Parallelism.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

_Key = tuple[Node, int]


@dataclass
class _Branching:
    """One operation of the chain with its branches: the gradients that reach it, and the branches' first edges."""

    arrivals: list[_Key] = field(default_factory=list)
    branches: list[_Key] = field(default_factory=list)


@dataclass
class WeightHalf:
    """The remaining work for the weights."""

    starts: list[tuple[list[GradientEdge], list[Tensor], list[GradientEdge]]]
    edges: list[GradientEdge]
    gradients: list[Tensor]


def backward_inputs(
    roots: Sequence[Tensor], gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> tuple[list[Tensor | None], WeightHalf]:
    """Compute the gradients of the inputs (None for an input without gradient), and the input of `backward_weights`.

    Example:
        (grad,), rest = backward_inputs([output], [grad_output], [input])
        for weight, grad in zip(weights, backward_weights(rest, weights)): ...
    """
    edges = [_key(get_gradient_edge(root)) for root in roots]
    starts = [torch.ones_like(root) if g is None else g for root, g in zip(roots, gradients, strict=True)]
    chain, parents = _explore(edges, {id(tensor) for tensor in inputs})
    arrived = _arrivals(edges, chain, parents)
    late, early, ready = _sort(edges, chain, parents, arrived)
    wanted = [key for branching in late for key in branching.arrivals] + early
    captured: dict[_Key, Tensor | None] = {}
    found: list[Tensor | None] = [None] * len(inputs)
    into_chain = [(e, g) for e, g in zip(edges, starts, strict=True) if e not in ready]
    if into_chain and (wanted or inputs):
        targets: list[Any] = [*inputs, *map(_edge, wanted)]
        results = torch.autograd.grad(
            [_edge(e) for e, _ in into_chain], targets, [g for _, g in into_chain], retain_graph=True, allow_unused=True
        )
        found = list(results[: len(inputs)])
        captured = dict(zip(wanted, results[len(inputs) :], strict=True))
    half = WeightHalf([], [], [])
    for edge, gradient in zip(edges, starts, strict=True):
        if edge in ready:
            half.edges.append(_edge(edge))
            half.gradients.append(gradient)
    for key in early:
        _keep(half, key, captured.get(key))
    for branching in late:
        pairs = [(_edge(key), g) for key in branching.arrivals if (g := captured.get(key)) is not None]
        if pairs:
            half.starts.append(([e for e, _ in pairs], [g for _, g in pairs], list(map(_edge, branching.branches))))
    return found, half


def backward_weights(half: WeightHalf, weights: Sequence[Tensor]) -> list[Tensor | None]:
    """Compute the gradients of the weights (None for a weight without gradient); may be called once."""
    edges, gradients = list(half.edges), list(half.gradients)
    for arrivals, given, branches in half.starts:
        results = torch.autograd.grad(arrivals, branches, given, retain_graph=True, allow_unused=True)
        for edge, gradient in zip(branches, results, strict=True):
            if gradient is not None:
                edges.append(edge)
                gradients.append(gradient)
    if not edges or not weights:
        return [None] * len(weights)
    return list(torch.autograd.grad(edges, weights, gradients, allow_unused=True))


def _keep(half: WeightHalf, key: _Key, gradient: Tensor | None) -> None:
    if gradient is not None:
        half.edges.append(_edge(key))
        half.gradients.append(gradient)


def _explore(edges: Iterable[_Key], inputs: set[int]) -> tuple[set[Node], dict[_Key, list[Node]]]:
    """Find the nodes that lead to an input, and for each edge of the graph the nodes from which it starts."""
    leads: dict[Node, bool] = {}
    parents: dict[_Key, list[Node]] = defaultdict(list)
    stack = [(node, False) for node, _ in edges]
    while stack:
        node, explored = stack.pop()
        following = [(child, index) for child, index in node.next_functions if child is not None]
        if explored:
            variable = getattr(node, "variable", None)
            leads[node] = id(variable) in inputs or any(leads.get(child, False) for child, _ in following)
        elif node not in leads:
            leads[node] = False
            for child, index in following:
                parents[child, index].append(node)
            stack.append((node, True))
            stack += [(child, False) for child, _ in following if child not in leads]
    return {node for node, leading in leads.items() if leading}, parents


def _arrivals(edges: Sequence[_Key], chain: set[Node], parents: dict[_Key, list[Node]]) -> dict[Node, list[_Key]]:
    """Return for each node of the chain the edges on which gradients arrive."""
    arrived: dict[Node, list[_Key]] = defaultdict(list)
    for key in dict.fromkeys([*edges, *parents]):
        if key[0] in chain:
            arrived[key[0]].append(key)
    return arrived


def _sort(
    edges: Sequence[_Key], chain: set[Node], parents: dict[_Key, list[Node]], arrived: dict[Node, list[_Key]]
) -> tuple[list[_Branching], list[_Key], set[_Key]]:
    """Sort the branches into branches that can wait, branches entered by several operations, and roots."""
    into: dict[Node, int] = defaultdict(int)
    for key, leaving in parents.items():
        into[key[0]] += len(leaving)
    for node, _ in edges:
        into[node] += 1
    late: dict[Node, _Branching] = {}
    early: list[_Key] = []
    for key, leaving in parents.items():
        origins = [node for node in leaving if node in chain]
        if key[0] in chain or not origins:
            continue
        if into[key[0]] > 1:
            early.append(key)
        else:
            branching = late.setdefault(origins[0], _Branching(arrivals=arrived[origins[0]]))
            branching.branches.append(key)
    if any(node not in chain for key in early for node in parents[key]):
        # a branch that leads into the sum of another branch: nothing can wait, all weights are computed in the first
        # half
        return [], [key for key in parents if key[0] not in chain and hasattr(key[0], "variable")], set()
    ready = {key for key in edges if key[0] not in chain and key not in early}
    return list(late.values()), early, ready


def _key(edge: GradientEdge) -> _Key:
    return edge.node, edge.output_nr


def _edge(key: _Key) -> GradientEdge:
    return GradientEdge(key[0], key[1])
