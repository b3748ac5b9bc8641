"""Training tasks from a model's name and data: image classification, language modelling, sentence classification."""

import copy
import posixpath
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from penstock.errors import DataError, UsageError
from penstock.recipes.images import check_images, check_order, path_of
from penstock.recipes.settings import FitSettings
from penstock.recipes.tasks import (
    SHARE_KEPT,
    Agree,
    RowDataset,
    Task,
    class_accuracy,
    class_loss,
    held_out,
    keep_some,
    load_for,
    logits_of,
    spread,
    taught,
)
from penstock.zoo.data.image_names import open_images
from penstock.zoo.data.image_set import ImageSet
from penstock.zoo.data.preprocess import Transform, write_preprocess
from penstock.zoo.data.texts import CLS, PAD, Sentences, read_tokenizer, read_trees, train_tokenizer
from penstock.zoo.models.language import load_tokenizer
from penstock.zoo.models.models import ZooModel, classes_in, parse_hf, with_classes
from penstock.zoo.optional import optional_import
from penstock.zoo.weights.weight_files import write_classes

_POOL = 50  # batches whose rows are sorted together


def image_task(settings: FitSettings, agree: Agree) -> Task:
    """Prepare image classification; raises `DataError` for images without labels, `UsageError` for other models."""
    opened, notes = open_parts(settings)
    (path, images), *others = opened
    name = with_classes(settings.model, len(images.classes))
    zoo, weights, new = load_for(settings, name, "images" if name.startswith("hf:") else None)
    transform, num_classes = zoo.pictures(), len(images.classes)
    if 0 < zoo.num_classes < num_classes:
        raise UsageError(
            f"{settings.model} has {zoo.num_classes} outputs, but {settings.data} has {num_classes} classes; give the "
            f"model the option num_classes={num_classes}, as an argument of a function"
        )
    if not new:  # the head is the given one
        check_order(zoo, images)
    key, classes = next(iter(zoo.example_kwargs), None), classes_of(zoo, images)
    make = ImageReader(images, transform, key, classes)
    chosen, _ = held_out(spread(len(images), settings.num_rows), settings.hold_out)
    read = [(path, images, chosen), *((path, other, list(range(len(other)))) for path, other in others)]
    find = partial(check_images, read, settings.folder, max(zoo.picture_shape), skip=settings.skip_damaged)
    chosen, *kept = _readable(read, agree(find))
    if others:
        training = RowDataset(chosen, make)
        validation = RowDataset(kept[0], ImageReader(others[0][1], transform, key, classes))
    else:
        training, validation = (RowDataset([chosen[row] for row in part], make) for part in keep_some(len(chosen)))
    task = Task(
        unit="images", module=zoo.module.train(), weights=weights, example=(zoo.example_args, zoo.example_kwargs),
        training=training, validation=validation, loss_fn=class_loss, accuracy=class_accuracy, new_tensors=new,
        classes=classes, notes=notes,
        metadata=write_classes(classes if classes_in(name) in (None, len(classes)) else None)
        | write_preprocess(zoo.preprocess),
    )  # fmt: skip
    return task if settings.teacher is None else taught(task, name, Path(settings.teacher))


def _readable(sets: Sequence[tuple[str, ImageSet, list[int]]], damaged: Sequence[str]) -> list[list[int]]:
    """Return the rows of each set that are not damaged; raises `DataError` if none is left, or none of a class."""
    if not damaged:
        return [rows for _, _, rows in sets]
    names = set(damaged)
    found = [[row for row in rows if path_of(path, images, row) not in names] for path, images, rows in sets]
    for (path, images, rows), left in zip(sets, found, strict=True):
        lost = {images.label(row) for row in rows} - {images.label(row) for row in left}
        if not left or (lost and left is found[0]):  # without validation images of a class it is still learned
            first = images.classes[min(label or 0 for label in lost)]
            raise DataError(f"no image of the class {first} of {path} can be read; copy its images again")
    return found


def classes_of(zoo: ZooModel, images: ImageSet) -> Sequence[str]:
    """Return the classes of images in the order of the model's outputs; if the weights have the same, their order."""
    known = zoo.class_names or ()
    return known if len(known) == len(images.classes) and set(known) == set(images.classes) else images.classes


def open_parts(settings: FitSettings) -> tuple[list[tuple[str, ImageSet]], list[str]]:
    """Open the images to train on and, if there are any, those to validate on, with their paths and notes.

    A folder that has the folders train and val has both.
    """
    data, validation, notes = settings.data, settings.validation, []
    images = open_images(data)
    parts = {name.lower(): name for name in images.classes}
    first = next((parts[name] for name in ("train", "training") if name in parts), None)
    if images.is_parts and first is not None and Path(data).is_dir():
        folder = Path(data, posixpath.commonpath(images.names))
        second = next((parts[name] for name in ("val", "valid", "validation") if name in parts), None)
        data = str(folder / first)
        if validation is None and second is not None:
            validation = str(folder / second)
        unused = [name for name in images.classes if str(folder / name) not in (data, validation)]
        notes.append(
            f"training on {data}, validating on {validation or 'every tenth of its images'}"
            + (f"; {' and '.join(unused)} is not used" if unused else "")
        )
        images = open_images(data)
    opened = [(data, images)]
    if validation is not None:
        opened.append((validation, open_images(validation)))
    for path, found in opened:
        check_labelled(found, path)
        if found.left_out:
            notes.append(f"{path}: left out {found.left_out}")
    return opened, notes


def check_labelled(images: ImageSet, path: str) -> None:
    """Check that every image has a label, and every label an image; raises `DataError`."""
    if images.is_parts:
        raise DataError(
            f"the folders {' and '.join(images.classes)} of {path} are parts of a data set, not classes; give one of "
            "them, unpacked if they are in an archive"
        )
    if absent := set(range(len(images.classes))) - set(images.labels) if images.by_folder else set():
        raise DataError(
            f"the class {images.classes[min(absent)]} of {path} has no images; remove its folder, or add images"
            + (f" (left out: {images.left_out})" if images.left_out else "")
        )
    unlabelled = next((images.name(i) for i in range(len(images)) if images.label(i) is None), None)
    if unlabelled is not None:
        raise DataError(f"{path} has images without a label, first {unlabelled}; put each class into a folder")


class ImageReader:
    """Reads an image as the model's input, with its label; labels of another set are matched by class name."""

    def __init__(self, images: ImageSet, transform: Transform, key: str | None, classes: Sequence[str] | None) -> None:
        self._images, self._transform, self._key = images, transform, key
        unknown = sorted(set(images.classes) - set(classes or images.classes))
        if unknown:
            raise DataError(
                f"the class {unknown[0]} is in the validation or test images but not in the training images"
            )
        self._label = [list(classes or images.classes).index(name) for name in images.classes]

    def __call__(self, index: int) -> tuple[Any, int]:
        label = self._images.label(index)
        pixels = self._transform(self._images.read(index))
        return ({self._key: pixels} if self._key else pixels), self._label[label or 0]


def language_task(settings: FitSettings) -> Task:
    """Prepare language modelling; raises `DataError` if the text is too short, `UsageError` for other models."""
    zoo, weights, new = load_for(settings, settings.model, "language")
    text = read_text(settings.data)
    config = text_config(zoo, settings.model)
    positions = getattr(config, "max_position_embeddings", None) or settings.length
    if settings.length > positions:
        raise UsageError(
            f"{settings.model} takes at most {positions} tokens, not {settings.length}; lower it with --set length=N"
        )
    known = find_tokenizer(settings.model)
    tokenizer = known or train_tokenizer(text.splitlines(keepends=True), config.vocab_size)
    if settings.validation:
        blocks, kept = _blocks(tokenizer, text, settings), _blocks(tokenizer, read_text(settings.validation), settings)
    else:
        edge = len(text) * (SHARE_KEPT - 1) // SHARE_KEPT
        blocks, kept = _blocks(tokenizer, text[:edge], settings), _blocks(tokenizer, text[edge:], settings)
    blocks = blocks[: settings.num_rows] if settings.num_rows else blocks
    return Task(
        unit="tokens", module=zoo.module.train(), weights=weights, example=((), {"input_ids": blocks[:1].repeat(2, 1)}),
        training=_rows(blocks), validation=_rows(kept), loss_fn=next_token_loss, accuracy=next_token_accuracy,
        units_per_row=settings.length, new_tensors=new, save_beside=_saver(settings, zoo, tokenizer, known=bool(known)),
    )  # fmt: skip


def next_token_loss(output: Any, ids: Tensor) -> tuple[Tensor, int]:
    """Return the summed cross entropy of all tokens except the first of each row."""
    logits, wanted = logits_of(output)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    return functional.cross_entropy(logits.float(), wanted, reduction="sum"), len(wanted)


def next_token_accuracy(output: Any, ids: Tensor) -> tuple[Tensor, int]:
    """Count the tokens that the model predicts as most likely."""
    wanted = ids[:, 1:]
    return (logits_of(output)[:, :-1].argmax(-1) == wanted).sum().double(), wanted.numel()


def read_text(path: str) -> str:
    """Read a text file; raises `DataError`."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as text ({error}); give a text file in UTF-8") from None


def text_config(zoo: ZooModel, name: str) -> Any:
    """Return the configuration of a text model; raises `UsageError` for other models."""
    config = getattr(zoo.module, "config", None)
    if zoo.task != "text" or config is None:
        raise UsageError(f"{name} does not take text, but the data is text; use a model such as hf:gpt2 or hf:bert")
    return config.get_text_config()


def find_tokenizer(name: str) -> Any:
    """Return the tokenizer in a model's directory, or None."""
    file = Path(parse_hf(name.removeprefix("hf:"))[0]).expanduser() / "tokenizer.json"
    return read_tokenizer(file) if file.is_file() else None


def _saver(settings: FitSettings, zoo: ZooModel, tokenizer: Any, *, known: bool) -> Callable[[Path], None]:
    """Return a function that saves configuration and tokenizer, so that transformers can load the run's folder."""

    def save(folder: Path) -> None:
        config: Any = copy.deepcopy(zoo.module.config)
        config.architectures = [type(zoo.module).__name__]
        if hasattr(config, "use_cache"):
            config.use_cache = True  # was switched off for training
        config.save_pretrained(folder)
        if known:
            load_tokenizer(settings.model).save_pretrained(folder)
            return
        made = optional_import("transformers", "text").PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token=PAD, cls_token=CLS
        )
        made.save_pretrained(folder)

    return save


def _blocks(tokenizer: Any, text: str, settings: FitSettings) -> Tensor:
    ids = torch.tensor(tokenizer.encode(text).ids)
    count = len(ids) // settings.length
    if not count:
        raise DataError(
            f"a part of the text has {len(ids)} tokens, but a row needs {settings.length}; lower it with --set length=N"
        )
    return ids[: count * settings.length].view(count, settings.length)


def _rows(blocks: Tensor) -> RowDataset:
    return RowDataset(range(len(blocks)), lambda index: ({"input_ids": blocks[index]}, blocks[index]))


def sentence_task(settings: FitSettings) -> Task:
    """Prepare sentence classification; raises `DataError` for files that do not contain trees."""
    path = Path(settings.data)
    training = read_trees(path / "train.txt" if path.is_dir() else path)
    beside = path / "dev.txt"
    other = Path(settings.validation) if settings.validation else beside if beside.is_file() else None
    name = with_classes(settings.model, 2)
    zoo, weights, new = load_for(settings, name, "sentences")
    config = text_config(zoo, settings.model)
    known = find_tokenizer(settings.model)
    tokenizer = known or train_tokenizer(training.texts, config.vocab_size)
    limit = min(settings.length, getattr(config, "max_position_embeddings", None) or settings.length)
    rows = [(encode(tokenizer, text, limit), label) for text, label in _pairs(training, settings.num_rows)]
    if other is not None:
        kept = [(encode(tokenizer, text, limit), label) for text, label in _pairs(read_trees(other), None)]
    else:
        learned, held = keep_some(len(rows))
        rows, kept = [rows[i] for i in learned], [rows[i] for i in held]
    example, _ = pad([max(rows, key=lambda row: len(row[0]))] * 2)
    return Task(
        unit="sentences", module=zoo.module.train(), weights=weights, example=((), example),
        dynamic={"length": {"input_ids": 1, "attention_mask": 1}}, training=_Encoded(rows), validation=_Encoded(kept),
        loss_fn=class_loss, accuracy=class_accuracy, collate=pad, batches=Buckets, new_tensors=new,
        classes=("negative", "positive"), save_beside=_saver(settings, zoo, tokenizer, known=bool(known)),
    )  # fmt: skip


def encode(tokenizer: Any, text: str, limit: int) -> list[int]:
    """Return a sentence's tokens, after the begin-of-sentence token if the tokenizer has one."""
    first = tokenizer.token_to_id(CLS)
    ids: list[int] = ([] if first is None else [first]) + tokenizer.encode(text).ids
    return ids[:limit] or [0]


def pad(rows: Sequence[tuple[list[int], int]]) -> tuple[dict[str, Tensor], Tensor]:
    """Pad rows to the length of the longest row.

    >>> pad([([5, 6], 1), ([7], 0)])[0]["attention_mask"].tolist()
    [[1, 1], [1, 0]]
    """
    longest = max(len(ids) for ids, _ in rows)
    inputs = {
        "input_ids": torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in rows]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in rows]),
    }
    return inputs, torch.tensor([label for _, label in rows])


class _Encoded(RowDataset):
    """Encoded sentences, with their lengths, by which batches are sorted."""

    def __init__(self, rows: Sequence[tuple[list[int], int]]) -> None:
        super().__init__(range(len(rows)), rows.__getitem__)
        self.lengths = [len(ids) for ids, _ in rows]


class Buckets:
    """Batches of sentences of similar length, in random order if shuffled.

    Rows are shuffled, sorted by length within pools of several batches, and the batches are shuffled; the order depends
    only on seed and epoch.

    >>> list(Buckets(encoded, 2, False))  # doctest: +SKIP
    [[3, 0], [1, 2]]
    """

    def __init__(self, data: Any, batch_size: int, shuffle: bool, seed: int = 0) -> None:
        self._epoch = 0
        self._lengths: list[int] = data.lengths
        self._batch_size, self._shuffle, self._seed = batch_size, shuffle, seed

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the order, as for torch's `DistributedSampler`."""
        self._epoch = epoch

    def __len__(self) -> int:
        """Count the batches."""
        return -(-len(self._lengths) // self._batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """Return the rows of each batch; the last batch may be smaller."""
        chance = random.Random(self._seed * 1_000_003 + self._epoch)  # noqa: S311 -- an order, no secret
        rows = list(range(len(self._lengths)))
        if self._shuffle:
            chance.shuffle(rows)
        pool = self._batch_size * (_POOL if self._shuffle else max(1, len(self)))
        batches: list[list[int]] = []
        for start in range(0, len(rows), pool):
            ordered = sorted(rows[start : start + pool], key=self._lengths.__getitem__)
            batches += [ordered[i : i + self._batch_size] for i in range(0, len(ordered), self._batch_size)]
        if self._shuffle:
            whole = [batch for batch in batches if len(batch) == self._batch_size]
            short = [batch for batch in batches if len(batch) < self._batch_size]
            chance.shuffle(whole)
            batches = whole + short
        return iter(batches)


def _pairs(sentences: Sentences, limit: int | None) -> list[tuple[str, int]]:
    pairs = [(sentences.texts[row], sentences.labels[row]) for row in spread(len(sentences.texts), limit)]
    if not pairs:
        raise DataError("the trees have no positive or negative sentences; use other data")
    return pairs
