"""Decode steps of transformers, of a plain loop with a CUDA graph, and of Penstock, with equal prompts and weights."""

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.gpu.clock import Row, around, first_seconds, per_second, seconds, tried
from penstock.group.entry import thread_worlds
from penstock.zoo.optional import optional_import

_WIDTHS = {  # of LlamaConfig
    "135M": {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
             "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True},
    "1B": {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
           "intermediate_size": 8192, "vocab_size": 128256, "tie_word_embeddings": True},
    "8B": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
           "intermediate_size": 14336, "vocab_size": 128256},
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
             "intermediate_size": 128, "vocab_size": 96},
}  # fmt: skip
# the most important first, as the time of a call may not suffice for all
_CASES = ((1, 128), (8, 128), (1, 2048), (64, 128), (8, 2048))
_TOKENS = 24


def decoding(device: torch.device, *, tiny: bool) -> Iterator[Row]:
    """Yield a row for each model, number of rows and context; `tokens_per_s` by system, tokens compared with eager."""
    models = {name: build(name, device) for name in (("tiny",) if tiny else ("135M", "1B", "8B"))}
    for rows, context in [(2, 8)] if tiny else _CASES:
        for name, model in models.items():
            yield measure(model, name, rows, context, device, every=tiny or (rows, context) == _CASES[0])


def build(name: str, device: torch.device) -> Any:
    """Make a Llama with random weights in bfloat16."""
    transformers = optional_import("transformers", "text")
    config = transformers.LlamaConfig(
        **_WIDTHS[name], max_position_embeddings=4096, eos_token_id=None, pad_token_id=0, bos_token_id=1
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


def measure(model: Any, name: str, rows: int, context: int, device: torch.device, *, every: bool) -> Row:
    """Measure the systems, with `every` also those that start slowly; eager Penstock first and last."""
    prompts = torch.randint(3, 96, (rows, context), generator=torch.Generator().manual_seed(1)).to(device)
    with torch.inference_mode():
        loop = GraphLoop(model, prompts, _TOKENS)
        capture_s = tried("loop with a CUDA graph", lambda: first_seconds(device, loop.prepare))
        wanted = model.generate(prompts, max_new_tokens=_TOKENS, do_sample=False)[:, context:].tolist()
        peers: dict[str, Callable[[], float]] = {"transformers eager": partial(generated, model, prompts, device)}
        if capture_s is not None:
            peers["loop with a CUDA graph"] = partial(seconds, device, loop.step, _TOKENS - 2)
        if every:
            peers["transformers static cache, compiled"] = partial(
                generated, model, prompts, device, cache_implementation="static"
            )
        found = {name: tried(name, peer) for name, peer in peers.items()}
    tokens: dict[str, list[list[int]]] = {} if capture_s is None else {"loop with a CUDA graph": loop.tokens()}

    def by(system: str, stages: int, **settings: bool) -> Callable[[], float]:
        def step() -> float:
            tokens[system], taken = by_penstock(model, prompts, stages, device, **settings)
            return taken

        return step

    systems = {
        "Penstock eager": by("Penstock eager", 1, graphs=False),
        "Penstock graphs": by("Penstock graphs", 1),
        "Penstock 2 stages": by("Penstock 2 stages", 2),
    }
    if every:
        systems["Penstock 2 processes"] = by("Penstock 2 processes", 2, processes=True)
    found |= around(systems, "Penstock eager")
    size = sum(parameter.nbytes for parameter in model.parameters())
    return {
        "section": "decode",
        "subject": f"{name}, {rows} rows, context {context}",
        "weight_bytes": size,
        "tokens_per_s": per_second(found, rows),
        "bytes_per_s": per_second(found, size),
        "rows_equal_to_transformers": {
            system: sum(a == b[: len(a)] for a, b in zip(own, wanted, strict=True)) for system, own in tokens.items()
        },
        "capture_s": capture_s,
    }


def generated(model: Any, prompts: Tensor, device: torch.device, **settings: Any) -> float:
    """Return the seconds of a step of `model.generate`, as the difference of a long and a short call."""

    def call(tokens: int) -> float:
        return seconds(
            device,
            lambda: model.generate(prompts, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, **settings),
            repeats=3,
        )

    return (call(_TOKENS) - call(2)) / (_TOKENS - 2)


class GraphLoop:
    """Greedy decoding in plain torch: steps over a static cache, as a CUDA graph on a GPU."""

    def __init__(self, model: Any, prompts: Tensor, tokens: int) -> None:
        transformers = optional_import("transformers", "text")
        rows, context = prompts.shape
        self._model, self._prompts = model, prompts
        self._graph: torch.cuda.CUDAGraph | None = None
        self._cache = transformers.StaticCache(config=model.config, max_cache_len=context + 4 * tokens)
        self._ids = prompts[:, -1:].clone()
        self._positions = torch.full((rows, 1), context, device=prompts.device)
        self._found: list[Tensor] = []

    def prepare(self) -> None:
        """Run the prompts, and capture a step."""
        logits = self._model(self._prompts, past_key_values=self._cache, use_cache=True, logits_to_keep=1).logits
        self._ids.copy_(logits[:, -1].argmax(-1, keepdim=True))
        self._found.append(self._ids.clone())
        if self._prompts.device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                self.step()
            side.synchronize()
            with torch.cuda.graph(graph):
                self._step()
            self._graph = graph

    def step(self) -> None:
        """Run one step."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self._step()
        self._found.append(self._ids.clone())

    def tokens(self) -> list[list[int]]:
        """Return the tokens of each row."""
        found: list[list[int]] = torch.cat(self._found, 1)[:, :_TOKENS].tolist()
        return found

    def _step(self) -> None:
        output = self._model(
            self._ids, past_key_values=self._cache, position_ids=self._positions, use_cache=True, logits_to_keep=1
        )
        self._ids.copy_(output.logits[:, -1].argmax(-1, keepdim=True))
        self._positions.add_(1)


def by_penstock(
    model: Any, prompts: Tensor, stages: int, device: torch.device, *, graphs: bool = True, processes: bool = False
) -> tuple[list[list[int]], float]:
    """Return the tokens of each row, and the median seconds between two tokens of the last row."""
    import penstock

    rows, context = prompts.shape
    world = None if processes else thread_worlds(["this process"])[0]
    settings: dict[str, Any] = {"slots": rows, "lanes": 1, "max_length": context + _TOKENS + 40, "speculate": False}
    with patch("penstock.runtime.graphs.ENABLED", graphs):
        with penstock.Generator(model, stages=stages, device=str(device), world=world, **settings) as generator:
            for _ in range(2):  # the first time captures
                requests = [generator.submit(row.tolist(), max_new_tokens=_TOKENS) for row in prompts]
                tokens = [request.result() for request in requests]
        if world is not None:
            world.close(0.0)
    came = [request.came_s for request in requests]
    begin = max(times[0] for times in came)  # all prompts have run
    steps = [b - a for a, b in zip(came[-1], came[-1][1:], strict=False) if a >= begin]
    return tokens, statistics.median(steps)
