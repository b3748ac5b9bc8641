"""Start of a training run that survives lost processes, in its initial processes or in a process that joins later."""

import torch

from penstock.deploy.deployment import name_devices
from penstock.deploy.run_options import CutOptions, RunOptions
from penstock.errors import RunError, UsageError, exclude
from penstock.graph.cuts import Cuts
from penstock.graph.graph import Graph
from penstock.group.regroup import join_later
from penstock.group.world import World
from penstock.plan.schedule.schedules import SCHEDULES
from penstock.runtime.registry import EAGER
from penstock.tensors import HOST
from penstock.train.agreement import identity_of
from penstock.train.arrangement import Arrangement, ScheduleChoice, TrainOptions, check_profile
from penstock.train.captured import Captured
from penstock.train.exchanges import Exchanges
from penstock.train.migration import fix_microbatches
from penstock.train.survivors import Survivors, read_grid
from penstock.train.trainer import Trainer
from penstock.wire import FEEDER, NUM_BUFFERS


def check_survivable(graph: Graph, options: TrainOptions, run: RunOptions, device: torch.device) -> None:
    """Raise `UsageError` if a run cannot survive lost processes, `PlanError` if the profile is of a different model."""
    profile, cluster = run.on_loss.profile, run.on_loss.cluster
    if (profile is None) != (cluster is None):
        raise UsageError(
            "the planner needs both a profile of the model and a cluster with the memory and speed of devices; "
            "set profile and cluster, or neither"
        )
    if profile is not None:
        check_profile(graph, profile)
    exclude("on_loss", device != HOST, "on_loss supports only CPUs so far")
    exclude("runtime or on_loss", run.runtime != EAGER, f"on_loss needs the runtime eager; got {run.runtime}")
    if options.schedule not in SCHEDULES:
        raise UsageError(
            "on_loss needs a schedule that works with any number of stages, which a custom one does not; choose a "
            "schedule by name"
        )


def survive(trainer: Trainer, run: RunOptions) -> None:
    """Make a new training run survive lost processes.

    Raises `UsageError` if the processes cannot form another group, `ClusterError` if the cluster lacks a process's
    device.
    """
    if trainer.world.membership is None:
        raise UsageError(
            "on_loss needs at least two processes, started without torchrun (its agents end all processes when one "
            "fails); start them with penstock train, penstock lab run or penstock hosts run, or leave on_loss out"
        )
    if run.on_loss.cluster is not None and trainer.world.rank == FEEDER:
        for name in name_devices(trainer.world):
            run.on_loss.cluster.device(name)  # raises an error if unknown
    fix_microbatches(trainer)
    exchanges = Exchanges(trainer.world)
    trainer.survivors = Survivors(trainer, exchanges, run.on_loss, trainer.now.placed)


def join_training(
    endpoint: tuple[str, int], captured: Captured, cut: CutOptions, run: RunOptions, options: TrainOptions
) -> tuple[Trainer, World]:
    """Join a training run at a host and port; returns this process's trainer, which has no stages yet, and the world.

    Raises `RunError` if no run admits this process, `UsageError` if the run trains another model.
    """
    host, port = endpoint
    world = join_later(host, port)
    if world is None:
        raise RunError(f"the training run at {host}:{port} ended before it admitted this process")
    try:
        exchanges = Exchanges(world, joins=True)
        told, own = exchanges.described, identity_of(captured, options)
        if (theirs := told["alike"][: len(own)]) != own:
            raise UsageError(
                f"the training run at {host}:{port} has another model or other settings (model, last operation, "
                f"number of operations, seed, autocast: {theirs} there, {own} here); run the same script"
            )
        choice = ScheduleChoice(options.schedule if cut.plan is None else cut.plan.schedule, NUM_BUFFERS)
        asked = cut.plan is not None or options.microbatches is not None
        begun, held = (
            Arrangement(
                world.rank,
                read_grid(told[grid]).with_idle([world.rank]),
                Cuts(captured.graph).find_all(told[cuts]),
                choice,
                checkpointing=options.checkpointing,
                asked=asked,
            )
            for grid, cuts in (("begun", "begun_cuts"), ("held", "cuts"))
        )
        trainer = Trainer(captured, world, cut, run, options, placed=held)
    except BaseException as error:
        world.health.report(error, lost=True)
        world.close()
        raise
    trainer.now.number = told["number"]
    trainer.survivors = Survivors(trainer, exchanges, run.on_loss, begun, joins=True)
    return trainer, world
