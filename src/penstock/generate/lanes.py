"""The order of a generation's microbatches: chunks of prompts, and steps of lanes."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from penstock.generate.cached_decoder import BLOCK, WANTED

# the sizes of a prompt's last chunk; the others have the largest
CHUNKS = (WANTED, 16, 32)


@dataclass(eq=False, slots=True)
class SequenceState:
    """A prompt and what has been generated after it, in a slot while it is in flight."""

    tokens: list[int]
    num_prompt: int
    slot: int = -1
    fed: int = 0  # tokens whose keys and values the stages have, or will have
    waits: bool = False  # for the token after those
    scored: bool = False  # the logits of all tokens of the prompt are wanted


@dataclass(slots=True)
class Step:
    """One microbatch: what it feeds, and which of its rows are waited for."""

    rows: list[int]  # the slots
    ids: list[list[int]]
    positions: list[list[int]]
    last: list[int]  # the indices whose logits are wanted
    room: int
    scored: SequenceState | None = None
    sampled: list[tuple[int, SequenceState]] = field(default_factory=list)  # row of the batch, sequence
    lane: int = -1  # whose step this is; none of a chunk


class Lanes:
    """Slots in lanes, each of which steps as a whole, so that a sequence's bits do not depend on other sequences.

    A step has a row for each slot of its lane, also for empty or waiting slots; a prompt goes in chunks whose sizes
    depend only on its length, the last one padded. A row without a token to generate writes at the next position of its
    own sequence, which is overwritten later. The first `num_used` lanes are filled before the others: a step takes as
    long for one row as for all, and `num_used` lanes are enough to keep as many stages busy.

    Example:
        lanes = Lanes(num_lanes=3, num_used=2, slots=4)
        lanes.admit(SequenceState([5, 7, 2], 3))
        step = lanes.next()
    """

    def __init__(self, *, num_lanes: int, num_used: int, slots: int) -> None:
        self._slots, self._num_used = slots, num_used
        self._in_slots: list[SequenceState | None] = [None] * (num_lanes * slots)
        self._stepping = [False] * num_lanes
        self._turns = deque(range(num_lanes))
        self._after_chunk = False

    @property
    def has_room(self) -> bool:
        """Return whether another sequence may come in."""
        return None in self._in_slots

    @property
    def sequences(self) -> Iterable[SequenceState]:
        """Return all sequences in slots."""
        return [sequence for sequence in self._in_slots if sequence is not None]

    def admit(self, sequence: SequenceState) -> None:
        """Assign a slot in the emptiest lane, preferring the lanes in use."""
        lanes = [self._in_slots[at : at + self._slots] for at in range(0, len(self._in_slots), self._slots)]
        first = [number for number in range(self._num_used) if None in lanes[number]]
        lane = max(first or range(len(lanes)), key=lambda number: (lanes[number].count(None), -number))
        sequence.slot = lane * self._slots + lanes[lane].index(None)
        self._in_slots[sequence.slot] = sequence

    def release(self, sequence: SequenceState) -> None:
        """Free a sequence's slot."""
        self._in_slots[sequence.slot] = None
        sequence.slot = -1

    def next(self) -> Step | None:
        """Return the next microbatch and mark it as fed; None while all sequences wait for results.

        Chunks and steps alternate where there are both.
        """
        step = None if self._after_chunk else self._next_chunk()
        self._after_chunk = step is not None
        return step or self._next_step() or self._next_chunk()

    def begin_again(self) -> None:
        """Feed everything once more, in microbatches of the same shapes: the stages' caches are gone."""
        self._stepping = [False] * len(self._stepping)
        for sequence in self.sequences:
            sequence.fed, sequence.waits = 0, False

    def took(self, step: Step) -> None:
        """Take note that a microbatch's result is there."""
        if step.lane >= 0 and step.sampled:
            self._stepping[step.lane] = False
        for _, sequence in step.sampled:
            sequence.waits = False

    def _next_chunk(self) -> Step | None:
        for sequence in self.sequences:
            if sequence.fed < sequence.num_prompt:
                chunks = CHUNKS[:1] if sequence.scored else CHUNKS
                part = sequence.tokens[sequence.fed : min(sequence.fed + chunks[-1], sequence.num_prompt)]
                size = next(size for size in chunks if size >= len(part))
                begin, sequence.fed = sequence.fed, sequence.fed + len(part)
                step = Step(
                    rows=[sequence.slot], ids=[part + [0] * (size - len(part))],
                    positions=[list(range(begin, begin + size))], room=_room(begin + size),
                    last=list(range(len(part))) if sequence.scored else [len(part) - 1],
                    scored=sequence if sequence.scored else None,
                )  # fmt: skip
                if sequence.fed == len(sequence.tokens):
                    sequence.waits = True
                    step.sampled.append((0, sequence))
                return step
        return None

    def _next_step(self) -> Step | None:
        for _ in range(len(self._turns)):
            lane = self._turns[0]
            self._turns.rotate(-1)
            own = self._in_slots[lane * self._slots : (lane + 1) * self._slots]
            if not self._stepping[lane] and any(_is_ready(sequence) for sequence in own):
                return self._step(lane, own)
        return None

    def _step(self, lane: int, own: Sequence[SequenceState | None]) -> Step:
        step = Step(rows=[], ids=[], positions=[], last=[0], room=0, lane=lane)
        for row, sequence in enumerate(own):
            step.rows.append(lane * self._slots + row)
            step.positions.append([sequence.fed if sequence is not None else 0])
            ready = _is_ready(sequence)
            step.ids.append([sequence.tokens[sequence.fed] if sequence is not None and ready else 0])
            if sequence is not None and ready:
                sequence.fed += 1
                step.room = max(step.room, _room(sequence.fed))
                if sequence.fed == len(sequence.tokens):  # else it is fed again, and the next token is known
                    sequence.waits = True
                    step.sampled.append((row, sequence))
        self._stepping[lane] = bool(step.sampled)
        return step


def _is_ready(sequence: SequenceState | None) -> bool:
    """Return whether a sequence has a generated token that was not fed yet."""
    return sequence is not None and not sequence.waits and sequence.num_prompt <= sequence.fed < len(sequence.tokens)


def _room(length: int) -> int:
    return -(-length // BLOCK) * BLOCK
