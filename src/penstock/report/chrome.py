"""One trace of all processes in the format that Perfetto and Chrome read.

Each stage is a row; `F3` is the forward of microbatch 3, `B3` its backward. An arrow goes from where a message was
sent to where it was received. https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU has the
format.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import UsageError
from penstock.tracing.record import FEEDER_STAGE
from penstock.tracing.trace import Run, Span

Event = dict[str, Any]
_PID = 1
# names of the format's own colours, by microbatch in turn
_COLORS = ("thread_state_running", "rail_response", "rail_animation", "thread_state_iowait", "rail_idle", "rail_load",
           "cq_build_passed", "startup")  # fmt: skip
# rows behind those of the stages: what the feeding process does at the same time
_FEEDING = {"load": (0, "loading"), "send": (1, "feeding"), "buffer": (1, "feeding")}
_RESULTS = (2, "results")


def chrome_trace(run: Run) -> dict[str, Any]:
    """Merge a run's traces into one document.

    Example:
        json.dumps(chrome_trace(read_run("runs/one")))

    Times are microseconds since the run's first span.
    """
    spans = [span for span in run.spans if span.kind != "between" and not _is_end(run, span)]
    origin_s = min((span.begin_s for span in spans if span.kind == "load"), default=spans[0].begin_s if spans else 0.0)
    events = [_name("process_name", 0, run.facts.model)]
    stages = sorted({span.stage for span in spans if span.stage >= 0})
    for stage in stages:
        events += _row(stage, f"stage {stage} on {_device(run, stage)}")
    for place, name in sorted({_FEEDING.get(s.kind, _RESULTS) for s in spans if s.stage == FEEDER_STAGE}):
        events += _row(len(stages) + place, name)
    events += [_slice(span, origin_s, _tid(span, len(stages))) for span in spans]
    events += _arrows(spans, origin_s, len(stages))
    for process in run.processes:
        events += [
            {"name": f"memory of {process.device}", "ph": "C", "ts": _us(c.at_s - origin_s), "pid": _PID,
             "args": {"bytes": c.value}}
            for c in process.counters
        ]  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_chrome_trace(run: Run, path: Path) -> None:
    """Write the merged trace; raises `UsageError` where the file cannot be written."""
    try:
        path.write_text(json.dumps(chrome_trace(run)), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}); choose another folder") from None


def label(span: Span) -> str:
    """Name a span as pictures of pipelines do: `F3`, or what else it is."""
    if span.kind == "compute":
        return f"{span.name}{span.microbatch}"
    return span.name if span.kind == "unit" else f"{span.kind} {span.microbatch}"


def _is_end(run: Run, span: Span) -> bool:
    """Tell whether this is word of the stream's end, which has no microbatch."""
    return run.facts.kind == "stream" and span.microbatch >= run.facts.num_microbatches


def _device(run: Run, stage: int) -> str:
    ranks = run.facts.ranks
    return run.facts.devices[ranks[stage]] if stage < len(ranks) else "its device"


def _tid(span: Span, num_stages: int) -> int:
    return span.stage if span.stage >= 0 else num_stages + _FEEDING.get(span.kind, _RESULTS)[0]


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _name(what: str, tid: int, text: str) -> Event:
    return {"name": what, "ph": "M", "pid": _PID, "tid": tid, "args": {"name": text}}


def _row(tid: int, text: str) -> list[Event]:
    order = {"name": "thread_sort_index", "ph": "M", "pid": _PID, "tid": tid, "args": {"sort_index": tid}}
    return [_name("thread_name", tid, text), order]


def _slice(span: Span, origin_s: float, tid: int) -> Event:
    event: Event = {
        "name": label(span), "cat": span.kind, "ph": "X", "ts": _us(span.begin_s - origin_s), "pid": _PID, "tid": tid,
        "dur": _us(max(0.0, span.seconds)), "args": {"microbatch": span.microbatch, "stage": span.stage},
    }  # fmt: skip
    if span.kind == "compute":
        event["cname"] = _COLORS[span.microbatch % len(_COLORS)]
        event["args"]["cpu_ms"] = round(span.cpu_s * 1e3, 3)
    if span.num_bytes:
        event["args"]["bytes"] = span.num_bytes
    return event


def _arrows(spans: Sequence[Span], origin_s: float, num_stages: int) -> Iterable[Event]:
    """Draw an arrow for each message that both sides recorded, in the order in which they were sent."""
    sent: dict[tuple[str, int, int], list[Span]] = {}
    for span in spans:
        if span.kind == "send":
            sent.setdefault((span.name, span.stage, span.microbatch), []).append(span)
    last = max((span.stage for span in spans), default=0)
    number = 0
    for span in spans:
        if span.kind != "receive":
            continue
        before = last if span.stage == FEEDER_STAGE else span.stage + (1 if span.name == "B" else -1)
        waiting = sent.get((span.name, before, span.microbatch))
        if not waiting:
            continue
        source = waiting.pop(0)
        number += 1
        common = {"name": "message", "cat": "message", "id": number, "pid": _PID}
        yield {**common, "ph": "s", "ts": _us(source.begin_s - origin_s), "tid": _tid(source, num_stages)}
        # clocks are known up to an error: an arrow never points back in time
        at = max(span.begin_s, source.begin_s)
        yield {**common, "ph": "f", "bp": "e", "ts": _us(at - origin_s), "tid": _tid(span, num_stages)}
