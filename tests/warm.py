"""Fresh processes for the price of a fork: one that has imported everything stands by, and forks for each.

A process that imports torch, timm and what belongs to them takes two to six seconds of a core, and a run of all tests
starts hundreds. What is started is the same otherwise: its arguments, environment, folder and standard streams are its
own, it is a process with an id, and it ends as any other does. Tests of what an interpreter does before Penstock runs
(what is imported, from where, with how much memory) are marked `fresh`, and start one.

    subprocess.Popen([sys.executable, "-m", ...]) ── request, three descriptors ──▶ this ── fork ──▶ the process
                                                  ◀── its id, and its status once it has ended ──
"""

import atexit
import contextlib
import gc
import importlib.util
import io
import json
import math
import os
import random
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAME = "TESTS_WARM"  # the folder of the process that stands by; who has it in the environment is forked
_SOCKET, _CHILDREN = "socket", "children"
_READY_S = 120.0
_REQUEST_BYTES = 150_000
_PIECE_BYTES = 2**16
_LOOK_S = 0.2
_STREAMS = ("stdin", "stdout", "stderr")
_OPTIONS = {*_STREAMS, "cwd", "env", "text", "universal_newlines", "encoding", "errors", "start_new_session"}
_IMPORTED = (
    "numpy", "torch", "torch.export", "torch.distributed.run", "torch.distributed.pipelining", "timm",
    "transformers.models.bert.modeling_bert", "transformers.models.gpt2.modeling_gpt2", "sklearn.datasets", "PIL.Image",
    "penstock.pipeline", "penstock.deploy.worker", "penstock.recipes.training_worker", "penstock.recipes.loop",
    "penstock.cli.main",
)  # fmt: skip
_REAL = subprocess.Popen


@dataclass(frozen=True)
class _Request:
    """What to run: the arguments behind the interpreter's own, and what belongs to the process."""

    arguments: Sequence[str]
    folder: str
    env: Mapping[str, str]
    session: bool
    requester: int


class WarmPopen(_REAL[Any]):
    """A `Popen` whose Python processes are forked from the one that stands by; of others it is what it always was.

    It replaces the public methods that the standard library and torch call: `send_signal` and leaving a `with` block
    are built on them.
    """

    def __init__(self, args: Any, **options: Any) -> None:
        environment = dict(os.environ if options.get("env") is None else options["env"])
        asked = [os.fspath(each) for each in args] if isinstance(args, (list, tuple)) else []
        python = asked[:1] == [sys.executable] and _runs(asked[1:])
        self._forked = python and NAME in os.environ and NAME in environment and options.keys() <= _OPTIONS
        if not self._forked:
            super().__init__(args, **options)
            return
        self.args, self.returncode = args, None
        self.stdin = self.stdout = self.stderr = None
        self._ended, self._text = threading.Lock(), _text_of(options)
        self._come: dict[int, list[bytes]] = {}
        theirs: list[int] = []
        opened: list[int] = []
        try:
            for number, name in enumerate(_STREAMS):
                theirs.append(self._stream(number, name, options.get(name), theirs, opened))
            folder, session = str(options.get("cwd") or os.getcwd()), bool(options.get("start_new_session"))
            request = json.dumps([asked[1:], folder, environment, session, os.getpid()])
            self._connection = _connect(Path(os.environ[NAME]))
            socket.send_fds(self._connection, [request.encode()], theirs)
            self.pid = int(self._connection.recv(64))
        finally:
            for descriptor in opened:
                os.close(descriptor)

    def _stream(self, number: int, name: str, wanted: Any, others: Sequence[int], opened: list[int]) -> int:
        """Return the descriptor of a standard stream for the process; those in `opened` are only passed on."""
        if wanted is None:
            return number
        if wanted == subprocess.STDOUT:
            return others[1]
        if wanted == subprocess.DEVNULL:
            opened.append(os.open(os.devnull, os.O_RDWR))
            return opened[-1]
        if wanted != subprocess.PIPE:
            return wanted if isinstance(wanted, int) else int(wanted.fileno())
        read, write = os.pipe()
        own, theirs = (write, read) if number == 0 else (read, write)
        opened.append(theirs)
        file: Any = os.fdopen(own, "wb" if number == 0 else "rb")
        setattr(self, name, file if self._text is None else io.TextIOWrapper(file, *self._text, write_through=True))
        return theirs

    def poll(self) -> int | None:
        """Return the status, if the process has ended."""
        if not self._forked:
            return super().poll()
        self._ends(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process ends; returns its status."""
        if not self._forked:
            return super().wait(timeout)
        until = math.inf if timeout is None else time.monotonic() + timeout
        while not self._ends(min(_LOOK_S, max(0.0, until - time.monotonic()))):
            if time.monotonic() >= until:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def communicate(self, input: Any = None, timeout: float | None = None) -> tuple[Any, Any]:  # noqa: A002 (its name)
        """Give a process its input, and return its outputs once it has ended."""
        if not self._forked:
            return super().communicate(input, timeout)
        until = math.inf if timeout is None else time.monotonic() + timeout
        if self.stdin is not None and not self.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self.stdin.write(input or ("" if self._text else b""))
                self.stdin.close()
        with selectors.DefaultSelector() as selector:
            for file in (self.stdout, self.stderr):
                if file is not None and not file.closed:
                    selector.register(file, selectors.EVENT_READ, self._come.setdefault(file.fileno(), []))
            while selector.get_map():
                ready = selector.select(None if timeout is None else max(0.0, until - time.monotonic()))
                for key, _ in ready:
                    key.data.append(os.read(key.fd, _PIECE_BYTES))
                    if not key.data[-1]:
                        selector.unregister(key.fileobj)
                if not ready and time.monotonic() >= until:
                    come = b"".join(piece for pieces in self._come.values() for piece in pieces)
                    raise subprocess.TimeoutExpired(self.args, timeout or 0.0, come)
        self.wait(None if timeout is None else max(0.0, until - time.monotonic()))
        return self._all_of(self.stdout), self._all_of(self.stderr)

    def _all_of(self, file: Any) -> Any:
        if file is None:
            return None
        whole = b"".join(self._come[file.fileno()])
        file.close()
        if self._text is None:
            return whole
        return io.TextIOWrapper(io.BytesIO(whole), *self._text).read()

    def _ends(self, within_s: float) -> bool:
        """Wait for the status; returns whether it is there. Several threads may wait."""
        looks = select.poll()
        with contextlib.suppress(ValueError):  # another thread has taken the status
            looks.register(self._connection, select.POLLIN)
        if self.returncode is None and looks.poll(1e3 * within_s):
            with self._ended:
                if self.returncode is None:  # nothing comes if the one that stood by was killed, and this with it
                    status = int(self._connection.recv(64) or signal.SIGKILL)
                    self.returncode = os.waitstatus_to_exitcode(status)
                    self._connection.close()
        return self.returncode is not None


def _text_of(options: Mapping[str, Any]) -> tuple[str | None, str | None] | None:
    """Return encoding and errors of a process's streams if they are text."""
    given = options.get("encoding"), options.get("errors")
    return given if options.get("text") or options.get("universal_newlines") or any(given) else None


def stand_by() -> "subprocess.Popen[bytes]":
    """Have a process stand by for this one and what it starts; it ends when its standard input does."""
    place = Path(tempfile.mkdtemp(prefix="warm-"))
    (place / _CHILDREN).mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, _roots())), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    process = _REAL(
        [sys.executable, "-m", "tests.warm", str(place)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=environment,
    )
    os.environ[NAME] = str(place)
    subprocess.Popen = WarmPopen  # type: ignore[misc, assignment]
    return process


def started_by(pid: int) -> list[int]:
    """Return the processes that one has had forked, and those that they have."""
    if NAME not in os.environ:
        return []
    found = []
    for file in (Path(os.environ[NAME]) / _CHILDREN).iterdir():
        with contextlib.suppress(OSError, ValueError):
            if int(file.read_text()) == pid:
                found += [int(file.name), *started_by(int(file.name))]
    return found


def _roots() -> list[Path]:
    root = Path(__file__).parents[1]
    return [root / "src", root]


def _runs(arguments: Sequence[str]) -> bool:
    """Return whether a command line is one that can be forked: a module, code or a script, behind no other option."""
    rest = [each for each in arguments if each not in {"-P", "-u"}]
    return rest[:1] in (["-m"], ["-c"]) or (bool(rest) and not rest[0].startswith("-"))


def _connect(place: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    deadline = time.monotonic() + _READY_S
    while True:
        try:
            connection.connect(str(place / _SOCKET))
            return connection
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _import() -> None:
    """Import what processes will need, without a thread: none would be there after a fork."""
    # timm imports wandb if it can, which makes folders that only the usual end of an interpreter removes
    sys.modules["wandb"] = None  # type: ignore[assignment]
    for name in _IMPORTED:
        importlib.import_module(name)
    del sys.modules["wandb"]
    # what makes a first capture slow is imported in the course of it
    import penstock
    from tests.train.test_pipeline import images, small

    for model in (small(), small().eval()):
        penstock.split(model, images(2)[:1], stages=2)


def _serve(place: Path) -> _Request:
    """Fork for each request; returns in the forked process, with what it is to run."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.bind(str(place / _SOCKET))
    server.listen(64)
    selector = selectors.DefaultSelector()
    selector.register(server, selectors.EVENT_READ, None)
    selector.register(0, selectors.EVENT_READ, None)
    connections: dict[int, tuple[int, socket.socket]] = {}  # of each child, by what becomes readable at its end
    while True:
        for key, _ in selector.select():
            if key.fileobj == 0:
                os._exit(0)
            elif key.fileobj is not server:
                selector.unregister(key.fd)
                pid, connection = connections.pop(key.fd)
                os.close(key.fd)
                with contextlib.suppress(OSError):
                    connection.send(str(os.waitpid(pid, 0)[1]).encode())
                connection.close()
                (place / _CHILDREN / str(pid)).unlink()
                continue
            else:
                connection = server.accept()[0]
                data, streams, _, _ = socket.recv_fds(connection, _REQUEST_BYTES, 3)
                if not data:
                    connection.close()
                    continue
                request = _Request(*json.loads(data))
                pid = os.fork()
                if not pid:
                    selector.close()
                    for each in (server, connection, *(one for _, one in connections.values())):
                        each.detach()
                    for number, stream in enumerate(streams):
                        os.dup2(stream, number)
                    os.closerange(3, 4096)
                    return request
                for stream in streams:
                    os.close(stream)
                (place / _CHILDREN / str(pid)).write_text(str(request.requester))
                handle = os.pidfd_open(pid)
                connections[handle] = pid, connection
                selector.register(handle, selectors.EVENT_READ, None)
                connection.send(str(pid).encode())


def _become(request: _Request) -> tuple[types.CodeType, dict[str, Any]]:
    """Be a process of this command line from here on; returns what it runs, and in which names."""
    if request.session:
        os.setsid()
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.env)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    random.seed()
    tempfile.tempdir = None
    import numpy as np
    import torch

    np.random.seed(None)
    # always, and by this thread alone: torch's pool is made anew by the first call after a fork, and a second thread
    # that asks meanwhile, as autograd's do, finds none ("Invalid thread pool!") and ends the process
    torch.set_num_threads(int(request.env.get("OMP_NUM_THREADS", torch.get_num_threads())))
    if request.env.get("PYTHONUNBUFFERED") or "-u" in request.arguments[:2]:
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    flags = [each for each in request.arguments[:2] if each in {"-P", "-u"}]
    kind, *arguments = request.arguments[len(flags) :]
    path = [each for each in request.env.get("PYTHONPATH", "").split(os.pathsep) if each]
    own = {str(each) for each in _roots()}
    base = [each for each in sys.path if each not in own and each]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if kind == "-c":
        first, (source, *arguments), name = "", arguments, "-c"
        code = compile(source, "<string>", "exec")
    elif kind == "-m":
        sys.path[:] = [request.folder, *path, *base]
        wanted, *arguments = arguments
        spec = importlib.util.find_spec(wanted)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{wanted}.__main__")
        if spec is None or spec.loader is None or spec.origin is None:
            sys.exit(f"{sys.executable}: No module named {wanted}")
        main.__spec__, main.__package__, main.__file__ = spec, spec.parent, spec.origin
        code, name, first = spec.loader.get_code(spec.name), spec.origin, request.folder  # type: ignore[attr-defined]
    else:
        main.__file__ = name = kind
        first = str(Path(kind).resolve().parent)
        code = compile(Path(kind).read_text(), kind, "exec")
    sys.path[:] = [*([] if "-P" in flags else [first]), *path, *base]
    sys.argv[:] = [name, *arguments]
    return code, main.__dict__


def _run(code: types.CodeType, names: dict[str, Any]) -> None:
    """Run what a process is for, and end it as an interpreter ends, but for taking everything that is there apart."""
    status = 1
    try:
        exec(code, names)
        status = 0
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            status = error.code or 0
        else:
            print(error.code, file=sys.stderr)
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            status = -signal.SIGINT
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    if status < 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status & 0xFF)


@contextlib.contextmanager
def standing_by() -> Iterator[None]:
    """Have a process stand by for as long as the block lasts."""
    process = stand_by()
    try:
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


if __name__ == "__main__":
    from tests.warm import WarmPopen, _become, _import, _run, _serve  # under its own name, as others import it

    subprocess.Popen = WarmPopen  # type: ignore[misc, assignment]
    _import()
    gc.collect()
    gc.freeze()  # what is there is everybody's, and not looked at again by each
    _code, _names = _become(_serve(Path(sys.argv[1])))
    _run(_code, _names)
