"""Documents with which the driver requests jobs from workers: one type for each kind of job, decoded strictly.

Every field is checked: names must be valid, counts within bounds, ranks in the run.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.engine.job import Count, Few, Short, StagesJob
from penstock.errors import ProgramError
from penstock.group.world import Leave
from penstock.runtime.torch_settings import check_settings as check_torch_settings
from penstock.spec.fields import check_name


class RunBaseline(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="alone", forbid_unknown_fields=True):
    """A job that runs a whole model on one worker, on inputs that follow, and reports the seconds."""

    program: str
    sizes: dict[Short, Count]
    threads: Few
    num_inputs: Few
    num_microbatches: Count
    computes_on: Short = "cpu"
    torch_settings: dict[Short, bool | Short] = {}


class DoMore(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="more", forbid_unknown_fields=True):
    """An additional job of a worker, selected by `name` among those that the worker was started with."""

    name: Short
    settings: dict[str, Any]


Document = Leave | StagesJob | RunBaseline | DoMore


def write_document(document: Document) -> bytes:
    """Encode a document for `read_document`."""
    return msgspec.json.encode(document)


def read_document(data: bytes, num_ranks: int) -> Document:
    """Decode a job from the driver. Raises `ProgramError` if the job is not valid for this worker.

    >>> read_document(write_document(Leave(message="done")), num_ranks=2).message
    'done'
    """
    try:
        document: Document = msgspec.json.decode(data, type=Document)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ProgramError(
            f"a worker serves stages and runs programs; got another request ({error}); start every process with the "
            "same command"
        ) from None
    if isinstance(document, StagesJob | RunBaseline):
        check_torch_settings(document.torch_settings)
    if isinstance(document, StagesJob):
        _check_stages(document, num_ranks)
    return document


def _check_stages(document: StagesJob, num_ranks: int) -> None:
    if not document.ranks or max(document.ranks) >= num_ranks:
        raise ProgramError(
            f"a stage's rank must be below {num_ranks}, the number of processes; got "
            f"{max(document.ranks, default='no stage')}; start again"
        )
    for index, programs in document.programs.items():
        if not 0 <= index < len(document.ranks):
            raise ProgramError(
                f"a stage index of this job must be below {len(document.ranks)}; got {index}; start again"
            )
        if document.source != "bundle" and len(programs) != document.num_programs:
            raise ProgramError(
                f"stage {index} of a job must have {document.num_programs} programs; got {len(programs)}; start again"
            )
    if len(document.runtimes) not in (0, len(document.ranks)):
        raise ProgramError(
            f"expected {len(document.ranks)} runtimes, one per stage; got {len(document.runtimes)}; start again"
        )
    if len(document.device_names) != num_ranks:
        raise ProgramError(
            f"expected {num_ranks} names, one for each of {num_ranks} processes; got {len(document.device_names)}"
        )
    if document.source == "bundle":
        check_name("the device of a job", document.part, ProgramError)


def check_settings(settings: Mapping[str, Any], wanted: type[Any]) -> Any:
    """Convert the settings of a `DoMore` to a struct; raises `ProgramError`."""
    try:
        return msgspec.convert(settings, wanted)
    except msgspec.MsgspecError as error:
        raise ProgramError(
            f"a job's settings are not valid: {error}; start every process with the same command"
        ) from None
