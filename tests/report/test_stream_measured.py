"""What a process needs behind a step, and where its waits have paid it."""

from collections.abc import Sequence

import pytest

from penstock.report.stream_measured import (
    Backlog,
    MeasuredStage,
    MicrobatchTimes,
    backlog_in_waits,
    other_threads_cpu_s,
)
from penstock.tracing.trace import MachineCapacity


def stage_of(
    rows: Sequence[tuple[float, float, float, float]], *, index: int = 0, others_cpu_s: float = 0.0,
    load_cpu_s: float = 0.0,
) -> MeasuredStage:  # fmt: skip
    """A stage on half a core; each row is a wait for the message, computing, its CPU seconds, a wait for room."""
    steps, now_s = [], 0.0
    for number, (wait_s, compute_s, cpu_s, buffer_s) in enumerate(rows):
        end_s = now_s + wait_s + compute_s + buffer_s
        steps.append(
            MicrobatchTimes(microbatch=number, asked_s=now_s, arrived_s=now_s + wait_s, end_s=end_s, read_s=0.0,
                 compute_s=compute_s, cpu_s=cpu_s, buffer_s=buffer_s, give_s=0.0, gap_s=0.0, between_cpu_s=0.0,
                 num_bytes_in=0, num_bytes_out=0)
        )  # fmt: skip
        now_s = end_s
    own_cpu_s = sum(row[2] for row in rows) / len(rows)
    return MeasuredStage(
        index=index, rank=0, device="board0", steps=tuple(steps), alone_s=0.0, machine=MachineCapacity(cpus=0.5),
        cpu_s=own_cpu_s + others_cpu_s, load_cpu_s=load_cpu_s,
    )  # fmt: skip


def text(backlog: Sequence[Backlog]) -> str:
    """Write what is backlog behind each step: early, others, loading."""
    return " ".join("/".join(f"{value:g}" for value in (o.early_s, o.others_s, o.load_s)) for o in backlog)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        # early by 4 s each: the next wait pays, as far as it goes; the wait before the first one is none
        ([(9, 4, 4, 0), (4, 4, 4, 0), (1, 4, 4, 0)], "4/0/0 1/0/0 0/0/0"),
        # what one wait has left owing is paid by a later one
        ([(0, 4, 4, 0), (1, 4, 4, 0), (9, 4, 4, 0)], "1/0/0 7/0/0 0/0/0"),
        # or by a step that is held up: no wait pays it again
        ([(0, 4, 4, 0), (0, 12, 4, 0), (9, 8, 4, 0)], "0/0/0 0/0/0 0/0/0"),
        # who was held up for longer has nothing to his credit
        ([(0, 20, 4, 0), (0, 4, 4, 0), (9, 4, 4, 0)], "0/0/0 4/0/0 0/0/0"),
        # a wait for room pays too, behind the step that waited
        ([(0, 4, 4, 3), (9, 4, 4, 0)], "4/0/0 0/0/0"),
    ],
)
def test_waits_pay_what_a_step_lacks(rows: list[tuple[float, float, float, float]], expected: str) -> None:
    assert text(backlog_in_waits([stage_of(rows)], threads=1)[0]) == expected


def test_other_threads_come_behind_computing_and_before_loading() -> None:
    stage = stage_of([(0, 6, 4, 0), (9, 8, 4, 0), (9, 8, 4, 0)], others_cpu_s=1.5, load_cpu_s=1.0)
    assert other_threads_cpu_s([stage]) == pytest.approx(1.5)
    assert text(backlog_in_waits([stage], threads=1)[0]) == "2/3/2 0/3/2 0/0/0"
    # with several threads the computing thread's CPU seconds do not say whether it was early
    assert text(backlog_in_waits([stage], threads=2)[0]) == "0/5/2 0/3/2 0/0/0"


def test_stages_of_one_process_share_what_is_owed() -> None:
    first, second = (stage_of([(0, 8, 4, 0), (9, 8, 4, 0)], index=index, others_cpu_s=5.0) for index in (0, 1))
    # both stages' CPU seconds are their process's: 9 for each microbatch, of which 1 is no stage's
    backlog = backlog_in_waits([first, second], threads=1)
    assert other_threads_cpu_s([first, second]) == pytest.approx(0.5)
    assert text(backlog[0]) == "0/0/0 0/1/0"
    assert text(backlog[1]) == "0/2/0 0/0/0"
