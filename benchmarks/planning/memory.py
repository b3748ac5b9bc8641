"""Predicted and measured memory in training: processes of `penstock train --plan`, each looked at from outside.

Memory does not depend on speed, so these run without a lab: on this machine, one process for each device of a plan.
What a process holds itself (anonymous memory) is read every few milliseconds; pages of files, such as libraries, do
not count.
"""

import os
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.planning.shapes import plan_of_shape
from penstock.recipes.launch import WORKER, fit_apart
from penstock.recipes.settings import FitSettings
from penstock.resources import anonymous_bytes
from penstock.spec.cluster import Cluster, Device
from penstock.spec.plan import write_plan
from penstock.spec.profile import Profile, read_profile

NAME = "memory in training"
GPT2 = "hf:gpt2,n_layer=6,n_embd=384,n_head=6,vocab_size=4096,n_positions=128"
VIT = "timm:vit_small_patch16_224,img_size=64,patch_size=8,num_classes=10"
ROWS, BATCH, STEPS = 2, 32, 6
# the model and its data, and the shapes of its plans with their schedules
CASES: tuple[tuple[str, str, tuple[tuple[tuple[int, ...], str], ...]], ...] = (
    (
        GPT2,
        "text",
        (((1,), "1f1b"), ((2,), "1f1b"), ((1, 1), "1f1b"), ((2,), "gpipe"), ((4,), "1f1b"), ((2, 2), "1f1b")),
    ),
    (VIT, "digits", (((2,), "1f1b"), ((1, 1), "1f1b"), ((2,), "gpipe"))),
)
_POLL_S = 0.005
_LOOKED_FOR = 40  # looks between two searches for processes


def memory_rows(only: str | None = None) -> list[dict[str, Any]]:
    """Train as each plan says and give a row for each."""
    if only is not None and NAME not in only.split(","):
        return []
    rows = []
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        text = write_text(Path(folder) / "text.txt")
        for model, data, shapes in CASES:
            settings = FitSettings(
                model=model, data=text if data == "text" else data, batch_size=BATCH, steps=STEPS, epochs=1, threads=1,
                validate=False, save=False, output=str(Path(folder) / "run"),
            )  # fmt: skip
            profile = _profile(settings, Path(folder) / "profile.json")
            rows += [measure_training(settings, profile, shape, schedule) for shape, schedule in shapes]
    return rows


def write_text(path: Path) -> str:
    """Write a text of random words; returns its path."""
    words = random.Random(0)
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    known = ["".join(words.choices(alphabet, k=words.randint(2, 9))) for _ in range(6000)]
    path.write_text(" ".join(words.choices(known, k=60_000)))
    return str(path)


def _profile(settings: FitSettings, file: Path) -> Profile:
    """Profile as a user does: in a process that does nothing else, since it measures its own memory."""
    command = [sys.executable, "-m", "penstock", "profile", settings.model, "--data", settings.data]
    subprocess.run([*command, "--rows", str(ROWS), "--repeats", "3", "-o", str(file)], check=True, stdout=sys.stderr)
    return read_profile(file)


def measure_training(settings: FitSettings, profile: Profile, shape: tuple[int, ...], schedule: str) -> dict[str, Any]:
    """Train as the best plan of a shape says; return predicted and measured bytes of each device."""
    devices = tuple(Device(name=f"host{index}", speed=1.0, memory_bytes=2**36) for index in range(sum(shape)))
    plan = plan_of_shape(profile, Cluster(devices=devices), shape, BATCH, schedule)
    file = Path(settings.output).with_suffix(".plan.json")
    write_plan(file, plan)
    with _Watch() as watch, tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        fit_apart(settings.replace(plan=str(file), output=folder))
    predicted = {load.device: load.memory_bytes for load in plan.prediction.devices}
    row = {"case": NAME, "name": settings.model.partition(",")[0], "shape": shape, "schedule": schedule,
           "predicted": predicted, "measured": watch.peaks}  # fmt: skip
    print(f"{row['name']} {shape} {schedule}: {errors(row)}", file=sys.stderr)
    return row


def errors(row: Mapping[str, Any]) -> dict[str, float]:
    """Return for each device by what part its prediction is off."""
    return {name: row["predicted"][name] / peak - 1 for name, peak in row["measured"].items()}


class _Watch:
    """Looks at the workers of this process until it is left: the most anonymous memory of each, by its device."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "_Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        found: dict[str, int] = {}
        for turn in count():
            if self._stop.wait(_POLL_S):
                return
            if not turn % _LOOKED_FOR:
                found |= dict(_workers())
            for name, process in found.items():
                self.peaks[name] = max(self.peaks.get(name, 0), anonymous_bytes(process) or 0)


def _workers() -> Iterator[tuple[str, int]]:
    for folder in Path("/proc").iterdir():
        try:
            words = (folder / "cmdline").read_bytes().decode().split("\0") if folder.name.isdigit() else []
            mine = WORKER in words and int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1]) == os.getpid()
        except OSError:
            continue
        if mine:
            yield words[words.index("--host") + 1], int(folder.name)
