"""Images with names and labels, each decoded on access."""

import bz2
import gzip
import hashlib
import lzma
import os
import re
import threading
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import DataError
from penstock.text import one_line
from penstock.units import format_bytes
from penstock.zoo.optional import optional_import

if TYPE_CHECKING:
    from PIL.Image import Image

# suffixes of the formats that are decoded: Pillow's, without those that are documents, videos or need other programs
SUFFIXES = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif", ".jif"), "PNG": (".png", ".apng"), "WEBP": (".webp",),
    "BMP": (".bmp",), "DIB": (".dib",), "GIF": (".gif",), "TIFF": (".tif", ".tiff"),
    "PPM": (".ppm", ".pgm", ".pbm", ".pnm"), "AVIF": (".avif",), "JPEG2000": (".jp2", ".j2k", ".jpx", ".j2c"),
    "TGA": (".tga",), "ICO": (".ico",), "PCX": (".pcx",),
}  # fmt: skip
_ORIENTATION = 0x0112  # of EXIF
_MAX_PIXELS = 2**26
# Pillow's warnings of EXIF data and transparency, for each image; catch_warnings would not be safe in threads
_SILENCED = ("ignore", None, Warning, re.compile(r"PIL\."), 0)
# suffixes of compressed tar files, with the names of their compressions in tarfile
COMPRESSED = {
    ".tar.gz": "gz",
    ".tgz": "gz",
    ".tar.xz": "xz",
    ".txz": "xz",
    ".tar.bz2": "bz2",
    ".tbz2": "bz2",
    ".tbz": "bz2",
}
_OPENERS: dict[str, Callable[[Path], Any]] = {
    "": partial(open, mode="rb"),
    "gz": gzip.open,
    "xz": lzma.open,
    "bz2": bz2.open,
}
PARTS = frozenset({"train", "training", "val", "valid", "validation", "test", "testing"})  # names of folders
MAX_FILE_BYTES = 2**26  # limit for a stored image: an archive's header may announce any length


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSet:
    """Images with names and optional labels, each read on access.

    >>> images = open_images("digits")
    >>> len(images), images.label(0), images.classes[0]
    (1797, 0, '0')
    """

    names: Sequence[str]
    labels: Sequence[int | None]
    classes: tuple[str, ...]
    load: Callable[[int], "Image | bytes"]
    by_folder: bool = False  # classes are the names of folders, whose order is ours
    left_out: str = ""  # files that are no images, counted by reason
    encoded: bool = True  # each image is a file that may be damaged, not an array

    def __len__(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        """Return an image's name; raises `DataError` if there is no such image."""
        return self.names[self._check(index)]

    def label(self, index: int) -> int | None:
        """Return an image's class as an index into `classes`, or None; raises `DataError` if there is no such image."""
        return self.labels[self._check(index)]

    def read(self, index: int) -> "Image":
        """Read one image as RGB, upright.

        Raises `DataError` naming the image if it is damaged, too large or missing; other images stay readable.
        """
        loaded = self._load(index)
        return decode(loaded, self.names[index]) if isinstance(loaded, bytes) else loaded

    def digest(self, index: int) -> bytes:
        """Return a digest of one image as it is stored; raises `DataError` if it cannot be read."""
        loaded = self._load(index)
        return hashlib.sha256(loaded if isinstance(loaded, bytes) else loaded.tobytes()).digest()

    @property
    def is_parts(self) -> bool:
        """True if the folders are the parts of a data set, such as train and val, rather than classes."""
        return self.by_folder and bool(self.classes) and {name.lower() for name in self.classes} <= PARTS

    def reordered(self, classes: tuple[str, ...]) -> "ImageSet":
        """Return the set with the same classes in another order."""
        places = [classes.index(name) for name in self.classes]
        labels = [None if label is None else places[label] for label in self.labels]
        return replace(self, classes=classes, labels=labels)

    def take(self, num_images: int) -> "ImageSet":
        """Return the first images; raises `DataError` if there are fewer than requested."""
        if not 0 < num_images <= len(self):
            raise DataError(f"the set has {len(self)} images; got {num_images}; request 1 to {len(self)}")
        return replace(self, names=self.names[:num_images], labels=self.labels[:num_images])

    def _load(self, index: int) -> "Image | bytes":
        name = self.names[self._check(index)]
        try:
            return self.load(index)
        except (OSError, EOFError, zlib.error, lzma.LZMAError, DataError) as problem:
            raise DataError(f"the image {name} cannot be read ({one_line(problem)})") from problem

    def _check(self, index: int) -> int:
        if not 0 <= index < len(self.names):
            raise DataError(f"the index of an image must be 0 to {len(self.names) - 1}; got {index}")
        return index


def decode(data: bytes, name: str) -> "Image":
    """Decode an image's bytes to RGB, rotated by its EXIF orientation.

    >>> decode(Path("photo.jpg").read_bytes(), "photo.jpg").mode  # doctest: +SKIP
    'RGB'

    Raises `DataError` naming the image if the bytes are damaged or the image is too large.
    """
    try:
        image = _opened(data)
        num_pixels = image.width * image.height
        if num_pixels <= _MAX_PIXELS:
            return _as_rgb(_upright(image))
    except Exception as problem:  # damaged images may raise anything, which must not end the run
        reason = one_line(problem)
        if "cannot identify" in reason:
            reason = f"it is none of {', '.join(SUFFIXES)}"
        raise DataError(f"the image {name} cannot be read ({reason})") from problem
    raise DataError(f"the image {name} has {num_pixels} pixels, more than {_MAX_PIXELS}; make it smaller")


def size_of(data: bytes) -> tuple[int, int]:
    """Return width and height in an image's header, or zeros if it cannot be read."""
    try:
        size: tuple[int, int] = _opened(data).size
    except Exception:  # as in `decode`, which names it
        return 0, 0
    return size


def _opened(data: bytes) -> Any:
    """Read an image's header."""
    pillow = optional_import("PIL.Image", "vision", DataError)
    pillow.init()  # not every Pillow has AVIF and JPEG 2000
    if _SILENCED not in warnings.filters[:1]:  # any change of the filters shows all other warnings again
        warnings.filterwarnings("ignore", module=_SILENCED[3].pattern)
    return pillow.open(BytesIO(data), formats=[kind for kind in SUFFIXES if kind in pillow.OPEN])


def _upright(image: Any) -> Any:
    """Return an image rotated by its EXIF orientation.

    Pillow's `exif_transpose` also writes the EXIF data again, which fails for data that it can only read.
    """
    methods = optional_import("PIL.Image", "vision", DataError).Transpose
    turns = {
        2: methods.FLIP_LEFT_RIGHT,
        3: methods.ROTATE_180,
        4: methods.FLIP_TOP_BOTTOM,
        5: methods.TRANSPOSE,
        6: methods.ROTATE_270,
        7: methods.TRANSVERSE,
        8: methods.ROTATE_90,
    }
    image.load()  # TIFF turns itself, and reports it
    turn = turns.get(image.getexif().get(_ORIENTATION, 1))
    return image if turn is None else image.transpose(turn)


def _as_rgb(image: Any) -> "Image":
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers; save it with 8 bits")
    if image.mode.startswith("I"):
        # 16-bit grey: converting directly would cut every value above 255
        pillow = optional_import("PIL.Image", "vision", DataError)
        image = pillow.fromarray((np.asarray(image).clip(0, 65535) // 257).astype(np.uint8))
    if image.mode == "RGBA":  # in bands: both images together would take 8 bytes per pixel
        bands = [image.getchannel(band) for band in range(3)]
        image.close()
        merged: Image = optional_import("PIL.Image", "vision", DataError).merge("RGB", bands)
        return merged
    rgb: Image = image if image.mode == "RGB" else image.convert("RGB")
    return rgb


def picture(values: "np.ndarray[Any, np.dtype[np.uint8]]", index: int) -> "Image":
    """Make a picture from one image of an array of grey or RGB images."""
    pillow = optional_import("PIL.Image", "vision", DataError)
    image: Image = pillow.fromarray(np.ascontiguousarray(values[index])).convert("RGB")
    return image


def compression_of(path: Path) -> str:
    """Return the compression of a tar file by its name, as tarfile calls it; empty for none.

    >>> compression_of(Path("images.TGZ")), compression_of(Path("images.tar"))
    ('gz', '')
    """
    return next((kind for suffix, kind in COMPRESSED.items() if path.name.lower().endswith(suffix)), "")


class ByteRange:
    """Reads pieces of one file, plain or compressed; safe to use from several threads.

    >>> ByteRange(Path("images.tar")).read(512, 4)  # doctest: +SKIP
    b'\\xff\\xd8\\xff\\xe0'

    `read` raises `DataError` if the file ends too early, and `OSError` like `open`. Going back in a compressed file
    decompresses it again from its beginning.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: Any = None
        self._owner = 0
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return ByteRange, (self._path,)

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return the bytes at an offset."""
        if num_bytes > MAX_FILE_BYTES:
            raise DataError(
                f"a file in {self._path} has {format_bytes(num_bytes)}, more than the {format_bytes(MAX_FILE_BYTES)} "
                "of one image"
            )
        with self._lock:
            if self._owner != os.getpid():  # a forked process would share the position in the file
                self._owner = os.getpid()
                self._file = _OPENERS[compression_of(self._path)](self._path)
            self._file.seek(offset)
            data: bytes = self._file.read(num_bytes)
        if len(data) != num_bytes:
            raise DataError(f"{self._path} ends before byte {offset + num_bytes}; copy it again")
        return data
