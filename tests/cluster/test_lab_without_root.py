"""Labs on a pretended machine: what is written where, and which commands are run."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from penstock.cluster.lab import Lab, LabSpec, lab_session, processes
from penstock.cluster.lab.cgroups import CgroupsV1, CgroupsV2, MemoryUse, MemoryWatch, explain, quota
from penstock.cluster.lab.machine import Machine, find_cgroups, this_machine
from penstock.cluster.lab.network import RecordingShell, SystemShell, up_commands
from penstock.cluster.lab.processes import Awake, Target, choose_cores, command_line, ended_by_signals, environment
from penstock.errors import ClusterError, RunError
from tests.cluster.labs import make_spec, until
from tests.processes import PROGRAMS

UP = """
ip netns add penstock.lab
ip -n penstock.lab link add bridge type bridge
ip -n penstock.lab link set bridge up
ip netns add penstock.lab.host0
ip -n penstock.lab.host0 link set lo up
ip -n penstock.lab link add port0 type veth peer name eth0 netns penstock.lab.host0
ip -n penstock.lab link set port0 master bridge up
ip -n penstock.lab.host0 address add 10.77.0.1/24 dev eth0
ip -n penstock.lab.host0 link set eth0 up
ip -n penstock.lab.host0 route replace 10.77.0.0/24 dev eth0 src 10.77.0.1 congctl cubic
tc -n penstock.lab qdisc replace dev port0 root pfifo
tc -n penstock.lab qdisc replace dev port0 root tbf rate 100000000bit burst 62500 latency 50ms
tc -n penstock.lab.host0 qdisc replace dev eth0 root pfifo
tc -n penstock.lab.host0 qdisc replace dev eth0 root tbf rate 100000000bit burst 62500 latency 50ms
ip -n penstock.lab.host0 link set eth0 gso_max_size 56250
ip -n penstock.lab.host0 route flush cache
ip netns add penstock.lab.host1
ip -n penstock.lab.host1 link set lo up
ip -n penstock.lab link add port1 type veth peer name eth0 netns penstock.lab.host1
ip -n penstock.lab link set port1 master bridge up
ip -n penstock.lab.host1 address add 10.77.0.2/24 dev eth0
ip -n penstock.lab.host1 link set eth0 up
ip -n penstock.lab.host1 route replace 10.77.0.0/24 dev eth0 src 10.77.0.2 congctl cubic
tc -n penstock.lab qdisc replace dev port1 root pfifo
tc -n penstock.lab qdisc replace dev port1 root tbf rate 100000000bit burst 62500 latency 50ms
tc -n penstock.lab.host1 qdisc replace dev eth0 root pfifo
tc -n penstock.lab.host1 qdisc replace dev eth0 root tbf rate 100000000bit burst 62500 latency 50ms
ip -n penstock.lab.host1 link set eth0 gso_max_size 56250
ip -n penstock.lab.host1 route flush cache
""".strip().splitlines()
NAMESPACES = "penstock.lab (id: 0)\npenstock.lab.host0\npenstock.lab.host1\n"


class PlainFiles(CgroupsV2):
    """Directories that, unlike cgroups, are not empty to `rmdir`."""

    def remove(self, lab: str) -> None:
        for path in self.directories(lab):
            shutil.rmtree(path)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    cgroups = tmp_path / "cgroup"
    cgroups.mkdir()
    return Machine(
        shell=RecordingShell(), cgroups=PlainFiles(cgroups, cgroups), run_directory=tmp_path / "run",
        netns_directory=tmp_path / "netns", num_cores=2, memory_bytes=2**33,
    )  # fmt: skip


def shell_of(machine: Machine) -> RecordingShell:
    assert isinstance(machine.shell, RecordingShell)
    return machine.shell


def test_the_network_of_two_hosts() -> None:
    assert [" ".join(command) for command in up_commands(make_spec("lab"))] == UP


def test_a_link_without_bandwidth_is_not_limited() -> None:
    assert not [command for command in up_commands(make_spec("lab", rate=None)) if command[0] == "tc"]


def test_up_makes_network_names_and_limits(machine: Machine, tmp_path: Path) -> None:
    spec = make_spec("lab")
    lab = Lab(spec, machine)
    assert lab.status().state == "down"
    lab.up()
    assert [line for line in shell_of(machine).commands if "netns list" not in line] == UP
    hosts = "127.0.0.1 localhost\n::1 localhost\n10.77.0.1 host0\n10.77.0.2 host1\n"
    assert (tmp_path / "netns/penstock.lab.host1/hosts").read_text() == hosts
    host = tmp_path / "cgroup/penstock.lab/host1"
    assert (host / "cpu.max").read_text() == "3500 10000\n"
    assert (host / "memory.max").read_text() == f"{256 * 2**20}\n"
    assert lab.status().state == "partial"
    shell_of(machine).answers["ip netns list"] = NAMESPACES
    assert lab.is_up()
    assert Lab.from_name("lab", machine).spec == spec


def test_second_up_changes_nothing(machine: Machine) -> None:
    lab = Lab(make_spec("lab"), machine)
    lab.up()
    shell_of(machine).answers["ip netns list"] = NAMESPACES
    shell_of(machine).commands.clear()
    lab.up()
    assert set(shell_of(machine).commands) == {"ip netns list"}
    with pytest.raises(ClusterError, match=r"'lab' is up.*penstock lab down lab"):
        Lab(make_spec("lab", rate=None), machine).up()


def test_a_failed_up_is_taken_down(machine: Machine, tmp_path: Path) -> None:
    shell = shell_of(machine)
    shell.answers[UP[6]] = RunError("no such thing")
    with pytest.raises(RunError, match="no such thing"):
        Lab(make_spec("lab"), machine).up()
    assert shell.commands[-2:] == [UP[6], "ip netns list"]
    assert sorted(path.name for path in tmp_path.glob("*/*")) == ["cgroup.subtree_control", "lock"]


def test_down_deletes_this_lab_only(machine: Machine) -> None:
    shell = shell_of(machine)
    shell.answers["ip netns list"] = NAMESPACES + "penstock.lab-2\npenstock.lab-2.host0\nother\n"
    shell.answers["ip netns delete penstock.lab"] = RunError("busy")
    with pytest.raises(RunError, match="busy"):
        Lab(make_spec("lab"), machine).down()
    assert [line for line in shell.commands if "delete" in line] == [
        "ip netns delete penstock.lab",
        "ip netns delete penstock.lab.host0",
        "ip netns delete penstock.lab.host1",
    ]


def test_session_takes_down_its_own_lab(machine: Machine) -> None:
    with lab_session(make_spec("lab"), machine):
        shell_of(machine).answers["ip netns list"] = NAMESPACES
    assert "ip netns delete penstock.lab.host1" in shell_of(machine).commands


def test_session_keeps_a_running_lab(machine: Machine) -> None:
    spec = make_spec("lab")
    Lab(spec, machine).up()
    shell_of(machine).answers["ip netns list"] = NAMESPACES
    with lab_session(spec, machine):
        pass
    assert not [line for line in shell_of(machine).commands if "delete" in line]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"command": []}, "needs a command"),
        ({"command": ["x"], "nproc_per_host": 0}, "at least one process; got 0"),
        ({"command": ["x"], "port": 0}, "a port must be 1 to 65535; got 0"),
        ({"command": ["x"]}, "lab lab must be up for this, but it is not; run penstock lab up first"),
    ],
)
def test_a_run_needs_a_lab_and_a_command(machine: Machine, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        Lab(make_spec("lab"), machine).start(**arguments)  # type: ignore[arg-type]


def test_lab_that_is_down_cannot_be_changed(machine: Machine) -> None:
    lab = Lab(make_spec("lab"), machine)
    with pytest.raises(ClusterError, match="must be up"):
        lab.cut("host0")
    with pytest.raises(ClusterError, match="host 'host9' not found"):
        lab.kill("host9")
    with pytest.raises(ClusterError, match="must be at least"):
        lab.slow("host0", cpu=0)
    with pytest.raises(ClusterError, match="at least 1 kbit/s; host0 has 8 bit/s"):
        lab.slow("host0", bandwidth_bytes_per_s=1)
    with pytest.raises(ClusterError, match=r"no lab 'lab' is up; .*: none"):
        Lab.from_name("lab", machine)


def test_cut_unplugs_the_port(machine: Machine) -> None:
    spec = make_spec("lab")
    lab = Lab(spec, machine)
    lab.up()
    shell_of(machine).answers["ip netns list"] = NAMESPACES
    lab.cut("host1")
    assert shell_of(machine).commands[-1] == "ip -n penstock.lab link set port1 nomaster"
    lab.restore("host1")
    assert shell_of(machine).commands[-1] == "ip -n penstock.lab link set port1 master bridge"


@pytest.mark.parametrize(
    ("cpu", "expected"),
    [(0.35, (3500, 10000)), (0.1, (1000, 10000)), (0.05, (1000, 20000)), (0.01, (1000, 100000)), (2, (20000, 10000))],
)
def test_quota_is_at_least_what_the_kernel_takes(cpu: float, expected: tuple[int, int]) -> None:
    assert quota(cpu) == expected


def test_version_1_limits(tmp_path: Path) -> None:
    cpu, memory = tmp_path / "cpu", tmp_path / "memory"
    cgroups = CgroupsV1(cpu, memory, cpu, memory / "mine")
    cgroups.create("lab", "host0", 0.35, 2**30)
    assert {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*.*") if path.is_file()} == {
        "cpu/penstock.lab/cpu.shares": "262144\n",
        "cpu/penstock.lab/host0/cpu.cfs_period_us": "10000\n",
        "cpu/penstock.lab/host0/cpu.cfs_quota_us": "3500\n",
        "memory/mine/penstock.lab/host0/memory.limit_in_bytes": "1073741824\n",
        "memory/mine/penstock.lab/host0/memory.memsw.limit_in_bytes": "1073741824\n",
        "memory/mine/penstock.lab/host0/memory.swappiness": "0\n",
    }
    cgroups.set_cpu("lab", "host0", 0.1)
    assert cgroups.cpu("lab", "host0") == 0.1
    host = memory / "mine/penstock.lab/host0"
    (host / "memory.usage_in_bytes").write_text("5\n")
    (host / "memory.max_usage_in_bytes").write_text("7\n")
    (host / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    use = cgroups.memory("lab", "host0")
    assert (use.used_bytes, use.peak_bytes, use.num_oom_kills) == (5, 7, 2)
    with pytest.raises(ClusterError, match="host host1 of lab lab is not up"):
        cgroups.memory("lab", "host1")


def test_version_2_limits(tmp_path: Path) -> None:
    cgroups = CgroupsV2(tmp_path, tmp_path / "user.slice")
    cgroups.create("lab", "host0", 0.35, 2**30)
    assert {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*.*") if path.is_file()} == {
        "user.slice/cgroup.subtree_control": "+cpu +memory\n",
        "user.slice/penstock.lab/cgroup.subtree_control": "+cpu +memory\n",
        "user.slice/penstock.lab/cpu.weight": "10000\n",
        "user.slice/penstock.lab/host0/cpu.max": "3500 10000\n",
        "user.slice/penstock.lab/host0/memory.max": "1073741824\n",
        "user.slice/penstock.lab/host0/memory.swap.max": "0\n",
    }
    cgroups.set_cpu("lab", "host0", 0.1)
    assert cgroups.cpu("lab", "host0") == 0.1
    host = tmp_path / "user.slice/penstock.lab/host0"
    (host / "memory.current").write_text("5\n")
    (host / "memory.events").write_text("low 0\nmax 3\noom 1\noom_kill 2\noom_group_kill 0\n")
    assert cgroups.memory("lab", "host0").peak_bytes == 5
    (host / "memory.peak").write_text("7\n")
    use = cgroups.memory("lab", "host0")
    assert (use.used_bytes, use.peak_bytes, use.num_oom_kills) == (5, 7, 2)


def proc(tmp_path: Path, mounts: list[str], own: str) -> Path:
    (tmp_path / "mountinfo").write_text("".join(f"{line}\n" for line in mounts))
    (tmp_path / "cgroup").write_text(own)
    return tmp_path


def test_version_1_is_found_and_lies_under_the_own_cgroup(tmp_path: Path) -> None:
    (tmp_path / "memory/mine").mkdir(parents=True)
    mounts = [
        f"32 31 0:29 / {tmp_path}/cpu rw shared:9 - cgroup cgroup rw,cpu,cpuacct",
        f"35 31 0:32 /docker/1 {tmp_path}/memory rw - cgroup cgroup rw,memory",
        f"41 31 0:38 / {tmp_path}/unified rw - cgroup2 cgroup2 rw",
    ]
    found = find_cgroups(proc(tmp_path, mounts, "4:memory:/docker/1/mine\n1:cpu,cpuacct:/gone\n0::/\n"))
    assert isinstance(found, CgroupsV1)
    assert (found.cpu_base, found.memory_base) == (tmp_path / "cpu", tmp_path / "memory/mine")


def test_version_2_is_found_where_controllers_are_handed_out(tmp_path: Path) -> None:
    own = tmp_path / "tree/user.slice/session"
    own.mkdir(parents=True)
    (tmp_path / "tree/cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    (tmp_path / "tree/user.slice/cgroup.subtree_control").write_text("cpu memory\n")
    mounts = [f"41 31 0:38 / {tmp_path}/tree rw - cgroup2 cgroup2 rw"]
    found = find_cgroups(proc(tmp_path, mounts, "0::/user.slice/session\n"))
    assert isinstance(found, CgroupsV2)
    assert (found.cpu_root, found.base) == (tmp_path / "tree", tmp_path / "tree/user.slice")


def test_without_controllers_there_is_no_lab(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="needs the cgroup controllers cpu and memory"):
        find_cgroups(proc(tmp_path, [], "0::/\n"))
    with pytest.raises(ClusterError, match="needs Linux with cgroups"):
        find_cgroups(tmp_path / "none")


def test_without_root_or_programs_there_is_no_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda program: None if program == "tc" else program)
    with pytest.raises(ClusterError, match=r"needs the program tc, .*; install iproute2"):
        this_machine()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match="got user 1000; run it with sudo"):
        this_machine()


def targets(spec: LabSpec) -> list[Target]:
    return [
        Target(
            lab="lab",
            host=host.name,
            address=f"10.77.0.{index + 1}",
            cpu=0.5,
            bandwidth_bytes_per_s=125e6,
            memory_bytes=1,
            directories=(Path("/c"),),
        )
        for index, host in enumerate(spec.hosts)
    ]


def test_processes_get_torchruns_environment() -> None:
    env = environment(targets(make_spec("lab", 3)), node_rank=2, local_rank=1, nproc_per_host=2, port=29500)
    assert env == {
        "RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "2",
        "GROUP_WORLD_SIZE": "3", "NODE_RANK": "2", "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500",
        "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "PENSTOCK_HOST": "host2", "PENSTOCK_CPU": "0.5",
        "PENSTOCK_BANDWIDTH": "1.25e+08", "PENSTOCK_TRUSTED": "1", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip


def test_a_command_joins_its_host_before_it_starts() -> None:
    line = command_line(targets(make_spec("lab"))[1], ["python", "-c", "print('a b')"])
    assert line[:2] == ["sh", "-c"]
    assert line[3:] == [
        *("penstock-lab", "/c/cgroup.procs", "--", "ip", "netns", "exec", "penstock.lab.host1"),
        *("unshare", "--uts", "sh", "-c", 'echo "$0" > /proc/sys/kernel/hostname; exec "$@"', "host1"),
        *("python", "-c", "print('a b')"),
    ]


def test_a_small_host_keeps_to_one_core() -> None:
    target = replace(targets(make_spec("lab"))[1], core=3)
    assert command_line(target, ["true"])[6:9] == ["taskset", "--cpu-list", "3"]


@pytest.mark.parametrize(
    ("shares", "cores", "chosen"),
    [
        ([0.35] * 4, [0, 1], [0, 1, 0, 1]),
        ([0.2, 0.9, 0.2, 0.6], [4, 5], [5, 4, 5, 5]),
        ([1.5, 0.5], [0, 1], [None, 0]),
        ([0.9, 0.9, 0.9], [0, 1], [0, 1, None]),
    ],
)
def test_cores_are_shared_out(shares: list[float], cores: list[int], chosen: list[int | None]) -> None:
    assert choose_cores(shares, cores) == chosen


def write_process(proc: Path, pid: int, command: str, peak_kb: int) -> None:
    (proc / str(pid)).mkdir(parents=True, exist_ok=True)
    (proc / str(pid) / "status").write_text(f"Name:\tx\nVmHWM:\t  {peak_kb} kB\n")
    (proc / str(pid) / "cmdline").write_bytes(command.replace(" ", "\0").encode())


def test_out_of_memory_names_host_limit_and_users(tmp_path: Path) -> None:
    watch = MemoryWatch(tmp_path)
    write_process(tmp_path, 7, "python prepare.py", 90_000)
    watch.sample({7})
    write_process(tmp_path, 8, "python train.py", 60_000)
    write_process(tmp_path, 9, "sh -c x", 1000)
    watch.sample({8, 9})
    watch.sample({9})
    use = MemoryUse(used_bytes=1, peak_bytes=64_000_000, num_oom_kills=1)
    assert explain("host1", 64_000_000, use, watch) == (
        "host1 ran out of its memory of 64 MB, so the kernel ended its largest process, 'python train.py'; "
        "the host's peak was 64 MB, the largest seen were 'python prepare.py' 92.2 MB, "
        "'python train.py' 61.4 MB, 'sh -c x' 1.02 MB; "
        "give the host more with memory = … in the lab file, or less to do"
    )


SPINS = ["sh", "-c", "while :; do :; done"]


@pytest.mark.skipif(shutil.which("chrt") is None, reason="cores are kept awake with chrt")
def test_cores_are_kept_awake_at_low_priority() -> None:
    core = max(os.sched_getaffinity(0))
    before = psutil.Process().children()
    awake = Awake([core, core])
    (helper,) = set(psutil.Process().children()) - set(before)
    try:
        # it is the helper, and then other programs, before it is the one that spins
        until(lambda: [child for child in helper.children() if child.cmdline()[:3] == SPINS])
        (spinner,) = helper.children()
        assert os.sched_getscheduler(spinner.pid) == os.SCHED_IDLE
        assert os.sched_getaffinity(spinner.pid) == {core}
    finally:
        awake.release()
    assert not helper.is_running()
    until(lambda: not spinner.is_running(), 30)  # it ends only once a busy machine has a moment for it


@pytest.fixture
def busy_core() -> Iterator[int]:
    """A core on which two other processes run all the time."""
    core = max(os.sched_getaffinity(0))
    spin = ["taskset", "--cpu-list", str(core), "sh", "-c", "while :; do :; done"]
    processes = [subprocess.Popen(spin) for _ in range(2)]
    yield core
    for process in processes:
        process.kill()
        process.wait()


class Stuck(subprocess.Popen[str]):
    """A process that a kill does not end, as one that waits for a disk."""

    def wait(self, timeout: float | None = None) -> int:
        if timeout is None:
            return super().wait()
        raise subprocess.TimeoutExpired(self.args, timeout)


def test_helpers_are_released_if_a_process_survives(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    helpers: list[str] = []

    class Helper:
        def __init__(self, *_what: object) -> None:
            helpers.append("made")

        def release(self) -> None:
            helpers.append("released")

    started: list[Stuck] = []

    def start(*_: object) -> Stuck:
        pipe = subprocess.PIPE
        started.append(Stuck(["sleep", "60"], stdout=pipe, stderr=pipe, text=True, start_new_session=True))
        return started[-1]

    monkeypatch.setattr(processes, "Guard", Helper)
    monkeypatch.setattr(processes, "Awake", Helper)
    monkeypatch.setattr(processes, "start_process", start)
    lab = Lab(make_spec("lab", 1), machine)
    lab.up()
    shell_of(machine).answers["ip netns list"] = "penstock.lab (id: 0)\npenstock.lab.host0\n"
    (tmp_path / "cgroup/penstock.lab/host0/memory.events").write_text("oom_kill 0\n")
    run = lab.start(["sleep", "60"], grace_s=0.1, drain_s=0.2)
    run.terminate()
    assert helpers == ["made", "made", "released", "released"]
    with pytest.raises(RunError, match=rf"but {started[0].pid} of host0 did not; see what it waits for"):
        run.wait(timeout_s=5.0)
    started[0].wait()


def asked_to_end() -> None:
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.raise_signal(number)


def test_a_program_keeps_its_own_signals() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        with pytest.raises(SystemExit) as left, ended_by_signals(way_out_s=0.2):
            asked_to_end()
        assert left.value.code == 143
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        signal.raise_signal(signal.SIGTERM)  # on the way out
        time.sleep(0.25)
        with pytest.raises(SystemExit, match="143"):  # whoever goes on can still be asked to end
            signal.raise_signal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with ended_by_signals():
            pass
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, before)


@pytest.mark.skipif(shutil.which("chrt") is None, reason="cores are kept awake with chrt")
def test_awake_helpers_end_with_their_process(busy_core: int) -> None:
    words = [sys.executable, str(PROGRAMS / "awake_orphans.py"), str(busy_core)]
    said = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    (pid,) = map(int, said.stdout.split())
    until(lambda: not psutil.pid_exists(pid), 3)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_command_ends_before_its_caller(number: int, tmp_path: Path) -> None:
    words = [sys.executable, str(PROGRAMS / "asked_to_end.py"), str(int(number))]
    done = subprocess.run(words, cwd=tmp_path, timeout=60)
    assert done.returncode == 128 + number
    assert {path.name for path in tmp_path.iterdir()} == {"ended", "cleaned"}


def test_a_failed_command_is_told_in_one_line() -> None:
    with pytest.raises(RunError, match=r" failed: one two; .*penstock lab down"):
        SystemShell().run([sys.executable, "-c", "import sys; sys.exit('one\\ntwo')"])
    with pytest.raises(RunError, match="could not be started"):
        SystemShell().run(["no-such-program-here"])
