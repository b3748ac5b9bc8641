"""When each microbatch of a finite stream is done: filling and draining included, buffers bounded.

What the executor does, played by the simulator with microbatches `m`, stages `s` and `depth` buffers on both sides of
a cut:

    compute   begins when the stage is free and m is there
    done      when it has computed, and one of its buffers is free:   sent[s][m - depth]
    sending   begins when m is done, the link is free, and the next stage has a buffer:  done[s + 1][m - depth]
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from penstock.plan.schedule.simulate import Channel, Job, Line, play


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """What a stage takes: seconds of compute for each cut set, and of its incoming link.

    `compute_s[server][cut_set]`: several servers are devices that share the stage round-robin, in the order of `order`.
    `wire_s[cut_set]` is how long a message from the stage before is on the wire, `latency_s` what it takes beside.
    """

    compute_s: tuple[tuple[float, ...], ...]
    wire_s: tuple[float, ...]
    latency_s: float = 0.0
    order: tuple[int, ...] = (0,)


def result_times(
    stages: Sequence[StageTimes], rotation: Sequence[int], num_microbatches: int, *, depth: int = 2,
    feed_s: float = 0.0, back_s: Sequence[float] = (0.0,),
) -> list[float]:  # fmt: skip
    """Return the second at which each microbatch's result is back where it was fed.

    `rotation` says which cut set each microbatch takes, `feed_s` what a feeder that holds no stage needs for each,
    `back_s[cut_set]` the way back to it.

    >>> stage = StageTimes(compute_s=((1.0,),), wire_s=(0.0,))
    >>> result_times([stage, stage], (0,), 3)
    [2.0, 3.0, 4.0]
    """
    channels = [
        Channel(
            wire_s=[stage.wire_s[cut_set] for cut_set in rotation], latency_s=stage.latency_s,
            at_receiver=depth * len(stage.compute_s),
        )
        for stage in stages
    ]  # fmt: skip
    channels[0].made = [feed_s * (microbatch + 1) for microbatch in range(num_microbatches)]
    lines = []
    for stage, source, target in zip(stages, channels, [*channels[1:], None], strict=True):
        if target is not None:
            target.at_sender = depth * len(stage.compute_s)
        jobs = [
            [Job(seconds=seconds, source=source, target=target, device=server) for seconds in own]
            for server, own in enumerate(stage.compute_s)
        ]
        period = min(math.lcm(len(stage.order), len(rotation)), num_microbatches)
        round_ = [jobs[stage.order[m % len(stage.order)]][rotation[m % len(rotation)]] for m in range(period)]
        lines.append(Line(list(islice(cycle(round_), num_microbatches)), len(stage.compute_s)))
    play(lines)
    return [end + back_s[rotation[m % len(rotation)] % len(back_s)] for m, end in enumerate(lines[-1].ends)]


def steady_s(
    stages: Sequence[StageTimes], rotation: Sequence[int], *, depth: int = 2, feed_s: float = 0.0, rounds: int = 4
) -> float:
    """Return the seconds between results once the pipeline runs full, with cut sets in rotation.

    Short queues do not absorb every difference between cut sets; this counts what is lost.
    """
    longest = max(len(stage.order) for stage in stages)
    length = max(len(rotation) * longest, 2 * len(stages) + 2)
    times = result_times(stages, rotation, rounds * length, depth=depth, feed_s=feed_s)
    half = rounds // 2 * length
    return (times[-1] - times[half - 1]) / (len(times) - half)
