"""Runs made by hand and by the simulator, so that what a report says of them is known."""

from collections.abc import Callable, Sequence

from penstock.plan.schedule.schedules import Action, Schedule
from penstock.plan.schedule.simulate import simulate, uniform
from penstock.tracing.trace import Alone, Counter, MachineCapacity, ProcessTrace, Run, RunFacts, Span, StageTotals

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
    cuts = tuple(f"blocks.{place}:after" for place in range(len(schedule) - 1))
    facts = RunFacts(kind="training", model="simulated", ranks=tuple(range(len(schedule))), devices=devices, cuts=cuts)
    return Run(facts, tuple(processes))


def streamed(
    *, num: int = 40, compute_s: Sequence[float] = (ALONE_S,) * 4, alone_s: Sequence[float] | None = None,
    wire_s: float = 0.0, give_s: float = 0.0, cpu_s: Sequence[float] | None = None, load_s: float = 0.0,
    num_bytes: int = 1000, byte_s: float = 0.0, cpus: Sequence[float] | None = None,
    cpu_of: Callable[[int], float] | None = None, step_of: Callable[[int, int], tuple[float, float]] | None = None,
) -> Run:  # fmt: skip
    """A stream through one process for each stage, played by the rules of the engine: two buffers on each side.

    `step_of` gives seconds and CPU seconds of a stage's computing that differ from microbatch to microbatch.
    """
    stages, depth = len(compute_s), 2
    alone = list(alone_s or compute_s)
    cpu = list(cpu_s or compute_s)
    shares = list(cpus or [1.0] * stages)
    took = [[step_of(s, m) if step_of else (compute_s[s], cpu[s]) for m in range(num)] for s in range(stages)]
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
            end = begin + took[s][m][0]
            room = max(end, sent[s + 1][m - depth] if m >= depth and s + 1 < stages else 0.0)
            done[s][m] = room + give_s
            spans[s + 1] += [
                Span("wait", "F", s, m, free, begin),
                Span("receive", "F", s, m, begin, begin, num_bytes),
                Span("compute", "F", s, m, begin, end, 0, took[s][m][1]),
                Span("buffer", "F", s, m, end, room),
                Span("send", "F", s, m, room, done[s][m], num_bytes),
                Span("between", "", s, m, free, begin, 0, give_s * shares[s]),
            ]
        before = sent[stages][m - 1] if m else 0.0
        sent[stages][m] = max(done[-1][m], before) + wire_s
        spans[0].append(Span("wait", "F", -1, m, before, sent[stages][m]))
        spans[0].append(Span("receive", "F", -1, m, sent[stages][m], sent[stages][m], 100))
    processes = [ProcessTrace(rank=0, device="feeder", spans=tuple(spans[0]))]
    processes += [
        ProcessTrace(
            rank=s + 1, device=f"board{s}", spans=tuple(spans[s + 1]), machine=MachineCapacity(1.0, shares[s], byte_s),
            alone=(Alone(s, alone[s], alone[s] * shares[s]),),
        )
        for s in range(stages)
    ]  # fmt: skip
    totals = tuple(
        StageTotals(
            stage=s, device=f"board{s}", num_microbatches=num, compute_s=sum(t[0] for t in took[s]),
            compute_cpu_s=sum(t[1] for t in took[s]),
            cpu_s=cpu_of(s) if cpu_of else sum(t[1] + give_s * shares[s] for t in took[s]),
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


def trained(
    schedule: Schedule, *, num_steps: int = 6, stage_s: Sequence[float] | None = None, load_s: float = 0.0,
    sum_s: float = 0.0, update_s: float | Sequence[float] = 0.0, wire_s: float = 0.0, slower: float = 1.0,
) -> Run:  # fmt: skip
    """A training of so many steps that the simulator plays: forwards take a stage's seconds, backwards twice those."""
    count = len(schedule)
    seconds = list(stage_s or [ALONE_S] * count)
    updates = [update_s] * count if isinstance(update_s, float) else update_s
    kinds = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}

    def duration(action: Action, _device: int) -> float:
        return load_s if action.kind == "U" else slower * seconds[action.stage] * kinds[action.kind]

    loads_first = tuple((Action("U", -1, device), *actions) for device, actions in enumerate(schedule))
    played = simulate(loads_first, duration, lambda *_: wire_s)
    step_s = played.makespan_s + sum_s
    processes = []
    for device, spans in enumerate(played.spans):
        recorded: list[Span] = []
        for number in range(num_steps):
            at_s = number * (step_s + max(updates))
            recorded.append(Span("load", "", -1, number, at_s, at_s + load_s, step=number))
            free_s = at_s + load_s
            for span in spans[1:]:
                action, begin_s, end_s = span.action, at_s + span.begin_s, at_s + span.end_s
                name = {"I": "B"}.get(action.kind, action.kind)
                place = action.stage, action.microbatch
                source = action.stage - 1 if name == "F" else action.stage + 1
                if name != "W" and 0 <= source < count:
                    recorded.append(Span("wait", name, *place, free_s, begin_s, step=number))
                    recorded.append(Span("receive", name, *place, begin_s, begin_s, 1000, step=number))
                cpu_s = (end_s - begin_s) / slower
                recorded.append(Span("compute", action.kind, *place, begin_s, end_s, 0, cpu_s, number))
                if name != "W" and 0 <= 2 * action.stage - source < count:
                    recorded.append(Span("buffer", name, *place, end_s, end_s, step=number))
                    recorded.append(Span("send", name, *place, end_s, end_s, 1000, step=number))
                free_s = end_s
            done_s = at_s + step_s
            recorded.append(Span("synchronize", "finish", -1, number, free_s, done_s, step=number))
            recorded.append(Span("step", "", -1, number, at_s + load_s, done_s, step=number))
            recorded.append(Span("update", "", -1, number, done_s, done_s + updates[device], step=number))
        rows = tuple(Counter("rows", number * step_s, 8.0) for number in range(num_steps))
        processes.append(
            ProcessTrace(rank=device, device=f"board{device}", spans=tuple(recorded), counters=rows,
                         machine=MachineCapacity(1.0, 1.0, 0.0))
        )  # fmt: skip
    names = tuple(process.device for process in processes)
    facts = RunFacts(
        kind="training", model="trained_by_hand", ranks=tuple(range(count)), devices=names, hosts=names,
        cuts=tuple(f"blocks.{place}:after" for place in range(count - 1)), num_steps=num_steps, schedule="gpipe",
        bandwidths=(None,) * count,
    )  # fmt: skip
    return Run(facts, tuple(processes))
