import contextlib
import copy
import json
import re
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import ProgramError, RunError, UsageError
from penstock.graph.capture import capture
from penstock.graph.cuts import Cuts, divide
from penstock.graph.operators import listed_operators
from penstock.graph.program import StageProgram, read_program, write_program
from penstock.runtime.eager import Runtime
from tests.fewer import examples
from tests.models import UNet, deit, gpt2, seeded

SMALL: dict[str, Any] = {
    "format": "penstock-program",
    "version": 1,
    "symbols": ["batch"],
    "states": [
        {"name": "head.weight", "source": "head.weight", "kind": "parameter", "dtype": "float32", "shape": [4, 8]},
        {"name": "scale", "source": "scale", "kind": "buffer", "dtype": "float32", "shape": []},
    ],
    "inputs": [{"name": "x", "dtype": "float32", "shape": ["batch", 8]}],
    "prelude": [["arange", "aten.arange.default", [{"size": ["*", 4, "batch"]}],
                 {"dtype": {"dtype": "float32"}, "device": {"device": "stage"}}]],
    "ops": [
        ["linear", "aten.linear.default", [{"value": "x"}, {"value": "head.weight"}], {}],
        ["view", "aten.view.default", [{"value": "arange"}, [{"size": "batch"}, 4]], {}],
        ["add", "aten.add.Tensor", [{"value": "linear"}, {"value": "view"}], {"alpha": 2}],
        ["mul", "aten.mul.Tensor", [{"value": "add"}, {"value": "scale"}], {}],
        ["split", "aten.split.Tensor", [{"value": "mul"}, 2, -1], {}],
        ["getitem", "operator.getitem", [{"value": "split"}, 0], {}],
    ],
    "outputs": [{"name": "getitem", "dtype": "float32", "shape": ["batch", 2]}],
}  # fmt: skip


def refused(document: object) -> str:
    with pytest.raises(ProgramError) as caught:
        read_program(json.dumps(document))
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400
    return message


def changed(*path: Any, to: Any) -> dict[str, Any]:
    document = copy.deepcopy(SMALL)
    place: Any = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    return document


def programs() -> list[StageProgram]:
    found: list[StageProgram] = []
    for model, inputs in (
        (deit(1), torch.randn(2, 3, 32, 32)),
        (gpt2(), torch.randint(0, 80, (2, 6))),
        (seeded(UNet), torch.randn(2, 3, 8, 8)),
    ):
        graph = capture(model, (inputs,))
        cuts = Cuts(graph)
        found += divide(graph, [cuts[len(cuts) // 3], cuts[len(cuts) // 2]])
    return found


def test_a_small_program_runs() -> None:
    program = read_program(json.dumps(SMALL))
    weight, x = torch.randn(4, 8), torch.randn(3, 8)
    runtime = Runtime(program, {"head.weight": weight, "scale": torch.tensor(0.5)})
    (result,) = runtime({"batch": 3}, [x])
    assert torch.equal(result, ((x @ weight.T + 2 * torch.arange(12.0).view(3, 4)) * 0.5)[:, :2])


def test_written_and_read_again() -> None:
    for program in programs():
        text = write_program(program)
        assert read_program(text) == program
        assert write_program(read_program(text.encode())) == text


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_json_does_not_have_are_refused(number: str) -> None:
    text = json.dumps(changed("ops", 2, 3, to={"alpha": 0})).replace('"alpha": 0', f'"alpha": {number}')
    with pytest.raises(ProgramError, match=f"{number} is not JSON"):
        read_program(text)


def test_special_numbers_travel() -> None:
    inf = changed("ops", 2, 3, to={"alpha": {"float": "-inf"}})
    program = read_program(json.dumps(inf))
    assert program.ops[2].keywords == {"alpha": float("-inf")}
    assert json.loads(write_program(program)) == inf


@pytest.mark.parametrize(
    "target",
    [
        "aten.from_file.default", "os.system", "aten.set_.source_Storage", "operator.attrgetter", "prim.device.default",
        "aten.linear", "aten.linear.default.__call__", "aten.__class__", "aten..default", "builtins.eval.default",
        "aten.pin_memory.default", "aten.linear.default\n", "", None, 7, ["aten.linear.default"],
        # outside of its bounds, or without checks
        "aten._reshape_alias.default", "aten._unsafe_view.default", "aten.unsafe_split.Tensor",
        "aten._nested_view_from_buffer.default", "aten._unsafe_index.Tensor", "aten.segment_reduce.default",
        "aten._unsafe_masked_index.default", "aten._embedding_bag.default", "aten._cudnn_rnn.default",
        # of TorchScript alone
        "aten.save.default", "aten.warn.default", "aten.append.t", "aten.format.default",
        # storages, memory as it was left, sizes that depend on values, results written into an argument
        "aten.set_.source_Tensor", "aten.set_data.default", "aten.resize_.default", "aten.resize.default",
        "aten.as_strided_.default", "aten.empty_strided.default", "aten.nonzero.default", "aten.masked_select.default",
        "aten.repeat_interleave.Tensor", "aten.add.out",
        "aten.random_.from", "aten.lstm.data", "aten.mvlgamma.default", "aten.linear.overloads", "aten.linear.__init__",
    ],
)  # fmt: skip
def test_operators_that_are_not_on_the_list(target: object) -> None:
    assert "is not allowed in a stage program" in refused(changed("ops", 0, 1, to=target))


def test_an_operator_can_be_allowed_on_this_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    document = changed("ops", 0, to=["linear", "aten.nonzero.default", [{"value": "x"}], {}])
    assert refused(document) == (
        "the operator 'aten.nonzero.default' is not allowed in a stage program; if you trust it and the program's "
        "origin, start the process that runs it with PENSTOCK_ALLOW_OPERATORS=aten.nonzero.default"
    )
    monkeypatch.setenv("PENSTOCK_ALLOW_OPERATORS", "aten.bincount.default, aten.nonzero.default,")
    assert read_program(json.dumps(document)).ops[0].target == "aten.nonzero.default"
    refused(changed("ops", 0, 1, to=""))
    monkeypatch.setenv("PENSTOCK_ALLOW_OPERATORS", "aten.nonzero")
    with pytest.raises(UsageError, match=r"aten.nonzero.default; got 'aten.nonzero'"):
        read_program(json.dumps(document))


def test_the_list_is_of_operators_that_the_dispatcher_has() -> None:
    """Of those, the ones that this version of torch has; a test of captures is in benchmarks/coverage."""
    known = set(torch._C._dispatch_get_all_op_names())
    names = {name.removeprefix("aten.").replace(".default", "") for name in listed_operators()}
    assert len({f"aten::{name}" for name in names} & known) > 0.95 * len(names)
    assert not {name for name in names if "unsafe" in name or "backward" in name or re.search(r"[._]out$", name)}
    assert not {name for name in names if name.startswith("_")} - {
        "_upsample_nearest_exact1d", "_upsample_nearest_exact1d.vec", "_upsample_nearest_exact2d", "_weight_norm",
        "_upsample_nearest_exact2d.vec", "_upsample_nearest_exact3d", "_upsample_nearest_exact3d.vec",
        *(f"__{name}__.{kind}" for name in ("and", "or", "xor", "iand", "ior", "ixor")
          for kind in ("Tensor", "Scalar")),
    }  # fmt: skip


@pytest.mark.parametrize("op", [
    ["zeros", "aten.empty.memory_format", [[64, 1024]], {"dtype": {"dtype": "float32"}}],
    ["zeros", "aten.empty.memory_format", [[2, 4, 4, 8]], {"memory_format": {"memory_format": "channels_last"}}],
    ["zeros", "aten.new_empty.default", [{"value": "scale"}, [64, 1024]], {}],
    ["zeros", "aten.empty_like.default", [{"value": "scale"}], {"dtype": {"dtype": "int64"}}],
])  # fmt: skip
def test_a_program_reads_no_memory_as_it_was_left(op: list[Any]) -> None:
    document = changed("outputs", 0, to={"name": "zeros", "dtype": "float32", "shape": []})
    document["ops"] = [op]
    torch.full((64, 1024), 7.0)  # freed, and given out again
    runtime = Runtime(
        read_program(json.dumps(document)), {"head.weight": torch.randn(4, 8), "scale": torch.tensor(0.5)}
    )
    (result,) = runtime({"batch": 3}, [torch.randn(3, 8)])
    assert not result.any()


def test_an_operator_that_this_torch_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_ALLOW_OPERATORS", "aten.no_such_thing.default")
    message = refused(changed("ops", 0, 1, to="aten.no_such_thing.default"))
    assert message == (
        "operator 'aten.no_such_thing.default' not found in this PyTorch; capture and run with the same version"
    )


@pytest.mark.parametrize(
    ("path", "to", "words"),
    [
        (("ops", 0, 2), [{"value": "x"}], "lacks the argument 'weight'"),
        (("ops", 0, 3), {"nothing": 1}, "does not take these arguments"),
        (("ops", 0, 3), {"input": {"value": "x"}}, "does not take these arguments"),
        (("ops", 0, 2), [{"value": "x"}] * 9, "does not take these arguments"),
        (("ops", 5, 2), [{"value": "split"}, "__class__"], "getitem takes a value and an index"),
        (("ops", 5, 2), [{"value": "split"}], "getitem takes a value and an index"),
        (("ops", 0, 2, 0), {"value": "add"}, "linear uses 'add' before it is defined"),
        (("ops", 1, 0), "linear", "the value 'linear' is defined twice"),
        (("inputs", 0, "name"), "scale", "the value 'scale' is defined twice"),
        (("outputs", 0, "name"), "nothing", "the output 'nothing' is never defined"),
        (("prelude", 0, 2), [{"value": "x"}], "arange uses 'x' before it is defined"),
        (("states", 0, "dtype"), "quint8", "'quint8' is not a dtype"),
        (("states", 0, "kind"), "secret", "a state's kind must be parameter, buffer, constant or cache; got 'secret'"),
        (("states", 0, "name"), "", "is not a name"),
        (("states", 0, "name"), "two\nlines", "is not a name"),
        (("states", 0, "name"), "n" * 513, "is not a name"),
        (("states", 0, "shape"), ["batch"], "a size uses the unknown symbol 'batch'"),
        (("ops", 0, 2, 0), {"code": "x"}, "is not an argument"),
        (("ops", 0, 2, 0), {"dtype": "object"}, "is not an argument"),
        (("ops", 0, 2, 0), {"device": "cuda:7"}, "is not an argument"),
        (("ops", 0, 2, 0), [[[[[[[1]]]]]]], "an argument is nested too deeply"),
        (("prelude", 0, 3, "dtype"), 7, "arange: dtype of aten.arange.default must be a dtype; got 7"),
        (("prelude", 0, 3, "dtype"), 2**31, "arange: dtype of aten.arange.default must be a dtype; got 2147483648"),
        (("prelude", 0, 3, "layout"), 4, "arange: layout of aten.arange.default must be a layout; got 4"),
        (
            ("prelude", 0, 3, "device"),
            "cuda:7",
            "arange: device of aten.arange.default must be a StageDevice; got 'cuda:7'",
        ),
        (("prelude", 0, 3, "device"), 1, "arange: device of aten.arange.default must be a StageDevice; got 1"),
        (
            ("ops", 0),
            ["linear", "aten.clone.default", [{"value": "x"}], {"memory_format": 4}],
            "linear: memory_format of aten.clone.default must be a memory_format; got 4",
        ),
        (("ops",), {}, "is not a list"),
        (("symbols",), "batch", "is not a list"),
        (("version",), 2, "the program has version 2, this Penstock reads 1; split the model again"),
        (("version",), True, "the program has version True, this Penstock reads 1"),
        (("format",), "zip", "the field 'format' is not 'penstock-program'"),
    ],
)
def test_forged_programs(path: tuple[Any, ...], to: object, words: str) -> None:
    assert words in refused(changed(*path, to=to))


@pytest.mark.parametrize(
    ("path", "to"),
    [
        (("states", 0, "shape"), [2**20, 2**20]),
        (("states", 0, "shape"), [2**41]),
        (("states", 0, "shape"), [-1, -1]),
        (("states", 0, "shape"), [0, 2**39]),
        (("states", 0, "shape"), [1.5]),
        (("states", 0, "shape"), [1] * 17),
        (("inputs", 0, "shape"), ["batch", 2**37]),
        (("inputs", 0, "shape"), ["batch", ["*", 2**41, 1]]),
        (("prelude", 0, 2), [2**40]),
        (("prelude", 0, 2), [1e300]),
        (("prelude", 0), ["arange", "aten.arange.start_step", [0, 10, 1e-12], {}]),
        (("prelude", 0), ["zeros", "aten.zeros.default", [[2**20, 2**20]], {}]),
        (("prelude", 0), ["zeros", "aten.zeros.default", [], {"size": [2**20, 2**20]}]),
        (("prelude", 0), ["zeros", "aten.zeros.default", [[10**400, 10**4000]], {}]),
        (("prelude", 0), ["full", "aten.full.default", [[2**37], 1], {}]),
        (("prelude", 0), ["eye", "aten.eye.m", [2**20, 2**20], {}]),
        (("prelude", 0), ["ones", "aten.tril_indices.default", [2**20, 2**20], {}]),
        (("ops", 1), ["view", "aten.repeat.default", [{"value": "arange"}, [2**20, 2**20]], {}]),
        (("ops", 1), ["view", "aten.constant_pad_nd.default", [{"value": "arange"}, [2**20, 2**20]], {}]),
        (("ops", 1), ["view", "aten.one_hot.default", [{"value": "arange"}, 2**40], {}]),
    ],
)
def test_sizes_beyond_all_measure(path: tuple[Any, ...], to: object) -> None:
    refused(changed(*path, to=to))


@pytest.mark.parametrize(
    "op",
    [
        ["zeros", "aten.zeros.default", [[{"size": ["*", 2**30, "batch"]}, {"size": ["*", 2**30, "batch"]}]], {}],
        ["zeros", "aten.zeros.default", [], {"size": [{"size": ["**", "batch", 8]}, 2**20, 2**20]}],
        ["zeros", "aten.arange.default", [{"size": ["*", 2**39, "batch"]}], {}],
        ["zeros", "aten.arange.default", [{"size": ["**", ["**", ["*", 2**36, "batch"], 8], 8]}], {}],
    ],
)
def test_sizes_known_only_when_a_microbatch_comes(op: list[Any]) -> None:
    document = copy.deepcopy(SMALL)
    document["prelude"].append(op)
    try:
        program = read_program(json.dumps(document))
    except ProgramError:
        return
    runtime = Runtime(program, {"head.weight": torch.randn(4, 8), "scale": torch.tensor(0.5)})
    with pytest.raises(ProgramError, match=r"the limit of \d+"):
        runtime({"batch": 3}, [torch.randn(3, 8)])


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "{", b"\xff\xfe\x00", "[" * 100_000, '{"format":' * 5000, "NaN", "1" * 9999]
)
def test_files_that_are_no_programs(text: str | bytes) -> None:
    with pytest.raises(ProgramError, match=r"^not a stage program: [^\n]*$"):
        read_program(text)


def test_every_truncation_is_refused() -> None:
    text = json.dumps(SMALL)
    for end in range(0, len(text) - 1, 7):
        with pytest.raises(ProgramError):
            read_program(text[:end])


def test_missing_field_is_refused() -> None:
    for field in SMALL:
        refused({key: value for key, value in SMALL.items() if key != field})


WEIRD = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.sampled_from([2**63, -(2**63), 10**400, 0, -1]),
        st.floats(), st.text(max_size=8), st.sampled_from(["x", "batch", "linear", "aten.zeros.default", "float32"]),
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        st.sampled_from(["value", "size", "dtype", "device", "float", "x", "name", "shape"]), inner, max_size=2
    ),
    max_leaves=6,
)  # fmt: skip


def _places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside: list[tuple[Any, ...]] = []
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, inner in items:
        inside += [(*path, key), *_places(inner, (*path, key))]
    return inside


@settings(max_examples=examples(600), suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from(_places(SMALL)), WEIRD), min_size=1, max_size=3))
def test_any_file_is_a_program_or_refused(changes: list[tuple[tuple[Any, ...], Any]]) -> None:
    document = copy.deepcopy(SMALL)
    for path, to in changes:
        place: Any = document
        try:
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = to
        except (TypeError, LookupError):
            continue
    try:
        program = read_program(json.dumps(document))
    except ProgramError as error:
        message = str(error)
    else:
        _runs_or_is_refused(program)
        return
    assert "\n" not in message


def _runs_or_is_refused(program: StageProgram) -> None:
    assert read_program(write_program(program)) == program
    tensors = {}
    for state in program.states:
        shape = state.value.evaluate({})
        if torch.Size(shape).numel() > 1000:
            return
        tensors[state.value.name] = torch.zeros(shape, dtype=state.value.dtype)
    if len(program.inputs) == 1:
        with contextlib.suppress(ProgramError, RunError):
            Runtime(program, tensors)(dict.fromkeys(program.symbols, 3), [torch.zeros(3, 8)])
