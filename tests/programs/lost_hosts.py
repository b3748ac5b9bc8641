"""Streams through three hosts, and says when it has begun and which host was lost."""

import time
from collections.abc import Iterator
from typing import Any

from penstock.deploy.worker import follow
from penstock.errors import DeviceLost
from penstock.group.entry import join_torchrun
from penstock.pipeline import Pipeline
from tests.worlds import tower, tower_inputs


def feed() -> Iterator[Any]:
    for index in range(10**6):
        if index == 5:
            print("streaming", flush=True)
        time.sleep(0.01)
        yield tower_inputs(1)[0]


try:
    world = join_torchrun(followed=True)
    if world.rank:
        print("joined", flush=True)
        follow(world)
    else:
        with world, Pipeline(tower(), tower_inputs(1)[0], stages=3, world=world, threads=1) as pipe:
            for _ in pipe.stream(feed()):
                pass
except DeviceLost as error:
    print(f"lost at {time.monotonic()}: {error}", flush=True)
