"""`penstock profile`: measured costs of a model on this kind of device."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from penstock.cli import options as opt
from penstock.cli.options import Written
from penstock.recipes.settings import make_settings
from penstock.spec.profile import Profile, write_profile
from penstock.terminal.progress import working
from penstock.units import format_bytes, format_seconds


def profile(
    model: opt.AnyModel,
    output: Annotated[
        Path, Written(), typer.Option("-o", "--output", metavar="profile.json", help="File to write.")
    ] = Path("profile.json"),
    rows: Annotated[
        str, typer.Option(help="Microbatch sizes to measure; with --generate sequences per lane, its slots.")
    ] = "1,2,4,8",
    images: Annotated[str | None, typer.Option(help="Images, to also measure reading and preprocessing.")] = None,
    training: Annotated[bool, typer.Option("--training", help="Measure forward and backward.")] = False,
    data: Annotated[str | None, typer.Option(help="Data to measure training on, as for `penstock train`.")] = None,
    length: Annotated[int | None, typer.Option(min=2, help="With --data: tokens per row of text (128).")] = None,
    generate: Annotated[
        bool, typer.Option("--generate", help="Measure a language model's generation, a token per row.")
    ] = False,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="With --generate: limit on prompt and answer tokens (512).")
    ] = None,
    cache_dtype: opt.CacheDtypeName = "model",
    threads: Annotated[int, typer.Option(min=1, help="Threads per stage.")] = 1,
    repeats: Annotated[int, typer.Option(min=3, help="Passes at the smallest size, more if they vary.")] = 7,
    device: opt.OnDevice = "cpu",
    runtime: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Additional runtime to measure; may be repeated.")
    ] = None,
    weights: opt.WeightsFile = None,
    pretrained: opt.Pretrained = False,
    seed: opt.Seed = 0,
    json: opt.JsonFile = None,
) -> None:
    """Time the parts of a model between possible cuts, and messages; write a profile for `penstock plan`."""
    from penstock.recipes.profiled import profile_generation, profile_model, profile_task
    from penstock.runtime.registry import parse_runtime
    from penstock.tensors import HOST, find_device

    sizes = opt.parse_numbers(rows, "--rows")
    choices = [parse_runtime(name) for name in runtime or ()]
    for choice in choices:
        choice.check_machine()
    kept = opt.cache_dtype(cache_dtype)
    _check(
        {
            "--training": training,
            "--data": data,
            "--length": length,
            "--images": images,
            "--generate": generate,
            "--max-length": max_length,
            "--cache-dtype": kept != "model",
            "--runtime": choices,
        }
    )
    place = find_device(device)
    if place != HOST:
        opt.only_for("the CPU", {"--runtime": choices}, f"{device} is measured on the runtime eager; leave it out")
    console = opt.make_console()
    if generate:
        with working(f"measuring generation of {model} with {rows} sequences per step"):
            made = profile_generation(
                model, slots=sizes, max_length=max_length or 512, cache_dtype=kept, runtimes=choices, weights=weights,
                pretrained=pretrained, seed=seed, threads=threads, repeats=repeats, device=place,
            )  # fmt: skip
    elif data is not None:
        settings = make_settings(
            {
                "model": model,
                "data": data,
                "length": length or 128,
                "threads": threads,
                "pretrained": pretrained,
                "seed": seed,
                "weights": str(weights) if weights else None,
                "device": device,
            }
        )
        with working(f"measuring training of {model} at {rows} rows"):
            made = profile_task(settings, rows=sizes, repeats=repeats)
    else:
        with working("capturing the model") as say:
            made = profile_model(
                model, rows=sizes, training=training, images=images, device=place, runtimes=choices, weights=weights,
                pretrained=pretrained, seed=seed, threads=threads, repeats=repeats, say=say,
            )  # fmt: skip
    _show(console, made, output, json)


def _check(given: Mapping[str, object]) -> None:
    """Raise `UsageError` for options that have no effect together."""

    def only_for(purpose: str, names: str, way: str = "", without: str = "") -> None:
        opt.only_for(purpose, {name: given[name] for name in names.split()}, way, without=without)

    if given["--training"] or given["--data"]:
        only_for("inference", "--runtime", "only eager trains, so leave it out")
    if given["--generate"]:
        only_for("whole rows", "--data --length --training --images", without="--generate")
        return
    only_for("generation", "--max-length --cache-dtype", "add --generate")
    if given["--data"]:
        only_for("inference, and data for training", "--images", without="--data")
    else:
        only_for("text as data", "--length", "add --data")


def _show(console: Console, made: Profile, output: Path, json: Path | None) -> None:
    write_profile(output, made)
    console.print(
        f"{made.model} on {made.device}, {made.threads} thread(s): {len(made.units)} units, "
        f"{format_bytes(sum(dict(p for unit in made.units for p in unit.parameters).values()))} of parameters",
        markup=False,
    )
    console.print(_table(made))
    opt.write_json(json, made)


def _table(profile: Profile) -> Table:
    table = Table("rows", "seconds per microbatch", "rows per second", "passes differ by, at most")
    for index, rows in enumerate(profile.rows):
        seconds = sum(unit.forward_s[index] for unit in profile.units)
        said = format_seconds(seconds)
        backward = [unit.backward_s[index] for unit in profile.units if unit.backward_s is not None]
        if backward:
            said += f" forward, {format_seconds(sum(backward))} backward"
            seconds += sum(backward)
        table.add_row(str(rows), said, f"{rows / seconds:.2f}", f"{profile.noise(rows):.1%}")
        for column in profile.runtimes:
            fast, eager = column.forward_s[index], column.eager_s[index]
            said = f"{format_seconds(fast)} on {column.runtime} in {column.precision}, off by {column.error:.2%}"
            table.add_row("", said, f"{rows / fast:.2f}", f"{eager / fast:.2f} times eager")
    return table
