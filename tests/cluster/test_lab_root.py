"""Labs for real. The module fails when it leaves anything on the machine."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.cluster.lab import Lab, LabSpec, lab_session, take_down, write_lab
from penstock.cluster.lab.cgroups import Cgroups
from penstock.cluster.lab.machine import find_cgroups
from penstock.cluster.output import EndTogether
from penstock.errors import ClusterError, OutOfMemory, RunError
from tests.cluster.labs import LAB_MARKS, MIB, Collected, make_spec, output_of, traces, until
from tests.fewer import long
from tests.processes import PROGRAMS

pytestmark = LAB_MARKS
NAME = f"t{os.getpid()}"
VERB = [sys.executable, "-c", "from penstock.cli.lab import app; app()"]
GROW = "import time; x = []\nwhile True: x.append(bytearray(b'x' * 4_000_000)); time.sleep(0.03)"


@pytest.fixture(autouse=True, scope="module")
def no_leaks() -> Iterator[None]:
    before = traces(NAME)
    yield
    until(lambda: traces(NAME) == before)  # what has the lowest priority takes a while to end on a busy machine


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with lab_session(make_spec(NAME)) as lab:
        yield lab


@pytest.fixture
def cgroups() -> Cgroups:
    return find_cgroups()


def peer(*arguments: object) -> list[str]:
    return [sys.executable, str(PROGRAMS / "lab_peers.py"), *map(str, arguments)]


def test_hosts_have_names_addresses_and_reach_each_other(lab: Lab) -> None:
    said = output_of(lab, peer("greet"))
    known = ["host0 10.77.0.1", "host1 10.77.0.2"]
    assert said.of("host0") == [*known, "host0", "greeted by 10.77.0.2"]
    assert said.of("host1") == [*known, "host1", "greeted by 10.77.0.1"]


def test_status_tells_what_hosts_have(lab: Lab) -> None:
    status = lab.status()
    assert status.state == "up"
    assert [(host.name, host.address) for host in status.hosts] == [("host0", "10.77.0.1"), ("host1", "10.77.0.2")]
    host = status.hosts[1]
    assert (host.cpu, host.memory_bytes, host.num_processes, host.cut) == (0.35, 256 * MIB, 0, False)


def test_lab_hosts_reach_no_other_network(lab: Lab) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}))"
        with lab.start([sys.executable, "-c", code], on=["host0"], output=Collected()) as run:
            assert run.wait(timeout_s=10) == {"host0": 1}
    assert output_of(lab, ["ip", "route"]).of("host0") == [
        "10.77.0.0/24 dev eth0 scope link src 10.77.0.1 congctl cubic "
    ]


def shares(lab: Lab) -> dict[str, float]:
    said = output_of(lab, peer("spin"))
    return {host.name: float(said.of(host.name)[0]) for host in lab.spec.hosts}


def most(measure: Callable[[], dict[str, float]], wanted: dict[str, float], rel: float) -> dict[str, float]:
    """Measure until each host has had what it is to have: a busy machine may give less for a while, never more."""
    best: dict[str, float] = {}
    for _ in range(12):
        measured = measure()
        best = {name: max(value, best.get(name, 0.0)) for name, value in measured.items()}
        if all(best[name] > (1 - rel) * value for name, value in wanted.items()):
            break
    return best


def test_cpu_shares_are_kept_and_can_be_slowed(lab: Lab) -> None:
    equal = dict.fromkeys(("host0", "host1"), 0.35)
    assert most(lambda: shares(lab), equal, 0.03) == pytest.approx(equal, rel=0.03)
    lab.slow("host1", cpu=0.1)
    try:
        uneven = {"host0": 0.35, "host1": 0.1}
        assert most(lambda: shares(lab), uneven, 0.1) == pytest.approx(uneven, rel=0.1)
        assert lab.status().hosts[1].cpu == 0.1
    finally:
        lab.slow("host1", cpu=0.35)


@pytest.mark.parametrize("sender", [0, 1])
def test_links_carry_their_bandwidth(lab: Lab, sender: int) -> None:
    receiver = f"host{1 - sender}"

    def rate() -> dict[str, float]:
        return {receiver: float(output_of(lab, peer("transfer", sender, 10_000_000)).of(receiver)[0])}

    wanted = {receiver: 12_500_000.0}
    assert most(rate, wanted, 0.1) == pytest.approx(wanted, rel=0.1)


def test_a_slower_link_takes_a_connections_pieces_whole(lab: Lab) -> None:
    shown = Collected()
    with lab.start(peer("pieces"), output=shown):
        until(lambda: len(shown.of("host0")) > 2)
        try:
            lab.slow("host1", bandwidth_bytes_per_s=3_000_000.0)
            already = len(shown.of("host0"))
            # what waits to be sent already keeps its size: the first two do not count
            until(lambda: len(shown.of("host0")) > already + 8)
        finally:
            lab.slow("host1", bandwidth_bytes_per_s=12_500_000.0)
    assert max(int(size) for size in shown.of("host0")[already + 3 : already + 8]) > 2 * 1514


def test_a_cut_host_is_silent_until_restored(lab: Lab) -> None:
    with lab.start(peer("echo"), on=["host0"], output=Collected()):
        until(lambda: output_of(lab, peer("ask"), on=["host1"]).of("host1") == ["8"])
        lab.cut("host1")
        assert [host.cut for host in lab.status().hosts] == [False, True]
        assert output_of(lab, peer("ask"), on=["host1"]).of("host1") == ["0"]
        lab.restore("host1")
        until(lambda: output_of(lab, peer("ask"), on=["host1"]).of("host1") == ["8"])


def test_a_killed_host_ends_the_run(lab: Lab) -> None:
    with lab.start(["sleep", "60"], output=Collected()) as run:
        until(lambda: [host.num_processes for host in lab.status().hosts] == [1, 1])
        with pytest.raises(ClusterError, match=r"host0 .* 1 process; .* penstock lab kill"):
            lab.start(["true"], on=["host0"])
        assert lab.kill("host1") == 1
        assert run.wait(timeout_s=10) == {"host0": -signal.SIGTERM, "host1": -signal.SIGKILL}
        assert run.first_failure == "host1 ended with SIGKILL"


def test_hosts_may_outlive_each_other(lab: Lab) -> None:
    command = ["sh", "-c", "[ $RANK = 0 ] || exit 3; sleep 1; echo late"]
    collected = Collected()
    with lab.start(command, output=collected, end_together=False) as run:
        assert run.wait(timeout_s=10) == {"host0": 0, "host1": 3}
    assert collected.of("host0") == ["late"]


def test_lab_run_separates_output_and_sets_ranks(lab: Lab) -> None:
    collected = Collected()
    command = ["sh", "-c", "echo $RANK/$WORLD_SIZE; echo $MASTER_ADDR:$MASTER_PORT $X >&2"]
    with lab.start(command, nproc_per_host=2, port=1234, env={"X": "y"}, output=collected) as run:
        run.wait(timeout_s=10)
    assert sorted(collected.of("host0")) == ["0/4", "1/4"]
    assert sorted(collected.of("host1")) == ["2/4", "3/4"]
    assert collected.of("host1", "stderr") == ["10.77.0.1:1234 y"] * 2


def test_unwritable_output_ends_the_run(lab: Lab) -> None:
    def refuse(_line: object) -> None:
        raise BrokenPipeError("nobody reads")

    with lab.start(["sh", "-c", "echo x; sleep 60"], output=refuse) as run, pytest.raises(BrokenPipeError):
        run.wait(timeout_s=10)


def test_nothing_a_command_started_is_left(lab: Lab) -> None:
    output_of(lab, ["sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 & true"])
    assert [host.num_processes for host in lab.status().hosts] == [0, 0]


def test_processes_that_ignore_sigterm_are_killed(lab: Lab) -> None:
    collected = Collected()
    run = lab.start(["sh", "-c", "trap '' TERM; echo ready; sleep 60"], output=collected, grace_s=0.3)
    until(lambda: len(collected.lines) == 2)
    with pytest.raises(RunError, match=r"within 0.1 s .* host0, host1;"):
        run.wait(timeout_s=0.1)
    run.terminate()
    assert run.exit_codes == {"host0": -signal.SIGKILL, "host1": -signal.SIGKILL}


def test_running_out_of_memory_names_host_limit_and_user() -> None:
    spec = LabSpec(name=f"{NAME}m", hosts=make_spec("x", memory_bytes=64 * MIB).hosts)
    command = ["sh", "-c", f'[ $RANK = 1 ] || exec sleep 60; {sys.executable} -c "$0"; sleep 60', GROW]
    with lab_session(spec) as lab, lab.start(command, output=Collected()) as run, pytest.raises(RunError) as caught:
        run.wait(timeout_s=20)
    message = str(caught.value)
    assert message.startswith("host1 ran out of its memory of 67.1 MB, so the kernel ended its largest process, ")
    assert f"'{sys.executable} -c x"[:20] in message
    assert "the host's peak was 67.1 MB" in message
    assert "\n" not in message


@pytest.mark.parametrize("ends", ["first", "first-failed"])
def test_running_out_of_memory_on_the_first_host_is_not_outlived(ends: EndTogether) -> None:
    spec = LabSpec(name=f"{NAME}m", hosts=make_spec("x", memory_bytes=64 * MIB).hosts)
    command = ["sh", "-c", f'[ $RANK = 0 ] || exec sleep 60; {sys.executable} -c "$0" || exit 1', GROW]
    with (
        lab_session(spec) as lab,
        lab.start(command, output=Collected(), end_together=ends) as run,
        pytest.raises(OutOfMemory, match="host0"),
    ):
        run.wait(timeout_s=20)


def test_a_lab_taken_down_ends_its_run() -> None:
    # early ones meet processes that are only just joining their host
    for wait_s in [0.0, 0.0, 0.001, 0.002, 0.003, 0.004, 0.006, 0.01, 0.2]:
        with lab_session(make_spec(f"{NAME}d")) as lab, lab.start(["sleep", "60"], output=Collected()) as run:
            time.sleep(wait_s)
            take_down(lab.spec.name)
            # whether the lab or the processes are missed first is chance
            with contextlib.suppress(RunError):
                assert all(run.wait(timeout_s=10).values())
            assert None not in run.exit_codes.values()


def test_two_labs_at_once(lab: Lab) -> None:
    with lab_session(make_spec(f"{NAME}-2", 1)) as other:
        assert Lab.from_name(f"{NAME}-2").spec == other.spec
        assert output_of(other, ["hostname"]).of("host0") == ["host0"]
    assert not other.is_up()
    assert lab.is_up()
    lab.up()
    other.down()
    assert lab.is_up()


@pytest.mark.parametrize(
    ("verb", "number"), [("infer", signal.SIGHUP), ("train", signal.SIGTERM), long("bench", signal.SIGTERM)]
)
def test_interrupted_verb_on_a_cluster_leaves_nothing(
    verb: str, number: signal.Signals, tmp_path: Path, cgroups: Cgroups
) -> None:
    name = f"{NAME}c"
    file = tmp_path / "lab.toml"
    file.write_text(write_lab(make_spec(name, memory_bytes=2048 * MIB)))
    before = traces(NAME)
    data = {"bench": [], "infer": ["--images", "digits"], "train": ["--data", "digits"]}[verb]
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", verb, "timm:resnet18", *data, "--cluster", str(file)],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        until(lambda: len(cgroups.processes(name)) == 2, 60)
        process.send_signal(number)
        time.sleep(0.05)
        process.send_signal(number)  # a closing terminal sends several
        assert process.wait(30) == 128 + number
        until(lambda: traces(NAME) == before)  # a guard of a host's processes goes after them
        assert not list(tmp_path.glob("runs/train/asked.json"))
    finally:
        process.kill()
        process.communicate()
        take_down(name)


def start_verb(*arguments: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([*VERB, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("num_namespaces", [2, long(1), long(3)])
def test_interrupted_up_leaves_no_lab(number: int, num_namespaces: int, tmp_path: Path) -> None:
    name = f"{NAME}u"
    file = tmp_path / "lab.toml"
    file.write_text(write_lab(make_spec(name, 3)))
    before = traces(name)
    for _ in range(2):
        process = start_verb("up", str(file))
        until(lambda: len(list(Path("/run/netns").glob(f"penstock.{name}*"))) >= num_namespaces)
        process.send_signal(number)
        process.wait(10)
        if number == signal.SIGKILL:
            take_down(name)
        assert traces(name) == before
    take_down(name)


@pytest.mark.parametrize("number", [signal.SIGKILL, long(signal.SIGINT), long(signal.SIGTERM)])
def test_interrupted_run_leaves_no_process(number: int, tmp_path: Path, cgroups: Cgroups) -> None:
    name = f"{NAME}r"
    file = tmp_path / "lab.toml"
    file.write_text(write_lab(make_spec(name)))
    before = traces(NAME)
    for _ in range(2):
        process = start_verb("run", str(file), "--", "sh", "-c", "setsid sleep 1000 & sleep 1000")
        until(lambda: len(cgroups.processes(name)) == 6)
        process.send_signal(number)
        if number == signal.SIGINT:
            # somebody impatient
            time.sleep(0.05)
            process.send_signal(number)
        process.wait(10)
        # whatever way it went, nothing goes on running
        until(lambda: not cgroups.processes(name), 3)
        if number != signal.SIGTERM:
            take_down(name)
        until(lambda: traces(NAME) == before)
