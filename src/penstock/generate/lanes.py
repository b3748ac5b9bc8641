"""The order of a generation's microbatches: chunks of prompts, and steps of lanes."""

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from penstock.generate.cached_decoder import BLOCK, CHUNKS
from penstock.generate.guessing import Guesser


@dataclass(eq=False, slots=True)
class SequenceState:
    """A prompt and what has been generated after it, in a slot while it is in flight."""

    tokens: list[int]
    num_prompt: int
    scored: bool = False  # log-probabilities of all tokens of the prompt were asked for
    most: int = sys.maxsize  # largest length, prompt and answer
    guesser: Guesser | None = None
    slot: int = -1
    fed: int = 0  # tokens fed so far, including those in flight
    num_reused: int = 0  # of these, found in the slot's cache from an earlier sequence
    guesses: list[int] = field(default_factory=list)  # guessed tokens, fed after the last known one

    @property
    def waits(self) -> bool:
        """Return whether the token after the known ones is in flight."""
        return self.fed >= len(self.tokens)

    def add(self, token: int) -> bool:
        """Append the next token; return whether it was guessed. After a wrong guess, feeding begins again with it."""
        self.tokens.append(token)
        if self.guesser is not None:
            self.guesser.add(token)
        if not self.guesses:
            return False
        if self.guesses.pop(0) == token:
            return True
        self.guesses.clear()
        self.fed = len(self.tokens) - 1
        return False


@dataclass(slots=True)
class Step:
    """One microbatch: what it feeds, and which of its rows are waited for."""

    rows: list[int]  # slot of each row
    ids: list[list[int]]
    positions: list[list[int]]
    last: list[int]  # token indices whose logits are returned
    room: int
    scored: SequenceState | None = None
    # rows whose logits give a next token: row of the batch, sequence, number of its tokens up to the row's last one,
    # and that token
    sampled: list[tuple[int, SequenceState, int, int]] = field(default_factory=list)
    lane: int = -1  # the lane that steps; -1 for a chunk of a prompt
    guesses: bool = False

    def continued(self) -> Iterator[tuple[int, SequenceState]]:
        """Yield each sampled row and its sequence, without rows fed after a wrong guess.

        Results arrive in the order of feeding, so every token before a row is already known.
        """
        for row, sequence, length, last in self.sampled:
            if sequence.slot >= 0 and len(sequence.tokens) == length and sequence.tokens[-1] == last:
                yield row, sequence


class Lanes:
    """Slots in lanes, each of which steps as a whole, so that a sequence's bits do not depend on other sequences.

    A step has a row for each slot of its lane, also for empty or waiting slots; a prompt goes in chunks whose sizes
    depend only on its length, the last one padded. A row without a token to generate writes at the next position of its
    own sequence, which is overwritten later. The first `num_used` lanes are filled before the others: a step takes as
    long for one row as for all, and `num_used` lanes are enough to keep as many stages busy.

    What a prompt's whole chunks wrote stays in a slot, and a prompt that begins with the same chunks begins after them:
    the same chunks have the same bits. Guesses are steps as well; what a wrong one wrote is overwritten:

        tokens    a b c d         fed: e f g (guessed e, f, g)
        result    a b c d e       right: the result of e's own step is waited for
        result    a b c d e x     f was wrong: feeding begins again with x; the results of f and g are not looked at

    Example:
        lanes = Lanes(num_lanes=3, num_used=2, slots=4)
        lanes.admit(SequenceState([5, 7, 2], 3))
        step = lanes.next()
    """

    def __init__(self, *, num_lanes: int, num_used: int, slots: int) -> None:
        self._slots, self._num_used = slots, num_used
        self._in_slots: list[SequenceState | None] = [None] * (num_lanes * slots)
        self._left: list[list[int]] = [[] for _ in self._in_slots]  # tokens of whole chunks, by slot
        self._turns = deque(range(num_lanes))
        self._after_chunk = False
        self.num_guesses = self.num_right = 0

    @property
    def num_slots(self) -> int:
        """Return how many sequences are in flight at most."""
        return len(self._in_slots)

    @property
    def has_room(self) -> bool:
        """Return whether another sequence may come in."""
        return None in self._in_slots

    @property
    def sequences(self) -> Iterable[SequenceState]:
        """Return all sequences in slots."""
        return [sequence for sequence in self._in_slots if sequence is not None]

    def admit(self, sequence: SequenceState) -> None:
        """Assign the slot with most of its prompt, and among these one in the emptiest lane that is in use."""
        free = [slot for slot, other in enumerate(self._in_slots) if other is None]
        slot = max(free, key=lambda slot: (self._num_left(slot, sequence), *self._preference(slot)))
        sequence.fed = sequence.num_reused = self._num_left(slot, sequence)
        sequence.slot, self._left[slot] = slot, []
        self._in_slots[slot] = sequence

    def add(self, sequence: SequenceState, token: int) -> None:
        """Append a sequence's next token."""
        self.num_right += sequence.add(token)

    def release(self, sequence: SequenceState) -> None:
        """Free a sequence's slot."""
        if not sequence.scored:
            fed = min(sequence.fed, sequence.num_prompt)
            self._left[sequence.slot] = sequence.tokens[: fed // CHUNKS[-1] * CHUNKS[-1]]
        self._in_slots[sequence.slot] = None
        sequence.slot = -1

    def next(self, *, guesses: bool = False) -> Step | None:
        """Return the next microbatch and mark it as fed; None while all sequences wait for results.

        Chunks and steps alternate where there are both. With `guesses`, sequences that wait may go on with a guess.
        """
        step = None if self._after_chunk else self._next_chunk()
        self._after_chunk = step is not None
        return step or self._next_step() or self._next_chunk() or (self._next_step(guesses=True) if guesses else None)

    def begin_again(self) -> None:
        """Feed everything once more, in microbatches of the same shapes: the stages' caches are gone."""
        self._left = [[] for _ in self._in_slots]
        for sequence in self.sequences:
            sequence.fed = sequence.num_reused = 0
            sequence.guesses.clear()

    def _num_left(self, slot: int, sequence: SequenceState) -> int:
        """Return how many of a prompt's tokens the slot has; the last token is always fed, since a token follows it."""
        if sequence.scored:
            return 0
        size, left, prompt = CHUNKS[-1], self._left[slot], sequence.tokens[: sequence.num_prompt - 1]
        most = min(len(left), len(prompt) // size * size)
        return next((at for at in range(0, most, size) if left[at : at + size] != prompt[at : at + size]), most)

    def _preference(self, slot: int) -> tuple[bool, int, int, int]:
        lane = slot // self._slots
        own = self._in_slots[lane * self._slots : (lane + 1) * self._slots]
        return lane < self._num_used, own.count(None), -lane, -len(self._left[slot])

    def _next_chunk(self) -> Step | None:
        for sequence in self.sequences:
            if sequence.fed < sequence.num_prompt:
                chunks = CHUNKS[:1] if sequence.scored else CHUNKS
                part = sequence.tokens[sequence.fed : min(sequence.fed + chunks[-1], sequence.num_prompt)]
                size = next(size for size in chunks if size >= len(part))
                begin, sequence.fed = sequence.fed, sequence.fed + len(part)
                step = Step(
                    rows=[sequence.slot], ids=[part + [0] * (size - len(part))],
                    # padding stays where this sequence may go: a table of positions may end there
                    positions=[[min(at, sequence.most - 1) for at in range(begin, begin + size)]],
                    room=_room(begin + size),
                    last=list(range(len(part))) if sequence.scored else [len(part) - 1],
                    scored=sequence if sequence.scored else None,
                )  # fmt: skip
                if sequence.waits:
                    step.sampled.append((0, sequence, sequence.fed, part[-1]))
                return step
        return None

    def _next_step(self, *, guesses: bool = False) -> Step | None:
        """Return a step of the next lane that has a token to feed and waits for none, or one that has a guess."""
        for _ in range(len(self._turns)):
            lane = self._turns[0]
            self._turns.rotate(-1)
            own = self._in_slots[lane * self._slots : (lane + 1) * self._slots]
            waits = any(each is not None and each.waits and len(each.tokens) > each.num_prompt for each in own)
            if guesses or not waits:
                following = [_following(sequence, guesses=guesses) for sequence in own]
                # a step with guesses is not run only for sequences that have a known token: they wait for the lane's
                # normal step
                if any(
                    sequence is not None and token is not None and sequence.waits == guesses
                    for sequence, token in zip(own, following, strict=True)
                ):
                    return self._step(lane, own, following)
        return None

    def _step(self, lane: int, own: Sequence[SequenceState | None], following: Sequence[int | None]) -> Step:
        step = Step(rows=[], ids=[], positions=[], last=[0], room=0, lane=lane)
        for row, (sequence, token) in enumerate(zip(own, following, strict=True)):
            slot = lane * self._slots + row
            step.rows.append(slot)
            step.positions.append([sequence.fed if sequence is not None else len(self._left[slot])])
            step.ids.append([token or 0])
            if sequence is not None and token is not None:
                if sequence.waits:
                    step.guesses = True
                    sequence.guesses.append(token)
                    self.num_guesses += 1
                sequence.fed += 1
                step.room = max(step.room, _room(sequence.fed))
                if sequence.waits:  # otherwise (feeding again after a loss) the next token is already known
                    step.sampled.append((row, sequence, sequence.fed, token))
        return step


def _following(sequence: SequenceState | None, *, guesses: bool) -> int | None:
    """Return the token to feed next: one that was generated, or a guess."""
    if sequence is None or sequence.fed < sequence.num_prompt:
        return None
    if not sequence.waits:
        return sequence.tokens[sequence.fed]
    # the last token is never fed, since none follows it
    if not guesses or sequence.guesser is None or sequence.fed >= sequence.most - 1:
        return None
    return sequence.guesser.guess(sequence.guesses)


def _room(length: int) -> int:
    return -(-length // BLOCK) * BLOCK
