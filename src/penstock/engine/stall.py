"""A message that was lost although every process lives: all wait, nothing moves, and that must end.

Every process says with its heartbeat whether it waits, how much has moved, and of each stage what it has
sent, what it has taken and what it waits for. The first process looks at all of it:

    stage 0 sent 3 activations ──▶ stage 1 took 2 and waits for the third      here, once nothing moves for stall_s
"""

import json
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.engine.placement import Grid
from penstock.engine.training_stage import TrainingStage
from penstock.group.liveness import Verdict
from penstock.group.world import World
from penstock.plan.schedule.actions import NUM_BUFFERS
from penstock.terminal.live import StageState
from penstock.transport.base import FEEDER
from penstock.transport.metered import MeteredTransport

_LOOK_S = 0.5


class TrainingWatch:
    """Says how far this process is; on the first process also looks whether all of them stand still.

    Example:
        watch = TrainingWatch(world, transport, grid, stages, stall_s=60.0)
        ...
        watch.close()
    """

    def __init__(
        self, world: World, transport: MeteredTransport, grid: Grid, stages: Mapping[int, TrainingStage], stall_s: float
    ) -> None:
        self._world, self._transport, self._grid, self._stages = world, transport, grid, stages
        self._stall_s = stall_s
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        world.health.status = self.status
        if world.rank == FEEDER and transport.size > 1:
            self._thread = threading.Thread(target=self._watch, name="penstock-stall", daemon=True)
            self._thread.start()

    def status(self) -> str:
        """What this process says of itself with every heartbeat."""
        stages = [
            [index, stage.sent, stage.taken, stage.awaits, stage.num_computed, round(stage.busy_s, 3)]
            for index, stage in self._stages.items()
        ]
        return json.dumps([self._transport.rank, self._transport.waits, self._transport.num_moved, stages])

    def stage_states(self) -> list[StageState]:
        """Say how far each stage is, as of the last heartbeats; for `LiveView`."""
        found = _stages(self._told())
        states = []
        for replica in self._grid.replicas:
            for index, rank in enumerate(replica.stages):
                if (rank, index) not in found:
                    continue
                _, taken, _, num_computed, busy_s = found[rank, index]
                waiting = 0
                for kind, source in (("activations", index - 1), ("gradients", index + 1)):
                    giver = found.get((replica.stages[source], source)) if 0 <= source < len(replica.stages) else None
                    waiting += giver[0][kind] - taken[kind] if giver is not None else 0
                name = f"stage {index} on {self._world.names[rank]}"
                states.append(StageState(name, num_computed, busy_s, min(2 * NUM_BUFFERS, max(0, waiting))))
        return states

    def _told(self) -> list[Any]:
        return [json.loads(text) for text in self._world.health.statuses() if text]

    def close(self) -> None:
        """Stop looking."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._world.health.status = str

    def _watch(self) -> None:
        seen: object = None
        since = time.monotonic()
        while not self._stop.wait(min(_LOOK_S, self._stall_s / 4)) and self._world.health.watching:
            told = self._told()
            still = len(told) == self._transport.size and all(waits for _, waits, *_ in told)
            if not still or told != seen:
                seen, since = told, time.monotonic()
            elif time.monotonic() - since > self._stall_s:
                self._world.health.announce(self._explain(told))
                return

    def _explain(self, told: Sequence[Sequence[Any]]) -> Verdict:
        """Find a stage that waits for what its neighbour has sent."""
        stages = _stages(told)
        for replica in self._grid.replicas:
            for index, rank in enumerate(replica.stages):
                _, taken, awaits, *_ = stages[rank, index]
                if awaits is None:
                    continue
                source = index - 1 if awaits == "activations" else index + 1
                sent = stages[replica.stages[source], source][0]
                if sent[awaits] > taken[awaits]:
                    return Verdict(rank=rank, lost=False, message=self._sentence(
                        f"stage {index} on {self._world.names[rank]}",
                        f"{awaits} {taken[awaits] + 1} of {sent[awaits]} that stage {source} has sent it",
                    ))  # fmt: skip
        held = "; ".join(f"stage {index} on {self._world.names[rank]}" for rank, index in stages)
        return Verdict(rank=FEEDER, lost=False, message=self._sentence(held, "sums or losses of the others"))

    def _sentence(self, name: str, what: str) -> str:
        return (
            f"{name} waits for {what}, and nothing has moved for {self._stall_s:g} s, so a message was lost; go on "
            "from a checkpoint, with a larger stall_s if one message takes longer than that on the slowest link"
        )


def _stages(told: Sequence[Sequence[Any]]) -> dict[tuple[int, int], list[Any]]:
    """Return what was counted, by rank and stage."""
    return {(rank, index): counts for rank, _, _, own in told for index, *counts in own}
