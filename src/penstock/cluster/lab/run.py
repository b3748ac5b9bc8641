"""A command running on the hosts of a lab: its output, memory and exit.

    running ──one process fails, memory runs out, terminate()──▶ ending ──all gone──▶ done
       └──────────────────────all processes ended────────────────────────────────────────▲

One thread watches all processes; before `done` it kills all that remain in the hosts.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from subprocess import Popen, TimeoutExpired
from typing import IO, Literal

from penstock.cluster.lab import processes
from penstock.cluster.lab.cgroups import Cgroups, MemoryWatch, explain, kill_processes, processes_in
from penstock.cluster.lab.processes import Target
from penstock.cluster.output import EndTogether, Output, OutputLine, exit_name
from penstock.errors import ClusterError, OutOfMemory, RunError

_LOOK_EVERY_S = 0.05
# less often, because it is expensive and takes CPU time from the hosts
_LOOK_AT_MEMORY_EVERY_S = 0.1
GRACE_S = 5.0
# how long pipes may stay open after all processes that could write to them have exited
DRAIN_S = 5.0


@dataclass(frozen=True, slots=True)
class _Member:
    """One process of the run."""

    target: Target
    process: Popen[str]
    pumps: Sequence[threading.Thread]


class LabRun:
    """A command that runs on hosts of a lab; created by `Lab.start`.

    with lab.start(["python", "train.py"]) as run:
        exit_codes = run.wait(timeout_s=600)

    Leaving the `with` block ends processes that still run.
    """

    def __init__(
        self, cgroups: Cgroups, targets: Sequence[Target], command: Sequence[str], *, env: Mapping[str, str],
        nproc_per_host: int, port: int, output: Output, end_together: EndTogether, grace_s: float,
        drain_s: float = DRAIN_S,
    ) -> None:  # fmt: skip
        self._cgroups, self._targets, self._output = cgroups, targets, output
        self._end_together, self._grace_s, self._drain_s = end_together, grace_s, drain_s
        self._members: list[_Member] = []
        self._watches = {target.host: MemoryWatch() for target in targets}
        self._kills_before = {target.host: self._oom_kills(target) for target in targets}
        self._looked_at_memory_s = 0.0
        self._out_of_memory: str | None = None
        self._first_failure: str | None = None
        self._failure: BaseException | None = None
        self._ending, self._done = threading.Event(), threading.Event()
        # released at the end in any case, the guard first
        self._helpers = contextlib.ExitStack()
        try:
            cores = [target.core for target in targets if target.core is not None]
            self._helpers.callback(processes.Awake(cores, targets[0].lab).release)
            self._helpers.callback(processes.Guard(targets).release)
            for node_rank, target in enumerate(targets):
                for local_rank in range(nproc_per_host):
                    own = processes.environment(targets, node_rank, local_rank, nproc_per_host, port)
                    self._launch(target, local_rank, command, {**own, **env})
        except BaseException:
            self._end_all_now()
            raise
        self._watcher = threading.Thread(target=self._watch, name="penstock-lab-run", daemon=True)
        self._watcher.start()

    @property
    def exit_codes(self) -> dict[str, int | None]:
        """Exit code of each host: None while it runs, else 0 or its first failure (negative: a signal)."""
        codes: dict[str, int | None] = {}
        for target in self._targets:
            own = [member.process.returncode for member in self._members if member.target is target]
            codes[target.host] = None if None in own else next((code for code in own if code), 0)
        return codes

    @property
    def first_code(self) -> int | None:
        """Exit code of rank 0, or None while it runs."""
        return self._members[0].process.returncode

    @property
    def first_failure(self) -> str | None:
        """The process that failed first, as in `host1 ended with status 3`; None if none failed."""
        return self._first_failure

    def wait(self, timeout_s: float | None = None) -> dict[str, int]:
        """Wait until every process has exited; return each host's exit code.

        Raises `OutOfMemory` if a host ran out of memory and this ends the run, and `RunError` on a timeout (the run
        continues).
        """
        if not self._done.wait(timeout_s):
            running = [host for host, code in self.exit_codes.items() if code is None]
            raise RunError(
                f"the run did not end within {timeout_s:g} s and continues on {', '.join(running)}; wait longer or "
                "terminate it"
            )
        if self._failure is not None:
            raise self._failure
        outlived = self._end_together in {"first", "first-failed"} and not self.first_code
        if self._out_of_memory is not None and not outlived:
            raise OutOfMemory(self._out_of_memory)
        return {host: code if code is not None else 0 for host, code in self.exit_codes.items()}

    def terminate(self) -> None:
        """End all processes, first with SIGTERM, and return when none is left; no error if the run has ended."""
        self._ending.set()
        self._done.wait(self._grace_s + self._drain_s + 30)

    def __enter__(self) -> "LabRun":
        return self

    def __exit__(self, *_error: object) -> None:
        self.terminate()

    def _launch(self, target: Target, local_rank: int, command: Sequence[str], env: Mapping[str, str]) -> None:
        process = processes.start_process(target, command, env)
        pumps = [
            threading.Thread(target=self._pump, args=(target, local_rank, stream, pipe), daemon=True)
            for stream, pipe in (("stdout", process.stdout), ("stderr", process.stderr))
        ]
        self._members.append(_Member(target, process, pumps))
        for pump in pumps:
            pump.start()

    def _pump(self, target: Target, local_rank: int, stream: Literal["stdout", "stderr"], pipe: IO[str]) -> None:
        try:
            for text in pipe:
                line = text.rstrip("\n")
                self._output(OutputLine(host=target.host, local_rank=local_rank, stream=stream, text=line))
        except BaseException as error:
            # no thread reads further output, so the process would block eventually: end the run; wait() raises the
            # error
            self._failure = error
            self._ending.set()

    def _watch(self) -> None:
        try:
            kill_at: float | None = None
            while self._look():
                if self._ending.is_set() and kill_at is None:
                    kill_at = time.monotonic() + self._grace_s
                    self._signal_all(signal.SIGTERM)
                if kill_at is not None and time.monotonic() > kill_at:
                    break
                # terminate() cuts this pause short; later pauses are ordinary again
                pause = self._ending.wait if kill_at is None else time.sleep
                pause(_LOOK_EVERY_S)
        except (ClusterError, OSError) as error:
            self._failure = RunError(
                f"a lab must stay up while a command runs in it, but it was taken down ({error}); "
                "run penstock lab up and start again"
            )
        except BaseException as error:
            self._failure = error
        finally:
            try:
                self._end_all_now()
            except BaseException as error:
                self._failure = self._failure or error
            self._done.set()

    def _look(self) -> bool:
        """Record events since the last call; return False when every process has exited."""
        if time.monotonic() > self._looked_at_memory_s + _LOOK_AT_MEMORY_EVERY_S:
            self._look_at_memory()
        running = False
        for member in self._members:
            code = member.process.poll()
            running |= code is None
            if code and not self._ending.is_set() and self._first_failure is None:
                self._first_failure = f"{member.target.host} ended with {exit_name(code)}"
        if self._end_together is True and (self._first_failure or self._out_of_memory):
            self._ending.set()
        if self._end_together == "first" and self.first_code is not None:
            self._ending.set()
        if self._end_together == "first-failed" and self.first_code:
            self._ending.set()
        return running

    def _look_at_memory(self) -> None:
        self._looked_at_memory_s = time.monotonic()
        for target in self._targets:
            watch = self._watches[target.host]
            # each directory lists all processes of the host
            watch.sample(processes_in(target.directories[:1]))
            killed = self._oom_kills(target) > self._kills_before[target.host]
            if killed and self._out_of_memory is None:
                use = self._cgroups.memory(target.lab, target.host)
                self._out_of_memory = explain(target.host, target.memory_bytes, use, watch)

    def _oom_kills(self, target: Target) -> int:
        return self._cgroups.oom_kills(target.lab, target.host)

    def _signal_all(self, number: signal.Signals) -> None:
        for member in self._members:
            processes.signal_group(member.process, number)

    def _end_all_now(self) -> None:
        with self._helpers:
            self._signal_all(signal.SIGKILL)
            deadline = time.monotonic() + self._drain_s
            stuck = [member for member in self._members if not _ends(member.process, deadline)]
            kill_processes([path for target in self._targets for path in target.directories])
            # the last process may have exited or run out of memory since the last call; if the lab is being stopped,
            # the host's memory cannot be read
            with contextlib.suppress(ClusterError, OSError):
                self._look()
                self._look_at_memory()
            for member in self._members:
                for pump in member.pumps:
                    if pump.ident is not None:  # a signal may arrive before the thread is started
                        pump.join(timeout=self._drain_s)
            if stuck:
                named = ", ".join(f"{member.process.pid} of {member.target.host}" for member in stuck)
                raise RunError(
                    f"a killed process must exit within {self._drain_s:g} s, but {named} did not; "
                    "see what it waits for with ps -o pid,stat,wchan,args, then run penstock lab down"
                )


def _ends(process: "Popen[str]", deadline: float) -> bool:
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except TimeoutExpired:
        return False
    return True
