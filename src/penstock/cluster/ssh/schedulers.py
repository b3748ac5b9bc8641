"""Scripts that submit a run to a scheduler: a batch script for Slurm, a manifest for Kubernetes."""

import json
import shlex
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from penstock.cluster.ssh.remote import PORT

_RESUMED = {"infer", "train"}  # commands that have --resume
_RANK = "RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=0 LOCAL_WORLD_SIZE=1"


def slurm_script(
    arguments: Sequence[str], num_hosts: int, *, threads: int, minutes: int = 60, survives: bool = False
) -> str:
    """Return a batch script that runs a penstock command on several nodes, one process on each.

    Example:
        print(slurm_script(["infer", "timm:deit_small_patch16_224", "--images", "photos/"], 4, threads=4))

    Slurm ends a job that has lost a node, and restarts it with --resume. If the run `survives` lost processes (all but
    the first), the job keeps its other nodes, and its status is that of the first process.
    """
    options, words = "", shlex.join(arguments)
    if gpus := _num_gpus(arguments):
        options += f"\n#SBATCH --gpus-per-node={gpus}"
    if arguments[0] in _RESUMED:
        options += "\n#SBATCH --requeue"
        words += ' ${SLURM_RESTART_COUNT:+"--resume"}'
    # without --cpus-per-task a step has one core per task (Slurm 22.05); --kill-on-bad-exit=0, because processes report
    # failures to each other
    step = 'srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=0'
    if survives:
        options += "\n#SBATCH --no-kill"
        work = f"""first=$(mktemp) && trap 'rm -f "$first"' EXIT  # the first process runs on this node
{step} --no-kill bash -c 'trap : TERM
    {_RANK} python -m penstock "$@"
    status=$?; [ "$SLURM_PROCID" != 0 ] || echo $status > "$0"; exit $status' "$first" {words}
status=$?
[ ! -s "$first" ] || status=$(cat "$first")
exit "$status"
"""
    else:
        work = f"""{step} bash -c '{_RANK} \\
    exec python -m penstock "$@"' penstock {words}
"""
    return f"""#!/bin/bash
#SBATCH --job-name=penstock
#SBATCH --nodes={num_hosts}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task={threads}
#SBATCH --time={minutes}{options}
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# jobs that share a node meet at different ports
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000)) OMP_NUM_THREADS=1
{work}"""


def _num_gpus(arguments: Sequence[str]) -> int:
    """Return the number of GPUs that a node's process needs: none, one, or N + 1 for the device `cuda:N`.

    >>> [_num_gpus(words) for words in (["--device", "cuda"], ["--device=cuda:1"], ["--device", "cpu"], [])]
    [1, 2, 0, 0]
    """
    words = " ".join(arguments).replace("--device=", "--device ").split()
    device = next((after for word, after in reversed(list(pairwise(words))) if word == "--device"), "")
    kind, _, number = device.partition(":")
    return int(number or 0) + 1 if kind == "cuda" and (number or "0").isdecimal() else 0


def kubernetes_manifest(arguments: Sequence[str], num_hosts: int, *, threads: int, image: str = "penstock") -> str:
    """Return a JSON manifest that runs a penstock command in several pods, which find each other by name.

    `image` is a container image with Penstock. Example:
        kubernetes_manifest(["bench", "timm:deit_small_patch16_224"], 4, threads=2)
    """
    start = 'export RANK=$JOB_COMPLETION_INDEX; exec python -m penstock "$@"'
    environment = {
        "WORLD_SIZE": str(num_hosts),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "penstock-0.penstock",
        "MASTER_PORT": str(PORT),
        "OMP_NUM_THREADS": "1",
    }
    container: dict[str, Any] = {
        "name": "penstock",
        "image": image,
        "command": ["bash", "-c", start, "penstock", *arguments],
        "env": [{"name": name, "value": value} for name, value in environment.items()],
        "resources": {"limits": {"cpu": str(threads)}},
    }
    if gpus := _num_gpus(arguments):
        container["resources"]["limits"]["nvidia.com/gpu"] = str(gpus)
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "penstock"},
        "spec": {"clusterIP": "None", "selector": {"job-name": "penstock"}, "publishNotReadyAddresses": True},
    }
    pod = {"subdomain": "penstock", "restartPolicy": "Never", "containers": [container]}
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "penstock"},
        "spec": {
            "completions": num_hosts,
            "parallelism": num_hosts,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "template": {"spec": pod},
        },
    }
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": [service, job]}, indent=2) + "\n"
