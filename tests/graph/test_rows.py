"""Rows of a batch that interact are found, and no others: by their operators, and by a probe that changes a row."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from penstock.errors import UsageError
from penstock.graph.capture import capture
from penstock.graph.rows import check_rows, find_mixing
from penstock.pipeline import Pipeline
from tests.fewer import examples

ROWS = 4
Step = Callable[..., Any]


class Forward(nn.Module):
    """A forward pass given as a function of the inputs and the modules."""

    def __init__(self, function: Step, *modules: nn.Module) -> None:
        super().__init__()
        self.function, self.inner = function, nn.ModuleList(modules)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs, *self.inner)


def vectors(size: int = 4) -> Tensor:
    return torch.randn(ROWS, size, generator=torch.Generator().manual_seed(0))


def tokens() -> Tensor:
    return torch.randn(ROWS, 6, 8, generator=torch.Generator().manual_seed(1))


def images() -> Tensor:
    return torch.randn(ROWS, 3, 8, 8, generator=torch.Generator().manual_seed(2))


def check(function: Step, inputs: Sequence[Tensor], *modules: nn.Module) -> None:
    graph = capture(Forward(function, *modules).eval(), inputs)
    assert graph.fixed_batch is None  # else the case says nothing
    check_rows(graph, {"batch": ROWS}, "run it whole")


def changed_first(x: Tensor) -> Tensor:
    copy = x.clone()
    copy[0] += 1
    return copy


def filled_first(x: Tensor) -> Tensor:
    zeros = torch.zeros(x.shape[0], 4)
    zeros[0].fill_(1)
    return zeros.add_(x)


def written_through_a_view(x: Tensor) -> Tensor:
    copy = x.clone()
    copy.transpose(0, 1)[0].copy_(x.sum(1).flip(0))
    return copy


def counted_in_place(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0]).float().add_(x[:, 0])


INTERACTING: dict[str, tuple[Step, Sequence[Tensor], Sequence[nn.Module]]] = {
    "similarity": (lambda a, b: a @ b.t(), (vectors(), vectors()), ()),
    "two views in one": (lambda a, m: torch.cat([m(a), m(-a)]), (vectors(),), (nn.Linear(4, 4),)),
    "softmax": (lambda a: a.softmax(0), (vectors(),), ()),
    "softmax moved": (lambda a: a[:, None].transpose(0, 1).softmax(1)[0], (vectors(),), ()),
    "mean": (lambda a: a - a.mean(0), (vectors(),), ()),
    "std": (lambda a: a / a.std(), (vectors(),), ()),
    "normalize": (lambda a: F.normalize(a, dim=0), (vectors(),), ()),
    "range": (lambda a: (a - a.min()) / (a.max() - a.min()), (vectors(),), ()),
    "any": (lambda a: a * (a > 0).any(), (vectors(),), ()),
    "flip": (lambda a: torch.flip(a, [0]), (vectors(),), ()),
    "roll": (lambda a: a.roll(1, 0), (vectors(),), ()),
    "reversed": (lambda a: a[torch.arange(a.shape[0] - 1, -1, -1)], (vectors(),), ()),
    "chosen": (lambda a: a[torch.tensor([2, 1, 0])], (vectors(),), ()),
    "last": (lambda a: a + a[-1], (vectors(),), ()),
    "cumsum": (lambda a: a.cumsum(0), (vectors(),), ()),
    "count": (lambda a: torch.ones_like(a).cumsum(0) * a, (vectors(),), ()),
    "number of rows": (lambda a: a / a.shape[0], (vectors(),), ()),
    "number of ones": (lambda a: a / torch.ones_like(a).sum(), (vectors(),), ()),
    "place": (lambda a: a + torch.arange(a.shape[0])[:, None], (vectors(),), ()),
    "place in place": (counted_in_place, (vectors(),), ()),
    "triangle": (lambda a: a.tril(), (vectors(),), ()),
    "diagonal": (lambda a: a[torch.arange(a.shape[0]), torch.arange(a.shape[0])], (vectors(64),), ()),
    "sort": (lambda a: a.sort(0).values, (vectors(),), ()),
    "order": (lambda a: a.argsort(0), (vectors(),), ()),
    "gather": (lambda a: a.gather(0, a.argmax(0, keepdim=True).expand(a.shape[0], 4)), (vectors(),), ()),
    "repeat": (lambda a: a.repeat_interleave(2, 0)[: a.shape[0]], (vectors(),), ()),
    "twice": (lambda a: a.repeat(2, 1), (vectors(),), ()),
    "einsum": (lambda a: torch.einsum("bd,cd->bc", a, a).sum(1), (vectors(),), ()),
    "index_add": (lambda a: a + torch.zeros_like(a).index_add(0, (a[:, 0] > 0).long(), a), (vectors(),), ()),
    "index_fill": (lambda a: a.index_fill(0, torch.tensor([0]), 1.0), (vectors(),), ()),
    "changed row": (changed_first, (vectors(),), ()),
    "filled row": (filled_first, (vectors(),), ()),
    "view": (written_through_a_view, (vectors(),), ()),
    "load of experts": (lambda a: a + F.one_hot(a.argmax(1), 4).float().mean(0), (vectors(),), ()),
    "sequence first": (lambda a, m: m(a), (tokens(),), (nn.TransformerEncoderLayer(8, 2, 16),)),
    "statistics": (lambda a, m: m(a), (vectors(),), (nn.BatchNorm1d(4, track_running_stats=False),)),
    "no dimension": (lambda a: a.sum(), (vectors(),), ()),
}

_EYE = torch.eye(2, 3)
INDEPENDENT: dict[str, tuple[Step, Sequence[Tensor], Sequence[nn.Module]]] = {
    "linear": (lambda a, m: m(a).relu(), (vectors(),), (nn.Linear(4, 4),)),
    "convolution": (lambda a, m: m(a).flatten(1), (images(),), (nn.Conv2d(3, 4, 3),)),
    "pooling": (lambda a: F.avg_pool2d(F.max_pool2d(a, 2), 2).mean((2, 3)), (images(),), ()),
    "upsampling": (lambda a: F.interpolate(a, scale_factor=2, mode="bilinear"), (images(),), ()),
    "padding": (lambda a: F.pad(a, (1, 1, 1, 1), mode="reflect"), (images(),), ()),
    "patches": (lambda a: F.fold(F.unfold(a, 2, stride=2), (8, 8), 2, stride=2), (images(),), ()),
    "grid": (lambda a: F.grid_sample(a, F.affine_grid(_EYE.expand(a.shape[0], 2, 3), [a.shape[0], 3, 8, 8])),
             (images(),), ()),
    "norms": (lambda a, m, g: g(m(a).transpose(1, 2)), (tokens(),), (nn.LayerNorm(8), nn.GroupNorm(2, 8))),
    "batch norm": (lambda a, m: m(a), (vectors(),), (nn.BatchNorm1d(4),)),
    "last token": (lambda a: a[torch.arange(a.shape[0]), a[:, 0, :6].argmax(-1)], (tokens(),), ()),
    "gather": (lambda a: a.gather(1, a.argmax(1, keepdim=True)), (tokens(),), ()),
    "top": (lambda a: a.topk(2, 1)[0], (tokens(),), ()),
    "two views apart": (lambda a: torch.cat([a, -a]).view(2, a.shape[0], 4).softmax(-1)[1], (vectors(),), ()),
    "heads": (lambda a: a.view(a.shape[0], 6, 2, 4).transpose(1, 2).reshape(a.shape[0] * 2, 6, 4).softmax(-1)
              .view(a.shape[0], 2, 6, 4), (tokens(),), ()),
    "positions": (lambda a: a + torch.arange(6).expand(a.shape[0], 6)[..., None], (tokens(),), ()),
    "repeated constant": (lambda a: a * torch.arange(8.0).repeat(a.shape[0]).view(-1, 8)[:, None], (tokens(),), ()),
    "mask": (lambda a: a.masked_fill(torch.ones(6, 8).tril() == 0, -1e9).softmax(-1), (tokens(),), ()),
    "attention": (lambda a: F.scaled_dot_product_attention(a, a, a, is_causal=True), (tokens(),), ()),
    "encoder": (lambda a, m: m(a), (tokens(),), (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),)),
    "sequence": (lambda a, m: m(a.transpose(0, 1))[0].transpose(0, 1), (tokens(),), (nn.LSTM(8, 8),)),
    "gru": (lambda a, m: m(a)[1][-1], (tokens(),), (nn.GRU(8, 8, batch_first=True, bidirectional=True),)),
    "einsum": (lambda a: torch.einsum("...ij,...kj->...ik", a, a), (tokens(),), ()),
    "scatter": (lambda a: torch.zeros(a.shape[0], 6, 8).scatter(1, a.argmax(1, keepdim=True), 1.0), (tokens(),), ()),
    "columns in place": (lambda a: torch.zeros(a.shape[0], 4).add_(a), (vectors(),), ()),
    "embedding": (lambda i, m: m(i).sum(1), (torch.arange(24).view(4, 6) % 5,), (nn.Embedding(5, 3),)),
    "classes": (lambda i: F.one_hot(i, 5).float() @ torch.ones(5, 3), (torch.arange(24).view(4, 6) % 5,), ()),
}  # fmt: skip


@pytest.mark.parametrize("case", INTERACTING)
def test_rows_that_interact_are_found(case: str) -> None:
    function, inputs, modules = INTERACTING[case]
    with pytest.raises(UsageError):
        check(function, inputs, *modules)


@pytest.mark.parametrize("case", INDEPENDENT)
def test_independent_rows_may_be_cut(case: str) -> None:
    function, inputs, modules = INDEPENDENT[case]
    check(function, inputs, *modules)


def test_the_operation_and_its_module_are_named() -> None:
    model = nn.Sequential()
    model.add_module("first", nn.Linear(4, 4))
    model.add_module("sm", nn.Softmax(0))
    model.add_module("last", nn.Linear(4, 4))
    mixing = find_mixing(capture(model.eval(), (vectors(),)), {})
    assert mixing is not None
    assert (mixing.module, mixing.operator) == ("sm", "softmax")


def test_training_allows_batch_statistics_and_losses() -> None:
    model = Forward(lambda a, m: (m(a).sum(), m(a)), nn.BatchNorm1d(4)).train()
    graph = capture(model, (vectors(),))
    check_rows(graph, {}, "", trains=True)
    assert find_mixing(graph, {}) is not None
    other = capture(Forward(lambda a, m: m(a).softmax(0), nn.BatchNorm1d(4)).train(), (vectors(),))
    with pytest.raises(UsageError):
        check_rows(other, {}, "", trains=True)


# Steps from [rows, 3, 4] to [rows, 3, 4], of which some mix rows
STEPS: dict[str, Step] = {
    "double": lambda x: x * 2 + 1,
    "tanh": lambda x: x.tanh(),
    "center rows": lambda x: x - x.mean(0),
    "center": lambda x: x - x.mean((1, 2), keepdim=True),
    "softmax 0": lambda x: x.softmax(0),
    "softmax 1": lambda x: x.softmax(1),
    "flip 0": lambda x: x.flip(0),
    "flip 1": lambda x: x.flip(1),
    "regroup": lambda x: x.transpose(0, 1).reshape(x.shape[0], 3, 4),
    "regroup back": lambda x: x.reshape(x.shape[0], 4, 3).transpose(1, 2),
    "merge": lambda x: (x.reshape(x.shape[0] * 3, 4) * torch.arange(4.0)).view(x.shape[0], 3, 4),
    "merge wrong": lambda x: x.permute(1, 0, 2).reshape(-1, 4).view(x.shape[0], 3, 4),
    "cumsum": lambda x: x.cumsum(0),
    "cumsum 1": lambda x: x.cumsum(1),
    "product": lambda x: x @ x.transpose(1, 2) @ x,
    "similar": lambda x: torch.einsum("bij,cij->bc", x, x).softmax(-1).sum(1)[:, None, None] * x,
    "add first": lambda x: x + x[:1],
    "add column": lambda x: x + x[:, :1],
    "stack": lambda x: torch.stack([x[:, 1], x[:, 0], x[:, 2]], 1),
    "cat": lambda x: torch.cat([x[:, 1:], x[:, :1]], 1),
    "halves": lambda x: torch.cat([x, -x]).view(2, x.shape[0], 3, 4).sum(0) + x,
    "swapped": lambda x: torch.cat([x, 2 * x]).view(x.shape[0], 2, 3, 4)[:, 0],
    "in place": lambda x: x.clone().mul_(2),
    "sorted": lambda x: x.sort(2).values,
    "by row": lambda x: x[torch.arange(x.shape[0]), x[:, :, 0].argmax(1)][:, None] + x,
}


def depends_on_others(model: nn.Module, x: Tensor) -> bool:
    """Change one row at a time, and see whether another row of the output changes; also run the rows by themselves."""
    with torch.no_grad():
        whole = model(x)
        for row in range(ROWS):
            other = x.clone()
            other[row] += 3
            rest = [index for index in range(ROWS) if index != row]
            if not torch.allclose(model(other)[rest], whole[rest], atol=1e-5):
                return True
        return not torch.allclose(torch.cat([model(part) for part in x.split(2)]), whole, atol=1e-5)


@settings(max_examples=examples(25))
@given(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4))
def test_independent_rows_compute_alike_alone(names: list[str]) -> None:
    def forward(x: Tensor) -> Tensor:
        for name in names:
            x = STEPS[name](x)
        return x

    model = Forward(forward).double().eval()
    x = torch.randn(ROWS, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    graph = capture(model, (x,))
    if graph.fixed_batch is None and find_mixing(graph, {}) is None:
        assert not depends_on_others(model, x)


class Similarity(nn.Module):
    """Logits of each of one batch's rows against each of another's, as CLIP returns them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        logits: Tensor = self.first(a) @ self.second(b).t()
        return logits


def test_a_stream_refuses_to_cut_a_batch_whose_rows_interact() -> None:
    model, inputs = Similarity().eval(), (vectors(), vectors() + 1)
    with Pipeline(model, inputs, stages=1) as pipe:
        with pytest.raises(UsageError, match="microbatch_size=4"):
            pipe(*inputs, microbatch_size=2)
        with torch.no_grad():
            torch.testing.assert_close(pipe(*inputs, microbatch_size=4), model(*inputs))
            (streamed,) = pipe.stream([inputs])
            torch.testing.assert_close(streamed, model(*inputs))


def test_training_refuses_to_cut_a_batch_whose_rows_interact() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(0), nn.Linear(4, 3)).train()
    x, y = vectors(), torch.arange(ROWS) % 3
    with Pipeline(model, x, microbatches=2) as pipe, pytest.raises(UsageError, match="softmax"):
        pipe.train_step(x, y, F.cross_entropy)
    with Pipeline(model, x, microbatches=1) as pipe:
        loss = pipe.train_step(x, y, F.cross_entropy)
        torch.testing.assert_close(loss.float(), F.cross_entropy(model(x), y))
        with torch.no_grad():
            expected = model.eval()(x)
        torch.testing.assert_close(pipe(x), expected)
