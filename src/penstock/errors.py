"""Every error that Penstock raises on purpose; the tree below is the whole list.

    PenstockError
    ├── UsageError            an impossible request of the caller: wrong value, wrong name
    │   ├── CaptureError      the model cannot be captured as one graph
    │   ├── CutError          a cut that does not exist or is not allowed, or more stages than cuts
    │   ├── ModelError        a model, its source or its weights cannot be loaded
    │   ├── DataError         a data set, an image or a text cannot be read
    │   ├── ClusterError      a cluster or lab file is invalid, or demands more than this machine supports
    │   ├── ProfileError      a profile cannot be read or is inconsistent
    │   └── CacheError        a cache on disk cannot be used, or belongs to another run; training continues without it
    ├── PlanError             no plan satisfies the limits, or a plan contradicts itself or its inputs
    ├── ProgramError          a stage program or bundle is damaged, forged or belongs to another plan
    └── RunError              something failed while running
        ├── TransportError    a message was lost, repeated, damaged or out of order
        │   └── ConnectionBroken   a connection broke; another process may know the reason
        ├── DeviceLost        a process or machine stopped answering
        └── OutOfMemory       a process needed more memory than its machine or its limit has

Each message is one line: the rule, the values, the next step. The command line prints the message and exits with status
2 for a `UsageError` and 1 for the others.
"""

import contextlib
from collections.abc import Iterator

# quoted text may be from an untrusted file
_LONGEST = 1500


class PenstockError(Exception):
    """Base of every error raised on purpose."""

    everywhere = False  # True if every process raises it

    def __str__(self) -> str:
        """Return the message in one line, with unprintable characters of quoted text escaped."""
        text = super().__str__()
        text = text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 2 :]}"
        return text if text.isprintable() else "".join(map(_printable, text))


def _printable(character: str) -> str:
    """Escape characters that would end the line, move the cursor or change the direction of writing."""
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")


class UsageError(PenstockError):
    """An impossible request of the caller."""


class CaptureError(UsageError):
    """The model cannot be captured as one graph."""


class CutError(UsageError):
    """A cut does not exist, is not allowed, or there are more stages than cuts."""


class ModelError(UsageError):
    """A model, its source or its weights cannot be loaded."""


class DataError(UsageError):
    """A data set, an image or a text cannot be read."""


class ClusterError(UsageError):
    """A cluster or lab file is invalid, or demands more than this machine supports."""


class ProfileError(UsageError):
    """A profile cannot be read or is inconsistent."""


class CacheError(UsageError):
    """A cache on disk cannot be used, or belongs to another run; training continues without it."""


class PlanError(PenstockError):
    """No plan satisfies the limits, or a plan contradicts itself or its inputs."""


class ProgramError(PenstockError):
    """A stage program or bundle is damaged, forged or belongs to another plan."""


class RunError(PenstockError):
    """Something failed while running."""


class TransportError(RunError):
    """A message was lost, repeated, damaged or out of order."""


class ConnectionBroken(TransportError):  # noqa: N818 -- what happened is that it broke
    """A connection broke; another process may know the reason."""


class OutOfMemory(RunError):  # noqa: N818 -- what happened is that it ran out
    """A process needed more memory than its machine or its limit has."""


class DeviceLost(RunError):  # noqa: N818 -- what happened is that it was lost
    """A process or machine stopped answering."""


@contextlib.contextmanager
def everywhere() -> Iterator[None]:
    """Mark errors that every process raises, of a block or of a decorated function, so that none has to report them."""
    try:
        yield
    except PenstockError as error:
        error.everywhere = True
        raise


def exclude(option: str, given: object, reason: str) -> None:
    """Raise `UsageError` if an option is given that others exclude, with the reason.

    Example:
        exclude("runtime", runtime != EAGER, "a plan determines the runtime of its stages")
    """
    if given:
        raise UsageError(f"{reason}; leave {option} out")
