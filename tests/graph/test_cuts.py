from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from penstock.deploy.policies import choose_cuts
from penstock.errors import CutError
from penstock.graph.capture import capture
from penstock.graph.cuts import Cuts
from penstock.graph.graph import SECONDS_PER_CROSSING_BYTE, Graph, count_work
from tests.models import UNet, albert, seeded, swin, t5


@pytest.fixture(scope="module")
def deit_small() -> Graph:
    import timm

    with torch.device("meta"):
        model = timm.create_model("deit_small_patch16_224").eval()
    return capture(model, (torch.randn(1, 3, 224, 224),))


def names(graph: Graph, policy: str, stages: int = 4) -> list[str]:
    return [cut.name for cut in choose_cuts(graph, Cuts(graph), stages=stages, policy=policy)]


def test_equal_size_as_pippy_divides_deit(deit_small: Graph) -> None:
    assert names(deit_small, "equal-size") == ["blocks.2.norm2:after", "blocks.5.norm2:after", "blocks.8.norm2:after"]


def test_equal_blocks(deit_small: Graph) -> None:
    cuts = Cuts(deit_small)
    assert names(deit_small, "equal-blocks") == ["blocks.2:after", "blocks.5:after", "blocks.8:after"]
    for before, after in (("blocks.3", "blocks.2"), ("blocks.6", "blocks.5"), ("blocks.9", "blocks.8")):
        assert cuts.find(f"{before}:before") == cuts.find(f"{after}:after")


def test_balanced_is_as_good_as_any(deit_small: Graph) -> None:
    sizes = deit_small.sizes(1)
    work = count_work(deit_small, sizes)

    def largest(policy: str) -> float:
        cuts = choose_cuts(deit_small, Cuts(deit_small), stages=4, policy=policy)
        bounds = [0, *(cut.position for cut in cuts), len(work)]
        crossing = [0.0, *(cut.num_bytes(sizes) * SECONDS_PER_CROSSING_BYTE for cut in cuts), 0.0]
        stages = zip(pairwise(bounds), pairwise(crossing), strict=True)
        return max(sum(work[start:stop]) + before + after for (start, stop), (before, after) in stages)

    best = largest("balanced") * (1 - 1e-9)
    assert sum(work) / 4 <= best
    assert best <= largest("smallest-crossing") <= 1.1 * largest("balanced")
    assert best <= min(largest("equal-blocks"), largest("equal-size"))


def test_cut_has_aliases_of_its_place(deit_small: Graph) -> None:
    cut = Cuts(deit_small).find("blocks.2:after")
    assert cut.name == "blocks.2:after"
    assert {"blocks.3:before", "blocks.3.norm1:before", "blocks.2/add.2:after"} <= set(cut.aliases)
    assert [(value.name, value.shape[1:]) for value in cut.crossing] == [(cut.crossing[0].name, (197, 384))]
    assert cut.num_bytes({"batch": 3}) == 3 * 197 * 384 * 4


def test_modules_inside_blocks(deit_small: Graph) -> None:
    cuts = Cuts(deit_small)
    assert cuts.find("blocks.2.attn.proj:after").name == "blocks.2.attn:after"
    assert "blocks.2.attn.proj:after" in cuts.find("blocks.2.attn.proj:after").aliases
    assert len(cuts.find("blocks.2.attn.proj:after").crossing) == 2  # the branch and the residual


def test_modules_without_operations(deit_small: Graph) -> None:
    cuts = Cuts(deit_small)
    dropped = cuts.find("blocks.2.attn.proj_drop:after")
    assert dropped == cuts.find("blocks.2.attn.proj:after") == cuts.find("blocks.2.attn.proj_drop:before")
    assert "blocks.2.attn.proj_drop:after" in dropped.aliases


def test_names_of_operations(deit_small: Graph) -> None:
    cuts = Cuts(deit_small)
    assert cuts.find("blocks.2.attn/transpose:after").name == "blocks.2.attn/transpose:after"
    assert cuts.find("blocks.2/add:after") == cuts.find("blocks.2.norm2:before")


def test_every_name_of_every_cut_finds_it(deit_small: Graph) -> None:
    cuts = Cuts(deit_small)
    for cut in cuts:
        for name in (cut.name, *cut.aliases):
            assert cuts.find(name) == cut
    assert len(cuts) == len({cut.position for cut in cuts}) == len(deit_small.allowed)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("blocks.2.atn.proj:after", "cut 'blocks.2.atn.proj:after' not found in VisionTransformer; "
                                    "the nearest names are blocks.2.attn.proj:after, "),
        ("blocks.12:after", "cut 'blocks.12:after' not found in VisionTransformer; "
                            "the nearest names are blocks.2:after, blocks.1:after, "),
        ("blocks.2", "cut 'blocks.2' not found in VisionTransformer; "
                     "a cut is a module path and a side, as in blocks.2:after or blocks.2:before"),
        ("", "cut '' not found in VisionTransformer; "
             "a cut is a module path and a side, as in blocks.3:after or blocks.3:before"),
        ("§§§§§§§§§§§§§§§§:after", "cut '§§§§§§§§§§§§§§§§:after' not found in VisionTransformer; "
                                    "see `penstock split` for the names"),
        ("patch_embed:before", "the cut 'patch_embed:before' leaves an empty stage; cut inside the model"),
        ("head:after", "the cut 'head:after' leaves an empty stage; cut inside the model"),
    ],
)  # fmt: skip
def test_names_without_a_cut_are_refused(deit_small: Graph, name: str, message: str) -> None:
    with pytest.raises(CutError) as caught:
        Cuts(deit_small).find(name)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_cuts_are_put_in_order_and_not_repeated(deit_small: Graph) -> None:
    cuts = Cuts(deit_small)
    assert [c.name for c in cuts.find_all(["blocks.5:after", "blocks.2:after"])] == ["blocks.2:after", "blocks.5:after"]
    with pytest.raises(CutError, match=r"two cuts .*blocks\.2:after"):
        cuts.find_all(["blocks.2:after", "blocks.3:before"])


@pytest.mark.parametrize("stages", [1, 2])
def test_unknown_policy(deit_small: Graph, stages: int) -> None:
    with pytest.raises(CutError, match=r"balanced, equal-blocks, equal-size, smallest-crossing; got 'fastest'"):
        names(deit_small, "fastest", stages)


def test_more_stages_than_cuts(deit_small: Graph) -> None:
    num_cuts = len(Cuts(deit_small))
    with pytest.raises(CutError) as caught:
        names(deit_small, "balanced", num_cuts + 2)
    assert str(caught.value) == (
        f"{num_cuts + 2} stages need at least {num_cuts + 1} cuts, but this model allows {num_cuts}; "
        f"use at most {num_cuts + 1} stages"
    )
    assert len(names(deit_small, "balanced", num_cuts + 1)) == num_cuts


def test_more_stages_than_blocks(deit_small: Graph) -> None:
    assert len(names(deit_small, "equal-blocks", 12)) == 11
    with pytest.raises(CutError, match=r"^13 stages .*got 12"):
        names(deit_small, "equal-blocks", 13)
    with pytest.raises(CutError, match=r"VisionTransformer .* 60 "):
        names(deit_small, "equal-size", 60)


def test_zero_stages_are_refused(deit_small: Graph) -> None:
    with pytest.raises(CutError, match=r"stages .*got 0$"):
        names(deit_small, "balanced", 0)


def test_blocks_of_shared_layers() -> None:
    graph = capture(albert(), (), {"input_ids": torch.randint(0, 80, (2, 7))})
    layer = "albert.encoder.albert_layer_groups.0"
    assert names(graph, "equal-blocks") == [f"{layer}:after", f"{layer}@1:after", f"{layer}@2:after"]


def test_blocks_of_encoder_and_decoder() -> None:
    ids = torch.randint(0, 80, (2, 7))
    graph = capture(t5(), (), {"input_ids": ids, "decoder_input_ids": ids[:, :4]})
    assert names(graph, "equal-blocks", 2) == ["decoder.dropout:after"]  # before decoder.block.0


def test_blocks_of_all_levels() -> None:
    graph = capture(swin(), (torch.randn(2, 3, 32, 32),))
    assert names(graph, "equal-blocks") == [
        "layers.0.blocks.0:after",
        "layers.1.downsample:after",
        "layers.1.blocks.0:after",
    ]


@pytest.mark.board
def test_convolutions_with_batchnorm_may_be_cut_anywhere() -> None:
    graph = capture(seeded(UNet), (torch.randn(2, 3, 8, 8),))
    cuts = Cuts(graph)
    assert len(cuts.find("down1.norm:after").crossing) == 1
    assert cuts.find("down1.act:after").name == "down1:after"
    assert len(cuts) > 0.9 * (len(graph.ops) - 1)


class _Buffer(nn.Module):
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.count.add_(1)
        x = self.second(x)
        result: Tensor = self.third(x + self.count)
        return result


class _View(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        view = x[:, :2]
        y = self.second(x)
        view.add_(1)
        result: Tensor = self.third(x + y)
        return result


class _List(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.first(x).split(2, 1)
        result: Tensor = self.second(a) + b
        return result


@pytest.mark.parametrize(
    ("model", "name", "reason", "nearest"),
    [
        (_View(), "second:after", "separate a view from a later write to its base", "/add_:after"),
        (_Buffer(), "second:after", "separate a write to a buffer from its other uses", "third:before"),
        (_List(), "/split:after", "cross a list of tensors before its items are taken out", "first:after"),
    ],
)
def test_cuts_that_would_change_the_result(model: nn.Module, name: str, reason: str, nearest: str) -> None:
    graph = capture(model.eval(), (torch.randn(3, 4),))
    with pytest.raises(CutError) as caught:
        Cuts(graph).find(name)
    assert str(caught.value) == f"the cut {name!r} would {reason}; the nearest allowed cut is {nearest}"


def test_blocks_with_no_cut_between_them() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, base: Tensor) -> Tensor:
            base.add_(self.linear(x))
            return x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(4))
            self.head = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            base = x * 2
            view = base[:, :4]
            for layer in self.layers:
                x = layer(x, view)
            result: Tensor = self.head(base)
            return result

    graph = capture(Model().eval(), (torch.randn(3, 4),))
    with pytest.raises(CutError, match=r"allows no cut between some of its blocks|need at least"):
        names(graph, "equal-blocks", 4)
