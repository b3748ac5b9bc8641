"""The loop of a user: alone, and under torchrun, where the same script gives the same numbers."""

import io
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from rich.console import Console
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import penstock
from penstock.errors import DataError, ModelError, RunError, UsageError
from penstock.group.world import World
from penstock.terminal import progress
from penstock.train.trainer import predict
from tests.fewer import long
from tests.processes import PROGRAMS, run_groups, run_python
from tests.trainers import in_threads, make_trainer


def images(num: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(num, 3, 8, 8, generator=generator), torch.randint(0, 4, (num,), generator=generator)


def small() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GELU(), nn.Flatten(), nn.Linear(288, 16), nn.Dropout(0.2), nn.GELU(), nn.Linear(16, 4)
    )


Cases = list[dict[str, Any]]


def run(folder: Path, *groups: tuple[int, Cases]) -> list[list[list[list[Any]]]]:
    """Run the script in groups of processes; gives for each group and case what each process found.

    The last group is started by torchrun itself.
    """
    script, calls = PROGRAMS / "training_script.py", []
    for number, (_, cases) in enumerate(groups):
        (folder / str(number)).mkdir()
        calls.append([json.dumps(cases), str(folder / str(number))])
    run_groups(script, [(size, call) for (size, _), call in zip(groups[:-1], calls, strict=False)], deadline_s=120.0)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(groups[-1][0])]
    finished = run_python(*torchrun, str(script), *calls[-1], deadline_s=120.0)
    assert finished.status == 0, finished.stderr
    return [
        [
            [json.loads((folder / f"{number}/rank{rank}-{case}.json").read_text()) for rank in range(max(1, size))]
            for case in range(len(cases))
        ]
        for number, (size, cases) in enumerate(groups)
    ]


@pytest.mark.parametrize("replicas", [False, long(True)])
def test_the_same_script_alone_and_under_torchrun(replicas: bool, tmp_path: Path) -> None:
    groups: list[tuple[int, Cases]] = [
        (0, [{"microbatches": 2}, {"microbatches": 4, "rows": 24}]),
        (3, [{"microbatches": 2, "stages": 3, "schedule": "gpipe"}]),
        # dropout goes by microbatches, so replicas must cut the rows as one process does
        (4, [{"rows": 24, "microbatches": 4, "stages": 4},
             {"rows": 24, "microbatches": 2, "stages": 2, "replicas": 2},
             {"rows": 24, "microbatches": 2, "stages": 4, "replicas": 2, "schedule": "interleaved"}]),
        (2, [{"microbatches": 2, "schedule": "zero-bubble"}, {"microbatches": 1, "stages": 1}]),
    ]  # fmt: skip
    if not replicas:
        del groups[1:3]
    (((*alone,),), ((*halves,),)), *found = run(tmp_path, *groups)
    for group, ((size, cases), of_cases) in enumerate(zip(groups[1:], found, strict=True), 1):
        for number, (settings, lines) in enumerate(zip(cases, of_cases, strict=True)):
            replicas = settings.get("replicas", size // settings.get("stages", size))
            expected = halves if "rows" in settings else alone
            assert all(line[:2] == lines[0][:2] for line in lines[1:])
            assert lines[0][0] == pytest.approx(expected[0], rel=1e-5), settings
            assert lines[0][1] == expected[1]
            if replicas == 1:  # otherwise each replica has its own rows
                assert lines[0][2] == pytest.approx(expected[2], rel=1e-4)
            weights = load_file(tmp_path / f"0/model{int(expected is halves)}.safetensors")
            saved = load_file(tmp_path / f"{group}/model{number}.safetensors")
            assert set(saved) == set(small().state_dict()) == set(weights)
            for name, tensor in weights.items():
                torch.testing.assert_close(saved[name], tensor, rtol=1e-4, atol=1e-6)
    small().load_state_dict(weights)


@pytest.fixture
def pipe() -> Any:
    torch.manual_seed(0)
    with penstock.Pipeline(small(), images(2)[0], stages=2, microbatches=2) as made:
        yield made


def test_training_loop_reduces_the_loss(pipe: penstock.Pipeline) -> None:
    optimizer = pipe.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.2))
    data = TensorDataset(*images(24))
    first = last = 0.0
    for _ in range(15):
        for x, y in pipe.loader(DataLoader(data, batch_size=10, shuffle=True)):
            last = float(pipe.train_step(x, y, F.cross_entropy))
            first = first or last
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert last < 0.5 * first
    x, y = images(24)
    accuracy = pipe.evaluate(x, y, lambda out, labels: (out.argmax(-1).eq(labels).sum().float(), len(labels)))
    assert accuracy == pytest.approx(float(pipe(x).argmax(-1).eq(y).float().mean()))
    assert accuracy > 0.7


def test_gradients_accumulate_until_zero_grad(pipe: penstock.Pipeline) -> None:
    x, y = images(4)
    optimizer = pipe.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    pipe.trainer.seed = 7
    pipe.train_step(x, y, F.cross_entropy)
    once = {n: p.grad.clone() for n, p in pipe.named_parameters() if p.grad is not None}
    pipe.trainer.step = 0  # the same dropout again
    pipe.train_step(x, y, F.cross_entropy)
    for name, parameter in pipe.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, 2 * once[name])
    optimizer.zero_grad()
    assert all(p.grad is None for _, p in pipe.named_parameters())


def test_clipping_matches_torch(pipe: penstock.Pipeline) -> None:
    x, y = images(4)
    pipe.train_step(x, y, F.cross_entropy)
    parameters = [nn.Parameter(p.detach().clone()) for _, p in pipe.named_parameters()]
    for copy, (_, p) in zip(parameters, pipe.named_parameters(), strict=True):
        assert p.grad is not None
        copy.grad = p.grad.clone()
    expected = nn.utils.clip_grad_norm_(parameters, 0.01)
    assert float(pipe.clip_grad_norm_(0.01)) == pytest.approx(float(expected), rel=1e-5)
    for copy, (_, p) in zip(parameters, pipe.named_parameters(), strict=True):
        torch.testing.assert_close(copy.grad, p.grad)


def test_dropout_does_not_depend_on_the_stages() -> None:
    losses = []
    for stages in (1, 2, 4):
        torch.manual_seed(0)
        with penstock.Pipeline(small(), images(2)[0], stages=stages, microbatches=2) as made:
            before = torch.get_rng_state()
            losses.append([float(made.train_step(*images(6), F.cross_entropy)) for _ in range(2)])
            assert torch.equal(before, torch.get_rng_state())
    assert losses[0] == losses[1] == losses[2]
    assert losses[0][0] != losses[0][1]  # another step, another mask


def test_checkpointing_frozen_parameters_and_autocast() -> None:
    def norms(**settings: Any) -> dict[str, float]:
        torch.manual_seed(0)
        model = small()
        next(model.children()).requires_grad_(False)
        with penstock.Pipeline(model, images(2)[0], stages=3, microbatches=2, **settings) as made:
            made.train_step(*images(6), F.cross_entropy)
            return {name: float(p.grad.norm()) for name, p in made.named_parameters() if p.grad is not None}

    plain = norms()
    assert set(plain) == {"3.weight", "3.bias", "6.weight", "6.bias"}
    assert norms(checkpointing=True) == plain
    assert norms(schedule="zero-bubble", checkpointing=True) == pytest.approx(plain, rel=1e-6)
    assert norms(autocast=torch.bfloat16) == pytest.approx(plain, rel=0.05)
    assert norms(autocast=torch.bfloat16) != plain


def test_a_function_s_random_weights_are_those_of_its_seed() -> None:
    torch.manual_seed(3)
    expected = small().state_dict()
    with penstock.Pipeline(small, images(2)[0], stages=2, seed=3) as made:
        made.optimizer(torch.optim.SGD)
        assert {name: torch.equal(p, expected[name]) for name, p in made.named_parameters()} == dict.fromkeys(
            (name for name, _ in made.named_parameters()), True
        )


def test_a_module_without_values_is_refused() -> None:
    with pytest.raises(UsageError, match="Sequential are on the meta device"):
        penstock.Pipeline(small().to("meta").train(), images(2)[0], stages=2)


def test_pipeline_takes_a_function_that_makes_the_model() -> None:
    with penstock.Pipeline(small, images(2)[0], stages=2) as made:
        assert made(images(6)[0]).shape == (6, 4)
        assert float(made.train_step(*images(6), F.cross_entropy)) > 0


def test_wrong_training_input_is_refused(pipe: penstock.Pipeline, tmp_path: Path) -> None:
    x, y = images(6)
    with pytest.raises(UsageError, match="a batch of 1 row cannot be split into 2 microbatches"):
        pipe.train_step(x[:1], y[:1], F.cross_entropy)
    with pytest.raises(UsageError, match=r"\(5,\) .* 6 rows"):
        pipe.train_step(x, y[:5], F.cross_entropy)
    with pytest.raises(UsageError, match="7 parameters of the optimizer are not this pipeline's"):
        pipe.optimizer(lambda _: torch.optim.SGD([nn.Parameter(torch.zeros(1)) for _ in range(7)]))
    pipe.evaluate(x, y, F.cross_entropy)
    with pytest.raises(UsageError, match="this pipeline trains"):
        list(pipe.stream([x]))
    with pytest.raises(UsageError, match="must have a length"):
        pipe.loader(iter(()))
    with pytest.raises(DataError, match="at least one row; got none"):
        pipe.loader([])
    with pytest.raises(ModelError, match="cannot be written"):
        pipe.save(tmp_path / "none" / "model.safetensors")
    with pytest.raises(ModelError, match=r"checkpoint\.json not found"):
        pipe.load_checkpoint(tmp_path)
    bad = x.clone()
    bad[4] = torch.nan
    grads = [p.grad for _, p in pipe.named_parameters()]
    with pytest.raises(RunError, match=r"step 0 is nan: .* stage 0"):
        pipe.train_step(bad, y, F.cross_entropy)
    assert grads == [p.grad for _, p in pipe.named_parameters()]
    assert float(pipe.train_step(x, y, F.cross_entropy)) > 0  # and on it goes


def test_parameters_without_a_part_in_the_loss() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.used(x), self.spare(x)

    x = torch.ones(4, 4)
    with penstock.Pipeline(Two(), x) as made, pytest.raises(RunError, match=r"2 parameters .* first spare\.bias;"):
        made.train_step(x, x, lambda output, labels: F.mse_loss(output[0], labels))


def test_first_call_decides_training_or_streaming() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))  # in training mode, as modules are born
    x = torch.randn(2, 4)
    with penstock.Pipeline(model, x, stages=2, threads=1) as made:
        assert torch.allclose(next(iter(made.stream([x]))), model(x))
        with pytest.raises(UsageError, match="this pipeline only streams"):
            made.train_step(x, x, F.mse_loss)
    with penstock.Pipeline(model, x):
        pass  # neither
    trained = penstock.Pipeline(model, x)
    assert torch.allclose(trained(x), model(x))
    trained.close()
    with pytest.raises(UsageError, match="closed"):
        penstock.Pipeline.train_step(trained, x)


def test_untrainable_models_are_refused(tmp_path: Path) -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    with pytest.raises(UsageError, match="Unused uses no trainable parameter"):
        penstock.Pipeline(Unused(), torch.zeros(2, 4)).train_step(torch.zeros(2, 4))
    with pytest.raises(UsageError, match="'2f2b' is neither"):
        penstock.Pipeline(small(), images(2)[0], stages=2, schedule="2f2b")
    with pytest.raises(UsageError, match="remove U"):
        penstock.Pipeline(small(), images(2)[0], stages=2, schedule="F0 B0 U.0\nF0 B0 U.1")
    with pytest.raises(UsageError, match=r"'R0' on line 1 is not an action"):
        penstock.Pipeline(small(), images(2)[0], stages=2, schedule="F0 R0 B0\nF0 B0")
    with (
        pytest.raises(UsageError, match=r"after model.train\(\)"),
        penstock.Pipeline(small().eval(), images(2)[0], stages=1) as p,
    ):
        p.train_step(*images(2))
    with penstock.Pipeline(small(), images(2)[0]) as made:
        made.save_checkpoint(tmp_path / "checkpoint")
    other = penstock.Pipeline(nn.Sequential(nn.Flatten(), nn.Linear(192, 4)), images(2)[0])
    differs = r"another model than Sequential: it lacks 1.bias, 1.weight and it also has"
    with other, pytest.raises(UsageError, match=differs):
        other.load_checkpoint(tmp_path / "checkpoint")


def test_a_failing_loss_function_reaches_everybody() -> None:
    from penstock.train.captured import Captured

    captured = Captured(small(), images(2)[:1])

    def script(world: Any) -> str:
        trainer = make_trainer(captured, world, microbatches=2)
        try:
            trainer.train_step(*images(4), lambda out, labels: F.cross_entropy(out, labels[:1]))
        except RunError as error:
            return str(error)
        finally:
            trainer.close(wait=False)
        return ""

    told = in_threads(2, script)
    assert all("stage 1, microbatch 0: loss_fn failed" in message for message in told), told


def test_a_replica_without_rows_predicts_none() -> None:
    from penstock.train.captured import Captured

    x, model = images(3)[0], small()
    captured = Captured(model, (x,))

    def script(world: World) -> torch.Tensor:
        trainer = make_trainer(captured, world, stages=2, replicas=2, microbatches=2)
        found: torch.Tensor = predict(trainer, x if world.rank < 2 else x[:0])
        trainer.close()
        return found

    for rank, found in enumerate(in_threads(4, script)):
        assert found.dtype == torch.float32
        expected = model.eval()(x if rank < 2 else x[:0])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_an_output_without_a_batch_dimension_is_not_joined() -> None:
    class Mean(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return 2 * x, x.mean()

    x = torch.arange(12.0).view(4, 3)
    for microbatches in (1, 2):
        with penstock.Pipeline(nn.Sequential(nn.Linear(3, 3), Mean()), x, microbatches=microbatches) as pipe:
            if microbatches == 1:
                assert predict(pipe.trainer, x)[1].shape == ()
                continue
            with pytest.raises(UsageError, match="microbatches=1"):
                predict(pipe.trainer, x)


def test_one_process_shows_what_is_done_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: dict[int, io.StringIO] = {}

    def make_console() -> Console:
        file = shown.setdefault(threading.get_ident(), io.StringIO())
        return Console(file=file, force_terminal=True, width=80)

    monkeypatch.setattr(progress, "progress_console", make_console)

    def script(world: World) -> int:
        pipe = penstock.Pipeline(small().train(), torch.zeros(2, 3, 8, 8), world=world)
        pipe.train_step(*images(8), F.cross_entropy)
        pipe.close()
        return threading.get_ident()

    first, _ = in_threads(2, script)
    assert list(shown) == [first]
    for phase in ("capturing the model", "putting the stages in place"):
        assert phase in shown[first].getvalue()
