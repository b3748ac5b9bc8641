"""Run with `python -m benchmarks.coverage --json FILE [--quick]`."""

import gc
import json
import logging
import sys
import time
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import nn

from benchmarks.coverage import ours, peer
from benchmarks.coverage.architectures import Architecture, Inputs, asked
from penstock.deploy.split import split
from penstock.graph.graph import Graph

BATCH_SIZES = (1, 2, 3, 5)
NUM_STAGES = 4
_PEER_BATCH, _PEER_OTHER_BATCH = 2, 3
_SEED = 0


def main() -> None:
    """Measure every architecture, write the rows and the summary."""
    chosen, output = asked("benchmarks.coverage", __doc__)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    console = Console(stderr=True)
    rows = [measure(a) for a in track(chosen, "architectures", console=console, disable=not sys.stderr.isatty())]
    summary = summarize(rows)
    output.write_text(json.dumps({"rows": rows, "summary": summary}, indent=1) + "\n")
    print(json.dumps(summary))


def summarize(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Count the architectures that are equal at every batch size, and the peer's."""
    return {
        "architectures": len(rows),
        "equal": sum(row["all_equal"] for row in rows),
        "peer_equal": sum(row["peer_equal"] for row in rows),
        "peer_equal_other_batch": sum(row["peer_equal_other_batch"] for row in rows),
    }


def measure(architecture: Architecture) -> dict[str, Any]:
    """Make the row of one architecture; what fails is in the row, in one line."""
    begin = time.perf_counter()
    torch.manual_seed(_SEED)
    model = architecture.build().eval()
    inputs = {batch: architecture.inputs(batch) for batch in BATCH_SIZES}
    expected = {batch: ours.reference(model, x) for batch, x in inputs.items()}
    row: dict[str, Any] = {"architecture": architecture.name, "stages": NUM_STAGES, "cuts": [], "error": None}
    row["equal"] = dict.fromkeys(map(str, BATCH_SIZES), False)
    graph = _ours(row, model, inputs, expected)
    row["all_equal"] = all(row["equal"].values())
    _peer(row, model, inputs, expected, graph)
    row["seconds"] = round(time.perf_counter() - begin, 2)
    del model, expected
    gc.collect()
    return row


def _ours(row: dict[str, Any], model: nn.Module, inputs: dict[int, Inputs], expected: dict[int, Any]) -> Graph | None:
    # a benchmark of coverage records whatever goes wrong
    try:
        parts = split(model, (), inputs[2], stages=NUM_STAGES)
        ours.travels(parts)
    except Exception as error:
        row["error"] = ours.one_line(error)
        return None
    row["cuts"] = [cut.name for cut in parts.cuts]
    row["fixed_batch"] = parts.graph.fixed_batch
    for batch, x in inputs.items():
        try:
            row["equal"][str(batch)] = ours.same(expected[batch], ours.run(parts, x))
        except Exception as error:
            row["error"] = ours.one_line(error)
    return parts.graph


def _peer(
    row: dict[str, Any], model: nn.Module, inputs: dict[int, Inputs], expected: dict[int, Any], graph: Graph | None
) -> None:
    row |= {"peer_split": None, "peer_equal": False, "peer_equal_other_batch": False, "peer_error": None}
    if graph is None:
        row["peer_error"] = "no split point was found, since the capture failed"
        return
    row["peer_split"] = peer.middle_block(graph)
    row["peer_equal"], row["peer_equal_other_batch"], row["peer_error"] = peer.compare(
        model, row["peer_split"], inputs[_PEER_BATCH], inputs[_PEER_OTHER_BATCH],
        [expected[_PEER_BATCH], expected[_PEER_OTHER_BATCH]],
    )  # fmt: skip


if __name__ == "__main__":
    main()
