"""Costs of an elastic training run for the planner, measured unless given."""

from dataclasses import dataclass

import msgspec
from torch import Tensor

from penstock.deploy.deployment import ranks_of
from penstock.deploy.state import load_state
from penstock.elastic.options import ElasticOptions
from penstock.engine.reference import calibrate
from penstock.errors import PlanError
from penstock.graph.cuts import Cuts
from penstock.graph.ops import State
from penstock.measure.hosts import measure_messages
from penstock.measure.profiler import profile_graph
from penstock.plan.cost.frozen import keep_cuts
from penstock.resources import allowed_bytes
from penstock.spec.cluster import Cluster, Device
from penstock.spec.profile import Profile
from penstock.terminal.progress import working
from penstock.text import note
from penstock.train.arrangement import Arrangement, check_profile, common_cuts, names_of
from penstock.train.captured import Captured
from penstock.train.trainer import Trainer
from penstock.transport.collectives import all_gather
from penstock.wire import FEEDER

_CALIBRATION_S = 0.5
_MESSAGES = 20  # number of messages timed to measure their cost
_REPEATS = 3


@dataclass(frozen=True, slots=True)
class PlannerInputs:
    """Inputs of the planner, on the driver: the model's profile, the cluster, and the rank of each device."""

    profile: Profile
    cluster: Cluster
    ranks: dict[str, int]


def find_costs(trainer: Trainer, captured: Captured, options: ElasticOptions, rows: int) -> PlannerInputs | None:
    """Measure the inputs that are not given; returns all inputs on the driver, None on other ranks.

    `captured` is the whole model, with no layer frozen; `rows` are the rows of a microbatch. All processes call this
    and measure their devices at the same time, so that contention between them is included; the driver alone measures
    the model. Raises `PlanError` if the profile is of another model or lacks backward times, or if the cluster does not
    match this run.
    """
    world = trainer.world
    given, cluster = options.read_profile(), options.read_cluster()
    if given is not None:
        check_profile(captured.graph, given)
    ranks = {f"rank{rank}": rank for rank in world.devices}
    if cluster is not None:
        ranks = ranks_of(world, [device.name for device in cluster.devices])
        if len(ranks) < len(world.devices):
            raise PlanError(
                f"the cluster must have {len(world.devices)} devices, one per process; got {len(ranks)}; give all of "
                "them"
            )
    with working("measuring the devices", shown=world.rank == FEEDER):
        round_s = calibrate(_CALIBRATION_S) if cluster is None else 0.0
        told = all_gather(world.transport, {"round_s": round_s, "memory": allowed_bytes()})
    if world.rank != FEEDER:
        return None
    if given is None:
        note(f"measuring {captured.graph.model}; give a profile to skip this")
    with working("measuring the model"):
        profile = given or measure_profile(captured, trainer.now.placed, rows, told[FEEDER]["round_s"])
    reference_s = profile.calibration_s or told[FEEDER]["round_s"]
    if cluster is None:
        devices = [
            Device(
                name=name,
                speed=reference_s / told[rank]["round_s"],
                memory_bytes=told[rank]["memory"],
                bandwidth_bytes_per_s=world.bandwidths[rank],
            )
            for name, rank in ranks.items()
        ]
        cluster = Cluster(devices=tuple(devices))
    return PlannerInputs(keep_cuts(profile, common_cuts(captured)), cluster, ranks)


def measure_profile(captured: Captured, placed: Arrangement, rows: int, calibration_s: float) -> Profile:
    """Measure the model for microbatches of `rows` rows, and the cost of messages on this machine.

    The profile has the cuts after each layer and those of the current placement.
    """
    at = {name: cut for cut in Cuts(captured.graph) for name in names_of(cut)}
    # these may be cuts of the frozen model: find them by name, and skip cuts that the whole model lacks
    placed_at = [at[name] for cut in placed.cuts for name in names_of(cut) if name in at]
    cuts = sorted({c.position: c for c in (*placed_at, *captured.layers)}.values(), key=lambda cut: cut.position)

    def load(state: State) -> Tensor:
        return load_state(captured.graph, state, captured.weights)

    profile = profile_graph(
        captured.graph, load, rows=(rows,), repeats=_REPEATS, training=True, cuts=cuts,
        messages=measure_messages(num_microbatches=_MESSAGES),
    )  # fmt: skip
    return msgspec.structs.replace(profile, calibration_s=calibration_s)
