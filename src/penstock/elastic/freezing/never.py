"""Freeze nothing."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.elastic.freezing.history import EpochRecord


@dataclass(frozen=True, slots=True)
class Never:
    """No layer is ever frozen: what training without freezing would be."""

    def frozen_layers(self, history: Sequence[EpochRecord], num_layers: int) -> int:  # noqa: ARG002 -- the protocol's
        """Return 0."""
        return 0
