"""A model's own loss over a batch that is cut is that of the whole batch, or it is refused."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from penstock.errors import UsageError
from penstock.train.captured import Captured
from tests.fewer import long
from tests.learners import sgd
from tests.trainers import errors, train

WAYS = [
    (1, {"microbatches": 4}),
    (2, {"replicas": 2, "stages": 1, "microbatches": 2}),
    (1, {"microbatches": 4, "checkpointing": True}),
    (1, {"microbatches": 1}),
]


class Lossy(nn.Module):
    """A model that returns a loss, as a function of its output and labels makes it."""

    def __init__(self, loss_fn: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self._loss_fn = loss_fn

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self._loss_fn(self.layer(x), y)


def inputs(*, ignored: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)
    if ignored:
        y[[0, 3, 4, 5]] = -100
    return x, y


def check(model: nn.Module, given: Any, ways: list[tuple[int, dict[str, Any]]]) -> None:
    alone = copy.deepcopy(model)
    output = alone(**given) if isinstance(given, dict) else alone(*given)
    loss = output[0] if isinstance(output, tuple) else getattr(output, "loss", output)
    loss.backward()
    gradients = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    for size, way in ways:
        captured = Captured(copy.deepcopy(model), *(((), given) if isinstance(given, dict) else (given,)))
        losses, found, _ = train(captured, size, [(given, None)], sgd, None, **way)
        assert losses[0] == pytest.approx(float(loss.detach()), rel=1e-5), way
        assert max(errors(gradients, found).values()) < 1e-5, way


@pytest.mark.parametrize(
    ("ignored", "loss_fn"),
    [
        (False, lambda output, y: F.cross_entropy(output, y, reduction="sum")),
        (False, lambda output, y: (((output - y.unsqueeze(1)) ** 2).mean(0).sum() * 2, output)),
        (False, lambda output, _: F.kl_div(output.log_softmax(1), output.detach().softmax(1), reduction="batchmean")),
        (False, lambda output, y: F.cross_entropy(output, y) + F.mse_loss(output, output.detach() / 2)),
        (True, F.cross_entropy),
        (True, lambda output, y: F.cross_entropy(output, y, label_smoothing=0.1) / 3),
        (True, lambda output, y: F.nll_loss(output.log_softmax(1), y)),
    ],
)
def test_loss_and_gradients_are_those_of_the_whole_batch(ignored: bool, loss_fn: Any) -> None:
    torch.manual_seed(0)
    check(Lossy(loss_fn).train(), inputs(ignored=ignored), WAYS)


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda output, y: (output.sum(1) * (y >= 0)).sum() / (y >= 0).sum(),
        lambda output, y: F.cross_entropy(output, y) + F.mse_loss(output, output.detach() / 2),
        lambda output, _: F.cross_entropy(output @ output.T, torch.arange(output.shape[0])),
        lambda output, y: F.cross_entropy(output, y).exp(),
        lambda output, y: F.cross_entropy(output, y) + output.sum(),
    ],
)
def test_a_loss_without_a_value_for_a_batch_that_is_cut_is_refused(loss_fn: Any) -> None:
    given = inputs(ignored=True)
    for size, way in WAYS[:3]:
        with pytest.raises(UsageError, match=r"\(sum, count\)"):
            train(Captured(Lossy(loss_fn).train(), given), size, [(given, None)], sgd, None, **way)
    torch.manual_seed(0)
    check(Lossy(loss_fn).train(), given, WAYS[3:])


@pytest.mark.parametrize("name", ["gpt2", long("llama")])
def test_language_models_of_hugging_face_with_uneven_labels(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if name == "gpt2":
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
            n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=16, use_cache=False, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        ))  # fmt: skip
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            num_hidden_layers=2, hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=2,
            vocab_size=50, use_cache=False,
        ))  # fmt: skip
    tokens = torch.randint(50, (8, 6))
    labels = tokens.clone()
    for row in range(8):
        labels[row, :row] = -100
    labels[6:] = -100  # a microbatch without labels
    two_stages = (2, {"stages": 2, "microbatches": 4})
    check(model.train(), {"input_ids": tokens, "labels": labels}, [two_stages, *WAYS[:2]])
