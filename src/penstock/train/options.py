"""What a caller asks of a training, beside how the model is cut and run."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """How replicas share a batch, and how its gradients are computed."""

    replicas: int | None = None
    schedule: str = "1f1b"
    microbatches: int | None = None
    seed: int = 0
    autocast: torch.dtype | None = None
    checkpointing: bool = False
