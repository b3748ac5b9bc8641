"""What pipelines of a training plan will do: seconds of a step, each device's load and memory."""

from collections.abc import Sequence

from penstock.plan.cost.all_reduces import Bucket
from penstock.plan.cost.problem import Division, Problem, latency_s
from penstock.plan.cost.step import Step, devices_of, play_step
from penstock.plan.search.dealing import dealt_memory
from penstock.spec.plan import DeviceLoad, Prediction


def predict_training(
    problem: Problem, divisions: Sequence[Division], counts: Sequence[int], num_rows: int, bound_rows_per_s: float
) -> Prediction:
    """Predict pipelines that train side by side, each on its number of a step's microbatches.

    Example:
        predict_training(problem, [division], [8], num_rows=512, bound_rows_per_s=math.inf).rows_per_s
    """
    step = play_step(problem, divisions, counts)
    batch = problem.setting.rows * sum(counts)
    rate = batch / step.step_s
    loads = _loads(problem, divisions, counts, step.buckets)
    return Prediction(
        rows_per_s=rate,
        bound_rows_per_s=max(bound_rows_per_s, rate),
        latency_s=max(latency_s(problem, division) for division in divisions),
        num_rows=num_rows,
        total_s=-(-num_rows // batch) * step.step_s,
        limit=_limit(problem, divisions, loads, step),
        devices=tuple(loads),
    )


def memory_in_training(problem: Problem, division: Division) -> dict[int, float]:
    """Return the memory that each device of a pipeline needs, whatever its schedule."""
    if len(devices_of(division)) < len(division):
        return dealt_memory(problem, division)
    return {
        stage.devices[0]: problem.memory_bytes(stage.devices[0], stage.start, stage.end, in_flight)
        for stage, in_flight in zip(division, problem.in_flight(division), strict=True)
    }


def _loads(
    problem: Problem, divisions: Sequence[Division], counts: Sequence[int], buckets: Sequence[Bucket]
) -> list[DeviceLoad]:
    """Return each device's CPU seconds for a microbatch of the plan on average, sums of gradients included."""
    total = sum(counts)
    loads = []
    for division, count in zip(divisions, counts, strict=True):
        own = problem.for_replica(count) if len(divisions) > 1 else problem
        for device, memory_bytes in memory_in_training(own, division).items():
            sums_s = sum(bucket.cpu_s(problem, device) for bucket in buckets if device in bucket.devices)
            own_s = sum(problem.own_s(device, stage) for stage in division if stage.devices == (device,))
            loads.append(
                DeviceLoad(
                    device=problem.devices[device].name, load_s=(own_s * count + sums_s) / total,
                    memory_bytes=memory_bytes,
                )
            )  # fmt: skip
    return loads


def _limit(problem: Problem, divisions: Sequence[Division], loads: Sequence[DeviceLoad], step: Step) -> str:
    """Say what a step spends most of its time on: the busiest device, or sums that the last backwards do not hide."""
    busiest = max(loads, key=lambda load: load.load_s)
    if step.summed_s - step.computed_s > step.computed_s:
        return "the sums of gradients"
    stages = (enumerate(division) for division in divisions)
    places = {problem.devices[stage.devices[0]].name: index for each in stages for index, stage in each}
    return f"compute of {busiest.device} (stage {places[busiest.device]})"
