"""Predicted and measured training in the lab: the cases are listed here before they are run.

GPT-2 of `benchmarks/training` (6 layers, 384 wide, 128 tokens), batches of 32 rows in microbatches of 2, 1F1B, AdamW.
Every case makes the planner's best plan of a shape: how many stages each pipeline has.
"""

from functools import partial
from typing import Any

import msgspec
import torch

from benchmarks.labs import lab_text, run_session
from benchmarks.training.session import LENGTH, VOCABULARY, Language, next_token_loss
from penstock.cluster.lab import take_down
from penstock.deploy.state import load_state
from penstock.graph.call import build_output
from penstock.graph.capture import capture
from penstock.measure.profiler import profile_graph
from penstock.zoo.weights.weights import ModuleWeights

LAB = "plan-training"
ROWS, BATCH = 2, 32
# hosts by their shares of a core, and the shapes of the plans that they run one after the other
CASES: dict[str, tuple[tuple[float, ...], list[tuple[int, ...]]]] = {
    "training on two hosts": ((0.35, 0.35), [(2,), (1, 1)]),
    "training on four hosts": ((0.35,) * 4, [(4,), (2, 2), (1, 1, 1, 1)]),
    "training on three uneven hosts": ((0.5, 0.3, 0.2), [(3,), (1, 1, 1), (1, 2)]),
}


def training_rows(only: str | None = None) -> list[dict[str, Any]]:
    """Measure the cases, or those with these names, and give a row for each plan."""
    take_down(LAB)
    names = [name for name in CASES if only is None or name in only.split(",")]
    profile = frozen_profile() if names else ""  # before anything runs in the lab
    return [row for name in names for row in _measure(name, profile)]


def frozen_profile() -> str:
    """Profile training once, on a free core, as JSON."""
    model, ids = Language().train(), torch.randint(0, VOCABULARY, (ROWS, LENGTH))
    graph = capture(model, (ids,))

    def loss(outputs: Any, rows: int) -> torch.Tensor:
        return next_token_loss(build_output(graph, list(outputs), graph.sizes(rows)), ids[:1].expand(rows, -1))

    load = partial(load_state, graph, weights=ModuleWeights(model))
    return msgspec.json.encode(profile_graph(graph, load, rows=(ROWS,), training=True, loss=loss)).decode()


def _measure(name: str, profile: str) -> list[dict[str, Any]]:
    cpu, shapes = CASES[name]
    lab = lab_text(LAB, cpu)
    session = {"profile": profile, "cluster": lab, "shapes": shapes, "rows": ROWS, "batch": BATCH}
    rows = run_session(lab, "benchmarks.planning.training_session", session, name)["rows"]
    return [{"case": "training prediction", "name": name, "cpu": cpu, **row} for row in rows]
