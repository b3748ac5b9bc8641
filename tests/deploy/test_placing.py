"""Which process stands for which device of a plan."""

from dataclasses import replace

import pytest

from penstock.deploy.placing import ranks_of
from penstock.errors import PlanError
from tests.worlds import memory_world


def test_processes_of_one_host_are_numbered_from_the_second_on() -> None:
    hosts = ["the feeding process", "desk", "board", "desk", "desk"]
    with memory_world(4) as made:
        world = replace(made.feeder, hosts=hosts)
        assert ranks_of(world, ["board", "desk:2", "desk"]) == {"board": 2, "desk:2": 4, "desk": 1}
        with pytest.raises(PlanError, match="uses board:1, but the run's hosts are desk, board, desk:1, desk:2"):
            ranks_of(world, ["board", "board:1"])
