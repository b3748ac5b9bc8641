"""Connections between processes of one account on one machine: sockets in a folder that nobody else may enter.

No port is opened, and there is nothing to prove or to encrypt: the system lets no other account reach what lies in a
folder of mode 0700. An address is the folder's path then, and a port the name of a socket in it.
"""

import errno
import os
from itertools import count

import zmq

from penstock.transport.connections import Connections


class FolderConnections(Connections):
    """Sockets in a folder of this account's own.

    Example:
        listener, port = FolderConnections().listen("/tmp/penstock-5f0c")
    """

    refused = "is served by nobody; look whether its process has ended"

    def place(self, address: str, port: int) -> str:
        """Return what libzmq calls a place."""
        return f"ipc://{address}/{port}"

    def bind(self, socket: "zmq.Socket[bytes]", address: str, port: int) -> int:
        """Listen on a port, the first that nobody has had where it is 0; returns it. Raises `OSError`."""
        for number in (port,) if port else count(1):
            try:  # libzmq takes the place of a socket that is there
                os.close(os.open(f"{address}/{number}.taken", os.O_CREAT | os.O_EXCL, 0o600))
            except FileExistsError:
                continue
            socket.bind(self.place(address, number))
            return number
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
