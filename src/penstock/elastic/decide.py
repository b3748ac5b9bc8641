"""Decision on how a run continues with frozen layers: norms of gradients, its plan, which are cached; and the cache."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from penstock.elastic.frozen_cache import CachedFeatures, CachePlace, Filling, changes, default_folder, sizes_of_layers
from penstock.elastic.options import ElasticOptions
from penstock.elastic.shard import Shard, copy_s_per_byte
from penstock.errors import CacheError
from penstock.graph.cuts import Cut
from penstock.graph.freeze import sources_before
from penstock.graph.graph import Graph
from penstock.plan.choose import Moving, plan_again
from penstock.plan.cost.frozen import cache, freeze, place_of
from penstock.spec.cluster import Cluster
from penstock.spec.plan import Plan
from penstock.spec.profile import Profile, interpolate
from penstock.text import note
from penstock.train.arrangement import Arrangement
from penstock.train.captured import Captured
from penstock.train.loader import Loader
from penstock.train.trainer import Trainer
from penstock.units import format_seconds
from penstock.wire import FEEDER

_NEVER = 1e9  # required gain of a new plan if plans may not change
# required gain if plans may change: above the error in the predicted speed-up of one plan over another, as measured in
# benchmarks/training and benchmarks/elastic
_WORTH = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCosts:
    """Costs of a cache: seconds per byte to read and to write; `num_samples` are its rows (samples times views).

    `bytes_per_row` is the size of each layer's output, None if the output cannot be cached.
    """

    bytes_per_row: Sequence[int | None]
    num_samples: int
    read_s_per_byte: float
    write_s_per_byte: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """State of a training run between two epochs; layers are counted from the first.

    `plan` is the current plan, `cached_layers` the number of layers currently read from a cache. `layers` has the name
    of the cut after each layer. `remaining_rows` are still to be trained on. `migrate_s` is the duration of a
    migration. Without `pack` the plan stays while it fits in memory, and only loses stages whose layers are all
    cached. Without `replicate` all plans that are considered have one pipeline, but for the current one. Without
    `caching` no further layers are cached; layers that are cached already are still read. `beside_s` are the seconds
    per row beyond the prediction, such as loading and the caller's own code.
    """

    profile: Profile
    cluster: Cluster
    plan: Plan
    layers: Sequence[str]
    frozen_layers: int
    cached_layers: int
    remaining_rows: float
    migrate_s: float
    pack: bool = True
    replicate: bool = True
    caching: CacheCosts | None = None
    beside_s: float = 0.0

    def rows_per_s(self, plan: Plan) -> float:
        """Return the expected rows per second of a plan."""
        return 1.0 / (1.0 / plan.prediction.rows_per_s + self.beside_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The plan to continue with, whether it is new, the number of cached layers, the predicted time, and the reason."""

    plan: Plan
    moves: bool
    cached_layers: int
    remaining_s: float
    why: str


def decide(now: Situation) -> Decision:
    """Choose the plan, and whether to cache all frozen layers, by the predicted time of the remaining rows.

    That time includes migration and filling. With and without a larger cache, the current plan stays unless another one
    is faster by more than 10% and saves more time than the migration takes.

    Example:
        decide(Situation(profile=profile, cluster=cluster, plan=plan, layers=layers, frozen_layers=4, ...)).plan

    A pure function. Raises `PlanError` if no plan fits the devices.
    """
    stays = now.cached_layers if now.cached_layers <= now.frozen_layers else 0
    choices = [_with_cache(now, stays, 0.0)]
    costs = now.caching
    if costs is not None and now.frozen_layers > stays and costs.bytes_per_row[now.frozen_layers - 1] is not None:
        deeper = _with_cache(now, now.frozen_layers, _fill_s(now, costs, stays))
        if read_s(now, now.frozen_layers) < forward_s(now.profile, now.layers, 0, now.frozen_layers):
            choices.append(deeper)
    return min(choices, key=lambda choice: choice.remaining_s)


def _with_cache(now: Situation, cached: int, fill_s: float) -> Decision:
    profile = freeze(now.profile, now.layers[now.frozen_layers - 1]) if now.frozen_layers else now.profile
    if cached:
        profile = cache(profile, now.layers[cached - 1], read_s(now, cached))
    plan = plan_again(
        now.plan,
        profile,
        now.cluster,
        worth=_WORTH if now.pack else _NEVER,
        moving=Moving(cost_s=now.migrate_s, remaining_rows=now.remaining_rows),
        replicas=now.replicate,
    )
    stays = [p.stages for p in plan.pipelines] == [p.stages for p in now.plan.pipelines]
    stays = stays and [p.cut_sets for p in plan.pipelines] == [p.cut_sets for p in now.plan.pipelines]
    run_s = now.remaining_rows / now.rows_per_s(plan)
    return Decision(
        plan=plan,
        moves=not stays,
        cached_layers=cached,
        remaining_s=run_s + fill_s + (0.0 if stays else now.migrate_s),
        why=_reason(now, plan, cached, fill_s, stays),
    )


def _reason(now: Situation, plan: Plan, cached: int, fill_s: float, stays: bool) -> str:
    rate = now.rows_per_s(plan)
    moving = format_seconds(now.migrate_s)
    if not now.pack and (stays or _cuts(plan) <= _cuts(now.plan)):
        parts = ["keeps the plan" if stays else "keeps the plan, without stages whose layers are all cached"]
    elif not now.pack:
        parts = ["moves, since the plan no longer fits in memory"]
    elif stays:
        parts = [
            f"stays: no other plan is predicted to be more than {_WORTH:.0%} faster and to save more time than moving "
            f"takes ({moving})"
        ]
    else:
        parts = ["moves"]
    if cached and cached != now.cached_layers:
        parts.append(f"caches {cached} layers, {format_seconds(fill_s)} to fill")
    elif cached:
        parts.append(f"reads {cached} layers from the cache")
    return f"{'; '.join(parts)}; {rate:.4g} rows/s predicted"


def _fill_s(now: Situation, costs: CacheCosts, start: int) -> float:
    """Return the seconds to fill the cache on all devices in parallel, starting from the layers already cached."""
    bytes_per_row = costs.bytes_per_row[now.frozen_layers - 1] or 0
    row_s = forward_s(now.profile, now.layers, start, now.frozen_layers) + bytes_per_row * costs.write_s_per_byte
    return costs.num_samples * row_s / sum(device.speed for device in now.cluster.devices)


def read_s(now: Situation, layers: int) -> float:
    """Return the seconds to read a row's cached output of these layers."""
    costs = now.caching
    return 0.0 if costs is None else (costs.bytes_per_row[layers - 1] or 0) * costs.read_s_per_byte


def forward_s(profile: Profile, layers: Sequence[str], start: int, end: int) -> float:
    """Return the seconds of a row's forward through some layers, on a device of speed 1."""
    first = place_of(profile, layers[start - 1]) if start else 0
    units = profile.units[first : place_of(profile, layers[end - 1])]
    rows = profile.rows[-1]
    return sum(interpolate(profile.rows, unit.forward_s, rows) for unit in units) / rows


def _cuts(plan: Plan) -> set[str]:
    return {cut for pipeline in plan.pipelines for cuts in pipeline.cut_sets for cut in cuts.cuts}


class LayerNorms:
    """Sums of squared gradients by layer over the steps of an epoch, for the layers on one process.

    Example:
        norms = LayerNorms(layer_of(graph, layers), num_layers=12)
        norms.add({"blocks.0.norm1.weight": gradient})
        norms.squares()    # one sum per layer
    """

    def __init__(self, layers: Mapping[str, int], num_layers: int) -> None:
        self._layers = layers
        self._squares = [0.0] * num_layers

    def add(self, gradients: Mapping[str, Tensor]) -> None:
        """Add a step's gradients, by parameter name; parameters outside all layers are ignored."""
        for name, gradient in gradients.items():
            layer = self._layers.get(name)
            if layer is not None:
                self._squares[layer] += float(torch.linalg.vector_norm(gradient)) ** 2

    def take(self) -> list[float]:
        """Return the sums of squares, and reset them."""
        squares, self._squares = self._squares, [0.0] * len(self._squares)
        return squares

    def put(self, squares: Sequence[float]) -> None:
        """Set the sums of squares, to continue from them."""
        self._squares = list(squares)

    def squares(self) -> list[float]:
        """Return the sums of squares so far."""
        return list(self._squares)


def layer_of(graph: Graph, layers: Sequence[Cut]) -> dict[str, int]:
    """Return the layer of each parameter, by parameter name: the first layer that uses it."""
    found: dict[str, int] = {}
    for number, cut in reversed(list(enumerate(layers))):
        found |= dict.fromkeys(sources_before(graph, cut.position), number)
    return found


class Caching:
    """The cache of a run's frozen layers: filled, filled again for more layers, and released.

    If layers cannot be cached, the reason is printed once, and no further layers are cached. Every process creates this
    object and makes the same calls.

    Example:
        caching = Caching(trainer, whole, loader, options)
        caching.look()
        if caching.fill(captured):
            features = caching.features(placed)
    """

    def __init__(self, trainer: Trainer, whole: Captured, loader: Loader, options: ElasticOptions) -> None:
        self._trainer, self._whole, self._loader, self._options = trainer, whole, loader, options
        self.layers = 0  # number of leading layers that are currently cached
        self._shards: dict[int, Shard] = {}  # those of this machine, by rank
        self._features: CachedFeatures | None = None  # of the current placement, if it reads the cache
        self._possible = options.cache

    def look(self) -> None:
        """Check that samples do not change between two reads and all have the same size."""
        if self._possible and self._options.cache_views == 1 and changes(self._loader, self._trainer.world.transport):
            self._give_up(
                "samples change at each read, for example by random augmentation, so outputs of frozen layers are not "
                "cached; cache_views=3 (--set cache_views=3) caches three variants of each"
            )
        if self._possible and not any(self._bytes_per_row()):
            self._give_up(
                "outputs of frozen layers are not cached: rows differ in length, autocast is on, or no layer's output "
                "has one row per sample"
            )

    def _bytes_per_row(self) -> list[int | None]:
        return sizes_of_layers(self._whole, self._options.stored(), self._trainer.now.how.autocast)

    def costs(self, profile: Profile) -> CacheCosts | None:
        """Return the costs of caching; None if caching is impossible, and before the first `train_step`.

        Only a step shows which of the loader's tensors are the model's inputs.
        """
        if not self._possible or self._trainer.data.input_places is None:
            return None
        size = self._trainer.world.transport.size
        remote = (size - 1) / size * (profile.send_s_per_byte + profile.receive_s_per_byte)
        return CacheCosts(
            bytes_per_row=self._bytes_per_row(),
            num_samples=self._loader.num_samples * self._options.cache_views,
            read_s_per_byte=copy_s_per_byte() + remote,
            write_s_per_byte=copy_s_per_byte(),
        )

    def fill(self, captured: Captured) -> bool:
        """Fill the cache of a model's frozen layers on all processes in parallel; return True on success."""
        options = self._options
        if self.layers == captured.frozen_layers:
            return True
        if self.layers > captured.frozen_layers:
            self.drop()  # layers were unfrozen, so a new cache cannot be computed from this one
        place = CachePlace(
            folder=Path(options.cache_dir) if options.cache_dir is not None else default_folder(),
            limit_bytes=options.limit_bytes(),
            stored=options.stored(),
            num_views=options.cache_views,
        )
        try:
            before = self._shards.get(self._trainer.world.rank)
            filling = Filling(self._trainer, captured, self._loader, place, before=before, layers=self.layers)
            shards = filling.run()
        except CacheError as error:
            self._give_up(f"{error}; training continues, and no further layers are cached")
            return False
        self.drop()
        self.layers, self._shards = captured.frozen_layers, shards
        return True

    def features(self, placed: Arrangement) -> CachedFeatures | None:
        """Return the source of inputs for a placement in which the cached layers do not run."""
        self._features, world = None, self._trainer.world
        if self.layers and placed.skipped:
            self._features = CachedFeatures(
                world.transport,
                placed.grid,
                self._shards,
                skipped=placed.skipped,
                hosts=world.hosts,
                num_views=self._options.cache_views,
                view=self._view,
            )
        return self._features

    @property
    def _view(self) -> int:
        return self._loader.epoch % self._options.cache_views

    def begin_epoch(self) -> None:
        """Select the view of each sample for the epoch."""
        if self._features is not None:
            self._features.view = self._view

    def drop(self) -> None:
        """Release the cache; the caller must migrate before the next step, since the current placement reads it."""
        if self._features is not None:
            self._features.close()
        for shard in self._shards.values():
            shard.close()
        self.layers, self._shards, self._features = 0, {}, None

    def _give_up(self, why: str) -> None:
        self._possible = False
        if self._trainer.world.rank == FEEDER:
            note(why)
