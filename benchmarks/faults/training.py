"""Faults in a training of 2 x 2 hosts that come back: `python -m benchmarks.faults.training --json FILE`."""

import argparse
import contextlib
import json
import random
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.faults.stream import Stream
from benchmarks.labs import ROOT, lab_text
from benchmarks.training.__main__ import environment
from penstock.cluster.lab import Lab, lab_session, parse_lab, take_down
from penstock.cluster.lab.run import LabRun
from penstock.cluster.ssh.remote import PORT
from penstock.group.launcher import JOIN

LAB, HOSTS, CPU = "losses", 4, 0.35
KINDS = ("kill", "cut", "freeze")
STEPS, SEED, CHECKPOINT_EVERY = 1200, 0, 25
_BETWEEN = (5, 60)  # steps from one fault's end to the next one
_STEP_S = 60.0  # longer without one is a hang


def main() -> None:
    """Train without faults and with them, and compare."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults.training")
    parser.add_argument("--json", type=Path, required=True, help="every fault and the summary")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--log", type=Path, default=Path("training.log"), help="what the hosts write")
    given = parser.parse_args()
    take_down(LAB)
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as name,
        lab_session(parse_lab(lab_text(LAB, [CPU] * HOSTS, memory="1 GiB"))) as lab,
    ):
        still = train(lab, Path(name) / "still", given.steps, None, given.log)
        faulty = train(lab, Path(name) / "faulty", given.steps, random.Random(given.seed), given.log)
    result = {"environment": environment(), "seed": given.seed, "still": still, "faulty": faulty}
    result["summary"] = summary = summarize(still, faulty)
    for run in (still, faulty):
        run.pop("model")
    given.json.write_text(json.dumps(result, indent=1))
    print(json.dumps(summary, indent=1))


def train(lab: Lab, folder: Path, steps: int, draw: random.Random | None, log: Path) -> dict[str, Any]:
    """Train once on all hosts, with faults drawn if there is a seed; gives what came of it."""
    folder.mkdir()
    asked, rows = folder / "session.json", folder / "rows.csv"
    asked.write_text(json.dumps({
        "rows": str(rows), "folder": str(folder), "steps": steps, "checkpoint_every": CHECKPOINT_EVERY,
        "on_loss": "stop" if draw is None else "continue",
    }))  # fmt: skip
    command = [sys.executable, "-m", "benchmarks.faults.training_session", str(asked)]
    env = {"PYTHONPATH": f"{ROOT}/src:{ROOT}", "TORCH_CPP_LOG_LEVEL": "ERROR", "PENSTOCK_TRUSTED": "1"}
    faults = []
    with contextlib.ExitStack() as stack:
        errors = stack.enter_context(log.open("a"))

        def join(host: str) -> LabRun:
            own = env | {JOIN: f"10.77.0.1:{PORT}"}
            return lab.start(command, on=[host], env=own, output=stream.show, end_together=False)

        stream = Stream(lab, rows, join, errors=errors, members={host.name for host in lab.spec.hosts})
        stack.callback(stream.end_joining)
        run = stack.enter_context(lab.start(command, env=env, output=stream.show, end_together="first", port=PORT))
        stream.run = run
        while not stream.ended:
            if draw is None:
                stream.wait_for_rows(steps, 10 * _STEP_S)
                continue
            if not stream.wait_for_rows(draw.randint(*_BETWEEN), 2 * _STEP_S) or stream.ended:
                break
            if stream.look() > steps - 150:  # whoever is lost now would not be back before the end
                continue
            faults.append(stream.break_(draw, KINDS))
            print(f"{faults[-1]}", file=sys.stderr)
            if faults[-1].hung:
                break
            while not stream.ended and stream.look() < steps - 10:
                stream.rejoin()
                stream.wait_for_rows(1, _STEP_S)
                if len(stream.alive()) == HOSTS - 1 and stream.num_together == HOSTS:
                    break
        status = run.wait(120.0)
    lines = [line.split(",") for line in rows.read_text().splitlines()[1:]]
    changes = folder / "changes.json"
    return {
        "steps": [int(line[0]) for line in lines], "losses": [float(line[1]) for line in lines],
        "seconds": float(lines[-1][2]), "faults": [asdict(fault) for fault in faults],
        "changes": json.loads(changes.read_text()) if changes.exists() else [],
        "status": status["host0"], "model": load_file(folder / "model.safetensors"),
    }  # fmt: skip


def summarize(still: dict[str, Any], faulty: dict[str, Any]) -> dict[str, Any]:
    """Hold the training with faults against the one without."""
    final = dict(zip(faulty["steps"], faulty["losses"], strict=True))  # of a step that was done twice, the last
    gaps = [fault["gap_s"] for fault in faulty["faults"]]
    ones = [float(tensor.norm()) for tensor in still["model"].values()]
    apart = [float((tensor - faulty["model"][name]).norm()) for name, tensor in still["model"].items()]
    back = [change for change in faulty["changes"] if change[3]]
    return {
        "training_faults": len(gaps), "training_hangs": sum(fault["hung"] for fault in faulty["faults"]),
        "training_median_gap_s": statistics.median(gaps), "training_worst_gap_s": max(gaps),
        "steps_lost": len(faulty["steps"]) - len(final), "went_back": len(back),
        "same_steps": sorted(final) == still["steps"],
        "largest_loss_difference": max(
            abs(final[step] - loss) for step, loss in zip(still["steps"], still["losses"], strict=True)
        ),
        "largest_parameter_error": max(a / one if one else a for a, one in zip(apart, ones, strict=True)),
        "dtype": str(next(iter(still["model"].values())).dtype), "torch": str(torch.__version__),
    }  # fmt: skip


if __name__ == "__main__":
    main()
