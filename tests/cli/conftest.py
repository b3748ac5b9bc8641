"""What the tests of the command line share."""

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from penstock.cli.main import main

# two blocks at 32 pixels: a pass takes milliseconds
SMALL = "timm:vit_tiny_patch16_224,depth=2,img_size=32,patch_size=8,num_classes=4"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Seven pictures in two labelled folders."""
    folder = tmp_path / "photos"
    for index in range(7):
        place = folder / ("cats" if index % 2 else "dogs")
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40 + index, 30), (30 * index, 100, 255 - 30 * index)).save(place / f"{index}.png")
    return folder


@pytest.fixture
def penstock(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """Run the command line in this process and an empty folder, with text that a person types.

    Gives exit status, output and errors.
    """
    monkeypatch.chdir(tmp_path)  # a verb without --output writes here

    def run(*arguments: object, typed: str | None = None) -> tuple[int, str, str]:
        if typed is not None:
            monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        status = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run
