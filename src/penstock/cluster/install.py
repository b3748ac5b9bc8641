"""Installation of packages into a virtual environment, with the build of PyTorch that suits the machine.

    install.py ENVIRONMENT ARGUMENTS-OF-PIP-INSTALL ...

                                   PyTorch comes from
    an NVIDIA GPU                  the usual index
    no GPU, and uv is installed    PyTorch's own index of CPU builds, by uv's --torch-backend
    no such index, on 64-bit ARM   the usual index, in the last version that has a CPU build there
    no such index, elsewhere       the usual index, with its CUDA libraries, by uv or else by pip

Run by a machine's own Python before any other check, so it needs only the standard library.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile

# the last CPU builds for 64-bit ARM on the usual index, and the torchvision that is built for it
LAST_CPU = {"torch": "2.10.0", "torchvision": "0.25.0"}
# upper bound of the bytes that an installation takes, including pip's temporary files
CUDA_BYTES, CPU_BYTES = 8e9, 2.5e9
_CUDA_PACKAGES = re.compile(r"(torch|torchvision|triton|nvidia[\w.-]*|cuda[\w.-]*)\s*[=<>!~;]", re.IGNORECASE)


def main(environment: str, wanted: list[str]) -> str:
    """Make the environment if there is none, and install; return a line that names the chosen build and the reason.

    Raises `SystemExit` with a one-line reason if PyTorch cannot be installed on this machine.
    """
    _check_python()
    environment = os.path.join(os.path.expanduser("~"), environment)
    python = os.path.join(environment, "bin", "python")
    gpu, uv = has_gpu(), shutil.which("uv")
    by_uv = [uv, "pip", "install", "--quiet", "--compile-bytecode", "--python", python] if uv else []
    if not _has_torch(python):
        _check_room(environment, CPU_BYTES if takes_cpu_build() else CUDA_BYTES)
    if not os.path.exists(python):
        _run([sys.executable, "-m", "venv", environment])
    pip = [python, "-m", "pip", "install", "--quiet"]
    if gpu:
        _run([*pip, *wanted])
        return "PyTorch for the NVIDIA GPU of this machine"
    why = "uv, which knows PyTorch's index of CPU builds, is not installed"
    if by_uv:
        done = subprocess.run([*by_uv, "--torch-backend", "cpu", *wanted], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return "PyTorch's CPU build, from its own index by uv: this machine has no NVIDIA GPU"
        reason = (done.stderr.strip().splitlines() or ["no reason"])[-1].strip()
        why = f"uv could not take the CPU build ({reason[:200]})"
    if not is_arm():
        if not _has_torch(python):
            _check_room(environment, CUDA_BYTES)
        # uv takes a third of pip's time, but ignores pip's settings, such as an index of one's own
        if not by_uv or subprocess.run([*by_uv, *wanted], capture_output=True, check=False).returncode != 0:
            _run([*pip, *wanted])
        return f"PyTorch with its CUDA libraries, though this machine has no NVIDIA GPU: {why}"
    with tempfile.TemporaryDirectory() as folder:
        _run([*pip, *with_last_cpu(wanted, folder)])
    return f"PyTorch {LAST_CPU['torch']}, the last CPU build for ARM on the usual index: {why}"


def with_last_cpu(wanted: list[str], folder: str) -> list[str]:
    """Return the arguments with PyTorch's last CPU build for 64-bit ARM, even if a constraints file pins another.

    >>> with_last_cpu(["torch==2.15.0", "numpy"], "/tmp")
    ['torch==2.10.0', 'numpy']
    """
    found: list[str] = []
    for place, word in enumerate(wanted):
        name = re.split(r"[=<>!~;\\[ ]", word, maxsplit=1)[0].lower()
        if place and wanted[place - 1] in ("-c", "--constraint"):
            word = _constraints(word, os.path.join(folder, f"constraints-{place}.txt"))
        elif name in LAST_CPU:
            word = f"{name}=={LAST_CPU[name]}"
        found.append(word)
    return found


def _constraints(path: str, target: str) -> str:
    """Copy a constraints file without the lines for a CUDA build; returns the copy."""
    with open(path, encoding="utf-8") as file:
        lines = [line for line in file if not _CUDA_PACKAGES.match(line)]
    lines += [f"{name}=={version}\n" for name, version in LAST_CPU.items()]
    with open(target, "w", encoding="utf-8") as file:
        file.writelines(lines)
    return target


def _check_python() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 -- run by any Python of a machine
        raise SystemExit(f"Python 3.11 or later is needed, and this is {platform.python_version()}; set python = ...")
    if sys.maxsize <= 2**32:
        raise SystemExit(
            f"PyTorch is built for 64-bit systems, but this Python has 32 bits ({platform.machine()}); install the "
            "64-bit system, such as Raspberry Pi OS (64-bit)"
        )


def _check_room(environment: str, needed_bytes: float) -> None:
    place = environment
    while not os.path.isdir(place):
        place = os.path.dirname(place) or "/"
    free = shutil.disk_usage(place).free
    if free < needed_bytes:
        raise SystemExit(
            f"PyTorch and its packages take up to {needed_bytes / 1e6:.0f} MB, and {place} has {free / 1e6:.0f} MB "
            "free; free space, or choose another folder"
        )


def _has_torch(python: str) -> bool:
    ask = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    return os.path.exists(python) and subprocess.run([python, "-c", ask], check=False).returncode == 0


def takes_cpu_build() -> bool:
    """Return True if this machine gets PyTorch's CPU build rather than the build with CUDA libraries."""
    return not has_gpu() and (shutil.which("uv") is not None or is_arm())


def _run(command: list[str]) -> None:
    """Run a command that writes its own messages; raises `SystemExit` if it fails."""
    status = subprocess.run(command, check=False).returncode
    if status != 0:
        raise SystemExit(
            f"{' '.join(command[1:4])} ended with status {status}, for the reason above; correct it and start again"
        )


def has_gpu() -> bool:
    """Return True if this machine has an NVIDIA GPU, or its driver."""
    return os.path.exists("/proc/driver/nvidia/version") or shutil.which("nvidia-smi") is not None


def is_arm() -> bool:
    """Return True on a 64-bit ARM processor."""
    return platform.machine().lower() in ("aarch64", "arm64")


if __name__ == "__main__":
    sys.stdout.write(main(sys.argv[1], sys.argv[2:]) + "\n")
