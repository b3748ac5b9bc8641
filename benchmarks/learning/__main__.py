"""Learning as a pipeline beside learning alone: `python -m benchmarks.learning --data TAR --text FILE --json FILE`.

See the README beside this file.
"""

import argparse
import json
import os
import platform
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.learning.cases import ALONE, PIPELINE, Case, image_cases, text_cases
from benchmarks.learning.figure import draw
from penstock.recipes.launch import fit_apart

EVERY = 10  # of the validation images, one is used


def main() -> None:
    """Train every case, and write the table, the JSON and the figure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning")
    parser.add_argument("--data", type=Path, required=True, help="training images of CIFAR-10")
    parser.add_argument("--validation", type=Path, help="other images; cifar10-test.tar beside --data if not given")
    parser.add_argument("--text", type=Path, required=True, help="a text file")
    parser.add_argument("--json", type=Path, required=True, help="every row and the summary")
    parser.add_argument("--figure", type=Path, help="a PNG with the validation losses")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder, images = Path(name), Path(name) / "images"
        take_some(given.validation or given.data.with_name("cifar10-test.tar"), images)
        rows = [run(case) for case in [*image_cases(given.data, images, folder), *text_cases(given.text, folder)]]
    result = {"summary": summarize(rows), "environment": environment(), "rows": rows}
    given.json.write_text(json.dumps(result, indent=2) + "\n")
    if given.figure:
        draw(rows, given.figure)
    print("| what | processes | validation loss | accuracy |\n| --- | --- | --- | --- |")
    for row in rows:
        print(f"| {row['name']} | {row['processes']} | {row['losses'][-1]:.6f} | {row['accuracy']:.2%} |")
    print(json.dumps(result["summary"]))


def take_some(archive: Path, folder: Path) -> None:
    """Unpack every tenth file, so that every class is among them."""
    with tarfile.open(archive) as tar:
        files = [member for member in tar if member.isfile()]
        tar.extractall(folder, files[::EVERY], filter="data")


def run(case: Case) -> dict[str, Any]:
    """Train in processes of its own; gives the validation loss of every epoch and the last accuracy."""
    result = fit_apart(case.settings)
    last = result.epochs[-1]
    print(f"{case.name}: loss {last.validation_loss:.6f}, accuracy {last.accuracy:.2%}", file=sys.stderr)
    return {
        "name": case.name, "subject": case.subject, "way": case.way, "seed": case.settings.seed,
        "processes": result.num_processes, "steps": [epoch.step for epoch in result.epochs],
        "losses": [epoch.validation_loss for epoch in result.epochs], "accuracy": last.accuracy,
    }  # fmt: skip


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Compare pipelines with the same seed alone, and with the spread of all seeds alone."""
    alone = [row["accuracy"] for row in rows if (row["subject"], row["way"]) == ("ViT", ALONE)]
    vit = next(row["accuracy"] for row in rows if (row["subject"], row["way"]) == ("ViT", PIPELINE))
    return {
        "vit_alone_accuracy_lowest": min(alone),
        "vit_alone_accuracy_highest": max(alone),
        "vit_pipeline_accuracy": vit,
        "vit_within_noise": min(alone) <= vit <= max(alone),
        "vit_largest_loss_difference": largest_difference(rows, "ViT"),
        "gpt2_largest_loss_difference": largest_difference(rows, "GPT-2"),
    }


def largest_difference(rows: Sequence[dict[str, Any]], subject: str) -> float:
    """Give the largest distance between the validation losses of the pipeline and of the same seed alone."""
    of = {(row["way"], row["seed"]): row["losses"] for row in rows if row["subject"] == subject}
    ((_, seed),) = [key for key in of if key[0] == PIPELINE]
    pairs = zip(of[ALONE, seed], of[PIPELINE, seed], strict=True)
    return max(abs(float(a) - float(b)) for a, b in pairs)


def environment() -> dict[str, Any]:
    """Say what this ran on."""
    return {
        "cores": os.cpu_count(), "machine": platform.machine(), "system": platform.release(),
        "python": platform.python_version(), "torch": torch.__version__,
    }  # fmt: skip


if __name__ == "__main__":
    main()
