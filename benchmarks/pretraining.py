"""One epoch of ordinary training, for the models that benchmarks train first."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler


def run_epoch(
    rows: Tensor, batch_size: int, loss_of: Callable[[Tensor], Tensor], optimizers: Sequence[torch.optim.Optimizer],
    schedules: Sequence[LRScheduler],
) -> float:  # fmt: skip
    """Step through the whole batches of some rows in random order; return the mean of their losses."""
    num_steps, total = len(rows) // batch_size, 0.0
    for batch in rows[torch.randperm(len(rows))][: num_steps * batch_size].split(batch_size):
        loss = loss_of(batch)
        loss.backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        total += float(loss.detach())
    return total / num_steps
