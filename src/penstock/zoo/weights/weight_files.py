"""Reading (memory-mapped) and writing of safetensors files, one tensor at a time, and of the class names with them."""

import json
from codecs import BOM_UTF8
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Annotated, Any

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.errors import ModelError
from penstock.files import is_special, written_whole
from penstock.text import one_line
from penstock.zoo.weights.pickled import SUFFIXES, looks_pickled, safetensors_name, what_it_is
from penstock.zoo.weights.weights import ByName, Shape, Weights

_INDEX_SUFFIX = ".safetensors.index.json"
DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
    "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_KINDS = {dtype: kind for kind, dtype in DTYPES.items()}
_KEY = "penstock.classes"  # in the metadata of a safetensors file
_Name = Annotated[str, msgspec.Meta(max_length=1000)]
_Names = list[_Name]


class FileWeights(ByName[str]):
    """The tensors of a safetensors file, of a sharded index, or of a directory with either.

    >>> FileWeights(Path("deit.safetensors")).shape("cls_token")  # doctest: +SKIP
    (1, 1, 384)

    Raises `ModelError` if the file is missing, damaged or not safetensors, or if a shard is missing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handles: dict[Path, Any] = {}
        self._shards: dict[str, Path] = {}
        self._extents: dict[Path, dict[str, tuple[int, int]]] = {}
        for shard in _shards(path):
            self._shards.update(dict.fromkeys(self._open(shard).keys(), shard))
        super().__init__({key: key for key in self._shards})
        self._holder = f"{path} has"

    @property
    def metadata(self) -> dict[str, str]:
        """Metadata in the files' headers."""
        found: dict[str, str] = {}
        for shard in dict.fromkeys(self._shards.values()):
            found |= self._open(shard).metadata() or {}
        return found

    def shape(self, name: str) -> Shape:
        """Return a tensor's shape without loading it."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's dtype without loading it."""
        kind = self._slice(name).get_dtype()
        if kind not in DTYPES:
            raise ModelError(f"{self._path} holds {name} as {kind}, which is not supported; convert it to F32")
        return DTYPES[kind]

    def load(self, name: str) -> Tensor:
        """Return one memory-mapped tensor, which is read from disk on access.

        Each tensor has a separate mapping, so that its pages are released together with the tensor.
        """
        key = self._find(name)
        shard, dtype = self._shards[key], self.dtype(name)
        if shard not in self._extents:
            self._extents[shard] = _read_extents(shard)
        begin, end = self._extents[shard][key]
        if begin == end:
            return torch.empty(self.shape(name), dtype=dtype)
        try:
            mapped = np.memmap(shard, mode="c", offset=begin, shape=(end - begin,))
        except (OSError, ValueError) as problem:
            raise ModelError(f"{shard} has changed ({one_line(problem)}); copy or convert it again") from problem
        return torch.from_numpy(mapped).view(dtype).reshape(self.shape(name))

    def _slice(self, name: str) -> Any:
        key = self._find(name)
        return self._open(self._shards[key]).get_slice(key)

    def _open(self, path: Path) -> Any:
        if path not in self._handles:
            self._handles[path] = _open_file(path)
        return self._handles[path]


def _read_extents(path: Path) -> dict[str, tuple[int, int]]:
    """Return the first and last byte of each tensor in a file whose header `safe_open` has checked."""
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(start - 8))
    header.pop("__metadata__", None)
    return {key: (start + each["data_offsets"][0], start + each["data_offsets"][1]) for key, each in header.items()}


def _open_file(path: Path) -> Any:
    if is_special(path):  # without a writer, to open a pipe never ends
        raise ModelError(f"{path} is {what_it_is(path)}")
    try:
        return safe_open(str(path), framework="pt")
    except FileNotFoundError as problem:
        raise ModelError(f"weights file {path} not found; check the path") from problem
    except (SafetensorError, OSError, ValueError) as problem:
        raise ModelError(
            f"{path} is not a whole safetensors file ({one_line(problem)}); copy or convert it again"
        ) from problem


def _shards(path: Path) -> list[Path]:
    """Return the safetensors files of a path."""
    if path.is_dir():
        return _shards(_inside(path))
    if not path.exists():
        raise ModelError(f"weights file {path} not found; check the path")
    if path.name.endswith(_INDEX_SUFFIX):
        return shards_of_index(path)
    found = what_it_is(path)
    if found is None and (looks_pickled(path) or path.name.endswith(".bin.index.json")):
        target = safetensors_name(path)
        found = f"a pickled checkpoint; convert it first: penstock convert {path} -o {target}"
    if found is not None:
        raise ModelError(f"{path} is {found}")
    return [path]


def _inside(directory: Path) -> Path:
    """Return the index, or the only safetensors file, of a directory."""
    for pattern in (f"*{_INDEX_SUFFIX}", "model.safetensors", "*.safetensors"):
        found = sorted(directory.glob(pattern))
        if len(found) > 1:
            names = ", ".join(file.name for file in found[:4])
            raise ModelError(f"{directory} holds {len(found)} candidates ({names}); give one of the files")
        if found:
            return found[0]
    for pattern in ("*.bin.index.json", *(f"*{suffix}" for suffix in SUFFIXES)):
        for file in sorted(directory.glob(pattern)):
            return file  # the caller refuses it, with the command that converts it
    if (directory / ".metadata").is_file():
        raise ModelError(f"{directory} is {what_it_is(directory)}")
    raise ModelError(f"{directory} holds no .safetensors file and no index of shards")


def shards_of_index(index: Path) -> list[Path]:
    """Return the files that an index of shards names; raises `ModelError` if one is missing or in another folder."""
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8-sig"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise ModelError(f"{index} is not an index of shards: weight_map of file names not found") from problem
    # a shard must be next to its index: other paths are rejected
    strange = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if strange:
        raise ModelError(f"shards must be in the folder of their index, but {index} names {strange[0]!r}")
    absent = [name for name in names if not (index.parent / name).exists()]
    if absent:
        raise ModelError(
            f"{len(absent)} of {len(names)} shards are missing in {index.parent}, for example {absent[0]}; copy them "
            "there"
        )
    return [index.parent / name for name in names]


def save_weights(
    weights: Weights, target: Path, names: Iterable[str] | None = None, metadata: Mapping[str, str] | None = None
) -> int:
    """Write tensors to a safetensors file and return their size in bytes.

    One tensor is loaded at a time, and the target is written atomically. `metadata` goes into its header.

    >>> save_weights(TensorWeights({"w": torch.ones(4, 4)}), Path("w.safetensors"))  # doctest: +SKIP
    64

    Raises `ModelError` if a name is not in the weights, its dtype has no name in safetensors, or the target cannot be
    written.
    """
    order = file_order(weights, names)
    header, num_bytes = _header(weights, order, metadata or {})
    try:
        with written_whole(target) as file:
            _write(weights, order, header, file)
            file.flush()
            _open_file(Path(file.name))  # checks header and extents before an earlier file is replaced
    except OSError as problem:
        raise ModelError(f"{target} cannot be written ({one_line(problem)}); choose another folder") from problem
    return num_bytes


def file_order(weights: Weights, names: Iterable[str] | None = None) -> list[str]:
    """Return the order of tensors in a file, in which `save_weights` also loads them."""
    # largest elements first: every tensor then starts at a multiple of its element size
    return sorted(weights.names() if names is None else names, key=lambda name: (-weights.dtype(name).itemsize, name))


def _header(weights: Weights, order: list[str], metadata: Mapping[str, str]) -> tuple[Mapping[str, object], int]:
    header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    offset = 0
    for name in order:
        shape, dtype = weights.shape(name), weights.dtype(name)
        if dtype not in _KINDS:
            raise ModelError(f"{name} is {dtype}, which safetensors cannot hold; save it as float32")
        end = offset + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": _KINDS[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    return header, offset


def _write(weights: Weights, order: list[str], header: Mapping[str, object], file: IO[bytes]) -> None:
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in order:
        tensor = weights.load(name).detach()
        if (tensor.dtype, tuple(tensor.shape)) != (weights.dtype(name), tuple(weights.shape(name))):
            raise ModelError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}, but was announced as {weights.dtype(name)} "
                f"{tuple(weights.shape(name))}; nothing was saved; make a new pipeline of the changed model"
            )
        flat = tensor.contiguous().reshape(-1)
        if flat.numel():
            file.write(flat.view(torch.uint8).numpy().data)


class _Config(msgspec.Struct):
    """Class names in a config.json: `id2label` of transformers, `label_names` of timm."""

    id2label: dict[int, _Name] = {}
    label_names: _Names = []


def write_classes(names: Sequence[str] | None) -> dict[str, str]:
    """Return the metadata that stores class names in a weights file, in the order of the model's outputs.

    >>> write_classes(["cat", "dog"])
    {'penstock.classes': '["cat","dog"]'}
    """
    return {_KEY: msgspec.json.encode(list(names)).decode()} if names else {}


def read_classes(metadata: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the class names in a weights file's metadata, or None.

    Raises `ModelError` if they are not a list of names.
    """
    if _KEY not in metadata:
        return None
    try:
        names = tuple(msgspec.json.decode(metadata[_KEY], type=_Names))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ModelError(f"the file's {_KEY} cannot be read ({error}); train or compress the model again") from None
    return names or None


def names_of_labels(id2label: Mapping[int, str]) -> tuple[str, ...] | None:
    """Return the names in a configuration's `id2label`, or None for the default ones.

    >>> names_of_labels({0: "cat", 1: "dog"}), names_of_labels({0: "LABEL_0", 1: "LABEL_1"})
    (('cat', 'dog'), None)
    """
    if all(name == f"LABEL_{index}" for index, name in id2label.items()):
        return None
    return tuple(id2label[index] for index in sorted(id2label))


def names_beside(weights: Path) -> tuple[str, ...] | None:
    """Return the class names in the config.json next to a weights file, as transformers and timm write it, or None."""
    folder = weights if weights.is_dir() else weights.parent
    with suppress(OSError, msgspec.MsgspecError, RecursionError):  # the file may belong to something else
        config = msgspec.json.decode((folder / "config.json").read_bytes().removeprefix(BOM_UTF8), type=_Config)
        return tuple(config.label_names) or names_of_labels(config.id2label)
    return None
