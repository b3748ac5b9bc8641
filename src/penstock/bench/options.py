"""Options of `penstock bench`."""

from typing import Annotated

import msgspec
from msgspec import Meta


class BenchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a benchmark; a field with a description is an option of `penstock bench`."""

    num_images: Annotated[int, Meta(ge=1, description="Images per pass.")] = 500
    serial_images: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="Images of the serial run. Default: as many as per pass.")
    ] = None
    passes: Annotated[int, Meta(ge=1, description="Counted passes per row, 5 in the full protocol.")] = 1
    microbatch_size: int = 1
    depth: Annotated[int, Meta(ge=1, description="Microbatches that may wait at a cut.")] = 2
    seed: int = 0
    threads: int | None = None
    device: str = "cpu"
    runtime: str = "eager"
    trace: bool = False
