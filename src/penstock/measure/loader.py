"""What it costs to read and prepare one row where the data is loaded."""

import statistics
import time
from collections.abc import Sequence

from penstock.errors import DataError, UsageError
from penstock.zoo.image_set import ImageSet
from penstock.zoo.models import ZooModel

_NUM_IMAGES = 32


def measure_rows(rows: Sequence[object]) -> float:
    """Give the median CPU seconds that a row of a data set takes to be made, of up to 32 spread over the set."""
    seconds = []
    for index in range(0, len(rows), max(1, len(rows) // _NUM_IMAGES)):
        begin = time.thread_time()
        rows[index]
        seconds.append(time.thread_time() - begin)
    return statistics.median(seconds)


def measure_loader(model: ZooModel, images: ImageSet) -> float:
    """Give the median CPU seconds that one image takes to be read and prepared for a model.

    Looks at up to 32 images, spread over the set; images that cannot be read do not count.

    Example:
        loader_s_per_row = measure_loader(load_model("timm:deit_small_patch16_224"), open_images("photos/"))

    Raises `UsageError` for a model that takes no images, and `DataError` where none can be read.
    """
    if model.transform is None:
        raise UsageError(f"{model.name} does not take images; leave --images out")
    seconds = []
    for index in range(0, len(images), max(1, len(images) // _NUM_IMAGES)):
        begin = time.thread_time()
        try:
            model.transform(images.read(index))
        except DataError:
            continue
        seconds.append(time.thread_time() - begin)
    if not seconds:
        raise DataError(f"none of the {len(images)} images can be read; give others, or leave --images out")
    return statistics.median(seconds)
