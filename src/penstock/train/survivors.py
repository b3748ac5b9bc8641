"""A training run that survives lost processes, across process groups: recovery, migration and repeated calls.

    a process is lost            survivors form a group ─▶ rearrange ─▶ migrate from replicas ─▶ repeat the call
    a process asks to join       rank 0 ends the group before a step ─▶ the same, with the newcomer
    a lost stage had no replica  ─▶ rearrange ─▶ restore everything from a checkpoint ─▶ the batch after the checkpoint

An interrupted call has no effects, so it can be repeated: gradients are added to parameters only after every rank has
acknowledged its sums, and buffers that a forward has written are restored.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.deploy.run_options import OnLoss
from penstock.engine.placement import Grid, Replica
from penstock.errors import DeviceLost, PenstockError, PlanError, UsageError, everywhere
from penstock.group.board import Verdict
from penstock.group.regroup import wait_for_newcomers
from penstock.text import counted, note
from penstock.train.arrangement import Arrangement
from penstock.train.checkpoint import load_checkpoint, scheduler_state
from penstock.train.checkpoint_folder import read_index
from penstock.train.exchanges import Exchanges, Objects
from penstock.train.features import JoinPlace
from penstock.train.migration import Prepared, choose_grid, cuts_here, gather_groups, lost_names, prepare
from penstock.train.named_optimizer import NamedOptimizer, restore_settings
from penstock.train.plain_values import decode
from penstock.train.step import TrainingChange
from penstock.train.trainer import Trainer
from penstock.transport.collectives import all_gather
from penstock.wire import FEEDER

_LOOK_S = 1.0  # interval between checks for waiting newcomers


def write_grid(grid: Grid) -> list[dict[str, object]]:
    """Encode a grid as JSON values."""
    return [
        {"devices": list(r.devices), "stages": list(r.stages), "num_microbatches": r.num_microbatches}
        for r in grid.replicas
    ]


def read_grid(encoded: Sequence[Mapping[str, Any]]) -> Grid:
    """Decode the result of `write_grid`."""
    return Grid(
        tuple(Replica(tuple(each["devices"]), tuple(each["stages"]), each["num_microbatches"]) for each in encoded)
    )


class _Continuation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a run continues in another group, as rank 0 tells it: the placement, and the state of its program.

    With `problem` it cannot. `lost` is a tensor that no process holds any longer, and `goes_back` is set if everything
    is restored from `checkpoint`. `place` is the batch that is trained on, or being loaded if `loads`. A newcomer takes
    over `schedulers` and the `settings` of optimizers.
    """

    problem: str = ""
    grid: list[dict[str, Any]] = []
    cuts: list[str] = []
    groups: list[dict[str, int]] = []
    step: int = 0
    lost: str = ""
    loads: bool = False
    place: tuple[int, int] = (0, 0)
    checkpoint: str | None = None
    goes_back: bool = False
    schedulers: list[Any] = []
    settings: list[list[dict[str, Any]]] = []


class Survivors:
    """One process's recovery from lost ranks in a training run.

    `begun` is the initial placement of the run. A process that `joins` holds no tensors yet.

    Example:
        trainer.survivors = Survivors(trainer, exchanges, options, trainer.now.placed)
    """

    def __init__(
        self, trainer: Trainer, exchanges: Exchanges, options: OnLoss, begun: Arrangement, *, joins: bool = False
    ) -> None:
        self._trainer, self._exchanges, self._options, self._begun = trainer, exchanges, options, begun
        self._joins = self._changed = joins  # `_changed`: the current placement is for an earlier group
        self._place: JoinPlace | None = None
        self._knows_groups = False
        self._prepared: Prepared | None = None
        self._told = _Continuation()
        self._checkpoint: Path | None = None
        self._going_back: Path | None = None
        self._looked_s = time.monotonic()
        self._once = exchanges.once
        exchanges.changed, exchanges.describe = self._renumber, self._describe

    def together(
        self, work: Callable[[], dict[str, Any]], undo: Callable[[], None] = lambda: None, *, admits: bool = False
    ) -> Objects:
        """Run `work` and return the objects of all ranks; `work` is repeated if the group has changed.

        `work` must contain all sends and receives of the call; `undo` reverts the changes of a failed attempt. With
        `admits`, newcomers join before the call.
        """
        if self._exchanges.inside:  # part of a switch to another group, which is repeated as a whole
            return all_gather(self._trainer.world.transport, work())
        while True:
            self._settle(admits=admits)
            found: Objects | None = None
            try:
                found = self._once(work)
            finally:
                if found is None:
                    undo()
            if found is not None:
                return found

    def place(self) -> JoinPlace | None:
        """Return the place at which a newcomer continues; None in later calls and other processes."""
        if self._joins and self._place is None:
            self._settle(admits=False)
        place, self._place = self._place, None
        return place

    def saw_checkpoint(self, folder: Path) -> None:
        """Record a complete checkpoint."""
        self._checkpoint = folder

    def close(self) -> None:
        """Stop following new groups."""
        self._exchanges.close()

    def _renumber(self, ranks: Mapping[int, int]) -> None:
        """Switch to the ranks of another group; state prepared in the previous one may still be committed."""
        for now in (self._trainer.now, *([self._prepared.now] if self._prepared is not None else [])):
            now.close()
            now.tensors.renumber(ranks)
        self._changed = True

    def _settle(self, *, admits: bool) -> None:
        """Change the placement if the group has changed."""
        if admits:
            self._know_groups()
        while True:
            if admits and self._trainer.world.rank == FEEDER:
                try:
                    self._look_for_newcomers()
                except PenstockError as error:  # another rank was lost during the wait
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
        """Tell every rank the optimizer's group of each parameter: it stays known if all its holders are lost."""
        while not self._knows_groups and not self._changed:
            self._knows_groups = self._once(self._tell_groups) is not None

    def _tell_groups(self) -> dict[str, Any]:
        gather_groups(self._trainer)
        return {}

    def _look_for_newcomers(self) -> None:
        """End this group if processes wait to be admitted: they join the next group."""
        world, now = self._trainer.world, time.monotonic()
        missing = self._num_begun - world.transport.size
        if self._options.action == "wait" and missing > 0:
            note(f"waiting up to {self._options.wait_s:g} s for {counted(missing, 'more process')} to join")
            if not wait_for_newcomers(world, missing, self._options.wait_s, world.check):
                error = DeviceLost(
                    f"lost {missing} of {self._num_begun} processes, and not all replacements joined within "
                    f"{self._options.wait_s:g} s; continue from the last checkpoint"
                )
                world.health.report(error)
                raise error
        elif now - self._looked_s < _LOOK_S:
            return
        self._looked_s = now
        if wait_for_newcomers(world, 1):
            world.health.announce(Verdict(rank=FEEDER, message="another process joined", lost=False, again=True))

    def _describe(self) -> dict[str, Any]:
        """Return rank 0's description of the run for newcomers."""
        now = self._trainer.now
        return {
            "held": write_grid(now.tensors.grid),
            "cuts": [cut.name for cut in now.placed.cuts],
            "number": now.number,
            "begun": write_grid(self._begun.grid),
            "begun_cuts": [cut.name for cut in self._begun.cuts],
            "alike": self._trainer.alike,
        }

    def _prepare(self) -> dict[str, Any]:
        """Receive the next placement from rank 0, and migrate tensors to it."""
        trainer = self._trainer
        mine = msgspec.to_builtins(self._continuation()) if trainer.world.rank == FEEDER else {}
        told = self._told = msgspec.convert(all_gather(trainer.world.transport, mine)[FEEDER], _Continuation)
        with everywhere():
            if told.problem:
                raise DeviceLost(f"{self._exchanges.why}; {told.problem}")
            if told.lost and told.checkpoint is None:
                raise DeviceLost(
                    f"{self._exchanges.why}; no other process held {told.lost}, and no checkpoint to restore was "
                    "found: save checkpoints regularly, or use replicas"
                )
        if self._joins:
            self._check_alike()
        trainer.known_groups[:] = told.groups
        cuts = cuts_here(trainer.now.captured, told.cuts)
        self._prepared = prepare(trainer, self._begun.moved(read_grid(told.grid), cuts, rank=trainer.world.rank))
        return {}

    def _check_alike(self) -> None:
        """Leave the run if this newcomer has other numbers of parameter groups or schedulers than the other ranks."""
        trainer, told = self._trainer, self._told
        groups = [len(optimizer.param_groups) for optimizer in trainer.optimizers]
        for what, own, theirs in (
            ("groups of parameters in its optimizers", groups, [len(each) for each in told.settings]),
            ("schedulers", len(trainer.schedulers), len(told.schedulers)),
        ):
            if own != theirs:
                self._exchanges.leave(
                    UsageError(
                        f"a process that joins a training run must run the same script; this process has {own} {what}, "
                        f"the run has {theirs}"
                    )
                )

    def _continuation(self) -> _Continuation:
        """Return how the run continues, on rank 0."""
        trainer = self._trainer
        try:
            grid, cuts = choose_grid(trainer, self._begun, self._options)
        except PlanError as error:
            return _Continuation(problem=str(error))
        lost = sorted(lost_names(trainer.now.captured, trainer.now.tensors))
        batch, loading = trainer.data.trained, trainer.data.loading
        return _Continuation(
            grid=write_grid(grid),
            cuts=[cut.name for cut in cuts],
            groups=trainer.known_groups,
            step=trainer.step,
            lost=lost[0] if lost else "",
            loads=loading is not None,
            place=loading or (batch.place if batch is not None else (0, 0)),
            checkpoint=str(self._checkpoint) if self._checkpoint is not None else None,
            goes_back=bool(lost) or self._going_back is not None,
            schedulers=[
                scheduler_state(
                    each, "so a process that joins cannot copy it; use a scheduler of torch, or leave on_loss out"
                )
                for each in trainer.schedulers
            ],
            settings=[
                [group["settings"] for group in NamedOptimizer(trainer.now.tensors, optimizer).groups()]
                for optimizer in trainer.optimizers
            ],
        )

    @property
    def _num_begun(self) -> int:
        return len(self._begun.grid.ranks)

    def _commit(self) -> None:
        """Commit the prepared migration; sends nothing."""
        prepared, told, trainer = self._prepared, self._told, self._trainer
        if prepared is None:
            return
        self._prepared = None
        prepared.commit()
        self._knows_groups = True
        if self._joins:
            self._joins, self._place = False, JoinPlace(*told.place, told.loads)
            trainer.step = told.step
            self._checkpoint = Path(told.checkpoint) if told.checkpoint is not None else None
            self._take_over_settings(told)
        if told.goes_back:
            self._going_back = self._checkpoint
        else:
            self._tell(went_back=False)

    def _tell(self, *, went_back: bool) -> None:
        """Record a change of the process group, and print a note on rank 0."""
        trainer = self._trainer
        change = TrainingChange(
            step=trainer.step,
            why=self._exchanges.why,
            took_s=time.monotonic() - self._exchanges.ended_s,
            processes=trainer.world.transport.size,
            replicas=len(trainer.now.placed.grid.replicas),
            stages=trainer.now.placed.num_stages,
            went_back=went_back,
        )
        trainer.changes.append(change)
        if trainer.world.rank == FEEDER:
            back = f" from the checkpoint of step {change.step}" if went_back else ""
            note(
                f"{change.why}; training continues{back} on {counted(change.processes, 'process')} "
                f"({counted(change.replicas, 'replica')} x {counted(change.stages, 'stage')}) "
                f"after {change.took_s:.1f} s"
            )

    def _take_over_settings(self, told: _Continuation) -> None:
        """Copy the state of the other ranks' schedulers and the settings of their optimizers."""
        trainer = self._trainer
        for optimizer, groups in zip(trainer.optimizers, told.settings, strict=True):
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                restore_settings(group, settings)
        for scheduler, state in zip(trainer.schedulers, told.schedulers, strict=True):
            scheduler.load_state_dict(decode(state))

    def _go_back(self) -> dict[str, Any]:
        """Restore all state from the last checkpoint; a running call continues with the batch after the checkpoint."""
        trainer, folder, batch = self._trainer, self._going_back, self._trainer.data.trained
        with everywhere():
            if folder is None:
                raise DeviceLost(f"{self._exchanges.why}; no checkpoint to restore was found; start again")
            if batch is None:
                raise DeviceLost(
                    f"{self._exchanges.why}; the run was not training on a batch of pipe.loader, so it cannot go back "
                    "to the checkpoint by itself; start the run again from it"
                )
        index = read_index(folder)
        load_checkpoint(trainer, folder, trainer.optimizers, trainer.schedulers)
        place = index.loaders[index.trained] if index.trained is not None else None
        batch.loader.rewind((place.epoch, place.position) if place is not None else (0, 0))
        for parameter in trainer.now.tensors.parameters.values():
            parameter.grad = None
        trainer.data.rewound = batch
        return {}
