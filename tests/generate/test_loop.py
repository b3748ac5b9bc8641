"""A row that runs alone: only where it has the bits of a full lane, and then with the same tokens."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.generate.generator import Generator
from penstock.generate.lanes import Lanes, Step
from penstock.generate.loop import Microbatches, computes_single_rows
from penstock.report.run_report import write_report
from penstock.runtime.registry import RuntimeChoice
from penstock.tracing.trace import read_run
from tests.fewer import long
from tests.generate.decoders import decoder, prompts

pytestmark = pytest.mark.usefixtures("one_thread")
INT4 = RuntimeChoice("onnxruntime", "int4")
LOGITS = torch.arange(5.0)


class Stages(Microbatches):
    """Stages whose logits of the first row differ from `odd` on if it runs alone."""

    encodes = False

    def __init__(self, odd: int, likely: Tensor) -> None:
        self.odd, self.likely, self.fed = odd, likely, list[Step]()

    def feed(self, _driver: Any, step: Step) -> Mapping[str, int]:
        self.fed.append(step)
        return {}

    def take(self, _driver: Any, _sizes: Mapping[str, int]) -> Tensor:
        step = self.fed[-1]
        logits = torch.arange(float(len(step.rows)))[:, None, None] + self.likely
        logits[0] += step.positions[0][0] >= self.odd and len(step.rows) == 1
        return logits


def tried(
    runtimes: tuple[RuntimeChoice, ...], *, odd: int = 1000, slots: int = 3,
    recurrent: bool = False, likely: Tensor = LOGITS,
) -> tuple[bool, Stages]:  # fmt: skip
    deployed: Any = SimpleNamespace(
        job=SimpleNamespace(runtimes=runtimes), tracer=None, begin=lambda: None, finish=lambda: None
    )
    lanes = Lanes(chunk=32, num_lanes=2, num_used=2, slots=slots, longest=100, recurrent=recurrent)
    stages = Stages(odd, likely)
    return computes_single_rows(stages, deployed, lanes), stages


def test_a_row_is_tried_at_both_ends_of_a_cache() -> None:
    same, stages = tried((INT4, INT4))
    assert same
    assert [(len(step.rows), step.positions[0], step.room) for step in stages.fed] == [
        (3, [0], 64), (1, [0], 64), (3, [1], 64), (1, [1], 64), (3, [99], 128), (1, [99], 128),
    ]  # fmt: skip


def test_equal_logits_are_no_evidence_for_lanes() -> None:
    assert not tried((INT4,), likely=torch.zeros(5))[0]


def test_tokens_are_those_of_every_model() -> None:
    _, stages = tried((INT4,), slots=70)
    assert {token for step in stages.fed for (token,) in step.ids} == {0, 1, 2, 3}
    assert len({step.ids[0][0] for step in stages.fed}) == 3


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_different_bits_keep_lanes_full(odd: int) -> None:
    assert not tried((INT4,), odd=odd)[0]


@pytest.mark.parametrize(
    ("runtimes", "more"),
    [((RuntimeChoice(),), {}), ((), {}), ((INT4, RuntimeChoice()), {}), ((RuntimeChoice("onnxruntime"),), {}),
     ((INT4,), {"slots": 1}), ((INT4,), {"recurrent": True})],
)  # fmt: skip
def test_lanes_are_not_tried_where_they_cannot_work(runtimes: tuple[RuntimeChoice, ...], more: dict[str, Any]) -> None:
    same, stages = tried(runtimes, **more)
    assert (same, stages.fed) == (False, [])


@pytest.mark.parametrize("runtime", ["onnxruntime:int8", long("onnxruntime:int4")])
def test_bits_alone_are_those_in_company(runtime: str, tmp_path: Path) -> None:
    """Whether a row runs alone depends on the processor; its bits do not."""
    pytest.importorskip("onnxruntime")
    model = decoder("llama")
    given = prompts(9, 40, 3, 12)
    with Generator(model, stages=2, slots=2, max_length=128, runtime=runtime, trace=tmp_path) as made:
        together = [made.submit(prompt, max_new_tokens=20) for prompt in given]
        in_company = [(request.result(), request.logprobs) for request in together]
        for prompt, (tokens, logprobs) in zip(given, in_company, strict=True):
            alone = made.submit(prompt, max_new_tokens=20)
            assert alone.result() == tokens
            assert alone.logprobs == logprobs
    facts = read_run(tmp_path).facts
    assert facts.generation is not None
    assert facts.num_microbatches == len(facts.generation.microbatches)  # without those that were tried
    write_report(tmp_path)
