"""Check that all processes of a training run have the same model and settings."""

from typing import Any

import torch

from penstock.errors import UsageError
from penstock.group.world import World
from penstock.runtime.torch_settings import differences, read_settings
from penstock.tensors import HOST
from penstock.train.arrangement import TrainOptions
from penstock.train.captured import Captured
from penstock.transport.collectives import all_gather


def identity_of(captured: Captured, options: TrainOptions, device: torch.device = HOST) -> list[Any]:
    """Return the identity of a training run, equal on all processes and independent of the placement."""
    graph = captured.graph
    last = [op.name for op in graph.ops][-1:]
    return [graph.model, last, len(graph.ops), options.seed, options.autocast and device.type]


def check_alike(world: World, mine: list[Any], captured: Captured) -> None:
    """Raise `UsageError` unless all processes have the same operators, torch settings and settings `mine`."""
    settings, targets, name = read_settings(), {op.target for op in captured.graph.ops}, world.names[world.rank]
    for rank, unlike in world.unlike.items():
        if common := sorted(targets & unlike):
            raise UsageError(
                f"PyTorch on {world.names[rank]} lacks or redefines {common[0]}, compared with {name}, and the model "
                "calls it; install the same version everywhere"
            )
    for rank, other in enumerate(all_gather(world.transport, {"model": mine, "torch": dict(settings)})):
        if changed := differences(settings, other["torch"]):
            raise UsageError(
                f"torch settings differ between {world.names[rank]} and {name}: {', '.join(changed)}; use the same "
                "settings in all processes before creating the pipeline"
            )
        if other["model"] != mine:
            raise UsageError(
                f"{world.names[rank]} has another model or other settings than {name}: {other['model']} and {mine}; "
                "run the same script everywhere"
            )
