"""What an elastic training cannot do is one line, on every process, that says what to do instead."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import penstock
from penstock.deploy.run_options import Trace
from penstock.elastic.elastic_training import ElasticTraining
from penstock.elastic.options import ElasticOptions
from penstock.errors import PenstockError, PlanError, RunError, UsageError
from penstock.group.world import World
from penstock.spec.profile import Profile
from penstock.train.captured import Captured
from penstock.train.checkpoint import load_checkpoint, save_checkpoint
from penstock.train.loader import Loader
from tests.elastic.trainings import Seen, adamw, cluster_of, images, profile_of, train_elastically, vit
from tests.learners import captured as learner
from tests.models import seeded
from tests.trainers import in_threads, make_trainer

pytestmark = pytest.mark.usefixtures("one_thread")


def refused(kind: type[PenstockError], work: Callable[[], Any]) -> str:
    """What is said, which is one line; another rank may say it first."""
    with pytest.raises((kind, RunError)) as found:
        work()
    text = str(found.value)
    assert "\n" not in text
    return text


def small(freeze: Any, size: int = 2, *, epochs: int = 2, captured: Captured | None = None, **more: Any) -> Any:
    return train_elastically(captured or vit(), size, images(count=16), freeze, epochs=epochs, cache=False, **more)


@pytest.mark.parametrize("freeze", [[7], [0, 7], "0,7+after:9+guard"])
def test_more_layers_than_there_are(freeze: list[int] | str) -> None:
    said = refused(UsageError, lambda: small(freeze))
    assert "VisionTransformer has 6 layers, so 7 cannot be frozen" in said


@cache
def _headless() -> Captured:
    blocks = [nn.Sequential(nn.Linear(12, 12), nn.ReLU()) for _ in range(3)]
    return Captured(
        seeded(nn.Sequential, nn.Flatten(), nn.Linear(768, 12), *blocks).double().train(),
        (torch.zeros(2, 3, 16, 16, dtype=torch.float64),),
    )


def test_policy_that_freezes_every_layer_is_refused() -> None:
    model = _headless()
    every = len(model.layers)
    small([0, every - 1], captured=model)
    said = refused(UsageError, lambda: small([0, every], captured=model))
    assert f"{every} of {every} layers" in said


def test_a_head_that_does_not_train_counts_as_nothing() -> None:
    made = seeded(nn.Sequential, nn.Flatten(), nn.Linear(768, 12), nn.ReLU(), nn.Linear(12, 4)).double().train()
    made.get_submodule("3").requires_grad_(False)
    model = Captured(made, (torch.zeros(2, 3, 16, 16, dtype=torch.float64),))
    assert "Sequential would train nothing" in refused(UsageError, lambda: small([len(model.layers)], captured=model))


def _with(captured: Captured, options: ElasticOptions, size: int = 2, **settings: Any) -> Any:
    """Begin an elastic training of tokens."""
    tokens = torch.randint(3, 80, (8, 9), generator=torch.Generator().manual_seed(1))

    def script(world: World) -> Any:
        trainer = make_trainer(captured, world, **settings)
        try:
            trainer.optimizer(adamw)
            loader = Loader(trainer, tokens, batch_size=8)
            ElasticTraining(trainer, loader, options)
            for rows in loader:
                trainer.train_step({"input_ids": rows, "labels": rows})
        except BaseException as error:
            world.health.report(error)
            raise
        finally:
            trainer.close(wait=False)

    return in_threads(size, script)


def test_layers_that_share_a_weight_with_the_head() -> None:
    gpt2 = learner("gpt2", torch.float32)
    options = ElasticOptions(freeze=[1], profile=profile_of(gpt2), cluster=cluster_of(2))
    said = refused(UsageError, lambda: _with(gpt2, options))
    assert "share transformer.wte.weight" in said
    assert "use freeze='none'" in said
    for nothing in ("none", "none+after:1", "none+guard"):
        _with(gpt2, msgspec.structs.replace(options, freeze=nothing))


def test_cluster_of_another_number_of_processes_is_refused() -> None:
    said = refused(PlanError, lambda: small([0], 3, cluster=cluster_of(2)))
    assert re.search(r"3 devices.* got 2; give all of them", said)
    said = refused(PlanError, lambda: small([0], 2, cluster=cluster_of(3)))
    assert re.search(r"needs 3 processes.* got 2;", said)
    said = refused(PlanError, lambda: small([0], 2, cluster=cluster_of(2), hosts=["a", "b"]))
    assert "uses d0, d1, but the run's hosts are a, b" in said


def _of_another(profile: Profile) -> Profile:
    return msgspec.structs.replace(profile, graph="0" * 16, model="Other")


def _for_inference(profile: Profile) -> Profile:
    return msgspec.structs.replace(
        profile, units=tuple(msgspec.structs.replace(unit, backward_s=None) for unit in profile.units)
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_of_another, "the profile is of the graph 0000000000000000 of Other, but this model's is"),
        (_for_inference, "the profile has no backward seconds; profile with --training or --data"),
    ],
)
def test_a_profile_that_is_not_of_this_training(change: Callable[[Profile], Profile], said: str) -> None:
    assert said in refused(PlanError, lambda: small([0], profile=change(profile_of(vit()))))


def test_optimizers_that_differ_between_processes() -> None:
    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        has_head = any(parameter.shape == (4, 16) for parameter in parameters)
        parts = [parameters[:1], parameters[1:]] if has_head else [parameters]
        return torch.optim.SGD([{"params": part} for part in parts], lr=0.1)

    said = refused(UsageError, lambda: small([2], arranged={"stages": 2}, make=make))
    assert "groups of parameters on rank" in said
    assert "the same groups everywhere" in said


def test_trace_is_refused_with_elastic_training(tmp_path: Path) -> None:
    said = refused(UsageError, lambda: small([0], arranged={"trace": Trace(tmp_path / "trace")}))
    assert "leave the trace out" in said


def test_a_schedule_of_the_users_own() -> None:
    own = "F0 F1 F2 F3 B0 B1 B2 B3"
    said = refused(UsageError, lambda: small([0], 1, arranged={"schedule": own}))
    assert "needs a named schedule" in said


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"freeze": "gradient-normz"}, "'gradient-normz'"),
        ({"freeze": []}, "got []"),
        ({"freeze": [0, -1]}, "got [0, -1]"),
        ({"cache_dtype": "float16"}, "float32 or bfloat16; got float16"),
        ({"cache_views": 0}, "cache_views must be at least 1; got 0"),
        ({"epochs": 0}, "epochs must be at least 1; got 0"),
        ({"cache_limit": "much"}, "much"),
    ],
)
def test_impossible_elastic_options_are_refused(wrong: dict[str, Any], said: str) -> None:
    assert said in refused(UsageError, lambda: ElasticOptions(**wrong))


def test_an_elastic_checkpoint_without_elastic_training(tmp_path: Path) -> None:
    def between(trainer: Any, elastic: Any, _epoch: int) -> None:
        save_checkpoint(trainer, tmp_path, trainer.optimizers[0], None, elastic._loader)

    small([0, 2], 1, between=between)

    def script(world: World) -> None:
        trainer = make_trainer(vit(), world)
        try:
            load_checkpoint(trainer, tmp_path, trainer.optimizer(adamw), None, Loader(trainer, Seen(images())))
        finally:
            trainer.close()

    said = refused(UsageError, lambda: in_threads(1, script))
    assert "is of an elastic training" in said


def test_a_pipeline_is_followed() -> None:
    """The public way in, in one process."""
    made = seeded(nn.Sequential, nn.Flatten(), *[nn.Linear(768, 768) for _ in range(2)], nn.Linear(768, 4)).double()
    made.train()
    with penstock.Pipeline(made, (torch.zeros(2, 3, 16, 16, dtype=torch.float64),)) as pipe:
        optimizer = pipe.optimizer(adamw)
        loader = pipe.loader(images(count=16), batch_size=8)
        elastic = pipe.elastic(loader, freeze=[0, 1], epochs=2, cache=False, profile=profile_of(Captured(
            made, (torch.zeros(2, 3, 16, 16, dtype=torch.float64),)
        )))  # fmt: skip
        for _ in range(2):
            for inputs, labels in loader:
                pipe.train_step(inputs, labels, loss_fn=F.cross_entropy)
                optimizer.step()
                optimizer.zero_grad()
        assert [change.frozen_layers for change in elastic.changes] == [0, 1]
        assert elastic.frozen_layers == 1
        first = dict(pipe.named_parameters())["1.weight"]
        assert not first.requires_grad or first.grad is None
