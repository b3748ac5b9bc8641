"""Run cases in a child process, so that a crash, a hang or a greedy allocation is seen and has its case's name."""

import faulthandler
import json
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from benchmarks.fuzz.targets import Target, clear, tell_operators
from penstock.errors import OutOfMemory, PenstockError
from penstock.transport import messages

Case = tuple[str, int]
# what readers are told that they may take, and what they can take at all
BOUND_BYTES = 256 * 2**20
_LIMIT_BYTES = 1536 * 2**20
_CASE_S = 20
_ALLOCATED = "allocated beyond the bound"
_PROGRESS = struct.Struct("<q?")  # the number of the case, and whether it runs operators
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.chmod", "os.truncate"}
_NEVER = {"subprocess.Popen", "os.exec", "os.fork", "os.system", "socket.connect", "socket.bind", "pickle.find_class"}


class Hung(BaseException):
    """A case that took too long; no reader catches it."""


def run_batch(cases: Sequence[Case], targets: Mapping[str, Target], seed: int, folder: Path) -> list[dict[str, Any]]:
    """Run cases in children; gives a row for each failure, and counts as the last row.

    A child that dies is followed by another, which goes on behind the case that it died of. What PyTorch's operators
    do to a process is no failure of the reader (SECURITY.md), and its row says "operators" instead.
    """
    rows: list[dict[str, Any]] = []
    accepted, done = 0, 0
    while done < len(cases):
        place, in_operators, died = _run_child(cases[done:], targets, seed, folder)
        found = _rows(folder / "rows")
        accepted += sum(row.get("accepted", 0) for row in found)
        rows += [row for row in found if "accepted" not in row]
        if died is None:
            break
        name, number = cases[done + place]
        rows.append({"target": name, "case": number, "operators" if in_operators else "failure": died})
        done += place + 1
    return [*rows, {"accepted": accepted}]


def run_case(case: Case, target: Target, seed: int, folder: Path) -> tuple[str | None, bool]:
    """Run one case; gives what is wrong with the outcome, if anything, and whether it was accepted."""
    name, number = case
    data = target.make(Random(f"{seed}/{name}/{number}"))
    clear(folder)
    try:
        with _watching(folder) as strayed:
            target.read(data, folder)
    except OutOfMemory as error:
        # the rule speaks before anything is allocated; torch only where it could not be
        return (None if "this process may take" in str(error) else f"{_ALLOCATED}: {error}"), False
    except PenstockError as error:
        text = str(error)
        return (None if "\n" not in text and len(text) < 2000 else f"more than one line: {text[:300]!r}"), False
    except Hung:
        return f"took more than {_CASE_S} s", False
    # whatever else comes out is what this looks for
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:300]}", False
    return (f"reached outside: {strayed[0]}" if strayed else None), True


def _run_child(
    cases: Sequence[Case], targets: Mapping[str, Target], seed: int, folder: Path
) -> tuple[int, bool, str | None]:
    """Fork; gives the place of the last case, whether it ran operators, and how the child died of it."""
    clear(folder)
    progress = folder / "progress"
    progress.write_bytes(_PROGRESS.pack(0, False))
    process = os.fork()
    if process == 0:
        faulthandler.disable()  # a crash is told with its case, and needs no trace
        try:
            _work(cases, targets, seed, folder)
            os._exit(0)
        finally:
            os._exit(70)
    place, since = 0, time.monotonic()
    while True:
        ended, status = os.waitpid(process, os.WNOHANG)
        now, in_operators = _PROGRESS.unpack(progress.read_bytes())
        if now != place:
            place, since = now, time.monotonic()
        if ended:
            code = os.waitstatus_to_exitcode(status)
            died = f"ended with {signal.Signals(-code).name if code < 0 else code}" if code else None
            return place, in_operators, died
        if time.monotonic() - since > 3 * _CASE_S:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return place, in_operators, "did not end"
        time.sleep(0.01)


def _work(cases: Sequence[Case], targets: Mapping[str, Target], seed: int, folder: Path) -> None:
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
    vars(messages)["allowed_bytes"] = lambda: BOUND_BYTES
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + _LIMIT_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, _hung)
    inside = folder / "case"
    accepted = 0
    with (folder / "progress").open("r+b") as progress, (folder / "rows").open("w") as rows:
        in_operators = False

        def tell(runs: bool) -> None:
            nonlocal in_operators
            in_operators = runs
            progress.seek(0)
            progress.write(_PROGRESS.pack(place, runs))
            progress.flush()

        tell_operators.append(tell)
        for place, (name, number) in enumerate(cases):  # noqa: B007 -- `tell` writes it
            tell(False)
            signal.alarm(_CASE_S)
            failure, good = run_case((name, number), targets[name], seed, inside)
            signal.alarm(0)
            accepted += good
            if failure:
                kind = "operators" if in_operators and failure.startswith(_ALLOCATED) else "failure"
                rows.write(json.dumps({"target": name, "case": number, kind: failure}) + "\n")
                rows.flush()
        rows.write(json.dumps({"accepted": accepted}) + "\n")


def _hung(_: int, __: FrameType | None) -> None:
    raise Hung


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


_watched: list[tuple[Path, list[str]]] = []
_hooked: list[bool] = []


@contextmanager
def _watching(folder: Path) -> Iterator[list[str]]:
    """Note what is written or started outside of a folder, and what is read outside of it and of the installation."""
    if not _hooked:
        sys.addaudithook(_audit)  # for good: it cannot be taken off
        _hooked.append(True)
    strayed: list[str] = []
    _watched.append((folder, strayed))
    try:
        yield strayed
    finally:
        _watched.pop()


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watched:
        return
    folder, strayed = _watched[-1]
    if event in _NEVER:
        strayed.append(event)
        return
    if event != "open" and event not in _CHANGES:
        return
    path = arguments[0]
    if not isinstance(path, (str, bytes, os.PathLike)):
        return
    place = os.path.realpath(os.fsdecode(path))
    if place.startswith(f"{folder}{os.sep}"):
        return
    writes = event in _CHANGES or bool(arguments[2] & _WRITES)
    installed = (sys.prefix, sys.base_prefix, "/usr", "/proc", "/sys", "/dev/null", *map(os.path.realpath, sys.path))
    if writes or not place.startswith(installed):
        strayed.append(f"{event} {place}")
