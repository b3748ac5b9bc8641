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
import json
import os
import random
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
    """A `Popen` whose Python processes are forked from the one that stands by."""

    _connection: socket.socket | None = None

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any,
                       env: Any, startupinfo: Any, creationflags: Any, shell: Any, p2cread: int, p2cwrite: int,
                       c2pread: int, c2pwrite: int, errread: int, errwrite: int, *rest: Any) -> None:  # fmt: skip
        environment = dict(os.environ if env is None else env)
        asked = [os.fspath(arg) for arg in args] if not isinstance(args, str) and not shell else []
        forked = (
            NAME in os.environ and NAME in environment and not pass_fds and preexec_fn is None and executable is None
            and asked[:1] == [sys.executable] and _runs(asked[1:])
        )  # fmt: skip
        if not forked:
            super()._execute_child(  # type: ignore[misc]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell, p2cread,
                p2cwrite, c2pread, c2pwrite, errread, errwrite, *rest,
            )  # fmt: skip
            return
        place = Path(os.environ[NAME])
        request = json.dumps([asked[1:], str(cwd or os.getcwd()), environment, bool(rest[5]), os.getpid()]).encode()
        streams = [own if own != -1 else usual for usual, own in enumerate((p2cread, c2pwrite, errwrite))]
        try:
            self._connection = _connect(place)
            socket.send_fds(self._connection, [request], streams)
            self.pid = int(self._connection.recv(64))
        finally:
            self._child_created = True
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._connection is None:
            return super()._try_wait(wait_flags)  # type: ignore[misc, no-any-return]
        self._connection.settimeout(0.0 if wait_flags & os.WNOHANG else None)
        try:
            status = self._connection.recv(64)
        except BlockingIOError:
            return 0, 0
        self._connection.close()
        return self.pid, int(status or b"9")  # the one that stood by was killed, and this with it

    def _internal_poll(self, *given: Any, **named: Any) -> int | None:
        if self._connection is None:
            return super()._internal_poll(*given, **named)  # type: ignore[misc, no-any-return]
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self._handle_exitstatus(status)  # type: ignore[attr-defined]
        return self.returncode


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
    subprocess.Popen = WarmPopen  # type: ignore[misc]
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

    subprocess.Popen = WarmPopen  # type: ignore[misc]
    _import()
    gc.collect()
    gc.freeze()  # what is there is everybody's, and not looked at again by each
    _code, _names = _become(_serve(Path(sys.argv[1])))
    _run(_code, _names)
