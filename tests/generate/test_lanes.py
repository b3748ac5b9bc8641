"""Lanes and slots: every token is fed once, at its place, whatever comes and goes meanwhile."""

import random
from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.generate.cached_decoder import BLOCK
from penstock.generate.lanes import CHUNKS, Lanes, SequenceState, Step


def follow(step: Step, seen: dict[int, dict[int, int]]) -> None:
    """Write what a step writes, as the stages' caches hold it, and check what its rows may see."""
    assert len(set(step.rows)) == len(step.rows)
    assert step.room % BLOCK == 0
    for slot, ids, positions in zip(step.rows, step.ids, step.positions, strict=True):
        assert positions == list(range(positions[0], positions[0] + len(ids)))
        seen.setdefault(slot, {}).update(zip(positions, ids, strict=True))
    for row, sequence in step.sampled:
        assert step.rows[row] == sequence.slot
        assert sequence.fed == len(sequence.tokens)
        last = step.positions[row][step.last[-1]]
        assert last == sequence.fed - 1
        assert last < step.room
        # all that it attends to are its own tokens
        assert [seen[sequence.slot][place] for place in range(last + 1)] == sequence.tokens[: last + 1]
    assert len(step.ids[0]) in ((1,) if step.lane >= 0 else CHUNKS)


@settings(deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 70), st.integers(1, 9), st.booleans()), min_size=1, max_size=12),
    num_lanes=st.integers(1, 3), slots=st.integers(1, 3), depth=st.integers(1, 6), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_every_sequence_is_continued_to_its_end(
    lengths: list[tuple[int, int, bool]], num_lanes: int, slots: int, depth: int, seed: int
) -> None:
    choose = random.Random(seed)
    lanes = Lanes(num_lanes=num_lanes, num_used=max(1, num_lanes - 1), slots=slots)
    waiting = deque(
        (SequenceState([choose.randrange(1, 99) for _ in range(prompt)], prompt, scored=scored), prompt + new)
        for prompt, new, scored in lengths
    )
    most = {id(sequence): length for sequence, length in waiting}
    everything = [sequence for sequence, _ in waiting]
    seen: dict[int, dict[int, int]] = {}
    scored: dict[int, set[int]] = {id(sequence): set() for sequence in everything if sequence.scored}
    in_flight: deque[Step] = deque()
    stepping: set[int] = set()
    for _ in range(5000):
        while waiting and lanes.has_room and choose.random() < 0.7:
            lanes.admit(waiting.popleft()[0])
        step = lanes.next() if len(in_flight) < depth else None
        if step is not None:
            assert step.lane not in stepping
            if step.lane >= 0:
                assert len(step.rows) == slots
                stepping |= {step.lane} if step.sampled else set()
            follow(step, seen)
            in_flight.append(step)
        if in_flight and (step is None or choose.random() < 0.5):
            done = in_flight.popleft()
            stepping.discard(done.lane)
            lanes.took(done)
            if done.scored is not None:
                scored[id(done.scored)].update(done.positions[0][index] for index in done.last)
            for _, sequence in done.sampled:
                sequence.tokens.append(choose.randrange(1, 99))
                if len(sequence.tokens) == most[id(sequence)]:
                    lanes.release(sequence)
        if choose.random() < 0.02:  # the stages' caches are lost, with what is in flight
            in_flight.clear()
            stepping.clear()
            seen.clear()
            lanes.begin_again()
        if not waiting and not in_flight and not list(lanes.sequences):
            break
    assert [len(sequence.tokens) for sequence in everything] == list(most.values())
    # every token of a prompt whose log-probabilities are wanted had its logits looked at
    assert all(scored[id(each)] == set(range(each.num_prompt)) for each in everything if each.scored)


def test_chunks_and_steps_alternate() -> None:
    lanes = Lanes(num_lanes=1, num_used=1, slots=2)
    first = SequenceState([1], 1)
    lanes.admit(first)
    step = lanes.next()
    assert step is not None
    lanes.took(step)
    first.tokens.append(5)
    lanes.admit(SequenceState(list(range(100)), 100))
    kinds = []
    for _ in range(6):
        step = lanes.next()
        assert step is not None
        kinds.append(step.lane)
        lanes.took(step)
        for _, sequence in step.sampled:
            sequence.tokens.append(5)
    assert kinds == [0, -1, 0, -1, 0, -1]
