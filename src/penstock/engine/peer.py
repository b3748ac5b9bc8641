"""The peer to compare with: torch.distributed.pipelining on the same devices.

The model is cut with `pipeline()` at the given modules, and ScheduleGPipe runs one microbatch for each
image, all in one step. Unlike a stage of ours, every process builds the whole model by itself.
"""

import datetime
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.engine.world import World

_TIMEOUT = datetime.timedelta(minutes=30)


def run_peer(
    world: World,
    model: nn.Module,
    example: Tensor,
    *,
    modules: Sequence[str],
    ranks: Sequence[int],
    num_microbatches: int,
    threads: int,
    number: int,
) -> float | None:
    """Run the peer's pipeline on these ranks; gives the seconds of the slowest one, on each of them.

    `example` is one microbatch; `modules` are where stages begin, as in `["blocks.3", "blocks.6"]`. Ranks
    that take no part get None. Raises what torch raises for a model that it cannot cut.
    """
    # loaded only where the peer runs: it brings in torch.export and a good part of a second
    from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

    if world.rank not in ranks:
        return None
    torch.set_num_threads(threads)
    store = dist.PrefixStore(f"peer/{number}", world.store)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=ranks.index(world.rank), world_size=len(ranks), timeout=_TIMEOUT)
    try:
        with torch.no_grad():
            split = dict.fromkeys(modules, SplitPoint.BEGINNING)
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


def peer_document(
    model: str,
    seed: int,
    modules: Sequence[str],
    ranks: Sequence[int],
    num_microbatches: int,
    threads: int,
    number: int,
) -> dict[str, Any]:
    """Describe the run as a job for the other processes; they build the model by its name."""
    return {
        "kind": "peer",
        "model": model,
        "seed": seed,
        "modules": list(modules),
        "ranks": list(ranks),
        "num_microbatches": num_microbatches,
        "threads": threads,
        "number": number,
    }


def do_peer(world: World, document: Mapping[str, Any]) -> float | None:
    """Take part in the run that a document describes."""
    from penstock.zoo.models import load_model

    if world.rank not in document["ranks"]:
        return None
    zoo = load_model(document["model"], seed=int(document["seed"]), whole=True)
    inputs = [x for x in [*zoo.example_args, *zoo.example_kwargs.values()] if isinstance(x, Tensor)]
    return run_peer(
        world,
        zoo.module,
        inputs[0][:1],
        modules=[str(name) for name in document["modules"]],
        ranks=[int(rank) for rank in document["ranks"]],
        num_microbatches=int(document["num_microbatches"]),
        threads=int(document["threads"]),
        number=int(document["number"]),
    )
