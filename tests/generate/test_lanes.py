"""Lanes and slots: every token is fed once, at its place, whatever comes and goes meanwhile."""

import random
from collections import deque
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from penstock.generate.cached_decoder import BLOCK, chunk_sizes
from penstock.generate.lanes import Guesser, Lanes, SequenceState, Step


class Guesses(Guesser):
    """Guesses of any quality."""

    def __init__(self, choose: random.Random, right: float) -> None:
        super().__init__(())
        self._choose, self._right = choose, right

    def guess(self, _guessed: Sequence[int]) -> int | None:
        return self._choose.randrange(1, 4) if self._choose.random() < self._right else None


# tokens by position, by slot
Seen = dict[int, dict[int, int]]


def follow(step: Step, seen: Seen, known: Sequence[SequenceState]) -> dict[int, list[int]]:
    """Write what a step writes, as the stages' caches hold it; return what each row that is waited for sees."""
    assert len(set(step.rows)) == len(step.rows)
    assert step.room % BLOCK == 0
    for slot, ids, positions in zip(step.rows, step.ids, step.positions, strict=True):
        end = next((each.max_length for each in known if each.slot == slot), positions[0] + 1)
        assert positions == [min(at, end - 1) for at in range(positions[0], positions[0] + len(ids))]
        seen.setdefault(slot, {}).update(zip(positions, ids, strict=True))
    sees = {}
    for row, sequence, length, last in step.sampled:
        assert step.rows[row] == sequence.slot
        assert sequence.fed == length == len(sequence.tokens) + len(sequence.guesses)
        at = step.positions[row][step.last[-1]]
        assert at == length - 1
        assert at < step.room
        assert seen[sequence.slot][at] == last
        sees[row] = [seen[sequence.slot][place] for place in range(length)]
        assert sees[row] == [*sequence.tokens, *sequence.guesses]
    assert len(step.ids[0]) in ((1,) if step.lane >= 0 else chunk_sizes(64))
    return sees


def follow_states(step: Step, seen: Seen, known: Sequence[SequenceState]) -> dict[int, list[int]]:
    """The same for states that each token replaces: tokens come one by one in their order, from position 0."""
    assert all(len(ids) == 1 for ids in step.ids)
    assert step.last == [0]
    in_slots = {each.slot for each in known}
    for slot, (token,), (position,) in zip(step.rows, step.ids, step.positions, strict=True):
        if slot in in_slots:
            state = seen.setdefault(slot, {})
            if position == 0:
                state.clear()
            assert position == len(state)
            state[position] = token
    return {row: [*seen[each.slot].values()] for row, each, _, _ in step.sampled}


@given(
    lengths=st.lists(st.tuples(st.integers(1, 70), st.integers(1, 9), st.booleans()), min_size=1, max_size=12),
    num_lanes=st.integers(1, 3), slots=st.integers(1, 3), depth=st.integers(1, 6), right=st.sampled_from([0.0, 0.5, 1]),
    alike=st.booleans(), recurrent=st.booleans(), single=st.booleans(), chunk=st.sampled_from([8, 32, 64]),
    seed=st.integers(0, 2**16),
)  # fmt: skip
def test_every_sequence_is_continued_to_its_end(
    lengths: list[tuple[int, int, bool]], num_lanes: int, slots: int, depth: int, right: float, alike: bool,
    recurrent: bool, single: bool, chunk: int, seed: int,
) -> None:  # fmt: skip
    choose = random.Random(seed)
    used = max(1, num_lanes - 1)
    lanes = Lanes(chunk=chunk, num_lanes=num_lanes, num_used=used, slots=slots, recurrent=recurrent)
    lanes.single_rows = single and not recurrent
    waiting: deque[SequenceState] = deque()
    for prompt, new, wants in lengths:
        tokens = [1 if alike else choose.randrange(1, 4) for _ in range(prompt)]
        waiting.append(
            SequenceState(tokens, prompt, scored=wants, max_length=prompt + new, guesser=Guesses(choose, right))
        )
    everything = list(waiting)
    seen: Seen = {}
    scored: dict[int, set[int]] = {id(sequence): set() for sequence in everything if sequence.scored}
    in_flight: deque[tuple[Step, dict[int, list[int]]]] = deque()
    for _ in range(20_000):
        while waiting and lanes.has_room and choose.random() < 0.7:
            lanes.admit(waiting.popleft())
        step = lanes.next(guesses=not recurrent and choose.random() < 0.5) if len(in_flight) < depth else None
        if step is not None:
            assert step.lane < 0 or len(step.rows) == slots or (lanes.single_rows and len(step.rows) == 1)
            in_flight.append((step, (follow_states if recurrent else follow)(step, seen, everything)))
        if in_flight and (step is None or choose.random() < 0.5):
            done, sees = in_flight.popleft()
            for row, index, sequence, token in done.scored:
                assert done.positions[row][index] == token - 1
                assert index in done.last
                scored[id(sequence)].add(token)
            for row, sequence in done.continued():
                # it was right in what it saw, guesses included
                assert sees[row] == sequence.tokens
                lanes.add(sequence, choose.randrange(1, 4))
                assert len(sequence.tokens) <= sequence.max_length
                if len(sequence.tokens) == sequence.max_length:
                    lanes.release(sequence)
        if choose.random() < (0.002 if recurrent else 0.02):  # the stages' caches are lost, with what is in flight
            in_flight.clear()
            seen.clear()
            lanes.begin_again()
        if not waiting and not in_flight and not list(lanes.sequences):
            break
    assert [len(sequence.tokens) for sequence in everything] == [sequence.max_length for sequence in everything]
    # every token of a prompt whose log-probabilities are wanted, but the first, had its logits looked at
    assert all(scored[id(each)] == set(range(1, each.num_prompt)) for each in everything if each.scored)
    assert 0 <= lanes.num_right <= lanes.num_guesses
    assert right or not lanes.num_guesses


def run(lanes: Lanes, sequence: SequenceState, tokens: Sequence[int]) -> int:
    """Generate these tokens for one sequence; returns the number of microbatches."""
    lanes.admit(sequence)
    number = 0
    for token in tokens:
        done: list[tuple[int, SequenceState]] = []
        while not done:
            step = lanes.next()
            assert step is not None
            number += 1
            done = list(step.continued())
        lanes.add(sequence, token)
    lanes.release(sequence)
    return number


def test_whole_chunks_that_a_slot_has_are_not_fed_again() -> None:
    lanes = Lanes(chunk=32, num_lanes=2, num_used=1, slots=2)
    prompt = list(range(1, 101))
    first = SequenceState(list(prompt), 100)
    assert run(lanes, first, [7, 8]) == 4 + 1
    # its beginning is in a slot: 96 of 100 tokens, and 64 of 96 since the last chunk's logits are wanted
    for tokens, reused in ((prompt, 96), (prompt[:96], 64), ([*prompt[:70], 0, 0], 64), ([0, *prompt], 0)):
        again = SequenceState(list(tokens), len(tokens))
        lanes.admit(again)
        assert (again.num_reused, again.fed) == (reused, reused)
        lanes.release(again)
        assert run(lanes, SequenceState(list(prompt), 100), [7]) <= 4
    scored = SequenceState(list(prompt), 100, scored=True)  # in chunks of another size
    lanes.admit(scored)
    assert scored.num_reused == 0
    lanes.release(scored)
    lanes.begin_again()
    lanes.admit(first := SequenceState(list(prompt), 100))
    assert first.num_reused == 0


def test_rows_without_a_token_use_nobodys_slot() -> None:
    lanes = Lanes(chunk=32, num_lanes=2, num_used=2, slots=2, recurrent=True)
    first, second = SequenceState([5, 6, 7], 3), SequenceState([8], 1)
    for sequence in (first, second):
        lanes.admit(sequence)
    steps = [lanes.next() for _ in range(4)]
    assert [(step.rows, step.ids, step.positions) for step in steps if step is not None] == [
        ([first.slot, 4], [[5], [0]], [[0], [0]]),
        ([second.slot, 4], [[8], [0]], [[0], [0]]),
        ([first.slot, 4], [[6], [0]], [[1], [0]]),
        ([first.slot, 4], [[7], [0]], [[2], [0]]),
    ]
    assert lanes.next() is None


def test_an_encoder_runs_with_the_first_chunk() -> None:
    lanes = Lanes(chunk=32, num_lanes=1, num_used=1, slots=2)
    sequence = SequenceState([2], 1, source=list(range(1, 71)))
    lanes.admit(sequence)
    for _ in range(2):
        chunk = lanes.next()
        assert chunk is not None
        assert chunk.ids == [[2] + [0] * 7]
        assert chunk.source == [[*range(1, 71)] + [0] * 58]
        assert (chunk.source_sizes, chunk.source_room) == ([70], 128)
        lanes.add(sequence, 9)
        step = lanes.next()
        assert step is not None
        assert (step.source, step.source_sizes, step.source_room) == ([[], []], [70, 1], 128)
        sequence.tokens.pop()
        lanes.begin_again()


def test_wrong_guess_is_corrected_in_the_next_step() -> None:
    lanes = Lanes(chunk=32, num_lanes=1, num_used=1, slots=1)
    sequence = SequenceState([5, 6], 2, max_length=20, guesser=Guesses(random.Random(0), 1.0))
    lanes.admit(sequence)
    chunk, first, second = (lanes.next(guesses=True) for _ in range(3))
    assert chunk is not None
    assert first is not None
    assert second is not None
    assert lanes.next() is None
    assert [row for row, _ in chunk.continued()] == [0]
    lanes.add(sequence, 9)  # none of 1 to 3 that are guessed
    step = lanes.next()
    assert step is not None
    assert (step.ids, step.positions) == ([[9]], [[2]])
    assert not [*first.continued(), *second.continued()]
    assert list(step.continued()) == [(0, sequence)]


def test_chunks_and_steps_alternate() -> None:
    lanes = Lanes(chunk=32, num_lanes=1, num_used=1, slots=2)
    first = SequenceState([1], 1)
    lanes.admit(first)
    step = lanes.next()
    assert step is not None
    lanes.add(first, 5)
    lanes.admit(SequenceState(list(range(100)), 100))
    kinds = []
    for _ in range(6):
        step = lanes.next()
        assert step is not None
        kinds.append(step.lane)
        for _, sequence in step.continued():
            lanes.add(sequence, 5)
    assert kinds == [0, -1, 0, -1, 0, -1]
