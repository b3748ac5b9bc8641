"""Caching in an elastic training run: preconditions, costs, and the current cache."""

from pathlib import Path

from penstock.elastic.cache.exchange import CachedFeatures
from penstock.elastic.cache.frozen_cache import CachePlace, Filling, changes, default_folder, sizes_of_layers
from penstock.elastic.cache.shard import Shard, copy_s_per_byte
from penstock.elastic.decide import CacheCosts
from penstock.elastic.options import ElasticOptions
from penstock.errors import CacheError
from penstock.spec.profile import Profile
from penstock.text import note
from penstock.train.arrangement import Arrangement
from penstock.train.captured import Captured
from penstock.train.loader import Loader
from penstock.train.trainer import Trainer
from penstock.wire import FEEDER


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
                world.transport, placed.grid, self._shards, skipped=placed.skipped, hosts=world.hosts,
                num_views=self._options.cache_views, view=self._view,
            )  # fmt: skip
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
