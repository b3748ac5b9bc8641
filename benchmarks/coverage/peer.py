"""What torch.distributed.pipelining makes of the same models, with the split point given by hand."""

import contextlib
import multiprocessing
import os
import signal
import warnings
from collections.abc import Sequence
from itertools import accumulate
from multiprocessing.connection import Connection

import torch
from torch import nn
from torch.distributed.pipelining import Pipe, SplitPoint, pipeline

from benchmarks.coverage.architectures import Inputs
from benchmarks.coverage.ours import one_line, same_tensors
from penstock.errors import CutError
from penstock.graph.cuts import find_blocks, module_spans
from penstock.graph.graph import Graph, count_work


def middle_block(graph: Graph) -> str:
    """Give the path of the block that a person would split before: the one nearest to half of the work."""
    work = count_work(graph, graph.sizes(graph.fixed_batch or 1))
    done = [0.0, *accumulate(work)]
    spans = module_spans(graph)
    with contextlib.suppress(CutError):  # without repeated blocks any module may be the place
        spans = {span.call.path: span for span in find_blocks(graph, work)}
    once = [path for path in spans if "@" not in path]
    return min(once, key=lambda path: abs(done[spans[path].start] - done[-1] / 2))


def compare(
    model: nn.Module, path: str, traced: Inputs, other: Inputs, expected: Sequence[object]
) -> tuple[bool, bool, str | None]:
    """Tell whether the peer is equal at the traced batch size and at another one, and what went wrong.

    Runs in a child process: an operator whose sizes are those of the tracing may end the process.
    """
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_compare, args=(there, model, path, traced, other, expected))
    child.start()
    there.close()
    results: list[bool] = []
    error: str | None = None
    with contextlib.suppress(EOFError):
        while len(results) < 2 and error is None:
            answer = here.recv()
            if isinstance(answer, str):
                error = answer
            else:
                results.append(answer)
    child.join()
    if len(results) < 2 and error is None:
        error = f"the process died of {signal.Signals(-(child.exitcode or 0)).name}"
    results += [False] * (2 - len(results))
    return results[0], results[1], error


def _compare(
    answers: Connection, model: nn.Module, path: str, traced: Inputs, other: Inputs, expected: Sequence[object]
) -> None:
    try:
        pipe = _build(model, traced, path)
        for inputs, result in zip((traced, other), expected, strict=True):
            with torch.no_grad():
                answers.send(same_tensors(result, pipe(**inputs)))
    # a benchmark of coverage records whatever goes wrong
    except Exception as error:
        answers.send(one_line(error))
    answers.close()
    os._exit(0)  # the parent's threads and handlers are not this process's to end


def _build(model: nn.Module, inputs: Inputs, path: str) -> Pipe:
    """Build the peer's two stages, traced at the batch size of the inputs."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        return pipeline(model, (), dict(inputs), split_spec={path: SplitPoint.BEGINNING})
