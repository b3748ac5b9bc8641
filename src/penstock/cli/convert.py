"""`penstock convert`: a PyTorch checkpoint to safetensors."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.options import JsonFile, Written, write_json
from penstock.terminal.progress import working
from penstock.text import counted, say
from penstock.units import format_bytes


def convert(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FILE.pth", help="Checkpoint of torch.save, or a folder of torch.distributed.checkpoint."
        ),
    ],
    output: Annotated[Path, Written(), typer.Option("--output", "-o", help="Safetensors file to write.")],
    key: Annotated[
        str | None, typer.Option(metavar="NAME", help="Entry with the weights. Default: averaged weights, else others.")
    ] = None,
    json: JsonFile = None,
) -> None:
    """Convert a checkpoint to safetensors with the model's own names."""
    from penstock.zoo.weights.convert import convert_checkpoint

    with working(f"converting {source}"):
        converted = convert_checkpoint(source, output, key)
    say(f"{output}: {counted(converted.num_tensors, 'tensor')}, {format_bytes(converted.num_bytes)}")
    if converted.others:
        say(f"from {converted.key}, not from {' or '.join(converted.others)}; --key chooses another")
    if converted.dropped:
        say(f"left out, not tensors: {', '.join(converted.dropped)}")
    write_json(json, converted)
