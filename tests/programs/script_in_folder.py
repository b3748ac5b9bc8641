"""Runs a script in a folder, with what each process prints in a file of its own."""

import os
import sys
from pathlib import Path

folder, script = map(Path, sys.argv[1:])
os.chdir(folder)
sys.stdout = open(f"rank{os.environ.get('RANK', '0')}.txt", "w")  # noqa: SIM115
exec(compile(script.read_text(), str(script), "exec"), {"__name__": "__main__"})
sys.stdout.flush()
