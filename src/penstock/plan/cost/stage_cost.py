"""Costs of a stage on a device: seconds per microbatch, seconds on its link, bytes of memory.

A stage from boundary `a` to boundary `b` uses three resources of its device, and the slowest sets the pace:

    CPU        (seconds of units a..b  +  overhead  +  CPU time of the bytes at a and at b  +  driving) / speed
               less the savings of a driver that holds an end of the pipeline
    link out   bytes that leave the device / bandwidth
    link in    bytes that arrive / bandwidth

Transfers themselves are hidden: with two buffers on each side of a cut, the executor computes while the next message is
in flight. The driver also loads data, sends microbatches and receives results; if it holds the first or last stage,
those bytes cross no link. Each of the three costs is the sum of a term that depends on `a` and a term that depends on
`b`, which the search exploits.

Memory is a hard limit. It is the sum of: the base memory of the process, including the model's library on the driver or
in training; parameters, once per tensor, with gradients and optimizer state in training; activations kept for
backwards, and outputs, for as many microbatches as the schedule has in flight; the largest working memory of a unit (in
training, of its backward, which allocates gradients in addition to existing ones); the first gradient of a weight that
several units use, until the last is computed; gradients that are being summed; and `depth` messages on each side of the
stage.

Training has no driver: the devices with the first and the last stage load and hold their rows of a step themselves. For
the costs of a step beyond its microbatches, see `training_step.py`.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import fmean
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.errors import PlanError
from penstock.plan.schedule.schedules import SCHEDULES
from penstock.spec.cluster import Cluster
from penstock.spec.plan import Plan, PlannedPipeline, PlannedStage, num_lanes, runtime_name
from penstock.spec.profile import COUNTED, Profile, RuntimeColumn, interpolate
from penstock.wire import BUCKET_BYTES, NUM_ALL_REDUCES

Vector: TypeAlias = NDArray[np.float64]
# a term for the first boundary, and a term for the last boundary
Pair: TypeAlias = tuple[Vector, Vector]
# by device name; other devices use eager
Columns = Mapping[str, RuntimeColumn]
_EAGER = "eager"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Execution settings of stages: rows per microbatch, messages that may wait at a cut, schedule and its parameters.

    `optimizer_state_factor` is the bytes of optimizer state per byte of parameters: 0 for plain SGD, 2 for AdamW. Each
    of `replicated` pipelines has a part of a step's microbatches, and gradients are summed over the pipelines. Every
    process keeps `recording_bytes` free, so that a run that fits also fits while traced. `num_stages` is a pipeline's
    number of stages, if known; the memory of some schedules depends on it. A model that `generates` keeps the caches of
    `lanes` microbatches, by default as many as its stages need.

    >>> Setting(rows=4).schedule
    'forward-only'
    """

    rows: int = 1
    depth: int = 2
    schedule: str = "forward-only"
    num_microbatches: int | None = None
    optimizer_state_factor: float = 0.0
    replicated: bool = False
    num_stages: int | None = None
    recording_bytes: float = 0.0
    generates: bool = False
    lanes: int | None = None

    @property
    def trains(self) -> bool:
        """True if microbatches also run backward."""
        return self.schedule != "forward-only"

    @property
    def counts_stages(self) -> bool:
        """True if the memory of a stage depends on the number of stages."""
        return SCHEDULES[self.schedule].counts_stages if self.trains else self.generates and self.lanes is None

    def lanes_of(self, num_stages: int) -> int:
        """Return the lanes of a pipeline of so many stages that generates."""
        return self.lanes or num_lanes(num_stages)

    def in_flight(self, from_end: int) -> int:
        """Return the number of microbatches that a stage keeps for their backward, or whose caches it holds.

        The last stage has `from_end` 1.
        """
        if self.generates:
            return self.lanes_of(self.num_stages or from_end)
        if not self.trains:
            return 0
        num_stages, num_microbatches = self.num_stages or from_end, self.num_microbatches or 1
        return SCHEDULES[self.schedule].in_flight(from_end, num_stages, num_microbatches)


class Costs:
    """A profile at one setting, as arrays over its boundaries; seconds are for a device of speed 1.

    Example:
        costs = Costs(profile, Setting(rows=1))
        costs.seconds[5] - costs.seconds[2]         # seconds of units 2, 3 and 4

    Raises `PlanError` for a training schedule if the profile lacks backward seconds or the setting lacks a number of
    microbatches.
    """

    def __init__(self, profile: Profile, setting: Setting) -> None:
        if setting.trains and setting.num_microbatches is None:
            raise PlanError(f"the schedule {setting.schedule} needs a number of microbatches; give --microbatches")
        self.profile = profile
        self.setting = setting
        self.num_units = len(profile.units)
        rows = setting.rows
        self.forward_s = _running_sum([interpolate(profile.rows, unit.forward_s, rows) for unit in profile.units])
        self.backward_s = self._backward_s() if setting.trains else np.zeros_like(self.forward_s)
        self.seconds = self.forward_s + self.backward_s
        self.total_s = float(self.seconds[-1])  # seconds of all units for one microbatch
        self.crossing = np.array([boundary.num_bytes(rows) for boundary in profile.boundaries])
        self.loaded_bytes = float(self.crossing[0]) * (setting.num_microbatches or 0)
        if setting.trains:
            self.crossing[[0, -1]] = 0.0
        # in training, a gradient of the same size is sent back across every cut after which parameters are trained
        returns = np.array([float(boundary.gradient) for boundary in profile.boundaries])
        self.returning: Vector = self.crossing * returns * float(setting.trains)
        send, receive = profile.send_s_per_byte, profile.receive_s_per_byte
        self.before_s = self.crossing * receive + self.returning * send
        self.after_s = self.crossing * send + self.returning * receive
        self.overhead_s = profile.stage_overhead_s
        self.feeding_s = 0.0 if setting.trains else profile.loader_s_per_row * rows + profile.feed_s + profile.result_s
        # savings of a driver that holds an end of the pipeline
        self.own_input_s, self.own_output_s = (
            (0.0, 0.0) if setting.trains else (profile.own_input_s, profile.own_output_s)
        )
        self.kept_bytes = _running_sum([unit.kept_bytes_per_row * rows for unit in profile.units])
        # a stage also keeps its outputs until their gradients arrive
        self.kept_at_end_bytes = self.kept_bytes + self.crossing * float(setting.trains)

    @cached_property
    def held_bytes(self) -> Vector:
        """Bytes of parameters and working memory of units `a` to `b`: `[a, b]`.

        In training, gradients, optimizer state, loaded rows and gradient buckets in flight are included.
        """
        if not self.setting.trains:
            return self.parameter_bytes + self.fixed_bytes + self.working_bytes
        held: Vector = self.parameter_bytes * (2.0 + self.setting.optimizer_state_factor) + self.fixed_bytes
        held += self.working_bytes + self._tied_bytes()
        held[0, :] += self.loaded_bytes
        held[:-1, -1] += self.loaded_bytes
        held[0, -1] -= self.loaded_bytes
        return held + self._bucket_bytes()

    @property
    def fixed_bytes(self) -> Vector:
        """Bytes of untrained weights of units `a` to `b`: `[a, b]`."""
        prefix = _running_sum([unit.fixed_bytes for unit in self.profile.units])
        matrix: Vector = prefix[None, :] - prefix[:, None]
        return matrix

    @cached_property
    def working_bytes(self) -> Vector:
        """Largest working memory of any of the units `a` to `b`: `[a, b]`."""
        rows = self.setting.rows
        return self._largest([unit.working_bytes_per_row * rows + unit.working_bytes for unit in self.profile.units])

    @cached_property
    def parameter_bytes(self) -> Vector:
        """Bytes of the parameters of units `a` to `b`, each tensor once: `[a, b]`."""
        per_unit = [sum(dict(unit.parameters).values()) for unit in self.profile.units]
        prefix = _running_sum(per_unit)
        matrix: Vector = prefix[None, :] - prefix[:, None]
        for num_bytes, places in self.tensors.values():
            for first, second in pairwise(places):
                # a stage with both units holds the tensor once
                matrix[: first + 1, second + 1 :] -= num_bytes
        return matrix

    @cached_property
    def tensors(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Bytes of each parameter and the units that use it, in the order of the model."""
        uses: dict[str, tuple[int, tuple[int, ...]]] = {}
        for index, unit in enumerate(self.profile.units):
            for name, num_bytes in dict(unit.parameters).items():
                uses[name] = num_bytes, (*uses.get(name, (0, ()))[1], index)
        return uses

    def _tied_bytes(self) -> Vector:
        """Return the bytes of first gradients of weights that several units use, kept until the last is computed."""
        waiting = np.zeros_like(self.parameter_bytes)
        for num_bytes, places in self._tied:
            waiting += num_bytes * self._with_both(pairwise(places))
        return waiting

    def _bucket_bytes(self) -> Vector:
        """Return the bytes of a bucket being written, plus half of the buckets in flight, for a neighbour's messages.

        Without replicas, only weights that stages share are summed.
        """
        if self.setting.replicated:
            largest = self._largest([max(dict(unit.parameters).values(), default=0.0) for unit in self.profile.units])
            return (1 + NUM_ALL_REDUCES / 2) * np.maximum(largest, np.minimum(self.parameter_bytes, BUCKET_BYTES))
        bucket = np.zeros_like(self.parameter_bytes)
        for num_bytes, places in self._tied:
            some = self._with_both(zip(places, places, strict=True)) & ~self._with_both([(places[0], places[-1])])
            np.maximum(bucket, 1.5 * num_bytes * some, out=bucket)
        return bucket

    @cached_property
    def _tied(self) -> list[tuple[int, tuple[int, ...]]]:
        """Bytes and units of each parameter that several units use."""
        return [(num_bytes, places) for num_bytes, places in self.tensors.values() if len(places) > 1]

    def _with_both(self, pairs: Iterable[tuple[int, int]]) -> NDArray[np.bool_]:
        """Return whether units `a` to `b` include both units of any pair: `[a, b]`."""
        found = np.zeros(self.parameter_bytes.shape, dtype=np.bool_)
        for first, second in pairs:
            found[: first + 1, second + 1 :] = True
        return found

    def messages_bytes(self) -> Vector:
        """Return the bytes of `depth` messages at each boundary, including gradients."""
        return self.setting.depth * (self.crossing + self.returning)

    def _backward_s(self) -> Vector:
        seconds = []
        for index, unit in enumerate(self.profile.units):
            if unit.backward_s is None:
                raise PlanError(
                    f"the schedule {self.setting.schedule} needs backward seconds, which units[{index}] of the "
                    "profile lacks; profile again with --training"
                )
            seconds.append(interpolate(self.profile.rows, unit.backward_s, self.setting.rows))
        return _running_sum(seconds)

    def _largest(self, needs: Sequence[float]) -> Vector:
        """Return the largest need of any of the units `a` to `b`: `[a, b]`."""
        matrix = np.zeros((self.num_units + 1, self.num_units + 1))
        for end, need in enumerate(needs, 1):
            matrix[:end, end] = np.maximum(matrix[:end, end - 1], need)
        return matrix


def _running_sum(values: Sequence[float]) -> Vector:
    return np.concatenate([[0.0], np.cumsum(np.array(values, dtype=np.float64))])


def columns_within(profile: Profile, cluster: Cluster, max_error: float) -> Columns:
    """Return each device's fastest runtime with a relative output error of at most `max_error`.

    Devices for which eager is fastest are left out.

    Example:
        columns_within(profile, cluster, 0.02)["board2"].name

    Raises `PlanError` if the profile has no other runtimes, or if a device has a runtime that was not measured.
    """
    if not profile.runtimes:
        raise PlanError("the profile has no runtime other than eager; profile again with --runtime NAME")
    known = {column.name for column in profile.runtimes}
    has = {device.name: known if device.runtimes is None else set(device.runtimes) for device in cluster.devices}
    for name, names in has.items():
        if unknown := sorted(names - known - {_EAGER}):
            raise PlanError(
                f"{name} has the runtime {unknown[0]}, which was not found in the profile; profile again with "
                f"--runtime {unknown[0]}, or leave it out of the cluster file"
            )
    found = {name: _fastest(profile, max_error, names) for name, names in has.items()}
    return {name: column for name, column in found.items() if column is not None}


def counted_columns(profile: Profile, cluster: Cluster) -> Columns:
    """Return for each device the runtime whose bytes a counted profile has; measured profiles have those of eager."""
    counted = profile.runtimes if profile.device == COUNTED else ()
    return {device.name: column for device in cluster.devices for column in counted}


def columns_of(plan: Plan, profile: Profile) -> Columns | None:
    """Return a profile's columns for the runtimes of a plan's devices; None if a column is missing."""
    known = {column.name: column for column in profile.runtimes}
    found: dict[str, RuntimeColumn] = {}
    for stage in (stage for pipeline in plan.pipelines for stage in pipeline.stages):
        name = runtime_name(stage.runtime, stage.precision, stage.keep)
        if name == _EAGER:
            continue
        if name not in known:
            return None
        found[stage.device] = known[name]
    return found


def computed_on(pipelines: Sequence[PlannedPipeline], columns: Columns) -> tuple[PlannedPipeline, ...]:
    """Return pipelines with each stage's runtime set to the runtime of its device."""
    return _with_runtimes(pipelines, lambda stage: columns.get(stage.device, stage))


def computed_like(pipelines: Sequence[PlannedPipeline], like: PlannedStage) -> tuple[PlannedPipeline, ...]:
    """Return pipelines with each stage's runtime set to the runtime of `like`."""
    return _with_runtimes(pipelines, lambda _stage: like)


def factor_at(profile: Profile, column: RuntimeColumn | None, rows: int) -> float:
    """Return the ratio of a runtime's time to eager's, for microbatches of n rows.

    It is the ratio for the whole model, because times of single units are not known: these runtimes fuse operations
    across the edges of units.
    """
    return 1.0 if column is None else float(np.interp(rows, profile.rows, _factors(column)))


def _fastest(profile: Profile, max_error: float, names: Collection[str]) -> RuntimeColumn | None:
    near = [
        column
        for column in profile.runtimes
        if column.name in names and column.error <= max_error and fmean(_factors(column)) < 1.0
    ]
    return min(near, key=lambda column: fmean(_factors(column)), default=None)


def _factors(column: RuntimeColumn) -> list[float]:
    return [fast / eager for fast, eager in zip(column.forward_s, column.eager_s, strict=True)]


def _with_runtimes(
    pipelines: Sequence[PlannedPipeline], like_of: Callable[[PlannedStage], RuntimeColumn | PlannedStage]
) -> tuple[PlannedPipeline, ...]:
    def changed(stage: PlannedStage) -> PlannedStage:
        like = like_of(stage)
        return msgspec.structs.replace(stage, runtime=like.runtime, precision=like.precision, keep=like.keep)

    return tuple(
        msgspec.structs.replace(pipeline, stages=tuple(map(changed, pipeline.stages))) for pipeline in pipelines
    )
