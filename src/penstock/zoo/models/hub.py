"""Files of published models: taken from the local cache, otherwise downloaded."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlparse

import torch

from penstock.errors import ModelError
from penstock.text import one_line
from penstock.zoo.optional import optional_import
from penstock.zoo.weights.convert import convert_checkpoint

_ADVICE = "give --weights FILE.safetensors or leave --pretrained out"


def fetch_from_hub(model: str, repo: str, names: Sequence[str], extra: str, advice: str = _ADVICE) -> Path:
    """Return the first of these files that a hub repository has, from the cache if possible.

    >>> fetch_from_hub("timm:resnet18", "timm/resnet18.a1_in1k", ["a.bin"], "vision")  # doctest: +SKIP

    Raises `ModelError` if the hub cannot be reached or has none of the files.
    """
    hub = optional_import("huggingface_hub", extra)
    repo, _, revision = repo.partition("@")
    for name in names:
        found = hub.try_to_load_from_cache(repo, name, revision=revision or None)
        if isinstance(found, str):
            return Path(found)
    problem: Exception | None = None
    with _quiet("huggingface_hub"):
        for name in names:
            try:
                return Path(hub.hf_hub_download(repo, name, revision=revision or None))
            except hub.errors.LocalEntryNotFoundError as unreachable:
                problem = unreachable
                break
            except hub.errors.EntryNotFoundError as absent:
                problem = absent
            except Exception as other:
                problem = other
                break
    raise _unreachable(model, problem or ValueError("no file name given"), advice)


def fetch_url(model: str, url: str) -> Path:
    """Return a file from an address, from torch's cache if possible.

    >>> fetch_url("timm:resnet18", "https://host.example/resnet18.pth")  # doctest: +SKIP

    Raises `ModelError` if the address cannot be reached.
    """
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    target = folder / Path(urlparse(url).path).name
    if not target.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(url, str(target), progress=False)
        except Exception as problem:
            raise _unreachable(model, problem) from problem
    return target


def as_safetensors(file: Path) -> Path:
    """Return the file itself, or a converted copy kept next to a pickled one.

    >>> as_safetensors(Path("model.safetensors"))
    PosixPath('model.safetensors')

    Raises `ModelError` if the file cannot be converted.
    """
    if file.suffix == ".safetensors":
        return file
    target = file.with_name(f"{file.name}.safetensors")
    if not target.exists():
        convert_checkpoint(file, target)
    return target


def _unreachable(model: str, problem: Exception, advice: str = _ADVICE) -> ModelError:
    """Make the one-line error for a published model that cannot be downloaded."""
    # the first sentence of the hub's message has the reason; the rest is advice and an address
    reason = one_line(problem, 1000).partition(". ")[0].rstrip(".")[:160]
    return ModelError(f"the files of {model} cannot be downloaded ({reason}); {advice}")


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Suppress a library's messages about retries, since the final error reports the failure."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
