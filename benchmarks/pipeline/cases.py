"""The cases: one thing varied at a time around the base case."""

from dataclasses import dataclass, field
from typing import Any

DEIT_S = "timm:deit_small_patch16_224"
BASE = "4 stages, balanced"
TURNS: dict[str, Any] = {"num_images": 60, "passes": 8}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One lab and what is measured on it."""

    name: str
    hosts: int = 4
    cpu: float | tuple[float, ...] = 0.35
    bandwidth: str = "1 Gbit/s"
    model: str = DEIT_S
    num_images: int = 200
    passes: int = 1  # of so many images; of several, each has the limit measured on its two sides
    serial_images: int = 12
    microbatch_size: int = 1
    rounds: int = 1
    tasks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of a core that each host has."""
        return self.cpu if isinstance(self.cpu, tuple) else (self.cpu,) * self.hosts


BY_HAND = {
    "kind": "pipeline",
    "label": "4 stages, blocks.{2,5,8}.attn.proj:after",
    "stages": 4,
    "cuts": [f"blocks.{block}.attn.proj:after" for block in (2, 5, 8)],
}


def pipeline(stages: int, policy: str = "balanced", **more: Any) -> dict[str, Any]:
    """A pipeline as a task."""
    return {"kind": "pipeline", "label": f"{stages} stages, {policy}", "stages": stages, "policy": policy, **more}


def peer(stages: int, **more: Any) -> dict[str, Any]:
    """torch.distributed.pipelining, cut between blocks as well as it can be, as a task."""
    return {"kind": "peer", "label": f"{stages} stages, torch.distributed.pipelining", "stages": stages, **more}


def all_cases() -> list[Case]:
    """Give the cases of the full benchmark."""
    narrow = pipeline(4, bandwidth="100 Mbit/s") | {"label": "4 stages, 100 Mbit/s"}
    policies = [pipeline(4, policy) for policy in ("equal-blocks", "equal-size", "smallest-crossing")]
    return [
        Case(name="base", rounds=3, tasks=[peer(4), pipeline(4)]),
        Case(name="base in turns with the ceiling", **TURNS, tasks=[pipeline(4)]),
        Case(name="stages on four hosts", **TURNS, tasks=[pipeline(stages) for stages in (2, 3, 6)]),
        Case(name="policies", tasks=[*policies, BY_HAND]),
        Case(name="replicas", tasks=[{"kind": "replicas", "label": "4 replicas", "count": 4}]),
        Case(name="two hosts", hosts=2, **TURNS, tasks=[pipeline(2)]),
        Case(name="six hosts of 0.22", hosts=6, cpu=0.22, **TURNS, tasks=[pipeline(6)]),
        Case(name="100 Mbit/s", num_images=100, rounds=5, tasks=[pipeline(4), narrow]),
        Case(name="10 Mbit/s", bandwidth="10 Mbit/s", num_images=60, tasks=[pipeline(4)]),
        Case(name="microbatches of 4", microbatch_size=4, tasks=[pipeline(4)]),
        Case(name="microbatches of 16", microbatch_size=16, num_images=480, serial_images=16, tasks=[pipeline(4)]),
        Case(name="ViT-B", model="timm:vit_base_patch16_224", num_images=60, serial_images=4, tasks=[pipeline(4)]),
        Case(name="GPT-2 small", model="hf:gpt2", num_images=60, serial_images=4, tasks=[pipeline(4)]),
    ]


def quick_cases() -> list[Case]:
    """Give a shorter run of the same shape."""
    return [
        Case(name="base", num_images=60, serial_images=4, tasks=[peer(4), pipeline(4)]),
        Case(name="two hosts", hosts=2, num_images=60, serial_images=4, tasks=[pipeline(2)]),
    ]
