"""The peer for comparison: torch.distributed.pipelining on the same devices.

The model is cut with `pipeline()` at the given modules, and ScheduleGPipe runs one microbatch for each image, all in
one step. Unlike with Penstock's stages, every process builds the whole model itself, from the name on its own command
line: no message can make a process load a model.
"""

import argparse
import datetime
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.deploy.jobs import DoMore, check_settings
from penstock.deploy.worker import Job, main
from penstock.graph.cuts import Cut
from penstock.group.entry import start_local
from penstock.group.world import World
from penstock.zoo.models.models import load_model

PEER = "peer"
_TIMEOUT = datetime.timedelta(minutes=30)


class PeerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run of the peer: the first modules of later stages, such as `("blocks.3", "blocks.6")`, ranks, microbatches."""

    modules: tuple[str, ...]
    ranks: tuple[int, ...]
    num_microbatches: int
    threads: int
    number: int

    def document(self) -> DoMore:
        """Return the job for the other processes, which read the model's name from their command line."""
        return DoMore(name=PEER, settings=msgspec.to_builtins(self))


def run_peer(world: World, settings: PeerSettings, model: nn.Module, example: Tensor) -> float:
    """Run the peer's pipeline on the participating ranks; each returns the seconds of the slowest rank.

    `example` is one microbatch. Raises torch's exceptions if torch cannot cut the model.
    """
    # imported only if the peer runs: it imports torch.export, which takes a good part of a second
    from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

    torch.set_num_threads(settings.threads)
    ranks, num_microbatches = settings.ranks, settings.num_microbatches
    store = dist.PrefixStore(f"peer/{settings.number}", world.store)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=ranks.index(world.rank), world_size=len(ranks), timeout=_TIMEOUT)
    try:
        with torch.no_grad():
            split = dict.fromkeys(settings.modules, SplitPoint.BEGINNING)
            pipe = pipeline(model, mb_args=(example,), split_spec=split)
            stage = pipe.build_stage(dist.get_rank(), torch.device("cpu"))
            inputs = torch.cat([example] * num_microbatches)
            # the first step also sets up connections and buffers
            _step(ScheduleGPipe(stage, n_microbatches=2), inputs[: 2 * len(example)])
            schedule = ScheduleGPipe(stage, n_microbatches=num_microbatches)
            dist.barrier()
            begin = time.perf_counter()
            _step(schedule, inputs)
            seconds = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            return float(seconds)
    finally:
        dist.destroy_process_group()


def _step(schedule: Any, inputs: Tensor) -> None:
    if dist.get_rank() == 0:
        schedule.step(inputs)
    else:
        schedule.step()


def block_after(cut: Cut) -> str:
    """Return the name of the module that begins at a cut between blocks, as the peer expects it."""
    names = [name.removesuffix(":before") for name in (cut.name, *cut.aliases) if name.endswith(":before")]
    return min((name for name in names if "/" not in name), key=len)


def do_peer(world: World, settings: PeerSettings, model: str, seed: int) -> float | None:
    """Take part in a run of the model on this process's own command line."""
    if world.rank not in settings.ranks:
        return None
    zoo = load_model(model, seed=seed, whole=True)
    inputs = [x for x in [*zoo.example_args, *zoo.example_kwargs.values()] if isinstance(x, Tensor)]
    return run_peer(world, settings, zoo.module, inputs[0][:1])


def peer_job(model: str, seed: int) -> dict[str, Job]:
    """Return the job of a process of `penstock bench --set peer=true`; see `deploy.worker.work`."""
    return {PEER: lambda world, settings: do_peer(world, check_settings(settings, PeerSettings), model, seed)}


def start_peers(num_workers: int, model: str, seed: int) -> World:
    """Start workers on this machine that can also run the peer of this model."""
    return start_local(num_workers, module="penstock.bench.peer", arguments=["--model", model, "--seed", str(seed)])


def _prepare(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], Mapping[str, Job]]:
    parser.add_argument("--model", required=True)
    parser.add_argument("--seed", type=int, required=True)
    return lambda given: peer_job(given.model, given.seed)


if __name__ == "__main__":
    sys.exit(main(_prepare))
