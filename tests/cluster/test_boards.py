"""Hosts of a lab with another processor, which is emulated: the same messages and the same classes."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.boards import count_anonymous
from benchmarks.faults.bare import installed
from penstock.cli.main import main
from penstock.cluster.lab.network import RecordingShell, SystemShell
from penstock.cluster.lab.processes import check_root, command_line, inside, root_folder
from penstock.errors import ClusterError, RunError
from tests.cli.conftest import SMALL
from tests.cluster.labs import make_spec
from tests.cluster.test_lab_without_root import targets
from tests.processes import ROOT

BOARD = root_folder("aarch64")
EMULATED = (
    BOARD is not None and (BOARD / "opt/installed").exists() and Path("/proc/sys/fs/binfmt_misc/qemu-aarch64").exists()
)


def test_command_for_the_same_processor_is_unchanged() -> None:
    assert root_folder(os.uname().machine) is None
    assert inside(None, ["python", "-c", ""]) == ["python", "-c", ""]


def test_python_is_that_of_the_root() -> None:
    target = replace(targets(make_spec("lab"))[1], root=Path("/roots/arm"))
    line = command_line(target, [sys.executable, "-m", "penstock"])
    assert line[-3:] == ["/opt/penstock/bin/python", "-m", "penstock"]
    assert "/roots/arm" in line


def test_a_root_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_ROOTS", str(tmp_path))
    with pytest.raises(ClusterError, match=r"host1 .*scripts/sparc\.sh build"):
        check_root("host1", "sparc", SystemShell())


def test_a_processor_that_is_not_emulated_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_ROOTS", str(tmp_path))
    python = tmp_path / "sparc/opt/penstock/bin/python"
    python.parent.mkdir(parents=True)
    python.touch()
    shell = RecordingShell({f"chroot {tmp_path}/sparc true": RunError("exec format error")})
    with pytest.raises(ClusterError, match=r"host1 .*exec format error"):
        check_root("host1", "sparc", shell)


def test_packages_in_the_environment_of_a_machine_are_found(tmp_path: Path) -> None:
    packages = tmp_path / ".venv/lib/python3.13/site-packages"
    for name in ("torch-2.15.0", "triton-3.9.0", "nvidia_nccl-2.30", "numpy-2.4.0"):
        (packages / f"{name}.dist-info").mkdir(parents=True)
    (packages / "torch.py").write_bytes(bytes(3_000_000))
    assert installed(tmp_path) == {
        "mb": 3,
        "torch": ["torch-2.15.0.dist-info"],
        "cuda_packages": ["nvidia_nccl-2.30.dist-info", "triton-3.9.0.dist-info"],
    }


SMAPS = """
00a6d000-00c06000 rw-p 00000000 00:00 0
Anonymous:          1000 kB
555590a29000-555590df1000 rw-p 00000000 00:00 0                          [heap]
Anonymous:            20 kB
7fe187200000-7fe18f1ff000 rwxp 00000000 00:00 0
Anonymous:           300 kB
"""
EMULATOR = """
7fe190654000-7fe1907d8000 r--p 00512000 08:01 412                        /usr/bin/qemu-aarch64-static
Anonymous:          4000 kB
"""


def test_memory_of_the_emulator_is_left_out() -> None:
    assert count_anonymous(SMAPS.splitlines()) == 1320 * 1024
    assert count_anonymous((SMAPS + EMULATOR).splitlines()) == 1000 * 1024


def test_packages_of_a_root_are_the_same_for_every_clone(tmp_path: Path) -> None:
    found = []
    for clone in (tmp_path / "one", tmp_path / "two"):
        (clone / "scripts").mkdir(parents=True)
        shutil.copy(ROOT / "scripts/roots.sh", clone / "scripts")
        (clone / "constraints.txt").write_text("numpy==2.4.0\n")
        script = f". {clone}/scripts/roots.sh; fingerprint --constraint {clone}/build/constraints-1.txt torch"
        found.append(subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True).stdout)
    assert found[0] == found[1] != ""


@pytest.mark.root
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="a lab needs root")
@pytest.mark.skipif(not EMULATED, reason="no emulated board is here; scripts/aarch64.sh build makes one")
@pytest.mark.timeout(900)
def test_a_stream_through_this_machine_and_a_board(tmp_path: Path) -> None:
    hosts = [("near", 0.9, ""), ("board", 1.0, 'arch = "aarch64"\n')]
    tables = "".join(f'[[hosts]]\nname = "{name}"\ncpu = {cpu}\nmemory = "3 GiB"\n{arch}' for name, cpu, arch in hosts)
    (tmp_path / "lab.toml").write_text(f'name = "boards"\nbandwidth = "1 Gbit/s"\n{tables}')
    words = ["infer", SMALL, "--images", "digits", "--num-images", "8", "--stages", "2"]
    lab = ["--cluster", str(tmp_path / "lab.toml")]
    assert main([*words, "-o", str(tmp_path / "alone.csv")]) == 0
    assert main([*words, "-o", str(tmp_path / "board.csv"), *lab]) == 0
    alone, board = (
        [line.split(",")[:2] for line in (tmp_path / f"{name}.csv").read_text().splitlines()]
        for name in ("alone", "board")
    )
    assert len(alone) == 9
    assert board == alone
