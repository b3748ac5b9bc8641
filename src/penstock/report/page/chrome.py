"""A merged trace of all processes in the format of Perfetto and Chrome.

Each stage is a row; `F3` is the forward of microbatch 3, `B3` its backward. An arrow connects the sending and the
receiving of a message. Specification: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import UsageError
from penstock.files import write_whole
from penstock.tracing.record import FEEDER_STAGE
from penstock.tracing.trace import Run, Span

Event = dict[str, Any]
_PID = 1
# colour names of the format, used round-robin for microbatches
_COLORS = ("thread_state_running", "rail_response", "rail_animation", "thread_state_iowait", "rail_idle", "rail_load",
           "cq_build_passed", "startup")  # fmt: skip
# rows after the stages' rows: concurrent activities of the driver
_FEEDING = {"load": (0, "loading"), "send": (1, "feeding"), "buffer": (1, "feeding")}
_RESULTS = (2, "results")


def chrome_trace(run: Run) -> dict[str, Any]:
    """Merge a run's traces into one document.

    Example:
        json.dumps(chrome_trace(read_run("runs/one")))

    Times are microseconds since the run's first span.
    """
    spans = sorted(
        (
            (process.rank, span)
            for process in run.processes
            for span in process.spans
            if span.kind != "between" and not _is_end(run, span)
        ),
        key=lambda item: item[1].begin_s,
    )
    first_s = spans[0][1].begin_s if spans else 0.0
    origin_s = min((span.begin_s for _, span in spans if span.kind == "load"), default=first_s)
    rows = _SpanRows(run)
    slices = [_slice(span, origin_s, rows.tid(rank, span)) for rank, span in spans]
    events = [_name("process_name", 0, run.facts.model)]
    for tid in sorted({event["tid"] for event in slices}):
        order = {"name": "thread_sort_index", "ph": "M", "pid": _PID, "tid": tid, "args": {"sort_index": tid}}
        events += [_name("thread_name", tid, rows.names[tid]), order]
    events += slices
    events += _arrows(spans, origin_s, rows)
    for process in run.processes:
        events += [
            {
                "name": f"memory of {process.device}",
                "ph": "C",
                "ts": _us(c.at_s - origin_s),
                "pid": _PID,
                "args": {"bytes": c.value},
            }
            for c in process.counters
            if c.name == "memory_bytes"
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_chrome_trace(run: Run, path: Path) -> None:
    """Write the merged trace; raises `UsageError` if the file cannot be written."""
    try:
        write_whole(path, json.dumps(chrome_trace(run)))
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}); choose another folder") from None


def label(span: Span) -> str:
    """Return a span's label as in pipeline diagrams, such as `F3`, or its kind."""
    if span.kind == "compute":
        return f"{span.name}{span.microbatch}"
    if span.kind in {"unit", "profile"}:
        return span.name
    return f"{'sum' if span.name == 'sum' else span.kind} {span.microbatch}"


def _is_end(run: Run, span: Span) -> bool:
    """Return True if this is the END message of the stream, which has no microbatch."""
    return run.facts.kind == "stream" and span.microbatch >= run.facts.num_microbatches


class _SpanRows:
    """Rows of spans: one per stage, then rows for other activities of the processes."""

    def __init__(self, run: Run) -> None:
        facts = run.facts
        num_stages = len(facts.cuts) + 1 if facts.kind == "training" else len(facts.ranks)
        found = {(p.rank, s.stage) for p in run.processes for s in p.spans if s.stage >= 0}
        # a stage's replicas are on adjacent rows
        held = sorted(found, key=lambda item: (_replica(facts.ranks, item[0], num_stages), item[1]))
        self.names = {tid: f"stage {stage} on {facts.devices[rank]}" for tid, (rank, stage) in enumerate(held)}
        self._stages = {key: tid for tid, key in enumerate(held)}
        self._routes, self._turns = facts.routes, facts.turns
        self._ranks = [process.rank for process in run.processes]
        self._trains = facts.kind == "training"
        self.pipelines = {
            process.rank: _replica(facts.ranks, process.rank, num_stages) if self._trains else 0
            for process in run.processes
        }
        if self._trains:
            for place, process in enumerate(run.processes):
                self.names[len(held) + 2 * place] = f"steps of {process.device}"
                self.names[len(held) + 2 * place + 1] = f"gradients of {process.device}"
        else:
            self.names |= {len(held) + place: name for place, name in {*_FEEDING.values(), _RESULTS}}

    def before(self, span: Span, last: int) -> int:
        """Return the sending stage of a received message; `last` is the last stage, in training."""
        if self._trains:
            return last if span.stage == FEEDER_STAGE else span.stage + (1 if span.name == "B" else -1)
        route = self._routes[self._turns[span.microbatch % len(self._turns)]]
        if span.stage == FEEDER_STAGE:
            return route.stop - 1
        return span.stage - 1 if span.stage > route.start else FEEDER_STAGE

    def tid(self, rank: int, span: Span) -> int:
        """Return the number of the row."""
        if span.stage >= 0:
            return self._stages[rank, span.stage]
        if self._trains:
            return len(self._stages) + 2 * self._ranks.index(rank) + (span.name == "sum")
        return len(self._stages) + _FEEDING.get(span.kind, _RESULTS)[0]


def _replica(ranks: Sequence[int], rank: int, num_stages: int) -> int:
    return ranks.index(rank) // num_stages if rank in ranks else 0


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _name(what: str, tid: int, text: str) -> Event:
    return {"name": what, "ph": "M", "pid": _PID, "tid": tid, "args": {"name": text}}


def _slice(span: Span, origin_s: float, tid: int) -> Event:
    event: Event = {
        "name": label(span),
        "cat": span.kind,
        "ph": "X",
        "ts": _us(span.begin_s - origin_s),
        "pid": _PID,
        "tid": tid,
        "dur": _us(max(0.0, span.seconds)),
        "args": {"microbatch": span.microbatch, "stage": span.stage},
    }
    if span.kind == "compute":
        event["cname"] = _COLORS[span.microbatch % len(_COLORS)]
        event["args"]["cpu_ms"] = round(span.cpu_s * 1e3, 3)
    if span.detail:
        event["args"]["shapes"] = span.detail
    if span.num_bytes:
        event["args"]["bytes"] = span.num_bytes
    return event


def _arrows(spans: Sequence[tuple[int, Span]], origin_s: float, rows: _SpanRows) -> Iterable[Event]:
    """Draw an arrow for each message that both sides recorded, in the order in which they were sent."""
    sent: dict[tuple[int, int, str, int, int], list[tuple[int, Span]]] = {}
    for rank, span in spans:
        if span.kind == "send":
            key = rows.pipelines[rank], span.step, span.name, span.stage, span.microbatch
            sent.setdefault(key, []).append((rank, span))
    last = max((span.stage for _, span in spans), default=0)
    number = 0
    for rank, span in spans:
        if span.kind != "receive":
            continue
        before = rows.before(span, last)
        waiting = sent.get((rows.pipelines[rank], span.step, span.name, before, span.microbatch))
        if not waiting:
            continue
        source_rank, source = waiting.pop(0)
        number += 1
        common = {"name": "message", "cat": "message", "id": number, "pid": _PID}
        yield {**common, "ph": "s", "ts": _us(source.begin_s - origin_s), "tid": rows.tid(source_rank, source)}
        # clock offsets have an error: make sure that an arrow never points back in time
        at = max(span.begin_s, source.begin_s)
        yield {**common, "ph": "f", "bp": "e", "ts": _us(at - origin_s), "tid": rows.tid(rank, span)}
