"""Which process stands for which device of a plan."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from penstock.deploy.placing import places_in_line, ranks_of
from penstock.errors import PlanError
from penstock.graph.capture import capture
from tests.worlds import memory_world


def test_processes_of_one_host_are_numbered_from_the_second_on() -> None:
    hosts = ["the feeding process", "desk", "board", "desk", "desk"]
    with memory_world(4) as made:
        world = replace(made.feeder, hosts=hosts)
        assert ranks_of(world, ["board", "desk:2", "desk"]) == {"board": 2, "desk:2": 4, "desk": 1}
        with pytest.raises(PlanError, match=r"board:1, .*desk, board, desk:1, desk:2"):
            ranks_of(world, ["board", "board:1"])


class Repeats(nn.Module):
    """Its output has so many times the rows of its input."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(5)))
        self.times = times

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.layers(rows)
        return hidden.repeat(1, self.times)


@pytest.mark.parametrize(("times", "wanted"), [(1, [[0, 0, 1, 2], [0, 1]]), (2, [[1, 2, 0, 0], [1, 0]])])
def test_the_driver_has_the_stage_whose_messages_are_larger(times: int, wanted: list[list[int]]) -> None:
    graph = capture(Repeats(times), (torch.zeros(1, 6),))
    with memory_world(2) as made:
        world = replace(made.feeder, devices=[0, 1, 2])
        assert [places_in_line(world, graph, stages) for stages in (4, 2)] == wanted
        # a driver that has no stage
        assert places_in_line(made.feeder, graph, 2) == [1, 2]
