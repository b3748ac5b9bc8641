"""`penstock infer`: predictions for a set of images, written as they are computed."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import typer

from penstock.cli import options as opt
from penstock.cli.cluster import Cluster
from penstock.cli.config import Given, settings_of, takes_config
from penstock.cli.generate import join
from penstock.errors import RunError, UsageError
from penstock.files import is_stdout
from penstock.spec.settings import PredictSettings
from penstock.text import say


@takes_config(PredictSettings)
def infer(*, given: Given, cluster: Cluster = None, json: opt.JsonFile = None) -> None:
    """Classify images: predictions in order, throughput, and accuracy."""
    from penstock.runtime.registry import parse_runtime

    settings = settings_of(PredictSettings, given)
    output = Path(settings.output)
    if settings.torch_profiler and settings.trace is None:
        raise UsageError("torch_profiler needs a trace to write into; give --trace DIR too")
    opt.bind_to(settings.bind, cluster)
    parse_runtime(settings.runtime)  # before the model is loaded
    with _naming_resume(output):
        first, world, on_loss = join(settings.on_loss, settings.trace)
    if not first:
        return
    # imported late: workers do not need it, and it takes seconds and memory on a small board
    from penstock.recipes.classify import predict_images

    settings = msgspec.structs.replace(settings, on_loss=on_loss)
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
