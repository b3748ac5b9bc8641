"""Structural pruning of a model: removes whole channels and narrows heads; the result is an ordinary module."""

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.compress.search import Importance
from penstock.errors import ModelError, UsageError
from penstock.graph.capture import capture
from penstock.graph.ops import references
from penstock.recipes.tasks import logits_of, scores_of
from penstock.text import first_line
from penstock.zoo.optional import optional_import
from penstock.zoo.weights.fit import changed_sizes, write_sizes
from penstock.zoo.weights.weight_files import save_weights
from penstock.zoo.weights.weights import TensorWeights

Batch = tuple[Tensor, Tensor]

# names of the projections of queries, keys and values in timm and transformers
_PROJECTIONS = (("qkv",), ("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q_lin", "k_lin", "v_lin"))
_LAYERS = (nn.Linear, nn.Bilinear, nn.Embedding, nn.modules.conv._ConvNd)  # layers that change a tensor's channels
_HARDLY = 1e-9  # instead of 0: with a ratio of 0 Torch-Pruning would not prune heads either
_HEADS = ("num_heads", "num_attention_heads", "n_heads")
_HEAD_DIM = ("head_dim", "attention_head_size")
_WIDTH = ("attn_dim", "all_head_size", "dim")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruning:
    """Options of pruning.

    - `ratio`: the fraction of channels to remove, from 0 to below 1;
    - `importance`: criterion for removal: from weights alone, or also from gradients, which need batches;
    - `everywhere`: compare channels of the whole model (global pruning), or remove the same fraction of each layer;
    - `round_to`: widths are multiples of this number;
    - `heads`: the fraction of heads to remove as a whole in each attention, rounded up, in addition to channels.
    """

    ratio: float
    importance: Importance = "hessian"
    everywhere: bool = True
    round_to: int = 8
    heads: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("ratio", self.ratio), ("heads", self.heads)):
            if not 0 <= value < 1:
                raise UsageError(f"a {name} to prune must be from 0 to under 1; got {value:g}")
        if self.round_to < 1:
            raise UsageError(f"round_to must be at least 1; got {self.round_to}")


def prune(
    module: nn.Module, example: Tensor | Mapping[str, Tensor], how: Pruning, batches: Iterable[Batch] = ()
) -> nn.Module:
    """Return a narrower copy of a classification model, in eval mode; the model itself is unchanged.

    `example` is the model's input, a dict if the model takes keywords; `batches` of such inputs and labels are needed
    for importances from gradients. The layers that compute the output keep their channels. Attention modules of timm
    and transformers stay consistent with their heads.

    Example:
        smaller = prune(model, images, Pruning(ratio=0.15), batches)

    The method is that of Torch-Pruning (Fang et al., DepGraph, CVPR 2023), importances those of Taylor expansions
    (Molchanov et al., CVPR 2019) and of Hessians (LeCun et al., Optimal Brain Damage, 1989).

    Raises `ModelError` if the model cannot be traced, naming the layer, and `UsageError` if an importance needs
    gradients but there are no batches.
    """
    pruning = optional_import("torch_pruning", "compress")
    smaller = copy.deepcopy(module).eval()
    for parameter in smaller.parameters():
        parameter.requires_grad_(True)
    attentions = [(path, each) for path, each in smaller.named_modules() if _projections(each)]
    heads = {part: _attribute(each, _HEADS)[1] for _, each in attentions for part in _projections(each)}
    key = None if isinstance(example, Tensor) else next(iter(example))
    named = [(inputs if key is None else {key: inputs}, labels) for inputs, labels in batches]
    importance = _importance(pruning, smaller, how, named)
    with _naming_layers(smaller, module), torch.no_grad():
        wanted = scores_of(smaller, example).shape
    ratio = how.ratio or (_HARDLY if how.heads else 0.0)
    with _naming_layers(smaller, module), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pruner = pruning.pruner.BasePruner(
            smaller, example, importance, output_transform=logits_of, global_pruning=how.everywhere,
            pruning_ratio=ratio, round_to=how.round_to, ignored_layers=_outputs(smaller, example), num_heads=heads,
            prune_head_dims=True, prune_num_heads=how.heads > 0, head_pruning_ratio=how.heads,
        )  # fmt: skip
        _leave_some(pruner, how.round_to)
        pruner.step()
    for _, each in attentions:
        _fit_heads(each, pruner.num_heads[_projections(each)[0]])
    smaller.zero_grad()
    with _naming_layers(smaller, module), torch.no_grad():
        shape = scores_of(smaller, example).shape
    if shape != wanted:
        raise ModelError(
            f"the model cannot be pruned: its output {list(wanted)} would be {list(shape)}; compute it by a linear "
            "layer or a convolution"
        )
    return smaller


def save_pruned(
    pruned: nn.Module, original: nn.Module, target: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a pruned model's weights, with the sizes that differ from the original model's.

    `metadata`, such as the names of classes, is saved with them.

    All commands with `--weights` read this file, such as `penstock infer MODEL --weights FILE`. Raises `ModelError` if
    the file cannot be written.

    Example:
        save_pruned(smaller, model, Path("deit_small_pruned.safetensors"))
    """
    weights = TensorWeights(pruned.state_dict())
    save_weights(weights, target, metadata={**write_sizes(changed_sizes(original, pruned)), **(metadata or {})})


def _projections(module: nn.Module) -> list[nn.Linear]:
    for names in _PROJECTIONS:
        parts = [getattr(module, name, None) for name in names]
        if all(isinstance(part, nn.Linear) for part in parts) and any(hasattr(module, name) for name in _HEADS):
            return [part for part in parts if isinstance(part, nn.Linear)]
    return []


def _attribute(module: nn.Module, names: Sequence[str]) -> tuple[str, int]:
    return next((name, int(getattr(module, name))) for name in names if hasattr(module, name))


def _fit_heads(module: nn.Module, num_heads: int) -> None:
    parts = _projections(module)
    width = parts[0].out_features // (3 if len(parts) == 1 else 1)
    setattr(module, _attribute(module, _HEADS)[0], num_heads)
    for names, value in ((_HEAD_DIM, width // num_heads), (_WIDTH, width)):
        for name in names:
            if isinstance(getattr(module, name, None), int):
                setattr(module, name, value)


def _outputs(module: nn.Module, example: Tensor | Mapping[str, Tensor]) -> list[nn.Module]:
    """Return the layers that compute the model's outputs, with no other layer after them.

    Views, activations, norms, means and sums keep channels, so they are skipped.
    """
    graph = capture(module, (example,), {}) if isinstance(example, Tensor) else capture(module, (), example)
    sources = {state.value.name: state.source for state in graph.states if state.kind == "parameter"}
    made = {op.name: op for op in graph.ops}
    layers: dict[nn.Module, None] = {}
    pending, seen = list(references(graph.outputs)), set[str]()
    while pending:
        op = made.get(name := pending.pop())
        if op is None or name in seen:
            continue
        seen.add(name)
        owners = [_layer(module, sources[used]) for used in op.uses() if used in sources]
        found = [layer for layer in owners if layer is not None]
        layers |= dict.fromkeys(found)
        pending += [] if found else list(op.uses())
    return list(layers)


def _layer(module: nn.Module, source: str) -> nn.Module | None:
    """Return the layer that a parameter belongs to; the parameter may be in a parametrization of the layer."""
    path = source.rpartition(".")[0]
    while path:
        found = module.get_submodule(path)
        if isinstance(found, _LAYERS):
            return found
        path = path.rpartition(".")[0]
    return None


def _importance(pruning: Any, module: nn.Module, how: Pruning, batches: Sequence[tuple[Any, Tensor]]) -> Any:
    if how.importance == "magnitude":
        return pruning.importance.GroupMagnitudeImportance()
    if not batches:
        raise UsageError(f"the importance {how.importance} needs gradients; pass batches with labels")
    if how.importance == "taylor":
        for inputs, labels in batches:
            functional.cross_entropy(scores_of(module, inputs), labels).backward()
        return pruning.importance.GroupTaylorImportance()
    importance = pruning.importance.GroupHessianImportance()
    importance.zero_grad()
    for inputs, labels in batches:
        losses = functional.cross_entropy(scores_of(module, inputs), labels, reduction="none")
        for number, loss in enumerate(losses):
            module.zero_grad()
            loss.backward(retain_graph=number + 1 < len(losses))
            importance.accumulate_grad(module)
    return importance


def _leave_some(pruner: Any, least: int) -> None:
    """Keep the few most important channels of a layer that would lose all; Torch-Pruning would not prune it at all."""
    estimate, group_of = pruner.importance, pruner.DG.get_pruning_group
    kept: dict[tuple[nn.Module, Any], tuple[set[int], int]] = {}

    def remember(group: Any) -> Tensor | None:
        scores: Tensor | None = estimate(group)
        if scores is not None:
            # the same channels are removed in all heads, or in all groups of a convolution
            alike = scores.view(pruner._get_channel_groups(group), -1).mean(0)
            most = set(alike.topk(min(least, len(alike))).indices.tolist())
            few = {index for index in range(len(scores)) if index % len(alike) in most}
            kept[group[0].dep.target.module, group[0].dep.handler] = few, len(scores)
        return scores

    def choose(layer: nn.Module, function: Any, indices: list[int]) -> Any:
        few, total = kept.get((layer, function), (set(), 0))
        if len(indices) == total:
            indices = [index for index in indices if index not in few]
        return group_of(layer, function, indices)

    pruner.importance, pruner.DG.get_pruning_group = remember, choose


@contextmanager
def _naming_layers(module: nn.Module, original: nn.Module) -> Iterator[None]:
    """Convert exceptions of tracing to a `ModelError` that names the last entered layer."""
    entered = [type(original).__name__]
    handles = [
        each.register_forward_pre_hook(lambda _module, _given, path=path: entered.append(path))
        for path, each in module.named_modules()
        if path
    ]
    try:
        yield
    # catch any exception of tracing or of the narrowed model
    except Exception as error:
        raise ModelError(
            f"the model cannot be pruned: it stopped in {entered[-1]} ({first_line(error)}); try another ratio, or "
            "compress it without pruning, --ratio 0"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
