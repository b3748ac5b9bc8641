"""Sampling of the next token: transformers' processors, in its order, with a random generator per seeded request."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.errors import RunError, UsageError
from penstock.tensors import HOST
from penstock.text import nearest, one_line
from penstock.zoo.optional import optional_import

_NEW_TOKENS = 20  # transformers' default
# supported options; any other one that is set is rejected with an error that names it
_SAMPLING = {
    "do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "no_repeat_ngram_size",
    "bad_words_ids", "suppress_tokens", "min_length", "min_new_tokens",
}  # fmt: skip
_ENDS = {"max_length", "max_new_tokens", "eos_token_id", "pad_token_id", "bos_token_id", "stop_strings"}
# what `drawn` computes for all rows of a step, by the names of transformers' classes
_DRAWN = {"TemperatureLogitsWarper": "temperature", "TopKLogitsWarper": "top_k", "TopPLogitsWarper": "top_p"}
_FORCED = {"decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id"}
_IGNORED = {"transformers_version", "use_cache", "cache_implementation", "num_return_sequences"}
_OF_BEAMS = {"num_beam_groups", "length_penalty", "early_stopping", "diversity_penalty"}  # no effect with one beam
# values that turn a feature off
_OFF: dict[str, tuple[object, ...]] = {
    "num_beams": (1,),
    "output_scores": (False,),
    "output_logits": (False,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "return_dict_in_generate": (False,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "encoder_repetition_penalty": (1.0,),
    "renormalize_logits": (False,),
    "encoder_no_repeat_ngram_size": (0,),
    "remove_invalid_values": (False,),
    "token_healing": (False,),
}


def read_config(model: Any, config: Any, changes: dict[str, Any]) -> Any:
    """Return the configuration of a generation: the given one or the model's own, with changes.

    Raises `UsageError` for names that transformers does not know, and for options that a generator does not support.
    """
    found = copy.deepcopy(config if config is not None else model.generation_config)
    try:
        unknown = found.update(**changes)
    except ValueError as error:  # transformers' own check
        raise UsageError(one_line(error)) from None
    if unknown:
        name = next(iter(unknown))
        raise UsageError(f"unknown generation option {name}{nearest(name, vars(found))}")
    for name, value in vars(found).items():
        known = name.startswith("_") or name in _SAMPLING | _ENDS | _FORCED | _IGNORED | _OF_BEAMS
        if not known and value is not None and value not in _OFF.get(name, ()):
            own = config is None and name not in changes
            where = " of the model's generation_config.json" if own else ""
            raise UsageError(
                f"a generator does not support {name}={value!r}{where}; "
                f"{f'pass {name}=None' if own else 'leave it out'}, or use model.generate"
            )
    if found.do_sample and (found.temperature is not None and found.temperature <= 0):
        raise UsageError(f"temperature must be above 0, not {found.temperature}; for 0, use do_sample=False")
    return found


Processor = Callable[[Tensor, Tensor], Tensor]
Likely = tuple[float, int, float]  # a row's largest logit, its token and its log-probability


class Draw(NamedTuple):
    """One token of a sampled sequence: a random number from 0 to 1, and what changes the probabilities."""

    at: float
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


class Sampler:
    """Chooses the next token of one sequence.

    Example:
        token, logprob = Sampler(config, num_prompt=4, seed=0)([5, 7, 2, 9], logits)

    With `seed` the sequence has its own random generator, otherwise torch's global one is used. `most` is the
    largest number of new tokens. `processors` map tokens [1, L] and scores [1, V] to scores, like transformers' own;
    they run after its penalties and bans, and before temperature, top-k, top-p, min-p and typical-p. A processor may
    have a method `ends`, which gets each sampled token and returns True after the last one of a text. The
    log-probability is computed from the unprocessed logits. A `greedy` one needs nothing but `most_likely`, and one
    that `draws` nothing but `drawn`: these compute all rows of a step at once, where their logits are. Raises
    `RunError` if the largest logit is not finite, or no token is left.
    """

    def __init__(
        self,
        config: Any,
        *,
        num_prompt: int,
        most: int = 0,
        seed: int | None = None,
        processors: Sequence[Processor] = (),
    ) -> None:
        self._sample = bool(config.do_sample)
        self._processors, warpers = _processors(config, num_prompt, most, processors), _warpers(config)
        penalized = bool(self._processors)
        self._processors.extend(warpers)
        self._ends = [each.ends for each in processors if hasattr(each, "ends")]
        self._random = None if seed is None else torch.Generator().manual_seed(seed)
        self.greedy = not self._sample and not self._processors
        names = [_DRAWN.get(type(each).__name__, "") for each in warpers]
        self.draws = self._sample and not penalized and all(names)
        self._drawn = {name: getattr(each, name) for name, each in zip(names, warpers, strict=True) if self.draws}

    def draw(self) -> Draw:
        """Draw the random number of the next token, on the CPU."""
        return Draw(float(torch.rand((), generator=self._random)), **self._drawn)

    def __call__(self, tokens: Sequence[int], logits: Tensor, likely: Likely | None = None) -> tuple[int, float]:
        """Return the next token after `tokens`, and its log-probability; `logits` are [V], and `likely` is theirs."""
        if self.greedy or likely:
            largest, token, logprob = likely or most_likely(logits[None])[0]
            _check_finite(largest)
            return token, logprob
        logits = logits.to(HOST, torch.float32)  # random numbers are drawn there, the same ones for every device
        _check_finite(float(logits.max()))
        scores = self._processors(torch.tensor([list(tokens)]), logits[None].clone())
        if float(scores.max()) == -math.inf:
            raise RunError(
                "a sampling option or processor must leave at least one token, and none is left; check bad_words_ids, "
                "suppress_tokens and logit_bias"
            )
        if self._sample:
            chosen = int(torch.multinomial(torch.softmax(scores, -1), 1, generator=self._random))
        else:
            chosen = int(scores.argmax())
        return chosen, float(torch.log_softmax(logits, -1)[chosen])

    def ended(self, token: int) -> bool:
        """Report a sampled token to the processors that end a text, as a grammar does; True if one ends it here."""
        found = [ends(token) for ends in self._ends]
        return any(found)


def _check_finite(largest: float) -> None:
    if not math.isfinite(largest):
        raise RunError(f"the model's logits must be finite; got {largest}; check its weights and its precision")


def most_likely(logits: Tensor) -> list[Likely]:
    """Return the likeliest token of each row; `logits` are [R, V], on any device."""
    logits = logits.float()
    return _chosen(logits, logits.argmax(-1, keepdim=True))


def drawn(logits: Tensor, draws: Sequence[Draw]) -> list[Likely]:
    """Draw a token for each row of logits [R, V], on any device.

    Temperature, top-k and top-p are those of transformers. The token is the first, from the likeliest on, at which the
    sum of probabilities exceeds the random number, which is therefore the only one of a token.
    """
    logits = logits.float()
    length = logits.shape[-1]
    numbers = torch.tensor([(draw.at, draw.temperature, draw.top_p) for draw in draws]).to(logits.device)
    most = torch.tensor([[min(draw.top_k or length, length)] for draw in draws]).to(logits.device)
    at, temperature, top_p = (numbers[:, column, None] for column in range(3))
    scores, tokens = (logits / temperature).sort(dim=-1, descending=True, stable=True)
    fewest = scores.gather(-1, most - 1)  # of equal scores all are kept
    chances = torch.softmax(scores.masked_fill(scores < fewest, -math.inf), -1)
    rest = chances.flip(-1).cumsum(-1).flip(-1)  # of a token and all that are less likely
    dropped = rest <= 1 - top_p
    dropped[:, 0] = False
    chances = chances.masked_fill(dropped, 0)
    sums = chances.cumsum(-1)
    place = torch.searchsorted(sums, at * sums[:, -1:], right=True)
    last = (chances > 0).sum(-1, keepdim=True) - 1
    return _chosen(logits, tokens.gather(-1, torch.minimum(place, last).clamp(min=0)))


def _chosen(logits: Tensor, tokens: Tensor) -> list[Likely]:
    """Copy the chosen tokens [R, 1] of logits [R, V], the largest logits and the log-probabilities to the host."""
    logprobs = torch.log_softmax(logits, -1).gather(-1, tokens)[:, 0]
    numbers = torch.stack([logits.amax(-1), logprobs]).to(HOST).tolist()
    return list(zip(numbers[0], tokens[:, 0].to(HOST).tolist(), numbers[1], strict=True))


def likeliest(logits: Tensor, number: int) -> list[tuple[int, float]]:
    """Return the likeliest tokens and their log-probabilities, the likeliest first; `logits` are [V]."""
    found = torch.log_softmax(logits.float(), -1).topk(min(number, len(logits)))
    return list(zip(found.indices.to(HOST).tolist(), found.values.to(HOST).tolist(), strict=True))


class Penalties:
    """Subtracts the presence and frequency penalties of OpenAI's protocol from the scores of generated tokens.

    `presence` is subtracted once per token, `frequency` once per occurrence; neither counts the prompt.
    """

    def __init__(self, num_prompt: int, *, presence: float, frequency: float) -> None:
        self._num_prompt, self._presence, self._frequency = num_prompt, presence, frequency

    def __call__(self, tokens: Tensor, scores: Tensor) -> Tensor:
        """Return scores [1, V] after tokens [1, L]."""
        counts = torch.bincount(tokens[0, self._num_prompt :], minlength=scores.shape[-1])
        return scores - self._frequency * counts - self._presence * (counts > 0)


class LogitBias:
    """Adds a number to the scores of some tokens."""

    def __init__(self, biases: Mapping[int, float]) -> None:
        self._tokens, self._biases = torch.tensor(list(biases)), torch.tensor(list(biases.values()))

    def __call__(self, _tokens: Tensor, scores: Tensor) -> Tensor:
        """Return scores [1, V]."""
        return scores.index_add(1, self._tokens, self._biases.to(scores)[None])


def _processors(config: Any, num_prompt: int, most: int, own: Sequence[Processor]) -> Any:
    """Return transformers' penalties and bans in the order in which it applies them, then a request's own."""
    kinds = optional_import("transformers.generation.logits_process", "text")
    found = kinds.LogitsProcessorList()
    ends = ends_of(config)
    if config.repetition_penalty not in {None, 1.0}:
        found.append(kinds.RepetitionPenaltyLogitsProcessor(penalty=config.repetition_penalty))
    if config.no_repeat_ngram_size:
        found.append(kinds.NoRepeatNGramLogitsProcessor(config.no_repeat_ngram_size))
    if config.bad_words_ids:
        found.append(kinds.NoBadWordsLogitsProcessor(config.bad_words_ids, ends or None))
    if config.min_length and ends:
        found.append(kinds.MinLengthLogitsProcessor(config.min_length, ends))
    if config.min_new_tokens and ends:
        found.append(kinds.MinNewTokensLengthLogitsProcessor(num_prompt, config.min_new_tokens, ends))
    if config.forced_bos_token_id is not None:
        found.append(kinds.ForcedBOSTokenLogitsProcessor(config.forced_bos_token_id))
    if config.forced_eos_token_id is not None:
        found.append(kinds.ForcedEOSTokenLogitsProcessor(num_prompt + most, config.forced_eos_token_id))
    if config.suppress_tokens:
        found.append(kinds.SuppressTokensLogitsProcessor(config.suppress_tokens))
    found.extend(own)
    return found


def _warpers(config: Any) -> list[Any]:
    """Return transformers' processors of sampling, in its order; empty without sampling."""
    found: list[Any] = []
    if not config.do_sample:
        return found
    kinds = optional_import("transformers.generation.logits_process", "text")
    if config.temperature not in {None, 1.0}:
        found.append(kinds.TemperatureLogitsWarper(config.temperature))
    top_k = 50 if config.top_k is None else config.top_k  # transformers' own default
    if top_k:
        found.append(kinds.TopKLogitsWarper(top_k))
    if config.top_p is not None and config.top_p < 1.0:
        found.append(kinds.TopPLogitsWarper(config.top_p))
    if config.min_p is not None:
        found.append(kinds.MinPLogitsWarper(config.min_p))
    if config.typical_p is not None and config.typical_p < 1.0:
        found.append(kinds.TypicalLogitsWarper(config.typical_p))
    return found


def start_of(model: Any, config: Any) -> list[int]:
    """Return the decoder's start tokens of an encoder-decoder; empty for other models.

    Raises `UsageError` if the generation configuration has neither decoder_start_token_id nor bos_token_id.
    """
    if not getattr(model.config, "is_encoder_decoder", False):
        return []
    for token in (config.decoder_start_token_id, config.bos_token_id):
        if token is not None:
            return [int(token)]
    raise UsageError(f"{type(model).__name__} has no decoder_start_token_id; pass it, for example 0")


def most_tokens(num_before: int, config: Any, max_length: int) -> int:
    """Return the limit on new tokens; raises `UsageError` if prompt and new tokens exceed `max_length`."""
    if config.max_new_tokens is not None:
        most = int(config.max_new_tokens)
    else:
        most = _NEW_TOKENS if config.max_length is None else int(config.max_length) - num_before
    if most < 1:
        raise UsageError(
            f"no tokens to generate after {num_before} tokens with max_length={config.max_length}, "
            f"max_new_tokens={config.max_new_tokens}; give max_new_tokens=20"
        )
    if num_before + most > max_length:
        raise UsageError(
            f"a sequence of this generator has at most {max_length} tokens, but a prompt of {num_before} and "
            f"{most} new ones were requested; create it with max_length={num_before + most}, or request fewer"
        )
    return most


def ends_of(config: Any) -> list[int]:
    """Return the tokens that end a sequence."""
    ends = config.eos_token_id
    return (
        []
        if ends is None
        else [int(end) for end in ([ends] if isinstance(ends, int) else torch.as_tensor(ends).reshape(-1))]
    )


def stops_of(config: Any) -> list[str]:
    """Return the strings that end a text."""
    stops = config.stop_strings
    return [] if stops is None else [stops] if isinstance(stops, str) else list(stops)
