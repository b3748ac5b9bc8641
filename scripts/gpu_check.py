"""Compare stages on one GPU with one process on that GPU: `python scripts/gpu_check.py`.

Two stages share the GPU, as threads or stages of one process and as processes over ZeroMQ. Outputs have the bits
of one process, or 1e-6 of their norm beside them; gradients and what SGD makes of them 1e-5. Where there are two
GPUs the same goes from one to the other over NCCL. Prints a table and ends with status 1 where something is further
off, with 2 where there is no GPU. `--device cpu` does the same on the CPU, which shows whether the script itself works.
"""

import argparse
import copy
import math
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import penstock
from penstock.errors import PenstockError
from penstock.tensors import find_device
from penstock.zoo.optional import optional_import

OUTPUTS, GRADIENTS = 1e-6, 1e-5
DEVICES = 1e-3  # between devices, since cuDNN rounds to TF32 unless told otherwise
WIDTH, ROWS, MICROBATCHES, STEPS, NEW_TOKENS, DEADLINE_S = 64, 8, 4, 3, 30, 240


class Tokens(nn.Module):
    """Patches of images as rows, each with its place, which is made in the forward pass."""

    def forward(self, patches: Tensor) -> Tensor:
        x = patches.flatten(2).transpose(1, 2)
        result: Tensor = x + torch.arange(x.shape[1], device=x.device, dtype=x.dtype)[:, None] / x.shape[1]
        return result


class Block(nn.Module):
    """Attention with a mask, and two linear layers."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.mix = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        result: Tensor = x + self.mix(x)
        return result


class Head(nn.Linear):
    """Classes from the mean of the rows."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mean(1))


@dataclass(frozen=True)
class Row:
    """One comparison: how far off it is, and how far it may be."""

    name: str
    error: float
    limit: float

    @property
    def holds(self) -> bool:
        return self.error <= self.limit  # also false for what is no number


def make(dropout: float = 0.0) -> nn.Sequential:
    """The same model every time: a convolution with BatchNorm, blocks of attention, and a head."""
    torch.manual_seed(0)
    patches = nn.Sequential(nn.Conv2d(3, WIDTH, 4, 4), nn.BatchNorm2d(WIDTH), nn.ReLU(inplace=True), Tokens())
    return nn.Sequential(patches, Block(dropout), Block(dropout), Head(WIDTH, 10))


def batches(num: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    """So many different batches, on the CPU."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(ROWS, 3, 16, 16, generator=generator), torch.randint(0, 10, (ROWS,), generator=generator))
        for _ in range(num)
    ]


def error(expected: Tensor, given: Tensor, least: float = 0.0) -> float:
    """The distance over the expected norm, or over `least` where that is more; none where all bits are equal."""
    expected, given = expected.detach().double().cpu(), given.detach().double().cpu()
    distance = float((expected - given).norm())
    return distance and distance / max(float(expected.norm()), least)


def errors(expected: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> float:
    """The largest error; a gradient that is zero but for rounding is measured by a thousandth of the largest norm."""
    least = 1e-3 * max(float(tensor.double().norm()) for tensor in expected.values())
    return max(error(tensor, given[name], least) for name, tensor in expected.items())


def by_hand(device: torch.device) -> dict[str, Tensor]:
    """Train in plain torch with the microbatches that the stages have; gives gradients and weights."""
    model = make().train().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    found: dict[str, Tensor] = {}
    for step, (images, labels) in enumerate(batches()):
        for rows, wanted in zip(images.chunk(MICROBATCHES), labels.chunk(MICROBATCHES), strict=True):
            (F.cross_entropy(model(rows.to(device)), wanted.to(device), reduction="sum") / ROWS).backward()
        if not step:
            found = {f"gradient {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return found | {f"weight {name}": p.detach() for name, p in model.named_parameters()}


def by_stages(device: str, stages: int = 2, **settings: object) -> tuple[list[float], dict[str, Tensor]]:
    """Train in stages, in as many processes as there are; gives the losses, and what this process holds."""
    dropout = float(settings.pop("dropout", 0.0))  # type: ignore[arg-type]
    found: dict[str, Tensor] = {}
    losses = []
    model, example = make(dropout).train(), torch.zeros(2, 3, 16, 16)
    pipe = penstock.Pipeline(
        model, example, stages=stages, microbatches=MICROBATCHES, device=device, seed=7, **settings  # type: ignore[arg-type]
    )  # fmt: skip
    with pipe:
        optimizer = pipe.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9))
        for step, (images, labels) in enumerate(batches()):
            losses.append(float(pipe.train_step(images, labels, F.cross_entropy)))
            if not step:
                found = {f"gradient {n}": p.grad.clone() for n, p in pipe.named_parameters() if p.grad is not None}
            optimizer.step()
            optimizer.zero_grad()
        found |= {f"weight {name}": p.detach().clone() for name, p in pipe.named_parameters()}
        states = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
        strays = {str(tensor.device) for tensor in (*found.values(), *states)} - {str(find_device(device, _position()))}
        if strays:
            raise SystemExit(f"tensors of a stage lie on {', '.join(sorted(strays))}, not on {device}")
    return losses, found


def _position() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def in_processes(device: str, way: str = "host") -> dict[str, Tensor]:
    """Train with a process for each of two stages; gives gradients and weights of both."""
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": "2"}
        probe.close()
        ranks = []
        for rank in range(2):
            told = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
            command = [sys.executable, __file__, "--device", device, "--rank-of", folder, "--way", way]
            ranks.append(subprocess.Popen(command, env={**os.environ, **meeting, **told}))
        try:
            statuses = [process.wait(DEADLINE_S) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        if any(statuses):
            raise SystemExit(f"the processes of the stages ended with {statuses}; what they wrote is above")
        return load_file(f"{folder}/0") | load_file(f"{folder}/1")


def streamed(device: torch.device) -> Iterator[Row]:
    """Outputs of two stages, against the model on the device."""
    model = make().eval().to(device)
    inputs = [rows for images, _ in batches() for rows in (images, images[:3])]
    with torch.inference_mode():
        expected = [model(images.to(device)) for images in inputs]
    threads = torch.get_num_threads()
    apart = penstock.Pipeline(make().eval(), inputs[0], stages=2, device=str(device), threads=threads)
    within = penstock.Pipeline([model[:2], model[2:]], inputs[0].to(device), threads=threads)
    for name, pipe in (("2 stages in processes, over ZeroMQ", apart), ("2 modules in threads", within)):
        with pipe:
            outputs = list(pipe.stream(inputs))
        if any(output.device.type != "cpu" for output in outputs):
            raise SystemExit("the outputs of a stream lie elsewhere than on the CPU")
        yield Row(f"stream, {name}", max(error(a, b) for a, b in zip(expected, outputs, strict=True)), OUTPUTS)


def trained(device: torch.device) -> Iterator[Row]:
    """Gradients and weights of two stages, against plain torch on the device."""
    expected, name = by_hand(device), str(device)
    yield Row("training, 2 stages in one process", errors(expected, by_stages(name)[1]), GRADIENTS)
    yield Row("training, 2 processes over ZeroMQ", errors(expected, in_processes(name)), GRADIENTS)


def repeated(device: torch.device) -> Iterator[Row]:
    """Losses and weights of two stages, against one stage or another device: what plain torch has no equal of."""
    name = str(device)
    for what, settings in (
        ("dropout", {"dropout": 0.2}),
        ("zero bubble", {"schedule": "zero-bubble"}),
        ("bfloat16 autocast", {"autocast": torch.bfloat16}),
    ):
        alone, _ = by_stages(name, 1, **settings)
        losses, _ = by_stages(name, **settings, checkpointing=True)
        what = f"{what}: losses of 1 stage and of 2 that recompute"
        yield Row(what, error(torch.tensor(alone), torch.tensor(losses)), GRADIENTS)
    yield Row("a checkpoint goes on on the CPU", _continued(name), DEVICES)


def _continued(device: str) -> float:
    """Save after a step on the device, take another one there and on the CPU; gives the error of the weights."""
    images, labels = batches(1)[0]
    found: list[dict[str, Tensor]] = []
    with tempfile.TemporaryDirectory() as folder:
        for where in (device, "cpu"):
            with penstock.Pipeline(make().train(), images[:2], stages=2, microbatches=2, device=where) as pipe:
                optimizer = pipe.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9))
                for step in range(2):
                    if not step and found:
                        pipe.load_checkpoint(folder, optimizer)
                        continue
                    pipe.train_step(images, labels, F.cross_entropy)
                    optimizer.step()
                    optimizer.zero_grad()
                    if not step:
                        pipe.save_checkpoint(folder, optimizer)
                found.append({name: p.detach().cpu() for name, p in pipe.named_parameters()})
    return errors(*found)


def piped(device: torch.device) -> Iterator[Row]:
    """`penstock.Pipe` with two stages on the device, against its module."""
    model = make().train().to(device)
    pipe = penstock.Pipe(model, split_size=ROWS // 2, balance=[2, 2])
    images, labels = (tensor.to(device) for tensor in batches(1)[0])
    found = []
    for output in (torch.cat([model(rows) for rows in images.chunk(2)]), pipe(images)):
        F.cross_entropy(output, labels).backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        found.append({"output": output.detach(), **gradients})
        model.zero_grad()
    yield Row("penstock.Pipe, 2 stages", errors(*found), GRADIENTS)


def across(device: torch.device) -> Iterator[Row]:
    """Outputs of two stages on two GPUs over NCCL, against the model on one; says so where there is no second."""
    if torch.cuda.device_count() < 2 or device.type != "cuda":
        print("NCCL between two GPUs is not checked: there are fewer than two here", file=sys.stderr)
        return
    model, inputs = make().eval().to(device), [rows for images, _ in batches() for rows in (images, images[:3])]
    with torch.inference_mode():
        expected = [model(images.to(device)) for images in inputs]
    with penstock.Pipeline(
        make().eval(), inputs[0], stages=2, device="cuda", links=penstock.LinkOptions(between_gpus="nccl")
    ) as pipe:
        outputs = list(pipe.stream(inputs))
    yield Row("stream, 2 GPUs over NCCL", max(error(a, b) for a, b in zip(expected, outputs, strict=True)), OUTPUTS)
    yield Row("training, 2 GPUs over NCCL", errors(by_hand(device), in_processes("cuda", "nccl")), GRADIENTS)


def generated(device: torch.device) -> Iterator[Row]:
    """Tokens of language models in one stage and in two, against `model.generate`; last from a model on the device."""
    for name, model in _decoders().items():
        prompts = [torch.randint(3, 90, (1, length)) for length in (5, 33, 70)]
        own = copy.deepcopy(model).to(device)
        expected = [own.generate(ids.to(device), max_new_tokens=NEW_TOKENS, do_sample=False) for ids in prompts]
        wanted = [row[0, -NEW_TOKENS:].tolist() for row in expected]
        logprobs = []
        for stages, given in ((1, model), (2, model), (1, own)):
            with penstock.Generator(given, stages=stages, slots=2, max_length=128, device=str(device)) as generator:
                requests = [generator.submit(ids[0].tolist(), max_new_tokens=NEW_TOKENS) for ids in prompts]
                found = [request.result() for request in requests]
            wrong = sum(a != b for a, b in zip(found, wanted, strict=True))
            yield Row(f"{name}, stages={stages} from {given.device.type}: texts with other tokens", wrong, 0.0)
            logprobs.append(torch.tensor([each for request in requests for each in request.logprobs]))
        yield Row(f"{name}: log-probabilities of 1 stage and of 2", error(logprobs[0], logprobs[1]), OUTPUTS)


def _decoders() -> dict[str, Any]:
    transformers = optional_import("transformers", "text")
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 3, "eos_token_id": None}
    llama = transformers.LlamaConfig(**sizes, num_attention_heads=4, intermediate_size=96, num_key_value_heads=2)
    mamba = transformers.MambaConfig(**sizes, state_size=8)
    t5 = transformers.T5Config(
        vocab_size=96, d_model=48, d_kv=12, d_ff=96, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    t5.eos_token_id = None
    models = [
        transformers.LlamaForCausalLM(llama),
        transformers.MambaForCausalLM(mamba),
        transformers.T5ForConditionalGeneration(t5),
    ]
    return {type(model).__name__: model.eval() for model in models}


CHECKS: dict[str, Callable[[torch.device], Iterator[Row]]] = {
    "streams": streamed, "training": trained, "repeats": repeated, "pipe": piped, "generation": generated,
    "nccl": across,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, print, and say by the status whether all held."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checks", nargs="*", help=f"some of {', '.join(CHECKS)}; all where none is named")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu to try the script")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)  # one of the processes that it starts
    parser.add_argument("--way", default="host", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if strange := set(given.checks) - CHECKS.keys():
        parser.error(f"the checks are {', '.join(CHECKS)}, not {', '.join(strange)}")
    try:
        device = find_device(given.device)
        if given.rank_of is not None:
            held = by_stages(given.device, links=penstock.LinkOptions(between_gpus=given.way))[1]
            tensors = {name: tensor.cpu().contiguous() for name, tensor in held.items()}
            save_file(tensors, given.rank_of / os.environ["RANK"])
            return 0
    except PenstockError as problem:
        print(problem, file=sys.stderr)
        return 2
    rows: list[Row] = []
    for name in given.checks or CHECKS:
        try:
            rows += CHECKS[name](device)
        except PenstockError as problem:
            rows.append(Row(f"{name}: {problem}", math.inf, 0.0))
    table = Table(
        "on " + (torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"), "error", "limit", ""
    )
    for row in rows:
        shown = f"{row.error:.1e}" if row.error else "bit-equal"
        table.add_row(row.name, shown, f"{row.limit:.0e}", "holds" if row.holds else "MISSED")
    Console(width=None if sys.stdout.isatty() else 100).print(table)
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
