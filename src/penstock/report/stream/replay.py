"""Play a recorded run again with other costs: what would the same work in the same order have taken?

A device does its jobs in order. For each it waits until its message is there, computes, waits for a free buffer and
passes the result on. A cut holds `depth` messages at the sender and as many at the receiver, as the engine's do:

    sent[k]   once it is made, the one before it is over, and the receiver has passed on message k - depth
    done[k]   not before message k - depth has been sent
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.errors import DataError
from penstock.plan.schedule.simulate import Channel, Edge, Job, Line, play


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What a stage did with a microbatch, as a sum of parts by name, so that parts can be left out; seconds.

    `after` is what the device needs before its next job, while nobody waits for it; it goes on while the device waits
    for a free buffer.
    """

    source: Edge | None
    target: Edge
    parts: Mapping[str, float]
    after: Mapping[str, float] = field(default_factory=dict)

    def job(self, counted: frozenset[str], channels: Mapping[Edge, Channel]) -> Job:
        """Return this for the simulator, with the parts that count."""
        return Job(
            seconds=_sum(self.parts, counted), after_s=_sum(self.after, counted),
            source=channels[self.source] if self.source is not None else None, target=channels[self.target],
        )  # fmt: skip


def _sum(parts: Mapping[str, float], counted: frozenset[str]) -> float:
    return sum(value for name, value in parts.items() if name in counted)


def replay(
    devices: Sequence[Sequence[Recorded]], counted: frozenset[str], wires: Mapping[Edge, Sequence[float]], *, depth: int
) -> float:
    """Play what every device did with the parts that are counted; return the seconds in all.

    `wires[edge][k]` is how long message `k` is under way; none where an edge is missing.

    Example:
        seconds = replay(devices, frozenset({"compute"}), {}, depth=2)

    Raises `DataError` where the devices wait for each other, as those of no real run do.
    """
    channels: dict[Edge, Channel] = {}
    for done in (done for own in devices for done in own):
        for edge in (done.source, done.target):
            if edge is not None and edge not in channels:
                channels[edge] = Channel(wire_s=wires.get(edge) or (0.0,))
                # neither what the feeding process loads nor what it takes back waits for a buffer of its own
                if edge[0] >= 0:
                    channels[edge].at_sender = depth
                if edge[1] >= 0:
                    channels[edge].at_receiver = depth
    lines = [Line([done.job(counted, channels) for done in own]) for own in devices]
    if not play(lines):
        raise DataError("the trace is of no whole run: some messages were never sent; run it again with --trace")
    ends = [line.ends[-1] for line in lines if line.ends]
    # results go back to the feeding process
    ends += [channel.sent_s(len(channel.made) - 1) or 0.0 for edge, channel in channels.items() if edge[1] < 0]
    return max(ends, default=0.0)
