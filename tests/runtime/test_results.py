"""What operations make is bounded before it is made."""

import copy
import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from penstock.errors import OutOfMemory, PenstockError, ProgramError
from penstock.graph.capture import capture
from penstock.graph.ops import resolve_operator
from penstock.graph.program import read_program
from penstock.graph.stages import divide
from penstock.runtime import results
from penstock.runtime.eager import Runtime
from penstock.runtime.results import check_result
from tests.graph.test_program import SMALL
from tests.models import UNet, deit, gpt2, seeded

LIMIT = 2**26
X, BIG = {"value": "x"}, {"value": "head.weight"}
STATE = torch.ones(2048, 8)


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a board with 64 MiB left."""
    monkeypatch.setattr("penstock.runtime.results.allowed_bytes", lambda: LIMIT)


def run(*ops: list[Any]) -> None:
    document = copy.deepcopy(SMALL)
    document["states"][0]["shape"] = list(STATE.shape)
    document["prelude"] = []
    document["ops"] = list(ops)
    document["outputs"] = [{"name": "out", "dtype": "float32", "shape": []}]
    runtime = Runtime(read_program(json.dumps(document)), {"head.weight": STATE, "scale": torch.tensor(0.5)})
    runtime({"batch": 2}, [torch.arange(16.0).reshape(2, 8)])


@pytest.mark.parametrize(
    "ops",
    [
        [["out", "aten.zeros.default", [[2**26]], {}]],
        [["out", "aten.full.default", [[2**13, 2**13], 1.0], {}]],
        [["out", "aten.new_zeros.default", [X, [2**13, 2**13]], {}]],
        [["out", "aten.empty.memory_format", [[2**26]], {}]],
        [["out", "aten.randn.default", [[2**26]], {}]],
        [["out", "aten.arange.default", [2**26], {}]],
        [["out", "aten.arange.start_step", [0, 1, 1e-8], {}]],
        [["out", "aten.linspace.default", [0, 1, 2**26], {}]],
        [["out", "aten.eye.m", [2**13, 2**13], {}]],
        [["out", "aten.tril_indices.default", [2**13, 2**13], {}]],
        [["out", "aten.repeat.default", [X, [2**12, 2**12]], {}]],
        [["out", "aten.tile.default", [X, [2**12, 2**12]], {}]],
        [["out", "aten.repeat_interleave.self_int", [X, 2**24], {}]],
        [["out", "aten.constant_pad_nd.default", [X, [2**13, 0, 2**13, 0]], {}]],
        [["out", "aten.pad.default", [X, [2**13, 0, 0, 2**13]], {}]],
        [["view", "aten.expand.default", [{"value": "scale"}, [2**13, 2**13]], {}],
         ["out", "aten.clone.default", [{"value": "view"}], {}]],
        [["view", "aten.expand.default", [{"value": "scale"}, [2**13, 2**13]], {}],
         ["out", "aten.add.Tensor", [{"value": "view"}, 1], {}]],
        [["view", "aten.expand.default", [{"value": "scale"}, [2**13, 2**13]], {}],
         ["out", "aten.reshape.default", [{"value": "view"}, [-1]], {}]],
        [["column", "aten.view.default", [BIG, [-1, 1]], {}], ["row", "aten.view.default", [BIG, [1, -1]], {}],
         ["out", "aten.add.Tensor", [{"value": "column"}, {"value": "row"}], {}]],
        [["column", "aten.view.default", [BIG, [-1, 1]], {}], ["row", "aten.view.default", [BIG, [1, -1]], {}],
         ["out", "aten.matmul.default", [{"value": "column"}, {"value": "row"}], {}]],
        [["column", "aten.view.default", [BIG, [-1, 1]], {}],
         ["out", "aten.linear.default", [{"value": "column"}, {"value": "column"}], {}]],
        [["flat", "aten.view.default", [BIG, [-1]], {}],
         ["out", "aten.outer.default", [{"value": "flat"}, {"value": "flat"}], {}]],
        [["flat", "aten.view.default", [BIG, [-1]], {}],
         ["out", "aten.einsum.default", ["i,j->ij", [{"value": "flat"}, {"value": "flat"}]], {}]],
        [["column", "aten.view.default", [BIG, [-1, 1]], {}],
         ["out", "aten.cdist.default", [{"value": "column"}, {"value": "column"}], {}]],
        [["long", "aten.to.dtype", [X, {"dtype": "int64"}], {}],
         ["out", "aten.one_hot.default", [{"value": "long"}, 2**24], {}]],
        [["long", "aten.to.dtype", [X, {"dtype": "int64"}], {}],
         ["many", "aten.repeat.default", [{"value": "long"}, [2**10, 2**8]], {}],
         ["out", "aten.embedding.default", [BIG, {"value": "many"}], {}]],
        [["image", "aten.view.default", [X, [1, 2, 2, 4]], {}],
         ["out", "aten.upsample_nearest2d.vec", [{"value": "image"}, [2**13, 2**13], None], {}]],
        [["image", "aten.view.default", [X, [1, 2, 2, 4]], {}],
         ["out", "aten.upsample_bilinear2d.vec", [{"value": "image"}, None, False, [4096.0, 4096.0]], {}]],
        [["image", "aten.view.default", [X, [1, 1, 2, 8]], {}], ["w", "aten.ones.default", [[1, 1, 1, 1]], {}],
         ["out", "aten.conv2d.default", [{"value": "image"}, {"value": "w"}, None, [1, 1], [2**12, 2**12]], {}]],
        [["image", "aten.view.default", [X, [1, 1, 2, 8]], {}], ["w", "aten.ones.default", [[1, 1, 1, 1]], {}],
         ["out", "aten.conv_transpose2d.input", [{"value": "image"}, {"value": "w"}, None, [2**13, 2**13]], {}]],
        [["image", "aten.view.default", [X, [1, 2, 2, 4]], {}],
         ["out", "aten.adaptive_avg_pool2d.default", [{"value": "image"}, [2**13, 2**13]], {}]],
        [["out", "aten.cat.default", [[BIG] * 2048], {}]],
    ],
    ids=lambda ops: ops[-1][1],
)  # fmt: skip
def test_what_is_larger_than_the_memory_left_is_not_made(ops: list[list[Any]]) -> None:
    with pytest.raises(OutOfMemory, match=r"\(aten\..* .*B, .* 67") as e:
        run(*ops)
    assert "\n" not in str(e.value)


def test_sizes_that_come_of_values_are_refused() -> None:
    with pytest.raises(ProgramError, match="one_hot without num_classes"):
        run(["long", "aten.to.dtype", [X, {"dtype": "int64"}], {}],
            ["out", "aten.one_hot.default", [{"value": "long"}], {}])  # fmt: skip


@pytest.mark.parametrize("arguments", [[[16], [1], 1], [[2, 8], [8, 2]], [[1], [1], 2**40], [[2**20], [2**40]],
                                       [[4], [-1], 3], [[4], [1], -1]])  # fmt: skip
def test_a_view_stays_within_its_storage(arguments: list[Any]) -> None:
    with pytest.raises(PenstockError):
        run(["out", "aten.as_strided.default", [X, *arguments], {}])


@pytest.mark.parametrize(
    ("target", "arguments"),
    [("select.int", [0, 2]), ("select.int", [0, -3]), ("select.int", [5, 0]), ("narrow.default", [0, 1, 2]),
     ("slice.Tensor", [7]), ("index.Tensor", [[{"value": "far"}]]), ("gather.default", [0, {"value": "far"}]),
     ("index_select.default", [0, {"value": "far"}]), ("take.default", [{"value": "far"}]),
     ("scatter.value", [0, {"value": "far"}, 1.0]), ("index_add.default", [0, {"value": "far"}, X]),
     ("index_put_.default", [[{"value": "far"}], {"value": "scale"}]),
     ("index_fill.int_Scalar", [0, {"value": "far"}, 1.0])],
)  # fmt: skip
def test_an_index_out_of_bounds_is_refused(target: str, arguments: list[Any]) -> None:
    with pytest.raises(PenstockError):
        run(["far", "aten.full.default", [[2, 8], 10**6], {"dtype": {"dtype": "int64"}}],
            ["out", f"aten.{target}", [X, *arguments], {}])  # fmt: skip


@pytest.mark.parametrize(
    ("make", "example"),
    [
        (lambda: deit(1), lambda: torch.randn(2, 3, 32, 32)),
        (gpt2, lambda: torch.randint(0, 80, (2, 6))),
        (lambda: seeded(UNet), lambda: torch.randn(2, 3, 8, 8)),
    ],
)
def test_a_bound_is_never_below_what_is_made(make: Any, example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a model's operation makes is within its rule."""
    model = make()
    program = divide(capture(model, (example(),)), [])[0]
    runtime = Runtime(program, {s.value.name: model.get_parameter(s.source) if s.kind == "parameter"
                                else model.get_buffer(s.source) for s in program.states})  # fmt: skip
    monkeypatch.setattr("penstock.runtime.results._SMALL_BYTES", -1)
    checked: list[str] = []

    def check_tightly(name: str, target: str, arguments: Any, keywords: Any) -> None:
        """Make the result, and see that it is refused where one byte of it is lacking."""
        copies = [item.clone() if isinstance(item, torch.Tensor) else item for item in arguments]
        result = resolve_operator(target)(*copies, **keywords)
        given = {item.untyped_storage().data_ptr() for item in pytree.tree_leaves(copies) if torch.is_tensor(item)}
        fresh = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in pytree.tree_leaves(result)}
        needed = sum(num_bytes for place, num_bytes in fresh.items() if place not in given)
        if needed:
            checked.append(target)
            monkeypatch.setattr("penstock.runtime.results.allowed_bytes", lambda: needed - 1)
            with pytest.raises(OutOfMemory, match=name):
                check_result(name, target, arguments, keywords)

    monkeypatch.setattr("penstock.runtime.eager.check_result", check_tightly)
    with torch.inference_mode():
        runtime({"batch": 2}, [example()])
    assert len(checked) > 10


def test_two_shapes_that_do_not_broadcast_make_no_larger_one() -> None:
    """Of `reshape_as` the second tensor gives a shape, and of a norm the weight a number of tags."""
    wide, tall = torch.ones(2**13, 1, 4), torch.ones(4, 2**13)
    check_result("op", "aten.reshape_as.default", [wide, tall], {})
    image, weight = torch.ones(1, 2**13, 16, 2), torch.ones(2**13)
    check_result("op", "aten.batch_norm.default", [image, weight, weight, weight, weight, False, 0.1, 1e-5, False], {})


SIZES = st.integers(0, 5)


@settings(max_examples=150, deadline=None)
@given(st.lists(SIZES, max_size=3), SIZES, SIZES, SIZES, st.booleans())
def test_products_are_bounded_by_their_shapes(batch: list[int], m: int, k: int, n: int, vector: bool) -> None:
    a, b = torch.ones(*batch, m, k), torch.ones(k, n)
    if vector:
        a = torch.ones(k)
    assert results._matmul(a, b) >= (a @ b).numel()
    assert results._linear(a, b.t()) >= torch.nn.functional.linear(a, b.t()).numel()


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("module", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_a_recurrent_layer_is_given_what_fits(module: Any, bidirectional: bool) -> None:
    """With states of other sizes the operator ends the process."""
    layer = module(4, 6, 2, batch_first=True, bidirectional=bidirectional)
    x, places = torch.rand(2, 3, 4), 4 if bidirectional else 2
    target = {"LSTM": "aten.lstm.input", "GRU": "aten.gru.input", "RNN": "aten.rnn_tanh.input"}[module.__name__]

    def arguments(state: torch.Tensor, weights: list[torch.Tensor]) -> list[Any]:
        states = [state, state] if module is torch.nn.LSTM else state
        return [x, states, weights, True, 2, 0.0, False, bidirectional, True]

    state, weights = torch.zeros(places, 2, 6), [weight.detach() for weight in layer.parameters()]
    check_result("op", target, arguments(state, weights), {})
    resolve_operator(target)(*arguments(state, weights))
    for wrong in (
        arguments(torch.zeros(places + 2, 2, 6), weights), arguments(torch.zeros(places, 3, 6), weights),
        arguments(state, weights[:-1]), arguments(state, [weights[1], *weights[1:]]),
        arguments(state.double(), weights), arguments(state, []),
    ):  # fmt: skip
        with pytest.raises(ProgramError, match="a recurrent layer"):
            check_result("op", target, wrong, {})
