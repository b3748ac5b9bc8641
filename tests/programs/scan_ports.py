"""Prints the ports of an address at which somebody listens."""

import socket
import sys

for port in range(1, 65536):
    with socket.socket() as probe:
        probe.settimeout(2.0)
        if not probe.connect_ex((sys.argv[1], port)):
            print(port)
