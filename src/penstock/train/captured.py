"""A model captured in training and in evaluation mode, with the same cuts."""

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from penstock.deploy.modules import advising
from penstock.errors import CaptureError, CutError, UsageError
from penstock.graph.call import bind_inputs
from penstock.graph.capture import capture
from penstock.graph.cuts import Cut, Cuts, TrainingPart, divide_for_training
from penstock.graph.exporting import EXPORTING
from penstock.graph.freeze import check_apart, find_layers, freeze_prefix, sources_before
from penstock.graph.graph import Graph, with_rows
from penstock.graph.live_module import LiveModule
from penstock.graph.ops import BATCH_NORM
from penstock.graph.prepare import check_unwrapped
from penstock.graph.side_effects import HiddenAttributes
from penstock.runtime.registry import EAGER
from penstock.tensors import HOST
from penstock.text import note
from penstock.train.shared_module import SharedModule, check_whole
from penstock.zoo.models.meta import build_on_meta
from penstock.zoo.weights.weights import ModuleWeights, Weights

_SHOWN = 5  # parameter names listed in a note


class Captured:
    """A captured model with its example call; with `shares`, training updates the module itself.

    `model` is a module in training mode, or a function that creates one. The function's parameters are created on the
    meta device; their values come from `weights`, or are those of the function after `torch.manual_seed(seed)`.

    Raises `CaptureError` if the model cannot be exported, and `UsageError` for a module without values.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        *,
        dynamic: Mapping[str, Mapping[str | int, int]] | None = None,
        weights: Weights | None = None,
        seed: int = 0,
        shares: bool = False,
    ) -> None:
        self.own_weights = weights is not None or not isinstance(model, nn.Module)
        if isinstance(model, nn.Module):
            module, own = model, ModuleWeights(model)
        else:
            module, own = build_on_meta(model, seed)
            module.train()
        self.weights: Weights = weights or own
        self._model = module
        check_whole(module)
        check_unwrapped(module)
        self.shared = SharedModule(module) if shares else None
        self._call = (tuple(args), dict(kwargs or {}))
        self._dynamic = dynamic
        if shares and not self.own_weights and any(parameter.is_meta for parameter in module.parameters()):
            raise UsageError(
                f"the parameters of {type(module).__name__} are on the meta device, without values; give weights=, "
                "or a function that makes the module instead of the module"
            )
        self.names = {name: _first(module)[id(tensor)] for name, tensor in module.state_dict(keep_vars=True).items()}
        self.trainable = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        with EXPORTING, advising(module):
            self.graph = with_rows(capture(module, *self._call, dynamic=dynamic))
        used = {state.source for state in self.graph.states}
        self.unused = [name for name, _ in module.named_parameters() if name not in used]
        self.example_sizes = bind_inputs(self.graph, *self._call)[1]
        self.hidden = HiddenAttributes(module, self.graph.left if shares else {})
        if counts := {name: value for name, value in self.graph.left.items() if value is not None and shares}:
            note(
                f"the forward pass assigns {', '.join(f'self.{name}' for name in counts)}; this ran once, during "
                "capture, and does not run in each step; use a buffer"
            )
        self._whole = self.graph  # before any layer is frozen
        self._live = LiveModule(module, self.graph.reads, self.graph.left)
        self._live_evaluation: LiveModule | None = None
        self.least_rows = _least_rows(self.graph)  # minimum rows of a microbatch
        self.frozen_layers = 0  # number of leading layers that do not train
        self.frozen_end = 0  # position in the graph where these layers end

    def check_trainable(self) -> None:
        """Raise `UsageError` unless the model can be trained in microbatches."""
        if self.trainable and self.trainable <= set(self.unused):
            raise UsageError(
                f"{self.graph.model} uses no trainable parameter in its forward pass; "
                "unfreeze one with requires_grad_()"
            )
        if "batch" not in self.graph.symbols:
            raise UsageError(
                f"{self.graph.model} has no input whose dimension 0 is the batch, so no batch can be cut into "
                "microbatches; give it an input with a row for each sample"
            )

    def check_unchanged(self) -> None:
        """Raise `UsageError` if the caller's module is not what it was at the capture, apart from its tensors."""
        if self.shared is None:
            return
        what = self._live.rebuilt() or self._live.written()  # a capture shares such tensors, so it has their new values
        if not what and (what := self._live.changed()) and self._capture().computes_as(self._whole):
            self._live, what = LiveModule(self._model, self._whole.reads, self._whole.left), ""
        if what:
            raise UsageError(
                f"{what}, but the pipeline trains what it captured; change the model before, keep a number that "
                "changes in a buffer, or close the pipeline and create a new one"
            )

    def follow_evaluation(self) -> bool:
        """Capture the evaluation again if the module changed since; return whether it computes something else.

        Raises `UsageError` if the module has other submodules or hooks than at the first capture.
        """
        if self.shared is None:
            return False
        if what := self._live.rebuilt(modes=False):
            raise UsageError(
                f"{what}, but the pipeline evaluates what it captured; change the model before, or close the pipeline "
                "and create a new one"
            )
        if self._live_evaluation is None or not self._live_evaluation.changed():
            return False
        written, was = self._live_evaluation.written(), vars(self).pop("evaluation")
        if written or not self.evaluation.computes_as(was):
            return True
        self.evaluation = was  # with its cached results
        return False

    def untrained(self) -> str:
        """Return a note naming trainable parameters that the forward pass does not use; empty if none."""
        names = [name for name in self.unused if name in self.trainable]
        if not names:
            return ""
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return (
            f"the forward pass of {self.graph.model} does not use {', '.join(names[:_SHOWN])}{more}; they get no "
            "gradient and stay unchanged"
        )

    @cached_property
    def evaluation(self) -> Graph:
        """Graph of the model in evaluation mode; the module's modes are restored."""
        modes = {module: module.training for module in self._model.modules()}
        with EXPORTING:
            try:
                self._model.eval()
                graph = self._capture()
            finally:
                for module, training in modes.items():
                    module.training = training
        if self.shared is not None:
            self._live_evaluation = LiveModule(self._model, graph.reads, [*graph.left, *self._whole.left])
        return graph

    def _capture(self) -> Graph:
        """Capture the model as it is now, with the attributes that its forward pass assigns."""
        with EXPORTING, self.hidden.shown():
            return with_rows(capture(self._model, *self._call, dynamic=self._dynamic))

    def common_cuts(self) -> Cuts:
        """Return the cuts that both the training and the evaluation graph allow.

        All cuts of the training graph if the model cannot be evaluated.
        """
        with EXPORTING:  # threads may share this object
            try:
                evaluated = Cuts(self.evaluation)
            except CaptureError:
                return Cuts(self.graph)
        return Cuts(self.graph, among={name for cut in evaluated for name in (cut.name, *cut.aliases)})

    @cached_property
    def layers(self) -> list[Cut]:
        """Cuts after the model's layers, in the order in which layers are frozen; see `find_layers`.

        A layer after which the evaluation graph allows no cut is merged with the next layer.
        """
        evaluated = Cuts(self.evaluation)
        known = {name for cut in evaluated for name in (cut.name, *cut.aliases)}
        return [cut for cut in find_layers(self.graph) if known & {cut.name, *cut.aliases}]

    def frozen(self, layers: int) -> "Captured":
        """Return the model with its first `layers` layers frozen; no layer may be frozen yet.

        Frozen layers compute as in evaluation, without dropout and with fixed BatchNorm statistics, and are not
        trained. Raises `UsageError` if they share a weight with layers that train, or if no parameter would train,
        `CutError` if the model cannot be divided after them.
        """
        if not layers:
            return self
        if layers > len(self.layers):
            raise UsageError(f"{self.graph.model} has {len(self.layers)} layers, so {layers} cannot be frozen")
        cut = self.layers[layers - 1]
        evaluated = self.same_cuts([cut])[0]
        graph = freeze_prefix(self.graph, self.evaluation, cut, evaluated)
        check_apart(graph, evaluated.position, self.trainable, layers)
        found = copy.copy(self)
        found.graph, found.frozen_layers, found.frozen_end = graph, layers, evaluated.position
        found.least_rows = _least_rows(graph)
        found.trainable = self.trainable - sources_before(graph, evaluated.position)
        if not found.trainable & {state.source for state in graph.states}:
            raise UsageError(
                f"{graph.model} would train nothing with {layers} of {len(self.layers)} layers frozen; freeze fewer"
            )
        return found

    def same_cuts(self, cuts: Sequence[Cut]) -> list[Cut]:
        """Find the evaluation graph's cuts that match cuts of the training graph; any name of a cut may match."""
        possible = Cuts(self.evaluation)
        found = []
        for cut in cuts:
            for name in (cut.name, *cut.aliases):
                try:
                    found.append(possible.find(name))
                    break
                except CutError:
                    continue
            else:
                raise CutError(
                    f"cut {cut.name} not found in evaluation mode; choose one at the edge of a module that both "
                    "modes use"
                )
        return found

    def parts(
        self, cuts: Sequence[Cut], autocast: torch.dtype | None, device: torch.device = HOST
    ) -> list[TrainingPart]:
        """Divide the training graph into stages."""
        parts = divide_for_training(self.graph, cuts, self.trainable)
        return cast_crossings(parts, self.example_sizes, autocast, device) if autocast else parts

    def evaluation_parts(
        self, cuts: Sequence[Cut], autocast: torch.dtype | None, device: torch.device = HOST
    ) -> list[TrainingPart]:
        """Divide the evaluation graph into stages at the same cuts."""
        parts = divide_for_training(self.evaluation, self.same_cuts(cuts), ())
        return cast_crossings(parts, self.example_sizes, autocast, device) if autocast else parts


def cast_crossings(
    parts: Sequence[TrainingPart], sizes: Mapping[str, int], autocast: torch.dtype, device: torch.device = HOST
) -> list[TrainingPart]:
    """Set the dtypes of tensors that cross the cuts under a device's autocast, found with fake tensors."""
    dtypes: dict[str, torch.dtype] = {}
    changed = []
    with FakeTensorMode() as mode:
        for part in parts:
            program = part.program
            states = {
                s.value.name: torch.empty(s.value.evaluate({}), dtype=s.value.dtype, device=device)
                for s in program.states
            }
            inputs = [
                torch.empty(v.evaluate(sizes), dtype=dtypes.get(v.name, v.dtype), device=device) for v in program.inputs
            ]
            with mode, torch.no_grad(), torch.autocast(device.type, dtype=autocast):
                outputs = EAGER.load(program, states, device)(sizes, inputs)
            dtypes |= {v.name: t.dtype for v, t in zip(program.outputs, outputs, strict=True)}
            cast = {
                group: tuple(dataclasses.replace(v, dtype=dtypes.get(v.name, v.dtype)) for v in getattr(program, group))
                for group in ("inputs", "outputs")
            }
            crossing = cast["inputs"][: len(part.crossing)]
            changed.append(dataclasses.replace(part, program=dataclasses.replace(program, **cast), crossing=crossing))
    return changed


def _least_rows(graph: Graph) -> int:
    """Return the minimum rows of a microbatch: two if a BatchNorm has only one value per channel and row."""
    one = graph.sizes(1)
    for op in graph.ops:
        if op.target == BATCH_NORM and op.arguments[5] is True:
            shape = graph.values[op.arguments[0].name].evaluate(one)
            if math.prod(shape) == shape[1]:
                return 2
    return 1


def _first(module: nn.Module) -> dict[int, str]:
    """Map the id of every tensor of a module to its first name."""
    first: dict[int, str] = {}
    for tensors in (module.named_parameters, module.named_buffers):
        for name, tensor in tensors(remove_duplicate=False):
            first.setdefault(id(tensor), name)
    return first
