"""What a decoder's step computes from the number of keys, or from all positions, is refused at capture."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import CaptureError
from penstock.graph.capture import capture
from penstock.graph.decoders import add_cache

ROOM = 64


class Step(nn.Module):
    """Writes a row of a cache at its position, reads the first `places` rows, and adds what `more` computes."""

    def __init__(self, more: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        add_cache(self, "keys", 3, ROOM + 1, 4, dtype=torch.float32)
        self.more = more

    def forward(self, x: Tensor, positions: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        torch._check(places.shape[0] <= ROOM)
        keys: Any = self.keys
        keys.index_put_((rows[:, None], positions), x)
        read = keys.narrow(1, 0, places.shape[0]).index_select(0, rows)
        scores = x @ read.transpose(1, 2)
        seen: Tensor = scores.masked_fill(places > positions[..., None], 0.0).sum(-1, keepdim=True)
        return seen + self.more(positions, read)


def made(more: Callable[[Tensor, Tensor], Tensor]) -> None:
    given = {
        "x": torch.zeros(2, 1, 4),
        "positions": torch.zeros(2, 1, dtype=torch.int64),
        "rows": torch.arange(2),
        "places": torch.arange(ROOM),
    }
    capture(Step(more).eval(), (), given, dynamic={"room": {"places": 0}}, largest={"room": ROOM})


@pytest.mark.parametrize(
    "more",
    [
        lambda positions, _read: (positions + 1)[..., None].float(),
        lambda positions, read: torch.arange(read.shape[1])[positions][..., None].float(),
        lambda positions, _read: positions.max(dim=1, keepdim=True).values[..., None].float(),
        lambda positions, _read: torch.where(positions >= 3, 1.0, 2.0)[..., None],
    ],
)
def test_row_positions_are_captured(more: Callable[[Tensor, Tensor], Tensor]) -> None:
    made(more)


@pytest.mark.parametrize(
    "more",
    [
        lambda positions, read: (read.shape[1] - positions)[..., None].float(),
        lambda _positions, read: torch.ones(ROOM)[read.shape[1] - 1 : read.shape[1]].view(1, 1, 1),
        lambda positions, read: torch.where(positions < read.shape[1] - 8, 1.0, 2.0)[..., None],
        lambda positions, read: positions[..., None] / read.shape[1],
    ],
)
def test_dependence_on_the_number_of_keys_is_refused(more: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError, match="number of keys"):
        made(more)


@pytest.mark.parametrize(
    "more",
    [
        lambda positions, _read: torch.where(positions.max() + 1 > 32, 1.0, 2.0) + positions[..., None] * 0,
        lambda positions, _read: positions.amax(0)[None, :, None] + positions[..., None] * 0.0,
        lambda positions, _read: (positions > 3).any() + positions[..., None] * 0.0,
        lambda positions, _read: positions.sum() / 2 + positions[..., None] * 0.0,
    ],
)
def test_choice_for_all_rows_at_once_is_refused(more: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError, match="all sequences"):
        made(more)
