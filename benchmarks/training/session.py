"""What runs on every host: one way to train a small GPT-2, or two in turns, some steps, tokens per second."""

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
from penstock.train.report import StepReport

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
    """Train as the settings say and, on the first host, write the seconds of each step."""
    file = Path(sys.argv[1])
    settings = json.loads(file.read_text())
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    generator = torch.Generator().manual_seed(rank if settings["rows_differ"] else 0)
    ids = torch.randint(0, VOCABULARY, (settings["rows"], LENGTH), generator=generator)
    ways = [_WAYS[name](settings, ids) for name in settings["ways"]]
    for step, _, _ in ways:
        step()  # connections, buffers, optimizer state
    measured: list[list[tuple[float, float | None, StepReport | None]]] = [[] for _ in ways]
    for _ in range(settings["steps"]):  # a step of each in turns, since the machine's speed drifts
        for (step, _, report), own in zip(ways, measured, strict=True):
            begin = time.perf_counter()
            loss = step()
            own.append((time.perf_counter() - begin, loss, report()))
    results = [
        {"seconds": [s for s, _, _ in own], "losses": [x for _, x, _ in own], "per_step": _mean([r for _, _, r in own])}
        for own in measured
    ]
    file.with_suffix(f".{rank}.json").write_text(json.dumps(results))
    for _, finish, _ in ways:
        finish()


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
    del settings
    _join()
    return _plain(DistributedDataParallel(Language().train()), ids, dist.destroy_process_group)


def _join() -> None:
    """Make torch's own group; penstock's processes meet at the port before."""
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    dist.init_process_group("gloo")


def _side_by_side(settings: dict[str, Any], ids: Tensor) -> Way:
    """Each host by itself, all at once: what this machine can give, whatever joins them."""
    del settings
    return _plain(Language().train(), ids, lambda: None)


def _plain(model: nn.Module, ids: Tensor, finish: Callable[[], None]) -> Way:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def step() -> float:
        loss = next_token_loss(model(ids), ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step, finish, lambda: None


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

    return step, dist.destroy_process_group, lambda: None


_WAYS = {"penstock": _penstock, "ddp": _ddp, "side by side": _side_by_side, "torch 1f1b": _torch_1f1b}

if __name__ == "__main__":
    main()
