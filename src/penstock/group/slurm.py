"""Translate the variables that Slurm's `srun` sets into those of torchrun."""

import re
from collections.abc import Mapping

_FIRST_PORT, _PORTS = 20_000, 20_000
_RUN = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def slurm_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return RANK, WORLD_SIZE and so on for a task of a step with several tasks; empty for any other process.

    A batch script is not a task of a step. MASTER_ADDR and MASTER_PORT are kept if set.

    >>> slurm_variables({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1",
    ...                  "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "pi[07-08]", "SLURM_JOB_ID": "5"})
    {'RANK': '2', 'WORLD_SIZE': '4', 'LOCAL_RANK': '0', 'LOCAL_WORLD_SIZE': '2', 'MASTER_ADDR': 'pi07', \
'MASTER_PORT': '20005'}
    """
    try:
        size, rank = int(environment["SLURM_STEP_NUM_TASKS"]), int(environment["SLURM_PROCID"])
        if size < 2:
            return {}
        job, step = int(environment["SLURM_JOB_ID"]), int(environment.get("SLURM_STEP_ID", "0"))
        tasks = tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])
        found = {
            "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(int(environment["SLURM_LOCALID"])),
            "LOCAL_WORLD_SIZE": str(tasks[int(environment["SLURM_NODEID"])]),
            "MASTER_ADDR": first_node(environment["SLURM_STEP_NODELIST"]),
            # jobs that share a node usually meet at different ports
            "MASTER_PORT": str(_FIRST_PORT + (job + 97 * step) % _PORTS),
        }  # fmt: skip
    except (KeyError, ValueError, IndexError):
        return {}
    return found | {name: environment[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in environment}


def tasks_per_node(text: str) -> list[int]:
    """Parse the number of tasks on each node.

    >>> tasks_per_node("2(x3),1")
    [2, 2, 2, 1]

    Raises `ValueError` for anything else.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _RUN.fullmatch(part)
        if match is None:
            raise ValueError(f"tasks per node must be as in 2(x3),1; got {text!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_node(nodes: str) -> str:
    """Return the first node of a Slurm node list.

    >>> first_node("pi[07-09,12],desk"), first_node("desk,pi3"), first_node("a[1-2]b[5-6]")
    ('pi07', 'desk', 'a1b5')
    """
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)
