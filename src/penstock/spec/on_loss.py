"""What a stream does when a device is lost."""

from typing import Literal, get_args

OnLoss = Literal["stop", "continue", "wait"]
ON_LOSS: tuple[str, ...] = get_args(OnLoss)
