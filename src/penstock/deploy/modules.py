"""Stages that are the caller's modules: the explicit route for models that torch.export does not accept.

Such a stage has no program to send, only an interface: its inputs and outputs. So every process needs the modules.
Under torchrun every process has them, since all run the same script; otherwise the stages run as threads of this
process.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.deploy.jobs import MakeRuntime
from penstock.deploy.worker import follow
from penstock.errors import CaptureError, PenstockError, RunError, UsageError
from penstock.graph.graph import Graph, Plain
from penstock.graph.ops import Ref
from penstock.graph.program import StageProgram
from penstock.group.entry import thread_worlds
from penstock.group.launcher import WorkerExit
from penstock.group.world import World
from penstock.runtime.registry import StageRuntime
from penstock.tensors import HOST, copy_exactly
from penstock.values import Expression, Size, Value
from penstock.wire import FEEDER


def chain(
    modules: Sequence[nn.Module], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Graph, list[tuple[StageProgram, ...]]]:
    """Infer the interfaces of modules that are called in sequence, from two runs of the example.

    A tuple that a module returns becomes the positional inputs of the next module. A dimension that grows with the
    batch between the two runs is assumed to always grow with it.

    Example:
        graph, programs = chain([encoder, head], (torch.randn(2, 8),), {})

    Raises `UsageError` for an empty list, an example without a batch, or a module whose output contains anything but
    tensors, or before the last module is not a tensor or a tuple of tensors.
    """
    if not modules:
        raise UsageError("a list of stage modules needs at least one module")
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    rows = next((len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), 0)
    if not rows:
        raise UsageError("the example needs a tensor with at least one row; its first dimension is the batch")
    wider = [
        torch.cat([leaf, leaf[:1]]) if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == rows else leaf
        for leaf in leaves
    ]
    inputs = [
        _value(f"input{index}", leaf, more, rows) if isinstance(leaf, Tensor) else None
        for index, (leaf, more) in enumerate(zip(leaves, wider, strict=True))
    ]
    plain = {index: Plain(f"input{index}", leaf) for index, leaf in enumerate(leaves) if inputs[index] is None}
    runs = [_run_all(modules, *pytree.tree_unflatten(given, spec)) for given in (leaves, wider)]
    values = [
        [_value(f"stage{stage}.{index}", a, b, rows) for index, (a, b) in enumerate(zip(*pair, strict=True))]
        for stage, pair in enumerate(zip(runs[0][0], runs[1][0], strict=True))
    ]
    crossing = [[value for value in inputs if value is not None], *values]
    programs: list[tuple[StageProgram, ...]] = [
        (StageProgram(symbols=("batch",), states=(), inputs=tuple(a), prelude=(), ops=(), outputs=tuple(b)),)
        for a, b in pairwise(crossing)
    ]
    graph = Graph(
        model=f"the list of {len(modules)} modules", symbols=("batch",), inputs=tuple(inputs), plain_inputs=plain,
        input_spec=spec, states=(), prelude=(), ops=(), visits=(),
        values={value.name: value for group in crossing for value in group},
        outputs=tuple(Ref(value.name) for value in values[-1]), output_spec=runs[0][1],
        fixed_batch=None, constants={}, forbidden={},
    )  # fmt: skip
    return graph, programs


class ModuleRuntime:
    """A module run as a stage, on the module's device; called like `Runtime`.

    Raises `RunError` when the module fails or returns tensors that do not fit its interface.
    """

    def __init__(self, module: nn.Module, program: StageProgram, plain: Mapping[int, Any], spec: Any | None) -> None:
        self.program = program
        lies = [tensor.device for tensor in [*module.parameters(), *module.buffers()]]
        self.device = lies[0] if lies else HOST
        self._module = module
        self._plain = plain
        self._spec = spec

    def __call__(self, sizes: Mapping[str, int], inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run on one microbatch."""
        try:
            output = self._call(list(inputs))
        # for any exception of the caller's module, add the module's name
        except Exception as error:
            raise RunError(f"the module {type(self._module).__name__} failed: {error}") from error
        tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        shapes = [(tuple(t.shape), t.dtype) for t in tensors]
        expected = [(value.evaluate(sizes), value.dtype) for value in self.program.outputs]
        if shapes != expected:
            raise RunError(
                f"the module {type(self._module).__name__} returned {shapes}; expected {expected} as in the example; "
                "a stage's outputs may change with the batch size only"
            )
        return tensors

    def watched(
        self, sizes: Mapping[str, int], inputs: Sequence[Tensor], _clock: Callable[[], float]
    ) -> tuple[list[Tensor], list[float]]:
        """Run on one microbatch; its operations cannot be timed separately."""
        return self(sizes, inputs), []

    def own(self, outputs: Sequence[Tensor], _sizes: Mapping[str, int]) -> list[Tensor]:
        """Return copies, because a module may return tensors that it retains."""
        return [copy_exactly(output) for output in outputs]

    def copied(self) -> None:
        """Return None: a module of the caller may not be copied."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the module's parameters and buffers."""
        return sum(tensor.nbytes for tensor in [*self._module.parameters(), *self._module.buffers()])

    def _call(self, inputs: list[Tensor]) -> Any:
        if self._spec is None:
            return self._module(*inputs)
        leaves = [self._plain[i] if i in self._plain else inputs.pop(0) for i in range(self._spec.num_leaves)]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return self._module(*args, **kwargs)


def runtime_maker(modules: Sequence[nn.Module], graph: Graph | None) -> MakeRuntime:
    """Return a factory of stage runtimes for a process that has the modules.

    The first stage is called with the signature of the `graph`'s example.
    """

    def make(index: int, program: StageProgram) -> StageRuntime:
        if index >= len(modules):
            raise UsageError(
                f"this process has {len(modules)} stage modules; got a request for stage {index}; "
                "give every process the same list"
            )
        if index or graph is None:
            return ModuleRuntime(modules[index], program, {}, None)
        plain = {position: item.value for position, item in graph.plain_inputs.items()}
        return ModuleRuntime(modules[0], program, plain, graph.input_spec)

    return make


def _run_all(modules: Sequence[nn.Module], args: Any, kwargs: Any) -> tuple[list[list[Tensor]], Any]:
    """Run the modules in sequence; return every stage's tensors and the structure of the last output."""
    stages: list[list[Tensor]] = []
    with torch.no_grad():
        for index, module in enumerate(modules):
            try:
                output = module(*args, **kwargs)
            # for any exception of the caller's module, add the module's name
            except Exception as error:
                raise UsageError(f"stage {index} ({type(module).__name__}) fails on the example: {error}") from error
            args, kwargs = output if isinstance(output, tuple) else (output,), {}
            leaves = pytree.tree_leaves(output)
            last = index == len(modules) - 1
            if not all(isinstance(leaf, Tensor) for leaf in (leaves if last else args)):
                wanted = "only tensors" if last else "a tensor or a tuple of tensors, all that can pass between stages"
                raise UsageError(f"stage {index} ({type(module).__name__}) must return {wanted}")
            stages.append(leaves)
    return stages, pytree.tree_structure(output)


def _value(name: str, tensor: Tensor, wider: Tensor, rows: int) -> Value:
    """Describe a tensor by its shapes at two batch sizes that differ by one."""
    shape: list[int | Size] = []
    for length, longer in zip(tensor.shape, wider.shape, strict=True):
        growth = longer - length
        if not growth:
            shape.append(length)
            continue
        expression: Expression = "batch" if growth == 1 else ("*", growth, "batch")
        rest = length - growth * rows
        shape.append(Size(expression if not rest else ("+", rest, expression)))
    return Value(name=name, dtype=tensor.dtype, shape=tuple(shape))


class ThreadWorkers:
    """Workers that are threads of this process; stopped like `LocalWorkers`."""

    def __init__(self, worlds: Sequence[World], make: MakeRuntime) -> None:
        self._worlds = worlds
        self._threads = [
            threading.Thread(target=self._work, args=(world, make), name=f"penstock-stage-{world.rank}", daemon=True)
            for world in worlds
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pids(self) -> list[int]:
        """Empty: threads have no process ids."""
        return []

    def exits(self) -> list[WorkerExit]:
        """Return an empty list: a thread that fails reports its error itself."""
        return []

    def stop(self, grace_s: float) -> None:
        """Wait for the threads; abort those still waiting for a message."""
        for thread in self._threads:
            thread.join(grace_s)
        for world in self._worlds:
            world.transport.abort()
            world.close()
        for thread in self._threads:
            thread.join(grace_s)

    def _work(self, world: World, make: MakeRuntime) -> None:
        with contextlib.suppress(PenstockError):  # already reported to the driver's thread
            follow(world, make=make)


def start_threads(num_stages: int, make: MakeRuntime) -> World:
    """Start a world whose devices are threads of this process, one for each stage."""
    worlds = thread_worlds(["the driver", *(f"thread {rank}" for rank in range(1, num_stages + 1))])
    worlds[FEEDER].workers = ThreadWorkers(worlds[1:], make)
    worlds[FEEDER].followed = True
    return worlds[FEEDER]


@contextlib.contextmanager
def advising(model: nn.Module) -> Iterator[None]:
    """Add advice to a `CaptureError`: how to stream an `nn.Sequential` that does not export."""
    try:
        yield
    except CaptureError as error:
        if not isinstance(model, nn.Sequential):
            raise
        raise CaptureError(f"{error}; pass list(model) to run its modules as they are, one per stage") from error
