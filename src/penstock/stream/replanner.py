"""Replanning of a stream for the devices that are present, at the speeds that their heartbeats show."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from penstock.errors import PlanError, TransportError
from penstock.plan.choose import cluster_among, plan_again
from penstock.plan.cost.stage_cost import columns_of, computed_like, factor_at
from penstock.spec.cluster import Cluster
from penstock.spec.fields import fingerprint
from penstock.spec.plan import CutSet, Plan, PlannedPipeline, PlannedStage, Prediction
from penstock.spec.profile import Profile

# minimum predicted gain of another plan if no device was lost: a change drains the pipeline and moves weights
WORTH = 0.1


class Replanner:
    """A planner that replans a stream whenever its devices change; unknown devices are assumed equal.

    Without an initial plan, `begin` records the placement. `profile` returns a profile, measured or counted from shapes
    (`measure/costs.py`); it is called when the profile is first needed.

    Example:
        replanner = Replanner(plan, lambda: profile, cluster)
        plan = replanner.plan(["board0", "board2"], speeds={"board2": 0.3})
    """

    def __init__(
        self, plan: Plan | None, profile: Callable[[], Profile], cluster: Cluster | None, *, one_way: bool = False
    ) -> None:
        self._plan, self._make_profile = plan, profile
        self._profile: Profile | None = None
        self._cluster = cluster
        self._replicas = not one_way and (cluster is not None or (plan is not None and len(plan.pipelines) > 1))
        self._one_way = one_way  # every microbatch must use the same cuts, because of the stages' caches

    @property
    def profile(self) -> Profile:
        """Profile of the model."""
        if self._profile is None:
            self._profile = self._make_profile()
        return self._profile

    def begin(self, cuts: Sequence[str], devices: Sequence[str], rows: int, depth: int, stage: PlannedStage) -> None:
        """Record stages that were placed without a plan, one on each device; `stage` has their runtime and options."""
        stages = tuple(msgspec.structs.replace(stage, device=name) for name in devices)
        self._plan = Plan(
            model=self.profile.model,
            graph=self.profile.graph,
            profile=fingerprint(self.profile),
            cluster="",
            microbatch_rows=rows,
            pipelines=(PlannedPipeline(stages=stages, cut_sets=(CutSet(cuts=tuple(cuts)),)),),
            loader=devices[0],
            writer=devices[0],
            depth=depth,
            prediction=Prediction(
                rows_per_s=0.0, bound_rows_per_s=0.0, latency_s=0.0, num_rows=500, total_s=0.0, limit="", devices=()
            ),
        )

    @property
    def current(self) -> Plan:
        """The plan of the current placement."""
        if self._plan is None:
            raise PlanError("no stages are placed yet; begin with a plan, or record their placement")
        return self._plan

    def plan(self, names: Sequence[str], speeds: Mapping[str, float]) -> Plan:
        """Return a plan for these devices at the observed speeds; the current plan if no other is much faster.

        Raises `PlanError` if no plan fits.
        """
        old = self.current
        cluster = self._cluster_of(names, [name for name in old.devices if name not in names], speeds)
        missing = {device.name for device in cluster.devices} - set(names)
        known = {name: speed for name, speed in speeds.items() if name in names}
        fresh = plan_again(
            old,
            self.profile,
            cluster,
            speeds=known,
            missing=missing,
            worth=WORTH,
            replicas=self._replicas,
            alternate=False if self._one_way else None,
        )
        if columns_of(old, self.profile) is not None:
            return fresh
        # the profile has no times of this runtime, so runtimes are not changed
        return msgspec.structs.replace(fresh, pipelines=computed_like(fresh.pipelines, old.pipelines[0].stages[0]))

    def take(self, plan: Plan) -> None:
        """Record the plan that was deployed."""
        self._plan = plan

    def seconds(self) -> dict[str, float]:
        """Return for every device of the plan the seconds per microbatch that it would need at speed 1."""
        plan, profile = self.current, self.profile
        place = profile.rows.index(plan.microbatch_rows) if plan.microbatch_rows in profile.rows else 0
        taken = [unit.forward_s[place] for unit in profile.units]
        names = [boundary.name for boundary in profile.boundaries]
        columns = columns_of(plan, profile) or {}
        found: dict[str, float] = {}
        for pipeline in plan.pipelines:
            total = sum(cut_set.weight for cut_set in pipeline.cut_sets)
            for index, stage in enumerate(pipeline.stages):
                seconds = 0.0
                for cut_set in pipeline.cut_sets:
                    ends = [0, *(names.index(cut) for cut in cut_set.cuts), len(taken)]
                    start, stop = list(pairwise(ends))[index]
                    seconds += cut_set.weight / total * sum(taken[start:stop])
                factor = factor_at(profile, columns.get(stage.device), plan.microbatch_rows)
                found[stage.device] = found.get(stage.device, 0.0) + seconds * factor
        return found

    def _cluster_of(self, present: Sequence[str], gone: Sequence[str], speeds: Mapping[str, float]) -> Cluster:
        """Return the cluster of these devices; if its driver is lost, the first device present is the driver."""
        names, first = [*present, *gone], present[0]
        usual = sorted(speeds.values())[len(speeds) // 2] if speeds else 1.0
        feeder = self._cluster.feeding.name if self._cluster is not None else first
        return cluster_among(self._cluster, names, feeder=feeder if feeder in present else first, speed=usual)


# observation window of a device's speed, and the minimum number of microbatches that the device runs within it
WINDOW_S = 5.0
MIN_MICROBATCHES = 4
# smaller changes are ignored: on shared cores speeds fluctuate by this much
CHANGE = 0.2
# uncertainty of costs that are counted from shapes: within this factor a device is considered as fast as planned
FAR = 1.6


@dataclass(frozen=True, slots=True)
class Count:
    """Number of microbatches that a device has run, and the seconds that it computed."""

    busy_s: float
    num_run: int


class ObservedSpeeds:
    """Observed speeds of the devices of deployed stages, window by window.

    `count` returns each device's counters by name, `expected_s` the seconds per microbatch at speed 1. The usual speed
    of a device is the first observed speed, unless that is far from the speed in `planned`, for which the deployed
    stages were planned. With `at_first` the first speeds count as a change, because all devices were assumed equal.

    Example:
        speeds = ObservedSpeeds(count, lambda: {"board0": 0.02, "board1": 0.02})
        if speeds.changed():
            plan = replanner.plan(names, speeds.now())
    """

    def __init__(
        self,
        count: Callable[[], Mapping[str, Count]],
        expected_s: Callable[[], Mapping[str, float]],
        *,
        planned: Mapping[str, float] | None = None,
        at_first: bool = False,
        clock: Callable[[], float] = time.monotonic,
        window_s: float = WINDOW_S,
    ) -> None:
        self._count, self._expected_s = count, expected_s
        self._clock, self._window_s = clock, window_s
        self._since_s: float | None = None
        self._before: Mapping[str, Count] = {}
        self._planned = dict(planned or {})
        self._usual: dict[str, float] = {}  # speeds last accepted
        self._speeds: dict[str, float] = {}  # speeds of the last window
        self._at_first = at_first

    def changed(self) -> bool:
        """Update the speeds; return True if a device became slower or faster since its speed was last accepted."""
        now_s = self._clock()
        if self._since_s is not None and now_s - self._since_s < self._window_s:
            return False
        try:
            counted = dict(self._count())
        except TransportError:  # an outdated heartbeat
            return False
        before, self._before, self._since_s = self._before, counted, now_s
        expected_s = self._expected_s() if before else {}
        for name, count in counted.items():
            started = before.get(name)
            num = count.num_run - started.num_run if started is not None else 0
            busy_s = count.busy_s - started.busy_s if started is not None else 0.0
            if num >= MIN_MICROBATCHES and busy_s > 0 and expected_s.get(name, 0.0) > 0:
                self._speeds[name] = expected_s[name] * num / busy_s
        for name, speed in self._speeds.items():
            planned = self._planned.get(name, speed)
            self._usual.setdefault(name, speed if 1 / FAR < speed / planned < FAR else planned)
        if self._at_first and self._speeds:
            self._at_first = False
            return True
        return any(abs(factor - 1) > CHANGE for factor in self._factors().values())

    def now(self) -> dict[str, float]:
        """Return the speed of each device in the last window; devices that were not observed are left out."""
        return dict(self._speeds)

    def accept(self) -> None:
        """Accept the current speeds as the usual ones."""
        self._usual = dict(self._speeds)

    def most_changed(self) -> tuple[str, float]:
        """Return the device whose speed has changed most, and the ratio to its usual speed."""
        factors = self._factors()
        name = max(factors, key=lambda each: max(factors[each], 1 / factors[each]))
        return name, factors[name]

    def _factors(self) -> dict[str, float]:
        return {name: speed / self._usual[name] for name, speed in self._speeds.items()}
