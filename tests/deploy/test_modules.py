"""Stages that are modules of the caller's."""

import threading

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.deploy.modules import chain
from penstock.errors import CaptureError, RunError, UsageError
from penstock.values import Size


class Odd(nn.Module):
    """Decides by a value, which torch.export does not take; passes two tensors on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        y: Tensor = self.linear(x) * scale
        if y.sum().item() > 0:
            y = -y
        return y, x.flatten().repeat(2)


class Join(nn.Module):
    def forward(self, y: Tensor, flat: Tensor) -> dict[str, Tensor]:
        return {"sum": y + flat[: y.numel()].view_as(y), "mean": y.mean()}


def two_modules() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Odd().eval(), Join().eval()]


def test_the_interface_is_learned_from_two_batch_sizes() -> None:
    graph, turns = chain(two_modules(), (torch.randn(2, 6),), {})
    programs = [stage[0] for stage in turns]
    assert [value.shape for value in programs[0].outputs] == [(Size("batch"), 6), (Size(("*", 12, "batch")),)]
    assert programs[1].inputs == programs[0].outputs
    assert [value.shape for value in programs[1].outputs] == [(), (Size("batch"), 6)] or [
        value.shape for value in programs[1].outputs
    ] == [(Size("batch"), 6), ()]
    assert graph.sizes(3) == {"batch": 3}


def test_modules_that_do_not_export_run_as_stages() -> None:
    modules = two_modules()
    inputs = [torch.randn(rows, 6) for rows in (2, 2, 1, 2)]
    with torch.no_grad():
        expected = [modules[1](*modules[0](x, scale=2.0)) for x in inputs]
    with penstock.Pipeline(modules, (inputs[0],), {"scale": 2.0}, threads=1) as pipe:
        for _ in range(2):
            calls = ({"x": x, "scale": 2.0} for x in inputs)
            with pytest.raises(UsageError, match="positional"):
                list(pipe.stream(calls))
    with penstock.Pipeline(modules, (), {"x": inputs[0], "scale": 2.0}, threads=1) as pipe:
        for _ in range(2):
            outputs = list(pipe.stream({"x": x, "scale": 2.0} for x in inputs))
            for output, wanted in zip(outputs, expected, strict=True):
                assert set(output) == {"sum", "mean"}
                assert torch.equal(output["sum"], wanted["sum"])
                assert torch.equal(output["mean"], wanted["mean"])
        stages = {stage.device for stage in pipe.last_report.stages}
    assert stages == {"thread 1", "thread 2"}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("penstock")]


def test_a_failing_module_is_named() -> None:
    class Touchy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.max().item() > 5:
                raise ValueError("too large")
            return x

    with (
        penstock.Pipeline([nn.Identity(), Touchy()], (torch.zeros(1, 3),), threads=1) as pipe,
        pytest.raises(RunError, match=r"stage 1, microbatch 1: .*Touchy .*too large"),
    ):
        list(pipe.stream(iter([torch.zeros(1, 3), torch.full((1, 3), 9.0)])))


@pytest.mark.parametrize(
    ("modules", "example", "said"),
    [
        ([], torch.zeros(1, 2), "at least one module"),
        ([nn.Identity()], torch.zeros(()), "at least one row"),
        ([Join(), nn.Identity()], torch.zeros(1, 2), r"stage 0 \(Join\) fails on the example: .*'flat'"),
    ],
)
def test_modules_that_form_no_chain_are_refused(modules: list[nn.Module], example: Tensor, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        chain(modules, (example,), {})


def test_a_sequence_that_does_not_export_says_how_else() -> None:
    with pytest.raises(CaptureError, match=r"list\(model\)"):
        penstock.Pipeline(nn.Sequential(Odd(), Join()), (torch.zeros(1, 6),))


def test_stages_and_cuts_do_not_go_with_modules() -> None:
    with pytest.raises(UsageError, match="leave stages and cuts out"):
        penstock.Pipeline(two_modules(), (torch.zeros(1, 6),), stages=3)
