"""`penstock compress`: the fastest form of a trained model that stays accurate."""

import statistics
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from penstock.cli import options as opt
from penstock.cli.config import Given, takes_settings
from penstock.compress.search import CompressSettings, Found, Outcome, baseline, floor_of, frontier
from penstock.errors import RunError
from penstock.spec.fields import make_struct
from penstock.text import note

_SHARED = {
    "model": opt.Model,
    "weights": opt.WeightsFile,
    "pretrained": opt.Pretrained,
    "seed": opt.Seed,
    "threads": opt.Threads,
    "microbatch_size": opt.MicrobatchSize,
    "ratios": Annotated[list[float], typer.Option("--ratio", help="Fraction of channels to prune; may be repeated.")],
    "runtimes": Annotated[
        list[str], typer.Option("--runtime", help="Runtime to try; may be repeated. Default: all installed.")
    ],
}


@takes_settings(CompressSettings, _SHARED)
def compress(*, given: Given, json: opt.JsonFile = None) -> None:
    """Prune, fine-tune and try runtimes; print the results and keep the fastest form that is accurate enough."""
    from penstock.compress.search import draw_frontier
    from penstock.compress.steps import compress as search

    settings = make_struct(given, CompressSettings, "options of penstock compress")
    outcome = search(settings, _tell)
    console = opt.make_console()
    console.print(_table(outcome))
    picture = Path(settings.output) / "frontier.png"
    draw_frontier(outcome, picture)
    best, base = outcome.best, baseline(outcome.found)
    if outcome.met and best == base:
        console.print(
            "no improvement found: no other form is accurate enough and faster in each round of the comparison",
            soft_wrap=True,
        )
    rows = f" --set microbatch_size={settings.microbatch_size}" if settings.microbatch_size > 1 else ""
    console.print(
        f"{best.name}: {best.accuracy:.2%} right ({best.accuracy - base.accuracy:+.2%}), "
        f"{_times(best, base)} times as fast; penstock infer {outcome.model} "
        f"--weights {best.weights} --runtime {best.runtime}{rows} --images {settings.test or settings.data}",
        markup=False,
        soft_wrap=True,
    )
    console.print(f"figure: {picture}", markup=False)
    opt.write_json(json, {"rows": outcome.found, "best": best, "met": outcome.met})
    if not outcome.met:
        wanted = (
            f"{settings.target_speedup:g} times as fast"
            if settings.target_speedup is not None
            else f"{floor_of(settings, outcome.found):.2%} right"
        )
        raise RunError(f"no form tried is {wanted}; the nearest is {best.name}, which is kept")


def _tell(found: Found) -> None:
    note(f"{found.name}: {found.accuracy:.2%} right, {found.rows_per_s:.1f} images/s")


def _table(outcome: Outcome) -> Table:
    best, base = frontier(outcome.found), baseline(outcome.found)
    table = Table("", "pruned", "runtime", "parameters", "accuracy", "images/s", "times eager")
    for each in sorted(outcome.found, key=lambda each: each.rows_per_s):
        mark = "chosen" if each == outcome.best else "frontier" if each in best else ""
        table.add_row(
            mark,
            f"{each.ratio:.0%}",
            each.runtime,
            f"{each.num_parameters / 1e6:.2f} M",
            f"{each.accuracy:.2%}",
            f"{each.rows_per_s:.1f}",
            _times(each, base),
        )
    return table


def _times(each: Found, base: Found) -> str:
    """Format the speed-up over the original model, with the range over the rounds of a comparison."""
    ratios = each.ratios_to(base)
    spread = f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 and each != base else ""
    return f"{statistics.median(ratios):.2f}{spread}"
