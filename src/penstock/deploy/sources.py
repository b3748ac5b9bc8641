"""Where the tensors of stages come from: weights that are sent, parts of a bundle, or modules that processes have."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.deploy.bundle import LoadState, read_part
from penstock.errors import ProgramError
from penstock.graph.program import StageProgram, states_of
from penstock.plan.schedule.round_robin import RoundRobin
from penstock.runtime.eager import StageRuntime
from penstock.runtime.registry import EAGER, RuntimeChoice
from penstock.tensors.devices import HOST, moved
from penstock.transport.base import FEEDER

# makes a stage's runtime in a process that has the stage's module; only its interface travels
MakeRuntime = Callable[[int, StageProgram], StageRuntime]
Programs = RoundRobin[StageProgram]
Runtimes = RoundRobin[StageRuntime]


@dataclass(frozen=True, slots=True)
class FromWeights:
    """Programs and weights of the process that feeds, which reads one tensor at a time."""

    load: LoadState

    def make(self, _index: int, programs: Programs, runtime: RuntimeChoice, device: torch.device) -> Runtimes:
        """Make a stage's runtimes in the process that feeds."""
        return RoundRobin(load_programs(programs.items, self.load, device, runtime), programs.order)


@dataclass(frozen=True, slots=True)
class FromBundle:
    """Each rank's part of a bundle, in a folder of its own: of which plan, and which device each rank is."""

    folder: Path
    plan: str
    devices: Mapping[int, str]
    order: tuple[int, ...]

    def make(self, _index: int, _programs: Programs, runtime: RuntimeChoice, device: torch.device) -> Runtimes:
        """Make a stage's runtimes in the process that feeds."""
        return load_part(self.folder / self.devices[FEEDER], self.plan, self.order, device, runtime)


@dataclass(frozen=True, slots=True)
class FromModules:
    """Modules of the caller's, which every process has."""

    make_runtime: MakeRuntime

    def make(self, index: int, programs: Programs, _runtime: RuntimeChoice, _device: torch.device) -> Runtimes:
        """Make a stage's runtimes in the process that feeds."""
        return programs.map(lambda program: self.make_runtime(index, program))


Source = FromWeights | FromBundle | FromModules


def load_part(
    folder: Path, plan: str, order: Sequence[int], device: torch.device = HOST, runtime: RuntimeChoice = EAGER
) -> Runtimes:
    """Make a stage's runtimes from a device's part of a bundle."""
    programs, tensors = read_part(folder, plan)
    if max(order) >= len(programs):
        raise ProgramError(f"{folder} has {len(programs)} programs, but a job's order names {max(order)}; bundle again")
    there = {name: moved(tensor, device) for name, tensor in tensors.items()}
    return RoundRobin([runtime.load(program, there, device) for program in programs], order)


def load_programs(
    programs: Sequence[StageProgram], load: LoadState, device: torch.device = HOST, runtime: RuntimeChoice = EAGER
) -> list[StageRuntime]:
    """Make runtimes in this process that share what they have in common."""
    tensors = {state.value.name: moved(load(state), device) for state in states_of(programs)}
    return [runtime.load(program, tensors, device) for program in programs]
