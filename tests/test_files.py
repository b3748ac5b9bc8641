"""Files that are whole or not there, and what happens when the disk is full: pretended, and a small one really."""

import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import RunError
from penstock.files import LineFile, write_whole, written_whole
from penstock.recipes.predictions import PredictionFile
from penstock.zoo.weights.weight_files import save_weights
from penstock.zoo.weights.weights import TensorWeights


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of two pages, one of which is taken by `filler`."""
    if os.geteuid():
        pytest.skip("mounting needs root")
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", str(place)], check=True)
    try:
        (place / "filler").write_bytes(bytes(4096))
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_file_is_replaced_only_when_complete(tmp_path: Path) -> None:
    target = tmp_path / "one"
    target.write_text("before")
    with contextlib.suppress(KeyError), written_whole(target) as file:
        file.write(b"half")
        raise KeyError
    assert target.read_text() == "before"
    with written_whole(target) as file:
        file.write(b"after")
    assert target.read_text() == "after"
    assert list(tmp_path.iterdir()) == [target], "something was left behind"


def test_new_file_has_default_permissions(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    with written_whole(tmp_path / "whole") as file:
        file.write(b"")
    assert (tmp_path / "whole").stat().st_mode == (tmp_path / "plain").stat().st_mode


class _Full:
    """A disk that takes so many more bytes, half of the last line among them."""

    def __init__(self, file: Any, room: int) -> None:
        self._file, self._room = file, room

    def write(self, data: memoryview) -> int:
        if not self._room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = min(self._room, len(data))
        self._room -= taken
        return int(self._file.write(data[:taken]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def test_incomplete_line_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    with LineFile(path) as file:
        file.write("one\n")
        file._file = _Full(file._file, 2)  # type: ignore[assignment]
        with pytest.raises(OSError, match="No space left"):
            file.write("two\n")
        assert path.read_text() == "one\n"
        file._file = file._file._file  # type: ignore[attr-defined]
        file.write("three\n")
    assert path.read_text() == "one\nthree\n"


@pytest.mark.parametrize("name", ["out.csv", "out.jsonl"])
def test_predictions_continue_after_a_full_disk(tmp_path: Path, name: str) -> None:
    rows = [{"image": f"{index}.jpg", "prediction": index} for index in range(3)]
    with PredictionFile(tmp_path / name) as file:
        file.write(rows[0])
        file._file._file = _Full(file._file._file, 3)  # type: ignore[assignment]
        with pytest.raises(RunError, match=r"\(No space left on device\); its 1 row are kept"):
            file.write(rows[1])
    with PredictionFile(tmp_path / name, resume=True) as file:
        assert [row["image"] for row in file.done] == ["0.jpg"]


@pytest.mark.root
@pytest.mark.parametrize("name", ["out.csv", "out.jsonl"])
def test_real_full_disk_keeps_complete_rows(small_disk: Path, name: str) -> None:
    def fill(file: PredictionFile) -> None:
        for index in range(1000):
            file.write({"image": f"{index}.jpg", "prediction": 1})

    with PredictionFile(small_disk / name) as file, pytest.raises(RunError, match="No space left on device"):
        fill(file)
    assert (small_disk / name).read_bytes().endswith(b"\n")
    (small_disk / "filler").unlink()
    with PredictionFile(small_disk / name, resume=True) as file:
        assert [row["image"] for row in file.done] == [f"{index}.jpg" for index in range(len(file.done))]
        assert len(file.done) > 50
        file.write({"image": "last.jpg", "prediction": 1})


@pytest.mark.parametrize("save", [write_whole, lambda path, _: save_weights(TensorWeights({}), path)])
def test_links_and_permissions_are_kept(tmp_path: Path, save: Any) -> None:
    (tmp_path / "far").mkdir()
    target, link = tmp_path / "far" / "target", tmp_path / "link"
    link.symlink_to(target)
    save(link, b"first")
    target.chmod(0o600)
    save(link, b"second")
    assert link.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in (tmp_path / "far").iterdir()] == ["target"]


@pytest.mark.fresh
def test_devices_and_pipes_as_outputs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "penstock", "schedule", "1f1b"]
    piped = subprocess.run([*command, "--json", "/dev/fd/1"], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert '"schedule": "1f1b"' in piped.stdout
    for options in ([], ["--json", "/dev/full"]):
        with Path(os.devnull if options else "/dev/full").open("w") as full:
            found = subprocess.run(
                [*command, *options], stdout=full, stderr=subprocess.PIPE, text=True, check=False, cwd=tmp_path
            )
        assert (found.returncode, found.stderr.count("\n")) == (2 if options else 1, 1), found.stderr
        assert "No space left" in found.stderr
