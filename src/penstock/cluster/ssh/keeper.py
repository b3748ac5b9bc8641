"""A process that runs Penstock as long as its standard input stays open, then ends all processes that it started.

    keeper.py GRACE_S FOLDER INTERPRETER [NAME=VALUE ...] -- ARGUMENTS

The first line of standard input is the run's key, or empty. The key is written to a file readable only by this account,
for the duration of the run, and never passed as an argument or in the environment. This script is run by a machine's
own Python before any other check, so it needs only the standard library.
"""

import contextlib
import fcntl
import glob
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator


def main(grace_s: float, folder: str, interpreter: str, rest: list[str]) -> int:
    """Start Penstock in a new session and wait for its exit; return its status, 128 + n for signal n."""
    home = os.path.expanduser("~")
    folder, interpreter = os.path.join(home, folder), os.path.join(home, interpreter)
    split = rest.index("--")
    env = {**os.environ, "PYTHONPATH": os.path.join(folder, "src")}
    env.update(dict(each.split("=", 1) for each in rest[:split]))
    key = os.path.join(folder, f"run-{os.getpid()}.key")
    drop_left_keys(folder)
    with contextlib.ExitStack() as held:
        if line := _read_line():
            held.enter_context(_key_file(key, line))
            env["PENSTOCK_KEY"] = key
        return _run(grace_s, folder, interpreter, rest[split + 1 :], env)


def _run(grace_s: float, folder: str, interpreter: str, arguments: list[str], env: dict[str, str]) -> int:
    command = [interpreter, "-m", "penstock", *arguments]
    child = subprocess.Popen(command, cwd=folder, env=env, stdin=subprocess.DEVNULL, start_new_session=True)

    def end(number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)

    def watch() -> None:
        while os.read(0, 4096):
            pass
        end(signal.SIGTERM)
        time.sleep(grace_s)
        end(signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    status = child.wait()
    end(signal.SIGKILL)
    return status if status >= 0 else 128 - status


@contextlib.contextmanager
def _key_file(path: str, key: bytes) -> Iterator[None]:
    """Keep the key in a locked file while the block runs; the lock marks the file as in use."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(key + b"\n")
            file.flush()
            yield
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.remove(path)


def drop_left_keys(folder: str) -> None:
    """Remove key files that no running keeper has locked."""
    for path in glob.glob(os.path.join(glob.escape(folder), "run-*.key")):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.remove(path)


def _read_line() -> bytes:
    """Read the first line of standard input, and no byte more."""
    line = b""
    while (byte := os.read(0, 1)) not in (b"", b"\n"):
        line += byte
    return line


if __name__ == "__main__":
    # exit without the interpreter's cleanup, which would wait for the watching thread's read
    os._exit(main(float(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:]))
