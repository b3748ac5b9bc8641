"""Every test leaves the machine as it found it."""

import atexit
import contextlib
import gc
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import settings

from tests import warm
from tests.disks import Disk
from tests.fewer import FULL, examples

# a shell starts what runs in its background with interrupts ignored, and `nohup` what it runs with hang-ups: so would
# be every process of the tests
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# where tests run side by side, what one leaves behind is not to be looked for by another
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, tempfile.tempdir, ignore_errors=True)

# a busy machine prints lines about what takes long among those that a test expects
os.environ["PENSTOCK_PROGRESS"] = "0"

# properties that say no number of examples
settings.register_profile("tests", max_examples=examples(100), deadline=None)  # a busy machine is no failure
settings.load_profile("tests")

# torch asks for the names of those that it connects to; where nobody answers, each connection waits for that
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# With AVX-512 on an Intel processor, losses came out different in the last bit between schedules and between one stage
# and two, and on newer processors in MKL's strict mode for AVX-512 too; with AVX2, which MKL reads when it is first
# used, they are equal.
with contextlib.suppress(OSError):
    processor = Path("/proc/cpuinfo").read_text()
    if "GenuineIntel" in processor and "avx512f" in processor:
        os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")

_SETTLE_S = 20.0  # a busy machine takes its time; what is left behind is so for good
_ENDS_S = 0.1  # what is about to end by itself needs no collection of garbage
_COLLECT_S = 1.0
_LISTED = Path("/proc/thread-self/children").exists()
# pytest's own, and what torch and scikit-learn set for themselves when they are first used
_NOT_OURS = {
    "PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
}  # fmt: skip


def _left_behind(known: Collection[int] = ()) -> dict[str, dict[Any, str]]:
    """Everything of this process that a test could leave: by kind, what it is and how to call it.

    What a known process starts is its own: the browser of several tests takes other processes for other pages.
    """
    process = psutil.Process()
    forked = [psutil.Process(pid) for pid in warm.started_by(process.pid) if psutil.pid_exists(pid)]
    children = {child.pid: f"{child.pid} {_command(child)}" for child in (*_children(process, known), *forked)}
    threads = {t.native_id: t.name for t in threading.enumerate() if not t.daemon or t.name.startswith("penstock")}
    sockets = {c.laddr.port: str(c.laddr) for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    folders = (Path(tempfile.gettempdir()), Path("/dev/shm"))
    files = {path: str(path) for folder in folders for path in folder.glob("*penstock*")}
    return {"process": children, "thread": threads, "listening socket": sockets, "temporary file": files}


def _children(process: psutil.Process, known: Collection[int]) -> Iterator[psutil.Process]:
    for child in _started(process):
        yield child
        if child.pid not in known:
            yield from _children(child, known)


def _started(process: psutil.Process) -> list[psutil.Process]:
    """Give the children of a process; psutil looks at all processes for that, in 12 ms, twice for each test."""
    found: list[psutil.Process] = [] if _LISTED else process.children()
    for file in Path(f"/proc/{process.pid}/task").glob("*/children"):
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            found += [psutil.Process(int(pid)) for pid in file.read_text().split()]
    return found


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:200]
    except psutil.Error:
        return "(gone)"


@pytest.fixture(scope="session", autouse=True)
def process_that_stands_by() -> Iterator[None]:
    """Fork the processes of tests from one that has imported everything, and capture equal models once.

    See `tests/warm.py` and `tests/captures.py`.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:  # a core for each: threads of two that wait for each other take minutes
        import torch

        torch.set_num_threads(1)
    from tests import captures

    with warm.standing_by(), captures.once():
        yield


@pytest.fixture(scope="module", autouse=True)
def imports_are_no_garbage() -> None:
    """Leave what is there before a file's first test out of the collections of garbage: they take most of a second.

    It is what was imported and what libraries keep; what earlier files have left as garbage is collected first.
    """
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Undo the freezing: libraries report what is left at the interpreter's end as leaks."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def counted_seconds(record_property: Callable[[str, object], None]) -> Iterator[None]:
    """Record the CPU seconds of this process, for `tests/durations.py`; the rest is other processes, and waiting."""
    begin_s = time.process_time()
    yield
    record_property("cpu_s", round(time.process_time() - begin_s, 3))


@pytest.fixture(autouse=True)
def fresh_where_asked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Start processes as a person's shell does in tests that are marked `fresh`."""
    fresh = request.node.get_closest_marker("fresh") is not None
    place = os.environ.pop(warm.NAME) if fresh else ""
    yield
    if fresh:
        os.environ[warm.NAME] = place


@pytest.fixture(autouse=True)
def leaves_nothing_behind(fresh_where_asked: None) -> Iterator[None]:  # noqa: ARG001 (undone after this looks)
    """Fail a test that leaves a process, a thread, a socket, a file or a changed environment."""
    before = _left_behind()
    environment = dict(os.environ)
    yield
    deadline = time.monotonic() + _SETTLE_S
    collect_at = time.monotonic() + _ENDS_S
    while True:
        after = _left_behind(before["process"])
        new = [
            f"{kind}: {name}"
            for kind, things in after.items()
            for key, name in things.items()
            if key not in before[kind]
        ]
        if not new or time.monotonic() > deadline:
            break
        if time.monotonic() > collect_at:
            gc.collect()
            # late in the suite this takes most of a second, in which no other thread runs, also not one that cleans up
            collect_at = time.monotonic() + _COLLECT_S
        time.sleep(0.02)
    changed = {
        name
        for name in (environment.keys() | os.environ.keys()) - _NOT_OURS
        if environment.get(name) != os.environ.get(name)
    }
    assert not new, f"left behind: {new}"
    assert not changed, f"changed in the environment: {sorted(changed)}"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute with one thread, as stages on small machines do, so that sums have one order."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# files of `make test-all`, not of `make test`: machines, schedulers, browsers, processes that are lost at many moments,
# whole guides, the demo
_ALL_ONLY = {
    "cli/test_current_folder", "cli/test_demo", "cluster/test_boards", "cluster/test_slurm", "cluster/test_ssh",
    "docs/test_guides", "docs/test_notebook", "recipes/test_elastic_runs", "recipes/test_lost_processes",
    "report/test_page", "serve/test_page", "stream/test_left_open", "stream/test_lost_hosts", "stream/test_lost_ranks",
    "stream/test_memory", "stream/test_secured", "train/test_survivors",
}  # fmt: skip
# what takes longest is begun first, so that processes that run files side by side end at about the same time; files
# with many processes and deadlines of their own are not begun beside each other
_LONG = ("test_lost_ranks", "test_elastic_runs", "test_demo", "test_memory", "test_survivors", "test_ssh", "test_slurm")


@pytest.hookimpl(tryfirst=True)  # before items are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the files and properties of `make test-all`, and begin with the files that take longest.

    TESTS_SHUFFLE=SEED runs the files in another order, and the tests of a file too.
    """
    for item in items:
        everywhere = FULL and getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
        if everywhere or item.path.relative_to(Path(__file__).parent).with_suffix("").as_posix() in _ALL_ONLY:
            item.add_marker("long")
    if seed := os.environ.get("TESTS_SHUFFLE"):
        random.Random(seed).shuffle(items)
        files = {path: place for place, path in enumerate(dict.fromkeys(item.path for item in items))}
        items.sort(key=lambda item: files[item.path])
    else:
        order = {name: place for place, name in enumerate(_LONG)}
        items.sort(key=lambda item: order.get(item.path.stem, len(order)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Make the pretended device known where a test asks for it: at its first backward torch counts devices, once."""
    if any("pretended" in getattr(item, "fixturenames", ()) for item in session.items):
        from tests import pretend

        pretend.pretend()


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A device that is not the CPU; messages may not lie on it."""
    from penstock import tensors as devices
    from penstock.transport import memory_network
    from tests import pretend

    monkeypatch.setattr(devices, "KINDS", [*devices.KINDS, pretend.NAME])
    for name in ("send", "receive"):
        method = getattr(memory_network.MemoryTransport, name)

        def on_host(self: Any, buffer: Any, *rest: Any, method: Any = method, **named: Any) -> Any:
            assert buffer.device == devices.HOST
            return method(self, buffer, *rest, **named)

        monkeypatch.setattr(memory_network.MemoryTransport, name, on_host)
    return pretend.pretend()[0]


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch, pretended: Any) -> Any:
    """The pretended device, which is also found when devices are looked for; checkpoints need that it is not."""
    from tests import pretend

    monkeypatch.setattr(pretend.module, "available", True)
    return pretended


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """The calls of the system to files, which can be made to fail."""
    return Disk(monkeypatch)


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the test, as that of temporary files; its path is short, since sockets may be made there."""
    folder = tmp_path_factory.mktemp("t")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def set_bfloat16(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Set whether the processor has instructions for bfloat16."""
    from penstock.runtime import bfloat16

    def set_(has: bool) -> None:
        monkeypatch.setattr(bfloat16, "has_bfloat16", lambda: has)

    return set_


@pytest.fixture
def communicators(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Communicators between pretended devices, one for each process of a run; see `tests/communicators.py`."""
    from penstock.engine import wiring
    from tests.communicators import Communicators

    made = Communicators()
    monkeypatch.setattr(wiring, "connect_nccl", made.connect)
    monkeypatch.setattr(wiring, "describe_gpu", made.describe)
    return made
