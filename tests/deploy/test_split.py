from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.deploy.policies import best_blocks, choose_cuts
from penstock.deploy.state import load_state
from penstock.errors import CutError, UsageError
from penstock.graph.capture import capture
from penstock.graph.cuts import Cut, Cuts
from penstock.graph.graph import count_work
from penstock.zoo.weights.weights import ModuleWeights
from tests.fewer import first
from tests.models import UNet, as_messages, assert_same, deit, gpt2, random_cuts, seeded, split_at, swin, t5

Inputs = Callable[[int], dict[str, Tensor]]
NUM_CUT_SETS = 12
BATCH_SIZES = (1, 2, 3, 5)


def images(size: int) -> Inputs:
    return lambda batch: {"x": torch.randn(batch, 3, size, size)}


def texts(batch: int) -> dict[str, Tensor]:
    mask = torch.ones(batch, 9, dtype=torch.int64)
    mask[1::2, -3:] = 0
    return {"input_ids": torch.randint(0, 80, (batch, 9)), "attention_mask": mask}


def both(batch: int) -> dict[str, Tensor]:
    return texts(batch) | {"decoder_input_ids": torch.randint(0, 80, (batch, 4))}


CASES: dict[str, tuple[Callable[[], nn.Module], Inputs]] = {
    "deit": (deit, images(32)), "gpt2": (gpt2, texts), "swin": (swin, images(32)), "t5": (t5, both),
    "unet": (lambda: seeded(UNet), images(16)),
}  # fmt: skip


@pytest.mark.board
@pytest.mark.parametrize("case", first(2, [*CASES]))
def test_any_cuts_give_the_same_bits(case: str) -> None:
    build, inputs = CASES[case]
    model = build()
    graph = capture(model, (), inputs(2))
    assert graph.fixed_batch is None
    cuts = Cuts(graph)
    calls = [inputs(batch) for batch in BATCH_SIZES]
    with torch.no_grad():
        expected = [model(**call) for call in calls]
    for seed in range(NUM_CUT_SETS):
        split = split_at(model, graph, random_cuts(cuts, seed))
        assert 2 <= len(split.stages) <= 6
        for call, result in zip(calls, expected, strict=True):
            assert_same(result, as_messages(split, **call))
            assert_same(result, split(**call))


@pytest.mark.board
@pytest.mark.parametrize("policy", ["balanced", "equal-blocks", "equal-size", "smallest-crossing"])
def test_policies_give_the_same_bits(policy: str) -> None:
    model = deit()
    split = penstock.split(model, (torch.randn(2, 3, 32, 32),), stages=3, cuts=policy)
    assert len(split.stages) == 3
    x = torch.randn(5, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(model(x), split(x))


def test_stages_know_what_they_hold() -> None:
    model = deit()
    split = penstock.split(model, (torch.randn(1, 3, 32, 32),), cuts=["blocks.1:after", "blocks.3:after"])
    assert [stage.index for stage in split.stages] == [0, 1, 2]
    assert [stage.after.name if stage.after else None for stage in split.stages] == [
        "blocks.1:after",
        "blocks:after",
        None,
    ]
    assert [stage.before.name if stage.before else None for stage in split.stages] == [
        None,
        "blocks.1:after",
        "blocks:after",
    ]
    assert split.stages[2].parameters == ("norm.weight", "norm.bias", "head.weight", "head.bias")
    assert split.stages[2].parameter_bytes == (192 + 192 + 10 * 192 + 10) * 4
    assert sum(len(stage.parameters) for stage in split.stages) == len(list(model.parameters()))
    assert all(stage.work > 0 for stage in split.stages)


def test_stages_are_called_by_hand() -> None:
    model = deit()
    split = penstock.split(model, (torch.randn(1, 3, 32, 32),), stages=4)
    x = torch.randn(3, 3, 32, 32)
    values: tuple[Tensor, ...] = (x,)
    for stage in split.stages:
        values = stage(*values)
    with torch.no_grad():
        assert torch.equal(model(x), values[0])


def test_split_into_one_stage() -> None:
    model = seeded(UNet)
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        expected = model(x)
    for split in (penstock.split(model, (x,), stages=1), penstock.split(model, (x,), cuts=[])):
        assert len(split.stages) == 1
        assert repr(split).splitlines()[0] == "UNet in 1 stage"
        assert torch.equal(split(x), expected)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stages": 4, "cuts": ["up:after"]}, r"2 for \['up:after'\]; got 4"),
        ({"stages": 2, "cuts": []}, r"1 for \[\]; got 2"),
        ({"cuts": "up:after"}, r"write \['up:after'\]"),
    ],
)
@pytest.mark.parametrize("use", [penstock.split, penstock.Pipeline])
def test_options_that_contradict_are_refused(use: Callable[..., Any], options: dict[str, Any], said: str) -> None:
    for training in (False, True):
        with pytest.raises(UsageError, match=said):
            use(seeded(UNet).train(training), (torch.randn(2, 3, 8, 8),), **options)


def test_a_split_model_prints_its_stages() -> None:
    parts = penstock.split(
        seeded(nn.Sequential, nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 8)), (torch.zeros(2, 4),), cuts=["1:after"]
    )
    assert repr(parts).splitlines() == [
        "Sequential in 2 stages",
        "stage  cut after it  crossing  work   parameters  operations",
        "0      1:after       16 B      66.6%  80 B        2",
        "1      (the end)               33.4%  160 B       1",
    ]


def test_model_can_be_cut_everywhere() -> None:
    model = seeded(UNet)
    x = torch.randn(2, 3, 8, 8)
    graph = capture(model, (x,))
    cuts = choose_cuts(graph, Cuts(graph), stages=len(Cuts(graph)) + 1)
    with torch.no_grad():
        assert torch.equal(model(x), as_messages(split_at(model, graph, cuts), x))


def test_impossible_cuts_are_refused() -> None:
    with pytest.raises(CutError, match=r"^cut 'blocks\.9:after' not found in VisionTransformer; the nearest"):
        penstock.split(deit(), (torch.randn(1, 3, 32, 32),), cuts=["blocks.9:after"])
    with pytest.raises(CutError, match=r"^9 stages .*got 4"):
        penstock.split(deit(), (torch.randn(1, 3, 32, 32),), stages=9, cuts="equal-blocks")


def test_a_model_without_blocks() -> None:
    parts = {"input": nn.Linear(8, 8), "act": nn.Tanh(), "output": nn.Linear(8, 8)}
    model = nn.Sequential(OrderedDict(parts)).eval()
    with pytest.raises(CutError) as caught:
        penstock.split(model, (torch.randn(3, 8),), stages=2, cuts="equal-blocks")
    assert "use the policy 'balanced'" in str(caught.value)
    split = penstock.split(model, (torch.randn(3, 8),), stages=2, cuts="equal-size")
    assert [cut.name for cut in split.cuts] == ["act:after"]


def test_parameters_without_data() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4).eval()
    with pytest.raises(UsageError, match=r"tensor weight .*weights="):
        penstock.split(model, (torch.randn(2, 4),), stages=1)
    real = nn.Linear(4, 4).eval()
    x = torch.randn(2, 4)
    split = penstock.split(model, (x,), stages=1, weights=ModuleWeights(real))
    with torch.no_grad():
        assert torch.equal(split(x), real(x))


def test_weights_of_another_model() -> None:
    graph = capture(nn.Linear(4, 4).eval(), (torch.randn(2, 4),))
    with pytest.raises(UsageError) as caught:
        load_state(graph, graph.states[0], ModuleWeights(nn.Linear(5, 4)))
    assert str(caught.value) == ("weight is (4, 5) in the weights but (4, 4) in the model; give weights of this model")


def test_results_of_calls_are_separate() -> None:
    class Add(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"positions": torch.arange(x.shape[1]) * 2, "sum": x + 1}

    x = torch.zeros(2, 3)
    split = penstock.split(Add().eval(), (x,), stages=1)
    first = split(x)
    first["sum"].add_(100)
    assert torch.equal(split(x)["sum"], x + 1)
    assert torch.equal(split(x)["positions"], torch.tensor([0, 2, 4]))


def test_best_blocks_leave_the_heavy_ends_fewer_blocks() -> None:
    model = nn.Sequential(nn.Linear(8, 512), *(nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(6)))
    graph = capture(model, (torch.randn(4, 8),))
    cuts = Cuts(graph)
    chosen = best_blocks(graph, cuts, stages=3, sizes=graph.sizes(4))
    assert [cut.position for cut in chosen] == sorted({cut.position for cut in chosen})
    equal = choose_cuts(graph, cuts, stages=3, policy="equal-blocks", sizes=graph.sizes(4))
    work = count_work(graph, graph.sizes(4))

    def largest(cuts: list[Cut]) -> float:
        bounds = [0, *(cut.position for cut in cuts), len(work)]
        return max(sum(work[a:b]) for a, b in pairwise(bounds))

    assert largest(chosen) <= largest(equal)
    with pytest.raises(CutError):
        best_blocks(graph, cuts, stages=9, sizes=graph.sizes(4))
