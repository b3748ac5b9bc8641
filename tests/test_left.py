"""What processes that were killed leave behind goes with the next one that writes there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cluster.ssh.keeper import drop_left_keys
from penstock.files import locked, write_whole, written_whole
from tests.processes import PROGRAMS, ROOT, run_python


def test_a_file_of_a_killed_save_is_swept(tmp_path: Path) -> None:
    target = tmp_path / "model.safetensors"
    process = subprocess.Popen([sys.executable, str(PROGRAMS / "half_written.py"), str(target)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    (half,) = tmp_path.iterdir()
    os.utime(half, (0, 0))
    write_whole(target, "mine")  # while the other one is still writing
    assert len(list(tmp_path.iterdir())) == 2
    process.kill()
    process.wait()
    process.stdout.close()
    write_whole(tmp_path / "another", "beside")
    assert len(list(tmp_path.iterdir())) == 3
    write_whole(target, "again")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["another", "model.safetensors"]
    assert target.read_text() == "again"


def test_files_with_similar_names_are_kept(tmp_path: Path) -> None:
    mine = [
        tmp_path / name for name in (".a.txt.backup", f".b.txt.{'0' * 16}", f".a.txt.{'g' * 16}", f"a.txt.{'0' * 16}")
    ]
    for path in mine:
        path.write_text("mine")
        os.utime(path, (0, 0))
    write_whole(tmp_path / "a.txt", "x")
    assert all(path.exists() for path in mine)


def test_devices_and_links_are_written_through(tmp_path: Path) -> None:
    write_whole(Path("/dev/null"), "nothing")
    assert Path("/dev/null").is_char_device()
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("before")
    link.symlink_to(target)
    write_whole(link, "after")
    assert link.is_symlink()
    assert target.read_text() == "after"


def test_a_write_that_fails_keeps_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "kept"
    target.write_text("before")

    def fail() -> None:
        with written_whole(target) as file:
            file.write(b"x")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert target.read_text() == "before"


def test_lock_excludes_other_processes(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from penstock.files import locked\nwith locked(Path(sys.argv[1])): pass"
    )
    with locked(tmp_path / "lock"):
        ended = subprocess.run([sys.executable, "-c", code, str(tmp_path / "lock")], check=False, capture_output=True)
        assert b"BlockingIOError" in ended.stderr
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "lock")], check=False).returncode == 0


def test_a_key_goes_when_its_keeper_was_killed(tmp_path: Path) -> None:
    keys = [tmp_path / f"run-{number}.key" for number in (1, 2)]
    program = str(PROGRAMS / "key_keeper.py")
    keepers = [subprocess.Popen([sys.executable, program, str(key)], stdout=subprocess.PIPE) for key in keys]
    for keeper in keepers:
        assert keeper.stdout is not None
        keeper.stdout.readline()
    keepers[0].kill()
    keepers[0].wait()
    drop_left_keys(str(tmp_path))
    assert [key.exists() for key in keys] == [False, True]
    keepers[1].kill()
    keepers[1].wait()
    for keeper in keepers:
        keeper.stdout.close()  # type: ignore[union-attr]


def test_a_missing_interpreter_leaves_no_key(tmp_path: Path) -> None:
    keeper = ROOT / "src" / "penstock" / "cluster" / "ssh" / "keeper.py"
    arguments = [sys.executable, "-I", str(keeper), "1", str(tmp_path), str(tmp_path / "no-python"), "--", "split"]
    ended = subprocess.run(arguments, input=b"secret\n", capture_output=True, check=False, timeout=60)
    assert ended.returncode != 0
    assert list(tmp_path.iterdir()) == []


def test_processes_that_tests_kill_have_no_folders_of_wandb() -> None:
    """It makes them where it is imported, as by timm, and only the usual end of an interpreter removes them."""
    done = run_python("-c", "import sys, timm; print('wandb' in sys.modules)", deadline_s=60.0)
    assert (done.status, done.stdout) == (0, "False\n")
