"""What an elastic training caches: whether it can, what that takes, and the cache that there is now."""

from pathlib import Path

from penstock.elastic.cache.frozen_cache import (
    CachePlace,
    Filling,
    FrozenCache,
    changes,
    default_folder,
    sizes_of_layers,
)
from penstock.elastic.cache.speed import copy_s_per_byte
from penstock.elastic.decide import CacheCosts
from penstock.elastic.options import ElasticOptions
from penstock.errors import CacheError
from penstock.spec.profile import Profile
from penstock.terminal.notes import note
from penstock.train.arrangement import Arrangement
from penstock.train.captured import Captured
from penstock.train.features import Features
from penstock.train.loader import Loader
from penstock.train.trainer import Trainer
from penstock.transport.base import FEEDER


class Caching:
    """The cache of a training's frozen layers, as it is filled, deepened and let go of.

    What cannot be cached is said once, and the training goes on without. Every process makes one and calls the same.

    Example:
        caching = Caching(trainer, whole, loader, options)
        caching.look()
        if caching.fill(captured):
            features = caching.features(placed)
    """

    def __init__(self, trainer: Trainer, whole: Captured, loader: Loader, options: ElasticOptions) -> None:
        self._trainer, self._whole, self._loader, self._options = trainer, whole, loader, options
        self._cache: FrozenCache | None = None
        self._possible = options.cache

    @property
    def layers(self) -> int:
        """How many leading layers are cached now."""
        return self._cache.layers if self._cache is not None else 0

    def look(self) -> None:
        """Find out whether samples stay as they are from one reading to the next, and are all of one size."""
        if self._possible and self._options.cache_views == 1 and changes(self._loader, self._trainer.world.transport):
            self._give_up(
                "samples are drawn anew each time, as by random augmentation, so what frozen layers put out is not "
                "cached; cache_views=3 (--cache-views 3) keeps three variants of each"
            )
        if self._possible and not any(self._bytes_per_row()):
            self._give_up("rows differ in length or are cast, so what frozen layers put out is not cached")

    def _bytes_per_row(self) -> list[int | None]:
        return sizes_of_layers(self._whole, self._options.stored(), self._trainer.now.how.autocast)

    def costs(self, profile: Profile) -> CacheCosts | None:
        """Return what caching takes; None where it cannot be, or not yet: a step shows what the model is given."""
        if not self._possible or self._trainer.input_places is None:
            return None
        size = self._trainer.world.transport.size
        remote = (size - 1) / size * (profile.send_s_per_byte + profile.receive_s_per_byte)
        return CacheCosts(
            bytes_per_row=self._bytes_per_row(), num_samples=self._loader.num_samples * self._options.cache_views,
            read_s_per_byte=copy_s_per_byte() + remote, write_s_per_byte=copy_s_per_byte(),
        )  # fmt: skip

    def fill(self, captured: Captured) -> bool:
        """Fill the cache of a model's frozen layers, all processes at once; returns whether it is there."""
        options = self._options
        if self.layers == captured.frozen_layers:
            return True
        if self.layers > captured.frozen_layers:
            self.drop()  # freezing was taken back: there is nothing to go on from
        place = CachePlace(
            folder=Path(options.cache_dir) if options.cache_dir is not None else default_folder(),
            limit_bytes=options.limit_bytes(), stored=options.stored(), num_views=options.cache_views,
        )  # fmt: skip
        try:
            cache = Filling(self._trainer, captured, self._loader, place, before=self._cache).run()
        except CacheError as error:
            self._give_up(f"{error}; the training goes on without a deeper cache")
            return False
        self.drop()
        self._cache = cache
        return True

    def features(self, placed: Arrangement) -> Features | None:
        """Return what an arrangement that skips the cached layers takes its inputs from."""
        if self._cache is None or not placed.skipped:
            return None
        return self._cache.features(self._trainer, placed, self._loader.epoch)

    def begin_epoch(self) -> None:
        """Take the view of each sample that the epoch has."""
        if self._cache is not None and self._trainer.now.features is not None:
            self._cache.show(self._trainer.now.features, self._loader.epoch)

    def drop(self, *, keep: bool = False) -> None:
        """Let go of the cache; steps no longer read it after the next migration."""
        if self._cache is None:
            return
        if self._trainer.now.features is not None:
            self._trainer.now.features.close()
        self._cache.close(keep=keep or self._options.keep_cache)
        self._cache = None

    def _give_up(self, why: str) -> None:
        self._possible = False
        if self._trainer.world.rank == FEEDER:
            note(why)
