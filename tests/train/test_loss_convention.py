"""The loss of a batch is the one that plain PyTorch has for it, however the batch is cut, or it is refused."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import penstock
from penstock.errors import PenstockError, RunError, UsageError
from penstock.train.captured import Captured
from tests.learners import sgd
from tests.trainers import errors, train

LossFunction = Callable[[Any, Any], Any]
WEIGHTS = torch.tensor([0.2, 1.0, 3.0])
WAYS = [
    (1, {"microbatches": 4}), (1, {"microbatches": 8}), (2, {"stages": 2, "microbatches": 4}),
    (2, {"replicas": 2, "stages": 1, "microbatches": 2}), (1, {"microbatches": 1}),
]  # fmt: skip


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).train()


def data() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    classes = torch.randint(3, (8,), generator=generator)
    uneven, without = classes.clone(), classes.clone()
    uneven[[0, 3, 4, 5]] = -100
    without[:2] = -100
    values = torch.randn(8, 3, generator=generator)
    return {
        "x": torch.randn(8, 4, generator=generator), "classes": classes, "uneven": uneven, "without": without,
        "values": values, "binary": (values > 0).float(),
    }  # fmt: skip


def each(output: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    counts = labels >= 0
    return F.cross_entropy(output, labels.clamp(min=0), reduction="none"), counts


def masked(output: Tensor, labels: Tensor) -> Tensor:
    loss, counts = each(output, labels)
    return (loss * counts).sum() / counts.sum()


def masked_item(output: Tensor, labels: Tensor) -> Tensor:
    loss, counts = each(output, labels)
    return (loss * counts).sum() / counts.sum().item()


def masked_clamped(output: Tensor, labels: Tensor) -> Tensor:
    loss, counts = each(output, labels)
    return (loss * counts).sum() / counts.sum().clamp(min=1)


def selected(output: Tensor, labels: Tensor) -> Tensor:
    loss, counts = each(output, labels)
    return loss[counts].mean()


def to_one_hot(output: Tensor, labels: Tensor) -> Tensor:
    """Divides by the number of rows, which is also a label that `one_hot` looks at."""
    targets = F.one_hot(labels, output.shape[1]).to(output.dtype).softmax(-1)
    return F.kl_div(output.log_softmax(-1), targets, reduction="batchmean")


def sum_and_count(output: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(output, labels, reduction="sum"), (labels >= 0).sum()


def plain(loss_fn: LossFunction, x: Tensor, labels: Tensor) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one step of PyTorch over the whole batch."""
    alone = model()
    loss = loss_fn(alone(x), labels)
    loss = loss[0] / loss[1] if isinstance(loss, tuple) else loss
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("labels", "loss_fn"),
    [
        ("classes", F.cross_entropy),
        ("classes", nn.CrossEntropyLoss(reduction="sum")),
        ("classes", nn.CrossEntropyLoss(weight=WEIGHTS)),
        ("classes", nn.MultiMarginLoss()),
        ("uneven", F.cross_entropy),
        ("uneven", nn.CrossEntropyLoss(label_smoothing=0.1)),
        ("uneven", nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1)),
        ("uneven", lambda output, labels: F.nll_loss(output.log_softmax(-1), labels)),
        ("uneven", lambda output, labels: F.cross_entropy(output, labels) / 4),
        ("uneven", lambda output, labels: F.cross_entropy(output, labels) + F.cross_entropy(-output, labels)),
        ("uneven", sum_and_count),
        ("uneven", masked),
        ("uneven", masked_item),
        ("uneven", selected),
        ("without", F.cross_entropy),
        ("without", nn.CrossEntropyLoss(label_smoothing=0.1)),
        ("without", masked_clamped),
        ("values", F.mse_loss),
        ("values", nn.L1Loss(reduction="sum")),
        ("values", lambda output, labels: F.kl_div(output.log_softmax(-1), labels.softmax(-1), reduction="batchmean")),
        ("values", lambda output, labels: F.cross_entropy(output, labels.softmax(-1))),
        ("classes", to_one_hot),
        ("values", lambda output, labels: F.mse_loss(output, labels) + output.pow(2).mean()),
        ("binary", nn.BCEWithLogitsLoss()),
        ("binary", nn.BCEWithLogitsLoss(reduction="sum", pos_weight=torch.tensor(2.0))),
    ],
)
def test_loss_and_gradients_are_those_of_the_whole_batch(labels: str, loss_fn: LossFunction) -> None:
    given = data()
    loss, gradients = plain(loss_fn, given["x"], given[labels])
    for size, way in WAYS:
        captured = Captured(model(), (given["x"],))
        losses, found, _ = train(captured, size, [(given["x"], given[labels])], sgd, loss_fn, **way)
        assert losses[0] == pytest.approx(loss, rel=1e-5), way
        assert max(errors(gradients, found).values()) < 1e-5, way


def accuracy(output: Tensor, labels: Tensor) -> Tensor:
    return (output.argmax(-1) == labels).float().mean()


def mixed(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output, labels) + output.pow(2).mean()


def contrastive(output: Tensor, _labels: Tensor) -> Tensor:
    return F.cross_entropy(output @ output.T, torch.arange(len(output)))


@pytest.mark.parametrize(
    ("labels", "loss_fn"),
    [
        ("classes", lambda output, labels: (F.cross_entropy(output, labels), accuracy(output, labels))),
        ("classes", lambda output, labels: (F.cross_entropy(output, labels), output)),
        ("classes", lambda output, labels: [F.cross_entropy(output, labels)]),
        ("classes", lambda output, labels: {"loss": F.cross_entropy(output, labels)}),
        ("classes", lambda output, labels: F.cross_entropy(output, labels, reduction="none")),
    ],
)
def test_invalid_loss_values_are_refused(labels: str, loss_fn: LossFunction) -> None:
    given = data()
    for size, way in WAYS:
        with pytest.raises(UsageError, match=r"\(sum, count\)"):
            train(Captured(model(), (given["x"],)), size, [(given["x"], given[labels])], sgd, loss_fn, **way)


@pytest.mark.parametrize(
    ("labels", "loss_fn"),
    [
        ("uneven", mixed),
        ("classes", contrastive),
        ("classes", lambda output, labels: F.cross_entropy(output, labels).exp()),
        ("classes", lambda output, labels: F.cross_entropy(output, labels) * labels.numel() ** 0.5),
        ("classes", lambda output, labels: F.cross_entropy(F.dropout(output), labels)),
        ("values", lambda output, labels: (output - output.mean(0) - labels).pow(2).mean()),
    ],
)
def test_a_loss_without_a_value_for_a_batch_that_is_cut_is_refused(labels: str, loss_fn: LossFunction) -> None:
    given = data()
    for size, way in WAYS[:4]:
        with pytest.raises(UsageError, match="microbatches=1"):
            train(Captured(model(), (given["x"],)), size, [(given["x"], given[labels])], sgd, loss_fn, **way)
    torch.manual_seed(0)
    loss, _ = plain(loss_fn, given["x"], given[labels])
    torch.manual_seed(0)
    batches = [(given["x"], given[labels])]
    losses, _, _ = train(Captured(model(), (given["x"],)), 1, batches, sgd, loss_fn, microbatches=1)
    assert losses[0] == pytest.approx(loss, rel=1e-5) or "dropout" in loss_fn.__code__.co_names


def test_weights_that_are_even_within_microbatches_only_are_refused() -> None:
    given = data()
    labels = given["classes"].view(8, 1).repeat(1, 4)
    labels[4:, :2] = -100  # half of the labels of each row of the second microbatch

    def loss_fn(output: Tensor, labels: Tensor) -> Tensor:
        return mixed(output.unsqueeze(-1).expand(-1, -1, 4), labels)

    with penstock.Pipeline(model(), given["x"], microbatches=2) as pipe:  # noqa: SIM117
        with pytest.raises(UsageError, match="microbatches=1"):
            pipe.train_step(given["x"], labels, loss_fn)


def test_a_sum_is_found_where_outputs_are_0_at_first() -> None:
    given, begins = data(), model()
    with torch.no_grad():
        for parameter in list(begins.parameters())[2:]:
            parameter.zero_()
    alone = copy.deepcopy(begins)
    alone(given["x"]).sum().backward()
    with penstock.Pipeline(begins, given["x"], microbatches=4) as pipe:
        pipe.train_step(given["x"], None, lambda output, _: output.sum())
        found = {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}
    expected = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    assert len(found) == 4
    assert max(errors(expected, found).values()) < 1e-5


def test_training_goes_on_after_a_loss_that_was_refused() -> None:
    given = data()
    with penstock.Pipeline(model(), given["x"], microbatches=4) as pipe:
        with pytest.raises(UsageError):
            pipe.train_step(given["x"], given["classes"], contrastive)
        assert all(p.grad is None for _, p in pipe.named_parameters())
        for reduction in ("mean", "sum"):
            loss, _ = plain(partial(F.cross_entropy, reduction=reduction), given["x"], given["classes"])
            found = pipe.train_step(given["x"], given["classes"], partial(F.cross_entropy, reduction=reduction))
            assert float(found) == pytest.approx(loss, rel=1e-5)


def test_a_batch_without_labels_is_refused_with_its_reason() -> None:
    given = data()
    with penstock.Pipeline(model(), given["x"], microbatches=4) as pipe:
        with pytest.raises(RunError, match="no label"):
            pipe.train_step(given["x"], torch.full((8,), -100), F.cross_entropy)
        with pytest.raises(PenstockError):
            pipe.evaluate(given["x"], torch.full((8,), -100), F.cross_entropy)


@pytest.mark.parametrize(
    ("labels", "loss_fn"),
    [
        ("uneven", F.cross_entropy),
        ("classes", nn.CrossEntropyLoss(reduction="sum")),
        ("values", F.mse_loss),
        ("classes", accuracy),
    ],
)
def test_evaluation_has_the_value_of_the_whole_batch(labels: str, loss_fn: LossFunction) -> None:
    given = data()
    with penstock.Pipeline(model(), given["x"], microbatches=4) as pipe, torch.no_grad():
        found = pipe.evaluate(given["x"], given[labels], loss_fn)
        assert found == pytest.approx(float(loss_fn(model()(given["x"]), given[labels])), rel=1e-5)
        with pytest.raises(UsageError, match="microbatches=1"):
            pipe.evaluate(given["x"], given["classes"], contrastive)


def test_random_numbers_are_drawn_as_without_a_probe() -> None:
    given = data()
    with penstock.Pipeline(model(), given["x"], microbatches=4) as pipe:
        before = torch.get_rng_state()
        pipe.train_step(given["x"], given["classes"], F.cross_entropy)
        assert torch.equal(before, torch.get_rng_state())
