"""Which build of PyTorch a machine gets, and what is refused before anything is installed."""

import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.cluster import install
from penstock.cluster.install import LAST_CPU, main, with_last_cpu

WANTED = ["torch==2.15.0", "numpy", "timm"]
Machine = Callable[..., list[list[str]]]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with a kind of processor, perhaps a GPU and uv; gives the commands that are run on it.

    `usual` is the status of the usual index by uv, `pip` that of any other command.
    """
    commands: list[list[str]] = []
    programs = tmp_path / "programs"
    programs.mkdir()

    def make(
        processor: str, *, gpu: bool = False, uv: int | None = None, usual: int = 0, pip: int = 0, free: float = 64e9
    ) -> list[list[str]]:
        def run(command: list[str], **_: Any) -> SimpleNamespace:
            commands.append(command)
            status = uv if "--torch-backend" in command else usual if command[0].endswith("/uv") else pip
            return SimpleNamespace(returncode=status, stderr="error: no route\n")

        if uv is not None:
            (programs / "uv").touch(mode=0o755)
        monkeypatch.setenv("PATH", str(programs))
        monkeypatch.setattr(install, "has_gpu", lambda: gpu)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.setattr(platform, "machine", lambda: processor)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
        monkeypatch.setattr(subprocess, "run", run)
        return commands

    return make


@pytest.mark.parametrize("processor", ["x86_64", "aarch64"])
def test_gpu_machine_gets_the_usual_build(machine: Machine, processor: str) -> None:
    commands = machine(processor, gpu=True, uv=0)
    assert "GPU" in main("env", WANTED)
    assert commands[-1][1:] == ["-m", "pip", "install", "--quiet", *WANTED]


@pytest.mark.parametrize("processor", ["x86_64", "aarch64"])
def test_uv_installs_the_cpu_build(machine: Machine, processor: str) -> None:
    commands = machine(processor, uv=0, free=3e9)
    assert "uv" in main("env", WANTED)
    assert Path(commands[-1][0]).name == "uv"
    assert commands[-1][-5:] == ["--torch-backend", "cpu", *WANTED]


@pytest.mark.parametrize("uv", [None, 2])
def test_arm_board_without_index_gets_the_last_cpu_build(machine: Machine, uv: int | None) -> None:
    commands = machine("aarch64", uv=uv, free=3e9)
    chosen = main("env", WANTED)
    assert LAST_CPU["torch"] in chosen
    assert ("no route" in chosen) == (uv is not None)
    assert commands[-1][-3:] == [f"torch=={LAST_CPU['torch']}", "numpy", "timm"]


@pytest.mark.parametrize(("uv", "usual", "tool"), [(None, 0, "python"), (2, 0, "uv"), (2, 2, "python")])
def test_other_machines_get_the_usual_build_with_a_reason(
    machine: Machine, uv: int | None, usual: int, tool: str
) -> None:
    commands = machine("x86_64", uv=uv, usual=usual)
    chosen = main("env", WANTED)
    assert "CUDA" in chosen
    assert ("no route" in chosen) == (uv is not None)
    assert Path(commands[-1][0]).name == tool
    assert commands[-1][-3:] == WANTED
    assert "--torch-backend" not in commands[-1]


def test_usual_build_is_refused_without_disk_space(machine: Machine) -> None:
    commands = machine("x86_64", uv=2, free=5e9)
    with pytest.raises(SystemExit) as refused:
        main("env", WANTED)
    assert "5000 MB" in str(refused.value)
    assert "--torch-backend" in commands[-1]


def test_constraints_for_cuda_are_removed(tmp_path: Path) -> None:
    pins = tmp_path / "constraints.txt"
    pins.write_text(
        "torch==2.15.0\ntorchvision==0.30.0\ntorch-pruning==1.6.1\nnvidia-nccl-cu13==2\nnumpy==2.1\ntriton==3\n"
    )
    (tmp_path / "made").mkdir()
    found = with_last_cpu(["--constraint", str(pins), "--editable", ".[dev]"], str(tmp_path / "made"))
    assert found[2:] == ["--editable", ".[dev]"]
    lines = Path(found[1]).read_text().splitlines()
    assert lines == ["torch-pruning==1.6.1", "numpy==2.1", "torch==2.10.0", "torchvision==0.25.0"]


@pytest.mark.parametrize(("free", "processor"), [(1e9, "aarch64"), (5e9, "x86_64")])
def test_full_card_is_refused_before_the_installation(
    machine: Machine, free: float, processor: str, tmp_path: Path
) -> None:
    commands = machine(processor, free=free)
    with pytest.raises(SystemExit) as refused:
        main("env", WANTED)
    assert f"{free / 1e6:.0f} MB" in str(refused.value)
    assert commands == []
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(("name", "value"), [("maxsize", 2**31 - 1), ("version_info", (3, 9, 1))])
def test_unsupported_python_is_refused(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    commands = machine("armv7l")
    monkeypatch.setattr(sys, name, value)
    with pytest.raises(SystemExit) as refused:
        main("env", WANTED)
    assert "\n" not in str(refused.value)
    assert commands == []


@pytest.mark.parametrize("processor", ["x86_64", "aarch64"])
def test_an_installation_that_fails_ends_with_one_line(machine: Machine, processor: str) -> None:
    machine(processor, pip=3)
    with pytest.raises(SystemExit) as refused:
        main("env", WANTED)
    assert "status 3" in str(refused.value)
    assert "\n" not in str(refused.value)
