"""What runs on every host: some ways to train a small GPT-2, taking their steps in turns."""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

import penstock
from penstock.train.step import StepReport

# a step that gives its loss where it is known, the end, and what the last step took
Way = tuple[Callable[[], float | None], Callable[[], None], Callable[[], StepReport | None]]
VOCABULARY, LENGTH, LAYERS, WIDTH, HEADS = 4096, 128, 6, 384, 6


class Language(nn.Module):
    """GPT-2 from tokens to logits, the embedding tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        self.model = GPT2LMHeadModel(config)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(ids).logits
        return logits


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Mean over all tokens but the first of each row."""
    return functional.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1))


def main() -> None:
    """Train as the settings of each way say, and write the seconds of its steps."""
    file = Path(sys.argv[1])
    settings = json.loads(file.read_text())["ways"]
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    ways = [_WAYS[each["way"]](each, _tokens(each, rank)) for each in settings]
    _join()
    for step, _, _ in ways:
        step()  # connections, buffers, optimizer state
    measured: list[list[tuple[float, float, float | None, StepReport | None]]] = [[] for _ in ways]
    for _ in range(settings[0]["steps"]):  # a step of each in turns, since the machine's speed drifts
        for (step, _, report), own in zip(ways, measured, strict=True):
            dist.barrier()
            begin, begin_cpu = time.perf_counter(), time.process_time()
            loss = step()
            own.append((time.perf_counter() - begin, time.process_time() - begin_cpu, loss, report()))
    results = [
        {name: [found[place] for found in own] for place, name in enumerate(("seconds", "cpu_seconds", "losses"))}
        | {"per_step": _mean([report for *_, report in own])}
        for own in measured
    ]
    file.with_suffix(f".{rank}.json").write_text(json.dumps(results))
    for _, finish, _ in ways:
        finish()
    dist.destroy_process_group()


def _tokens(settings: dict[str, Any], rank: int) -> Tensor:
    """Random rows: replicas have their own, stages of one pipeline the same."""
    generator = torch.Generator().manual_seed(rank if settings["replicas"] > 1 else 0)
    return torch.randint(0, VOCABULARY, (settings["rows"], LENGTH), generator=generator)


def _mean(reports: list[StepReport | None]) -> dict[str, float] | None:
    """What a step took of this host on average, where its way tells."""
    told = [dataclasses.asdict(report) for report in reports if report is not None]
    return {key: sum(each[key] for each in told) / len(told) for key in told[0]} if told else None


def _penstock(settings: dict[str, Any], ids: Tensor) -> Way:
    rows = settings["rows"] // settings["microbatches"]
    pipe = penstock.Pipeline(
        Language().train(), (ids[:rows],), stages=settings["stages"], replicas=settings["replicas"],
        schedule=settings["schedule"], microbatches=settings["microbatches"], threads=1,
    )  # fmt: skip
    optimizer = pipe.optimizer(lambda parameters: torch.optim.AdamW(parameters, lr=3e-4))

    def step() -> float:
        loss = pipe.train_step(ids, ids, loss_fn=next_token_loss)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step, pipe.close, lambda: pipe.last_step


def _ddp(settings: dict[str, Any], ids: Tensor) -> Way:
    _join()
    return _plain(DistributedDataParallel(Language().train()), settings, ids)


def _join() -> None:
    """Make torch's own group, once; penstock's processes meet at the port before."""
    if not dist.is_initialized():
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
        dist.init_process_group("gloo")


def _side_by_side(settings: dict[str, Any], ids: Tensor) -> Way:
    """Each host by itself, all at once: what this machine can give, whatever joins them."""
    return _plain(Language().train(), settings, ids)


def _alone(settings: dict[str, Any], ids: Tensor) -> Way:
    """The first host by itself while the others wait."""
    return _plain(Language().train(), settings, ids) if os.environ["RANK"] == "0" else (lambda: None, *_NOTHING)


_NOTHING = (lambda: None), (lambda: None)


def _plain(model: nn.Module, settings: dict[str, Any], ids: Tensor) -> Way:
    """An ordinary loop, gradients of the microbatches accumulated."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    parts = ids.chunk(settings["microbatches"])

    def step() -> float:
        total = 0.0
        for part in parts:
            loss = next_token_loss(model(part), part) / len(parts)
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step, *_NOTHING


def _torch_1f1b(settings: dict[str, Any], ids: Tensor) -> Way:
    from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline

    _join()
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = settings["rows"] // settings["microbatches"]
    starts = [round(LAYERS * index / size) for index in range(1, size)]
    split = {f"model.transformer.h.{start}": SplitPoint.BEGINNING for start in starts}
    pipe = pipeline(Language().train(), mb_args=(ids[:rows],), split_spec=split)
    stage = pipe.build_stage(rank, torch.device("cpu"))
    schedule = Schedule1F1B(stage, settings["microbatches"], loss_fn=next_token_loss)
    optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=3e-4)

    def step() -> float | None:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(ids)
        elif rank == size - 1:
            schedule.step(target=ids, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        return float(torch.stack(losses).detach().mean()) if losses else None  # the last host alone has it

    return step, *_NOTHING


_WAYS = {"penstock": _penstock, "ddp": _ddp, "alone": _alone, "side by side": _side_by_side, "torch 1f1b": _torch_1f1b}

if __name__ == "__main__":
    main()
