"""How processes become one group, and who is refused."""

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from penstock import __version__
from penstock.errors import RunError, UsageError
from penstock.graph.operators import listed_operators
from penstock.graph.program import marks_of_operators
from penstock.group.addresses import LOOPBACK, first_address, listen
from penstock.group.board import PatientStore, connect_store, serve_store, wait_for_server
from penstock.group.entry import own_address
from penstock.group.join import Hello, Meeting
from penstock.group.links import PlainLinks
from penstock.group.roll_call import Rendezvous
from penstock.terminal.progress import describing
from penstock.transport.base import StoreSilent, run_watched

DESK = "127.1"  # no address, but a name that resolves to a loopback address, as a machine's own often does


def meet(store: Store, rank: int, size: int, **settings: Any) -> Meeting:
    name = f"rank {rank} on here"
    rendezvous = Rendezvous(PlainLinks(), lambda: store, LOOPBACK, 0, LOOPBACK, name)
    return Meeting(rendezvous, rank, size, prefix="run0", **settings)


def together(*meetings: Callable[[], Meeting]) -> list[Meeting | Exception]:
    """Let processes meet at the same time; gives each one's group, or what it was told."""
    found: dict[int, Meeting | Exception] = {}

    def run(index: int) -> None:
        try:
            found[index] = meetings[index]()
        except RunError as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(meetings))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    return [found[index] for index in range(len(meetings))]


def test_group_has_the_names_of_all_ranks() -> None:
    store = HashStore()
    first, second = together(lambda: meet(store, 0, 2), lambda: meet(store, 1, 2))
    assert isinstance(first, Meeting)
    assert isinstance(second, Meeting)
    assert [hello.name for hello in second.hellos] == ["rank 0 on here", "rank 1 on here"]
    assert first.name == second.name
    assert sorted(first.boards.others) == [1]
    assert sorted(second.boards.others) == [0]


def test_two_runs_on_one_store_have_different_names() -> None:
    names = set()
    for _ in range(2):
        (alone,) = together(lambda: meet(HashStore(), 0, 1))
        assert isinstance(alone, Meeting)
        names.add(alone.name)
    assert len(names) == 2


def test_missing_ranks_are_named_in_time() -> None:
    begin = time.perf_counter()
    store = HashStore()
    hello = Hello(
        rank=2, size=4, run="", nonce="x", penstock=__version__, torch=str(torch.__version__).partition("+")[0],
        name="", host="", address=LOOPBACK, board_port=1,
    )  # fmt: skip
    store.set("penstock/run0/hello/2", msgspec.json.encode(hello).decode())
    with pytest.raises(RunError, match=r"rank 1, 3 of 4 .* 0 s"):
        meet(store, 0, 4, join_s=0.3)
    assert time.perf_counter() - begin < 2.0


def test_progress_line_names_missing_ranks() -> None:
    shown: list[str] = []
    with describing("starting", shown.append), pytest.raises(RunError):
        meet(HashStore(), 0, 3, join_s=0.3, name_s=0.1)
    assert shown == ["connecting 3 processes", "connecting 3 processes, waiting for rank 1, 2", "starting"]


def test_watcher_can_end_the_rendezvous() -> None:
    def watch() -> None:
        raise RunError("worker 1 is gone")

    with pytest.raises(RunError, match="worker 1 is gone"):
        meet(HashStore(), 0, 2, watch=watch)


def test_a_second_process_of_one_rank_is_refused() -> None:
    store = HashStore()
    told = together(lambda: meet(store, 0, 2), lambda: meet(store, 1, 2), lambda: meet(store, 1, 2))
    refused = [one for one in told[1:] if isinstance(one, RunError)]
    assert len(refused) == 1
    assert "rank 1 is already taken" in str(refused[0])
    assert isinstance(told[0], Meeting)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("__version__", r"rank 1 on \S+ runs penstock '9.9', but rank 0 on \S+ expects '\d.*; install the same"),
        ("size", r"rank 1 on \S+ was started with 3 processes, but rank 0 on \S+ expects 2; start every"),
        ("run", r"""rank 1 on \S+ belongs to run "yesterday's", but rank 0 on \S+ expects ''; .*--rdzv-id"""),
        ("nonsense", rf"rank 1 .*\(here {__version__}\)"),
    ],
)
def test_rank_that_does_not_match_is_refused(what: str, message: str) -> None:
    store = HashStore()
    own = Hello(
        rank=1, size=2, run="", nonce="x", penstock=__version__, torch=str(torch.__version__).partition("+")[0],
        name="", host="there", address=LOOPBACK, board_port=1,
    )  # fmt: skip
    changes: dict[str, dict[str, Any]] = {
        "__version__": {"penstock": "9.9"},
        "size": {"size": 3},
        "run": {"run": "yesterday's"},
    }
    text = msgspec.json.encode(msgspec.structs.replace(own, **changes.get(what, {}))).decode()
    store.set("penstock/run0/hello/1", text if what != "nonsense" else '{"version": 1}')
    with pytest.raises(RunError, match=message):
        meet(store, 0, 2)
    assert "TORCHELASTIC_RUN_ID" not in os.environ


def say_hello(store: Store, marks: object) -> None:
    """Have rank 1 come with another version of torch, and the marks of its operators."""
    hello = Hello(
        rank=1, size=2, run="", nonce="x", penstock=__version__, torch="2.99.0", name="a board", host="board",
        address=LOOPBACK, board_port=1,
    )  # fmt: skip
    store.set("penstock/run0/hello/1", msgspec.json.encode(hello).decode())
    store.set("penstock/run0/hello/1/operators", msgspec.json.encode(marks).decode())


@pytest.mark.parametrize("changed", [[], ["aten.relu.default"], ["aten.relu.default", "aten.linear.default"]])
def test_other_torch_version_joins_with_its_operators(changed: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    store, names = HashStore(), sorted(listed_operators())
    marks = marks_of_operators()
    assert len(marks) == len(names)
    assert all(marks), "this torch lacks an operator of the list"
    say_hello(store, ["" if name in changed else mark for name, mark in zip(names, marks, strict=True)])
    assert meet(store, 0, 2).unlike == {1: frozenset(changed)}
    said = capfd.readouterr().err.replace("\n", " ")
    assert "a board (2.99.0)" in said


@pytest.mark.parametrize("marks", [[], ["x"], {"a": 1}, 7])
def test_operators_that_cannot_be_read(marks: object) -> None:
    store = HashStore()
    say_hello(store, marks)
    with pytest.raises(RunError):
        meet(store, 0, 2)


def test_silent_store_means_rank_0_is_lost() -> None:
    silent = threading.Event()

    class Silent(HashStore):
        def check(self, _keys: list[str]) -> bool:
            silent.wait(5.0)
            return False

    begin = time.perf_counter()
    with pytest.raises(RunError, match=r"rank 1 .* 0\.3 s"):
        meet(Silent(), 1, 2, store_s=0.3)
    assert time.perf_counter() - begin < 3.0
    silent.set()


def test_patient_store_returns_results_and_errors() -> None:
    store = PatientStore(HashStore, 5.0)
    store.call(lambda s: s.set("a", "b"))
    assert store.call(lambda s: s.get("a")) == b"b"
    with pytest.raises(RuntimeError, match="no paper"):
        store.call(lambda _s: (_ for _ in ()).throw(RuntimeError("no paper")))
    store.close()


def test_thread_errors_reach_their_caller() -> None:
    def fail() -> None:
        raise MemoryError("no more")

    with pytest.raises(MemoryError):
        run_watched(fail, lambda: None, 5.0)
    store = PatientStore(HashStore, 5.0)
    with pytest.raises(MemoryError):
        store.call(lambda _s: fail())
    store.close()
    release = threading.Event()
    with pytest.raises(StoreSilent, match=r"no answer for 0\.2 s"):
        run_watched(lambda: release.wait(5.0), lambda: None, 0.2)
    release.set()


def test_silent_store_gets_no_further_calls() -> None:
    release = threading.Event()
    store = PatientStore(HashStore, 0.1)
    with pytest.raises(StoreSilent, match=r"has not answered for 0\.1 s"):
        store.call(lambda _s: release.wait(5.0))
    with pytest.raises(StoreSilent, match="does not answer"):
        store.call(lambda s: s.set("a", "b"))
    store.close()
    release.set()


def test_a_store_listens_on_its_address_alone() -> None:
    store = serve_store(LOOPBACK)
    assert connect_store(LOOPBACK, store.port).check(["a"]) is False
    with pytest.raises(RunError, match=rf"127\.0\.0\.2:{store.port} cannot be reached"):
        wait_for_server("127.0.0.2", store.port, 0.3)
    with pytest.raises(OSError, match=r"in use"):
        listen(LOOPBACK, store.port)


def test_an_address_that_is_not_here_is_named() -> None:
    with pytest.raises(RunError, match=r"rank 0 .*192\.0\.2\.7"):
        Meeting(Rendezvous(PlainLinks(), HashStore, LOOPBACK, 0, "192.0.2.7", ""), 0, 1, prefix="run0")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_loopback_address_is_unchanged(host: str) -> None:
    assert first_address(host, all_here=False) == LOOPBACK


def test_the_first_hosts_own_name_is_not_loopback_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.group.addresses.local_address", lambda _towards: "192.168.1.10")
    assert first_address(DESK, all_here=False) == "192.168.1.10"
    assert first_address(DESK, all_here=True) == LOOPBACK


def test_unreachable_first_host_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_route(_towards: str) -> str:
        raise RunError("there is no route")

    monkeypatch.setattr("penstock.group.addresses.local_address", no_route)
    with pytest.raises(RunError, match=rf"^{DESK} .*; .*--master-addr"):
        first_address(DESK, all_here=False)


@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
def test_all_addresses_are_no_choice(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("PENSTOCK_BIND", address)
    with pytest.raises(UsageError, match=f"PENSTOCK_BIND must .* {address} means all"):
        own_address()
