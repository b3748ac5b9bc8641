"""Make a shard's folder hold the rows that are wanted, and remove them again, but nothing that no cache made."""

import contextlib
from pathlib import Path

from penstock.elastic.cache.disk import check_files, reserve
from penstock.elastic.cache.manifest import (
    MANIFEST,
    Manifest,
    drop_leftovers,
    read_manifest,
    remove,
    row_files,
    write_manifest,
)
from penstock.errors import CacheError
from penstock.files import flush


def place_of(folder: Path, owner: int) -> Path:
    """Return the folder of an owner's shard."""
    return Path(folder) / f"shard-{owner}"


def prepare(place: Path, wanted: Manifest, replace: bool) -> Manifest:
    """Prepare a locked folder for the wanted rows, keeping valid ones, and return its manifest.

    Raises `CacheError` for a folder that is damaged or holds other rows, which `replace` removes, and for a full disk;
    `OSError` if the folder cannot be written.
    """
    drop_leftovers(place)
    found = read_manifest(place)
    if found is not None and not found.holds_same(wanted):
        if not replace:
            raise other_cache(place, found, f"not {_describe(wanted)}; give another folder, remove it, or replace it")
        remove(place, found)
        found = None
    if found is None:
        for path in row_files(place):
            raise CacheError(
                f"{path} is in the way: without a {MANIFEST} it may not belong to a cache; move it elsewhere"
            )
        found = wanted
    check_files(place, found.layout(), found.done)
    try:
        if not found.done:
            write_manifest(
                place, found
            )  # before the files: it identifies them even if the process is killed at any moment
        reserve(place, found.layout())
        flush(place)
    except (OSError, CacheError):
        if not found.done:
            with contextlib.suppress(OSError):
                remove_shard(place, found)  # a full disk needs the room
        raise
    return found


def remove_shard(place: Path, manifest: Manifest) -> None:
    """Remove a shard's files, and its folder if that is then empty; raises `OSError` if this fails."""
    remove(place, manifest)
    with contextlib.suppress(OSError):  # other files are in it
        place.rmdir()


def other_cache(place: Path, found: Manifest, asked: str) -> CacheError:
    """Make the error for a folder that holds other rows than requested."""
    return CacheError(f"{place} holds a cache of another model or data: {_describe(found)}, {asked}")


def _describe(manifest: Manifest) -> str:
    values = " ".join(f"{value.stored}{value.shape}" for value in manifest.values)
    return f"{manifest.num_rows} rows of {values} of owner {manifest.owner} with the key {manifest.key[:40]}"
