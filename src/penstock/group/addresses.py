"""Addresses: listening, reaching rank 0, and private folders for the processes of one machine."""

import contextlib
import fcntl
import ipaddress
import os
import shutil
import socket
import tempfile
import weakref
from pathlib import Path

from penstock.errors import RunError, UsageError
from penstock.files import remove_unlocked

LOOPBACK = "127.0.0.1"
BIND = "PENSTOCK_BIND"  # the listening address of this process and its children
# an address reserved for documentation (RFC 5737): its route is the default route
_ANYWHERE = "192.0.2.1"
_PREFIX = "penstock-"  # of the names of private folders, see `PrivateFolder`
_OWN = {".taken", ".store"}  # suffixes of regular files in such a folder
_MOST_PATH = 94  # some systems limit a socket's path to 104 bytes; "/" and the name of the socket follow the folder
# in a folder of sockets a port is a file name; processes take theirs from 1 upwards, so this number stays free
_PORT_OF_FOLDER = 29500


def listen(address: str, port: int = 0) -> socket.socket:
    """Listen on a single address, by default on any free port.

    Raises `OSError` if the address is not this machine's or the port is taken.
    """
    family, kind, protocol, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return listener


def free_port(address: str) -> int:
    """Return a port of an address that is currently free."""
    if is_folder(address):
        return _PORT_OF_FOLDER
    with listen(address) as probe:
        return int(probe.getsockname()[1])


def is_folder(address: str) -> bool:
    """Return whether an address is a folder of Unix domain sockets, one for each port (`transport/connections.py`).

    >>> is_folder("/tmp/penstock-5f0c"), is_folder("192.168.1.10")
    (True, False)
    """
    return address.startswith("/")


def reach(address: str, port: int, timeout_s: float) -> None:
    """Connect and disconnect; raises `OSError` if the port is closed."""
    if not is_folder(address):
        socket.create_connection((address, port), timeout=timeout_s).close()
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(timeout_s)
        probe.connect(str(Path(address) / str(port)))


def local_address(towards: str) -> str:
    """Return this machine's address on the route to another.

    This machine's own host name often resolves to a loopback address. No packet is sent: connecting a datagram socket
    only reads the routing table.
    """
    if is_folder(towards):
        return towards
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise RunError(f"no route to {towards!r}: {error}; check the address of rank 0") from None


def first_address(host: str, *, all_here: bool) -> str:
    """Return the address of rank 0's host for all ranks of a run.

    A name that does not resolve to a loopback address is returned unchanged. On its own host, a host's name often
    resolves to a loopback address. Then the result is loopback with `all_here` (a run on this machine alone) or if
    `host` is loopback itself, else this machine's address on its default route.

    >>> first_address("localhost", all_here=False)
    '127.0.0.1'
    """
    if not _resolves_to_loopback(host):
        return host
    if all_here or host == "localhost" or _is_loopback(host):
        return LOOPBACK
    try:
        return local_address(_ANYWHERE)
    except RunError:
        raise RunError(
            f"{host} resolves to a loopback address, which other hosts cannot reach, and without a default route this "
            "machine's network address is not known; set --master-addr to an address that the other hosts can reach"
        ) from None


def _resolves_to_loopback(host: str) -> bool:
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, 9, type=socket.SOCK_STREAM)}
    except OSError:
        return False  # a later attempt to connect reports the error
    return all(_is_loopback(address) for address in found)


def is_everywhere(address: str) -> bool:
    """Return whether an address is the wildcard for all addresses of a machine.

    >>> is_everywhere("0.0.0.0"), is_everywhere("127.0.0.1")
    (True, False)
    """
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_unspecified
    except ValueError:  # a name
        return False


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


class PrivateFolder:
    """A new folder that only this account may enter, removed at the latest when this process exits.

    Example:
        folder = PrivateFolder()
        store = links.serve_store(folder.path)
        folder.close()

    Raises `UsageError` if the path of the folder for temporary files is too long.
    """

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix=_PREFIX)
        if (num_bytes := len(os.fsencode(self.path))) > _MOST_PATH:
            os.rmdir(self.path)
            raise UsageError(
                f"the path of a folder for sockets must have at most {_MOST_PATH} bytes, but {self.path} has "
                f"{num_bytes}; set TMPDIR to a shorter folder"
            )
        remove_unlocked(Path(self.path).parent.glob(f"{_PREFIX}????????"), remove=_remove_own)
        # locked while this process lives; a lock of the folder itself needs no file
        descriptor = os.open(self.path, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        self._remove = weakref.finalize(self, _remove, self.path, os.getpid(), descriptor)

    def close(self) -> None:
        """Remove the folder and its contents."""
        self._remove()


def remove_left(path: str) -> None:
    """Remove a private folder and its files after its owner exited without removing it."""
    folder = Path(path)
    if not folder.name.startswith(_PREFIX) or not folder.is_dir():
        return
    with contextlib.suppress(OSError):  # another process removes it too, or it contains other files
        for file in folder.iterdir():
            if file.is_socket() or file.suffix in _OWN:
                file.unlink(missing_ok=True)
        folder.rmdir()


def _remove_own(path: Path) -> None:
    if path.stat().st_uid == os.getuid():
        remove_left(str(path))


def _remove(path: str, process: int, descriptor: int) -> None:
    if os.getpid() == process:  # not in a fork
        shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)
