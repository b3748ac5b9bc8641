"""The account of runs whose losses are known, because they were put in."""

import math

import pytest

from penstock.errors import DataError
from penstock.report.stream_account import Account, make_account
from penstock.tracing.trace import Run
from tests.report.samples import ALONE_S, streamed


def check(run: Run) -> Account:
    """Make the account and see that it adds up, with nothing unexplained."""
    account = make_account(run)
    assert account.num_times == pytest.approx(4.0)
    assert math.isclose(account.num_times - sum(line.times for line in account.lines), account.speedup, rel_tol=1e-12)
    assert account.speedup == pytest.approx(run.facts.num_rows * account.baseline_s / run.facts.total_s)
    assert abs(account.times("remainder")) < 1e-6 * account.num_times
    assert all(line.why for line in account.lines)
    return account


def only(account: Account, *keys: str) -> None:
    """Nothing else costs anything."""
    for line in account.lines:
        assert line.key in keys or line.times == pytest.approx(0.0, abs=1e-9), line


def test_few_microbatches_cost_what_the_formula_says() -> None:
    for num in (1, 4, 40):
        account = check(streamed(num=num))
        only(account, "bubble")
        assert account.times("bubble") == pytest.approx(4 - 4 * num / (num + 3))
        assert account.largest.key == "bubble"


def test_uneven_stages_set_the_pace() -> None:
    account = check(streamed(compute_s=(0.010, 0.022, 0.004, 0.004), num=200))
    only(account, "imbalance", "bubble")
    assert account.times("imbalance") == pytest.approx(4 - 40 / 22)
    assert account.largest.why.startswith("uneven stages: board1 (stage 1) has 2.20 times")


def test_a_slow_host_is_told_from_uneven_stages() -> None:
    slow = (0.010, 0.010, 0.020, 0.010)
    account = check(streamed(compute_s=slow, cpu_s=(0.010,) * 4, cpus=(1.0, 1.0, 0.5, 1.0), num=100))
    # in units of the mean device, which has 0.875 of the others' speed
    assert account.times("imbalance") == pytest.approx(4 - 2 / 0.875)
    assert account.largest.why.startswith("slow host: board2 (stage 2) has 0.57 times the mean device's speed")


def test_a_busy_machine_computes_longer_than_alone() -> None:
    account = check(streamed(compute_s=(0.010, 0.020, 0.010, 0.010), alone_s=(0.010,) * 4, cpu_s=(0.010,) * 4, num=100))
    only(account, "slower", "bubble")
    assert account.largest.key == "slower"
    assert account.times("slower") == pytest.approx(4 * 100 / 103 - 4 * 100 / 203, rel=0.02)


def test_a_slow_link_is_not_hidden() -> None:
    account = check(streamed(wire_s=0.025, num=100))
    only(account, "communication", "bubble")
    assert account.times("communication") == pytest.approx(4 * 100 / 103 - 4 * 0.4, rel=0.05)
    assert check(streamed(wire_s=0.005, num=100)).times("communication") < 0.2  # a link that is quicker is hidden


def test_message_costs_have_a_part_per_byte() -> None:
    small = check(streamed(give_s=0.005, num=100))
    assert small.largest.key == "overhead"
    assert small.times("overhead") == pytest.approx(4 * 100 / 103 - 4 * 100 / 103 / 1.5, rel=0.02)
    large = check(streamed(give_s=0.005, num=100, num_bytes=10**6, byte_s=2e-9))  # 4 of 5 ms are for its bytes
    assert large.largest.key == "communication_cpu"
    assert large.times("communication_cpu") > large.times("overhead") > 0


def test_slow_loading_is_named() -> None:
    account = check(streamed(load_s=0.03, num=50))
    assert account.largest.key == "loading"


def test_other_threads_of_the_process_are_overhead() -> None:
    # 6 ms longer than the CPU time says, of which the process's other threads used 5
    run = streamed(compute_s=(0.016,) * 4, alone_s=(ALONE_S,) * 4, cpu_s=(ALONE_S,) * 4, num=100, cpu_of=lambda _: 1.5)
    account = check(run)
    assert account.times("overhead") > 3 * account.times("slower") > 0


def test_no_process_is_quicker_than_its_cpu_seconds() -> None:
    # the first stage computes for half of the 20 ms that its process needs; every stage waits for it
    run = streamed(load_s=0.02, num=100, cpu_of=lambda stage: 1.0 if stage else 2.0)
    account = check(run)
    assert account.largest.key == "overhead"
    assert account.times("overhead") == pytest.approx(4 * 100 / 103 - 4 * 0.5, rel=0.05)
    assert account.times("loading") < 0.05  # what waits anyway hides it
    elsewhere = check(streamed(load_s=0.02, num=100, cpu_of=lambda _: 1.0))
    assert elsewhere.largest.key == "loading"


def test_early_computing_is_charged_later() -> None:
    # half a core, 8 ms of CPU in 10 ms: in the long run they take 16, as alone
    account = check(
        streamed(load_s=0.016, num=100, alone_s=(0.016,) * 4, cpu_s=(0.008,) * 4, cpus=(0.5,) * 4, cpu_of=lambda _: 0.8)
    )
    # the pace is 16 ms, and the first microbatch comes through in 10 for each stage
    assert account.times("slower") == pytest.approx(4 * 100 / 103 - 6.4 / (99 * 0.016 + 4 * 0.010))
    assert account.times("bubble") == pytest.approx(4 - 4 * 100 / 103)


def test_one_busy_stretch_is_charged_once() -> None:
    # half a core: 8 ms of CPU come in 10 ms after a wait, and take 16 without one
    def step(stage: int, microbatch: int) -> tuple[float, float]:
        if microbatch < 100:
            return (0.016, 0.008) if stage == 0 else (0.010, 0.008)  # the first stage sets the pace
        return (0.020, 0.010) if stage == 3 else (0.010, 0.008)  # then the last one, and the first waits for room

    run = streamed(num=200, alone_s=(0.016,) * 4, cpus=(0.5,) * 4, step_of=step)
    account = check(run)
    only(account, "bubble", "slower")
    assert account.speedup == pytest.approx(200 * 0.064 / (100 * 0.016 + 100 * 0.020), rel=0.03)


def test_incomplete_trace_is_refused() -> None:
    run = streamed(num=3)
    with pytest.raises(DataError):
        make_account(Run(run.facts, run.processes[:1]))
    with pytest.raises(DataError, match="trace of stage 3 is missing"):
        make_account(Run(run.facts, run.processes[:-1]))
