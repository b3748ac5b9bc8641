"""Every error that Penstock raises on purpose; the tree below is the whole list.

    PenstockError
    ├── UsageError            the caller asked for something that cannot be: wrong value, wrong name
    │   ├── CaptureError      the model cannot be captured as one graph
    │   ├── CutError          a cut that does not exist or is not allowed, or more stages than cuts
    │   ├── ModelError        a model name, its source or its weights cannot be had
    │   ├── DataError         a data set, an image or a text cannot be read
    │   ├── ClusterError      a cluster or lab file, or what it asks of this machine
    │   ├── ProfileError      a profile cannot be read or does not fit together
    │   └── CacheError        a cache on disk cannot be had, or is another's; training goes on without one
    ├── PlanError             no plan satisfies the limits, or a plan contradicts itself or what it is used with
    ├── ProgramError          a stage program or bundle is damaged, forged or of another plan
    └── RunError              something failed while running
        ├── TransportError    a message was lost, repeated, damaged or out of order
        │   └── ConnectionBroken   a connection is gone; why is known elsewhere, if at all
        ├── DeviceLost        a process or machine stopped answering
        └── OutOfMemory       a process needed more memory than its machine or its limit gives

Each message is one line: the rule, the values, the next step. The command line prints the message
and ends with status 2 for a `UsageError` and 1 for the others.
"""

# what a message quotes may come from a stranger's file
_LONGEST = 1500


class PenstockError(Exception):
    """Base of every error raised on purpose."""

    def __str__(self) -> str:
        """Return the message in one line that a terminal shows as it is, whatever it quotes."""
        text = super().__str__()
        text = text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 2 :]}"
        return text if text.isprintable() else "".join(map(_printable, text))


def _printable(character: str) -> str:
    """Escape what would end the line, move the cursor or turn the direction of writing."""
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")


class UsageError(PenstockError):
    """The caller asked for something that cannot be."""


class CaptureError(UsageError):
    """The model cannot be captured as one graph."""


class CutError(UsageError):
    """A cut does not exist, is not allowed, or there are more stages than cuts."""


class ModelError(UsageError):
    """A model name, its source or its weights cannot be had."""


class DataError(UsageError):
    """A data set, an image or a text cannot be read."""


class ClusterError(UsageError):
    """A cluster or lab file is wrong, or asks what this machine cannot do."""


class ProfileError(UsageError):
    """A profile cannot be read or does not fit together."""


class CacheError(UsageError):
    """A cache on disk cannot be had, or is another's; training goes on without one."""


class PlanError(PenstockError):
    """No plan satisfies the limits, or a plan contradicts itself or what it is used with."""


class ProgramError(PenstockError):
    """A stage program or bundle is damaged, forged or belongs to another plan."""


class RunError(PenstockError):
    """Something failed while running."""


class TransportError(RunError):
    """A message was lost, repeated, damaged or out of order."""


class ConnectionBroken(TransportError):  # noqa: N818 -- what happened is that it broke
    """A connection is gone; why is known elsewhere, if at all."""


class OutOfMemory(RunError):  # noqa: N818 -- what happened is that it ran out
    """A process needed more memory than its machine or its limit gives."""


class DeviceLost(RunError):  # noqa: N818 -- what happened is that it was lost
    """A process or machine stopped answering."""
