"""The runtime `compiled`: outputs and gradients of eager but for rounding, and what it refuses."""

import dataclasses
import sysconfig
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config

import penstock
from penstock.elastic.elastic_training import ElasticTraining
from penstock.elastic.options import ElasticOptions
from penstock.errors import PlanError, RunError, UsageError
from penstock.graph.capture import capture
from penstock.graph.cuts import divide
from penstock.graph.exporting import EXPORTING
from penstock.graph.ops import State
from penstock.graph.program import StageProgram
from penstock.group.world import World
from penstock.measure.profiler import relative_error
from penstock.runtime.compiled import check_compiler
from penstock.runtime.registry import EAGER, RuntimeChoice, StageRuntime
from penstock.train.captured import Captured
from penstock.values import Value
from tests import trainers
from tests.fewer import FULL, long
from tests.learners import LOSSES, batches, captured, sgd
from tests.models import albert, bert, deit, gpt2, llama, seeded, swin, t5
from tests.processes import PATIENCE
from tests.runtime.test_eager import Chain
from tests.trainers import errors, in_threads, make_trainer, on_each_rank, train

COMPILED = RuntimeChoice("compiled")
CLOSE = 1e-5
CompileAs = Callable[[Callable[..., Any]], StageRuntime]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", autouse=True)
def one_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache that is empty at first; for a few kernels without compiled headers and trials of the processor."""
    quick = {} if FULL else {"cpp_cache_precompile_headers": False, "cpp.vec_isa_ok": False}
    with pytest.MonkeyPatch.context() as patch, config.patch(quick):
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


def load(module: nn.Module, *args: Any, choice: RuntimeChoice = COMPILED, **kwargs: Any) -> StageRuntime:
    program = divide(capture(module.eval(), args, kwargs), [])[0]
    given = dict(module.named_parameters()) | dict(module.named_buffers())
    return choice.load(program, {state.value.name: given[state.source] for state in program.states})


@pytest.mark.parametrize("sizes", [(3, 3), long((3, 2, 3))])
def test_compiled_outputs_are_close_to_eager(sizes: tuple[int, ...]) -> None:
    chain = seeded(Chain)
    runtime, eager = load(chain, torch.randn(3, 4)), load(chain, torch.randn(3, 4), choice=EAGER)
    with torch.inference_mode():
        for rows in sizes:
            x = torch.randn(rows, 4)
            given = x.clone()
            (output,) = runtime({"batch": rows}, [given])
            assert relative_error(eager({"batch": rows}, [x])[0], output) < CLOSE
            assert torch.equal(x, given)
            (copy,) = runtime.own([output], {"batch": rows})
            copy.zero_()
        assert runtime.watched({"batch": 3}, [torch.randn(3, 4)], lambda: 0.0)[1] == []
        # what was compiled is on disk
        before = counters["inductor"]["fxgraph_cache_miss"]
        load(chain, torch.randn(3, 4))({"batch": 3}, [torch.randn(3, 4)])
    assert counters["inductor"]["fxgraph_cache_miss"] == before
    assert counters["inductor"]["fxgraph_cache_hit"] > 0


class Learner(nn.Module):
    """Normalization over rows, dropout in and out of place, drop-path, and a write to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(nn.functional.dropout(self.first(x), 0.3, self.training))
        kept = x.new_empty(x.shape[0], 1).bernoulli_(0.7)
        x = nn.functional.dropout(x.relu() * kept, 0.2, self.training, inplace=True)
        result: Tensor = self.last(x)
        return result


def alike(given: Captured, size: int, steps: Any, loss_fn: Any, **settings: Any) -> None:
    """Train on both runtimes; losses, gradients, weights and buffers are close."""
    wanted, found = (
        train(given, size, steps, sgd, loss_fn, microbatches=2, runtime=runtime, **settings)
        for runtime in (EAGER, COMPILED)
    )
    assert found[0] == pytest.approx(wanted[0], rel=CLOSE)
    assert set(found[1]) == set(wanted[1])
    assert max(errors(wanted[1], found[1]).values()) < CLOSE
    assert max(errors(wanted[2], found[2]).values()) < CLOSE


@pytest.mark.long
@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_with_random_operators(checkpointing: bool) -> None:
    given = Captured(seeded(Learner).train(), (torch.randn(4, 4),))
    steps = [(torch.randn(8, 4), torch.randint(0, 3, (8,))) for _ in range(2)]
    alike(given, 1, steps, nn.functional.cross_entropy, stages=1, checkpointing=checkpointing)


@pytest.mark.long
@pytest.mark.parametrize("name", LOSSES)
def test_training_in_two_stages(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainers, "PATIENCE", 4 * PATIENCE)  # a model compiles for a minute
    alike(captured(name, torch.float32), 2, batches(name, 2, rows=8), LOSSES[name], stages=2)


def ids() -> Tensor:
    return torch.arange(3, 21).reshape(2, 9)


CALLS: dict[str, Any] = {
    "deit": lambda: (deit(2), torch.randn(2, 3, 32, 32)), "swin": lambda: (swin(), torch.randn(2, 3, 32, 32)),
    "gpt2": lambda: (gpt2(), ids()), "bert": lambda: (bert(), ids()), "albert": lambda: (albert(), ids()),
    "llama": lambda: (llama(), ids()), "t5": lambda: (t5(), {"input_ids": ids(), "decoder_input_ids": ids()}),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", CALLS)
def test_a_stream_in_two_stages(name: str) -> None:
    module, inputs = CALLS[name]()
    found = []
    for runtime in ("eager", "compiled"):
        with penstock.Pipeline(module.eval(), inputs, stages=2, runtime=runtime, threads=1) as pipe:
            found.append([next(iter(penstock.trees.tensors(output))) for output in pipe.stream([inputs] * 3)])
    for wanted, output in zip(*found, strict=True):
        assert relative_error(wanted, output) < CLOSE


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1 if self.training else 0.0).mean(1)


class Counts(nn.Module):
    """A parameter that the forward pass writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.mul_(0.5)
        result: Tensor = self.linear(x)
        return result


def test_compiled_runtime_refuses_operators_in_streams() -> None:
    with pytest.raises(PlanError, match=r"aten\.rand_like\.default"):
        load(Noise(), torch.randn(2, 4))


@pytest.mark.parametrize(
    ("module", "name"), [(Attends(), "scaled_dot_product_attention"), (Counts(), "writes to a parameter")]
)
def test_compiled_runtime_refuses_models_for_training(module: nn.Module, name: str) -> None:
    pipe = penstock.Pipeline(module.train(), torch.randn(2, 3, 4), stages=1, runtime="compiled")
    with pytest.raises(PlanError, match=name), pipe:
        pipe.optimizer(sgd)


def test_compiled_runtime_refuses_options() -> None:
    given = Captured(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).train(), (torch.randn(2, 4),))

    def script(world: World, **settings: Any) -> None:
        trainer = make_trainer(given, world, runtime=COMPILED, **settings)
        try:
            ElasticTraining(trainer, None, ElasticOptions())  # type: ignore[arg-type]
        finally:
            trainer.close(wait=False)

    with pytest.raises(UsageError, match="use the schedule 1f1b, or eager"):
        in_threads(2, lambda world: script(world, stages=2, schedule="zero-bubble"))
    with pytest.raises(UsageError, match="elastic training needs the runtime eager; got compiled"):
        in_threads(1, lambda world: script(world, stages=1))
    with pytest.raises(UsageError, match="on_loss needs the runtime eager; got compiled"):
        penstock.Pipeline(nn.Linear(4, 4).train(), torch.randn(2, 4), on_loss="continue", runtime="compiled")


def test_a_decoder_with_caches() -> None:
    program = load(nn.Linear(4, 4), torch.randn(2, 4), choice=EAGER).program
    keys = State(value=Value("keys", torch.float32, (1, 4)), source="keys", kind="cache")
    with pytest.raises(PlanError, match="decoder's caches"):
        COMPILED.load(dataclasses.replace(program, states=(*program.states, keys)), {})


def test_a_machine_without_compiler_or_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    check_compiler()
    with config.patch({"cpp.cxx": (None, "no-such-compiler")}), pytest.raises(PlanError, match=r"package g\+\+"):
        COMPILED.check_machine()
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: "/nowhere")
    with pytest.raises(PlanError, match="package python3-dev"):
        load(nn.Linear(4, 4), torch.randn(2, 4))


@pytest.fixture
def compile_as(monkeypatch: pytest.MonkeyPatch) -> CompileAs:
    """Load a linear layer, and let it be compiled to a function of the module and its inputs."""

    def load_compiled(call: Callable[..., Any]) -> StageRuntime:
        runtime = load(nn.Linear(4, 4), torch.randn(2, 4))
        monkeypatch.setattr(torch, "compile", lambda module, **_named: partial(call, module))
        return runtime

    return load_compiled


def test_errors_of_the_compiler_are_one_line(compile_as: CompileAs) -> None:
    def fail(*_given: Any) -> Any:
        raise RuntimeError("no such lowering\nand more")

    runtime = compile_as(fail)
    with pytest.raises(RunError, match=r"no such lowering; use the runtime eager$"), torch.inference_mode():
        runtime({"batch": 2}, [torch.randn(2, 4)])


def test_outputs_that_differ_from_eager_are_refused(compile_as: CompileAs) -> None:
    runtime = compile_as(lambda module, *given: [x * 2 for x in module(*given)])
    with pytest.raises(RunError, match="differs from eager"), torch.inference_mode():
        runtime({"batch": 2}, [torch.randn(2, 4)])


def test_nothing_is_exported_during_a_compilation(compile_as: CompileAs) -> None:
    free: list[bool] = []

    def is_free(_rank: int) -> bool:
        found = EXPORTING.acquire(blocking=False)
        if found:
            EXPORTING.release()
        return found

    def compiled(module: Any, *given: Any) -> Any:
        free.extend(on_each_rank(1, is_free))
        return module(*given)

    runtime = compile_as(compiled)
    with torch.inference_mode():
        for _ in range(2):
            runtime({"batch": 2}, [torch.randn(2, 4)])
    assert free == [False, True]


def test_programs_are_those_of_eager() -> None:
    program: StageProgram = load(nn.Linear(4, 4), torch.randn(2, 4)).program
    assert [op.target for op in program.ops] == ["aten.linear.default"]
