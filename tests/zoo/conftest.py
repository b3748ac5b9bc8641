"""What tests of models and their files share."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No network, and nothing that was fetched earlier."""
    constants = pytest.importorskip("huggingface_hub").constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))


@pytest.fixture
def serve_hub(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], list[str]]:
    """Let every repository of the hub have the files of a folder; gives the names of the files that are asked for."""
    hub = pytest.importorskip("huggingface_hub")
    cache = tmp_path_factory.mktemp("fetched")

    def serve(remote: Path) -> list[str]:
        asked: list[str] = []

        def download(_repo: str, name: str, **_options: object) -> str:
            asked.append(name)
            if not (remote / name).exists():
                raise hub.errors.EntryNotFoundError(name)
            return str(shutil.copy(remote / name, cache / name))

        monkeypatch.setattr(hub, "hf_hub_download", download)
        monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *_args, **_options: None)
        return asked

    return serve
