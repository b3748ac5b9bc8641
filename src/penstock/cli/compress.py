"""`penstock compress`: the fastest form of a trained model that stays accurate."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from penstock.cli import options as opt
from penstock.compress.frontier import draw_frontier
from penstock.compress.search import CompressSettings, Found, Outcome, baseline, floor_of, frontier
from penstock.compress.steps import compress as search
from penstock.errors import RunError, UsageError
from penstock.terminal.notes import note


def compress(
    model: opt.Model,
    data: Annotated[str, typer.Option(help="Labelled images: a folder, a tar, CIFAR, or 'digits'.")],
    test: Annotated[
        str | None, typer.Option(help="Images to measure with alone; every fifth of --data if not given.")
    ] = None,
    accuracy_floor: Annotated[float | None, typer.Option(help="Keep this part of the test images right.")] = None,
    max_drop: Annotated[float | None, typer.Option(help="Lose at most this part, as in 0.01 for a point.")] = None,
    target_speedup: Annotated[
        float | None, typer.Option(help="Be this many times as fast as eager, as accurately as can be.")
    ] = None,
    ratio: Annotated[
        list[float] | None, typer.Option(help="Part of the channels to prune; may be repeated. 0.15, 0.3, 0.45, 0.6.")
    ] = None,
    runtime: Annotated[list[str] | None, typer.Option(help="A runtime to try; may be repeated. All there are.")] = None,
    importance: Annotated[str, typer.Option(help="By which channels go: magnitude, taylor or hessian.")] = "hessian",
    per_layer: Annotated[bool, typer.Option("--per-layer", help="Prune the same part of every layer.")] = False,
    round_to: Annotated[int, typer.Option(min=1, help="Keep widths multiples of this.")] = 8,
    epochs: Annotated[int, typer.Option(min=0, help="To train on after pruning.")] = 3,
    lr: Annotated[float, typer.Option(help="Learning rate of that.")] = 5e-4,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of a step of that.")] = 16,
    optimizer: Annotated[str, typer.Option(help="sgd or adamw.")] = "sgd",
    num_rows: Annotated[int | None, typer.Option(min=1, help="Use only this many images of --data.")] = None,
    num_test_rows: Annotated[int, typer.Option(min=1, help="Measure with at most this many images.")] = 1000,
    output: Annotated[Path, typer.Option("--output", "-o", help="The search's folder; a second run goes on.")] = Path(
        "runs/compress"
    ),
    weights: opt.WeightsFile = None,
    pretrained: opt.Pretrained = False,
    seed: opt.Seed = 0,
    threads: opt.Threads = None,
    json: opt.JsonFile = None,
) -> None:
    """Prune, train on and try runtimes; print what was found and keep the fastest that is accurate enough."""
    fields = {
        "model": model, "data": data, "test": test, "weights": str(weights.resolve()) if weights else None,
        "pretrained": pretrained, "output": str(output), "accuracy_floor": accuracy_floor, "max_drop": max_drop,
        "target_speedup": target_speedup, "importance": importance, "everywhere": not per_layer, "round_to": round_to,
        "epochs": epochs, "lr": lr, "batch_size": batch_size, "optimizer": optimizer, "num_rows": num_rows,
        "num_test_rows": num_test_rows, "threads": threads or 1, "seed": seed, "runtimes": runtime or [],
    } | ({"ratios": ratio} if ratio else {})  # fmt: skip
    try:
        settings = msgspec.convert(fields, CompressSettings)
    except msgspec.ValidationError as error:
        raise UsageError(f"a search cannot have these settings: {error}") from None
    outcome = search(settings, _tell)
    console = opt.make_console()
    console.print(_table(outcome))
    picture = output / "frontier.png"
    draw_frontier(outcome, picture)
    best, base = outcome.best, baseline(outcome.found)
    console.print(
        f"{best.name}: {best.accuracy:.2%} right ({best.accuracy - base.accuracy:+.2%}), "
        f"{best.rows_per_s / base.rows_per_s:.2f} times as fast; penstock infer {model} --weights {best.weights} "
        f"--runtime {best.runtime}", markup=False, soft_wrap=True,
    )  # fmt: skip
    console.print(f"figure: {picture}", markup=False)
    opt.write_json(json, {"rows": outcome.found, "best": best, "met": outcome.met})
    if not outcome.met:
        wanted = (
            f"{settings.target_speedup:g} times as fast" if settings.target_speedup is not None
            else f"{floor_of(settings, outcome.found):.2%} right"
        )  # fmt: skip
        raise RunError(f"nothing that was tried is {wanted}; the nearest is {best.name}, which is kept")


def _tell(found: Found) -> None:
    note(f"{found.name}: {found.accuracy:.2%} right, {found.rows_per_s:.1f} images/s")


def _table(outcome: Outcome) -> Table:
    best, base = frontier(outcome.found), baseline(outcome.found)
    table = Table("", "pruned", "runtime", "parameters", "accuracy", "images/s", "times eager")
    for each in sorted(outcome.found, key=lambda each: each.rows_per_s):
        mark = "chosen" if each == outcome.best else "frontier" if each in best else ""
        table.add_row(
            mark, f"{each.ratio:.0%}", each.runtime, f"{each.num_parameters / 1e6:.2f} M", f"{each.accuracy:.2%}",
            f"{each.rows_per_s:.1f}", f"{each.rows_per_s / base.rows_per_s:.2f}",
        )  # fmt: skip
    return table
