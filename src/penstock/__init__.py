"""Penstock: one PyTorch model across the machines you have.

    import penstock

    halves = penstock.split(model, (images,), stages=2)          # in this process, for inspection
    with penstock.Pipeline(model, (image,), stages=4) as pipe:   # in processes, for speed
        for output in pipe.stream(images):
            ...

    pipe = penstock.Pipeline(model.train(), images)              # one process, or as many as torchrun starts
    optimizer = pipe.optimizer(lambda parameters: torch.optim.AdamW(parameters))
    for images, labels in pipe.loader(dataset, batch_size=64, shuffle=True):
        loss = pipe.train_step(images, labels, loss_fn=F.cross_entropy)
        optimizer.step(); optimizer.zero_grad()

Names are imported at their first use, so that a worker never imports unused modules.
"""

import importlib
from typing import TYPE_CHECKING, Any

from penstock.version import __version__

if TYPE_CHECKING:
    from penstock.deploy.run_options import LinkOptions, OnLoss, Trace
    from penstock.deploy.split import SplitModel, split
    from penstock.errors import DeviceLost, PenstockError, RunError, UsageError
    from penstock.generate.generator import Generator
    from penstock.graph.capture import capture
    from penstock.pipe import Pipe
    from penstock.pipeline import Pipeline

_HOMES = {
    "DeviceLost": "penstock.errors",
    "Generator": "penstock.generate.generator",
    "LinkOptions": "penstock.deploy.run_options",
    "OnLoss": "penstock.deploy.run_options",
    "PenstockError": "penstock.errors",
    "Pipe": "penstock.pipe",
    "Pipeline": "penstock.pipeline",
    "RunError": "penstock.errors",
    "SplitModel": "penstock.deploy.split",
    "Trace": "penstock.deploy.run_options",
    "UsageError": "penstock.errors",
    "capture": "penstock.graph.capture",
    "split": "penstock.deploy.split",
}
__all__ = [
    "DeviceLost", "Generator", "LinkOptions", "OnLoss", "PenstockError", "Pipe", "Pipeline", "RunError", "SplitModel",
    "Trace", "UsageError", "__version__", "capture", "split",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")
