"""From a model's name and data to what is learned."""

from pathlib import Path

from penstock.recipes.images import image_task
from penstock.recipes.language import language_task
from penstock.recipes.sentences import sentence_task
from penstock.recipes.settings import FitSettings
from penstock.recipes.tasks import Task
from penstock.zoo.data.texts import is_trees


def make_task(settings: FitSettings) -> Task:
    """Find out from the data what is to be learned, and prepare it.

    Raises `ModelError` and `DataError` for names that cannot be had, `UsageError` where model and data do
    not go together.
    """
    path = Path(settings.data)
    if is_trees(path) or is_trees(path / "train.txt"):
        return sentence_task(settings)
    if path.suffix == ".txt" and path.is_file():
        return language_task(settings)
    return image_task(settings)
