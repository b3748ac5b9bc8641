"""Seconds of a training step: plain torch and Penstock, eager and compiled; a cut's cost; frozen layers."""

import copy
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import penstock
from benchmarks.gpu.clock import Row, around, first_seconds, per_second, seconds, settle
from penstock.group.entry import thread_worlds
from penstock.zoo.optional import optional_import

_STEPS = 20


def subject(name: str, *, tiny: bool) -> tuple[nn.Module, Tensor, Tensor, Callable[..., Tensor]]:
    """Return a model in training mode without dropout, a batch of inputs and labels, and the loss."""
    torch.manual_seed(0)
    if name == "ViT-S":
        sizes: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2} if tiny else {}
        model = optional_import("timm", "vision").create_model("vit_small_patch16_224", **sizes).train()
        rows, pixels = (4, 32) if tiny else (256, 224)
        return model, torch.randn(rows, 3, pixels, pixels), torch.randint(0, 1000, (rows,)), F.cross_entropy
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 96} if tiny else {}
    transformers = optional_import("transformers", "text")
    config = transformers.GPT2Config(**sizes, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, use_cache=False)
    ids = torch.randint(3, 96, (4, 16) if tiny else (16, 1024))
    return _Logits(transformers.GPT2LMHeadModel(config).train()), ids, ids, next_tokens


class _Logits(nn.Module):
    """The logits of a language model, without the rest of its output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=ids).logits
        return logits


def next_tokens(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the mean loss of each next token."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


class _Systems:
    """The systems that train one model, with their losses and the seconds of their first step."""

    def __init__(self, name: str, device: torch.device, *, tiny: bool) -> None:
        self.name, self.device, self.tiny = name, device, tiny
        self.losses: dict[str, list[float]] = {}
        self.first_s: dict[str, float] = {}

    def plain(self, system: str, *, compiled: bool = False) -> float:
        """Return the seconds of a step in plain torch."""
        model, inputs, labels, loss_fn = subject(self.name, tiny=self.tiny)
        model, inputs, labels = model.to(self.device), inputs.to(self.device), labels.to(self.device)
        optimizer, run = _adamw(model.parameters()), torch.compile(model) if compiled else model
        losses: list[Tensor] = []

        def step() -> None:
            with torch.autocast(self.device.type, dtype=torch.bfloat16):
                loss = loss_fn(run(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())

        self.first_s[system] = first_seconds(self.device, step)
        taken = seconds(self.device, step, 3 if self.tiny else _STEPS)
        self.losses[system] = [float(loss) for loss in losses]
        return taken

    def stages(self, system: str, count: int, runtime: str = "eager") -> float:
        """Return the seconds of a step in stages of this process."""
        self.losses[system], self.first_s[system], taken = in_stages(
            self.name, self.device, count, runtime, tiny=self.tiny
        )
        return taken


def training(device: torch.device, *, tiny: bool) -> Iterator[Row]:
    """Yield a row for each model; `steps_per_s` by system, and the largest difference of a loss, relative to plain."""
    for name in ("ViT-S", "GPT-2"):
        systems = _Systems(name, device, tiny=tiny)
        found = around(
            {
                "plain": partial(systems.plain, "plain"),
                "Penstock 1": partial(systems.stages, "Penstock 1", 1),
                "Penstock 2": partial(systems.stages, "Penstock 2", 2),
                "Penstock 2 processes": partial(in_processes, name, device, tiny=tiny),
            },
            "plain",
        )
        if not tiny:  # on a CPU it takes minutes; `benchmarks.compiled` is for that
            found |= around(
                {
                    "plain compiled": partial(systems.plain, "plain compiled", compiled=True),
                    "Penstock 1 compiled": partial(systems.stages, "Penstock 1 compiled", 1, "compiled"),
                    "Penstock 2 compiled": partial(systems.stages, "Penstock 2 compiled", 2, "compiled"),
                },
                "plain compiled",
            )
        wanted = systems.losses["plain"]
        yield {
            "section": "training",
            "subject": name,
            "steps_per_s": per_second(found),
            "first_step_s": systems.first_s,
            "loss_error": {
                system: max(abs(a / b - 1) for a, b in zip(own, wanted, strict=False))
                for system, own in systems.losses.items()
            },
        }


def in_stages(
    name: str, device: torch.device, stages: int, runtime: str, *, tiny: bool
) -> tuple[list[float], float, float]:
    """Return losses, the seconds of the first step, and the median seconds of a step in stages."""
    model, inputs, labels, loss_fn = subject(name, tiny=tiny)
    losses: list[Tensor] = []
    with penstock.Pipeline(
        model, inputs[:2], stages=stages, microbatches=1, device=str(device), autocast=torch.bfloat16, runtime=runtime
    ) as pipe:
        optimizer = pipe.optimizer(_adamw)
        where = pipe.trainer.device
        inputs, labels = inputs.to(where), labels.to(where)

        def step() -> None:
            losses.append(pipe.train_step(inputs, labels, loss_fn))
            optimizer.step()
            optimizer.zero_grad()

        first_s = first_seconds(where, step)
        taken = seconds(where, step, 3 if tiny else _STEPS)
    return [float(loss) for loss in losses], first_s, taken


def in_processes(name: str, device: torch.device, *, tiny: bool) -> float:
    """Return the median seconds of a step in two stages, in a process each, which share the device."""
    with socket.socket() as probe, TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": "2"}
        probe.close()
        command = [sys.executable, "-m", "benchmarks.gpu.training", name, str(device), str(int(tiny)), folder]
        ranks = []
        for rank in range(2):
            place = {"RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
            ranks.append(subprocess.Popen(command, env={**os.environ, **meeting, **place}))
        try:
            statuses = [process.wait(120) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        if any(statuses):
            raise RuntimeError(f"the processes of two stages ended with {statuses}; what they wrote is above")
        return float(json.loads(Path(folder, "0").read_text()))


def cuts(device: torch.device, *, tiny: bool) -> Iterator[Row]:
    """Yield what a cut costs in a stream of one process: seconds of a microbatch in two stages less those in one."""
    width, rows, count = (64, 4, 8) if tiny else (1024, 64, 200)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(8))).eval()
    example = torch.randn(rows, width)
    with torch.inference_mode():
        wanted = copy.deepcopy(model).to(device)(example.to(device)).cpu()

    def streamed(stages: int, *, processes: bool = False) -> tuple[float, bool]:
        world = None if processes else thread_worlds(["this process"])[0]
        with penstock.Pipeline(model, example, stages=stages, device=str(device), world=world, threads=1) as pipe:
            list(pipe.stream([example] * 4))
            begin = time.perf_counter()
            outputs = list(pipe.stream([example] * count))
            taken = (time.perf_counter() - begin) / count
        if world is not None:
            world.close(0.0)
        return taken, all(torch.equal(output, wanted) for output in outputs)

    one, two, again = streamed(1), streamed(2), streamed(1)
    alone = (one[0] + again[0]) / 2
    apart = streamed(2, processes=True)
    yield {
        "section": "cut", "subject": f"{rows} x {width} float32", "cut_s": two[0] - alone,
        "process_s": apart[0] - alone, "cut_bytes": rows * width * 4, "bit_equal": one[1] and two[1] and apart[1],
    }  # fmt: skip


def frozen(device: torch.device, *, tiny: bool) -> Iterator[Row]:
    """Yield images per second by frozen layers of the ViT, with and without the cache of their outputs."""
    layers = (0, 1) if tiny else (0, 4, 8, 11)
    for cache in (False, True):
        model, inputs, labels, loss_fn = subject("ViT-S", tiny=tiny)
        data = TensorDataset(inputs, labels)
        found: dict[str, float] = {}
        with penstock.Pipeline(model, inputs[:2], stages=1, microbatches=1, device=str(device)) as pipe:
            optimizer = pipe.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.0))
            loader = pipe.loader(data, batch_size=max(2, len(inputs) // 4))
            plan = [number for number in layers for _ in range(2)]  # the first epoch with more frozen layers fills
            pipe.elastic(loader, freeze=plan, epochs=len(plan), cache=cache, pack=False, replicate=False)
            for number in plan:
                settle(device)
                begin = time.perf_counter()
                for images, classes in loader:
                    pipe.train_step(images, classes, loss_fn)
                    optimizer.step()
                    optimizer.zero_grad()
                settle(device)
                found[str(number)] = len(inputs) / (time.perf_counter() - begin)
        yield {"section": "frozen", "subject": f"ViT-S, cache {'on' if cache else 'off'}", "images_per_s": found}


if __name__ == "__main__":
    name, place, small, folder = sys.argv[1:]
    result = in_stages(name, torch.device(place), 2, "eager", tiny=bool(int(small)))[2]
    Path(folder, os.environ["RANK"]).write_text(json.dumps(result))
