"""Training tasks: a model in training mode, its data, its loss and its metrics."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from penstock.errors import DataError, UsageError
from penstock.recipes.settings import FitSettings
from penstock.terminal.progress import working
from penstock.train.loss_convention import LossFunction
from penstock.zoo.data.preprocess import PREPROCESS
from penstock.zoo.models.models import ZooModel, load_model
from penstock.zoo.weights.fit import KEY, check_weights
from penstock.zoo.weights.weight_files import FileWeights
from penstock.zoo.weights.weights import JoinedWeights, TensorWeights, Weights

SHARE_KEPT = 10  # every tenth row is kept for validation
# runs a search for damaged rows on one process, and returns its result on all
Agree = Callable[[Callable[[], list[str]]], list[str]]


class Batches(Protocol):
    """The order of rows, for data with a specific order."""

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the order."""

    def __iter__(self) -> Iterator[list[int]]:
        """Return the rows of each batch."""

    def __len__(self) -> int:
        """Count the batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A model and its training task.

    `example` is a call with two rows, `dynamic` has the sizes other than the batch that vary. `units_per_row` counts
    images, sentences or tokens. `loss_fn` and `accuracy` return (sum, count).
    """

    unit: str
    module: nn.Module
    weights: Weights
    example: tuple[tuple[Any, ...], Mapping[str, Any]]
    training: Dataset[Any]
    validation: Dataset[Any]
    loss_fn: LossFunction
    accuracy: LossFunction
    dynamic: Mapping[str, Mapping[str | int, int]] | None = None
    units_per_row: int = 1
    collate: Callable[[list[Any]], Any] | None = None
    batches: Callable[[Dataset[Any], int, bool], Batches] | None = None
    new_tensors: Sequence[str] = field(default_factory=tuple)  # tensors that the given weights lack
    classes: Sequence[str] = ()  # names, in the order of the outputs
    metadata: Mapping[str, str] = field(default_factory=dict)  # the model's metadata, from the weights' file
    notes: Sequence[str] = ()  # what the data leaves out
    save_beside: Callable[[Path], None] | None = None  # saves the configuration and tokenizer of a text model


def logits_of(output: Any) -> Tensor:
    """Return the logits in a model's output; raises `UsageError` if there are none."""
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        raise UsageError(f"the model returns a {type(output).__name__} without logits; use a classification model")
    return logits


def scores_of(module: nn.Module, inputs: Any) -> Tensor:
    """Return the logits of a model for inputs, which may be a dict by name."""
    return logits_of(module(**inputs) if isinstance(inputs, Mapping) else module(inputs))


def class_loss(output: Any, labels: Tensor) -> tuple[Tensor, int]:
    """Return the cross entropy of classes, summed over rows."""
    logits = logits_of(output)
    return functional.cross_entropy(logits.float(), labels, reduction="sum"), len(labels)


def class_accuracy(output: Any, labels: Tensor) -> tuple[Tensor, int]:
    """Count the rows that are classified correctly."""
    return (logits_of(output).argmax(-1) == labels).sum().double(), len(labels)


def load_for(settings: FitSettings, name: str, head: Any = None) -> tuple[ZooModel, Weights, list[str]]:
    """Load a model with a head for the data; return the model, its weights, and the names of new tensors.

    Given weights may be from a model with another head: tensors that are missing or have another shape are initialized.
    Weights of a narrowed model are used unchanged.
    """
    path = Path(settings.weights) if settings.weights else None
    metadata = FileWeights(path).metadata if path is not None else {}
    load = partial(load_model, seed=settings.seed, preprocess=settings.preprocess or metadata.get(PREPROCESS))
    if KEY in metadata:
        zoo = load(name, weights=path, head=head)
        return zoo, zoo.weights, []
    zoo = load(name, head=head)
    if settings.weights is None and not settings.pretrained:
        return zoo, zoo.weights, []
    other = load(settings.model, weights=path, pretrained=settings.pretrained)
    given = other.weights
    zoo = replace(zoo, class_names=other.class_names or zoo.class_names, is_random=False)
    known = given.names()
    shapes = {n: (tuple(p.shape), p.dtype) for n, p in zoo.module.named_parameters(remove_duplicate=False)}
    new = [n for n, (shape, _) in shapes.items() if n not in known or given.shape(n) != shape]
    if len(new) == len(shapes):
        raise UsageError(f"no tensor of the given weights fits {name}; give the weights of this model")
    buffers = dict(zoo.module.named_buffers(remove_duplicate=False))
    kept = [n for n in known if (n in shapes and n not in new) or n in buffers]
    fitting = check_weights(given, {n: (given.shape(n), given.dtype(n)) for n in kept})
    return zoo, JoinedWeights(fitting, TensorWeights(buffers), *([zoo.initial] if new else [])), new


def metadata_of(settings: FitSettings) -> dict[str, str]:
    """Return a narrowed model's metadata from its weights' file, to be saved with the trained model."""
    found = FileWeights(Path(settings.weights)).metadata if settings.weights else {}
    return {KEY: found[KEY]} if KEY in found else {}


def held_out(rows: Sequence[int], every: int | None) -> tuple[list[int], list[int]]:
    """Divide rows into the rows to use and every n-th row, which is left out.

    >>> held_out(range(6), 3)
    ([0, 1, 3, 4], [2, 5])
    """
    if every is None:
        return list(rows), []
    return [row for place, row in enumerate(rows) if (place + 1) % every], list(rows[every - 1 :: every])


class RowDataset(Dataset[Any]):
    """Selected rows of a sequence, each created on access."""

    def __init__(self, rows: Sequence[int], make: Callable[[int], Any]) -> None:
        self._rows, self._make = rows, make

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self._make(self._rows[index])


def spread(num_rows: int, wanted: int | None) -> Sequence[int]:
    """Choose `wanted` evenly spaced rows, since files are often sorted by class.

    >>> spread(10, 4)
    [0, 2, 5, 7]
    """
    if wanted is None or wanted >= num_rows:
        return range(num_rows)
    return [index * num_rows // wanted for index in range(wanted)]


def keep_some(num_rows: int) -> tuple[list[int], list[int]]:
    """Divide rows into training rows and every tenth row, which is kept for validation.

    >>> keep_some(11)
    ([0, 1, 2, 3, 4, 5, 6, 7, 8, 10], [9])

    Raises `DataError` if there are too few rows to keep any.
    """
    if num_rows < SHARE_KEPT:
        raise DataError(
            f"every {SHARE_KEPT}th row is kept for validation; got only {num_rows} rows; give more rows, or "
            "validation data with --validation"
        )
    return held_out(range(num_rows), SHARE_KEPT)


TEMPERATURE = 2.0
_PART = 0.5  # weight of the teacher's part in the loss
_BATCH = 64


def taught(task: Task, name: str, teacher: Path) -> Task:
    """Return a classification task whose training rows have a teacher's logits after their labels.

    The loss is half the loss of the labels plus half the Kullback-Leibler divergence from the teacher's classes at a
    temperature of 2, times the square of the temperature (Hinton et al., Distilling the Knowledge in a Neural Network,
    2015).

    Raises `ModelError` if the weights do not fit, `UsageError` if the teacher has other classes.
    """
    model = load_model(name, weights=teacher, whole=True).module.eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    training = _Taught(task.training, model)
    return replace(task, training=training, loss_fn=taught_loss, accuracy=taught_accuracy)


class _Taught(Dataset[Any]):
    """Rows whose label is a vector: the class, then the teacher's logits, computed once for all rows."""

    def __init__(self, rows: Any, teacher: torch.nn.Module) -> None:
        self._rows = rows
        found: list[Tensor] = []
        with working("computing the teacher's logits"), torch.no_grad():
            for inputs, _ in DataLoader(rows, batch_size=_BATCH):
                found.append(scores_of(teacher, inputs).float())
        self._logits = torch.cat(found)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        inputs, label = self._rows[index]
        return inputs, torch.cat([torch.tensor([float(label)]), self._logits[index]])


def taught_loss(output: Any, targets: Tensor) -> tuple[Tensor, int]:
    """Return the summed loss of labels and teacher, or only of labels if there is no teacher."""
    if targets.dim() == 1:
        return class_loss(output, targets)
    logits = logits_of(output).float()
    labels, wanted = targets[:, 0].long(), targets[:, 1:]
    if wanted.shape != logits.shape:
        raise UsageError(f"the model must have the teacher's {wanted.shape[1]} classes; got {logits.shape[1]}")
    own, _ = class_loss(logits, labels)
    told = functional.kl_div(
        (logits / TEMPERATURE).log_softmax(-1), (wanted / TEMPERATURE).softmax(-1), reduction="sum"
    )
    return (1 - _PART) * own + _PART * TEMPERATURE**2 * told, len(targets)


def taught_accuracy(output: Any, targets: Tensor) -> tuple[Tensor, int]:
    """Count the rows that are classified correctly."""
    return class_accuracy(output, targets if targets.dim() == 1 else targets[:, 0].long())
