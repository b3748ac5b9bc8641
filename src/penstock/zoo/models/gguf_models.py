"""Language models in GGUF files, llama.cpp's format; transformers reads them and converts weights to floats."""

import functools
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.errors import ModelError
from penstock.text import one_line
from penstock.zoo.optional import optional_import, without_panics


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


def load_gguf(name: str) -> Any:
    """Return the module of a `gguf:` model, in float32 with all of its weights; raises `ModelError`."""
    return _read(name, "AutoModelForCausalLM", dtype=torch.float32).eval()


def load_gguf_tokenizer(name: str) -> Any:
    """Return the tokenizer in the file of a `gguf:` model; raises `ModelError`."""
    return _read(name, "AutoTokenizer")


def gguf_ends(name: str) -> list[int]:
    """Return the tokens that end a turn or a message in the file of a `gguf:` model, apart from its end of text."""
    library = optional_import("gguf", "gguf")
    reader = library.GGUFReader(gguf_file(name))
    fields = [reader.get_field(key) for key in (library.Keys.Tokenizer.EOT_ID, library.Keys.Tokenizer.EOM_ID)]
    return [int(field.contents()) for field in fields if field is not None]


@functools.cache
def _check_claims(file: str) -> None:
    """Raise `ModelError` for a file that claims more or larger layers than its tensors can be.

    transformers builds the claimed model before it reads the tensors.
    """
    reader = optional_import("gguf", "gguf").GGUFReader(file)
    largest = max((int(size) for tensor in reader.tensors for size in tensor.shape), default=0)
    most = {"block_count": len(reader.tensors), "embedding_length": largest, "feed_forward_length": largest}
    for key, field in reader.fields.items():
        limit = most.get(key.rpartition(".")[2])
        if limit is not None and max(np.atleast_1d(field.contents())) > limit:
            raise ModelError(
                f"{file} claims {key} {field.contents()}, but its {len(reader.tensors)} tensors have at most {limit}; "
                "download it again"
            )


def _read(name: str, kind: str, **options: Any) -> Any:
    file = gguf_file(name)
    for library in ("gguf", "accelerate"):
        optional_import(library, "gguf")
    transformers = optional_import("transformers", "text")
    logging = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        _check_claims(str(file))
        with without_panics():
            return getattr(transformers, kind).from_pretrained(file.parent, gguf_file=file.name, **options)
    except ModelError:
        raise
    except Exception as problem:  # invalid files may raise anything
        raise ModelError(f"transformers cannot read {file} ({one_line(problem)}); give another .gguf file") from problem
    finally:
        if shown:
            logging.enable_progress_bar()
