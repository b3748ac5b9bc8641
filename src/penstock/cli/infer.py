"""`penstock infer`: predictions for a set of images, written as they are computed."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import options as opt
from penstock.cli.cluster import Cluster
from penstock.cli.paths import Written
from penstock.errors import RunError
from penstock.files import is_stdout
from penstock.terminal.notes import say


def infer(
    model: opt.Model,
    images: Annotated[list[str], typer.Option(help="Folder, archive, image or .txt list.")],
    output: Annotated[
        Path, Written(), typer.Option("--output", "-o", help="Predictions, .csv or JSON lines; - prints them.")
    ] = Path("predictions.csv"),
    stages: Annotated[
        int | None, typer.Option(min=1, help="Number of stages. Default: 2, or torchrun's processes.")
    ] = None,
    policy: opt.Policy = "balanced",
    cut: opt.CutNames = None,
    plan: Annotated[Path | None, typer.Option(metavar="FILE", help="Plan with cuts and devices.")] = None,
    microbatch_size: opt.MicrobatchSize = 1,
    num_images: Annotated[
        int | None, typer.Option(min=1, help="Number of images, from the first. Default: all.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue after the existing rows.")] = False,
    trace: opt.Trace = None,
    profile: opt.Profiled = False,
    live: opt.Live = False,
    weights: opt.WeightsFile = None,
    pretrained: opt.Pretrained = False,
    seed: opt.Seed = 0,
    threads: opt.Threads = None,
    device: opt.ComputesOn = "cpu",
    runtime: opt.Runtime = "eager",
    on_loss: opt.OnLoss = None,
    wait_for: opt.WaitFor = 300.0,
    profiled: Annotated[
        Path | None, typer.Option("--costs", metavar="FILE", help="Profile that the plan was made from.")
    ] = None,
    planned_for: Annotated[
        Path | None, typer.Option("--from-cluster", metavar="FILE", help="Cluster that the plan was made for.")
    ] = None,
    labels: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Lines of image and label, for a flat folder.")
    ] = None,
    class_order: Annotated[
        str | None,
        typer.Option(metavar="ORDER", help="torchvision, natural, or a file of the folders."),
    ] = None,
    preprocess: opt.Preprocess = None,
    top: Annotated[int, typer.Option(min=0, help="Number of best classes in each row.")] = 0,
    logits: Annotated[bool, typer.Option("--logits", help="The model's outputs in each row.")] = False,
    bind: opt.Bind = None,
    cluster: Cluster = None,
    json: opt.JsonFile = None,
) -> None:
    """Classify images: predictions in order, throughput, and accuracy."""
    from penstock.deploy.worker import follow
    from penstock.group.entry import join_torchrun, under_torchrun
    from penstock.runtime.registry import parse_runtime
    from penstock.wire import FEEDER

    opt.check_profiled(profile=profile, trace=trace)
    opt.bind_to(bind, cluster)
    parse_runtime(runtime)  # before the model is loaded
    asked, on_loss = on_loss, opt.choose_on_loss(on_loss, trace=trace)
    world = join_torchrun(followed=True, again=on_loss != "stop") if under_torchrun() else None
    if world is not None and world.membership is None and asked is None:
        on_loss = "stop"  # torchrun's agents end all processes if one fails
    if world is not None and world.rank != FEEDER:
        with _naming_resume(output):
            follow(world)
        return
    # imported late: workers do not need it, and it takes seconds and memory on a small board
    from penstock.recipes.predict_images import PredictSettings, predict_images

    settings = PredictSettings(
        model=model, images=images, output=output, stages=stages, policy=policy, cuts=cut, plan=plan,
        microbatch_size=microbatch_size, num_images=num_images, resume=resume, trace=trace, profile=profile, live=live,
        weights=weights, pretrained=pretrained, seed=seed, threads=threads, device=device, runtime=runtime,
        on_loss=on_loss, wait_s=wait_for, profiled=profiled, planned_for=planned_for,
        class_order=class_order, labels=labels, preprocess=preprocess, top=top, logits=logits,
    )  # fmt: skip
    try:
        with _naming_resume(output):
            summary, failed = predict_images(settings, world)
    except KeyboardInterrupt as error:
        if not error.args:  # interrupted before the first prediction
            raise
        say(str(error), err=True)
        raise typer.Exit(130) from None
    opt.write_json(json, summary)
    if failed is not None:
        raise RunError(failed)


@contextlib.contextmanager
def _naming_resume(output: Path) -> Iterator[None]:
    """Add the next step to the error of a run that has ended early, on each of its processes."""
    try:
        yield
    except RunError as error:
        if "--resume" in str(error) or is_stdout(output):
            raise
        raise type(error)(f"{error}; continue with --resume") from error
