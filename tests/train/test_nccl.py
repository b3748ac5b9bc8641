"""Training where tensors go from device to device: the gradients of the way by the host, in every schedule."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from penstock.errors import RunError
from penstock.group.world import World
from penstock.train.trainer import Trainer, evaluate, predict
from tests.communicators import Communicators
from tests.fewer import first
from tests.learners import LOSSES, batches, captured, sgd
from tests.trainers import in_threads, make_trainer, train


@contextlib.contextmanager
def trainer_of(world: World, device: torch.device) -> Iterator[Trainer]:
    trainer = make_trainer(captured("deit", torch.float32), world, stages=world.transport.size, device=device)
    yield trainer
    trainer.close()


WAYS: list[tuple[int, dict[str, Any]]] = [
    (3, {"stages": 3, "schedule": "zero-bubble"}),
    (4, {"stages": 2, "replicas": 2, "microbatches": 2}),
    (2, {"stages": 2}),
    (2, {"stages": 4, "schedule": "interleaved"}),
]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("size", "settings"), first(2, WAYS), ids=["zero-bubble", "replicas", "1f1b", "interleaved"])
def test_gradients_are_those_of_the_way_by_the_host(
    size: int, settings: dict[str, Any], pretended: torch.device, communicators: Communicators
) -> None:
    # seven rows: the last microbatches are ragged; a larger second batch makes the lines anew
    given = [*batches("deit", 1, rows=7), *batches("deit", 2, rows=13)]
    way = {"microbatches": 4, "device": pretended, **settings}
    found = []
    for shared in (True, False):
        communicators.shared = shared
        assert not communicators.made
        found.append(train(captured("deit", torch.float32), size, given, sgd, LOSSES["deit"], **way))
    by_host, direct = found
    assert direct[0] == by_host[0]
    for expected, tensors in zip(by_host[1:], direct[1:], strict=True):
        assert expected.keys() == tensors.keys()
        assert all(torch.equal(expected[name].cpu(), tensor.cpu()) for name, tensor in tensors.items())
    assert len(communicators.made) >= 4  # both ends of a line, there and back
    assert all(c.num_begun > 1 for c in communicators.made)


def test_evaluation_goes_from_device_to_device(pretended: torch.device, communicators: Communicators) -> None:
    inputs, labels = batches("deit", 1, rows=5)[0]

    def script(world: World) -> Any:
        with trainer_of(world, pretended) as trainer:
            return predict(trainer, inputs), evaluate(trainer, inputs, labels, F.cross_entropy)

    communicators.shared = True
    expected = in_threads(2, script)[0]
    communicators.shared = False
    output, loss = in_threads(2, script)[0]
    assert torch.equal(output, expected[0])
    assert loss == expected[1]
    assert len(communicators.made) == 2


def test_a_process_that_fails_ends_the_others(pretended: torch.device, communicators: Communicators) -> None:
    given = batches("deit", 2, rows=8)

    def script(world: World) -> None:
        with trainer_of(world, pretended) as trainer:
            trainer.train_step(*given[0], F.cross_entropy)
            if world.rank == 2:
                world.health.report(RunError("it fell over"))
                return
            with pytest.raises(RunError, match="rank 2: it fell over"):
                trainer.train_step(*given[1], F.cross_entropy)

    in_threads(3, script)
    assert communicators.made
    assert all(c.aborted for c in communicators.made)
