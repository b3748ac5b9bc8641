"""The whole model in a process of its own on every host, so that the limit can be measured while stages are deployed.

Each host of a session starts one: `python -m benchmarks.pipeline.beside FOLDER RANK`. It takes no time of a core
until it is asked through a named pipe to compute. The feeding process asks all of them at once:

    session of rank 0 ──"7"──▶ FOLDER/ask.2 ──▶ beside of rank 2: seven microbatches
                      ◀────── FOLDER/tell.2 ◀── "2.41", its seconds
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.bench.references import WholeModel
from penstock.deploy.jobs import time_baseline
from penstock.graph.capture import capture
from penstock.graph.program import read_program, write_program
from penstock.runtime.eager import Runtime
from penstock.wire import FEEDER
from penstock.zoo.models.models import load_model

_PATIENCE_S = 300.0


class Beside:
    """The feeding process's side: what the hosts do alone, asked of processes that wait beside the stages."""

    beside = True

    def __init__(self, folder: Path, whole: WholeModel, ranks: Sequence[int], model: str) -> None:
        names = [[f"{number}.{k}" for k in range(len(row))] for number, row in enumerate(whole.inputs)]
        rows = dict(zip(chain(*names), chain(*whole.inputs), strict=True))
        document = {
            "program": write_program(whole.program), "sizes": dict(whole.sizes), "threads": whole.threads,
            "model": model, "inputs": names,
        }  # fmt: skip
        tensors = {state.value.name: whole.load(state).detach().clone() for state in whole.program.states}
        save_file(tensors, folder / "whole.safetensors")
        save_file(rows, folder / "in.safetensors")
        (folder / "whole.json").write_text(json.dumps(document))
        self._pipes: dict[int, tuple[TextIO, TextIO]] = {}
        deadline = time.monotonic() + _PATIENCE_S
        for rank in ranks:
            while not (folder / f"tell.{rank}").exists():
                if time.monotonic() > deadline:
                    sys.exit(f"rank {rank} has no process to measure alone with after {_PATIENCE_S:.0f} s")
                time.sleep(0.1)
            ask = (folder / f"ask.{rank}").open("w", buffering=1)  # opens when the other side does
            self._pipes[rank] = ask, (folder / f"tell.{rank}").open()
        self.run(ranks, 0)  # until everybody has loaded and warmed up

    def run(self, ranks: Sequence[int], count: int) -> tuple[list[list[Tensor]], list[float]]:
        """Take so many microbatches on each of these ranks, all at once; gives no outputs, and everyone's seconds."""
        for rank in ranks:
            self._pipes[rank][0].write(f"{count}\n")
        told = {rank: self._pipes[rank][1].readline() for rank in ranks}
        gone = [rank for rank, line in told.items() if not line]
        if gone:
            sys.exit(f"the process that measures alone has ended on rank {gone}; its last words stand above")
        return [], [float(line) for line in told.values()]


def start(folder: Path, rank: int) -> "subprocess.Popen[bytes]":
    """Start this host's process; it ends when the feeding process lets go of its pipe."""
    for name in ("ask", "tell"):
        os.mkfifo(folder / f"{name}.{rank}")
    return subprocess.Popen([sys.executable, "-m", "benchmarks.pipeline.beside", str(folder), str(rank)])


def main() -> None:
    """Load the whole model, then compute whenever asked."""
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    with (folder / f"ask.{rank}").open() as asked, (folder / f"tell.{rank}").open("w", buffering=1) as told:
        line = asked.readline()  # from here on the files are there
        if not line:
            return
        document = json.loads((folder / "whole.json").read_text())
        # the feeding process has the model's library and its graph, which makes its computing slower by a little
        graph = _as_feeder(document["model"]) if rank == FEEDER else None
        torch.set_num_threads(int(document["threads"]))
        runtime = Runtime(read_program(document["program"]), _loaded(folder / "whole.safetensors"))
        loaded = _loaded(folder / "in.safetensors")
        inputs = [[loaded[name] for name in names] for names in document["inputs"]]
        with torch.inference_mode():
            time_baseline(runtime, document["sizes"], inputs, len(inputs))  # to warm up
            while line:
                told.write(f"{time_baseline(runtime, document['sizes'], inputs, int(line))}\n")
                line = asked.readline()
        del graph


def _loaded(file: Path) -> dict[str, Tensor]:
    """Load tensors into memory of this process, as workers have theirs."""
    return {name: tensor.clone() for name, tensor in load_file(file).items()}


def _as_feeder(model: str) -> Any:
    zoo = load_model(model)
    return zoo, capture(zoo.module, zoo.example_args, zoo.example_kwargs)


if __name__ == "__main__":
    main()
