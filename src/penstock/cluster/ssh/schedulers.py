"""The same run as a job of a scheduler: a batch script for Slurm, a manifest for Kubernetes."""

import json
import shlex
from collections.abc import Sequence

from penstock.cluster.ssh.run import PORT


def slurm_script(arguments: Sequence[str], num_hosts: int, *, threads: int, minutes: int = 60) -> str:
    """Return a batch script that runs a verb on several nodes, one process on each.

    Example:
        print(slurm_script(["infer", "timm:deit_small_patch16_224", "--images", "photos/"], 4, threads=4))

    Slurm ends all processes when one fails unless it is told not to, as here: a stream goes on without a lost node.
    """
    return f"""#!/bin/bash
#SBATCH --job-name=penstock
#SBATCH --nodes={num_hosts}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task={threads}
#SBATCH --time={minutes}
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT={PORT} OMP_NUM_THREADS=1
srun --kill-on-bad-exit=0 bash -c 'RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 \\
    exec python -m penstock "$@"' penstock {shlex.join(arguments)}
"""


def kubernetes_manifest(arguments: Sequence[str], num_hosts: int, *, threads: int, image: str = "penstock") -> str:
    """Return a manifest, as JSON, that runs a verb in several pods that find each other by name.

    `image` is one that has Penstock. Example:
        kubernetes_manifest(["bench", "timm:deit_small_patch16_224"], 4, threads=2)
    """
    start = 'export RANK=$JOB_COMPLETION_INDEX; exec python -m penstock "$@"'
    environment = {
        "WORLD_SIZE": str(num_hosts), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "penstock-0.penstock",
        "MASTER_PORT": str(PORT), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    container = {
        "name": "penstock", "image": image, "command": ["bash", "-c", start, "penstock", *arguments],
        "env": [{"name": name, "value": value} for name, value in environment.items()],
        "resources": {"limits": {"cpu": str(threads)}},
    }  # fmt: skip
    service = {
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": "penstock"},
        "spec": {"clusterIP": "None", "selector": {"job-name": "penstock"}, "publishNotReadyAddresses": True},
    }  # fmt: skip
    pod = {"subdomain": "penstock", "restartPolicy": "Never", "containers": [container]}
    job = {
        "apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "penstock"},
        "spec": {
            "completions": num_hosts, "parallelism": num_hosts, "completionMode": "Indexed", "backoffLimit": 0,
            "template": {"spec": pod},
        },
    }  # fmt: skip
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": [service, job]}, indent=2) + "\n"
