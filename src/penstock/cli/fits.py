"""`penstock fits`: what a model needs on each machine, before anything is started."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Column, Table

from penstock.cli import options as opt
from penstock.errors import UsageError, exclude
from penstock.plan.candidates import PlanRequest
from penstock.plan.cost.training_step import ADAMW_STATE
from penstock.plan.needs import Fit, StageNeeds, fit
from penstock.resources import allowed_bytes
from penstock.spec.cluster import Cluster, Device, read_cluster
from penstock.spec.profile import Profile, read_profile
from penstock.terminal.progress import working
from penstock.text import counted
from penstock.units import format_bytes

_LENGTH = 512  # the default of generate


def fits(
    model: opt.AnyModel,
    on: Annotated[
        Path | None, typer.Option("--on", metavar="CLUSTER", help="Cluster or lab file. Default: this machine.")
    ] = None,
    rows: Annotated[
        int | None, typer.Option(min=1, help="Rows of a microbatch, or slots of a lane. Default: the most that fit.")
    ] = None,
    max_length: Annotated[int | None, typer.Option(min=1, help="Tokens of a sequence. Default: 512.")] = None,
    one_call: Annotated[bool, typer.Option("--one-call", help="One call of a language model, not generation.")] = False,
    cache_dtype: opt.CacheDtypeName = "model",
    runtime: Annotated[str, typer.Option(help="Runtime of inference: eager or onnxruntime:stored.")] = "eager",
    device: opt.OnDevice = "cpu",
    train: Annotated[bool, typer.Option("--train", help="Training, with AdamW.")] = False,
    data: Annotated[str | None, typer.Option(help="Training data. Default: the model's example inputs.")] = None,
    microbatches: Annotated[
        int | None, typer.Option(min=1, help="Microbatches of a training step. Default: 8.")
    ] = None,
    schedule: Annotated[str | None, typer.Option(help="Schedule of training: 1f1b (default) or gpipe.")] = None,
    profile: Annotated[Path | None, typer.Option(help="Measured costs, for rows or tokens per second.")] = None,
    json: opt.JsonFile = None,
) -> None:
    """Print what each stage needs in memory, the largest batch or number of slots, and what another machine brings.

    The exit status is 1 if the model does not fit.
    """
    elsewhere = on is not None and device != "cpu"
    exclude("--on", elsewhere, "a cluster file has the memory of its devices, also of GPUs")
    kept = opt.cache_dtype(cache_dtype)
    _check(model, {
        "--one-call": one_call, "--max-length": max_length, "--cache-dtype": kept != "model",
        "--runtime": runtime != "eager", "--data": data, "--microbatches": microbatches, "--schedule": schedule,
        "--train": train, "--profile": profile,
    })  # fmt: skip
    cluster = this_machine(device) if on is None else read_cluster(on)
    request = _request(train, schedule or "1f1b", microbatches or 8)

    def counted_costs() -> Profile:
        from penstock.recipes.profiled import count_inference, count_training
        from penstock.recipes.settings import FitSettings

        if train:
            settings = FitSettings(model=model, data=data or "")
            return count_training(settings if max_length is None else settings.replace(length=max_length))
        length = max_length or _LENGTH
        return count_inference(model, max_length=length, runtime=runtime, cache_dtype=kept, whole=one_call)

    console = opt.make_console()
    with working("counting the model's bytes") as say:
        costs = _read_costs(profile, model, train) if profile else counted_costs()
        if device != "cpu":  # the free memory of a GPU is what its processes leave
            costs = msgspec.structs.replace(costs, base_bytes=0.0, script_bytes=0.0)
        say(f"planning for {counted(len(cluster.devices), 'machine')}")
        found = fit(costs, cluster, request, rows)
    what = "slots of a lane" if costs.generation else "rows of a microbatch"
    if not found.reason:
        console.print(_table(found.stages))
    for line in _lines(found, what, request, measured=profile is not None):
        console.print(line, markup=False, soft_wrap=True)
    opt.write_json(json, {"model": model, "fits": not found.reason, **asdict(found)})
    if found.reason:
        raise typer.Exit(1)


def _check(model: str, given: dict[str, Any]) -> None:
    """Raise `UsageError` for options that have no effect on this model, or together."""
    from penstock.zoo.models.language import is_language_model

    def only_for(purpose: str, names: str, way: str = "", without: str = "") -> None:
        opt.only_for(purpose, {name: given[name] for name in names.split()}, way, without=without)

    if given["--profile"]:
        names = "--one-call --max-length --cache-dtype --runtime --data"
        only_for("costs that are counted", names, "leave it out, or --profile, which has been measured with its own")
    if given["--train"]:
        only_for("inference", "--one-call --runtime --cache-dtype", without="--train")
    else:
        only_for("training", "--data --microbatches --schedule", "add --train")
    if given["--one-call"]:
        only_for("generation", "--max-length --cache-dtype", without="--one-call")
    if not (given["--data"] or given["--profile"] or is_language_model(model)):
        only_for("language models", "--one-call --max-length --cache-dtype", f"leave it out for {model}")


def _read_costs(file: Path, model: str, train: bool) -> Profile:
    costs = read_profile(file)
    if costs.model != model:
        raise UsageError(f"{file} is a profile of {costs.model}, not of {model}; give that model, or profile this one")
    if (costs.units[0].backward_s is not None) != train:
        other = "inference; profile with --training or --data" if train else "training; add --train"
        raise UsageError(f"{file} is a profile of {other}")
    return costs


def this_machine(device: str = "cpu") -> Cluster:
    """Return a cluster of this machine alone, with the memory that this process may allocate, or that of a GPU."""
    memory = allowed_bytes()
    if device != "cpu":
        from penstock.tensors import free_bytes  # which needs torch

        memory = free_bytes(device)
    return Cluster(devices=(Device(name="this-machine", speed=1.0, memory_bytes=memory),))


def _request(train: bool, schedule: str, microbatches: int) -> PlanRequest:
    if schedule not in {"1f1b", "gpipe"}:
        raise UsageError(f"--schedule must be 1f1b or gpipe; got {schedule!r}; for others, use `penstock plan`")
    if not train:
        return PlanRequest(replicas=False, alternate=False)
    return PlanRequest(
        replicas=False, schedule=schedule, num_microbatches=microbatches, optimizer_state_factor=ADAMW_STATE
    )


def _table(stages: list[StageNeeds]) -> Table:
    trains = stages[0].recomputed is not None
    names = ["weights", *(["gradients and optimizer", "activations"] if trains else ["caches"]), "working", "process"]
    table = Table("machine", "from", "to", *(Column(name, justify="right") for name in (*names, "in all", "of")))
    for stage in stages:
        parts = [stage.weights, *([stage.training] if trains else []), stage.kept, stage.working, stage.process]
        numbers = map(format_bytes, (*parts, stage.total, stage.memory))
        table.add_row(stage.device, stage.begin, stage.end, *numbers)
    return table


def _lines(found: Fit, what: str, request: PlanRequest, *, measured: bool) -> Iterator[str]:
    if found.reason:
        yield found.reason
        more = counted(found.more, "machine") if found.more else "no number of machines"
        yield f"{more} more like {found.like} would do"
        return
    step = f", {request.num_microbatches} microbatches a step" if request.num_microbatches else ""
    yield f"{found.rows} {what}{step}; at most {found.most_rows} fit"
    if any(stage.recomputed for stage in found.stages):
        most, less = max(stage.total for stage in found.stages), max(stage.recomputed or 0.0 for stage in found.stages)
        yield f"with checkpointing the fullest machine needs {format_bytes(less)} instead of {format_bytes(most)}"
    if measured:
        yield f"{found.rows_per_s:.4g} {'tokens' if 'slots' in what else 'rows'} per second, by the profile"
    yield (
        f"with one machine more like {found.like} at most {found.most_with_more} fit, and {found.rows} take "
        f"{1 / found.faster:.0%} of the time" + ("" if measured else ", by counted work")
    )
