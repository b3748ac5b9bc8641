"""Steps of decoders as graphs, on the pretended device with a recorder that checks what a CUDA graph may contain."""

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.generate.generator import Generator
from penstock.graph.ops import Op, Ref, State
from penstock.graph.program import StageProgram
from penstock.group.entry import thread_worlds
from penstock.runtime import graphs
from penstock.runtime.eager import Runtime
from penstock.runtime.graphs import GraphRuntime, why_not
from penstock.runtime.registry import EAGER
from penstock.values import Value
from tests.generate.decoders import decoder, expected, prompts
from tests.pretend import Pretended, module

pytestmark = pytest.mark.usefixtures("one_thread")


class RecordedGraph(TorchDispatchMode):
    """Records operators, and runs them again on the same memory: whatever reads the host or moves is an error.

    What was not made during the recording is held weakly, as by a CUDA graph, which holds only addresses.
    """

    num_replays = 0
    made: ClassVar[list["RecordedGraph"]] = []

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.own: dict[int, Tensor] = {}
        self.addresses: dict[int, int] = {}
        RecordedGraph.made.append(self)

    def pool(self) -> tuple[int, int]:
        return 0, 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tags = set(func.tags)
        masks = any(isinstance(x, Tensor) and x.dtype == torch.bool for x in pytree.tree_leaves(args[1:2]))
        if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & tags and (
            masks or func is not torch.ops.aten.index.Tensor
        ):
            raise RuntimeError(f"{func} reads the host during a capture")
        if torch.Tag.nondeterministic_seeded in tags and "attention" not in str(func):
            raise RuntimeError(f"{func} draws during a capture")
        given = pytree.tree_map(self._kept, (args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and not isinstance(leaf, Pretended):
                raise RuntimeError(f"{func} copies to the host during a capture")
            if isinstance(leaf, Tensor):
                self.own[id(leaf)] = leaf
        self.calls.append((func, *given, result))
        return result

    def replay(self) -> None:
        RecordedGraph.num_replays += 1
        for func, args, kwargs, before in self.calls:
            args, kwargs = pytree.tree_map(self._read, (args, kwargs))
            for old, new in zip(pytree.tree_leaves(before), pytree.tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Pretended) and old.held.data_ptr() != new.held.data_ptr():
                    old.held.copy_(new.held)

    def _kept(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or id(leaf) in self.own:
            return leaf
        assert isinstance(leaf, Pretended) or not leaf.dim(), "a tensor of the host is used during a capture"
        self.addresses[id(leaf)] = leaf.held.data_ptr() if isinstance(leaf, Pretended) else 0
        return weakref.ref(leaf)

    def _read(self, leaf: Any) -> Any:
        if not isinstance(leaf, weakref.ref):
            return leaf
        tensor = leaf()
        assert tensor is not None, "memory that a graph reads was freed"
        assert not isinstance(tensor, Pretended) or self.addresses[id(tensor)] == tensor.held.data_ptr()
        return tensor


@contextlib.contextmanager
def capture(graph: RecordedGraph, *, pool: Any, capture_error_mode: str) -> Iterator[None]:
    assert capture_error_mode == "thread_local"
    assert pool in {None, (0, 1)}
    with graph:
        yield


@pytest.fixture
def graphed(pretended_gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The pretended device, with graphs."""
    monkeypatch.setattr(module, "CUDAGraph", RecordedGraph, raising=False)
    monkeypatch.setattr(module, "graph", capture, raising=False)
    RecordedGraph.made, RecordedGraph.num_replays = [], 0
    return pretended_gpu


@pytest.mark.long
@pytest.mark.parametrize(("name", "stages"), [("llama", 1), ("llama", 2), ("gpt2", 2), ("t5", 1)])
def test_tokens_of_replayed_steps(
    name: str, stages: int, graphed: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    model, given = decoder(name), prompts(5, 11)
    wanted = [expected(model, prompt, max_new_tokens=4, do_sample=False) for prompt in given]
    (world,) = thread_worlds(["this process"])
    with Generator(model, stages=stages, slots=2, max_length=128, device=graphed, world=world) as generator:
        for _ in range(2):
            requests = [generator.submit(prompt, max_new_tokens=4) for prompt in given]
            assert [request.result() for request in requests] == wanted
    world.close(0.0)
    assert RecordedGraph.num_replays > 2 * len(RecordedGraph.made) > 0
    assert "without CUDA graphs" not in capsys.readouterr().err


@pytest.mark.long
def test_states_that_are_replaced_stay_eager(graphed: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    model, given = decoder("mamba"), prompts(5)
    (world,) = thread_worlds(["this process"])
    with Generator(model, stages=1, slots=2, max_length=128, device=graphed, world=world) as generator:
        tokens = generator.submit(given[0], max_new_tokens=10).result()
    world.close(0.0)
    assert tokens == expected(model, given[0], max_new_tokens=10, do_sample=False)
    assert not RecordedGraph.made
    assert capsys.readouterr().err.count("replaces a state of each sequence") == 1


def value(name: str, *shape: int) -> Value:
    return Value(name, torch.float32, shape)


def program(*ops: Op) -> StageProgram:
    """A cache that rows are written to at positions, and other operations after that."""
    keys = State(value=value("keys", 2, 4), source="keys", kind="cache")
    index = [Value(name, torch.int64, (1,)) for name in ("rows", "positions")]
    put = Op("put", "aten.index_put_.default", (Ref("keys"), [Ref("rows"), Ref("positions")], Ref("x")), {})
    read = Op("read", "aten.add.Tensor", (Ref("put"), 1.0), {})
    return StageProgram(
        symbols=(), states=(keys,), inputs=(value("x", 1), *index), prelude=(), ops=(put, read, *ops),
        outputs=(value("read", 2, 4),),
    )  # fmt: skip


def inputs(device: torch.device, x: float, row: int) -> list[Tensor]:
    return [torch.tensor([x]).to(device), *(torch.tensor([number]).to(device) for number in (row, 3))]


def test_a_program_is_captured_once_and_then_replayed(graphed: torch.device) -> None:
    runtime, eager = EAGER.load(program(), {}, graphed), Runtime(program(), {}, graphed)
    assert isinstance(runtime, GraphRuntime)
    with torch.inference_mode():
        for x, row in ((1.0, 0), (2.0, 1), (3.0, 0)):
            (found,), (wanted,) = runtime({}, inputs(graphed, x, row)), eager({}, inputs(graphed, x, row))
            assert torch.equal(found, wanted)
            found.zero_()  # the caller's own
    assert (len(RecordedGraph.made), RecordedGraph.num_replays) == (1, 3)


def test_wrong_bits_and_errors_fall_back_to_eager_with_a_note(
    graphed: torch.device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def other(graph: RecordedGraph) -> None:
        graph.calls[-1][-1].held.add_(1)

    def fail(*_args: Any, **_named: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    for patch, reason in ((("replay", other), "other bits than eager"), (("__enter__", fail), "is capturing\n")):
        runtime = EAGER.load(program(), {}, graphed)
        with monkeypatch.context() as changed, torch.inference_mode():
            changed.setattr(RecordedGraph, *patch)
            for _ in range(2):
                assert float(runtime({}, inputs(graphed, 1.0, 0))[0].cpu().sum()) == 9.0
        err = capsys.readouterr().err
        assert err.count("note: ") == 1
        assert reason in err


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        (Op("drawn", "aten.rand_like.default", (Ref("read"),), {}), "draws random numbers"),
        (Op("kept", "aten.nonzero.default", (Ref("read"),), {}), "reads values on the host"),
        (Op("state", "aten.add_.Tensor", (Ref("put"), 1.0), {}), "replaces a state"),
    ],
)
def test_operators_that_are_not_captured(op: Op, reason: str) -> None:
    assert why_not(program()) == ""
    assert reason in why_not(program(op))


def test_eager_runtime_without_graphs(graphed: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    without_caches = dataclasses.replace(program(), states=(State(value("keys", 2, 4), "keys", "buffer"),))
    assert type(EAGER.load(without_caches, {"keys": torch.zeros(2, 4)}, graphed)) is Runtime
    monkeypatch.setattr(graphs, "ENABLED", False)
    assert type(EAGER.load(program(), {}, graphed)) is Runtime
    assert type(EAGER.load(program(), {})) is Runtime
