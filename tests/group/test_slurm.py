"""Ranks from Slurm's variables."""

import os

import pytest

from penstock.group.entry import under_torchrun
from penstock.group.slurm import first_node, slurm_variables, tasks_per_node

STEP = {
    "SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_STEP_ID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_STEP_NODELIST": "board[1-2]", "SLURM_JOB_ID": "39999",
}  # fmt: skip


def test_a_task_of_a_step_has_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    with monkeypatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            patch.setenv(name, "")  # so that it is removed again
            patch.delenv(name)
        assert under_torchrun()
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"]) == ("2", "3", "1")
        assert os.environ["MASTER_ADDR"] == "board1"
        assert os.environ["MASTER_PORT"] == str(20_000 + (39_999 + 97) % 20_000)


def test_what_is_set_already_stays() -> None:
    found = slurm_variables({**STEP, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"})
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.0.0.1", "29500")


@pytest.mark.parametrize(
    "change",
    [
        {"SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_PROCID": "x"},
        {"SLURM_NODEID": "7"},
        {"SLURM_STEP_TASKS_PER_NODE": "many"},
    ],
)
def test_what_is_no_task_among_several_is_alone(change: dict[str, str]) -> None:
    assert slurm_variables({**STEP, **change}) == {}
    assert slurm_variables({name: STEP[name] for name in STEP if name not in {"SLURM_STEP_NUM_TASKS"}}) == {}


@pytest.mark.parametrize(("text", "counts"), [("1", [1]), ("1(x2)", [1, 1]), ("2(x2),3,1(x2)", [2, 2, 3, 1, 1])])
def test_tasks_of_nodes(text: str, counts: list[int]) -> None:
    assert tasks_per_node(text) == counts


@pytest.mark.parametrize(
    ("nodes", "first"), [("n1", "n1"), ("n[1-2]", "n1"), ("n[003,5-9]", "n003"), ("a,b[1-2]", "a"), ("b[2],a", "b2")]
)
def test_the_first_node(nodes: str, first: str) -> None:
    assert first_node(nodes) == first
