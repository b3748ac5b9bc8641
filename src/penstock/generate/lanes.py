"""The order of a generation's microbatches: chunks of prompts, steps of lanes, and guesses of their next tokens."""

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from penstock.generate.cached_decoder import BLOCK, chunk_sizes

# context lengths, longest first
_SIZES = (4, 2, 1)
# guesses with a context length are used only while its recent hit rate is at least this
_LEAST = 0.5
_WEIGHT = 0.1  # weight of the newest outcome in the moving average of the hit rate


def room_of(length: int) -> int:
    """Return the attended length of a sequence of this length: the next multiple of `BLOCK`."""
    return -(-length // BLOCK) * BLOCK


class Guesser:
    """Guesses the next token by prompt lookup: the token that last followed the same context in the sequence.

    The hit rate is tracked even while no guesses are made: every token, beginning with the prompt's, is compared with
    the guess that would have been made. While the rate is low, `guess` returns None.

    Example:
        guesser = Guesser([5, 7, 2, 9, 5, 7, 2])
        guesser.guess([])               # 9, if the hit rate is high enough
        guesser.guess([9])              # 5
        guesser.add(9)

    Source of the algorithm: A. Saxena, Prompt Lookup Decoding, 2023.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._last: list[int] = []  # the newest tokens, as many as the longest context
        self._following: dict[tuple[int, ...], int] = {}
        self._rates = dict.fromkeys(_SIZES, _LEAST)
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        """Append the next token."""
        for size in _SIZES:
            if len(self._last) >= size:
                context = tuple(self._last[-size:])
                found = self._following.get(context)
                if found is not None:
                    self._rates[size] += _WEIGHT * ((found == token) - self._rates[size])
                self._following[context] = token
        self._last = [*self._last[1 - _SIZES[0] :], token]

    def guess(self, guessed: Sequence[int]) -> int | None:
        """Return a guess for the position after the earlier guesses, or None."""
        last = [*self._last, *guessed]
        for size in _SIZES:
            found = self._following.get(tuple(last[-size:]))
            if found is not None:
                return found if self._rates[size] >= _LEAST else None
        return None


@dataclass(eq=False, slots=True)
class SequenceState:
    """A prompt and the tokens generated so far, in a slot while in flight.

    With an encoder, `source` is the prompt, and `tokens` starts with the decoder's start tokens.
    """

    tokens: list[int]
    num_prompt: int
    source: Sequence[int] = ()
    scored: bool = False  # log-probabilities of the prompt's tokens are requested
    max_length: int = sys.maxsize  # prompt and answer
    guesser: Guesser | None = None
    slot: int = -1
    fed: int = 0  # tokens fed so far, including those in flight
    num_reused: int = 0  # tokens among these that an earlier sequence left in the slot's cache
    guesses: list[int] = field(default_factory=list)  # guessed tokens, fed after the last known token

    @property
    def waits(self) -> bool:
        """True if all known tokens have been fed, so that the next one is still being computed."""
        return self.fed >= len(self.tokens)

    def add(self, token: int) -> bool:
        """Append the next token, and return True if it matches the pending guess.

        If it does not match, the guesses are dropped, and this token runs next.
        """
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
    """One microbatch: its inputs, and the rows to sample."""

    rows: list[int]  # slot of each row
    ids: list[list[int]]
    positions: list[list[int]]
    last: list[int]  # token indices whose logits are returned
    room: int  # attended length, a multiple of `BLOCK`
    # rows whose logits score a prompt token: (batch row, index of the preceding token in the row, sequence, index of
    # the scored token)
    scored: list[tuple[int, int, SequenceState, int]] = field(default_factory=list)
    # rows whose logits give the next token: (batch row, sequence, tokens fed so far including this one, this token)
    sampled: list[tuple[int, SequenceState, int, int]] = field(default_factory=list)
    lane: int = -1  # the lane that steps; -1 for a chunk of a prompt
    guesses: bool = False
    source: list[list[int]] = field(default_factory=list)  # tokens for the encoder, by row
    source_sizes: list[int] = field(default_factory=list)  # number of tokens of each row without padding
    source_room: int = 0

    def continued(self) -> Iterator[tuple[int, SequenceState]]:
        """Yield each sampled row and its sequence; skip rows that were fed after a wrong guess.

        Results arrive in the order of feeding, so every token before a row is already known.
        """
        for row, sequence, length, last in self.sampled:
            if sequence.slot >= 0 and len(sequence.tokens) == length and sequence.tokens[-1] == last:
                yield row, sequence


class Lanes:
    """Slots in lanes, each of which steps as a whole, so that a sequence's bits do not depend on other sequences.

    A step has a row for each slot of its lane, including empty and waiting slots. With `single_rows`, set if a row has
    the same bits alone, a step with one token runs that row alone. A prompt runs in chunks whose sizes depend only on
    its length: of `chunk` tokens, and a last one padded to 8, 16, 32 … (`chunk_sizes`). If its tokens are scored, all
    chunks are of 8. A row without a token to generate writes at the next position of its own sequence, which is
    overwritten later. The first `num_used` lanes, one per stage, are filled before the other lanes: a step takes as
    long for one row as for all, so a few full lanes are faster than many lanes with few rows. Once these are full, the
    other lanes are used too, and no stage waits while a lane's tokens are sampled.

    The keys and values of a prompt's whole chunks stay in the slot after release. A prompt that begins with the same
    chunks continues after them, with the same bits. Guesses (draft tokens) run as steps too; the keys and values of a
    wrong guess are overwritten:

        tokens    a b c d         in flight: e f g, all guessed
        result    a b c d e       e was right: the next token comes from the step that ran e
        result    a b c d e x     f was wrong: x runs next, and the results of f and g are discarded

    `longest` is the largest number of tokens of a sequence, also of an encoder's. The states of a `recurrent` model
    cannot be rolled back: its prompts run in steps of one token each, and a row without a token uses the dummy slot
    `num_slots`.

    Example:
        lanes = Lanes(num_lanes=3, num_used=2, slots=4, chunk=32)
        lanes.admit(SequenceState([5, 7, 2], 3))
        step = lanes.next()
    """

    def __init__(
        self,
        *,
        num_lanes: int,
        num_used: int,
        slots: int,
        chunk: int,
        longest: int = sys.maxsize,
        recurrent: bool = False,
    ) -> None:
        self._chunks = chunk_sizes(chunk)
        self._slots, self._num_used, self.longest, self.recurrent = slots, num_used, longest, recurrent
        self._in_slots: list[SequenceState | None] = [None] * (num_lanes * slots)
        self._left: list[list[int]] = [[] for _ in self._in_slots]  # by slot: released tokens still in the cache
        self._turns = deque(range(num_lanes))
        self._after_chunk = False
        self.single_rows = False
        self.num_guesses = self.num_right = 0

    @property
    def num_rows(self) -> int:
        """Slots of a lane."""
        return self._slots

    @property
    def num_slots(self) -> int:
        """Largest number of sequences in flight."""
        return len(self._in_slots)

    @property
    def has_room(self) -> bool:
        """True if a slot is free."""
        return None in self._in_slots

    @property
    def sequences(self) -> Iterable[SequenceState]:
        """All sequences in slots."""
        return [sequence for sequence in self._in_slots if sequence is not None]

    def admit(self, sequence: SequenceState) -> None:
        """Assign a free slot to a sequence.

        The slot whose cache already has the most tokens of the prompt is preferred, then a slot in the emptiest of the
        first `num_used` lanes.
        """
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
        if not sequence.scored and not self.recurrent:
            fed = min(sequence.fed, sequence.num_prompt)
            self._left[sequence.slot] = sequence.tokens[: fed // self._chunks[-1] * self._chunks[-1]]
        self._in_slots[sequence.slot] = None
        sequence.slot = -1

    def next(self, *, guesses: bool = False) -> Step | None:
        """Return the next microbatch and mark it as fed; None while all sequences wait for results.

        Chunks and steps alternate if both are due. With `guesses`, sequences that wait for a token may run a guess.
        """
        step = None if self._after_chunk else self._next_chunk()
        self._after_chunk = step is not None
        return step or self._next_step() or self._next_chunk() or (self._next_step(guesses=True) if guesses else None)

    def begin_again(self) -> None:
        """Replay every sequence after its caches were lost, in microbatches of the same shapes."""
        self._left = [[] for _ in self._in_slots]
        for sequence in self.sequences:
            sequence.fed = sequence.num_reused = 0
            sequence.guesses.clear()

    def _num_left(self, slot: int, sequence: SequenceState) -> int:
        """Return the number of prompt tokens in a slot's cache.

        The prompt's last token is not counted: it is always run, because its logits are needed.
        """
        if sequence.scored:
            return 0
        size, left, prompt = self._chunks[-1], self._left[slot], sequence.tokens[: sequence.num_prompt - 1]
        most = min(len(left), len(prompt) // size * size)
        return next((at for at in range(0, most, size) if left[at : at + size] != prompt[at : at + size]), most)

    def _preference(self, slot: int) -> tuple[bool, int, int, int]:
        lane = slot // self._slots
        own = self._in_slots[lane * self._slots : (lane + 1) * self._slots]
        return lane < self._num_used, own.count(None), -lane, -len(self._left[slot])

    def _next_chunk(self) -> Step | None:
        for sequence in () if self.recurrent else self.sequences:
            if sequence.fed < sequence.num_prompt:
                chunks = self._chunks[:1] if sequence.scored else self._chunks
                part = sequence.tokens[sequence.fed : min(sequence.fed + chunks[-1], sequence.num_prompt)]
                size = next(size for size in chunks if size >= len(part))
                begin, sequence.fed = sequence.fed, sequence.fed + len(part)
                step = Step(
                    rows=[sequence.slot],
                    ids=[part + [0] * (size - len(part))],
                    # padding stays below the sequence's limit, where a position embedding may end
                    positions=[[min(at, sequence.max_length - 1) for at in range(begin, begin + size)]],
                    room=room_of(begin + size),
                    last=list(range(len(part))) if sequence.scored else [len(part) - 1],
                )
                _add_sources(step, [sequence], self.longest if begin == 0 else 0)
                for index in step.last if sequence.scored else ():
                    if begin + index + 1 < sequence.num_prompt:
                        step.scored.append((0, index, sequence, begin + index + 1))
                if sequence.waits:
                    step.sampled.append((0, sequence, sequence.fed, part[-1]))
                return step
        return None

    def _next_step(self, *, guesses: bool = False) -> Step | None:
        """Return a step of the next lane that has a token to run and waits for no result.

        With `guesses`, of the next lane that has a guess to run, even if it waits.
        """
        for _ in range(len(self._turns)):
            lane = self._turns[0]
            self._turns.rotate(-1)
            own = self._in_slots[lane * self._slots : (lane + 1) * self._slots]
            waits = any(
                each is not None and each.waits and (self.recurrent or len(each.tokens) > each.num_prompt)
                for each in own
            )
            if guesses or not waits:
                following = [self._following(sequence, guesses=guesses) for sequence in own]
                # with `guesses`, at least one row must be a guess; known tokens of other rows run in the same step
                if any(
                    sequence is not None and token is not None and sequence.waits == guesses
                    for sequence, token in zip(own, following, strict=True)
                ):
                    return self._step(lane, own, following)
        return None

    def _step(self, lane: int, own: Sequence[SequenceState | None], following: Sequence[int | None]) -> Step:
        step = Step(rows=[], ids=[], positions=[], last=[0], room=0, lane=lane)
        _add_sources(step, own, 0)
        only = [index for index, token in enumerate(following) if token is not None]
        run = only if self.single_rows and len(only) == 1 else range(len(own))
        for row, index in enumerate(run):
            sequence, token, slot = own[index], following[index], lane * self._slots + index
            step.rows.append(self.num_slots if self.recurrent and token is None else slot)
            step.positions.append([sequence.fed if sequence is not None else len(self._left[slot])])
            step.ids.append([token or 0])
            if sequence is not None and token is not None:
                if sequence.waits:
                    step.guesses = True
                    sequence.guesses.append(token)
                    self.num_guesses += 1
                sequence.fed += 1
                step.room = max(step.room, room_of(sequence.fed))
                if sequence.waits:  # in a replay the next token is already known
                    step.sampled.append((row, sequence, sequence.fed, token))
                if sequence.scored and sequence.fed < sequence.num_prompt:
                    step.scored.append((row, 0, sequence, sequence.fed))
        return step

    def _following(self, sequence: SequenceState | None, *, guesses: bool) -> int | None:
        """Return the token to feed next in a step: a known token, or a guess."""
        if sequence is None or (sequence.fed < sequence.num_prompt and not self.recurrent):
            return None
        if not sequence.waits:
            return sequence.tokens[sequence.fed]
        # the last allowed token is never run, because nothing is sampled after it
        if not guesses or sequence.guesser is None or sequence.fed >= sequence.max_length - 1:
            return None
        return sequence.guesser.guess(sequence.guesses)


def _add_sources(step: Step, own: Sequence[SequenceState | None], longest: int) -> None:
    """Add the rows' encoder inputs, padded to at most `longest` tokens, and the lengths for cross-attention."""
    if not any(sequence is not None and sequence.source for sequence in own):
        return
    for sequence in own:
        source = sequence.source if sequence is not None else ()
        size = max(len(source), 1)  # a row that attends to nothing would compute NaN
        padded = min(room_of(size), longest)  # a position embedding may end there
        step.source.append([*source, *[0] * (padded - size)] if padded else [])
        step.source_sizes.append(size)
        step.source_room = max(step.source_room, room_of(size))
