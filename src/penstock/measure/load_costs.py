"""What it costs to read and prepare one row where the data is loaded."""

import statistics
import time
from collections.abc import Callable, Sequence

from penstock.errors import DataError, UsageError
from penstock.zoo.data.image_set import ImageSet
from penstock.zoo.models.models import ZooModel

_NUM_ROWS = 32


def measure_rows(rows: Sequence[object]) -> float:
    """Return the median CPU seconds that a row of a data set takes to be made, of up to 32 spread over the set."""
    return statistics.median(_seconds(len(rows), rows.__getitem__))


def measure_loader(model: ZooModel, images: ImageSet) -> float:
    """Return the median CPU seconds that one image takes to be read and prepared for a model.

    Looks at up to 32 images, spread over the set; images that cannot be read do not count.

    Example:
        loader_s_per_row = measure_loader(load_model("timm:deit_small_patch16_224"), open_images("photos/"))

    Raises `UsageError` for a model that takes no images, and `DataError` where none can be read.
    """
    transform = model.transform
    if transform is None:
        raise UsageError(f"{model.name} does not take images; leave --images out")
    seconds = _seconds(len(images), lambda index: transform(images.read(index)), skipped=DataError)
    if not seconds:
        raise DataError(f"none of the {len(images)} images can be read; give others, or leave --images out")
    return statistics.median(seconds)


def _seconds(count: int, read: Callable[[int], object], *, skipped: type[Exception] | tuple[()] = ()) -> list[float]:
    """Time the reading of some rows, spread over all of them, without those that are skipped."""
    seconds = []
    for index in range(0, count, max(1, count // _NUM_ROWS)):
        begin = time.thread_time()
        try:
            read(index)
        except skipped:
            continue
        seconds.append(time.thread_time() - begin)
    return seconds
