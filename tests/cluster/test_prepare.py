"""Files that are brought to a machine, which is this one behind a program that stands for ssh."""

import hashlib
import json
import sys
from pathlib import Path

import pytest

from penstock.cluster.ssh.prepare import bring
from penstock.cluster.ssh.remote import Host
from penstock.errors import ClusterError


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    program = tmp_path / "ssh"
    program.write_text('#!/bin/sh\nfor last; do :; done\nexec sh -c "$last"\n')
    program.chmod(0o700)
    monkeypatch.setenv("PENSTOCK_SSH", str(program))
    return Host("board", "board", folder=str(tmp_path / "box"), python=sys.executable)


def test_push_removes_only_pushed_files(host: Host) -> None:
    top = Path(host.folder)
    assert bring(host, host.folder, {"a.py": b"1", "sub/b.py": b"22"}) == 3
    assert bring(host, host.folder, {"a.py": b"1", "sub/b.py": b"22"}) == 0
    (top / "mine").write_text("somebody's")
    (top / "sub" / "mine.py").write_text("somebody's")
    assert bring(host, host.folder, {"a.py": b"333"}) == 3
    assert (top / "a.py").read_bytes() == b"333"
    assert not (top / "sub" / "b.py").exists()
    assert (top / "mine").read_text() == (top / "sub" / "mine.py").read_text() == "somebody's"


def test_changed_remote_files_are_pushed_again(host: Host) -> None:
    top = Path(host.folder)
    bring(host, host.folder, {"a.py": b"1", "b.py": b"2"})
    (top / "a.py").write_text("changed")
    (top / "b.py").write_text("changed")
    assert bring(host, host.folder, {"a.py": b"1"}) == 1
    assert (top / "a.py").read_bytes() == b"1"
    assert (top / "b.py").read_text() == "changed"


@pytest.mark.parametrize("name", ["mine.txt", "src/mine.txt", "a.py"])
def test_a_folder_with_files_of_others_is_refused(host: Host, name: str) -> None:
    place = Path(host.folder) / name
    place.parent.mkdir(parents=True)
    place.write_text("somebody's")
    with pytest.raises(ClusterError, match="board") as raised:
        bring(host, host.folder, {"a.py": b"1"})
    assert "\n" not in str(raised.value)
    assert [path for path in Path(host.folder).rglob("*") if path.is_file()] == [place]
    assert place.read_text() == "somebody's"


def test_a_file_in_the_way_is_refused(host: Host) -> None:
    bring(host, host.folder, {"a.py": b"1"})
    (Path(host.folder) / "b.py").write_text("somebody's")
    with pytest.raises(ClusterError, match=r"b\.py"):
        bring(host, host.folder, {"a.py": b"1", "b.py": b"2"})
    assert (Path(host.folder) / "b.py").read_text() == "somebody's"


def test_a_folder_that_runs_write_to_keeps_what_they_wrote(host: Host) -> None:
    top = Path(host.folder)
    top.mkdir()
    (top / "rows.csv").write_text("of a run")
    bring(host, host.folder, {"cluster.toml": b"1", "profile.json": b"2"}, clean=False)
    bring(host, host.folder, {"cluster.toml": b"3"}, clean=False)
    assert {path.name: path.read_text() for path in top.iterdir() if not path.name.startswith(".")} == {
        "rows.csv": "of a run",
        "cluster.toml": "3",
        "profile.json": "2",
    }


def test_a_manifest_reaches_no_other_folder(host: Host, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("1")
    digest = hashlib.sha256(b"1").hexdigest()
    bring(host, host.folder, {"a.py": b"1"})
    manifest = {"a.py": digest, "../outside": digest, str(outside): digest}
    (Path(host.folder) / ".penstock-files.json").write_text(json.dumps(manifest))
    bring(host, host.folder, {"a.py": b"1"})
    assert outside.exists()
