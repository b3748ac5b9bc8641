"""Capture of a model's forward pass as a graph of operators, with a symbolic batch size."""

import contextlib
import dataclasses
import io
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from penstock.errors import CaptureError
from penstock.graph.callbacks import CallbackRecorder, recorded_callbacks
from penstock.graph.exporting import (
    EXPORTING,
    batch_rows,
    dynamic_shapes,
    export_reason,
    fast_layers,
    is_of_sizes,
    label_inputs,
    limits_in,
    ordered_multiples,
    widen_rows,
)
from penstock.graph.graph import Graph
from penstock.graph.prepare import check_unwrapped
from penstock.graph.side_effects import kept_random_states
from penstock.graph.translate import translate
from penstock.tensors import moved
from penstock.text import note

_Inputs = tuple[tuple[Any, ...], dict[str, Any]]
_EXPERTS = "batched_mm"


def capture(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic: Mapping[str, Mapping[str | int, int]] | None = None,
    largest: Mapping[str, int] | None = None,
) -> Graph:
    """Capture a model's forward pass as a graph that runs at any batch size.

    The first dimension of every tensor input that has the batch's size becomes the symbol `batch`. Parameters may be on
    the meta device: they are never read; the example is moved to the model's device. A model that fixes its batch size
    is captured at the example's batch size, stored as `Graph.fixed_batch`.

    A model in training mode is captured for training: with dropout, updates of statistics, parts without gradients, and
    custom autograd functions and hooks (see `callbacks.py`). A Hugging Face model that would return its KV cache
    (`config.use_cache`) is captured without the cache, and a mixture of experts with `batched_mm`.

    `dynamic` declares further symbolic dimensions: for each name, input names or positions and their dimension, as in
    `{"sequence": {"input_ids": 1, "attention_mask": 1}}`. `largest` gives the largest size of such a dimension that the
    model accepts; a limit that is not given is found by a second export.

    Example:
        graph = capture(timm.create_model("deit_small_patch16_224").eval(), (torch.randn(2, 3, 224, 224),))

    Raises:
        CaptureError: the model does not export; the message has torch's reason in one line.
        UsageError: the model is wrapped, as by DistributedDataParallel.
    """
    check_unwrapped(model)
    if fast := fast_layers(model):
        note(
            f"{type(model).__name__} is captured without PyTorch's fast path of {', '.join(fast)}, which computes "
            "other values for padded rows; to compare outputs, call torch.backends.mha.set_fastpath_enabled(False)"
        )
    arguments, keywords = _beside(model, (tuple(args), dict(kwargs or {})))
    labels = label_inputs(model, arguments, keywords, dynamic or {})
    rows = batch_rows(labels, arguments, keywords)
    with (
        EXPORTING,
        ordered_multiples(),
        kept_random_states(),
        fake_parameters(model),
        _as_one_pass(model),
        torch.set_grad_enabled(model.training),
    ):
        if rows is None:
            return _export(model, arguments, keywords, None, fixed_batch=None)
        wide_arguments, wide_keywords = widen_rows((arguments, keywords), labels, rows)
        shapes = dynamic_shapes(model, labels, dynamic or {}, largest)
        try:
            return _export(model, wide_arguments, wide_keywords, shapes, labels, fixed_batch=None)
        except CaptureError as error:
            limits, reason = limits_in(error) if dynamic else {}, str(error).partition(": ")[2]
            if dynamic and not limits:
                raise
        if limits:
            shapes = dynamic_shapes(model, labels, dynamic or {}, {**(largest or {}), **limits})
            return _export(model, wide_arguments, wide_keywords, shapes, labels, fixed_batch=None)
        # retry at the example's own batch size, which is right only if the model requires it; its error is more useful
        # than an error about rows that the caller did not pass
        graph = _export(model, arguments, keywords, None, fixed_batch=rows)
        return dataclasses.replace(graph, why_fixed=reason)


def _export(
    model: nn.Module,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    shapes: object,
    labels: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
    *,
    fixed_batch: int | None,
) -> Graph:
    recorder: CallbackRecorder | None = None  # a hook may be refused before there is one
    try:
        # suppress torch's output of the graph if an export fails; the error is one line
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stderr(io.StringIO()),
            recorded_callbacks(model) as recorder,
        ):
            warnings.simplefilter("ignore")
            exported: ExportedProgram = torch.export.export(
                model, arguments, keywords, dynamic_shapes=shapes, strict=False
            )
    # exceptions of the model's own code propagate through torch.export, so any exception can mean "does not export"
    except Exception as error:
        reason = export_reason(error)
        if recorder is not None and recorder.fixing and is_of_sizes(error):
            reason = f"it works with some batch sizes only ({recorder.fixing[0]})"
        raise CaptureError(f"{type(model).__name__} cannot be captured: {reason}") from error
    for text in recorder.notes:
        note(text)
    return translate(
        exported,
        model,
        _in_order(exported, labels),
        fixed_batch=fixed_batch,
        callbacks=recorder.callbacks,
        left=recorder.left,
        reads=recorder.reads,
    )


def _in_order(
    exported: ExportedProgram, labels: tuple[tuple[Any, ...], dict[str, Any]] | None
) -> list[tuple[str | None, ...]]:
    """Return the labels in the order of the exported inputs; without labels, no dimension has a symbol."""
    if labels is None:
        return [()] * exported.call_spec.in_spec.num_leaves
    positional, keyword = labels
    ordered = {name: keyword[name] for name in exported.call_spec.in_spec.child(1).context or []}
    return [leaf.names for leaf in pytree.tree_leaves((positional, ordered))]


@contextlib.contextmanager
def _as_one_pass(model: nn.Module) -> Iterator[None]:
    """Configure a Hugging Face model to compute a single pass with PyTorch operators only.

    It returns no KV cache, which is not a tensor. Experts of a mixture are computed by batched matrix products: the
    alternatives use a custom operator, or branch on values.
    """
    # the model itself, or a model inside a caller's module
    mixture: Any = next((each for each in model.modules() if hasattr(each, "_can_set_experts_implementation")), model)
    experts = getattr(getattr(mixture, "config", None), "_experts_implementation", None)
    # encoder and decoder may have separate configurations
    configs = {id(each): each for each in (getattr(module, "config", None) for module in model.modules())}
    caching: list[Any] = [each for each in configs.values() if getattr(each, "use_cache", None)]
    has_experts: Callable[[], bool] = getattr(mixture, "_can_set_experts_implementation", bool)
    changes = experts != _EXPERTS and has_experts()
    try:
        for each in caching:
            each.use_cache = False
        if changes:
            mixture.set_experts_implementation(_EXPERTS)
            note(
                f"{type(mixture).__name__} is captured with its experts computed by {_EXPERTS} instead of {experts}; "
                f"to compare outputs, call set_experts_implementation({_EXPERTS!r})"
            )
        yield
    finally:
        for each in caching:
            each.use_cache = True
        if changes:
            mixture.set_experts_implementation(experts)


@contextlib.contextmanager
def fake_parameters(model: nn.Module) -> Iterator[None]:
    """Within the context, replace parameters on the meta device by fake CPU parameters."""
    owners = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.device.type == "meta"
    ]
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(duck_shape=False))
    stand_ins: dict[int, nn.Parameter] = {}
    try:
        for module, name, parameter in owners:
            if id(parameter) not in stand_ins:  # tied parameters stay tied
                with mode:
                    fake = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="cpu")
                stand_ins[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
            module._parameters[name] = stand_ins[id(parameter)]
        yield
    finally:
        for module, name, parameter in owners:
            module._parameters[name] = parameter


def _beside(model: nn.Module, inputs: _Inputs) -> _Inputs:
    """Return the example's inputs on the device that has all of the model's tensors; as they are if several have."""
    homes = {tensor.device for tensor in (*model.parameters(), *model.buffers()) if tensor.device.type != "meta"}
    if len(homes) != 1:
        return inputs
    found: _Inputs = pytree.tree_map_only(Tensor, lambda tensor: moved(tensor, *homes), inputs)
    return found
