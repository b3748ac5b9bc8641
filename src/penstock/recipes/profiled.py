"""Profiles of a model: of its calls, of training on data, and of generation."""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.deploy.state import load_state, with_packings
from penstock.engine.reference import calibrate
from penstock.errors import UsageError
from penstock.generate.cached_decoder import BLOCK, WANTED, CachedDecoder, decoder_call
from penstock.generate.sampling import Sampler, read_config
from penstock.graph.call import build_output
from penstock.graph.capture import capture
from penstock.graph.graph import Graph
from penstock.measure.backward import Loss
from penstock.measure.costs import Timing
from penstock.measure.hosts import measure_messages
from penstock.measure.profiler import (
    counted_profile,
    measure_loader,
    measure_rows,
    measure_runtimes,
    profile_graph,
    script_bytes,
    units_in_bytes,
    worker_bytes,
)
from penstock.recipes.data_formats import make_task
from penstock.recipes.settings import FitSettings
from penstock.recipes.tasks import Task, logits_of
from penstock.runtime.registry import EAGER, RuntimeChoice, parse_runtime
from penstock.spec.plan import CacheDtype, Generation, Precision
from penstock.spec.profile import Profile, RuntimeColumn
from penstock.tensors import HOST, find_device
from penstock.zoo.data.image_names import open_images
from penstock.zoo.models.language import is_language_model
from penstock.zoo.models.models import ZooModel, load_model
from penstock.zoo.weights.weights import Weights


def profile_model(
    name: str, *, rows: Sequence[int], training: bool = False, images: str | None = None, device: torch.device = HOST,
    runtimes: Sequence[RuntimeChoice] = (), weights: Path | None = None, pretrained: bool = False, seed: int = 0,
    threads: int = 1, repeats: int = 7, say: Callable[[str], object] = lambda _text: None,
) -> Profile:  # fmt: skip
    """Measure the costs of a model's calls, with `training` forward and backward; `say` receives each next step.

    With `images`, reading and preprocessing them is measured too.

    Example:
        profile_model("timm:vit_tiny_patch16_224", rows=(1, 2, 4))
    """
    found = None if images is None else open_images(images)
    zoo = load_model(name, weights=weights, pretrained=pretrained, seed=seed)
    graph = capture(zoo.module.train(training), zoo.example_args, zoo.example_kwargs)
    base_bytes = worker_bytes()
    more_bytes = script_bytes(base_bytes)
    say("measuring messages")
    messages = measure_messages()
    loader_s_per_row = 0.0 if found is None else measure_loader(zoo, found)
    say(f"measuring the model at {','.join(map(str, rows))} rows")
    calibration_s = _calibration_s(threads, device)
    load = partial(load_state, graph, weights=zoo.weights)
    made = profile_graph(
        graph, load, rows=rows, threads=threads, repeats=repeats, training=training, messages=messages, device=device
    )
    packed = with_packings(graph, zoo.weights, [str(runtime) for runtime in runtimes])
    columns = measure_runtimes(packed, load, runtimes, Timing(made.rows, threads, repeats))
    return msgspec.structs.replace(
        made,
        model=name,
        loader_s_per_row=loader_s_per_row,
        calibration_s=calibration_s,
        base_bytes=base_bytes,
        script_bytes=more_bytes,
        runtimes=columns,
    )


def profile_task(settings: FitSettings, *, rows: Sequence[int], repeats: int = 7) -> Profile:
    """Measure the costs of training a model on data, including data loading and the loss.

    Example:
        profile = profile_task(FitSettings(model="hf:gpt2,n_layer=6", data="text.txt"), rows=(1, 2, 4))

    Raises as `make_task` does, and `UsageError` if rows vary in length.
    """
    threads, device = settings.threads or 1, find_device(settings.device)
    messages, base_bytes = measure_messages(), worker_bytes()
    task = make_task(settings)
    if task.batches is not None:
        raise UsageError(
            f"a profile needs rows of equal size, but rows of {settings.data} vary in length; use images or a text"
        )
    graph = capture(task.module, *task.example, dynamic=task.dynamic)
    more_bytes = script_bytes(base_bytes)
    made = profile_graph(
        graph,
        lambda state: load_state(graph, state, task.weights),
        rows=rows,
        threads=threads,
        repeats=repeats,
        training=True,
        loss=_loss(task, graph),
        messages=messages,
        device=device,
    )
    data: Any = task.training
    return msgspec.structs.replace(
        made,
        model=settings.model,
        loader_s_per_row=measure_rows(data),
        base_bytes=base_bytes,
        script_bytes=more_bytes,
        calibration_s=_calibration_s(threads, device),
    )


def profile_generation(
    name: str, *, slots: Sequence[int], max_length: int, cache_dtype: CacheDtype = "model",
    runtimes: Sequence[RuntimeChoice] = (), weights: Path | None = None, pretrained: bool = False, seed: int = 0,
    threads: int = 1, repeats: int = 7, device: torch.device = HOST,
) -> Profile:  # fmt: skip
    """Measure a decoding step of a language model: a token per sequence of a lane, at half of the maximum length.

    A row is a token, and `slots` are the numbers of sequences to measure. Caches count as memory that each sequence
    keeps, and sampling as the driver's seconds for a row. Errors of other runtimes are those of logits.

    Example:
        profile_generation("hf:models/smollm2", slots=(1, 4, 8), max_length=512)

    Raises `UsageError` if a generator does not support the model.
    """
    caches = Generation(slots=max(slots), lanes=1, max_length=max_length, cache_dtype=cache_dtype)
    messages, base_bytes = measure_messages(), worker_bytes()
    zoo = load_model(name, weights=weights, pretrained=pretrained, seed=seed, head="language")
    decoder, given, graph = _captured_decoder(zoo, caches)
    more_bytes = script_bytes(base_bytes)
    room, step, full, chunk = _step_sizes(caches)
    load = partial(load_state, graph, weights=given)
    made = profile_graph(
        graph, load, rows=slots, threads=threads, repeats=repeats, messages=messages, sizes=step, largest=full,
        single=chunk, integer=0, device=device,
    )  # fmt: skip
    packed = with_packings(graph, given, [str(runtime) for runtime in runtimes])
    columns = measure_runtimes(
        packed, load, runtimes, Timing(made.rows, threads, repeats, step), partial(_step_inputs, decoder, room)
    )
    return msgspec.structs.replace(
        made,
        model=name,
        base_bytes=base_bytes,
        script_bytes=more_bytes,
        loader_s_per_row=_sampling_s(zoo.module),
        generation=caches,
        runtimes=columns,
        calibration_s=_calibration_s(threads, device),
    )


def _calibration_s(threads: int, device: torch.device) -> float:
    return calibrate(threads=threads) if device == HOST else 0.0  # the reference work is for CPUs


def _captured_decoder(zoo: ZooModel, caches: Generation) -> tuple[CachedDecoder, Weights, Graph]:
    call = decoder_call(zoo.module, caches, zoo.weights)
    if not isinstance(call.model, CachedDecoder) or call.weights is None:
        raise UsageError(f"{zoo.name} has no weights to measure; give --weights or --pretrained")
    graph = capture(call.model, call.args, call.kwargs, dynamic=call.dynamic, largest=call.largest)
    return call.model, call.weights, graph


def _step_sizes(caches: Generation) -> tuple[int, dict[str, int], dict[str, int], dict[str, int]]:
    """Return the attended length of a step to measure; sizes of this step, of the largest, and of a prompt's chunk."""
    max_length = caches.max_length
    room = -(-max_length // (2 * BLOCK)) * BLOCK
    # the encoder does nothing in a decoding step
    step = {"room": room, "source": 0, "source_room": room}
    full = {**step, "room": max_length, "source_room": max_length}
    return room, step, full, {**full, "step": caches.chunk, "wanted": WANTED, "source": max_length}


def count_inference(
    name: str, *, max_length: int, runtime: str = "eager", cache_dtype: CacheDtype = "model", whole: bool = False
) -> Profile:
    """Count the costs of a model's inference without its weights: of a language model, those of generation.

    Bytes are those that `profile_generation` finds; seconds are of a nominal core. Weights count as `runtime` holds
    them, which is `eager` or a runtime for weights in blocks. With `whole`, a language model is run as one call.

    Example:
        count_inference("gguf:model.gguf", max_length=512).units[0].kept_bytes_per_row

    Raises `UsageError` for other runtimes, and as `load_model` does.
    """
    choice = parse_runtime(runtime)
    if not (choice == EAGER or choice.is_stored):
        raise UsageError(f"memory is counted for eager and onnxruntime:stored; got {runtime}; use one of these")
    # the driver also holds the modules of its recipe, and of its connections
    import penstock.recipes.classify
    import penstock.recipes.texts
    import penstock.transport.zeromq  # noqa: F401

    base_bytes = worker_bytes()
    if is_language_model(name) and not whole:
        caches = Generation(slots=1, lanes=1, max_length=max_length, cache_dtype=cache_dtype)
        _, weights, graph = _captured_decoder(load_model(name, head="language"), caches)
        _, _, full, chunk = _step_sizes(caches)
    else:
        zoo = load_model(name)
        caches, full, chunk, weights = None, {}, None, zoo.weights
        graph = capture(zoo.module, zoo.example_args, zoo.example_kwargs)
    more_bytes = script_bytes(base_bytes)
    columns: tuple[RuntimeColumn, ...] = ()
    if choice.is_stored:
        graph = with_packings(graph, weights, [runtime])
        # in nominal seconds, as those of the units
        columns = (
            RuntimeColumn(
                runtime=choice.name,
                precision=cast(Precision, choice.precision),
                forward_s=(1.0,),
                eager_s=(1.0,),
                error=0.0,
            ),
        )
    made = counted_profile(graph, 1, partial(units_in_bytes, graph, rows=1, largest=full, single=chunk))
    return msgspec.structs.replace(
        made, model=name, base_bytes=base_bytes, script_bytes=more_bytes, generation=caches, runtimes=columns
    )


def count_training(settings: FitSettings) -> Profile:
    """Count the costs of training a model: bytes as `profile_task` finds them, and seconds of a nominal core.

    Without data, rows are the model's example inputs, which language models have at `settings.length` tokens.

    Example:
        count_training(FitSettings(model="timm:vit_tiny_patch16_224", data="digits"))

    Raises as `make_task` and `load_model` do.
    """
    base_bytes = worker_bytes()
    if settings.data:
        task = make_task(settings)
        graph = capture(task.module, *task.example, dynamic=task.dynamic)
        loss = _loss(task, graph)
    else:
        zoo = load_model(settings.model)
        kwargs = {name: _longer(value, settings.length) for name, value in zoo.example_kwargs.items()}
        graph = capture(zoo.module.train(), zoo.example_args, kwargs)
        loss = partial(_loss_of_classes, graph)
    more_bytes = script_bytes(base_bytes)
    made = counted_profile(graph, 1, partial(units_in_bytes, graph, rows=1, training=True, loss=loss))
    # a backward takes about twice the forward's work
    units = tuple(msgspec.structs.replace(unit, backward_s=tuple(2 * s for s in unit.forward_s)) for unit in made.units)
    return msgspec.structs.replace(
        made, model=settings.model, units=units, base_bytes=base_bytes, script_bytes=more_bytes
    )


def _longer(value: Any, length: int | None) -> Any:
    if length is None or not isinstance(value, Tensor) or value.dim() != 2 or value.is_floating_point():
        return value
    return value.repeat(1, -(-length // value.shape[1]))[:, :length]


def _loss_of_classes(graph: Graph, outputs: Sequence[Tensor], rows: int) -> Tensor:
    logits = logits_of(build_output(graph, list(outputs), graph.sizes(rows))).flatten(0, -2).float()
    return torch.nn.functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64), reduction="sum")


def _step_inputs(decoder: CachedDecoder, room: int, rows: int, number: int, generator: torch.Generator) -> list[Tensor]:
    """Return the inputs of a step of random tokens, the sequences' token of that number."""
    example = decoder.example(rows, 1)
    vocabulary = decoder.model.config.get_text_config().vocab_size
    example |= {
        "ids": torch.randint(vocabulary, (rows, 1), generator=generator),
        "positions": torch.full((rows, 1), number),
        "places": torch.arange(room),
    }
    if decoder.encodes:
        example |= {"source": example["source"][:, :0], "source_places": torch.arange(room)}
    return list(example.values())


def _sampling_s(model: Any) -> float:
    """Return the median seconds of sampling a token."""
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
        given = pytree.tree_map_only(Tensor, lambda label: label.to(outputs[0].device), given)
        return task.loss_fn(output, given)[0]  # type: ignore[no-any-return]

    return loss
