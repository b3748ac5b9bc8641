"""Files of a run: settings, metrics of every step and epoch, checkpoints, the model.

runs/NAME/
    run.lock                 locked during training
    settings.json
    metrics.jsonl            of the first process; other processes write metrics-rank1.jsonl and so on
    checkpoints/step-000100/
    model.safetensors
    best.safetensors         of the most accurate epoch, unless keep_best is false
    result.json
    wandb-id                 of the run of Weights & Biases, which a resumed run continues
"""

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from penstock.errors import ModelError, UsageError
from penstock.files import LineFile, locked, written_whole
from penstock.recipes.settings import SETTINGS, FitSettings, check_resumed, read_settings, write_settings
from penstock.text import note, one_line
from penstock.train.checkpoint_folder import INDEX, check_whole, read_index
from penstock.zoo.optional import optional_import
from penstock.zoo.weights.weight_files import FileWeights

_KEPT = 2  # number of checkpoints kept
LOCK = "run.lock"
_RUN_ID = re.compile(r"[\w-]{1,128}", re.ASCII)
_STEP = re.compile(r"step-\d{1,18}", re.ASCII)


ACCURACY = "penstock.accuracy"  # key of the best model's accuracy in its file's metadata


def best_model(settings: FitSettings) -> Path:
    """Return the path of the most accurate epoch's model."""
    return settings.folder / "best.safetensors"


def best_accuracy(settings: FitSettings) -> float | None:
    """Return the accuracy of the best epoch so far, or None if no model was kept."""
    path = best_model(settings)
    return float(FileWeights(path).metadata.get(ACCURACY, "-inf")) if path.exists() else None


class EpochResult(msgspec.Struct, frozen=True, kw_only=True):
    """Results and costs of one epoch.

    `train_loss` is the mean over all steps of the epoch. `train_s` is the mean over devices that took part in all
    steps, and `units_per_s` the sum over replicas, both without the first steps of the run. `batch_rows` is the number
    of rows of the largest batch, over all replicas. Memory peaks and bytes are listed by device.
    """

    epoch: int
    step: int
    batch_rows: int
    unit: str
    train_loss: float
    train_s: float
    units_per_s: float
    validation_loss: float | None
    accuracy: float | None
    peak_memory_bytes: list[int]
    sent_bytes: list[int]

    def __str__(self) -> str:
        validated = [] if self.validation_loss is None else [f"validation loss {self.validation_loss:.4f}"]
        right = [] if self.accuracy is None else [f"accuracy {self.accuracy:.2%}"]
        rate = [f"{self.units_per_s:.1f} {self.unit}/s"] if self.units_per_s else []
        return f"epoch {self.epoch}: {', '.join([f'loss {self.train_loss:.4f}', *validated, *right, *rate])}"


class FitResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run, with the epochs before it was resumed; `trained` is false if it had already ended then."""

    settings: FitSettings
    num_processes: int
    epochs: list[EpochResult]
    new_tensors: list[str]
    trained: bool = True

    @property
    def last(self) -> EpochResult | None:
        """The last epoch; None if its results were lost."""
        return self.epochs[-1] if self.epochs else None

    @property
    def train_s(self) -> float:
        """The seconds of all epochs, as the mean over devices."""
        return sum(epoch.train_s for epoch in self.epochs)

    @property
    def units_per_s(self) -> float:
        """Throughput over all epochs."""
        return sum(e.units_per_s * e.train_s for e in self.epochs) / self.train_s if self.train_s else 0.0


@contextlib.contextmanager
def sole_run(folder: Path) -> Iterator[None]:
    """Lock a run's folder while the block runs; raises `UsageError` if another run holds the lock."""
    with contextlib.ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(folder / LOCK))
        except BlockingIOError as error:
            raise UsageError(
                f"a folder holds one run at a time, and {error.filename or 'another process'} trains in {folder}; "
                "wait for its end, or choose another --output"
            ) from None
        except OSError as error:
            raise UsageError(
                f"the folder {folder} cannot be written ({error.strerror}); choose another --output"
            ) from None
        yield


class RunFolder:
    """Writer of one process's metrics as JSON lines, with the paths of a run's files.

    Example:
        folder = RunFolder(settings, rank=0, first_step=0)
        folder.write("step", step=1, loss=2.3)

    Raises `UsageError` if the folder cannot be written, or holds another run without `resume`.
    """

    def __init__(self, settings: FitSettings, rank: int, first_step: int, *, trains: bool = True) -> None:
        self._settings = settings
        self._rank = rank
        self._told = False
        self.path = settings.folder
        self._metrics = self.path / ("metrics.jsonl" if rank == 0 else f"metrics-rank{rank}.jsonl")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # before the metrics: a folder with them holds a run
            self._trackers: list[Tracker] = open_trackers(settings, first_step) if rank == 0 else []
            if settings.resume:
                with written_whole(self._metrics) as file:
                    file.writelines(line.encode() for line in self._before(first_step))
            self._file = LineFile(self._metrics, append=settings.resume or settings.join is not None)
            self._file.begin()
            if rank == 0 and trains:  # a run that had ended keeps the settings that it was trained with
                write_settings(settings, self.path / SETTINGS)
        except OSError as error:
            reason = error.strerror
            raise UsageError(f"the folder {self.path} cannot be written ({reason}); choose another --output") from None

    def _before(self, first_step: int) -> list[str]:
        """Return the lines of the run that is continued, without the steps that will be repeated."""
        if not self._metrics.exists():
            return []
        lines = self._metrics.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        steps = [_step_of(line) for line in lines]
        if damaged := steps[:-1].count(None):  # the last line may be incomplete after a crash
            note(f"{damaged} damaged line{'s' * (damaged > 1)} of {self._metrics} left out")
        return [line for line, step in zip(lines, steps, strict=True) if step is not None and step <= first_step]

    def losses(self, after: int, last: int) -> dict[int, float]:
        """Return the losses by step that an earlier process of this run wrote, after step `after` up to `last`."""
        found: dict[int, float] = {}
        for line in self._before(last):
            fields = json.loads(line)
            if fields.get("kind") == "step" and fields["step"] > after and isinstance(fields.get("loss"), float):
                found[fields["step"]] = fields["loss"]
        return found

    def epochs(self, last: int) -> list[dict[str, Any]]:
        """Return the results, as JSON, of the recorded epochs that ended up to step `last`."""
        return [fields for fields in map(json.loads, self._before(last)) if fields.pop("kind", None) == "epoch"]

    def go_back(self, step: int) -> None:
        """Remove the lines of later steps, which will be repeated; if this fails, the lines stay."""
        self._file.close()
        with self._losing_lines(), written_whole(self._metrics) as file:
            file.writelines(line.encode() for line in self._before(step))
        self._file = LineFile(self._metrics, append=True)

    def write(self, kind: str, *, step: int, **values: Any) -> None:
        """Write a line, and log its numbers to the trackers. On an error the line is lost, and training continues."""
        with self._losing_lines():
            self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        numbers = {f"{kind}/{name}": value for name, value in values.items() if isinstance(value, (int, float))}
        for tracker in self._trackers:
            with self._losing_lines():
                tracker.log(step, numbers)

    def close(self) -> None:
        """Close the file and end the trackers."""
        self._file.close()
        for tracker in self._trackers:
            with self._losing_lines():
                tracker.close()

    @contextlib.contextmanager
    def _losing_lines(self) -> Iterator[None]:
        """Warn once if metrics cannot be written, instead of ending the run."""
        try:
            yield
        except OSError as error:
            if not self._told:
                self._told = True
                note(
                    f"metrics of rank {self._rank} cannot be written to {self.path} ({error.strerror or error}); "
                    "training continues without them"
                )


def _step_of(line: str) -> int | None:
    """Return the step of a line of metrics, or None for a damaged line."""
    try:
        step = json.loads(line)["step"] if line.endswith("\n") else None
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return step if isinstance(step, int) else None


def checkpoint_folder(settings: FitSettings, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return settings.folder / "checkpoints" / f"step-{step:06}"


@dataclass(frozen=True, slots=True)
class Resumable:
    """The checkpoint to continue from, and for each newer checkpoint a line with the reason why it was skipped."""

    name: str
    passed_over: tuple[str, ...]


def newest_checkpoint(settings: FitSettings) -> Resumable | None:
    """Find the latest complete checkpoint; None if there is none."""
    passed_over: list[str] = []
    for folder in reversed(_checkpoints(settings)):
        wrong = _why_not_whole(folder)
        if not wrong:
            return Resumable(folder.name, tuple(passed_over))
        passed_over.append(f"skipped {folder.name}: {wrong}")
    return None


def _why_not_whole(folder: Path) -> str:
    """Return the defect of a checkpoint, or an empty string."""
    try:
        check_whole(folder, read_index(folder))
    except ModelError as error:
        return str(error)
    return ""


def drop_old_checkpoints(settings: FitSettings, newest: Path) -> None:
    """Remove all but the newest complete checkpoints; `newest` was just written."""
    earlier = [folder for folder in _checkpoints(settings) if _step(folder) < _step(newest)]
    kept = [folder for folder in earlier if not _why_not_whole(folder)][1 - _KEPT :]
    for folder in earlier:
        if folder not in kept:
            # remove the index first, so that a partly removed folder is not a checkpoint
            with contextlib.suppress(OSError):
                (folder / INDEX).unlink()
            shutil.rmtree(folder, ignore_errors=True)


def _checkpoints(settings: FitSettings) -> list[Path]:
    """Return the folders of checkpoints, complete or not, in the order of steps."""
    found = settings.folder.glob("checkpoints/step-*")
    return sorted((folder for folder in found if _STEP.fullmatch(folder.name)), key=_step)


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def check_new(settings: FitSettings) -> None:
    """Check that the folder is empty, or that `--resume` continues the same run; raises `UsageError`."""
    folder, written = settings.folder, settings.folder / SETTINGS
    changes = check_resumed(settings, read_settings(written)) if settings.resume and written.exists() else []
    if changes:
        note(f"resuming with {', '.join(changes)}")
    there = _holds_run(settings)
    if there or settings.resume:
        found = newest_checkpoint(settings)
        if found is None and there:
            raise UsageError(
                f"{folder} holds a run without a complete checkpoint, which cannot be continued; remove the folder, or "
                "choose another --output"
            )
        if found is None:
            raise UsageError(f"{folder} holds no complete checkpoint; leave --resume out to start")
        if not settings.resume:
            raise UsageError(f"{folder} already holds a run; continue with --resume, or choose another --output")


def how_to_continue(settings: FitSettings) -> str:
    """Return the next step after a run that has ended early, for an error."""
    found = newest_checkpoint(settings)
    if found is not None:
        return f"continue with --resume from step {_step(Path(found.name))}"
    if not _holds_run(settings):
        return "no checkpoint was written yet; start again"
    return f"no checkpoint was written yet; remove {settings.folder}, or choose another --output, and start again"


def _holds_run(settings: FitSettings) -> bool:
    return (settings.folder / "metrics.jsonl").exists()


class Tracker(Protocol):
    """An additional destination of metrics."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the numbers of one line."""

    def close(self) -> None:
        """Write buffered values."""


def open_trackers(settings: FitSettings, first_step: int) -> list[Tracker]:
    """Open the trackers in the settings, after a step; raises `UsageError` if one is not installed."""
    makers: dict[str, Callable[[FitSettings, int], Tracker]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
    return [makers[name](settings, first_step) for name in settings.track]


class TensorBoard(Tracker):
    """Writes event files into the run's folder: `tensorboard --logdir runs`.

    A resumed run hides the steps that it repeats.
    """

    def __init__(self, settings: FitSettings, first_step: int) -> None:
        optional_import("tensorboard", "track", UsageError)
        from torch.utils.tensorboard import SummaryWriter

        purged = first_step + 1 if settings.resume else None
        self._writer: Any = SummaryWriter(str(settings.folder), purge_step=purged)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases(Tracker):
    """Logs to a run of Weights & Biases, named like the run's folder; a resumed run continues it."""

    def __init__(self, settings: FitSettings, _first_step: int) -> None:
        library, folder = optional_import("wandb", "track", UsageError), settings.folder
        config, kept = msgspec.to_builtins(settings), folder / "wandb-id"
        begun = kept.read_text(encoding="utf-8", errors="replace").strip() if settings.resume and kept.exists() else ""
        again = {"id": begun, "resume": "allow"} if _RUN_ID.fullmatch(begun) else {}
        try:
            self._run: Any = library.init(
                project="penstock",
                name=folder.name,
                dir=str(folder),
                config=config,
                allow_val_change=bool(again),
                **again,
            )
        except Exception as problem:  # no key, no network, or a refusal of the server's
            raise UsageError(
                f"Weights & Biases cannot begin a run ({one_line(problem)}); run `wandb login`, set "
                "WANDB_MODE=offline, or leave --track wandb out"
            ) from problem
        with written_whole(kept) as file:
            file.write(self._run.id.encode())

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()
