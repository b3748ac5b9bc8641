"""Keeps a key in a file."""

import sys
import time

from penstock.cluster.ssh.keeper import _key_file

with _key_file(sys.argv[1], b"secret"):
    print("there", flush=True)
    time.sleep(60)
