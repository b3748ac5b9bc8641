"""What runs on every host: measure speeds and messages, then plan and train one shape after the other."""

import json
import os
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import torch

import penstock
from benchmarks.planning.shapes import plan_of_shape
from benchmarks.training.session import LENGTH, VOCABULARY, Language, next_token_loss
from penstock.deploy.worker import work
from penstock.group.entry import join_torchrun
from penstock.group.world import World
from penstock.measure.hosts import measure_messages
from penstock.plan.cost.predict import predict
from penstock.spec.cluster import Cluster, parse_cluster
from penstock.spec.plan import decode_plan, encode_plan
from penstock.spec.profile import Profile
from penstock.transport.collectives import all_gather
from penstock.wire import FEEDER

STEPS, ALONE_STEPS = 5, 6


def main() -> None:
    """Read the session's JSON file, measure, and write the rows beside it."""
    file = Path(sys.argv[1])
    session = json.loads(file.read_text())
    torch.set_num_threads(1)
    profile = msgspec.json.decode(session["profile"], type=Profile)
    cluster = parse_cluster(session["cluster"])
    profile = _with_messages(profile)
    model, ids = Language().train(), torch.randint(0, VOCABULARY, (session["batch"], LENGTH))
    rows = []
    for shape in session["shapes"]:
        with _join() as world:
            rows.append(_train(world, profile, cluster, model, ids, tuple(shape), session["rows"]))
            if world.rank == FEEDER:
                print(
                    f"{shape}: {rows[-1]['measured']:.2f} rows/s, predicted {rows[-1]['predicted']:.2f}",
                    file=sys.stderr,
                )
                file.with_suffix(".rows.json").write_text(json.dumps(rows))


def _join(*, followed: bool = False) -> World:
    """Meet in another world; the first process's store keeps its port to the end."""
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    return join_torchrun(followed=followed)


def _with_messages(profile: Profile) -> Profile:
    """Measure on the last host what messages cost; every host knows."""
    with _join(followed=True) as world:
        if world.rank != FEEDER:
            return msgspec.json.decode(work(world).message, type=Profile)
        found = msgspec.structs.replace(profile, **asdict(measure_messages(world, num_microbatches=40)))
        world.last_word = msgspec.json.encode(found).decode()
        return found


def _train(
    world: World, profile: Profile, cluster: Cluster, model: torch.nn.Module, ids: torch.Tensor,
    shape: tuple[int, ...], rows: int,
) -> dict[str, Any]:  # fmt: skip
    before = _speeds(world, profile, model, ids[:rows])
    told = ""
    if world.rank == FEEDER:
        told = encode_plan(plan_of_shape(profile, cluster.at_mean_speeds(before), shape, len(ids))).decode()
    plan = decode_plan(all_gather(world.transport, {"plan": told})[FEEDER]["plan"].encode())
    with penstock.Pipeline(model, (ids[:rows],), plan=plan, world=world, threads=1) as pipe:
        seconds = _steps(pipe, ids)
    after = _speeds(world, profile, model, ids[:rows])
    around = [statistics.fmean(pair) for pair in zip(before, after, strict=True)]
    return {
        "shape": shape, "microbatches": plan.microbatches, "measured": len(ids) / statistics.median(seconds),
        "predicted_beforehand": plan.prediction.rows_per_s,
        "predicted": predict(plan, profile, cluster.at_mean_speeds(around)).prediction.rows_per_s, "seconds": seconds,
        "speeds": around, "cuts": [pipeline.cut_sets[0].cuts for pipeline in plan.pipelines],
    }  # fmt: skip


def _steps(pipe: penstock.Pipeline, ids: torch.Tensor) -> list[float]:
    optimizer = pipe.optimizer(lambda parameters: torch.optim.AdamW(parameters, lr=3e-4))
    mine = pipe.trainer.now.placed.grid.rows(len(ids))[pipe.trainer.now.placed.replica_index]
    own, seconds = ids[mine.start : mine.stop], []
    for _ in range(STEPS + 1):
        begin = time.perf_counter()
        pipe.train_step(own, own, loss_fn=next_token_loss)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begin)
    return seconds[1:]  # the first one makes connections, buffers and the optimizer's state


def _speeds(world: World, profile: Profile, model: torch.nn.Module, ids: torch.Tensor) -> list[float]:
    """Let every host train by itself, all at once; return their speeds in multiples of the profiled core's."""
    expected = sum(unit.forward_s[0] + (unit.backward_s or (0.0,))[0] for unit in profile.units)
    seconds = []
    all_gather(world.transport, {})
    for _ in range(ALONE_STEPS + 1):
        begin = time.perf_counter()
        next_token_loss(model(ids), ids).backward()
        seconds.append(time.perf_counter() - begin)
    model.zero_grad()
    told = all_gather(world.transport, {"speed": expected / statistics.fmean(seconds[1:])})
    return [document["speed"] for document in told]


if __name__ == "__main__":
    main()
