"""A process that dies while it trains, a message that is lost: the others say so, and nobody hangs."""

import math
import signal
from pathlib import Path

import pytest
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from penstock.errors import RunError
from penstock.group.world import World
from penstock.train.captured import Captured
from penstock.transport.base import link_tag, training_set
from penstock.transport.faulty import Fault, FaultyTransport
from tests.processes import PROGRAMS, run_groups
from tests.train.test_pipeline import images, small
from tests.trainers import in_threads, make_trainer


def test_a_killed_process_is_named(tmp_path: Path) -> None:
    script = PROGRAMS / "killed_training.py"
    all_stages = (1, 2)
    said = [tmp_path / f"{stages}.txt" for stages in all_stages]
    ended = run_groups(
        script, [(2, [str(stages), str(file)]) for stages, file in zip(all_stages, said, strict=True)], deadline_s=60.0
    )
    for file, (first, second) in zip(said, ended, strict=True):
        assert (first.status, second.status) == (0, -signal.SIGKILL)
        assert first.at_s - second.at_s < 15.0
        assert file.read_text().startswith("DeviceLost rank 1 on")


@pytest.mark.parametrize(
    ("rank", "said"),
    [
        (0, "stage 1 on rank 1 has waited 0.4 s for activations 4 of 4 that stage 0 on rank 0 has sent it"),
        (1, "stage 0 on rank 0 has waited 0.4 s for gradients 4 of 4 that stage 1 on rank 1 has sent it"),
    ],
)
def test_a_lost_message_is_named_by_everybody(rank: int, said: str) -> None:
    # the last of a step: behind another one the next message tells at once that it is missing
    captured = Captured(small(), images(2)[:1])

    def script(world: World) -> str:
        first = link_tag(training_set(1), 2)  # of the first generation, activations of the first cut
        fault = Fault(kind="drop", rank=rank, message=3, tag=first + rank)
        world.transport.become(FaultyTransport(world.transport.inner, [fault]))
        trainer = make_trainer(captured, world, microbatches=4, stall_s=0.4)
        try:
            trainer.train_step(*images(8), F.cross_entropy)
        except RunError as error:
            return str(error)
        finally:
            trainer.close(wait=False)
        return ""

    for told in in_threads(2, script):
        assert told.startswith(said), told


@pytest.mark.parametrize(
    ("layer", "said"), [(0, "came from stage 0"), (6, "came from stage 1"), (None, "stage 1, in the loss itself")]
)
def test_a_loss_that_is_not_finite_names_the_stage(layer: int | None, said: str) -> None:
    model = small()
    if layer is not None:
        next(list(model.children())[layer].parameters()).data.fill_(math.inf)
    captured = Captured(model, images(2)[:1])

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs, labels) * (math.nan if layer is None else 1.0)

    def script(world: World) -> str:
        trainer = make_trainer(captured, world, microbatches=4)
        try:
            with pytest.raises(RunError) as raised:
                trainer.train_step(*images(8), loss)
            return str(raised.value)
        finally:
            trainer.close()

    for told in in_threads(2, script):
        assert said in told, told
