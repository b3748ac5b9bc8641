"""Connections in a folder of one account."""

import os
import stat
from pathlib import Path

import pytest

from penstock.errors import UsageError
from penstock.group.addresses import PrivateFolder, local_address, reach, remove_left
from penstock.group.board import nobody_listens
from penstock.transport.connections import FolderConnections
from tests.processes import run_python


def test_a_folder_is_this_accounts_alone_and_goes_with_its_maker() -> None:
    folder = PrivateFolder()
    path = Path(folder.path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    del folder
    assert not path.exists()
    ended = run_python(
        "-c",
        "from penstock.group.addresses import PrivateFolder; folder = PrivateFolder(); print(folder.path)",
        deadline_s=60.0,
    )
    assert ended.status == 0, ended.stderr
    assert not Path(ended.stdout.strip()).exists()


def test_another_account_reaches_no_socket_in_it() -> None:
    folder, connections = PrivateFolder(), FolderConnections()
    socket, port = connections.listen(folder.path)
    reach(folder.path, port, 1.0)
    if os.geteuid() == 0:  # who may everything is to be somebody else
        child = os.fork()
        if not child:
            os.setuid(65534)
            try:
                reach(folder.path, port, 1.0)
            except PermissionError:
                os._exit(7)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    socket.close(0)
    connections.close()
    folder.close()


def test_port_can_be_taken_once() -> None:
    """libzmq itself takes the place of a socket that is there."""
    folder, connections = PrivateFolder(), FolderConnections()
    sockets = [connections.listen(folder.path) for _ in range(3)]
    assert [port for _, port in sockets] == [1, 2, 3]
    sockets.append(connections.listen(folder.path, 29500))
    with pytest.raises(OSError, match="Address already in use"):
        connections.listen(folder.path, 29500)
    for socket, _ in sockets:
        socket.close(0)
    connections.close()
    assert nobody_listens(folder.path, 29500)
    with pytest.raises(RuntimeError, match="29500 is not served"):
        FolderConnections().connect(folder.path, 29500, b"", 3.0)
    folder.close()


def test_only_leftovers_of_others_are_removed(tmp_path: Path) -> None:
    left, other, kept = tmp_path / "penstock-1", tmp_path / "photos", tmp_path / "penstock-2"
    for path in (left, other, kept):
        path.mkdir()
        (path / "29500.taken").touch()
    (kept / "weights.safetensors").touch()
    for path in (left, other, kept, tmp_path / "penstock-3"):
        remove_left(str(path))
    remove_left("")
    assert not left.exists()
    assert (other / "29500.taken").exists()
    assert (kept / "weights.safetensors").exists()


def test_folders_of_processes_that_were_killed_are_removed(temporary: Path) -> None:
    lives, old, new = PrivateFolder(), temporary / "penstock-12345678", temporary / "penstock-abcdefgh"
    for path in (old, new):
        path.mkdir()
        (path / "29500.taken").touch()
    for path in (old, Path(lives.path)):
        os.utime(path, (0, 0))
    PrivateFolder().close()
    assert {*temporary.iterdir()} == {new, Path(lives.path)}
    lives.close()
    assert not Path(lives.path).exists()


def test_a_folder_with_too_long_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / ("x" * 100)
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    with pytest.raises(UsageError, match=f"at most 94 bytes, but {place}.*TMPDIR"):
        PrivateFolder()
    assert not list(place.iterdir())


def test_folder_is_its_own_local_address() -> None:
    assert local_address("/tmp/penstock-5f0c") == "/tmp/penstock-5f0c"
