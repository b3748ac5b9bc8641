"""Profile of a model in training on data, with the input and the loss of `penstock train`."""

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from penstock.deploy.state import load_state
from penstock.engine.reference import calibrate
from penstock.errors import UsageError
from penstock.graph.call import build_output
from penstock.graph.capture import capture
from penstock.graph.graph import Graph
from penstock.measure.backward import Loss
from penstock.measure.hosts import measure_messages
from penstock.measure.profiler import measure_rows, profile_graph, script_bytes, worker_bytes
from penstock.recipes.data_tasks import make_task
from penstock.recipes.settings import FitSettings
from penstock.recipes.tasks import Task
from penstock.spec.profile import Profile
from penstock.train.loss_convention import call_loss


def profile_task(settings: FitSettings, *, rows: Sequence[int], repeats: int = 7) -> Profile:
    """Measure the costs of training a model on data, including loading and loss.

    Example:
        profile = profile_task(FitSettings(model="hf:gpt2,n_layer=6", data="text.txt"), rows=(1, 2, 4))

    Raises as `make_task` does, and `UsageError` for data whose rows vary in length.
    """
    threads = settings.threads or 1
    messages, base_bytes = measure_messages(), worker_bytes()
    task = make_task(settings)
    if task.batches is not None:
        raise UsageError(
            f"a profile needs rows of one size, and those of {settings.data} vary in length; give images or a text"
        )
    graph = capture(task.module, *task.example, dynamic=task.dynamic)
    more_bytes = script_bytes(base_bytes)
    calibration_s = calibrate(threads=threads)
    made = profile_graph(
        graph, lambda state: load_state(graph, state, task.weights), rows=rows, threads=threads, repeats=repeats,
        training=True, loss=_loss(task, graph), messages=messages,
    )  # fmt: skip
    data: Any = task.training
    return msgspec.structs.replace(
        made, model=settings.model, loader_s_per_row=measure_rows(data), calibration_s=calibration_s,
        base_bytes=base_bytes, script_bytes=more_bytes,
    )  # fmt: skip


def _loss(task: Task, graph: Graph) -> Loss:
    labels: list[Any] = [task.training[0][1]]

    def loss(outputs: Sequence[Tensor], rows: int) -> Tensor:
        given = torch.utils.data.default_collate(labels * rows)
        output = build_output(graph, list(outputs), graph.sizes(rows))
        return call_loss(task.loss_fn, output, given)[0]

    return loss
