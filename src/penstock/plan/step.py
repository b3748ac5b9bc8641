"""How long a step of training takes, by playing its schedule on the cost model."""

from penstock.plan.pipelines import make_schedule
from penstock.plan.problem import Division, Problem
from penstock.plan.schedule import Action
from penstock.plan.simulate import Crossing, Simulation, simulate


def simulate_step(problem: Problem, division: Division) -> Simulation:
    """Play one step: every microbatch forward and back, the pipeline filled and drained.

    Each stage lies on one device. A device's work on a microbatch, messages included, is parted between forward and
    backward as its units' seconds are; a message takes as long in both directions. The sums of gradients over
    replicas and the optimizer's step are left out: they are the same for every plan with these parameters.

    Example:
        simulate_step(problem, division).makespan_s
    """
    setting, costs = problem.setting, problem.costs
    devices = [stage.devices[0] for stage in division]
    own_s = [problem.own_s(number, stage) for number, stage in zip(devices, division, strict=True)]
    forward = [
        float(costs.forward_s[stage.end] - costs.forward_s[stage.start])
        / (float(costs.seconds[stage.end] - costs.seconds[stage.start]) or 1.0)
        for stage in division
    ]

    def duration(action: Action, _device: int) -> float:
        part = forward[action.stage]
        return own_s[action.stage] * (part if action.kind == "F" else 1 - part)

    def transfer(source: int, to: int, _kind: Crossing) -> float:
        boundary = division[max(source, to)].start
        one, other = devices[source], devices[to]
        return problem.transfer_s(one, other, boundary) + problem.latency_s(one, other)

    schedule = make_schedule(setting.schedule, len(division), setting.num_microbatches or 1)
    return simulate(schedule, duration, transfer)
