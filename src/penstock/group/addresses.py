"""Which address a process listens on, where the first host is, and the folder in which those of one machine meet."""

import contextlib
import ipaddress
import os
import shutil
import socket
import tempfile
import weakref
from pathlib import Path

from penstock.errors import RunError, UsageError

LOOPBACK = "127.0.0.1"
BIND = "PENSTOCK_BIND"  # the address that this process and those that it starts listen on
# an address for documentation (RFC 5737), which nobody has: the way to it is the way out
_ANYWHERE = "192.0.2.1"
_PREFIX = "penstock-"  # of folders in which processes of one account meet
_OWN = {".taken", ".store"}  # in such a folder, beside sockets
_MOST_PATH = 94  # of 104 bytes that the path of a socket may have, the least of all systems
_PORT_OF_FOLDER = 29500  # none that its processes take for themselves, who count from 1


def listen(address: str, port: int = 0) -> socket.socket:
    """Listen on one address alone, on any port where none is given.

    Raises `OSError` where the address is not this machine's or the port is taken.
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
    """Return a port of an address on which nobody listens now."""
    if is_folder(address):
        return _PORT_OF_FOLDER
    with listen(address) as probe:
        return int(probe.getsockname()[1])


def is_folder(address: str) -> bool:
    """Return whether an address is a folder of this machine, whose ports are sockets in it (`transport/folder.py`).

    >>> is_folder("/tmp/penstock-5f0c"), is_folder("192.168.1.10")
    (True, False)
    """
    return address.startswith("/")


def reach(address: str, port: int, timeout_s: float) -> None:
    """Connect and let go again; raises `OSError` where nobody listens there."""
    if not is_folder(address):
        socket.create_connection((address, port), timeout=timeout_s).close()
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(timeout_s)
        probe.connect(str(Path(address) / str(port)))


def local_address(towards: str) -> str:
    """Find the address that this machine uses towards another, since its name often means loopback.

    No packet is sent: a connected datagram socket only asks the routing table.
    """
    if is_folder(towards):
        return towards
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise RunError(f"there is no route to {towards!r}: {error}; check the address of the first host") from None


def first_address(host: str, *, all_here: bool) -> str:
    """Find where the first host is reached, since on that host its own name often means loopback.

    `all_here` says that no other machine takes part. Then, and where loopback itself was named, loopback is right;
    else it is the address of this machine that leads out of it.

    >>> first_address("localhost", all_here=False)
    '127.0.0.1'
    """
    if not _means_loopback(host):
        return host
    if all_here or host == "localhost" or _is_loopback(host):
        return LOOPBACK
    try:
        return local_address(_ANYWHERE)
    except RunError:
        raise RunError(
            f"{host} means loopback on this machine, where no other one reaches it, and there is no way out of it "
            "to tell its address by; give the address itself as --master-addr"
        ) from None


def _means_loopback(host: str) -> bool:
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, 9, type=socket.SOCK_STREAM)}
    except OSError:
        return False  # whoever connects to it says so
    return all(_is_loopback(address) for address in found)


def is_everywhere(address: str) -> bool:
    """Return whether an address means all those of a machine.

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
    """A new folder that this account alone may enter, which is removed at the latest when this process ends.

    Example:
        folder = PrivateFolder()
        store = links.serve_store(folder.path)
        folder.close()

    Raises `UsageError` where the folder for temporary files has too long a name.
    """

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix=_PREFIX)
        if len(self.path) > _MOST_PATH:
            os.rmdir(self.path)
            raise UsageError(
                f"sockets lie in folders whose path has {_MOST_PATH} bytes at most, but {self.path} has "
                f"{len(self.path)}; name a shorter one for temporary files with TMPDIR"
            )
        self._remove = weakref.finalize(self, _remove, self.path, os.getpid())

    def close(self) -> None:
        """Remove the folder, and what is in it."""
        self._remove()


def remove_left(path: str) -> None:
    """Remove what processes have put into a folder whose maker has ended before it could, and then the folder."""
    folder = Path(path)
    if not folder.name.startswith(_PREFIX) or not folder.is_dir():
        return
    with contextlib.suppress(OSError):  # another one removes it as well, or somebody has put something else there
        for file in folder.iterdir():
            if file.is_socket() or file.suffix in _OWN:
                file.unlink(missing_ok=True)
        folder.rmdir()


def _remove(path: str, process: int) -> None:
    if os.getpid() == process:  # not in a fork of it
        shutil.rmtree(path, ignore_errors=True)
