"""What is measured in the lab, listed here before it is run: a prediction each, and what it came to.

A row of a case has `case` "prediction", what was varied, and throughputs `predicted` and `measured`; a row may
also carry figures of the summary by name in `summary`, such as `uneven_efficiency`.
"""

import os
import sys
from dataclasses import replace
from functools import cache
from typing import Any

import msgspec

from benchmarks.pipeline.__main__ import LAB, lab_of, run, standard_error
from benchmarks.pipeline.cases import TURNS, Case, peer, pipeline
from penstock.cluster.lab import take_down
from penstock.deploy.state import load_state
from penstock.graph.capture import capture
from penstock.measure.hosts import measure_messages
from penstock.measure.profiler import profile_graph, worker_bytes
from penstock.spec.cluster import Cluster, parse_cluster
from penstock.zoo.models.models import load_model

TINY = "timm:deit_tiny_patch16_224"
RESNET = "timm:resnet50"
_UNEVEN = (0.5, 0.35, 0.25, 0.15)
_ONE_PIPELINE = {"replicas": False, "rows": [1]}
_ROW = {"rows": [1]}


def lab_cases() -> list[tuple[Case, dict[str, Any]]]:
    """Return the cases and what is asked of the planner; the figures of the summary come from the first three.

    But for the first, which runs in turns with the peer, they are measured in short passes between which the hosts
    compute alone, since the machine's speed drifts.
    """
    one_cut_set = {**_ONE_PIPELINE, "alternate": False}
    short: dict[str, Any] = {**TURNS, "passes": 5}
    tiny: dict[str, Any] = {"num_images": 120, "passes": 6, "model": TINY}
    fours: dict[str, Any] = {"num_images": 160, "passes": 5, "microbatch_size": 4}
    return [
        (Case(name="alternating", num_images=500, tasks=[peer(4)]), _ONE_PIPELINE),
        (Case(name="in turns with the ceiling", **TURNS), _ONE_PIPELINE),
        (Case(name="uneven", cpu=_UNEVEN, **TURNS, tasks=[pipeline(4, "equal-blocks")]), _ONE_PIPELINE),
        (Case(name="one cut set", **short), one_cut_set),
        (Case(name="two hosts", hosts=2, **short), _ONE_PIPELINE),
        (Case(name="three hosts", hosts=3, **short), _ONE_PIPELINE),
        (Case(name="six hosts", hosts=6, cpu=0.22, **short), _ONE_PIPELINE),
        (Case(name="uneven with one cut set", cpu=_UNEVEN, **short), one_cut_set),
        (Case(name="microbatches of 4", **fours), {**_ONE_PIPELINE, "rows": [4]}),
        (Case(name="two replicas of tiny", hosts=2, **tiny), _ROW),
        (Case(name="tiny on a slow link", bandwidth="20 Mbit/s", **tiny), _ONE_PIPELINE),
        (Case(name="tiny on an uneven pair", hosts=2, cpu=(0.5, 0.2), **tiny), _ONE_PIPELINE),
        (Case(name="little memory", hosts=2, **short), {**_ONE_PIPELINE, "spare_bytes": 30e6}),
        (Case(name="ResNet-50", **short, model=RESNET), _ONE_PIPELINE),
    ]


def lab_rows(*, quick: bool, only: str | None = None) -> list[dict[str, Any]]:
    """Measure the cases and give their rows; none without root, since the lab needs it."""
    if os.geteuid() != 0:
        print("no lab without root: predictions are not measured", file=sys.stderr)
        return []
    take_down(LAB)
    cases = lab_cases()[:3] if quick else lab_cases()
    if only is not None:
        cases = [case for case in cases if case[0].name in only.split(",")]
    for model in dict.fromkeys(case.model for case, _ in cases):
        frozen_profile(model)  # before anything runs in the lab
    return [row for case, request in cases for row in _measure(case, request)]


def _measure(case: Case, request: dict[str, Any]) -> list[dict[str, Any]]:
    profile, cluster = frozen_profile(case.model), parse_cluster(lab_of(case))
    request = dict(request)
    spare_bytes = request.pop("spare_bytes", None)
    if spare_bytes is not None:
        # the last device may hold this much of the model; the lab's host holds all for its ceiling
        *others, last = cluster.devices
        limit = int(msgspec.json.decode(profile)["base_bytes"] + spare_bytes)
        cluster = msgspec.structs.replace(cluster, devices=(*others, msgspec.structs.replace(last, memory_bytes=limit)))
    task = plan_task(f"{case.name}: plan", cluster, profile, request)
    rows = run(replace(case, serial_images=4, tasks=[*case.tasks, task]), depth=2)
    planned = next(row for row in rows if row.get("policy") == "plan")
    planned |= {
        "case": "prediction", "name": case.name, "measured": planned["steady_images_per_second"],
        "predicted_beforehand": planned["predicted_images_per_second"],
        "predicted": planned["predicted_at_mean_speeds"], "summary": {},
        "off": planned["predicted_at_mean_speeds"] / planned["steady_images_per_second"] - 1,
        "standard_error": standard_error(planned["pass_efficiencies"]),
    }  # fmt: skip
    if case.name == "uneven":
        planned["summary"] = {"uneven_efficiency": planned["efficiency"]}
    if case.name == "alternating":
        other = next(row for row in rows if row["mode"] == "peer")
        planned["summary"] = {"alternating_vs_torch_4": planned["images_per_second"] / other["images_per_second"]}
    if case.name == "in turns with the ceiling":
        planned["summary"] = {"alternating_efficiency": planned["efficiency"]}
    return [row for row in rows if row["mode"] != "serial"]


def plan_task(label: str, cluster: Cluster, profile: str, request: dict[str, Any]) -> dict[str, Any]:
    """A plan of a profile, made when the hosts have been seen at work, as a task of a pipeline's session."""
    return {
        "kind": "plan", "label": label, "request": request, "profile": profile,
        "cluster": msgspec.json.encode(cluster).decode(),
    }  # fmt: skip


@cache
def frozen_profile(model: str) -> str:
    """Profile a model once, on a free core, as JSON."""
    zoo = load_model(model)
    graph = capture(zoo.module, zoo.example_args, zoo.example_kwargs)
    profile = profile_graph(
        graph, lambda state: load_state(graph, state, zoo.weights), rows=(1, 4), messages=measure_messages()
    )
    return msgspec.json.encode(msgspec.structs.replace(profile, base_bytes=worker_bytes())).decode()
