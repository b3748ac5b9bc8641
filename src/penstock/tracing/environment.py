"""What a run was made on."""

import datetime
import os
import platform

import torch


def environment() -> dict[str, str]:
    """Say what a run was made on: versions, machine, time."""
    return {
        "date": datetime.datetime.now().isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
