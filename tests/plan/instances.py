"""Small random instances, and every plan there is for them."""

import random
from collections.abc import Iterator
from itertools import combinations, permutations

from penstock.plan.cost.problem import Division, Placed, Problem, bottleneck_s, fits_all, latency_s
from penstock.plan.cost.stage_cost import Setting
from penstock.spec.cluster import Cluster, Device, Link
from penstock.spec.profile import Boundary, Profile, RuntimeColumn, Unit


def random_problem(seed: int, *, max_units: int = 10, max_devices: int = 4, trains: bool = False) -> Problem:
    """Up to ten units and four devices, with shared tensors, tight memories, slow links and a feeder."""
    rng = random.Random(seed)
    num_units = rng.randint(2, max_units)
    tensors = [(f"w{index}", rng.randint(1, 40)) for index in range(num_units)]
    units = tuple(
        Unit(
            forward_s=(rng.randint(1, 20) / 10,),
            backward_s=(rng.randint(1, 40) / 10,),
            parameters=tuple(rng.sample(tensors, k=rng.randint(0, 2))),
            kept_bytes_per_row=rng.randint(0, 9),
            working_bytes_per_row=rng.randint(0, 20),
        )
        for _ in range(num_units)
    )
    overhead_s, feed_s, result_s = rng.choice([0, 0.1, 0.5]), rng.choice([0, 0.1, 2]), rng.choice([0, 0.1, 2])
    spared_s = rng.choice([0, 0, 0.5, 1]) * (overhead_s + feed_s + result_s)
    profile = Profile(
        model="random", graph="0" * 16, device="core", threads=1, rows=(1,), units=units,
        boundaries=tuple(
            Boundary(name=f"b{index}", bytes_per_row=rng.choice([0, 1, 2, 5, 20])) for index in range(num_units + 1)
        ),
        base_bytes=rng.choice([0, 5]), loader_s_per_row=rng.choice([0, 0.2]), feed_s=feed_s,
        result_s=result_s, own_input_s=spared_s * 0.6, own_output_s=spared_s * 0.4,
        send_s_per_byte=rng.choice([0, 0.02, 0.1]), receive_s_per_byte=rng.choice([0, 0.05]),
        stage_overhead_s=overhead_s,
    )  # fmt: skip
    names = [f"d{index}" for index in range(rng.randint(1, max_devices))]
    devices = tuple(
        Device(
            name=name,
            speed=rng.choice([0.25, 0.5, 1.0, 2.0]),
            memory_bytes=rng.choice([60, 100, 150, 1000]),
            bandwidth_bytes_per_s=rng.choice([None, 2.0, 5.0, 20.0]),
            latency_s=rng.choice([0.0, 0.1, 1.0]),
        )
        for name in names
    )
    pairs = list(combinations(names, 2))
    links = tuple(
        Link(between=pair, bandwidth_bytes_per_s=rng.choice([None, 1.0, 4.0]), latency_s=rng.choice([0.0, 0.5]))
        for pair in rng.sample(pairs, k=rng.randint(0, len(pairs)) if rng.random() < 0.5 else 0)
    )
    cluster = Cluster(devices=devices, links=links, feeder=rng.choice(names))
    schedule = rng.choice(["gpipe", "1f1b"]) if trains else "forward-only"
    setting = Setting(
        rows=1,
        depth=rng.choice([1, 2]),
        schedule=schedule,
        num_microbatches=rng.randint(1, 6) if trains else None,
        optimizer_state_factor=rng.choice([0.0, 2.0]),
    )
    column = RuntimeColumn(runtime="openvino", precision="float32", forward_s=(0.4,), eager_s=(1.0,), error=0.0)
    faster = {name: column for name in names if rng.random() < 0.5} if rng.random() < 0.5 and not trains else {}
    return Problem(profile, cluster, setting, faster)


def every_division(problem: Problem) -> Iterator[Division]:
    """Every order of every selection of devices with every division into stages."""
    numbers = range(len(problem.devices))
    for size in range(1, len(problem.devices) + 1):
        for order in permutations(numbers, size):
            for cuts in combinations(range(1, problem.num_units), size - 1):
                bounds = [0, *cuts, problem.num_units]
                division = tuple(Placed(number, bounds[index], bounds[index + 1]) for index, number in enumerate(order))
                if fits_all(problem, division):
                    yield division


def best_by_force(problem: Problem, value: str = "pace") -> dict[int, float]:
    """The best pace or latency for each number of devices."""
    best: dict[int, float] = {}
    for division in every_division(problem):
        size = len(division)
        seconds = bottleneck_s(problem, division) if value == "pace" else latency_s(problem, division)
        best[size] = min(best.get(size, float("inf")), seconds)
    return {size: seconds for size, seconds in sorted(best.items()) if seconds < float("inf")}
