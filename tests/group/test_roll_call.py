"""Calls for another group: who answers, who waits, who comes too late."""

import threading
import time
from collections.abc import Callable

import pytest
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from penstock.errors import RunError
from penstock.group.board import PatientStore
from penstock.group.roll_call import RollCall, await_call, read_run, wait_for_admission


def answering(store: Store, name: str, after: int = 0) -> tuple[threading.Thread, list[object]]:
    found: list[object] = []

    def answer() -> None:
        patient = PatientStore(lambda: store, 5.0)
        found.append(await_call(patient, "run", name, after))
        patient.close()

    thread = threading.Thread(target=answer)
    thread.start()
    return thread, found


def ended(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.join(10.0)
        assert not thread.is_alive()


def test_members_keep_their_order_before_newcomers() -> None:
    store = HashStore()
    roll = RollCall(store, "run")
    patient = PatientStore(lambda: store, 5.0)
    wait_for_admission(patient, "run", "new")
    wait_for_admission(patient, "run", "gone")
    assert roll.waiting() == ["new", "gone"]
    others = [answering(store, name) for name in ("c", "a", "new")]
    assert roll.call(1, ["a", "b", "c"], answer_s=1.5) == ["a", "c", "new"]
    ended(*(thread for thread, _ in others))
    assert all(found == [(1, ["a", "c", "new"])] for _, found in others)
    assert roll.waiting() == []
    patient.close()


def test_roll_call_ends_when_all_have_answered() -> None:
    store = HashStore()
    roll = RollCall(store, "run")
    thread, _ = answering(store, "a")
    began_s = time.monotonic()
    assert roll.call(1, ["a"], answer_s=30.0) == ["a"]
    assert time.monotonic() - began_s < 10.0
    ended(thread)


def test_late_process_waits_for_the_next_group() -> None:
    store = HashStore()
    roll = RollCall(store, "run")
    assert roll.call(1, ["late"], answer_s=0.1) == []
    thread, found = answering(store, "late")
    deadline = time.monotonic() + 10.0
    while not roll.waiting() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert roll.call(2, [], answer_s=5.0) == ["late"]
    ended(thread)
    assert found == [(2, ["late"])]


def test_process_that_failed_twice_is_not_admitted() -> None:
    store = HashStore()
    roll = RollCall(store, "run")
    patient = PatientStore(lambda: store, 5.0)
    wait_for_admission(patient, "run", "cut off")
    for generation in (1, 2):
        assert roll.waiting() == ["cut off"]
        roll.note_failure(roll.waiting())
        assert roll.call(generation, [], answer_s=0.1) == []
        wait_for_admission(patient, "run", "cut off")
    wait_for_admission(patient, "run", "another")
    assert roll.waiting() == ["another"]
    patient.close()


def test_end_of_the_run_is_announced_to_members() -> None:
    store = HashStore()
    roll = RollCall(store, "run")
    thread, found = answering(store, "a")
    roll.end()
    ended(thread)
    assert found == [None]
    patient = PatientStore(lambda: store, 5.0)
    with pytest.raises(RunError, match="at here is over"):
        read_run(patient, "here")
    patient.close()


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda _store: None, "at here admits no newcomers"),
        (lambda store: store.set("penstock/again", "what"), "another version"),
        (lambda store: store.set("penstock/again", '{"run": "r", "penstock": "0.0.0"}'), "penstock is 0.0.0 at here"),
    ],
)
def test_newcomer_at_another_run_is_refused(prepare: Callable[[Store], None], message: str) -> None:
    store = HashStore()
    prepare(store)
    patient = PatientStore(lambda: store, 5.0)
    with pytest.raises(RunError, match=message):
        read_run(patient, "here")
    patient.close()
