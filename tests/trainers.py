"""Training in threads that play processes, and the same training by hand in one process."""

import copy
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from penstock import trees
from penstock.deploy.run_options import CutOptions, RunOptions
from penstock.engine.placement import Grid, Replica, shares
from penstock.graph.call import as_call
from penstock.group.liveness import Boards, Health
from penstock.group.world import World
from penstock.random_states import RandomStates
from penstock.tensors import HOST
from penstock.train.arrangement import TrainOptions
from penstock.train.captured import Captured
from penstock.train.loss_convention import call_loss
from penstock.train.losses import own_loss
from penstock.train.trainer import Trainer
from penstock.transport.base import MeteredTransport
from penstock.transport.memory_network import MemoryNetwork
from tests.processes import PATIENCE


def take_rows(tree: Any, rows: range) -> Any:
    """Some rows of every tensor."""
    return trees.map_tensors(lambda x: x[rows.start : rows.stop], tree)


MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Batch = tuple[Any, Any]


def in_threads(size: int, script: Callable[[World], Any]) -> list[Any]:
    """Run a script in so many threads as if each were a process; gives what each returned, or the first error."""
    network, store = MemoryNetwork(size), HashStore()
    names = [f"rank {rank}" for rank in range(size)]
    results: list[Any] = [None] * size
    errors: list[BaseException | None] = [None] * size

    def run(rank: int) -> None:
        transport = network.transports[rank]
        health = Health(Boards.of_threads(store, rank, size), rank, names, transport.abort, beat_s=0.02)
        world = World(
            transport=MeteredTransport(transport), health=health, names=names, devices=list(range(size)), store=store,
            bandwidths=[None] * size, reason_s=1.0, between_gpus="auto", random_states=NoStates(),
        )  # fmt: skip
        try:
            results[rank] = script(world)
        # whatever it is, the caller of in_threads wants it
        except BaseException as error:
            errors[rank] = error
        finally:
            world.close()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0 * PATIENCE)
    assert not any(thread.is_alive() for thread in threads), "a rank has not ended"
    failed = [error for error in errors if error is not None]
    if failed:
        raise failed[0]
    return results


class NoStates(RandomStates):
    """Random states of a thread that plays a process: threads have theirs in common."""

    def digests(self) -> dict[str, str]:
        return {}


class Still:
    """Follows a training and leaves it as it is."""

    def begin_epoch(self, loader: Any) -> None: ...

    def end_epoch(self, loader: Any) -> None: ...

    def saw_gradients(self, gradients: Mapping[str, Tensor]) -> None: ...

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def on_each_rank(size: int, work: Callable[[int], Any], deadline_s: float = 20.0) -> list[Any]:
    """Do work in so many threads at once, each with its number; gives what each returned or raised."""
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        # whatever it is, the caller wants it
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(deadline_s)
    assert not any(thread.is_alive() for thread in threads), "a rank has not ended"
    return results


def make_trainer(captured: Captured, world: World, *, device: torch.device = HOST, **settings: Any) -> Trainer:
    """Make one process's trainer; `settings` are options of `penstock.Pipeline` by name."""

    def take(kind: type[Any]) -> Any:
        names = set(inspect.signature(kind).parameters)
        return kind(**{name: settings.pop(name) for name in names & settings.keys()})

    cut, run, options = take(CutOptions), take(RunOptions), take(TrainOptions)
    assert not settings, f"no such options: {settings}"
    return Trainer(captured, world, cut, run, options, device)


def gathered(trainer: Trainer, what: Callable[[nn.Parameter], Tensor | None]) -> dict[str, Tensor]:
    """One process's share of gradients or values, by name."""
    return {n: t.detach().clone() for n, p in trainer.named_parameters() if (t := what(p)) is not None}


def train(
    captured: Captured, size: int, batches: Sequence[Batch], make: MakeOptimizer, loss_fn: Any, **settings: Any
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Train in threads; gives the losses, the first step's gradients and the trained weights and buffers."""

    def script(world: World) -> Any:
        trainer = make_trainer(captured, world, **settings)
        finished = False
        try:
            optimizer = trainer.optimizer(make)
            losses, first = [], {}
            for step, (inputs, labels) in enumerate(batches):
                rows = trainer.now.placed.grid.rows(len(labels) if labels is not None else rows_of(inputs))
                mine = rows[trainer.now.placed.replica_index]
                losses.append(float(trainer.train_step(take_rows(inputs, mine), take_rows(labels, mine), loss_fn)))
                if step == 0:
                    first = gathered(trainer, lambda p: p.grad)
                optimizer.step()
                optimizer.zero_grad()
            finished = True
        finally:
            trainer.close(wait=finished)
        return losses, first, gathered(trainer, lambda p: p) | trainer.now.tensors.others

    results = in_threads(size, script)
    assert all(result[0] == results[0][0] for result in results), "the loss is not the same everywhere"
    first: dict[str, Tensor] = {}
    last: dict[str, Tensor] = {}
    for _, gradients, tensors in results:
        for whole, part in ((first, gradients), (last, tensors)):
            for name, tensor in part.items():
                assert name not in whole or torch.equal(whole[name], tensor), f"{name} differs between its copies"
                whole[name] = tensor
    return results[0][0], first, last


def rows_of(inputs: Any) -> int:
    """Count the rows of inputs."""
    args, kwargs = as_call(inputs)
    return len(next(iter([*args, *kwargs.values()])))


def by_hand(
    model: nn.Module, batches: Sequence[Batch], make: MakeOptimizer, loss_fn: Any, num_parts: Sequence[int]
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """The reference: one process that accumulates the same microbatches; `num_parts` of them for each replica."""
    model = copy.deepcopy(model)
    optimizer = make([parameter for parameter in model.parameters() if parameter.requires_grad])
    losses, first = [], {}
    for step, (inputs, labels) in enumerate(batches):
        # replicas with more microbatches have as many more rows
        grid = Grid(tuple(Replica((), (), parts) for parts in num_parts))
        replicas = grid.rows(len(labels) if labels is not None else rows_of(inputs))
        total = weight = 0.0
        for replica, parts in zip(replicas, num_parts, strict=True):
            for rows in shares(len(replica), min(parts, len(replica))):
                absolute = range(replica.start + rows.start, replica.start + rows.stop)
                args, kwargs = as_call(take_rows(inputs, absolute))
                output = model(*args, **kwargs)
                loss, count = (
                    call_loss(loss_fn, output, take_rows(labels, absolute)) if loss_fn else (own_loss(output), None)
                )
                loss, count = (loss * len(rows), len(rows)) if count is None else (loss, count)
                loss.backward()
                total, weight = total + float(loss.detach()), weight + count
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= weight
        losses.append(total / weight)
        if step == 0:
            first = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return losses, first, {n: t.detach() for n, t in (*model.named_parameters(), *model.named_buffers())}


def error(expected: Tensor, given: Tensor, least: float = 0.0) -> float:
    """The distance of two tensors over the expected one's norm, or over `least` where that is more.

    A gradient that is zero but for rounding, as of a bias before a normalization, has no digits to compare.
    """
    scale = max(float(torch.linalg.vector_norm(expected.double())), least) or 1.0
    return float(torch.linalg.vector_norm((expected - given).double())) / scale


def errors(expected: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> dict[str, float]:
    """The error of every tensor that both have; a thousandth of the largest norm is the least to be measured by."""
    least = 1e-3 * max(float(tensor.double().norm()) for tensor in expected.values())
    return {name: error(tensor, given[name], least) for name, tensor in expected.items() if name in given}
