"""A training in one group of processes after the other: where each call goes on, and what moves in between.

    a process is lost       the others form a group ─▶ arrange anew ─▶ what moves, from replicas ─▶ the call again
    one asks to come        the first process ends the group before a step ─▶ likewise, with it
    a stage had no replica  ─▶ arrange anew ─▶ everything from the last checkpoint ─▶ its next batch

Nothing of a call that is done again has been learned: gradients reach parameters once everybody has told that its
sums have come, and buffers that a forward had written to are as they were.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.deploy.run_options import SurvivalOptions
from penstock.errors import DeviceLost, PenstockError, PlanError, UsageError
from penstock.group.regroup import wait_for_newcomers
from penstock.group.verdict import Verdict
from penstock.terminal.notes import note
from penstock.train.arrangement import Arrangement
from penstock.train.checkpoint import load_checkpoint, scheduler_state
from penstock.train.checkpoint_folder import read_index
from penstock.train.migration import Prepared, gather_groups, prepare
from penstock.train.named_optimizer import NamedOptimizer, restore_settings
from penstock.train.outcome import TrainingChange, everywhere
from penstock.train.plain_values import decode
from penstock.train.survival.exchanges import Documents, Exchanges
from penstock.train.survival.rearrange import cuts_here, lost_names, read_grid, write_grid
from penstock.train.survival.regrid import choose_grid
from penstock.train.trainer import Trainer
from penstock.transport.base import FEEDER
from penstock.transport.collectives import all_gather

_LOOK_S = 1.0  # between two looks for those that wait to be taken in


class Survivors:
    """One process's part of a training that outlives the loss of processes; see `Together` for what it is to a trainer.

    `begun` is the arrangement with which the training began. A process that `joins` has nothing yet.

    Example:
        trainer.survivors = Survivors(trainer, exchanges, options, trainer.placed)
    """

    def __init__(
        self, trainer: Trainer, exchanges: Exchanges, options: SurvivalOptions, begun: Arrangement, *,
        joins: bool = False,
    ) -> None:  # fmt: skip
        self._trainer, self._exchanges, self._options, self._begun = trainer, exchanges, options, begun
        self._joins = self._changed = joins  # the group is another than the training is arranged for
        self._place: tuple[int, int] | None = None
        self._moving = self._knows_groups = False
        self._prepared: Prepared | None = None
        self._said: Mapping[str, Any] = {}
        self._checkpoint: Path | None = None
        self._going_back: Path | None = None
        self._looked_s = time.monotonic()
        self._once = exchanges.once
        exchanges.changed, exchanges.describe = self._renumber, self._describe

    def together(
        self, work: Callable[[], dict[str, Any]], undo: Callable[[], None] = lambda: None, *, takes_in: bool = False
    ) -> Documents:
        """Work, and return what every process tells of it; see `Together`."""
        if self._moving:  # a part of going over to another group, which is done again as a whole
            return all_gather(self._trainer.world.transport, work())
        while True:
            self._settle(takes_in=takes_in)
            found: Documents | None = None
            try:
                found = self._once(work)
            finally:
                if found is None:
                    undo()
            if found is not None:
                return found

    def place(self) -> tuple[int, int] | None:
        """Return, once, the epoch and the batch at which a process that has come goes on."""
        if self._joins and self._place is None:
            self._settle(takes_in=False)
        place, self._place = self._place, None
        return place

    def saw_checkpoint(self, folder: Path) -> None:
        """Take note of a checkpoint that is whole."""
        self._checkpoint = folder

    def close(self) -> None:
        """Go on in no other group."""
        self._exchanges.close()

    def _renumber(self, ranks: Mapping[int, int]) -> None:
        """Go by the ranks of another group; what was prepared in the one before may still be what all have."""
        for now in (self._trainer.now, *([self._prepared.now] if self._prepared is not None else [])):
            now.close()
            now.tensors.renumber(ranks)
        self._changed = True

    def _settle(self, *, takes_in: bool) -> None:
        """Arrange the training for the group that there is now, where that is another one."""
        if takes_in:
            self._know_groups()
        while True:
            if takes_in and self._trainer.world.rank == FEEDER:
                try:
                    self._look_for_newcomers()
                except PenstockError as error:  # another one is lost while one is waited for
                    self._exchanges.go_over(error)
                    continue
            if self._changed:
                self._changed, self._prepared = False, None
                if self._once(self._prepare) is not None:
                    self._commit()
            elif self._going_back is None:
                return
            elif self._once(self._go_back) is not None:
                self._going_back = None
                self._tell(went_back=True)

    def _know_groups(self) -> None:
        """Have every process know each optimizer's groups: those of parameters that are lost too, later."""
        while not self._knows_groups and not self._changed:
            self._knows_groups = self._once(self._tell_groups) is not None

    def _tell_groups(self) -> dict[str, Any]:
        gather_groups(self._trainer)
        return {}

    def _look_for_newcomers(self) -> None:
        """Where processes wait to be taken in, end this group: they are in the next one."""
        world, now = self._trainer.world, time.monotonic()
        missing = self._num_begun - world.transport.size
        if self._options.on_loss == "wait" and missing > 0:
            note(f"waiting up to {self._options.wait_s:g} s for {missing} more to join")
            if not wait_for_newcomers(world, missing, self._options.wait_s, world.check):
                error = DeviceLost(
                    f"{missing} of {self._num_begun} processes were lost and no other joined within "
                    f"{self._options.wait_s:g} s; go on from the last checkpoint"
                )
                world.health.report(error)
                raise error
        elif now - self._looked_s < _LOOK_S:
            return
        self._looked_s = now
        if wait_for_newcomers(world, 1):
            world.health.announce(Verdict(rank=FEEDER, message="another process has come", lost=False, again=True))

    def _describe(self) -> dict[str, Any]:
        """Describe the training to those that come, as the first process has it."""
        now = self._trainer.now
        return {
            "held": write_grid(now.tensors.grid), "cuts": [cut.name for cut in now.placed.cuts], "number": now.number,
            "begun": write_grid(self._begun.grid), "begun_cuts": [cut.name for cut in self._begun.cuts],
            "alike": self._trainer.alike,
        }  # fmt: skip

    def _prepare(self) -> dict[str, Any]:
        """Have the first process say how to go on, and move what is needed elsewhere."""
        trainer = self._trainer
        self._moving = True
        try:
            mine = self._say() if trainer.world.rank == FEEDER else {}
            self._said = all_gather(trainer.world.transport, mine)[FEEDER]
            if self._said["problem"]:
                raise everywhere(DeviceLost(f"{self._exchanges.why}; {self._said['problem']}"))
            if self._said["lost"] and self._said["checkpoint"] is None:
                raise everywhere(DeviceLost(
                    f"{self._exchanges.why}; {self._said['lost']} was held by no other process, and there is no "
                    "checkpoint to go back to: save one every so often, or use replicas"
                ))  # fmt: skip
            if self._joins:
                self._check_alike()
            trainer.known_groups[:] = [dict(groups) for groups in self._said["groups"]]
            cuts = cuts_here(trainer.captured, self._said["cuts"])
            placed = self._begun.moved(read_grid(self._said["grid"]), cuts, rank=trainer.world.rank)
            self._prepared = prepare(trainer, placed)
        finally:
            self._moving = False
        return {}

    def _check_alike(self) -> None:
        """Leave, as one that has come, where optimizers and schedulers of the others could not be taken over."""
        trainer, said = self._trainer, self._said
        groups = [len(optimizer.param_groups) for optimizer in trainer.optimizers]
        for what, own, theirs in (
            ("groups of parameters in its optimizers", groups, [len(each) for each in said["settings"]]),
            ("schedulers", len(trainer.schedulers), len(said["schedulers"])),
        ):
            if own != theirs:
                self._exchanges.leave(UsageError(
                    f"a process that comes to a training runs its script, but this one has {own} {what} and the "
                    f"training {theirs}"
                ))  # fmt: skip

    def _say(self) -> dict[str, Any]:
        """Return how the training goes on, on the first process."""
        trainer = self._trainer
        try:
            grid, cuts = choose_grid(trainer, self._begun, self._options)
        except PlanError as error:
            return {"problem": str(error)}
        lost = sorted(lost_names(trainer.captured, trainer.tensors))
        batch = trainer.trained
        return {
            "problem": "", "grid": write_grid(grid), "cuts": [cut.name for cut in cuts],
            "groups": trainer.known_groups, "step": trainer.step,
            "lost": lost[0] if lost else "", "place": batch.place if batch is not None else (0, 0),
            "checkpoint": str(self._checkpoint) if self._checkpoint is not None else None,
            "goes_back": bool(lost) or self._going_back is not None,
            "schedulers": [
                scheduler_state(
                    each, "so no process that comes could take it over; use one of torch's, or leave on_loss out"
                )
                for each in trainer.schedulers
            ],
            "settings": [
                [group["settings"] for group in NamedOptimizer(trainer.tensors, optimizer).groups()]
                for optimizer in trainer.optimizers
            ],
        }  # fmt: skip

    @property
    def _num_begun(self) -> int:
        return len(self._begun.grid.ranks)

    def _commit(self) -> None:
        """Train as it was prepared; nothing is sent any more."""
        prepared, said, trainer = self._prepared, self._said, self._trainer
        if prepared is None:
            return
        self._prepared = None
        prepared.commit()
        self._knows_groups = True
        if self._joins:
            self._joins, self._place = False, (int(said["place"][0]), int(said["place"][1]))
            trainer.step = said["step"]
            self._checkpoint = Path(said["checkpoint"]) if said["checkpoint"] is not None else None
            self._take_over_settings(said)
        if said["goes_back"]:
            self._going_back = self._checkpoint
        else:
            self._tell(went_back=False)

    def _tell(self, *, went_back: bool) -> None:
        """Say how the training goes on, and note it."""
        trainer = self._trainer
        change = TrainingChange(
            step=trainer.step, why=self._exchanges.why, took_s=time.monotonic() - self._exchanges.ended_s,
            processes=trainer.world.transport.size, replicas=len(trainer.grid.replicas),
            stages=trainer.placed.num_stages, went_back=went_back,
        )  # fmt: skip
        trainer.changes.append(change)
        if trainer.world.rank == FEEDER:
            back = f" from the checkpoint of step {change.step}" if went_back else ""
            note(
                f"{change.why}; goes on with {change.processes} processes, {change.replicas} x {change.stages} stages, "
                f"after {change.took_s:.1f} s{back}"
            )

    def _take_over_settings(self, said: Mapping[str, Any]) -> None:
        """Take over what the others' schedulers and optimizers have come to."""
        trainer = self._trainer
        for optimizer, groups in zip(trainer.optimizers, said["settings"], strict=True):
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                restore_settings(group, settings)
        for scheduler, state in zip(trainer.schedulers, said["schedulers"], strict=True):
            scheduler.load_state_dict(decode(state))

    def _go_back(self) -> dict[str, Any]:
        """Take everything from the last checkpoint; a call that is under way does the batch that follows there."""
        trainer, folder, batch = self._trainer, self._going_back, self._trainer.trained
        if folder is None or batch is None:
            raise everywhere(DeviceLost(f"{self._exchanges.why}; there is no checkpoint to go back to; start again"))
        self._moving = True
        try:
            index = read_index(folder)
            load_checkpoint(trainer, folder, trainer.optimizers, trainer.schedulers)
            place = index.loader
            batch.loader.rewind((place.epoch, place.position) if place is not None else (0, 0))
            for parameter in trainer.tensors.parameters.values():
                parameter.grad = None
        finally:
            self._moving = False
        trainer.rewound = batch
        return {}
