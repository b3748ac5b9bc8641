"""Runs made by hand and by the simulator, so that what a report says of them is known."""

from collections.abc import Callable, Sequence

from penstock.plan.schedule import Schedule
from penstock.plan.simulate import simulate, uniform
from penstock.tracing.trace import Alone, Machine, ProcessTrace, Run, RunFacts, Span, StageTotals

ALONE_S = 0.010


def simulated(schedule: Schedule) -> Run:
    """What tracing a schedule's simulation would leave: one process for each stage, ticks of a second."""
    played = simulate(schedule, uniform(), num_buffers=None)
    processes = []
    for device, spans in enumerate(played.spans):
        recorded = []
        for span in spans:
            action = span.action
            recorded.append(Span("compute", action.kind, action.stage, action.microbatch, span.begin_s, span.end_s))
            for kind in ("send", "receive"):
                at = span.end_s if kind == "send" else span.begin_s
                recorded.append(Span(kind, action.kind, action.stage, action.microbatch, at, at, 100))
        processes.append(ProcessTrace(rank=device, device=f"board{device}", spans=tuple(recorded)))
    devices = tuple(process.device for process in processes)
    facts = RunFacts(kind="training", model="simulated", ranks=tuple(range(len(schedule))), devices=devices)
    return Run(facts, tuple(processes))


def streamed(
    *, num: int = 40, compute_s: Sequence[float] = (ALONE_S,) * 4, alone_s: Sequence[float] | None = None,
    wire_s: float = 0.0, give_s: float = 0.0, cpu_s: Sequence[float] | None = None, load_s: float = 0.0,
    num_bytes: int = 1000, byte_s: float = 0.0, cpus: Sequence[float] | None = None,
    cpu_of: Callable[[int], float] | None = None,
) -> Run:  # fmt: skip
    """A stream through one process for each stage, played by the rules of the engine: two buffers on each side."""
    stages, depth = len(compute_s), 2
    alone = list(alone_s or compute_s)
    cpu = list(cpu_s or compute_s)
    shares = list(cpus or [1.0] * stages)
    done = [[0.0] * num for _ in range(stages)]
    sent = [[0.0] * num for _ in range(stages + 1)]
    spans: list[list[Span]] = [[] for _ in range(stages + 1)]
    for m in range(num):
        loaded = load_s * (m + 1)
        spans[0].append(Span("load", "", -1, m, load_s * m, loaded))
        for s in range(stages):
            made = done[s - 1][m] if s else loaded
            held = done[s][m - depth] if m >= depth else 0.0
            sent[s][m] = max(made, sent[s][m - 1] if m else 0.0, held) + wire_s
            free = done[s][m - 1] if m else 0.0
            begin = max(sent[s][m], free)
            end = begin + compute_s[s]
            room = max(end, sent[s + 1][m - depth] if m >= depth and s + 1 < stages else 0.0)
            done[s][m] = room + give_s
            spans[s + 1] += [
                Span("wait", "F", s, m, free, begin), Span("receive", "F", s, m, begin, begin, num_bytes),
                Span("compute", "F", s, m, begin, end, 0, cpu[s]), Span("buffer", "F", s, m, end, room),
                Span("send", "F", s, m, room, done[s][m], num_bytes),
                Span("between", "", s, m, free, begin, 0, give_s * shares[s]),
            ]  # fmt: skip
        before = sent[stages][m - 1] if m else 0.0
        sent[stages][m] = max(done[-1][m], before) + wire_s
        spans[0].append(Span("wait", "F", -1, m, before, sent[stages][m]))
        spans[0].append(Span("receive", "F", -1, m, sent[stages][m], sent[stages][m], 100))
    processes = [ProcessTrace(rank=0, device="feeder", spans=tuple(spans[0]))]
    processes += [
        ProcessTrace(
            rank=s + 1, device=f"board{s}", spans=tuple(spans[s + 1]), machine=Machine(1.0, shares[s], byte_s),
            alone=(Alone(s, alone[s], alone[s] * shares[s]),),
        )
        for s in range(stages)
    ]  # fmt: skip
    totals = tuple(
        StageTotals(
            stage=s, device=f"board{s}", num_microbatches=num, compute_s=compute_s[s] * num,
            compute_cpu_s=cpu[s] * num, cpu_s=cpu_of(s) if cpu_of else (cpu[s] + give_s * shares[s]) * num,
            wait_s=0.0, send_s=0.0,
        )
        for s in range(stages)
    )  # fmt: skip
    facts = RunFacts(
        kind="stream", model="made_by_hand_with_a_name_that_is_too_long_for_the_width_of_a_phone",
        ranks=tuple(range(1, stages + 1)),
        devices=("feeder", *(f"board{s}" for s in range(stages))),
        cuts=tuple(f"blocks.{s}:after" for s in range(stages - 1)),
        hosts=("feeder", *(f"board{s}" for s in range(stages))), bandwidths=(None,) * (stages + 1),
        num_microbatches=num, num_rows=num, total_s=sent[stages][-1], results_s=tuple(sent[stages]), stages=totals,
        units=tuple((f"blocks.{u // 3 - 1}:after" if u % 3 == 0 and u else f"unit{u}" if u else "input", 1.0, 1000.0)
                    for u in range(3 * stages)),
    )  # fmt: skip
    return Run(facts, tuple(processes))
