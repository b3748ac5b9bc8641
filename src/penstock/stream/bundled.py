"""A model run from its bundle: every machine reads its own part and does not need the model's source."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from penstock.deploy.placing import place_bundle
from penstock.deploy.run_options import RunOptions
from penstock.deploy.worker import BUNDLE, work
from penstock.engine.observer import StreamReport
from penstock.errors import UsageError
from penstock.graph.call import read_sizes
from penstock.group.direct import check_way
from penstock.group.entry import join_torchrun, start_local, under_torchrun
from penstock.group.world import World
from penstock.plan.check import read_plan
from penstock.stream.streaming_pipeline import threads_per_stage
from penstock.tensors import find_device
from penstock.wire import FEEDER


class BundledPipeline:
    """Runs a bundle: starts one worker per device, or under torchrun joins the processes of the hosts.

    Example:
        with penstock.BundledPipeline("bundle") as pipe:
            for (logits,) in pipe.stream(images):
                ...

    Inputs and outputs are the model's tensors in order, without names. In a worker process the constructor serves
    until the driver leaves, and `stream` yields nothing. Raises `ProgramError` if a part is damaged or of another plan,
    `PlanError` if the run's hosts are not the plan's devices. `device` and `between_gpus` are as for `Pipeline`.
    """

    def __init__(
        self, folder: str | Path, *, threads: int | None = None, device: str | torch.device = "cpu",
        between_gpus: str = "gloo",
    ) -> None:  # fmt: skip
        check_way(between_gpus, str(device))
        folder = Path(folder).absolute()
        self._world: World
        if under_torchrun():
            self._world = join_torchrun(followed=True)
        else:
            find_device(device)  # before anything is started
            self._world = start_local(len(read_plan(folder / "plan.json").devices), {BUNDLE: str(folder)})
        self._world.between_gpus = between_gpus
        self._feeds = self._world.rank == FEEDER
        try:
            if not self._feeds:
                work(self._world, bundle=folder)
                return
            run = RunOptions(
                threads=threads or threads_per_stage(self._world), device=str(device), between_gpus=between_gpus
            )
            self._pipelines, self._interface = place_bundle(self._world, folder, run)
        except BaseException as error:
            self._world.health.report(error)
            self._world.close(0.0)
            raise

    def stream(self, inputs: Iterable[Tensor | Sequence[Tensor]]) -> Iterator[list[Tensor]]:
        """Return the outputs for every microbatch, in order.

        Example:
            for (scores,) in pipe.stream(images.split(1)):
                print(scores.argmax().item())

        Raises `UsageError` for inputs of another shape.
        """
        if not self._feeds:
            return
        program = self._interface

        def bound() -> Iterator[tuple[list[Tensor], dict[str, int]]]:
            for item in inputs:
                tensors = [item] if isinstance(item, Tensor) else list(item)
                if len(tensors) != len(program.inputs):
                    raise UsageError(f"the model takes {len(program.inputs)} tensors, not {len(tensors)}")
                yield tensors, dict(read_sizes(program.symbols, program.inputs, tensors))

        yield from self._pipelines.stream(bound())

    @property
    def last_report(self) -> StreamReport:
        """Times of the last stream, on the driver."""
        return self._pipelines.last_report

    def close(self) -> None:
        """Stop the stages and release the processes."""
        with self._world:
            if self._feeds and self._world.health.failure is None:
                self._pipelines.close()

    def __enter__(self) -> "BundledPipeline":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
