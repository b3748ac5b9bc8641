"""`penstock profile`: measured costs of a model on this kind of device."""

from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from penstock.cli import options as opt
from penstock.cli.paths import Written
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
    from penstock.deploy.state import load_state, with_packings
    from penstock.engine.reference import calibrate
    from penstock.graph.capture import capture
    from penstock.measure.costs import Timing
    from penstock.measure.hosts import measure_messages
    from penstock.measure.profiler import measure_loader, measure_runtimes, profile_graph, script_bytes, worker_bytes
    from penstock.recipes.profiled import profile_generation, profile_task
    from penstock.runtime.registry import parse_runtime
    from penstock.tensors import HOST, find_device
    from penstock.zoo.data.image_names import open_images
    from penstock.zoo.models.models import load_model

    sizes = opt.parse_numbers(rows, "--rows")
    choices = [parse_runtime(name) for name in runtime or ()]
    for choice in choices:
        choice.check_machine()
    kept = opt.cache_dtype(cache_dtype)
    opt.only_for("inference", {"--runtime": choices and (training or data)}, "only eager trains, so leave it out")
    if generate:
        others = {"--data": data, "--length": length, "--training": training, "--images": images}
        opt.only_for("whole rows", others, without="--generate")
    else:
        opt.only_for("generation", {"--max-length": max_length, "--cache-dtype": kept != "model"}, "add --generate")
        opt.only_for("text as data", {"--length": not data and length}, "add --data")
        opt.only_for("inference, and data for training", {"--images": data and images}, without="--data")
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
        _show(console, made, output, json)
        return
    if data is not None:
        settings = make_settings({
            "model": model, "data": data, "length": length or 128, "threads": threads, "pretrained": pretrained,
            "seed": seed, "weights": str(weights) if weights else None, "device": device,
        })  # fmt: skip
        with working(f"measuring training of {model} at {rows} rows"):
            made = profile_task(settings, rows=sizes, repeats=repeats)
        _show(console, made, output, json)
        return
    found = None if images is None else open_images(images)
    with working("capturing the model") as say:
        zoo = load_model(model, weights=weights, pretrained=pretrained, seed=seed)
        graph = capture(zoo.module.train(training), zoo.example_args, zoo.example_kwargs)
        base_bytes = worker_bytes()
        more_bytes = script_bytes(base_bytes)
        say("measuring messages")
        messages = measure_messages()
        loader_s_per_row = 0.0 if found is None else measure_loader(zoo, found)
        say(f"measuring the model at {rows} rows")
        calibration_s = calibrate(threads=threads) if place == HOST else 0.0  # the reference work is for CPUs
        load = partial(load_state, graph, weights=zoo.weights)
        made = profile_graph(
            graph, load, rows=sizes, threads=threads, repeats=repeats,
            training=training, messages=messages, device=place,
        )  # fmt: skip
        packed = with_packings(graph, zoo.weights, runtime or ())
        columns = measure_runtimes(packed, load, choices, Timing(made.rows, threads, repeats))
    made = msgspec.structs.replace(
        made, model=model, loader_s_per_row=loader_s_per_row, calibration_s=calibration_s, base_bytes=base_bytes,
        script_bytes=more_bytes, runtimes=columns,
    )  # fmt: skip
    _show(console, made, output, json)


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
