"""Manifest of a shard's folder: written atomically, read strictly."""

import contextlib
import os
import re
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock.elastic.cache.layout import Column, Layout
from penstock.errors import CacheError
from penstock.files import written_whole
from penstock.graph.encoding import DTYPES
from penstock.spec.fields import decode_json, read_bytes

MANIFEST = "manifest.json"
_ROWS = re.compile(r"(0|[1-9][0-9]{0,8})\.rows")
_LEFTOVER = re.compile(rf"\.{re.escape(MANIFEST)}\.[0-9a-f]{{16}}")

Count = Annotated[int, Meta(ge=0, le=2**62)]


class StoredValue(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One value of every row: its shape, its dtype when read, and the one on disk."""

    shape: list[Count]
    dtype: str
    stored: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Contents of `manifest.json`: the rows' owner, their layout in the files, and the number of valid ones."""

    format: Literal["penstock-cache"] = "penstock-cache"
    version: Literal[1] = 1
    key: str
    owner: Count
    num_rows: Count
    rows_per_file: Annotated[int, Meta(ge=1, le=2**62)]
    values: list[StoredValue]
    done: Count

    def layout(self) -> Layout:
        """Return the layout of the rows."""
        columns = tuple(
            Column(shape=tuple(value.shape), dtype=DTYPES[value.dtype], stored=DTYPES[value.stored])
            for value in self.values
        )
        return Layout(columns=columns, num_rows=self.num_rows, rows_per_file=self.rows_per_file)

    def holds_same(self, other: "Manifest") -> bool:
        """Return True if both describe the same rows, with any number of valid ones."""
        return msgspec.structs.replace(other, rows_per_file=self.rows_per_file, done=self.done) == self


def make_manifest(key: str, owner: int, layout: Layout) -> Manifest:
    """Describe an empty shard; raises `CacheError` for an invalid dtype or owner."""
    if owner < 0:
        raise CacheError(
            f"the owner of a cache's shard must be a rank, at least 0; got {owner}; give this process's rank"
        )
    for column in layout.columns:
        if str(column.dtype).removeprefix("torch.") not in DTYPES:
            raise CacheError(f"a cache cannot store {column.dtype}; convert it, or train without a cache")
    return Manifest(
        key=key,
        owner=owner,
        num_rows=layout.num_rows,
        rows_per_file=layout.rows_per_file,
        values=[
            StoredValue(
                shape=list(column.shape),
                dtype=str(column.dtype).removeprefix("torch."),
                stored=str(column.stored).removeprefix("torch."),
            )
            for column in layout.columns
        ],
        done=0,
    )


def write_manifest(place: Path, manifest: Manifest) -> None:
    """Replace a manifest atomically; raises `OSError` if this fails."""
    with written_whole(place / MANIFEST) as file:
        file.write(msgspec.json.format(msgspec.json.encode(manifest), indent=1))


def read_manifest(place: Path) -> Manifest | None:
    """Read the manifest of a shard's folder, None if it has none; raises `CacheError` for a damaged one."""
    path = place / MANIFEST
    if not os.path.lexists(path):
        return None
    found = decode_json(
        read_bytes(path, "a cache's manifest", CacheError), Manifest, f"the manifest {path}", CacheError
    )
    unknown = {name for value in found.values for name in (value.dtype, value.stored)} - DTYPES.keys()
    if unknown or found.done > found.num_rows:
        wrong = (
            f"it has the dtype {min(unknown)[:80]!r}" if unknown else f"{found.done} of {found.num_rows} rows are done"
        )
        raise CacheError(f"the manifest {path} is damaged: {wrong}; remove {place} and fill the cache again")
    return found


def rows_path(place: Path, file: int) -> Path:
    """Return the path of one of a shard's files."""
    return place / f"{file}.rows"


def row_files(place: Path, num_files: int | None = None) -> list[Path]:
    """Return the files in a folder with names of a shard's files, only the first `num_files` if given."""
    matches = [match for path in place.iterdir() if (match := _ROWS.fullmatch(path.name))]
    return [place / match[0] for match in matches if num_files is None or int(match[1]) < num_files]


def drop_leftovers(place: Path) -> None:
    """Remove temporary files left by a process that failed while writing a manifest."""
    for path in place.iterdir():
        if _LEFTOVER.fullmatch(path.name):
            path.unlink(missing_ok=True)


def remove(place: Path, manifest: Manifest) -> None:
    """Remove only the files of a shard, such that a process that fails meanwhile leaves an empty shard.

    Raises `OSError` if a file cannot be removed.
    """
    # a full disk may refuse it, and needs the space
    with contextlib.suppress(OSError):
        write_manifest(place, msgspec.structs.replace(manifest, done=0))
    for path in row_files(place, manifest.layout().num_files):
        path.unlink(missing_ok=True)
    (place / MANIFEST).unlink(missing_ok=True)
