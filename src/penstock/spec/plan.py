"""Plans: the assignment of units to devices, portions of microbatches, and the prediction."""

import os
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from penstock.errors import PlanError
from penstock.spec.fields import decode_json, write_json

Precision = Literal["float32", "float16", "bfloat16", "int8", "int4", "stored", "stored32"]


class CutSet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cuts of a pipeline, by name and in order, and the fraction of microbatches that use them."""

    cuts: tuple[str, ...]
    weight: float = 1.0


class PlannedStage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One stage, on a device.

    With an interleaved schedule a device holds several stages of a pipeline, far apart in the model. With int8 the
    layers in `keep`, a list of module paths, stay in float32.
    """

    device: str
    precision: Precision = "float32"
    runtime: str = "eager"
    keep: tuple[str, ...] = ()


def runtime_name(runtime: str, precision: str, keep: Sequence[str] = ()) -> str:
    """Return the display name of a runtime with its precision, and with the layers that stay in float32.

    >>> runtime_name("onnxruntime", "int8", ["head"])
    'onnxruntime:int8+head'
    """
    return "+".join((runtime if precision == "float32" else f"{runtime}:{precision}", *keep))


class PlannedPipeline(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Successive stages, their cuts, and the pipeline's fraction of all microbatches."""

    stages: tuple[PlannedStage, ...]
    cut_sets: tuple[CutSet, ...]
    share: float = 1.0


class DeviceLoad(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Predicted mean load of a device per microbatch of the plan, and its memory."""

    device: str
    load_s: float
    memory_bytes: float


CacheDtype = Literal["model", "float16", "bfloat16", "int8"]


class Generation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The caches of a language model that generates: `lanes` of `slots` sequences of at most `max_length` tokens.

    Keys and values have the dtype `cache_dtype`, by default the model's; `int8` has a scale for each head of a token.
    Prompts run in chunks of at most `chunk` tokens.
    """

    slots: Annotated[int, msgspec.Meta(ge=1)]
    lanes: Annotated[int, msgspec.Meta(ge=1)]
    max_length: Annotated[int, msgspec.Meta(ge=2)]
    cache_dtype: CacheDtype = "model"
    chunk: Annotated[int, msgspec.Meta(ge=8)] = 32


def num_lanes(num_stages: int) -> int:
    """Return the lanes of so many stages: one more, which occupies the stage that would wait for sampled tokens.

    >>> num_lanes(1), num_lanes(4)
    (1, 5)
    """
    return num_stages + 1 if num_stages > 1 else 1


class Prediction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The predicted performance of a plan.

    - `rows_per_s`: steady throughput, without filling and draining;
    - `bound_rows_per_s`: upper bound for plans of the searched kind;
    - `latency_s`: from sending a microbatch into the empty pipeline until its result;
    - `total_s`: for a stream of `num_rows` rows, including filling and draining;
    - `limit`: the bottleneck.
    """

    rows_per_s: float
    bound_rows_per_s: float
    latency_s: float
    num_rows: int
    total_s: float
    limit: str
    devices: tuple[DeviceLoad, ...]


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan: stages, devices and cuts of a model.

    `profile`, `cluster` and `graph` are fingerprints of the planner's inputs and of the model's graph. Microbatches
    have `microbatch_rows` rows; a cut holds `depth` messages on each side. A training step has `num_microbatches`, of
    which each pipeline takes its share. Data is loaded on the device `loader`, and results are written on `writer`. For
    a language model that generates, `generation` describes the caches, and a row is a token.

    Example:
        plan = read_plan("plan.json")
        plan.pipelines[0].stages[1].device, plan.prediction.rows_per_s
    """

    model: str
    graph: str
    profile: str
    cluster: str
    microbatch_rows: int
    pipelines: tuple[PlannedPipeline, ...]
    loader: str
    writer: str
    prediction: Prediction
    schedule: str = "forward-only"
    depth: int = 2
    num_microbatches: int | None = None
    optimizer_state_factor: float = 0.0
    generation: Generation | None = None
    version: int = 1

    @property
    def trains(self) -> bool:
        """True if microbatches also run backward."""
        return self.schedule != "forward-only"

    @property
    def microbatches(self) -> tuple[int, ...]:
        """Number of microbatches of each pipeline in a training step."""
        return tuple(round(pipeline.share * (self.num_microbatches or 0)) for pipeline in self.pipelines)

    @property
    def batch_rows(self) -> int:
        """Number of rows of a training step, over all pipelines."""
        return self.microbatch_rows * (self.num_microbatches or 0)

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices with stages, without repetition, in the order of pipelines and stages."""
        names = (stage.device for pipeline in self.pipelines for stage in pipeline.stages)
        return tuple(dict.fromkeys(names))

    @property
    def runtimes(self) -> list[str]:
        """The names of the runtimes of all stages, sorted, each once."""
        stages = (stage for pipeline in self.pipelines for stage in pipeline.stages)
        return sorted({runtime_name(stage.runtime, stage.precision, stage.keep) for stage in stages})


def encode_plan(plan: Plan) -> bytes:
    """Return a plan as JSON, in one line."""
    return msgspec.json.encode(plan)


def decode_plan(data: bytes) -> Plan:
    """Decode a plan from JSON; raises `PlanError` for invalid data. Use `check_plan` to check its contents."""
    return decode_json(data, Plan, "a plan", PlanError)


def write_plan(path: str | os.PathLike[str], plan: Plan) -> None:
    """Write a plan file; reading it returns an equal plan."""
    write_json(path, plan)
