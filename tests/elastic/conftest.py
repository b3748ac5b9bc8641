"""What the tests of elastic trainings share."""

from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader

from penstock.runtime import training
from penstock.train import loader


class _Locked(DataLoader[Any]):
    """Draws its seed while no other thread draws: processes have a generator each, threads that play them have one."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        with training._DRAWING:
            return super().__iter__()


@pytest.fixture(autouse=True)
def one_thread_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the loaders of several ranks from drawing in the midst of another's dropout."""
    monkeypatch.setattr(loader, "DataLoader", _Locked)
