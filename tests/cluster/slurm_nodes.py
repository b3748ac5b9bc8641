"""A Slurm of this machine alone for tests: a controller and two nodes, which are addresses of loopback."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from tests.cluster.labs import until
from tests.processes import ROOT, free_port

_PATH = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}:/usr/sbin"
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
_COMES_S = 30.0  # in which a daemon answers
_ANSWERS_S = 30.0
_ENDS_S = 20.0

needs_slurm = [
    pytest.mark.root,
    pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="a Slurm of one's own needs root"),
    pytest.mark.skipif(
        any(shutil.which(program, path=_PATH) is None for program in _PROGRAMS), reason="needs slurm-wlm and munge"
    ),
]
FIRST, SECOND = "127.0.0.1", "127.0.0.2"  # names that every machine resolves, to itself


class SlurmNodes:
    """A Slurm that runs: jobs are handed in, looked at and ended; everything of it lies in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SRUN", "PENSTOCK"))}
        self._env = own | {
            "SLURM_CONF": f"{folder}/slurm.conf", "PATH": _PATH, "PYTHONPATH": f"{ROOT}/src:{ROOT}",
            "OMP_NUM_THREADS": "1", "PENSTOCK_TRUSTED": "1", "PENSTOCK_PROGRESS": "0",
        }  # fmt: skip
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start all daemons, and wait for the nodes."""
        (self.folder / "slurm.conf").write_text(_configuration(self.folder))
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        self._start("munged", "--foreground", "--force", *(f"--{o}={self.folder}/munge.{f}" for o, f in files.items()))
        until((self.folder / "munge.socket").exists, _COMES_S)
        self._start("slurmctld", "-D")
        for name in (FIRST, SECOND):
            self._start("slurmd", "-D", "-N", name)
        until(lambda: set(self._asked("sinfo", "-h", "-N", "-o", "%t").split()) == {"idle"}, _COMES_S)

    def run(self, *command: str, timeout_s: float = _ANSWERS_S) -> str:
        """Run one of Slurm's commands in the folder, and return its output; it fails the test unless it succeeds."""
        done = subprocess.run(
            command, cwd=self.folder, env=self._env, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def submit(self, name: str, script: str, *options: str) -> str:
        """Hand a batch script in, whose output will be in NAME.out; returns the job's number."""
        (self.folder / f"{name}.sh").write_text(script)
        return self.run("sbatch", "--parsable", "-o", f"{name}.out", *options, f"{name}.sh").strip()

    def field(self, job: str, name: str = "JobState") -> str:
        """Return what Slurm says of a job."""
        found = re.search(rf"\b{name}=(\S*)", self.run("scontrol", "show", "job", "-o", job))
        assert found is not None
        return found[1]

    def start_now(self, job: str) -> None:
        """Have a job that waits wait no longer; one that runs already is left alone."""
        subprocess.run(["scontrol", "update", f"jobid={job}", "starttime=now"], env=self._env, capture_output=True,
                       timeout=_ANSWERS_S, check=False)  # fmt: skip

    def ended(self, job: str, seconds: float) -> str:
        """Wait for the end of a job and of its processes; returns its state."""
        until(lambda: self.field(job) not in {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING"}, seconds)
        until(lambda: not self.processes(job), _ENDS_S)
        return self.field(job)

    def processes(self, job: str | None = None) -> list[psutil.Process]:
        """Return the processes of a job, or of all, that run."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                variables = process.environ()
                if variables.get("SLURM_CONF") == self._env["SLURM_CONF"] and "SLURM_JOB_ID" in variables:
                    found += [process] if job in {None, variables["SLURM_JOB_ID"]} else []
        return found

    def waits(self, job: str) -> bool:
        """Say whether a job waits, and no process tells Slurm any more how its last start ended.

        What is told after the next start counts as that start's end.
        """
        return self.field(job) == "PENDING" and not self.processes(job) and not self._of_steps()

    def clear(self) -> None:
        """End all jobs, and have both nodes at work again."""
        self.run("scancel", "--user=root")
        until(lambda: not self._asked("squeue", "-h") and not self.processes(), _ENDS_S)
        if "down" in self.run("sinfo", "-h", "-N", "-o", "%t"):
            self.run("scontrol", "update", f"nodename={SECOND}", "state=resume")
        until(lambda: set(self._asked("sinfo", "-h", "-N", "-o", "%t").split()) <= {"idle", "idle*"}, _ENDS_S)

    def stop(self) -> None:
        """End everything that is left, each by its number."""
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(_ENDS_S)
            except subprocess.TimeoutExpired:
                daemon.send_signal(signal.SIGKILL)
                daemon.wait()
        # nothing is started any more
        for process in (*self._of_steps(), *self.processes()):
            with contextlib.suppress(psutil.Error):
                process.kill()

    def _of_steps(self) -> list[psutil.Process]:
        """Slurm's own processes of each step, whose parent is none of this; they write below the folder."""
        found = []
        for process in psutil.process_iter(["name"]):
            with contextlib.suppress(psutil.Error):
                if "slurmstepd" in process.info["name"] and any(
                    file.path.startswith(f"{self.folder}/") for file in process.open_files()
                ):
                    found.append(process)
        return found

    def _asked(self, *command: str) -> str:
        """Run a command that may not be answered yet."""
        with contextlib.suppress(AssertionError):
            return self.run(*command)
        return "no answer"

    def _start(self, *command: str) -> None:
        with (self.folder / "daemons.out").open("ab") as output:
            self._daemons.append(
                subprocess.Popen(
                    command, cwd=self.folder, env=self._env, stdin=subprocess.DEVNULL, stdout=output, stderr=output
                )
            )


@contextlib.contextmanager
def slurm_nodes(folder: Path) -> Iterator[SlurmNodes]:
    """Run a Slurm in a folder; nothing of it is left when the block ends."""
    nodes = SlurmNodes(folder)
    with contextlib.ExitStack() as stack:
        stack.callback(nodes.stop)
        nodes.start()
        yield nodes


def _configuration(folder: Path) -> str:
    controller, first, second = (free_port() for _ in range(3))
    nodes = [
        # daemons listen at one address, so that ports tell them apart
        f"NodeName={name} NodeAddr=127.0.0.1 Port={port} CPUs=2 State=UNKNOWN"
        for name, port in ((FIRST, first), (SECOND, second))
    ]
    lines: Sequence[str] = (
        "ClusterName=tests", "SlurmctldHost=localhost(127.0.0.1)", f"SlurmctldPort={controller}", "SlurmUser=root",
        "SlurmdUser=root", "AuthType=auth/munge", f"AuthInfo=socket={folder}/munge.socket", "CredType=cred/munge",
        f"StateSaveLocation={folder}/state", f"SlurmdSpoolDir={folder}/%n", f"SlurmctldPidFile={folder}/slurmctld.pid",
        f"SlurmdPidFile={folder}/%n.pid", f"SlurmctldLogFile={folder}/slurmctld.log", f"SlurmdLogFile={folder}/%n.log",
        "ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none", "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU", "CommunicationParameters=NoInAddrAny,NoCtldInAddrAny",
        "JobAcctGatherType=jobacct_gather/none", "MpiDefault=none", "SwitchType=switch/none", "ReturnToService=0",
        "SchedulerType=sched/builtin", "SchedulerParameters=batch_sched_delay=0,sched_interval=1", "MailProg=/bin/true",
        # the machine of the test may have fewer cores; a node that it takes long to hear of is down only by order
        "SlurmdParameters=config_overrides", "SlurmdTimeout=0", "KillWait=10",
        *nodes, "PartitionName=all Nodes=ALL Default=YES State=UP",
    )  # fmt: skip
    (folder / "state").mkdir()
    return "\n".join(lines) + "\n"
