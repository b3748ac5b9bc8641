"""`penstock bundle`: a plan with every device's programs and weights, ready to copy."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from penstock.cli.options import JsonFile, Pretrained, Seed, WeightsFile, make_console, write_json
from penstock.cli.paths import Written
from penstock.errors import UsageError
from penstock.plan.check import read_plan
from penstock.spec.plan import Plan
from penstock.terminal.progress import working
from penstock.units import format_bytes


def bundle(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="Plan written by `penstock plan`.")],
    output: Annotated[
        Path, Written(is_folder=True), typer.Option("-o", "--output", metavar="DIR", help="Folder of the bundle.")
    ] = Path("bundle"),
    model: Annotated[
        str | None, typer.Option(help="Model, required if the plan's is package.module:function. Default: the plan's.")
    ] = None,
    weights: WeightsFile = None,
    pretrained: Pretrained = False,
    seed: Seed = 0,
    json: JsonFile = None,
) -> None:
    """Write each stage's programs and weights into a folder for its device."""
    from penstock.deploy.bundle import write_bundle
    from penstock.deploy.state import load_state
    from penstock.graph.capture import capture
    from penstock.zoo.models.models import load_model

    chosen = read_plan(plan)
    name = model or _model_of(chosen, plan)
    console = make_console()
    with working("capturing the model") as say:
        zoo = load_model(name, weights=weights, pretrained=pretrained, seed=seed)
        graph = capture(zoo.module, zoo.example_args, zoo.example_kwargs)
        say("writing the parts")
        folders = write_bundle(output, graph, chosen, partial(load_state, graph, weights=zoo.weights))
    table = Table("device", "folder", "weights")
    parts = []
    for folder in folders:
        num_bytes = (folder / "weights.safetensors").stat().st_size
        parts.append({"device": folder.name, "folder": str(folder), "weights_bytes": num_bytes})
        table.add_row(folder.name, str(folder), format_bytes(num_bytes))
    console.print(table)
    write_json(json, {"plan": str(plan), "parts": parts})


def _model_of(plan: Plan, path: Path) -> str:
    """Return a plan's model; raises `UsageError` if loading it would import a module, since plans may be untrusted."""
    if plan.model.startswith(("timm:", "hf:")):
        return plan.model
    raise UsageError(
        f"the model of a plan must start with timm: or hf:, but {path} names {plan.model[:120]!r}, which would be "
        "imported; if that is your code, add --model package.module:function"
    )
