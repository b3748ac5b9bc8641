"""Search for the fastest model that stays accurate: prune step by step, fine-tune, and try every runtime.

ratio 0      ──▶ eager, eager:bfloat16, onnxruntime:int8, ...    accuracy and rate of each
ratio 0.15   prune ──▶ fine-tune, with the whole model as teacher ──▶ the same runtimes
ratio 0.30   ...       until no runtime keeps the floor
the best results       rates measured again, in turns
"""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from msgspec.structs import replace
from torch import Tensor

from penstock.compress.measure import INT8, Examples, OnRuntimes, in_turns, keeping, layer_losses, names_of_runtimes
from penstock.compress.prune import Pruning, prune, save_pruned
from penstock.compress.search import (
    BASELINE,
    CompressSettings,
    Found,
    Outcome,
    check_asked,
    choose,
    contenders,
    is_enough,
    read_search,
    write_losses,
    write_search,
)
from penstock.errors import DataError, PlanError
from penstock.recipes.data_tasks import ImageReader, check_labelled, classes_of
from penstock.recipes.images import check_images, check_order
from penstock.recipes.launch import fit
from penstock.recipes.metrics import best_model, newest_checkpoint
from penstock.recipes.settings import FitSettings
from penstock.recipes.tasks import held_out, spread
from penstock.resources import available_cores
from penstock.terminal.progress import working
from penstock.text import note
from penstock.zoo.data.image_names import open_images
from penstock.zoo.data.image_set import ImageSet
from penstock.zoo.data.preprocess import write_preprocess
from penstock.zoo.models.models import ZooModel, classes_in, load_model, with_classes
from penstock.zoo.weights.weight_files import FileWeights, read_classes, save_weights, write_classes

HOLD_OUT = 5  # every n-th image is used only for measuring
_BATCHES, _BATCH = 10, 16  # number and size of batches for importances
_LOSS_IMAGES = 32  # images for the sensitivity of single layers


def compress(settings: CompressSettings, tell: Callable[[Found], None] = lambda _found: None) -> Outcome:
    """Run a search, writing results to the output folder as they arrive; an interrupted search is resumed.

    Example:
        compress(CompressSettings(model="timm:vit_tiny_patch16_224", data="photos", max_drop=0.01)).best.runtime

    Raises `UsageError` for settings that exclude each other, `DataError` for images without labels, `ModelError` for a
    model that cannot be pruned, and as `fit` does.
    """
    check_asked(settings)
    folder = Path(settings.output)
    folder.mkdir(parents=True, exist_ok=True)
    known = read_search(folder / "search.json", settings)
    search = _CompressionSearch(settings, folder, known)
    for ratio in sorted({0.0, *settings.ratios}):
        for found in search.step(ratio):
            tell(found)
        write_search(folder / "search.json", settings, search.found)
        if is_enough(settings, search.found, ratio):
            search.compare()
            if is_enough(settings, search.compared, ratio):
                break
    else:
        search.compare()
    write_search(folder / "search.json", settings, search.found)
    best, met = choose(settings, search.compared)
    return Outcome(settings=settings, found=tuple(search.found), best=best, met=met, model=search.name_for(best))


def _not_learned(tested: ImageSet, rows: Sequence[int], images: ImageSet, learned: Sequence[int]) -> list[int]:
    """Return the test images that are not identical to a training image; raises `DataError` if none is left."""
    with working("comparing test images with training images"):
        known = {images.digest(row) for row in learned}
        kept = [row for row in rows if tested.digest(row) not in known]
    if not kept:
        raise DataError(
            f"all {len(rows)} images of --test are also in --data, so accuracy would be of training images; leave "
            f"--test out, which keeps every {HOLD_OUT}th image of --data"
        )
    if len(kept) < len(rows):
        note(
            f"{len(rows) - len(kept)} of {len(rows)} images of --test are also in --data; only the others are measured"
        )
    return kept


class _CompressionSearch:
    """The steps of a search, and their results."""

    def __init__(self, settings: CompressSettings, folder: Path, known: list[Found]) -> None:
        self._settings, self._folder = settings, folder
        self.found = known
        images = open_images(settings.data)
        check_labelled(images, settings.data)
        if images.left_out:
            note(f"{settings.data}: left out {images.left_out}")
        self._name = with_classes(settings.model, len(images.classes))
        self._zoo = self._load(None)
        transform = self._zoo.pictures()
        check_order(self._zoo, images)
        learned, out = held_out(spread(len(images), settings.num_rows), None if settings.test else HOLD_OUT)
        tested = open_images(settings.test) if settings.test else images
        check_labelled(tested, settings.test or settings.data)
        rows = range(len(tested)) if settings.test else out
        if not rows:
            raise DataError(
                f"every {HOLD_OUT}th image is kept for measuring; got only {len(learned)} images; give more images, "
                "or others with --test"
            )
        chosen = [rows[place] for place in spread(len(rows), settings.num_test_rows)]
        if settings.test:
            chosen = _not_learned(tested, chosen, images, learned)
        read = [(settings.data, images, learned), (settings.test or settings.data, tested, chosen)]
        check_images(read, folder, max(self._zoo.picture_shape))
        self._rows, self._learned = chosen, learned
        self._classes = classes_of(self._zoo, images)
        counted = classes_in(self._name) in (None, len(self._classes))
        # class names, if the head has as many outputs
        self._metadata = write_classes(self._classes if counted else None) | write_preprocess(self._zoo.preprocess)
        self._test_image = ImageReader(tested, transform, None, self._classes)
        self._image = ImageReader(images, transform, None, self._classes)
        self._examples: Examples | None = None

    def step(self, ratio: float) -> list[Found]:
        """Prune and fine-tune, unless already done, and measure on every runtime."""
        done = [each for each in self.found if each.ratio == ratio]
        if done:
            return []
        weights = self._pruned(ratio) if ratio else self._original()
        torch.set_num_threads(self._settings.threads)  # training used all cores
        zoo = self._load(weights)
        count = sum(parameter.numel() for parameter in zoo.module.parameters())
        model = OnRuntimes(zoo.module, zoo.example_args, zoo.example_kwargs)
        runtimes = list(dict.fromkeys((BASELINE, *(self._settings.runtimes or names_of_runtimes()))))
        if str(INT8) in runtimes and self._settings.keep:
            losses = layer_losses(model, self._held_out().inputs[:_LOSS_IMAGES])
            write_losses(self._folder / f"layers-{100 * ratio:g}.json", losses)
            runtimes += [keeping(losses, count) for count in self._settings.keep]
        new: list[Found] = []
        for runtime in runtimes:
            try:
                measured = model.measure(runtime, self._held_out(), self._settings.microbatch_size)
            except PlanError as error:
                if runtime in self._settings.runtimes:
                    raise
                note(f"{runtime} is left out: {error}")
                continue
            new.append(
                Found(
                    ratio=ratio,
                    runtime=runtime,
                    accuracy=measured.accuracy,
                    rows_per_s=measured.rows_per_s,
                    num_parameters=count,
                    weights=str(weights),
                )
            )
        self.found += new
        return new

    @property
    def compared(self) -> list[Found]:
        """The results that took part in the last comparison."""
        return [each for each in self.found if each.rates]

    def compare(self) -> None:
        """Measure the rates of the best results again, in turns."""
        torch.set_num_threads(self._settings.threads)
        chosen = contenders(self._settings, self.found)
        with working(f"comparing {len(chosen)} forms in turns"):
            models: dict[str, OnRuntimes] = {}
            for weights in dict.fromkeys(each.weights for each in chosen):
                zoo = self._load(Path(weights))
                models[weights] = OnRuntimes(zoo.module, zoo.example_args, zoo.example_kwargs)
            inputs, size = self._held_out().inputs, self._settings.microbatch_size
            rates = in_turns([models[each.weights].turn(each.runtime, inputs, size) for each in chosen])
        new = {
            each: replace(each, rates=found, rows_per_s=statistics.median(found))
            for each, found in zip(chosen, rates, strict=True)
        }
        self.found = [new.get(each, replace(each, rates=())) for each in self.found]

    def name_for(self, found: Found) -> str:
        """Return the model's name for a result, with the number of classes unless its weights file has it."""
        says = read_classes(FileWeights(Path(found.weights)).metadata)
        return self._name if says is None else self._settings.model

    def _load(self, weights: Path | None) -> ZooModel:
        given = self._settings
        path = weights or (Path(given.weights) if given.weights else None)
        pretrained = given.pretrained and path is None
        return load_model(self._name, weights=path, pretrained=pretrained, seed=given.seed, whole=weights is not None)

    def _original(self) -> Path:
        if self._settings.weights:
            return Path(self._settings.weights)
        path = self._folder / "original.safetensors"
        if not path.exists():
            names = [name for name in self._zoo.module.state_dict() if name in set(self._zoo.weights.names())]
            save_weights(self._zoo.weights, path, names, self._metadata)
        return path

    def _pruned(self, ratio: float) -> Path:
        given, original = self._settings, self._original()
        name = f"pruned-{100 * ratio:g}"
        path = self._folder / f"{name}.safetensors"
        if not path.exists():
            zoo = self._load(original)
            example = zoo.example_args[0] if zoo.example_args else zoo.example_kwargs
            how = Pruning(
                ratio=ratio, importance=given.importance, everywhere=given.everywhere, round_to=given.round_to
            )
            save_pruned(prune(zoo.module, example, how, self._batches()), zoo.module, path, self._metadata)
        if not given.epochs:
            return path
        settings = FitSettings(
            model=self._name, data=given.data, output=str(self._folder / name), weights=str(path),
            teacher=str(original), hold_out=None if given.test else HOLD_OUT, epochs=given.epochs,
            lr=given.lr, lr_schedule="cosine", batch_size=given.batch_size, weight_decay=given.weight_decay,
            optimizer=given.optimizer, num_rows=given.num_rows, threads=available_cores(),
            seed=given.seed,
        )  # fmt: skip
        if not best_model(settings).exists() or not (settings.folder / "model.safetensors").exists():
            resume = newest_checkpoint(settings) is not None
            fit(settings.replace(resume=resume))
        return best_model(settings)

    def _batches(self) -> list[tuple[Tensor, Tensor]]:
        rows = [self._learned[place] for place in spread(len(self._learned), _BATCHES * _BATCH)]
        inputs, labels = zip(*map(self._image, rows), strict=True)
        return list(zip(torch.stack(inputs).split(_BATCH), torch.tensor(labels).split(_BATCH), strict=True))

    def _held_out(self) -> Examples:
        if self._examples is None:
            self._examples = Examples(*zip(*map(self._test_image, self._rows), strict=True))
        return self._examples
