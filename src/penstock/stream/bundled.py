"""A model run from its bundle: every machine reads its own part and does not need the model's source."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from penstock.deploy.run_options import Bundle, CutOptions, ModelCall, RunOptions
from penstock.engine.observer import StreamReport
from penstock.errors import UsageError
from penstock.graph.call import CallInputs
from penstock.group.direct import check_way
from penstock.stream.streaming_pipeline import StreamingPipeline


class BundledPipeline:
    """Runs a bundle: starts one worker per device, or under torchrun joins the processes of the hosts.

    Example:
        with penstock.BundledPipeline("bundle") as pipe:
            for (logits,) in pipe.stream(images):
                ...

    Inputs and outputs are the model's tensors in order, without names. Raises `ProgramError` if a part is damaged or of
    another plan, `PlanError` if the run's hosts are not the plan's devices. `device` and `between_gpus` are as for
    `Pipeline`.
    """

    def __init__(
        self, folder: str | Path, *, threads: int | None = None, device: str | torch.device = "cpu",
        between_gpus: str = "gloo",
    ) -> None:  # fmt: skip
        check_way(between_gpus, str(device))
        self._pipe = StreamingPipeline(
            ModelCall(model=Bundle(Path(folder).absolute())), CutOptions(),
            RunOptions(threads=threads, device=str(device), between_gpus=between_gpus),
        )  # fmt: skip

    def stream(self, inputs: Iterable[Tensor | Sequence[Tensor]]) -> Iterator[list[Tensor]]:
        """Return the outputs for every microbatch, in order; on ranks other than the driver, serve the stream.

        Example:
            for (scores,) in pipe.stream(images.split(1)):
                print(scores.argmax().item())

        Raises `UsageError` for inputs of another shape.
        """
        return self._pipe.stream(map(self._call, inputs))

    def _call(self, item: Tensor | Sequence[Tensor]) -> CallInputs:
        tensors, number = (item,) if isinstance(item, Tensor) else tuple(item), len(self._pipe.graph.inputs)
        if len(tensors) != number:
            raise UsageError(f"the model takes {number} tensors; got {len(tensors)}; give all of them, in order")
        return CallInputs(tensors, {})

    @property
    def last_report(self) -> StreamReport:
        """Times of the last stream, on the driver."""
        return self._pipe.deployment.last_report

    def close(self) -> None:
        """Stop the stages and release the processes."""
        self._pipe.close()

    def __enter__(self) -> "BundledPipeline":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pipe.end(error)
