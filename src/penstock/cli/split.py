"""`penstock split`: the stages of a model, a comparison of policies, and a plan's stages in folders."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column, Table

from penstock.cli import options as opt
from penstock.cli.options import Written
from penstock.errors import CutError, UsageError
from penstock.plan.check import read_plan
from penstock.plan.search.partition import stage_sums
from penstock.terminal.progress import working
from penstock.text import counted
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from penstock.graph.cuts import Cut, Cuts
    from penstock.graph.graph import Graph


def split(
    model: opt.Model,
    stages: Annotated[int | None, typer.Option(min=1, help="Number of stages. Default: 4.")] = None,
    cut: opt.CutNames = None,
    plan: Annotated[Path | None, typer.Option(help="Plan written by `penstock plan`, instead of these.")] = None,
    output: Annotated[
        Path | None,
        Written(is_folder=True),
        typer.Option("-o", "--output", metavar="DIR", help="Write the programs and weights of --plan, by device."),
    ] = None,
    work: Annotated[
        str, typer.Option(help="Cost model for balancing stages: 'counted' FLOPs or 'measured' seconds.")
    ] = "counted",
    microbatch_size: opt.MicrobatchSize = 1,
    all_cuts: Annotated[bool, typer.Option("--all", help="List every cut that the model allows.")] = False,
    weights: opt.WeightsFile = None,
    pretrained: opt.Pretrained = False,
    seed: opt.Seed = 0,
    json: opt.JsonFile = None,
) -> None:
    """Print the stages, the bytes that cross between them, and a comparison of policies."""
    from penstock.deploy.bundle import write_bundle
    from penstock.deploy.policies import choose_cuts, cuts_of_plan
    from penstock.deploy.run_options import CutOptions
    from penstock.deploy.state import load_state
    from penstock.graph.capture import capture
    from penstock.graph.cuts import Cuts
    from penstock.graph.graph import count_work
    from penstock.measure.costs import measure_work
    from penstock.zoo.models.models import load_model

    if work not in {"counted", "measured"}:
        raise UsageError(f"--work must be 'counted' or 'measured'; got {work!r}")
    if output is not None and plan is None:
        raise UsageError("-o writes a folder for each device of a plan; add --plan, from penstock plan")
    wanted = read_plan(plan) if plan is not None else None
    how = CutOptions(stages=stages, cuts=cut or None, plan=wanted)
    console = opt.make_console()
    with working("capturing the model"):
        zoo = load_model(model, weights=weights, pretrained=pretrained, seed=seed)
        graph = capture(zoo.module, zoo.example_args, zoo.example_kwargs)
    cuts = Cuts(graph) if wanted is None else cuts_of_plan(graph, wanted)
    names = how.names if wanted is None else wanted.pipelines[0].cut_sets[0].cuts
    sizes = graph.sizes(graph.fixed_batch or microbatch_size)
    costs = count_work(graph, sizes)
    if work == "measured":
        with working("measuring"):
            costs = measure_work(graph, lambda s: load_state(graph, s, zoo.weights), rows=microbatch_size)
    chosen = choose_cuts(graph, cuts, names=names, stages=how.count(4), policy=how.policy, work=costs, sizes=sizes)
    rows = _stage_rows(graph, chosen, costs, sizes)
    policies = _policy_rows(graph, cuts, len(chosen) + 1, costs, sizes)
    console.print(
        f"{graph.model}: {len(graph.ops)} operations, {counted(len(cuts), 'possible cut')}, "
        f"{format_bytes(sum(row['parameter_bytes'] for row in rows))} of parameters, "
        f"{work} work {format_seconds(sum(costs))}"
        + (f"; the model fixes its batch size at {graph.fixed_batch}" if graph.fixed_batch else "")
    )
    console.print(_stage_table(rows))
    console.print(_policy_table(policies))
    if all_cuts:
        for possible in cuts:
            console.print(f"{possible.name}  {format_bytes(possible.num_bytes(sizes))}", highlight=False)
    parts = []
    if output is not None and wanted is not None:
        with working("writing the parts"):
            folders = write_bundle(output, graph, wanted, partial(load_state, graph, weights=zoo.weights))
        parts = [{"device": f.name, "folder": str(f), "weights_bytes": _weights_bytes(f)} for f in folders]
        console.print(_part_table(parts))
    opt.write_json(json, {"model": model, "work": work, "stages": rows, "policies": policies, "parts": parts})


def _stage_rows(graph: "Graph", chosen: "list[Cut]", costs: list[float], sizes: dict[str, int]) -> list[dict[str, Any]]:
    from penstock.graph.cuts import divide

    sums = stage_sums(costs, [cut.position for cut in chosen])
    programs = divide(graph, chosen)
    return [
        {
            "stage": index,
            "until": chosen[index].name if index < len(chosen) else None,
            "crossing_bytes": chosen[index].num_bytes(sizes) if index < len(chosen) else None,
            "crossing": [value.name for value in chosen[index].crossing] if index < len(chosen) else [],
            "share": sums[index] / sum(sums),
            "parameter_bytes": sum(state.value.num_bytes({}) for state in program.parameters),
            "num_operations": len(program.ops),
        }
        for index, program in enumerate(programs)
    ]


def _policy_rows(
    graph: "Graph", cuts: "Cuts", stages: int, costs: list[float], sizes: dict[str, int]
) -> list[dict[str, Any]]:
    from penstock.deploy.policies import POLICIES, choose_cuts

    rows: list[dict[str, Any]] = []
    for policy in POLICIES:
        try:
            chosen = choose_cuts(graph, cuts, stages=stages, policy=policy, work=costs, sizes=sizes)
        except CutError as error:
            rows.append({"policy": policy, "error": str(error)})
            continue
        sums = stage_sums(costs, [cut.position for cut in chosen])
        rows.append(
            {
                "policy": policy,
                "cuts": [cut.name for cut in chosen],
                "largest_share": max(sums) / sum(sums),
                "speedup_at_best": sum(sums) / max(sums),
                "crossing_bytes": sum(cut.num_bytes(sizes) for cut in chosen),
            }
        )
    return rows


def _weights_bytes(folder: Path) -> int:
    return (folder / "weights.safetensors").stat().st_size


def _part_table(parts: list[dict[str, Any]]) -> Table:
    table = Table("device", "folder", "weights")
    for part in parts:
        table.add_row(part["device"], part["folder"], format_bytes(part["weights_bytes"]))
    return table


def _stage_table(rows: list[dict[str, Any]]) -> Table:
    table = Table("stage", "cut after it", "crossing", "work", "parameters", "operations")
    for row in rows:
        crossing = "" if row["crossing_bytes"] is None else format_bytes(row["crossing_bytes"])
        table.add_row(
            str(row["stage"]),
            row["until"] or "(the end)",
            crossing,
            f"{row['share']:.1%}",
            format_bytes(row["parameter_bytes"]),
            str(row["num_operations"]),
        )
    return table


def _policy_table(rows: list[dict[str, Any]]) -> Table:
    table = Table("policy", "largest stage", "speed-up at best", "crossing", Column("cuts", overflow="fold"))
    for row in rows:
        if "error" in row:
            table.add_row(row["policy"], "", "", "", row["error"])
            continue
        share, speedup = f"{row['largest_share']:.1%}", f"{row['speedup_at_best']:.2f}"
        table.add_row(row["policy"], share, speedup, format_bytes(row["crossing_bytes"]), ", ".join(row["cuts"]))
    return table
