"""Connections between processes of one account on one machine: sockets in a private folder.

No port is opened, and no key or encryption is needed: the system denies other accounts access to a
folder of mode 0700. Here an address is the folder's path, and a port is the name of a socket in it.
"""

import errno
import os
from itertools import count

import zmq

from penstock.transport.connections import Connections


class FolderConnections(Connections):
    """Sockets in a private folder of this account.

    Example:
        listener, port = FolderConnections().listen("/tmp/penstock-5f0c")
    """

    refused = "is not served by any process; check whether the process has exited"

    def place(self, address: str, port: int) -> str:
        """Return the libzmq endpoint of an address and port."""
        return f"ipc://{address}/{port}"

    def bind(self, socket: "zmq.Socket[bytes]", address: str, port: int) -> int:
        """Listen on a port, or on the first unused one if it is 0; returns it. Raises `OSError` if it is taken."""
        for number in (port,) if port else count(1):
            try:  # libzmq would replace an existing socket
                os.close(os.open(f"{address}/{number}.taken", os.O_CREAT | os.O_EXCL, 0o600))
            except FileExistsError:
                continue
            socket.bind(self.place(address, number))
            return number
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
