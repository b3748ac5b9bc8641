"""Run with `python -m benchmarks.gpu --json FILE [--device cpu --tiny] [--only SECTION] [--seconds 280]`.

One GPU: ceilings of bandwidth and products; decode steps; training steps; the cost of a cut; frozen layers. Every
section has its peers in the same call. Sections that no time is left for, and what fails, are rows too. `--tiny` shows
on a CPU that the script works.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from benchmarks.gpu.clock import Row, ceilings
from benchmarks.gpu.decode import decoding
from benchmarks.gpu.training import cuts, frozen, training
from penstock.errors import PenstockError
from penstock.tensors import find_device
from penstock.text import first_line

SECTIONS: Mapping[str, Callable[..., Iterator[Row]]] = {
    "ceilings": ceilings, "cut": cuts, "training": training, "decode": decoding, "frozen": frozen,
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write rows; returns 1 if a section failed, and 2 without the device."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where to write rows and summary")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--tiny", action="store_true", help="small sizes that show that the script works")
    parser.add_argument("--only", choices=SECTIONS, action="append", help="a section; may be repeated")
    parser.add_argument("--seconds", type=float, default=280.0, help="seconds after which nothing more begins")
    options = parser.parse_args(arguments)
    try:
        device = find_device(options.device)
    except PenstockError as error:
        print(error, file=sys.stderr)
        return 2
    end = time.monotonic() + options.seconds
    found: list[Row] = []
    for name in options.only or SECTIONS:
        for row in _section(name, device, end, tiny=options.tiny):
            found.append(row)
            print(json.dumps(row), flush=True)
            options.json.write_text(json.dumps({"environment": environment(device), "rows": found}, indent=1) + "\n")
    return int(any("failed" in row for row in found))


def environment(device: torch.device) -> dict[str, object]:
    """Return the card, its driver's CUDA, torch, and the date."""
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {
        "card": card, "cuda": torch.version.cuda, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"),
        "threads": torch.get_num_threads(),
    }  # fmt: skip


def _section(name: str, device: torch.device, end: float, *, tiny: bool) -> Iterator[Row]:
    rows = SECTIONS[name](device, tiny=tiny)
    while True:
        if time.monotonic() > end:
            yield {"section": name, "left_out": "no time was left"}
            return
        try:
            row = next(rows, None)
        # a section that fails must not end the others
        except Exception as error:
            yield {"section": name, "failed": f"{type(error).__name__}: {first_line(error)}"}
            return
        if row is None:
            return
        yield row


if __name__ == "__main__":
    sys.exit(main())
