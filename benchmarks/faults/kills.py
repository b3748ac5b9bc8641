"""Commands killed at random times and continued: `python -m benchmarks.faults.kills --json FILE [--kills 50]`.

Each of `train`, `infer` and `generate` runs once to its end. Then it runs again and is killed at a random time, its
workers with it, and continued until it has ended, as often as it takes for so many kills. Every file that it leaves
must be equal to the file of the run that was not killed.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from tests.generate.tokens import save_model

_READY = "import sys\nfrom penstock.cli.main import main\nimport torch\nprint(flush=True)\nsys.exit(main(sys.argv[1:]))"
_MODEL = "timm:vit_tiny_patch16_224,img_size=32,patch_size=8,depth=4,num_classes=10"
_DEADLINE_S = 300.0
# decided by a clock or by the machine's load; what a resumed process did; a save's name; generators not drawn from here
_TIMED = re.compile(r"_s$|seconds|time|bytes|warm_up|^resume$|^trained$|^save$|^random$")
_AGAIN = re.compile(r"(stage-\d+)\.\d+")  # a file of an incomplete checkpoint, which is written again beside it


@dataclass(frozen=True)
class Command:
    """A command with the folder that it writes into."""

    words: Callable[[Path], list[str]]  # with --resume where the command needs it
    begun: Callable[[Path], bool]  # whether the folder holds something to continue from
    resume: tuple[str, ...] = ("--resume",)


def main() -> None:
    """Kill and continue each command, and write what was different."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults.kills")
    parser.add_argument("--json", type=Path, required=True, help="where to write the result")
    parser.add_argument("--kills", type=int, default=50, help="of each command")
    parser.add_argument("--only", choices=["train", "infer", "generate"], help="one command")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    result: dict[str, Any] = {"seed": given.seed}
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        for verb, command in commands(Path(name)).items():
            if given.only in {None, verb}:
                result[verb] = kill_often(command, Path(name) / verb, given.kills, random.Random(given.seed))
                print(verb, json.dumps(result[verb]), flush=True)
    given.json.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(any(result[verb]["different"] for verb in result if verb != "seed"))


def commands(folder: Path) -> dict[str, Command]:
    """Return each command, with its inputs below a folder."""
    images, model, prompts = folder / "images", folder / "model", folder / "prompts.txt"
    draw = random.Random(0)
    for number in range(400):
        place = images / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), tuple(draw.randrange(256) for _ in range(3))).save(place / f"{number:04}.png")
    save_model(model)
    prompts.write_text("".join(f"A pipe {number} carries\n" for number in range(80)))
    return {
        "train": Command(
            lambda place: [
                "train", _MODEL, "--data", str(images), "--validation", str(images), "--epochs", "6",
                "--batch-size", "40", "--stages", "2", "--lr", "0.01", "--set", "checkpoint_every=3", "-o",
                str(place / "run"),
            ],
            lambda place: any((place / "run").glob("**/checkpoint.json")),
        ),
        "infer": Command(
            lambda place: ["infer", _MODEL, "--images", str(images), "--stages", "2", "-o", str(place / "rows.csv")],
            lambda place: (place / "rows.csv").exists(),
        ),
        "generate": Command(
            lambda place: [
                "generate", f"hf:{model}", "--file", str(prompts), "--stages", "2", "--set", "seed=0",
                "--temperature", "1", "--max-length", "128", "-o", str(place / "answers.jsonl"),
            ],
            lambda _: False, resume=(),
        ),
    }  # fmt: skip


def kill_often(command: Command, folder: Path, kills: int, draw: random.Random) -> dict[str, Any]:
    """Run a command whole, then again and again with kills; returns counts and the files that differ."""
    place = folder / "run"  # the same for all: a run's settings have its path
    place.mkdir(parents=True)
    seconds = run(command, place, None) or 0.0
    expected = contents(place)
    shutil.rmtree(place)
    done, runs = 0, 0
    different: list[str] = []
    begin = time.monotonic()
    while done < kills:
        place.mkdir()
        while run(command, place, draw.uniform(0, 1.1 * seconds) if done < kills else None) is None:
            done += 1
        runs += 1
        found = contents(place)
        names = sorted({*expected, *found})
        different += [f"run {runs}: {name}" for name in names if not same(found.get(name), expected.get(name))]
        shutil.rmtree(place)
    return {
        "kills": done, "runs": runs, "files": len(expected), "different": different,
        "whole_s": round(seconds, 1), "seconds": round(time.monotonic() - begin),
    }  # fmt: skip


def run(command: Command, place: Path, kill_s: float | None) -> float | None:
    """Run a command to its end, and return its seconds without imports; None if it was killed."""
    begun = command.begun(place)
    if command.resume and not begun:  # nothing to continue: penstock says to remove the folder
        shutil.rmtree(place)
        place.mkdir()
    words = [*command.words(place), *(command.resume if begun else ())]
    environment = os.environ | {"PENSTOCK_PROGRESS": "0", "OMP_NUM_THREADS": "1"}
    with (place.parent / f"{place.name}.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", _READY, *words], env=environment, stdout=subprocess.PIPE, stderr=log
        )
        assert process.stdout is not None
        with process.stdout:
            process.stdout.readline()
            begin = time.monotonic()
            try:
                status = process.wait(_DEADLINE_S if kill_s is None else kill_s)
            except subprocess.TimeoutExpired:
                if kill_s is None:
                    raise
                for each in [process, *psutil.Process(process.pid).children(recursive=True)]:
                    each.send_signal(signal.SIGKILL)
                process.wait()
                return None
    if status:
        raise RuntimeError(f"{' '.join(words)} ended with status {status}: {Path(log.name).read_text()[-2000:]}")
    return time.monotonic() - begin


def contents(folder: Path) -> dict[str, Any]:
    """Return what the files below a folder hold, without times."""
    found: dict[str, Any] = {}
    for path in sorted(each for each in folder.rglob("*") if each.is_file() and each.suffix != ".lock"):
        name = _AGAIN.sub(r"\1", str(path.relative_to(folder)))
        if path.suffix == ".safetensors":
            found[name] = load_file(path)
        elif path.suffix == ".json":
            found[name] = timeless(json.loads(path.read_text()))
        elif path.suffix == ".jsonl":
            lines = [timeless(json.loads(line)) for line in path.read_text().splitlines()]
            # a step after the last checkpoint is run again, and its last line holds; each answer has one line
            again = {(line["kind"], line["step"]): line for line in lines if "kind" in line}
            found[name] = again or lines
        else:
            found[name] = path.read_bytes()
    return found


def timeless(value: Any) -> Any:
    """Return a document without what a clock decides."""
    if isinstance(value, dict):
        return {key: timeless(each) for key, each in value.items() if not _TIMED.search(key)}
    if isinstance(value, list):
        return [timeless(each) for each in value]
    return _AGAIN.sub(r"\1", value) if isinstance(value, str) else value


def same(one: Any, other: Any) -> bool:
    """Return whether two files hold the same."""
    if isinstance(one, dict) and isinstance(other, dict) and any(isinstance(each, Tensor) for each in one.values()):
        return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    return bool(one == other)


if __name__ == "__main__":
    main()
