"""Profiles of a model in training on data, and of one that generates."""

import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from penstock.deploy.state import load_state
from penstock.engine.reference import calibrate
from penstock.errors import UsageError
from penstock.generate.cached_decoder import BLOCK, CHUNKS, WANTED, decoder_call
from penstock.generate.sampling import Sampler, read_config
from penstock.graph.call import build_output
from penstock.graph.capture import capture
from penstock.graph.graph import Graph
from penstock.measure.backward import Loss
from penstock.measure.hosts import measure_messages
from penstock.measure.profiler import measure_rows, profile_graph, script_bytes, worker_bytes
from penstock.recipes.data_formats import make_task
from penstock.recipes.settings import FitSettings
from penstock.recipes.tasks import Task
from penstock.spec.plan import Generation
from penstock.spec.profile import Profile
from penstock.train.loss_convention import call_loss
from penstock.zoo.models.models import load_model


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


def profile_generation(
    name: str, caches: Generation, *, weights: Path | None = None, pretrained: bool = False, threads: int = 1,
    repeats: int = 7,
) -> Profile:  # fmt: skip
    """Measure a language model's step: a token for each sequence of a lane, at half of the greatest length.

    A row is a token. Caches count as memory of the units that use them, for all lanes; sampling is part of the driver's
    seconds per result.

    Example:
        profile_generation("hf:models/smollm2", Generation(slots=4, lanes=5, max_length=512))

    Raises `UsageError` for a model that a generator does not take.
    """
    messages, base_bytes = measure_messages(), worker_bytes()
    zoo = load_model(name, weights=weights, pretrained=pretrained, head="language")
    call = decoder_call(zoo.module, caches, zoo.weights)
    if not isinstance(call.model, nn.Module) or call.weights is None:
        raise UsageError(f"{name} has no weights to measure; give --weights or --pretrained")
    graph = capture(call.model, call.args, call.kwargs, dynamic=call.dynamic)
    more_bytes = script_bytes(base_bytes)
    room = -(-caches.max_length // (2 * BLOCK)) * BLOCK
    # in a step the encoder has nothing to do
    step = {"room": room, "source": 0, "source_room": room}
    # a chunk of a prompt is one row, and has at most as many tokens as a lane's step of so many
    chunk = {
        "step": -(-CHUNKS[-1] // caches.slots), "room": caches.max_length, "wanted": -(-WANTED // caches.slots),
        "source": -(-caches.max_length // caches.slots), "source_room": caches.max_length,
    }  # fmt: skip
    made = profile_graph(
        graph, partial(load_state, graph, weights=call.weights), rows=(caches.slots,), threads=threads,
        repeats=repeats, messages=messages, sizes=step, largest=chunk, integer=0,
    )  # fmt: skip
    return msgspec.structs.replace(
        made, model=name, calibration_s=calibrate(threads=threads), base_bytes=base_bytes, script_bytes=more_bytes,
        result_s=made.result_s + caches.slots * _sampling_s(zoo.module), generation=caches,
    )  # fmt: skip


def _sampling_s(model: Any) -> float:
    """Return the median seconds of choosing a token."""
    sampler = Sampler(read_config(model, None, {}), num_prompt=1, seed=0)
    logits = torch.randn(model.config.get_text_config().vocab_size)
    seconds = []
    for _ in range(20):
        begin = time.thread_time()
        sampler([0], logits)
        seconds.append(time.thread_time() - begin)
    return statistics.median(seconds)


def _loss(task: Task, graph: Graph) -> Loss:
    labels: list[Any] = [task.training[0][1]]

    def loss(outputs: Sequence[Tensor], rows: int) -> Tensor:
        given = torch.utils.data.default_collate(labels * rows)
        output = build_output(graph, list(outputs), graph.sizes(rows))
        return call_loss(task.loss_fn, output, given)[0]

    return loss
