"""Print what came out: every way beside the pipeline, where a step's time goes, and what fits into a host."""

import json
import statistics
from typing import Any

Row = dict[str, Any]
UNFROZEN = "static"  # the accuracies with nothing frozen


def show(result: dict[str, Any], *, pipeline: str, static: str, freezing: str, memory: str) -> None:
    """Print the tables: `pipeline` and `static` name the rows to compare with, `freezing` is that of the ablation."""
    accuracy = result["accuracy"]
    for title, rows, found in (
        ("ViT", result["lab"], accuracy.get("vit", {})),
        ("BERT", result["bert"], accuracy.get("bert", {})),
    ):
        if rows:
            print(f"\n{title}\n")
            _table(("what", "s, all epochs", "times the pipeline", "accuracy", "plans, epoch by epoch"),
                   [_way(name, row, rows.get(pipeline), _freezing(name, row, static, freezing), found)
                    for name, row in rows.items()])  # fmt: skip
    print()
    _table(("what", "chunks", "batch", "memory", "images/s", "s an epoch", "load", "forward", "backward", "wait",
            "synchronize", "sync./s", "MB synchronized/s"),
           [_step(name, row) for name, row in result["lab"].items()])  # fmt: skip
    if result.get("largest"):
        print(f"\nHosts of {memory}\n")
        _table(
            ("what", "batch", "memory", "images/s"),
            [_tried(name, each) for name, tries in result["largest"].items() for each in tries],
        )
    print(json.dumps(result["summary"]))


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    for cells in (head, ("---",) * len(head), *rows):
        print(f"| {' | '.join(cells)} |")


def _way(name: str, row: Row, pipeline: Row | None, freezing: str, accuracy: dict[str, list[float]]) -> tuple[str, ...]:
    taken = sum(row["seconds"])
    return (
        name, f"{taken:.0f}",
        f"{_an_epoch(pipeline) / _an_epoch(row):.2f}" if pipeline else "",
        f"{statistics.mean(accuracy[freezing]):.2%}" if freezing in accuracy else "",
        ", ".join(f"{change['frozen_layers']}: {change['stages']}x{change['replicas']}"
                  f"{' cached' if change['cached'] else ''}" for change in row["changes"]),
    )  # fmt: skip


def _freezing(name: str, row: Row, static: str, default: str) -> str:
    """Return under which name a row's accuracies are."""
    if name == static or not row["changes"]:
        return UNFROZEN
    return name.removeprefix("elastic, ") if name.startswith("elastic, ") else default


def _step(name: str, row: Row) -> tuple[str, ...]:
    spent, taken = row["spent"], sum(row["seconds"])
    parts = ("load_s", "forward_s", "backward_s", "wait_s", "synchronize_s")
    return (
        name, str(row["chunks"]), str(row["batch"]), f"{_memory(row) / 2**20:.0f} MiB", f"{_per_s(row):.0f}",
        f"{_an_epoch(row):.1f}", *(f"{1000 * spent[part] / row['steps']:.0f} ms" for part in parts),
        f"{spent['num_synchronizations'] / taken:.1f}", f"{spent['synchronized_bytes'] / taken / 1e6:.2f}",
    )  # fmt: skip


def _tried(name: str, each: Row) -> tuple[str, ...]:
    if "failed" in each:
        return (name, str(each["batch"]), "out of memory" if "memory" in each["failed"] else each["failed"], "")
    return (name, str(each["batch"]), f"{each['memory_bytes'] / 2**20:.0f} MiB", f"{each['images_per_s']:.0f}")


def tried(batch: int, row: Row) -> Row:
    """Return what is kept of a batch that fits."""
    return {"batch": batch, "memory_bytes": _memory(row), "images_per_s": _per_s(row)}


def _memory(row: Row) -> int:
    return max(int(host["peak_memory_bytes"]) for host in row["hosts"])


def _an_epoch(row: Row) -> float:
    return float(statistics.mean(row["seconds"]))


def _per_s(row: Row) -> float:
    return float(row["rows"] / _an_epoch(row))
