"""Instances to plan: small ones that brute force can settle, and large ones of a transformer's shape."""

import math
import random
from itertools import combinations, pairwise, permutations

from penstock.plan.cost.problem import Placed, Problem, bottleneck_s, fits_all
from penstock.plan.cost.stage_cost import Setting
from penstock.spec.cluster import Cluster, Device
from penstock.spec.profile import Boundary, Profile, Unit

# one block: norm, qkv, attention, projection, norm, fc1, gelu, fc2; its parts of the work and of the bytes after it
_WORK = (0.01, 0.22, 0.12, 0.08, 0.01, 0.28, 0.03, 0.25)
_BYTES = (2.0, 4.0, 3.0, 1.0, 2.0, 5.0, 5.0, 1.0)
_TOKENS_BYTES = 197 * 384 * 4


def transformer(num_units: int, seed: int) -> Profile:
    """Make units in the proportions of a vision transformer, each a little different, one millisecond on average."""
    rng = random.Random(seed)
    seconds = [_WORK[unit % 8] * 8e-3 * rng.uniform(0.9, 1.1) for unit in range(num_units)]
    crossing = [224 * 224 * 12.0, *(_BYTES[unit % 8] * _TOKENS_BYTES for unit in range(num_units - 1)), 4000.0]
    names = ["input", *(f"unit{unit}:after" for unit in range(num_units - 1)), "output"]
    return Profile(
        model="transformer", graph="0" * 16, device="core", threads=1, rows=(1,),
        boundaries=tuple(Boundary(name=n, bytes_per_row=b) for n, b in zip(names, crossing, strict=True)),
        units=tuple(Unit(forward_s=(s,), parameters=((f"w{u}", 500_000),)) for u, s in enumerate(seconds)),
        base_bytes=2e8, loader_s_per_row=1e-4, feed_s=1e-4, result_s=1e-4, send_s_per_byte=1e-10,
        receive_s_per_byte=1e-10, stage_overhead_s=1e-4,
    )  # fmt: skip


def unequal_devices(num_devices: int, seed: int) -> Cluster:
    """Make devices from a fifth to the whole of a core's speed, from 256 MiB to 1 GiB, at 1 or 10 Gbit/s."""
    rng = random.Random(seed)
    devices = tuple(
        Device(
            name=f"device{index}",
            speed=rng.uniform(0.2, 1.0),
            memory_bytes=rng.choice([2**28, 2**29, 2**30]),
            bandwidth_bytes_per_s=rng.choice([125e6, 1250e6]),
        )
        for index in range(num_devices)
    )
    return Cluster(devices=devices)


def small(seed: int) -> Problem:
    """Make up to ten units on up to four unequal devices with little memory and slow links."""
    rng = random.Random(seed)
    num_units = rng.randint(3, 10)
    units = tuple(
        Unit(forward_s=(rng.uniform(0.1, 2.0),), parameters=((f"w{u}", rng.randint(1, 40)),)) for u in range(num_units)
    )
    profile = Profile(
        model="small", graph="0" * 16, device="core", threads=1, rows=(1,), units=units,
        boundaries=tuple(Boundary(name=f"b{b}", bytes_per_row=rng.randint(0, 9)) for b in range(num_units + 1)),
        send_s_per_byte=rng.choice([0.0, 0.02]), receive_s_per_byte=rng.choice([0.0, 0.02]),
        feed_s=rng.choice([0.0, 0.2]), stage_overhead_s=rng.choice([0.0, 0.1]),
    )  # fmt: skip
    devices = tuple(
        Device(
            name=f"d{index}",
            speed=rng.uniform(0.2, 1.5),
            memory_bytes=rng.choice([80, 120, 200, 1000]),
            bandwidth_bytes_per_s=rng.choice([None, 4.0, 10.0]),
        )
        for index in range(rng.randint(2, 4))
    )
    return Problem(profile, Cluster(devices=devices), Setting())


def best_by_force(problem: Problem) -> float:
    """Return the best pace over every order of every selection of devices and every division; infinite for none."""
    best = math.inf
    for size in range(1, len(problem.devices) + 1):
        for cuts in combinations(range(1, problem.num_units), size - 1):
            bounds = list(pairwise([0, *cuts, problem.num_units]))
            for order in permutations(range(len(problem.devices)), size):
                division = tuple(Placed(n, start, end) for n, (start, end) in zip(order, bounds, strict=True))
                if fits_all(problem, division):
                    best = min(best, bottleneck_s(problem, division))
    return best
