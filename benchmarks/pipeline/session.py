"""What runs on every host of a lab: a list of measurements on one world, their order rotated round by round."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.pipeline.beside import Beside, start
from penstock.bench.compare import Comparison
from penstock.bench.references import peer_job
from penstock.cluster.lab import parse_lab
from penstock.cluster.lab.network import SystemShell, bandwidth_commands
from penstock.deploy.worker import work
from penstock.group.entry import join_torchrun
from penstock.group.world import World
from penstock.measure.hosts import measure_messages
from penstock.plan.candidates import PlanRequest
from penstock.plan.choose import make_plan
from penstock.plan.cost.predict import predict
from penstock.spec.cluster import Cluster
from penstock.spec.profile import Profile, interpolate
from penstock.spec.settings import BenchSettings
from penstock.units import parse_rate
from penstock.wire import FEEDER
from penstock.zoo.models.models import load_model

_CALIBRATIONS = 4


def main() -> None:
    """Read the session's JSON file, measure, and write the rows beside it; other ranks work."""
    file = Path(sys.argv[1])
    session = json.loads(file.read_text())
    world = join_torchrun(followed=True)
    beside = start(file.parent, world.rank) if session["passes"] > 1 else None
    try:
        with world:
            if world.rank != FEEDER:
                work(world, more=peer_job(session["model"], 0))
                return
            rows = measure(world, session, file.parent)
            file.with_suffix(".rows.json").write_text(json.dumps(rows))
    finally:
        if beside is not None:
            beside.kill()
            beside.wait()


def measure(world: World, session: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Do every task of a session once per round; round `r` begins with task `r`.

    Where a row has several passes, what the hosts do alone is measured between any two of them.
    """
    tasks = session["tasks"]
    names = ("num_images", "serial_images", "passes", "microbatch_size", "depth")
    options = BenchSettings(model=session["model"], threads=1, **{name: session[name] for name in names})
    comparison = Comparison(load_model(session["model"]), world, options, max_stages=len(world.devices))
    rows = [comparison.serial()]
    if session["passes"] > 1:
        comparison.take_limit_from(lambda whole: Beside(folder, whole, world.devices, session["model"]))
    present = session["bandwidth"]
    for turn in range(session["rounds"]):
        for position in range(len(tasks)):
            task = tasks[(turn + position) % len(tasks)]
            if turn < task.get("rounds", session["rounds"]):
                if task.get("bandwidth", session["bandwidth"]) != present:
                    present = task.get("bandwidth", session["bandwidth"])
                    _change_links(world, session["lab"], present)
                row = _KINDS[task["kind"]](comparison, task)
                rows.append(row | {"round": turn, "label": task["label"]})
                print(f"{session['name']}: {task['label']}: {row['images_per_second']:.2f} images/s", file=sys.stderr)
    return rows


def _change_links(world: World, lab: str, bandwidth: str) -> None:
    """Give every host another link: two bandwidths within one run can be compared though the machine drifts."""
    # a host sees the machine's network namespaces, but not the control groups that a Lab wants
    spec, rate, shell = parse_lab(lab), parse_rate(bandwidth), SystemShell()
    for index in range(len(spec.hosts)):
        for command in bandwidth_commands(spec, index, rate):
            shell.run(command)
    world.bandwidths[:] = [rate] * len(world.bandwidths)


def _plan(comparison: Comparison, task: dict[str, Any]) -> dict[str, Any]:
    """Plan for the hosts as fast as they are seen to be, then measure the plan."""
    profile = msgspec.json.decode(task["profile"], type=Profile)
    # what messages cost depends on the hosts too: caches shared with others, a link that brings packets one by one
    if "messages" not in task:  # once, so that in later rounds speeds are those right behind the round before
        task["messages"] = asdict(measure_messages(comparison.world))
    profile = msgspec.structs.replace(profile, **task["messages"])
    given = msgspec.json.decode(task["cluster"], type=Cluster)
    rows = comparison.settings()["microbatch_size"]
    whole_s = sum(interpolate(profile.rows, unit.forward_s, rows) for unit in profile.units)

    def as_fast_as(rates: Sequence[float]) -> Cluster:
        return given.at_mean_speeds([whole_s * rate / rows for rate in rates])

    cluster = as_fast_as(comparison.baseline(_CALIBRATIONS))
    plan = make_plan(profile, cluster, msgspec.convert(task["request"], PlanRequest))
    row = comparison.planned(plan)
    # the same plan and profile at the speed that the devices had around the run: it drifts
    around = predict(plan, profile, as_fast_as(row["alone_images_per_second"]))
    return row | {"predicted_at_mean_speeds": around.prediction.rows_per_s}


def _peer(comparison: Comparison, task: dict[str, Any]) -> dict[str, Any]:
    return comparison.peer(task["stages"])


def _pipeline(comparison: Comparison, task: dict[str, Any]) -> dict[str, Any]:
    return comparison.pipeline(task["stages"], policy=task.get("policy"), cuts=task.get("cuts"))


def _replicas(comparison: Comparison, task: dict[str, Any]) -> dict[str, Any]:
    return comparison.replicas(task["count"])


_KINDS = {"peer": _peer, "pipeline": _pipeline, "plan": _plan, "replicas": _replicas}

if __name__ == "__main__":
    main()
