"""Small specs by hand."""

from penstock.spec.cluster import Cluster, Device
from penstock.spec.fields import fingerprint
from penstock.spec.plan import CutSet, DeviceLoad, Plan, PlannedPipeline, PlannedStage, Prediction
from penstock.spec.profile import Boundary, Profile, Unit

_NAMES = (*"abcdefghijklmnopqrstuvwxyz", *(f"d{index}" for index in range(26, 100)))


def make_profile(seconds: list[float], crossing: list[float] | None = None, **more: object) -> Profile:
    """One row per microbatch; `crossing` are the bytes at every boundary, both ends included."""
    names = ["input", *(f"unit{index}:after" for index in range(len(seconds) - 1)), "output"]
    sizes = crossing or [0.0] * len(names)
    fields: dict[str, object] = {
        "model": "line",
        "graph": "0123456789abcdef",
        "device": "core",
        "threads": 1,
        "rows": (1,),
        "boundaries": tuple(Boundary(name=n, bytes_per_row=b) for n, b in zip(names, sizes, strict=True)),
        "units": tuple(Unit(forward_s=(s,)) for s in seconds),
    }
    return Profile(**(fields | more))  # type: ignore[arg-type]


def make_cluster(*speeds: float, memory_bytes: int = 2**40, **more: object) -> Cluster:
    """Devices `a`, `b`, ... `z`, `d26`, ... of these speeds."""
    devices = tuple(
        Device(name=_NAMES[index], speed=speed, memory_bytes=memory_bytes, **more)  # type: ignore[arg-type]
        for index, speed in enumerate(speeds)
    )
    return Cluster(devices=devices)


def make_plan() -> Plan:
    """Three devices in two pipelines: `a` and `b` with alternating cuts, and `c` alone."""
    return Plan(
        model="line",
        graph="0123456789abcdef",
        profile=fingerprint(make_profile([1, 1, 1])),
        cluster=fingerprint(make_cluster(1, 1, 1)),
        microbatch_rows=1,
        pipelines=(
            PlannedPipeline(
                share=0.75,
                stages=(PlannedStage(device="a"), PlannedStage(device="b")),
                cut_sets=(CutSet(cuts=("unit0:after",), weight=0.5), CutSet(cuts=("unit1:after",), weight=0.5)),
            ),
            PlannedPipeline(share=0.25, stages=(PlannedStage(device="c"),), cut_sets=(CutSet(cuts=()),)),
        ),
        loader="a",
        writer="a",
        prediction=Prediction(
            rows_per_s=0.9,
            bound_rows_per_s=1.0,
            latency_s=3.0,
            num_rows=100,
            total_s=104.0,
            limit="compute on a",
            devices=tuple(DeviceLoad(device=name, load_s=1.0, memory_bytes=1e6) for name in "abc"),
        ),
    )
