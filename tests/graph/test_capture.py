import math
import re
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

from penstock.deploy.split import split
from penstock.errors import CaptureError, UsageError
from penstock.graph.capture import capture
from penstock.graph.cuts import Cuts, divide
from penstock.graph.program import write_program
from tests.fewer import first, long
from tests.models import UNet, albert, as_messages, assert_same, bert, deit, gpt2, llama, seeded, split_at, swin, t5


def check_everywhere(model: nn.Module, *args: Any, batches: tuple[int, ...] = (1, 2, 3, 5), **kwargs: Any) -> Any:
    """Cut at every allowed place, one at a time and all at once, and compare; gives the graph."""
    model = model.eval()
    graph = capture(model, args, kwargs)
    cuts = Cuts(graph)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def rows(leaf: Any, batch: int) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0:
            return leaf
        return leaf.repeat(batch, *[1] * (leaf.dim() - 1))[: leaf.shape[0] if graph.fixed_batch else batch].clone()

    for chosen in [[cut] for cut in cuts] + [list(cuts)]:
        for batch in batches:
            given = [rows(leaf, batch) for leaf in args], {key: rows(leaf, batch) for key, leaf in kwargs.items()}
            again = [rows(leaf, batch) for leaf in args], {key: rows(leaf, batch) for key, leaf in kwargs.items()}
            model.load_state_dict(state)
            with torch.no_grad():
                expected = model(*given[0], **given[1])
            model.load_state_dict(state)
            assert_same(expected, as_messages(split_at(model, graph, chosen), *again[0], **again[1]))
    model.load_state_dict(state)
    return graph


class Linears(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)


class Pair(NamedTuple):
    left: Tensor
    right: Any


class Results(Linears):
    """Returns nested structures, inputs, constants, sizes, a parameter and the same tensor twice."""

    def forward(self, x: Tensor, ids: Tensor, *, extra: dict[str, Tensor], flag: bool = True) -> Any:
        y = self.second(torch.relu(self.first(x)) + extra["bias"])
        z = y + ids.to(y.dtype).unsqueeze(1)
        return OrderedDict(
            pair=Pair(y, None), list=[z, 7, "text", y], same=x, size=x.shape[0] * 2, flag=flag,
            weight=self.first.weight, mean=z.mean(), constant=torch.arange(3),
        )  # fmt: skip


def test_several_inputs_and_structured_results() -> None:
    graph = check_everywhere(
        Results(), torch.randn(2, 4), torch.tensor([1, 2]), extra={"bias": torch.randn(2, 1)}, batches=(2,)
    )
    assert [value.name for value in graph.tensor_inputs()] == ["x", "ids", "extra_bias"]
    model = Results().eval()
    split = split_at(model, graph, Cuts(graph)[1:2])
    for batch in (1, 3, 5):
        x, ids, bias = torch.randn(batch, 4), torch.arange(batch), torch.randn(batch, 1)
        with torch.no_grad():
            assert_same(model(x, ids, extra={"bias": bias}), as_messages(split, x, ids, extra={"bias": bias}))


def test_plain_inputs_are_part_of_what_was_captured() -> None:
    graph = capture(
        Results().eval(), (torch.randn(2, 4), torch.ones(2)), {"extra": {"bias": torch.ones(2, 1)}, "flag": False}
    )
    assert {position: (plain.name, plain.value) for position, plain in graph.plain_inputs.items()} == {
        3: ("flag", False)
    }


class InPlace(Linears):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu_()
        view = x[:, 1:3]
        y = self.second(x)
        view.add_(1)
        x[:, 0] = y[:, 1]
        x[torch.tensor([0]), torch.tensor([3])] = 5.0
        y += x
        x.masked_fill_(y > 1, 2.0)
        first, second = y.chunk(2, 1)
        first.mul_(3)
        result: Tensor = self.second(y) + x * second.sum(1, keepdim=True)
        return result


class _Heads(nn.Module):
    def forward(self, x: Tensor, more: Tensor) -> Tensor:
        split = more.view(*more.shape[:2], -1, 2).reshape(more.shape[0], -1)
        return x + split.sum(1, keepdim=True)


def test_a_view_of_nothing_has_its_shape() -> None:
    model, x, more = _Heads(), torch.randn(3, 4), torch.randn(3, 5, 8)
    graph = capture(model, (x, more), dynamic={"length": {"more": 1}})
    assert torch.equal(split_at(model, graph, [])(x, more[:, :0]), x)  # torch refuses -1 for it
    assert torch.equal(split_at(model, graph, [])(x, more), model(x, more))


def test_writes_in_place_and_views() -> None:
    graph = check_everywhere(InPlace(), torch.randn(2, 4))
    assert 2 < len(graph.allowed) < len(graph.ops) - 1


class Normed(nn.Module):
    scale: Tensor
    counted: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv, self.norm, self.drop = nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4), nn.Dropout(0.5)
        self.norm.running_mean = torch.randn(4)
        self.register_buffer("scale", torch.randn(4, 1, 1))
        self.register_buffer("counted", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(self.conv(x))) * self.scale
        result: Tensor = x + self.counted.sum() + torch.tensor([1.0, 2.0])
        return result


def test_buffers_constants_and_normalization() -> None:
    graph = check_everywhere(Normed(), torch.randn(2, 2, 2, 2))
    kinds = {state.source: state.kind for state in graph.states}
    assert kinds.pop("norm.running_var") == kinds.pop("norm.running_mean") == "buffer"
    assert kinds.pop("scale") == kinds.pop("counted") == "buffer"
    assert sorted(kinds.values()) == ["constant", *["parameter"] * 4]
    assert "dropout" not in " ".join(op.target for op in graph.ops)


class Counter(Linears):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.calls.add_(1)
        result: Tensor = self.second(x) * self.calls
        return result


def test_a_buffer_that_is_written() -> None:
    check_everywhere(Counter(), torch.randn(2, 4), batches=(3,))


class SameNames(Linears):
    x: Tensor
    linear: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("x", torch.randn(4))
        self.register_buffer("linear", torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(x + self.x) + self.linear)
        return result


def test_a_buffer_with_the_name_of_an_input() -> None:
    graph = check_everywhere(SameNames(), torch.randn(2, 4))
    assert [value.name for value in graph.tensor_inputs()] == ["x"]
    assert {"x", "linear"} <= {state.source for state in graph.states}


class Masked(Linears):
    """Attention with a causal mask and positions that depend on nothing but sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        mask = torch.full((length, length), -math.inf).triu(1)
        angles = torch.arange(length)[:, None] / torch.tensor([1.0, 10.0, 100.0, 1000.0])
        x = x + self.positions(torch.arange(length)) + angles.sin()
        scores = self.first(x) @ self.second(x).transpose(1, 2) + mask
        x = torch.softmax(scores, -1) @ x
        result: Tensor = self.second(torch.softmax(x @ x.transpose(1, 2) + mask, -1) @ x)
        return result


@pytest.mark.parametrize("name", ["sequence", "length"])
def test_masks_and_positions_are_not_sent(name: str) -> None:
    model = seeded(Masked)
    graph = capture(model, (torch.randn(2, 8, 4),), dynamic={name: {"x": 1}})
    assert graph.symbols == ("batch", name)
    assert {"aten.triu.default", "aten.sin.default"} <= {op.target for op in graph.prelude}
    cuts = Cuts(graph)
    assert max(len(cut.crossing) for cut in cuts) <= 3
    programs = divide(graph, list(cuts))
    assert sum(any(op.target == "aten.triu.default" for op in program.prelude) for program in programs) == 2
    split = split_at(model, graph, list(cuts)[::2])
    for batch, length in ((1, 1), (1, 2), (2, 3), (5, 17), (3, 32)):
        x = torch.randn(batch, length, 4)
        with torch.no_grad():
            assert_same(model(x), as_messages(split, x))


@pytest.mark.parametrize("place", [{0: 1}, {"x": 1}, {"x": -1}])
def test_a_dynamic_input_by_position_or_name(place: dict[str | int, int]) -> None:
    class Sum(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * x.shape[1]).sum(1)

    graph = capture(Sum(), (torch.randn(3, 8),), dynamic={"width": place})
    assert [str(dimension) for dimension in graph.tensor_inputs()[0].shape] == [
        "Size(expression='batch')",
        "Size(expression='width')",
    ]


def test_a_dynamic_input_that_is_none() -> None:
    with pytest.raises(CaptureError) as caught:
        capture(seeded(Masked), (torch.randn(2, 8, 4),), dynamic={"sequence": {"ids": 1}})
    assert re.search("'sequence' .*'ids'.* x$", str(caught.value))


@pytest.mark.parametrize("build", [llama, long(gpt2)])
def test_language_models_at_other_lengths(build: Any) -> None:
    model, ones = build(), torch.ones(2, 8, dtype=torch.int64)
    graph = capture(
        model,
        (),
        {"input_ids": ones, "attention_mask": ones},
        dynamic={"sequence": {"input_ids": 1, "attention_mask": 1}},
    )
    split = split_at(model, graph, list(Cuts(graph))[10::25])
    for batch, length in ((1, 1), (1, 5), (3, 9), (2, 33)):
        ids, mask = torch.randint(0, 80, (batch, length)), torch.ones(batch, length, dtype=torch.int64)
        mask[::2, : length // 3] = 0
        with torch.no_grad():
            assert_same(
                model(input_ids=ids, attention_mask=mask), as_messages(split, input_ids=ids, attention_mask=mask)
            )


class Regions(Linears):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.first(x).mean(1, keepdim=True)
        with torch.autocast("cpu", enabled=False):
            y = self.second(x) * torch.tensor(2.0)
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            y = y + torch.tensor(3.0)
        result: Tensor = self.first(y) + scale
        return result


def test_regions_without_gradient_and_without_autocast() -> None:
    graph = check_everywhere(Regions(), torch.randn(2, 4))
    assert all(op.target.startswith("aten.") for op in graph.ops)
    assert Cuts(graph).find("second:after")


def test_autocast_inside_is_refused() -> None:
    class Cast(Linears):
        def forward(self, x: Tensor) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.first(x)

    with pytest.raises(CaptureError, match=r"^Cast .*autocast"):
        capture(Cast().eval(), (torch.randn(2, 4),))


class Fixed(Linears):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(x).view(2, 4) + torch.arange(2.0)[:, None])
        return result


def test_a_model_that_fixes_its_batch() -> None:
    graph = check_everywhere(Fixed(), torch.randn(2, 4), batches=(2,))
    assert graph.fixed_batch == 2
    assert graph.symbols == ()
    split = split_at(Fixed().eval(), graph, [])
    with pytest.raises(UsageError, match=r"\[2, 4\]; got float32 \[3, 4\].* at 2: .*test_capture\.py:\d+: "):
        split(torch.randn(3, 4))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 4, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        found: Tensor = self.rnn(packed)[1][-1]
        return found


@pytest.mark.parametrize("training", [True, False])
def test_packed_sequences_are_refused_by_name(training: bool) -> None:
    with pytest.raises(CaptureError, match=r"pack_padded_sequence.*gather.*test_capture\.py:\d+"):
        capture(Packed().train(training), (torch.ones(3, 5, 4), torch.tensor([5, 3, 2])))


class OneTensor(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 + 1


@pytest.mark.parametrize("example", [torch.tensor(2.0), torch.randn(1), torch.randn(7, 1), torch.ones(2, 2).bool()])
def test_examples_of_any_shape(example: Tensor) -> None:
    graph = capture(OneTensor(), (example,))
    with torch.no_grad():
        assert_same(OneTensor()(example), as_messages(split_at(OneTensor(), graph, list(Cuts(graph))), example))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(9, 4), nn.Linear(4, 4)
        self.head, self.again = nn.Linear(4, 9, bias=False), self.mix
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.head(self.again(torch.tanh(self.mix(self.embed(ids)))))
        return result


def test_tied_weights_and_a_layer_used_twice() -> None:
    torch.manual_seed(0)
    graph = check_everywhere(Tied(), torch.randint(0, 9, (2, 3)))
    assert sorted(state.source for state in graph.states) == ["embed.weight", "mix.bias", "mix.weight"]
    first, last = divide(graph, [Cuts(graph).find("mix:after")])
    assert {state.source for state in first.states} & {state.source for state in last.states} == {
        "embed.weight",
        "mix.bias",
        "mix.weight",
    }


def test_tied_embeddings_and_shared_layers_of_real_models() -> None:
    ids = torch.randint(0, 80, (2, 6))
    sources = [state.source for state in capture(gpt2(), (ids,)).states]
    assert len([name for name in sources if name in {"transformer.wte.weight", "lm_head.weight"}]) == 1
    graph = capture(albert(), (ids,))
    assert len({state.source for state in graph.states}) == len(graph.states)
    assert Cuts(graph).find("albert.encoder.albert_layer_groups.0@3:after")


@pytest.mark.parametrize("build", first(2, [gpt2, lambda: seeded(UNet), deit, swin, t5]))
def test_the_model_is_left_as_it_was(build: Any) -> None:
    model = build()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    state = {name: (id(tensor), tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    ids = torch.randint(0, 80, (2, 6))
    if build in (gpt2, t5):
        capture(model, (), {"input_ids": ids} | ({"decoder_input_ids": ids} if build is t5 else {}))
    else:
        capture(model, (torch.randn(2, 3, 32, 32),))
    assert not model.training
    assert {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)} == {
        name: id(p) for name, p in parameters.items()
    }
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert id(tensor) == state[name][0]
        assert torch.equal(tensor, state[name][1])
    assert hooks == [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    assert torch.is_grad_enabled()


def test_parameters_on_the_meta_device_give_the_same_graph() -> None:
    for build, inputs in ((deit, torch.randn(2, 3, 32, 32)), (gpt2, torch.randint(0, 80, (2, 6)))):
        real = build()
        hollow = build()
        replaced = {p: nn.Parameter(p.to("meta")) for p in hollow.parameters()}
        for module in hollow.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = replaced[parameter]
        programs = [
            [write_program(p) for p in divide(graph, list(Cuts(graph))[::9])]
            for graph in (capture(real, (inputs,)), capture(hollow, (inputs,)))
        ]
        assert programs[0] == programs[1]
        assert all(p.device.type == "meta" for p in hollow.parameters())


def test_a_meta_model_that_does_not_export_gets_its_parameters_back() -> None:
    class Breaks(nn.Linear):
        def forward(self, _: Tensor) -> Tensor:
            raise ValueError("the width must be 7,\nnot 8")

    model = Breaks(4, 4, device="meta")
    weight = model.weight
    with pytest.raises(CaptureError, match=r"^Breaks .*: the width must be 7, not 8 \(test_capture.py:"):
        capture(model, (torch.randn(2, 4),))
    assert model.weight is weight


class Branch(Linears):
    def forward(self, x: Tensor) -> Any:
        if self.first(x).sum() > 0:
            return self.second(x)
        return x


class Item(Linears):
    def forward(self, x: Tensor) -> Any:
        count = int(self.first(x).abs().sum().item())
        return torch.zeros(count)


class NonZero(Linears):
    def forward(self, x: Tensor) -> Any:
        return self.first(x[x > 0].view(-1, 1).expand(-1, 4))


class Odd(Linears):
    def forward(self, x: Tensor) -> Any:
        if x.shape[1] != 5:
            raise ValueError
        return x


WAY_OUT = "; use torch.where in place of an if, or give Pipeline a list of modules, one a stage, which streams only"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Branch(), "Branch cannot be captured: it branches on the values of a tensor "
                   f"(test_capture.py:LINE: if self.first(x).sum() > 0:){WAY_OUT}"),
        (Item(), "Item cannot be captured: it takes a size from the values of a tensor "
                 f"(test_capture.py:LINE: count = int(self.first(x).abs().sum().item())){WAY_OUT}"),
        (NonZero(), "NonZero makes index with a size that depends on data (u0); "
                    "sizes in a stage must follow from its inputs' sizes"),
        (Odd(), "Odd cannot be captured: ValueError (test_capture.py:LINE: raise ValueError)"),
    ],
)  # fmt: skip
def test_uncapturable_model_is_named_in_one_line(
    model: nn.Module, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(model.eval(), (torch.randn(2, 4),))
    assert re.sub(r"\.py:\d+", ".py:LINE", str(caught.value)) == message
    assert capfd.readouterr().err == ""


def test_a_length_that_the_model_limits_stays_symbolic() -> None:
    graph = capture(
        bert(max_position_embeddings=40),
        (),
        {"input_ids": torch.zeros(2, 9, dtype=torch.long), "attention_mask": torch.ones(2, 9, dtype=torch.long)},
        dynamic={"length": {"input_ids": 1, "attention_mask": 1}},
    )
    assert graph.symbols == ("batch", "length")


def test_a_mixture_of_experts_is_captured_with_products_of_batches(capsys: pytest.CaptureFixture[str]) -> None:
    config = MixtralConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=50, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model: Any = MixtralForCausalLM(config).eval()
    before = model.config._experts_implementation
    parts = split(model, (torch.randint(50, (2, 8)),), stages=2)
    assert model.config._experts_implementation == before != "batched_mm"
    assert "call set_experts_implementation('batched_mm')" in capsys.readouterr().err
    model.set_experts_implementation("batched_mm")
    for rows in (2, 3):
        tokens = torch.randint(50, (rows, 8))
        with torch.no_grad():
            assert torch.equal(parts(tokens).logits, model(tokens).logits)


def test_a_model_that_keeps_a_cache_is_captured_without(capsys: pytest.CaptureFixture[str]) -> None:
    model: Any = gpt2()
    model.config.use_cache = True
    graph = capture(model.eval(), (), {"input_ids": torch.zeros(2, 8, dtype=torch.long)})
    assert model.config.use_cache is True
    assert len(graph.outputs) == 1
    assert "experts" not in capsys.readouterr().err


@pytest.mark.long
def test_an_encoder_and_a_decoder_keep_no_cache_either() -> None:
    model: Any = t5()
    model.config.use_cache = model.decoder.config.use_cache = True
    ids = torch.zeros(2, 8, dtype=torch.long)
    graph = capture(model, (), {"input_ids": ids, "decoder_input_ids": ids})
    assert len(graph.outputs) == 2
    assert model.config.use_cache is model.decoder.config.use_cache is True


def test_an_example_goes_to_the_device_of_the_model(pretended: torch.device) -> None:
    model, example = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).eval(), torch.randn(3, 4)
    there, here = (capture(model, (tensor,)) for tensor in (example.to(pretended), example))
    assert write_program(divide(there, [])[0]) == write_program(divide(here, [])[0])
