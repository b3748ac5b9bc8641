"""The whole model on a single device: the baseline for pipelines."""

import json
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from penstock.deploy.bundle import LoadState
from penstock.deploy.jobs import RunBaseline, write_document
from penstock.deploy.state import receive_state, send_state
from penstock.graph.program import StageProgram, read_program, states_of, write_program
from penstock.group.world import World
from penstock.runtime.registry import EAGER, StageRuntime
from penstock.runtime.torch_settings import applied, read_settings
from penstock.tensors import find_device, moved, synchronize
from penstock.transport.base import WORD_BYTES, Transport, receive_bytes, receive_tensor, send_bytes, send_tensor
from penstock.wire import FEEDER


def ask_baseline(
    transport: Transport, rank: int, program: StageProgram, load: LoadState, *, inputs: Sequence[Sequence[Tensor]],
    sizes: Mapping[str, int], num_microbatches: int, threads: int, computes_on: str = "cpu",
) -> None:  # fmt: skip
    """Request a run of the whole model on one rank; `collect_baseline` returns its result."""
    document = RunBaseline(
        program=write_program(program), sizes=dict(sizes), threads=threads, num_inputs=len(inputs),
        num_microbatches=num_microbatches, computes_on=computes_on, torch_settings=dict(read_settings()),
    )  # fmt: skip
    send_bytes(transport, write_document(document), rank)
    send_state(transport, states_of([program]), load, rank)
    for microbatch in inputs:
        for tensor in microbatch:
            send_tensor(transport, tensor, rank)


def serve_baseline(world: World, document: RunBaseline) -> None:
    """Run the whole model on this rank, with inputs and outputs in memory, once all ranks are ready."""
    transport, device = world.transport, find_device(document.computes_on, world.position)
    program = read_program(document.program)
    sizes = document.sizes
    runtime = EAGER.load(program, receive_state(transport, states_of([program]), device), device)
    inputs = []
    for _ in range(document.num_inputs):
        tensors = [torch.empty(value.evaluate(sizes), dtype=value.dtype) for value in program.inputs]
        for tensor in tensors:
            receive_tensor(transport, tensor, FEEDER)
        inputs.append(tensors)
    torch.set_num_threads(document.threads)
    with applied(document.torch_settings):
        outputs, seconds = run_baseline(runtime, sizes, inputs, document.num_microbatches, transport)
    send_bytes(transport, json.dumps({"seconds": seconds}).encode(), FEEDER)
    for result in outputs:
        for tensor in result:
            send_tensor(transport, tensor, FEEDER)


def run_baseline(
    runtime: StageRuntime, sizes: Mapping[str, int], inputs: Sequence[Sequence[Tensor]], num_microbatches: int,
    transport: Transport | None = None,
) -> tuple[list[list[Tensor]], float]:  # fmt: skip
    """Warm up on every input, wait for the start signal, then time n microbatches; outputs are on the host."""
    with torch.inference_mode():
        inputs = [[moved(tensor, runtime.device) for tensor in microbatch] for microbatch in inputs]
        outputs = [[tensor.to("cpu", copy=True) for tensor in runtime(sizes, microbatch)] for microbatch in inputs]
        if transport is not None:
            send_bytes(transport, b"ready", FEEDER)
            receive_bytes(transport, FEEDER, limit=WORD_BYTES)
        return outputs, time_baseline(runtime, sizes, inputs, num_microbatches)


def time_baseline(
    runtime: StageRuntime, sizes: Mapping[str, int], inputs: Sequence[Sequence[Tensor]], num_microbatches: int
) -> float:
    """Time n microbatches, cycling through the inputs, and return the seconds; inputs are on the runtime's device."""
    begin = time.perf_counter()
    for index in range(num_microbatches):
        runtime(sizes, inputs[index % len(inputs)])
    synchronize(runtime.device)
    return time.perf_counter() - begin


def release_baselines(transport: Transport, ranks: Sequence[int]) -> None:
    """Wait until all of these ranks are warm, then start them simultaneously."""
    for rank in ranks:
        receive_bytes(transport, rank, limit=WORD_BYTES)
    for rank in ranks:
        send_bytes(transport, b"go", rank)


def collect_baseline(
    transport: Transport, rank: int, program: StageProgram, sizes: Mapping[str, int], num_inputs: int
) -> tuple[list[list[Tensor]], float]:
    """Receive the result of `ask_baseline`: the outputs for each input, and the seconds."""
    seconds = float(json.loads(receive_bytes(transport, rank, limit=WORD_BYTES))["seconds"])
    outputs = []
    for _ in range(num_inputs):
        tensors = [torch.empty(value.evaluate(sizes), dtype=value.dtype) for value in program.outputs]
        for tensor in tensors:
            receive_tensor(transport, tensor, rank)
        outputs.append(tensors)
    return outputs, seconds
