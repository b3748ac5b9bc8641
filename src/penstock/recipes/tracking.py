"""Metrics to TensorBoard and Weights & Biases, for those who ask for it."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from penstock.errors import UsageError
from penstock.recipes.settings import FitSettings
from penstock.zoo.optional import optional_import


class Tracker(Protocol):
    """Where numbers go beside the JSON lines."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the numbers of one line."""

    def close(self) -> None:
        """Write what is left."""


def open_trackers(settings: FitSettings) -> list[Tracker]:
    """Open what the settings ask for; raises `UsageError` where it is not installed."""
    makers: dict[str, Callable[[FitSettings], Tracker]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
    return [makers[name](settings) for name in settings.track]


class TensorBoard:
    """Writes event files into the run's folder: `tensorboard --logdir runs`."""

    def __init__(self, settings: FitSettings) -> None:
        optional_import("tensorboard", "track", UsageError)
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(settings.folder))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the numbers of one line."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class WeightsAndBiases:
    """Logs to a run of Weights & Biases, named as the run's folder."""

    def __init__(self, settings: FitSettings) -> None:
        library, folder = optional_import("wandb", "track", UsageError), settings.folder
        config = msgspec.to_builtins(settings)
        self._run: Any = library.init(project="penstock", name=folder.name, dir=str(folder), config=config)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the numbers of one line."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Write what is left."""
        self._run.finish()
