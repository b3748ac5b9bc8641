"""What the process that feeds asks of the others: one document for each kind of job, read strictly.

Nothing that a document says is taken at its word: names are names, counts have bounds, ranks are those of the run.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.errors import ProgramError
from penstock.group.world import Leave
from penstock.runtime.registry import RuntimeChoice
from penstock.runtime.torch_settings import check_settings as check_torch_settings
from penstock.spec.fields import check_name

Count = Annotated[int, Meta(ge=1, le=2**31)]
Few = Annotated[int, Meta(ge=1, le=4096)]
Number = Annotated[int, Meta(ge=0, le=2**31)]
Rank = Annotated[int, Meta(ge=0, le=2**20)]
Short = Annotated[str, Meta(max_length=256)]


class Rotation(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Ranks that share a stage, and the order in which microbatches meet them."""

    ranks: tuple[Rank, ...]
    order: tuple[Number, ...]


class ServeStages(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="stages", forbid_unknown_fields=True
):
    """Serve stages until they are closed; see `StagesJob`.

    `source` says where programs' tensors come from: they follow, they lie in `device`'s part of the bundle of `plan`,
    or the process has the modules. `programs` are texts by stage, one for each cut set, in the `order` of their turns.
    """

    source: Literal["weights", "bundle", "modules"]
    number: Number
    ranks: tuple[Rotation, ...]
    sizes: dict[Short, Count]
    depth: Few
    threads: Few
    device_names: tuple[str, ...]
    programs: dict[int, list[str]]
    order: tuple[Number, ...]
    plan: Short = ""
    device: Short = ""
    computes_on: Short = "cpu"
    runtimes: tuple[RuntimeChoice, ...] = ()
    trace: bool = False
    trace_units: bool = False
    trace_profile: bool = False
    torch_settings: dict[Short, bool | Short] = {}
    compare: bool = False  # say first which tensors are here from before


class RunBaseline(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="alone", forbid_unknown_fields=True):
    """Run a whole model by yourself on inputs that follow, and say how long it took."""

    program: str
    sizes: dict[Short, Count]
    threads: Few
    num_inputs: Few
    num_microbatches: Count
    computes_on: Short = "cpu"
    torch_settings: dict[Short, bool | Short] = {}


class DoMore(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="more", forbid_unknown_fields=True):
    """Do what this process was started for beside these; `name` says which of it."""

    name: Short
    settings: dict[str, Any]


Document = Leave | ServeStages | RunBaseline | DoMore


def write_document(document: Document) -> bytes:
    """Write a document for `read_document`."""
    return msgspec.json.encode(document)


def read_document(data: bytes, num_ranks: int) -> Document:
    """Read what the process that feeds asks; raises `ProgramError` where that is nothing this one could do.

    >>> read_document(write_document(Leave(message="done")), num_ranks=2).message
    'done'
    """
    try:
        document: Document = msgspec.json.decode(data, type=Document)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ProgramError(
            f"a worker serves stages and runs programs, but was asked for something else ({error}); start every "
            "process with the same command"
        ) from None
    if isinstance(document, ServeStages | RunBaseline):
        check_torch_settings(document.torch_settings)
    if isinstance(document, ServeStages):
        _check_stages(document, num_ranks)
    return document


def _check_stages(document: ServeStages, num_ranks: int) -> None:
    for rotation in document.ranks:
        _check_order("the ranks of a stage", rotation.order, len(rotation.ranks))
        if max(rotation.ranks) >= num_ranks:
            raise ProgramError(
                f"a stage runs on the run's {num_ranks} processes, not on rank {max(rotation.ranks)}; start again"
            )
    for index, programs in document.programs.items():
        if not 0 <= index < len(document.ranks):
            raise ProgramError(f"a job of {len(document.ranks)} stages has no stage {index}; start again")
        if document.source != "bundle":
            _check_order(f"the programs of stage {index}", document.order, len(programs))
    if len(document.runtimes) not in (0, len(document.ranks)):
        raise ProgramError(
            f"a job of {len(document.ranks)} stages has not {len(document.runtimes)} runtimes; start again"
        )
    if len(document.device_names) != num_ranks:
        raise ProgramError(f"{num_ranks} processes have {num_ranks} names, not {len(document.device_names)}")
    if document.source == "bundle":
        check_name("the device of a job", document.device, ProgramError)


def _check_order(what: str, order: tuple[int, ...], count: int) -> None:
    if not order or not count or max(order) >= count:
        raise ProgramError(
            f"{what} take turns among {count}, but an order names {max(order, default='none')}; start again"
        )


def check_settings(settings: Mapping[str, Any], wanted: type[Any]) -> Any:
    """Read the settings of a `DoMore` as a struct; raises `ProgramError`."""
    try:
        return msgspec.convert(settings, wanted)
    except msgspec.MsgspecError as error:
        raise ProgramError(f"a job's settings do not fit: {error}; start every process with the same command") from None
