"""Run a stage program with autograd, and its backward pass whole or in two halves.

The halves are one for the inputs immediately and one for the weights later, without repeated work. When the chain from
the outputs to the inputs meets a branch that leads only to weights, the first half keeps the gradient that arrived at
the branch, and the second half continues from it:

    outputs ──▶ add ──▶ linear ──▶ gelu ──▶ linear ──▶ inputs        first half: the chain
                          │ (kept)             │ (kept)
                          ▼                    ▼
                        weights              weights                 second half: the branches

A branch that is entered in several places is computed completely in the first half; if its gradient would then be
counted twice, so are all weights. `TrainingRuntime` makes a separate node for every place, so this only happens for
operators that use a weight several times internally. After Qi et al. 2023, Zero Bubble Pipeline Parallelism.
"""

import contextlib
import dataclasses
import hashlib
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from penstock.graph.cuts import TrainingPart, written_inputs
from penstock.graph.ops import BATCH_NORM, CALLBACK, GETITEM, Op, State, effect, is_random
from penstock.runtime.bound_calls import Bound, BoundCall
from penstock.runtime.eager import Runtime
from penstock.tensors import HOST

# operators draw random numbers from torch's default generator, which the threads of a process share
_DRAWING = threading.Lock()


class TrainingRuntime(Runtime):
    """A stage program whose parameters are autograd leaves, with reproducible dropout.

    The random numbers of an operation depend only on the operation and on `rng_key`, a text of seed, step and
    microbatch; not on its stage or on earlier operations. A runtime that runs microbatches `again`, to recompute their
    activations, writes to no parameter.

    Example:
        runtime = TrainingRuntime(part, leaves)
        runtime.rng_key = "seed 0 step 3 microbatch 2"
        outputs = runtime({"batch": 4}, inputs)
    """

    _shortens = False

    def __init__(
        self, part: TrainingPart, tensors: Mapping[str, Tensor], device: torch.device = HOST, *, again: bool = False
    ) -> None:
        self.rng_key = ""
        self.is_first = True  # whether the microbatch is the first one of its step
        self._again = again
        self.around: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {}  # wraps operations, by name
        self._parted = branches_used_again(part)
        self._written = [value.name in written_inputs(part) for value in part.program.inputs]
        super().__init__(part.program, tensors, device)
        read = {name for op in self.program.prelude for name in op.uses()}
        pairs = zip(self.program.states, self._state, strict=True)
        # buffers that the prelude reads, with their values then: a script may change them between steps
        self._read = [(tensor, tensor.clone()) for s, tensor in pairs if s.kind == "buffer" and s.value.name in read]

    def __call__(self, sizes: Mapping[str, int], inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run on one microbatch; an input that the stage writes to is copied first."""
        copied = [x.clone() if written else x for x, written in zip(inputs, self._written, strict=True)]
        return super().__call__(sizes, copied)

    def bind(self, sizes: Mapping[str, int]) -> Bound:
        """Compute what depends only on sizes and on buffers that the forward does not write, without gradients."""
        if not all(torch.equal(now, was) for now, was in self._read):
            self._bound.clear()
            self._read = [(now, now.clone()) for now, _ in self._read]
        with torch.no_grad():
            return super().bind(sizes)

    def _step(self, op: Op, sizes: Mapping[str, int], ends: tuple[int, ...]) -> BoundCall:
        step = super()._step(op, sizes, ends)
        function = step.function
        if op.no_grad:
            function = _without_gradients(function)
        if written := effect(op).writes:
            changed = {self._indices[name] for name in written}
            places = [position for position, register in step.slots if register in changed]
            function = self._written_once(function, places, of_rows=op.name in self._of_rows)
        if op.target == BATCH_NORM and op.arguments[5] is True:
            function = with_several_values(function)
        if draws(op):
            function = self._seeded(function, op.name)
        if op.name in self.around:
            function = self.around[op.name](function)
        if op.name in self._parted and not op.no_grad:
            registers = {self._indices[name] for name in self._parted[op.name]}
            parted = {position for position, register in step.slots if register in registers}
            function = _apart(function, parted | {position for position, _ in step.lists})
        return step if function is step.function else dataclasses.replace(step, function=function)

    def _written_once(
        self, function: Callable[..., Any], places: Sequence[int], *, of_rows: bool
    ) -> Callable[..., Any]:
        """Write to a parameter once per step, as one forward pass of the whole batch would.

        Values that depend on the rows (`of_rows`) are written for every microbatch, but not when it is recomputed.
        """

        def call(*arguments: Any, **keywords: Any) -> Any:
            if self._again or not (of_rows or self.is_first):
                for place in places:
                    if arguments[place].untyped_storage()._cdata in self._leaves:
                        return arguments[place]
            return function(*arguments, **keywords)

        return call

    @cached_property
    def _leaves(self) -> frozenset[int]:
        """Storage pointers of the parameters."""
        pairs = zip(self.program.states, self._state, strict=True)
        return frozenset(tensor.untyped_storage()._cdata for s, tensor in pairs if s.kind == "parameter")

    @cached_property
    def _of_rows(self) -> set[str]:
        """The operations that depend on the inputs."""
        found = {value.name for value in self.program.inputs}
        for op in self.program.ops:
            if not found.isdisjoint(op.uses()):
                found.add(op.name)
        return found

    def _as_captured(self, _state: State, tensor: Tensor) -> Tensor:
        """Return the tensor itself: leaves require gradients if their parameters are trained."""
        return tensor

    def _seeded(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            with seeded_generator(self.device, seed_of(self.rng_key, name)):
                return function(*arguments, **keywords)

        return call


def seed_of(key: str, name: str) -> int:
    """Return the seed of an operation in a microbatch."""
    digest = hashlib.blake2b(f"{key} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextlib.contextmanager
def seeded_generator(device: torch.device, seed: int) -> Iterator[None]:
    """Seed a device's default generator, and restore its state afterwards."""
    generator = torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
    with _DRAWING:
        before = generator.get_state()
        generator.manual_seed(seed)
        try:
            yield
        finally:
            generator.set_state(before)


def _without_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """Call without gradients; a parameter that is written to keeps its version counter for pending backwards.

    Several microbatches run forward before the first backward, which autograd would otherwise refuse.
    """

    def alias(item: Any) -> Any:
        if isinstance(item, list):
            return [alias(each) for each in item]
        return item.data if isinstance(item, Tensor) and item.is_leaf and item.requires_grad else item

    def call(*arguments: Any, **keywords: Any) -> Any:
        with torch.no_grad():
            return function(*map(alias, arguments), **{key: alias(item) for key, item in keywords.items()})

    return call


def with_several_values(function: Callable[..., Any]) -> Callable[..., Any]:
    """Repeat the check of torch.nn.functional.batch_norm, which capture leaves out: one value has no variance."""

    def call(x: Tensor, *arguments: Any, **keywords: Any) -> Any:
        if x.numel() == x.shape[1]:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.shape}")
        return function(x, *arguments, **keywords)

    return call


def draws(op: Op) -> bool:
    """Return True if an operation may draw random numbers; attention does so only with dropout."""
    if op.target == CALLBACK:
        return True  # it may
    if op.target == GETITEM or not is_random(op):
        return False
    if op.target == "aten.scaled_dot_product_attention.default":
        dropout = op.arguments[4] if len(op.arguments) > 4 else op.keywords.get("dropout_p", 0.0)
        return bool(dropout != 0.0)
    return True


def branches_used_again(part: TrainingPart) -> dict[str, list[str]]:
    """Find values that depend only on weights, and that operations on the chain from the inputs and others read.

    Returns their names for each operation on the chain. Each use gets a separate node in autograd's graph, so that a
    backward in two halves can distinguish them.
    """
    ops = part.program.ops
    uses = Counter(name for op in ops for name in op.uses())
    chain = {part.crossing[position].name for position in part.backward_inputs}
    found: dict[str, list[str]] = {}
    for op in ops:
        names, written = set(op.uses()), effect(op).writes
        if not chain.isdisjoint(names):
            chain.add(op.name)
            chain.update(written)
            again = [name for name in sorted(names - chain) if uses[name] > 1]
            if again and not written:
                found[op.name] = again
    return found


def _apart(function: Callable[..., Any], places: set[int]) -> Callable[..., Any]:
    def part(item: Any) -> Any:
        return item.view_as(item) if isinstance(item, Tensor) and item.requires_grad else item

    def call(*arguments: Any, **keywords: Any) -> Any:
        parted = [
            ([part(x) for x in item] if isinstance(item, list) else part(item)) if place in places else item
            for place, item in enumerate(arguments)
        ]
        return function(*parted, **keywords)

    return call


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
