import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.errors import ProgramError, RunError
from penstock.graph.capture import capture
from penstock.graph.cuts import Cuts, divide
from penstock.graph.program import StageProgram, read_program, write_program
from penstock.runtime.eager import Runtime
from tests.models import deit
from tests.runtime.test_onnx import parts


class Chain(nn.Module):
    """A mask from sizes alone, a write in place whose result nobody reads, and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[0], 4).triu()
        x = self.first(x)
        x.add_(1)
        y = x.relu() * mask
        result: Tensor = self.second(y).tanh()
        return result


def program_of(model: nn.Module, *args: Tensor) -> StageProgram:
    return divide(capture(model.eval(), args), [])[0]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Chain().eval()


@pytest.fixture(scope="module")
def program(model: nn.Module) -> StageProgram:
    return program_of(model, torch.randn(3, 4))


class Calls(TorchDispatchMode):
    """Counts operators and, after each of them, which watched tensors are still alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.results: list[weakref.ref[Tensor]] = []
        self.most_alive = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names.append(str(func))
        if isinstance(result, Tensor):
            self.results.append(weakref.ref(result))
        self.most_alive = max(self.most_alive, self.num_alive())
        return result

    def num_alive(self) -> int:
        return len({id(tensor) for reference in self.results if (tensor := reference()) is not None})


def test_eager_outputs_are_those_of_the_model(model: nn.Module, program: StageProgram) -> None:
    runtime = Runtime(program, dict(model.state_dict()))
    for batch in (1, 2, 3, 5):
        x = torch.randn(batch, 4)
        with torch.no_grad():
            assert torch.equal(runtime({"batch": batch}, [x])[0], model(x))


def test_missing_weight_is_named(model: nn.Module, program: StageProgram) -> None:
    state = dict(model.state_dict())
    del state["second.bias"]
    with pytest.raises(ProgramError) as caught:
        Runtime(program, state)
    assert str(caught.value) == (
        "the weights of the stage lack the tensor 'second.bias', which its program reads; make the bundle again"
    )


@pytest.mark.parametrize("wrong", [torch.zeros(4, 5), torch.zeros(4), torch.zeros(4, 4, dtype=torch.float64)])
def test_state_of_another_shape_or_dtype(model: nn.Module, program: StageProgram, wrong: Tensor) -> None:
    with pytest.raises(ProgramError) as caught:
        Runtime(program, dict(model.state_dict()) | {"first.weight": wrong})
    assert str(caught.value) == (
        f"'first.weight' is {wrong.dtype} {tuple(wrong.shape)} but the program wants torch.float32 (4, 4); "
        "use the weights of this model"
    )


def test_an_operation_that_fails_is_named(model: nn.Module, program: StageProgram) -> None:
    runtime = Runtime(program, dict(model.state_dict()))
    with pytest.raises(RunError, match=r"^operation linear failed: [^\n]*$"):
        runtime({"batch": 3}, [torch.randn(3, 5)])


def test_prelude_runs_once_for_each_size(model: nn.Module, program: StageProgram) -> None:
    runtime = Runtime(program, dict(model.state_dict()))
    with torch.inference_mode(), Calls() as calls:
        for batch in (3, 3, 2, 3, 2):
            runtime({"batch": batch}, [torch.randn(batch, 4)])
    assert calls.names.count("aten.triu.default") == 2
    assert calls.names.count("aten.tanh.default") == 5


def test_programs_for_many_sizes_are_not_all_kept(model: nn.Module, program: StageProgram) -> None:
    runtime = Runtime(program, dict(model.state_dict()))
    for batch in range(1, 30):
        runtime({"batch": batch}, [torch.randn(batch, 4)])
    assert len(runtime._bound) == 8
    assert runtime.bind({"batch": 29}) is runtime.bind({"batch": 29})


def test_values_end_with_their_last_use() -> None:
    class Deep(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(40):
                x = torch.sin(x)
                x.add_(1)  # its result is a value of its own that nobody reads
            return x

    program = program_of(Deep(), torch.randn(3, 4))
    runtime = Runtime(program, {})
    with torch.inference_mode(), Calls() as calls:
        (result,) = runtime({"batch": 1000}, [torch.randn(1000, 4)])
    gc.collect()
    assert calls.names.count("aten.sin.default") == 40
    assert calls.most_alive <= 3
    assert calls.num_alive() == 1
    assert result.shape == (1000, 4)


def test_no_tensor_of_a_microbatch_is_kept() -> None:
    model = deit(2)
    graph = capture(model, (torch.randn(2, 3, 32, 32),))
    first = divide(graph, [Cuts(graph).find("blocks.0:after")])[0]
    runtime = Runtime(first, dict(model.state_dict()))
    outputs = runtime({"batch": 2}, [torch.randn(2, 3, 32, 32)])
    references = [weakref.ref(tensor) for tensor in outputs]
    del outputs
    gc.collect()
    assert [reference() for reference in references] == [None]


def test_seconds_of_every_operation(model: nn.Module, program: StageProgram) -> None:
    ticks = iter(range(100))
    runtime = Runtime(program, dict(model.state_dict()))
    _, seconds = runtime.watched({"batch": 3}, [torch.randn(3, 4)], lambda: float(next(ticks)))
    assert seconds == [1.0] * len(program.ops)


def test_keyword_argument_may_be_a_value() -> None:
    class Attend(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    x, mask = torch.randn(3, 2, 5, 4), torch.randn(3, 1, 5, 5)
    program = program_of(Attend(), x, mask)
    assert torch.equal(Runtime(program, {})({"batch": 3}, [x, mask])[0], Attend()(x, mask))


class Recurrent(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.layer, self.last = kind(8, 16, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.layer(x)[0])
        return found


class Attending(nn.Module):
    def __init__(self, _: Any) -> None:
        super().__init__()
        self.layer, self.last = nn.MultiheadAttention(8, 2), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        found: Tensor = self.last(self.layer(x, x.flip(0), x)[0].transpose(0, 1))
        return found


class Product(nn.Module):
    """A product that folds by whether its weight requires gradients."""

    def __init__(self, _: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return (x.transpose(0, 1) @ self.weight).transpose(0, 1) @ self.weight


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize(
    ("make", "kind"),
    [(Recurrent, nn.GRU), (Recurrent, nn.LSTM), (Recurrent, nn.RNN), (Attending, None), (Product, None)],
    ids=lambda item: getattr(item, "__name__", ""),
)
def test_bits_do_not_depend_on_requires_grad(make: Any, kind: Any, requires_grad: bool) -> None:
    torch.manual_seed(0)
    model = make(kind).eval().requires_grad_(requires_grad)
    x = torch.randn(3, 5, 8)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            expected = model(x)
            program = read_program(write_program(program_of(model, x)))
            tensors = {state.value.name: model.state_dict()[state.source] for state in program.states}
            (given,) = Runtime(program, tensors)({"batch": 3}, [x])
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    assert torch.equal(expected, given)


class Keeping(nn.Module):
    """Operations that return what they are given: of a weight, of the input, of what is written to in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weight, rows = self.weight.to(torch.float32), x[:, 0:4].to(torch.float32)
        sums = (rows + weight).view(rows.shape)
        kept = sums.reshape(sums.shape)
        sums.mul_(2.0)
        last = (kept.expand(-1, 4) * weight).float()
        return last, (last - x).to(torch.float64)


def test_operations_without_effect_are_skipped_later() -> None:
    torch.manual_seed(0)
    model = Keeping().eval()
    program, tensors = parts(model, torch.randn(2, 4))
    runtime = Runtime(program, tensors)
    for rows in (2, 2, 2, 3, 3):
        x = torch.randn(4, rows).t() if rows == 3 else torch.randn(rows, 4)
        with torch.no_grad():
            wanted = model(x)
            found = runtime({"batch": rows}, [x])
        assert all(map(torch.equal, found, wanted))
    bound = runtime.bind({"batch": 2})
    assert bound.short is not None
    assert len(bound.short) < len(bound.steps) - 3
