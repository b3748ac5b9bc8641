"""One process, several devices: the same numbers, side by side, errors in the caller."""

import threading
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import penstock
from penstock.errors import UsageError

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    )


def parted() -> nn.Sequential:
    """Children on two devices."""
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))


@pytest.mark.parametrize("balance", [None, [6], [2, 4], [1, 2, 1, 2], [1] * 6])
@pytest.mark.parametrize("rows", [8, 7, 2])
def test_pipe_matches_its_module_on_microbatches(balance: list[int] | None, rows: int) -> None:
    plain = perceptron()
    pipe = penstock.Pipe(deepcopy(plain), split_size=2 if rows % 2 == 0 else 5, balance=balance)
    torch.manual_seed(1)
    x, y = torch.randn(rows, 6), torch.randint(0, 3, (rows,))
    given, taken = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = torch.cat([plain(part) for part in given.split(pipe.split_size)])
    output = pipe(taken)
    assert torch.equal(output, expected)
    F.cross_entropy(expected, y).backward()
    F.cross_entropy(output, y).backward()
    assert given.grad is not None
    assert taken.grad is not None
    torch.testing.assert_close(taken.grad, given.grad, rtol=1e-5, atol=1e-7)
    for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-7)
    assert all(torch.equal(a, b) for a, b in zip(pipe.buffers(), plain.buffers(), strict=True))


class Meeting(nn.Module):
    """Passes its input on, but for some microbatches only once somebody else is there too."""

    def __init__(self, barrier: threading.Barrier, meets: list[int]) -> None:
        super().__init__()
        self.barrier, self.meets, self.threads = barrier, meets, set[str]()

    def forward(self, x: Tensor) -> Tensor:
        self.threads.add(threading.current_thread().name)
        if int(x[0]) in self.meets:
            self.barrier.wait()
        return x


def test_stages_work_at_the_same_time_each_in_a_thread_of_its_own() -> None:
    barrier = threading.Barrier(2, timeout=20)
    first, second = Meeting(barrier, [1, 2]), Meeting(barrier, [0, 1])
    x = torch.arange(3.0)
    assert torch.equal(penstock.Pipe(nn.Sequential(first, second), balance=[1, 1])(x), x)
    assert len(first.threads) == len(second.threads) == 1
    assert first.threads != second.threads
    assert not [thread for thread in threading.enumerate() if "penstock-pipe" in thread.name]


class Fragile(nn.Module):
    """Fails on a row that is negative."""

    def forward(self, x: Tensor) -> Tensor:
        if bool((x < 0).any()):
            raise ZeroDivisionError("a row is negative")
        return x


def test_an_exception_of_a_child_is_raised_in_the_caller() -> None:
    pipe = penstock.Pipe(nn.Sequential(nn.Identity(), Fragile(), nn.Identity()), balance=[1, 1, 1])
    x = torch.ones(6, 2)
    x[3] = -1
    with pytest.raises(ZeroDivisionError, match="a row is negative"):
        pipe(x)
    assert not [thread for thread in threading.enumerate() if "penstock-pipe" in thread.name]
    assert torch.equal(pipe(x.abs()), x.abs())


def test_the_caller_s_context_is_the_workers() -> None:
    pipe = penstock.Pipe(perceptron().eval(), split_size=2, balance=[3, 3])
    x = torch.randn(4, 6)
    with torch.no_grad():
        assert not pipe(x).requires_grad
    with torch.inference_mode():
        assert pipe(x).is_inference()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert pipe(x).dtype == torch.bfloat16
    assert pipe(x).requires_grad


class Both(nn.Module):
    """Two tensors in, two out."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + y, x * y


def test_several_tensors_pass() -> None:
    x, y = torch.randn(5, 2), torch.randn(5, 2)
    first, second = penstock.Pipe(nn.Sequential(Both(), Both()), split_size=2, balance=[1, 1])(x, y)
    assert torch.equal(first, x + y + x * y)
    assert torch.equal(second, (x + y) * (x * y))


class Centered(nn.Module):
    """Subtracts the batch's mean."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Turned(nn.Module):
    """Returns rows in dimension 1."""

    def forward(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0).expand(4, -1, -1)


class TrainedMean(nn.Module):
    """Relates rows in training only."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.sum(0) if self.training else x


class Loss(nn.Module):
    """Returns a scalar."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum()


def test_rows_in_another_dimension_are_refused_whatever_their_number() -> None:
    class Transposed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.transpose(0, 1)

    for length, split_size in ((4, 4), (5, 4), (4, 2)):
        with pytest.raises(UsageError, match="dimension 0"):
            penstock.Pipe(nn.Sequential(nn.Linear(3, 3), Transposed()), split_size=split_size)(
                torch.randn(8, length, 3)
            )


@pytest.mark.parametrize("split_size", [2, 4, 5])
@pytest.mark.parametrize(
    ("child", "said"),
    [
        (Centered(), r"mixes rows.*mean"), (Turned(), r"dimension 0"), (TrainedMean(), r"mixes rows.*sum"),
        (Loss(), "no dimension"), (nn.Softmax(0), "mixes rows"), (nn.Flatten(0, 1), "no dimension"),
    ],
)  # fmt: skip
def test_rows_that_depend_on_each_other_are_refused(child: nn.Module, said: str, split_size: int) -> None:
    module = nn.Sequential(nn.Linear(3, 3), child)
    x = torch.randn(10, 3)
    pipe = penstock.Pipe(module, split_size=split_size)
    for _ in range(2):
        with pytest.raises(UsageError, match=said):
            pipe(x)
    assert torch.equal(penstock.Pipe(module, split_size=10)(x), module(x))  # the way out


def test_training_mode_is_checked_on_use() -> None:
    pipe = penstock.Pipe(nn.Sequential(nn.Linear(3, 3), TrainedMean()).eval(), split_size=2)
    assert pipe(torch.ones(4, 3)).shape == (4, 3)
    with pytest.raises(UsageError, match="mixes rows"):
        pipe.train()(torch.ones(4, 3))


def test_what_cannot_be_captured_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    pipe = penstock.Pipe(nn.Sequential(Fragile()), split_size=2)
    assert torch.equal(pipe(torch.ones(4, 3)), torch.ones(4, 3))
    assert "independent" in capsys.readouterr().err
    pipe(torch.ones(4, 3))
    assert "independent" not in capsys.readouterr().err


def test_children_move_and_names_stay() -> None:
    pipe = penstock.Pipe(perceptron())
    assert [device.type for device, _ in pipe.stages] == ["cpu"]
    pipe.module[3:].to("meta")
    assert [(device.type, len(stage)) for device, stage in pipe.stages] == [("cpu", 3), ("meta", 3)]
    assert "module.0.weight" in pipe.state_dict()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: penstock.Pipe(nn.Sequential()), "got Sequential without children"),
        (lambda: penstock.Pipe(nn.Linear(2, 2)), "got Linear; penstock.Pipeline"),  # type: ignore[arg-type]
        (lambda: penstock.Pipe(perceptron(), split_size=0), "split_size.*at least 1; got 0"),
        (lambda: penstock.Pipe(perceptron(), balance=[3, 4]), r"add up to the 6 children; got \[3, 4\]"),
        (lambda: penstock.Pipe(perceptron())(torch.ones(0, 6)), r"at least one; got \[0\]"),
        (lambda: penstock.Pipe(nn.Sequential(Both()))(torch.ones(2, 1), torch.ones(3, 1)), r"got \[2, 3\]"),
        (lambda: penstock.Pipe(nn.Sequential(parted())).stages, "child 0 .Sequential. is on cpu, meta"),
        (lambda: penstock.Pipe(parted(), balance=[2]).stages, "children 0 to 1 are on cpu, meta"),
    ],
)
def test_bad_input_is_one_line(make: Callable[[], object], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        make()
    assert "\n" not in str(caught.value)


@needs_gpu
def test_the_output_is_on_the_last_device() -> None:
    model = perceptron()
    pipe = penstock.Pipe(nn.Sequential(*model[:3], *deepcopy(model[3:]).to("cuda")), split_size=2)
    x = torch.randn(6, 6)
    output = pipe(x)
    assert output.device.type == "cuda"
    torch.testing.assert_close(output.cpu(), penstock.Pipe(model, split_size=2)(x), rtol=1e-4, atol=1e-5)
    output.sum().backward()
    assert all(p.grad is not None for p in pipe.parameters())


def test_a_first_child_may_write_in_place() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 8), nn.Hardtanh(inplace=True), nn.Linear(8, 3))
    pipe = penstock.Pipe(deepcopy(model), split_size=3, balance=[2, 2])
    x = torch.randn(8, 4)
    for needs_gradient in (False, True):
        leaves = [x.clone().requires_grad_(needs_gradient) for _ in range(2)]
        given = [leaf * 1 if needs_gradient else leaf for leaf in leaves]
        outputs = [each(rows) for each, rows in zip((model, pipe), given, strict=True)]
        torch.testing.assert_close(outputs[1], outputs[0])
        for output in outputs:
            output.square().sum().backward()
        for a, b in zip(model.parameters(), pipe.parameters(), strict=True):
            torch.testing.assert_close(b.grad, a.grad)
        if needs_gradient:
            torch.testing.assert_close(leaves[1].grad, leaves[0].grad)
        else:
            assert torch.equal(given[1], given[0])  # written to as by the module itself
        with torch.no_grad():
            torch.testing.assert_close(pipe(x.clone()), model(x.clone()))
