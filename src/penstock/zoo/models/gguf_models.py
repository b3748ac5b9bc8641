"""Language models in GGUF files, llama.cpp's format: names and layouts by transformers, one tensor at a time."""

import contextlib
import functools
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from penstock.errors import ModelError
from penstock.packing import PACKINGS, packed_shape, unpacked
from penstock.text import one_line
from penstock.zoo.models.hf_models import build_hf
from penstock.zoo.models.meta import move_to_meta, parameter_shapes
from penstock.zoo.optional import optional_import, without_panics
from penstock.zoo.weights.weights import ModuleWeights, PackedWeights, Shape, Weights

# transformers' conversions, by the class that undoes llama.cpp's: these move whole rows, so blocks stay as they are
_IN_PLACE = {
    "TensorProcessor",
    "LlamaTensorProcessor",
    "T5TensorProcessor",
    "NemotronTensorProcessor",
    "Gemma2TensorProcessor",
}
# these convert one tensor to one tensor; the others join several experts
_IN_FLOATS = {"BloomTensorProcessor", "GPT2TensorProcessor", "MambaTensorProcessor", "Lfm2TensorProcessor"}
_PLAIN = {"F32", "F64"}
_AS_WRITTEN = {"output.weight": "lm_head.weight"}  # a name that GPT-2's conversion maps itself


def gguf_file(name: str) -> Path:
    """Return the file of a `gguf:` model: a path, or the only .gguf file of an installed package.

    >>> gguf_file("gguf:models/smollm2.gguf")  # doctest: +SKIP
    PosixPath('models/smollm2.gguf')

    Raises `ModelError` if there is none.
    """
    rest = name.partition(":")[2]
    path = Path(rest).expanduser()
    if path.is_file():
        return path
    found: list[Path] = []
    if rest.isidentifier():
        spec = importlib.util.find_spec(rest)  # a package is not imported for its files
        for place in (spec.submodule_search_locations or ()) if spec is not None else ():
            found += sorted(Path(place).rglob("*.gguf"))
    if len(found) != 1:
        raise ModelError(
            f"{name} is neither a file nor an installed package with one .gguf file (found {len(found)}); give the "
            "path of a .gguf file"
        )
    return found[0]


def load_gguf(name: str) -> tuple[nn.Module, Weights]:
    """Return the module of a `gguf:` model, in float32, and its weights, each read from the file when it is loaded.

    Models whose experts are stored together are read whole. Raises `ModelError`.
    """
    with _reading(gguf_file(name)) as (file, transformers):
        read = optional_import("transformers.modeling_gguf_pytorch_utils", "text")
        settings = read.load_gguf_checkpoint(file)["config"]
        processor = read.TENSOR_PROCESSORS.get(settings["model_type"], read.TensorProcessor)
        if processor.__name__ in {*_IN_PLACE, *_IN_FLOATS}:
            module, _ = build_hf(name, transformers.AutoConfig.for_model(**settings), 0, "language")
            names = read.get_gguf_hf_weights_map(module, processor(config=settings))
            weights = GgufWeights(file, module, processor(config=settings), names)
            _scale_frequencies(module, weights)
            return module, weights
        module = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32
        ).eval()
    parameter_shapes(module)
    whole = ModuleWeights(module)
    move_to_meta(module)
    return module, whole


def load_gguf_tokenizer(name: str) -> Any:
    """Return the tokenizer in the file of a `gguf:` model; raises `ModelError`."""
    with _reading(gguf_file(name)) as (file, transformers):
        return transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def gguf_ends(name: str) -> list[int]:
    """Return the tokens that end a turn or a message in the file of a `gguf:` model, apart from its end of text."""
    file = gguf_file(name)
    return _header(str(file), _version(file)).ends


class GgufWeights(PackedWeights[Any]):
    """The tensors of a GGUF file under the names of a transformers model, read from the mapped file one at a time.

    `packing` is the block format of a tensor that a stage may hold in the file's own bits; `load` unpacks it.
    """

    _holder = "the file has"

    def __init__(self, file: Path, module: nn.Module, processor: Any, names: Mapping[str, str]) -> None:
        self._library = optional_import("gguf", "gguf")
        self._processor, self._file = processor, file
        self._shapes = {name: tuple(x.shape) for name, x in module.state_dict().items()}
        self._as_read = _version(file)
        tensors = dict(_header(str(file), self._as_read).tensors)
        self.frequencies = tensors.pop("rope_freqs.weight", None)
        taken = {names.get(name, _AS_WRITTEN.get(name, name)): tensor for name, tensor in tensors.items()}
        if unused := sorted(taken.keys() - self._shapes.keys()):
            raise ModelError(
                f"{file} has {len(unused)} tensors that transformers' {type(module).__name__} does not take, such as "
                f"{unused[0]}; give another file of the model, or its safetensors"
            )
        super().__init__(taken)

    def shape(self, name: str) -> Shape:
        """Return a tensor's shape."""
        self._find(name)
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """Return float32."""
        self._find(name)
        return torch.float32

    def packing(self, name: str) -> str:
        """Return a tensor's block format; empty if it is stored as numbers, or must be unpacked to be converted."""
        tensor = self._find(name)
        plain = tensor.tensor_type.name in _PLAIN or len(self._shapes[name]) != 2
        return "" if plain or type(self._processor).__name__ not in _IN_PLACE else tensor.tensor_type.name

    def load(self, name: str) -> Tensor:
        """Return one tensor in float32."""
        tensor = self._find(name)
        if (packing := tensor.tensor_type.name) in PACKINGS and len(self._shapes[name]) == 2:
            return self._converted(name, tensor, unpacked(_bytes(self._read(tensor)), packing).numpy())
        return self._converted(name, tensor, self._library.dequantize(self._read(tensor), tensor.tensor_type))

    def load_packed(self, name: str) -> Tensor:
        """Return the bytes of one tensor [O, bytes], in the order of the model's rows."""
        tensor = self._find(name)
        made = self._processor.process(weights=_bytes(self._read(tensor)).numpy(), name=tensor.name).weights
        return self._fitting(tensor, made, packed_shape(self.packing(name), self._shapes[name]))

    def beginning(self, name: str) -> Tensor:
        """Return the first stored bytes of a tensor, in the order of the file."""
        return torch.from_numpy(self._read(self._find(name), 1)).view(torch.uint8)

    def _read(self, tensor: Any, rows: int | None = None) -> Any:
        """Read a tensor, or its first rows, into memory of its own: a mapped page would stay with this process."""
        if _version(self._file) != self._as_read:
            raise ModelError(f"{self._file} has changed since its header was read; start again")
        like = tensor.data[:rows]
        found = np.fromfile(self._file, like.dtype, like.size, offset=int(tensor.data_offset))
        if found.size != like.size:
            raise ModelError(f"{self._file} ends within {tensor.name}; download it again")
        return found.reshape(like.shape)

    def _converted(self, name: str, tensor: Any, values: Any) -> Tensor:
        parsed: dict[str, dict[str, Tensor]] = {"tensors": {}}
        made = self._processor.process(
            weights=values, name=tensor.name, tensor_key_mapping={}, parsed_parameters=parsed
        )
        return self._fitting(tensor, made.weights.astype(np.float32, copy=False), self._shapes[name])

    def _fitting(self, tensor: Any, values: Any, wanted: Shape) -> Tensor:
        if values.shape != wanted:
            raise ModelError(
                f"{tensor.name} in {self._file} is {values.shape}, but the model has {wanted}; download it again"
            )
        return torch.from_numpy(np.require(values, requirements=["C", "W"]))


def _bytes(rows: Any) -> Tensor:
    """Return the bytes of a tensor's rows; the reader makes numbers of F16."""
    return torch.from_numpy(rows).view(torch.uint8)


def _scale_frequencies(module: nn.Module, weights: GgufWeights) -> None:
    """Divide the frequencies of rotary embeddings by the file's factors, by which llama.cpp extends a context."""
    if weights.frequencies is None:
        return
    factors = torch.from_numpy(np.array(weights.frequencies.data, dtype=np.float32)).flatten()
    scaled = 0
    for owner in module.modules():
        for leaf in ("inv_freq", "original_inv_freq"):
            frequencies = owner._buffers.get(leaf)
            if frequencies is not None and frequencies.shape == factors.shape:
                owner._buffers[leaf] = frequencies / factors
                scaled += 1
    if not scaled:
        raise ModelError("the file has factors of rotary frequencies that its model does not take; give another file")


class _Header(NamedTuple):
    """The header of a file: its tensors, mapped, and the tokens that end a turn or a message."""

    tensors: dict[str, Any]
    ends: list[int]


def _version(file: Path) -> tuple[int, int]:
    """Return what changes when a file is written again."""
    try:
        status = file.stat()
    except OSError as problem:
        raise ModelError(f"cannot read {file} ({one_line(problem)})") from problem
    return status.st_mtime_ns, status.st_size


@functools.lru_cache(maxsize=2)
def _header(file: str, _version: tuple[int, int]) -> _Header:
    """Read a header; raises `ModelError` for a file that claims more or larger layers than its tensors can be.

    transformers builds the claimed model before it reads the tensors.
    """
    library = optional_import("gguf", "gguf")
    reader = library.GGUFReader(file)
    largest = max((int(size) for tensor in reader.tensors for size in tensor.shape), default=0)
    most = {"block_count": len(reader.tensors), "embedding_length": largest, "feed_forward_length": largest}
    for key, field in reader.fields.items():
        limit = most.get(key.rpartition(".")[2])
        if limit is not None and max(np.atleast_1d(field.contents())) > limit:
            raise ModelError(
                f"{file} claims {key} {field.contents()}, but its {len(reader.tensors)} tensors have at most {limit}; "
                "download it again"
            )
    ends = [reader.get_field(key) for key in (library.Keys.Tokenizer.EOT_ID, library.Keys.Tokenizer.EOM_ID)]
    return _Header(
        {tensor.name: tensor for tensor in reader.tensors}, [int(end.contents()) for end in ends if end is not None]
    )


@contextlib.contextmanager
def _reading(file: Path) -> Iterator[tuple[Path, Any]]:
    """Check a file's header, and say in one line what transformers cannot read; yields the file and transformers."""
    for library in ("gguf", "accelerate"):
        optional_import(library, "gguf")
    transformers = optional_import("transformers", "text")
    logging = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        _header(str(file), _version(file))
        with without_panics():
            yield file, transformers
    except ModelError:
        raise
    except Exception as problem:  # invalid files may raise anything
        raise ModelError(f"transformers cannot read {file} ({one_line(problem)}); give another .gguf file") from problem
    finally:
        if shown:
            logging.enable_progress_bar()
