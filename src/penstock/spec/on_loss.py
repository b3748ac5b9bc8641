"""Policies for a lost device."""

from typing import Literal, get_args

OnLoss = Literal["stop", "continue", "wait"]
ON_LOSS: tuple[str, ...] = get_args(OnLoss)
