"""Connections over TCP without a key, for a trusted network."""

import zmq

from penstock.transport.connections import Connections


class TcpConnections(Connections):
    """Sockets that accept every peer.

    Example:
        listener, port = TcpConnections().listen("192.168.1.10")
    """

    def place(self, address: str, port: int) -> str:
        """Return the libzmq endpoint of an address and port."""
        return f"tcp://{_host(address)}:{port}"

    def bind(self, socket: "zmq.Socket[bytes]", address: str, port: int) -> int:
        """Listen on a port, or on a free one if it is 0; returns it."""
        if not port:
            return socket.bind_to_random_port(f"tcp://{_host(address)}")
        socket.bind(self.place(address, port))
        return port


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address
