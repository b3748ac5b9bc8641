"""Begins to write a file, and does not come to its end."""

import sys
import time
from pathlib import Path

from penstock.files import written_whole

with written_whole(Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    print("writing", flush=True)
    time.sleep(60)
