"""Predictions belong to their images, whichever of a microbatch cannot be read."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from penstock.recipes.classify import classify
from penstock.zoo.data.image_names import open_images
from penstock.zoo.models.models import load_model
from tests.recipes.test_images import SMALL, folders


class Counting:
    """A pipeline whose classes are the numbers of the images that it was given."""

    def stream(self, feed: Iterable[Any]) -> Iterator[Tensor]:
        """Yield scores for each microbatch."""
        count = 0
        for batch in feed:
            yield torch.eye(10)[count : count + len(batch)]
            count += len(batch)


@pytest.mark.parametrize("damaged", [(0,), (1,), (2,), (0, 1), (1, 3), (4,), (0, 1, 2, 3, 4)])
def test_damaged_image_moves_no_other_prediction(tmp_path: Path, damaged: tuple[int, ...]) -> None:
    data = folders(tmp_path, ["a"], images=5)
    for number in damaged:
        (data / f"a/{number}.png").write_bytes(b"no picture")
    images, model = open_images(str(data)), load_model(SMALL)
    found = list(classify(cast(Any, Counting()), model, images, microbatch_size=2))
    assert [item.index for item in found] == list(range(5))
    assert [item.index for item in found if item.error] == list(damaged)
    read = [item.prediction for item in found if not item.error]
    assert read == list(range(len(read)))
