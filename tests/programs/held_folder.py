"""Holds the folder of a training run."""

import sys
import time
from pathlib import Path

from penstock.recipes.metrics import sole_run

with sole_run(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
