"""Pipelined execution of a sequential module over several devices of one process."""

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import PenstockError, UsageError
from penstock.graph.capture import capture
from penstock.graph.ops import Ref
from penstock.graph.rows import batch_dim, check_rows
from penstock.text import note

_WHOLE = "call the nn.Sequential itself, or set split_size to the number of rows"


class Pipe(nn.Module):
    """A module that runs the children of an `nn.Sequential` on their devices, microbatch after microbatch.

    Example:
        model = nn.Sequential(nn.Linear(8, 64).to("cuda:0"), nn.ReLU(), nn.Linear(64, 8).to("cuda:1"))
        pipe = penstock.Pipe(model, split_size=4)           # rows of one microbatch
        loss = F.cross_entropy(pipe(images), labels)        # on the last device
        loss.backward()

    A stage is a series of consecutive children on one device; a child without parameters and buffers belongs to the
    stage before it. Each device has one thread, and the CPU counts as a separate device for each of its stages.
    `balance` sets the number of children of each stage instead, as in `Pipe(model, split_size=4, balance=[2, 3])`, so
    that one device, such as the CPU, can hold several stages.

    The input is one tensor, or several with the same number of rows; the last microbatch may have fewer rows. The
    output, a tensor or a tuple of tensors, has all rows. Gradients flow as through the module itself. Autograd uses one
    thread for each GPU but a single one for the CPU, so on a CPU only the forward runs in parallel; `penstock.Pipeline`
    trains CPUs in parallel. Dropout in several stages on one CPU draws from one generator in an order that changes from
    run to run.

    Children that relate rows, and outputs whose dimension 0 is not the rows, are refused at the first call with several
    microbatches, which captures the module to find them; BatchNorm uses the statistics of each microbatch. A module
    that cannot be captured runs with a note.

    An exception of a child is raised in the caller unchanged, and no thread is left running. Raises `UsageError` for
    anything but an `nn.Sequential` with children, a child on several devices, or a balance that does not add up.

    The schedule's forward is that of GPipe (Huang et al. 2019, https://arxiv.org/abs/1811.06965).
    """

    def __init__(self, sequential: nn.Sequential, split_size: int = 1, *, balance: Sequence[int] | None = None) -> None:
        super().__init__()
        if not isinstance(sequential, nn.Sequential) or not len(sequential):
            raise UsageError(
                f"Pipe needs an nn.Sequential with at least one child; got {_describe(sequential)}; "
                "penstock.Pipeline accepts any module"
            )
        if split_size < 1:
            raise UsageError(f"split_size, the rows of a microbatch, must be at least 1; got {split_size}")
        self.module = sequential
        self.split_size = split_size
        self._checked: set[tuple[object, ...]] = set()  # modes, children and inputs whose rows were found independent
        self._balance = None if balance is None else _checked(balance, len(sequential))

    @property
    def stages(self) -> list[tuple[torch.device, nn.Sequential]]:
        """Current stages, computed at every call because children may be moved to other devices."""
        children = list(self.module)
        devices = _devices(children)
        bounds = self._balance or [0, *(i for i, (a, b) in enumerate(pairwise(devices), 1) if a != b), len(children)]
        for begin, end in pairwise(bounds):
            if len(set(devices[begin:end])) > 1:
                raise UsageError(
                    f"a stage must be on one device, but children {begin} to {end - 1} are on "
                    f"{', '.join(map(str, dict.fromkeys(devices[begin:end])))}; change balance, or omit it"
                )
        return [(devices[begin], self.module[begin:end]) for begin, end in pairwise(bounds)]

    def forward(self, *inputs: Tensor) -> Any:
        """Run all rows and return the output on the last stage's device."""
        rows = {len(tensor) for tensor in inputs if tensor.dim()}
        if len(rows) != 1 or 0 in rows:
            raise UsageError(f"the inputs must have the same number of rows, at least one; got {sorted(rows)}")
        microbatches = list(zip(*(_rows_of(tensor, self.split_size) for tensor in inputs), strict=True))
        if len(microbatches) > 1:
            self._check_rows(microbatches[0])
        outputs = _run(self.stages, microbatches)
        if len(microbatches) > 1:
            _check_lengths(outputs, microbatches)
        if len(outputs) == 1:
            return outputs[0]
        if isinstance(outputs[0], tuple):
            return tuple(torch.cat(parts) for parts in zip(*outputs, strict=True))
        return torch.cat(outputs)

    def _check_rows(self, inputs: Sequence[Tensor]) -> None:
        """Raise `UsageError` if rows of a batch depend on each other, or if an output does not have them."""
        key = (
            *((id(module), module.training) for module in self.module.modules()),
            *((tuple(tensor.shape[1:]), tensor.dtype) for tensor in inputs),
        )
        if key in self._checked:
            return
        try:
            with torch.inference_mode(False), torch.autocast("cpu", enabled=False):
                chain = _Chain(_on_host(self.module)).train(self.module.training)
                graph = capture(chain, [torch.zeros_like(x, device="cpu") for x in inputs])
        # without a capture there is no check; deepcopy raises TypeError for children that cannot be copied
        except (PenstockError, TypeError) as error:
            note(f"Pipe cannot check that rows are independent: {error}")
        else:
            if graph.fixed_batch is None:
                graph = dataclasses.replace(graph, model="the nn.Sequential")
                check_rows(graph, graph.sizes(len(inputs[0])), _WHOLE, statistics_apart=True)
                values = [graph.values[output.name] for output in graph.outputs if isinstance(output, Ref)]
                if any(batch_dim(value) for value in values):
                    raise UsageError(f"the nn.Sequential returns an output whose dimension 0 is not the rows; {_WHOLE}")
            else:
                note(f"Pipe cannot check that rows are independent: {graph.why_fixed}")
        self._checked.add(key)


class _Chain(nn.Module):
    """Children that are called as a stage calls them: the tensors of a tuple are the next child's arguments."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> Any:
        """Call the children in sequence."""
        return _call_children(self.module, inputs)


def _call_children(module: nn.Module, inputs: Sequence[Tensor]) -> Any:
    output: Any = tuple(inputs)
    for child in module.children():
        output = child(*output) if isinstance(output, tuple) else child(output)
    return output


def _on_host(module: nn.Sequential) -> nn.Module:
    """Return a copy with its parameters on the meta device and its buffers on the CPU."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in module.parameters()}
    memo |= {id(buffer): buffer.detach().to("cpu", copy=True) for buffer in module.buffers()}
    return copy.deepcopy(module, memo)


def _check_lengths(outputs: Sequence[Any], microbatches: Sequence[tuple[Tensor, ...]]) -> None:
    """Raise `UsageError` unless each microbatch's outputs have its rows."""
    for output, (given, *_) in zip(outputs, microbatches, strict=True):
        for tensor in output if isinstance(output, tuple) else (output,):
            if not tensor.dim() or len(tensor) != len(given):
                raise UsageError(
                    f"a microbatch of {len(given)} rows has an output of {list(tensor.shape)}, whose dimension 0 must "
                    f"be the rows; {_WHOLE}"
                )


def _rows_of(tensor: Tensor, size: int) -> list[Tensor]:
    """Split a tensor into microbatches that the first child may modify in place.

    If the tensor has an autograd history the parts are copies, since autograd may need it unchanged. Otherwise they
    share its memory, with a separate version counter; torch itself refuses writes to a leaf that requires gradients.
    """
    parts = [tensor[start : start + size] for start in range(0, len(tensor), size)]
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return [part.data for part in parts]
    return parts if tensor.is_leaf else [part.clone() for part in parts]


def _ticks(num_microbatches: int, num_stages: int) -> Iterator[list[tuple[int, int]]]:
    """Yield the (microbatch, stage) pairs of each tick."""
    #            tick 0  tick 1  tick 2  tick 3
    # stage 0    (0, 0)  (1, 0)  (2, 0)
    # stage 1            (0, 1)  (1, 1)  (2, 1)
    for tick in range(num_microbatches + num_stages - 1):
        first, last = max(0, tick - num_microbatches + 1), min(tick, num_stages - 1)
        yield [(tick - stage, stage) for stage in range(first, last + 1)]


def _run(stages: Sequence[tuple[torch.device, nn.Module]], microbatches: Sequence[tuple[Tensor, ...]]) -> list[Any]:
    """Submit the tasks to the workers in the order of the ticks; each waits for the task that produces its input."""
    context = _Context()
    results: dict[tuple[int, int], Future[Any]] = {}
    with _workers([device for device, _ in stages]) as workers:
        for tasks in _ticks(len(microbatches), len(stages)):
            for microbatch, stage in tasks:
                given = results.get((microbatch, stage - 1), microbatches[microbatch])
                results[microbatch, stage] = workers[stage].submit(context.run, *stages[stage], given)
        return [results[index, len(stages) - 1].result() for index in range(len(microbatches))]


@contextmanager
def _workers(devices: Sequence[torch.device]) -> Iterator[list[ThreadPoolExecutor]]:
    """Start one thread for each device, and for each stage on a CPU; stop them at the end of the block."""
    with ExitStack() as stack:
        by_device: dict[Any, ThreadPoolExecutor] = {}
        workers = []
        for stage, device in enumerate(devices):
            key = stage if device.type == "cpu" else device
            if key not in by_device:
                by_device[key] = ThreadPoolExecutor(
                    1, f"penstock-pipe-{stage}", initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)
                )
                stack.callback(by_device[key].shutdown, cancel_futures=True)
            workers.append(by_device[key])
        yield workers


class _Context:
    """Thread-local settings of torch, copied from the caller to the workers."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = {
            device: torch.get_autocast_dtype(device) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)
        }

    def run(self, device: torch.device, stage: nn.Module, given: "Future[Any] | tuple[Tensor, ...]") -> Any:
        """Run one stage on one microbatch, as the caller would."""
        inputs = given.result() if isinstance(given, Future) else given
        inputs = inputs if isinstance(inputs, tuple) else (inputs,)
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for kind, dtype in self._autocast.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            moved = [tensor.to(device, non_blocking=True) for tensor in inputs]
            return _call_children(stage, moved)


def _devices(children: Sequence[nn.Module]) -> list[torch.device]:
    """Return each child's device; a child without tensors gets the previous child's, at the start the next child's."""
    own: list[torch.device | None] = []
    for index, child in enumerate(children):
        held = dict.fromkeys(tensor.device for tensor in [*child.parameters(), *child.buffers()])
        if len(held) > 1:
            raise UsageError(
                f"each child must be on one device, but child {index} ({_describe(child)}) is on "
                f"{', '.join(map(str, held))}; split it into several children"
            )
        own.append(next(iter(held), None))
    current = next((device for device in own if device is not None), torch.device("cpu"))
    devices = []
    for device in own:
        current = device or current
        devices.append(current)
    return devices


def _checked(balance: Sequence[int], num_children: int) -> list[int]:
    """Convert numbers of children into stage bounds."""
    if not balance or min(balance) < 1 or sum(balance) != num_children:
        raise UsageError(f"balance must be positive and add up to the {num_children} children; got {list(balance)}")
    return [0, *accumulate(balance)]


def _describe(value: object) -> str:
    return type(value).__name__ + (" without children" if isinstance(value, nn.Sequential) and not len(value) else "")
