"""Trainings that lose processes, and get others: what is learned is what one process learns."""

import json
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import penstock
from penstock.deploy.run_options import OnLoss
from penstock.errors import PlanError, RunError, UsageError
from penstock.recipes.settings import FitSettings
from penstock.spec.cluster import Cluster, Device
from penstock.train.captured import Captured
from penstock.train.trainer import Trainer
from penstock.zoo.weights.weight_files import FileWeights
from tests.elastic.trainings import profile_of
from tests.processes import free_port, run_groups

# {"moment": [rank, step, where]}: a rank ends itself in that step, where a function is called
SCRIPT = '''
import atexit, json, os, signal, sys, threading, time
from pathlib import Path
import torch
import torch.nn.functional as F
from torch import nn
import penstock
from penstock.engine import gradients
from penstock.train import checkpoint, migration, trainer as trainers
from penstock.spec.cluster import Cluster, Device
from penstock.train.captured import Captured
from penstock.train.loader import Loader
from tests.elastic.trainings import profile_of

os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
folder, port, asked = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
rank = int(os.environ.get("RANK", "-1"))
joins, alone = "joins" in asked and rank < 0, "RANK" not in os.environ and "joins" not in asked
if joins:
    while not (folder / asked["joins"]).exists():
        time.sleep(0.05)
    os.environ["PENSTOCK_JOIN"] = f"127.0.0.1:{port}"
os.environ["MASTER_PORT"] = port
unlike = asked.get("unlike", "")
if unlike:  # it says why it cannot take part, and ends by itself
    sys.excepthook = lambda kind, error, trace: (folder / unlike).write_text(f"{kind.__name__}: {error}")
    atexit.register(os._exit, 0)
if "planned" in asked:  # each process is a host of its own
    os.environ["PENSTOCK_HOST"] = f"board{rank if rank >= 0 else asked['comes']}"
torch.set_num_threads(1)
torch.manual_seed(0)


class Data(torch.utils.data.Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(44, 8, generator=generator, dtype=torch.float64)
        self.y = torch.randint(0, 4, (44,), generator=generator)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + F.dropout(F.gelu(self.linear(x)), 0.1, self.training)


model = nn.Sequential(*[Block() for _ in range(5 if unlike == "model" else 6)], nn.Linear(8, 4)).double()
if asked.get("hooks"):  # they see gradients of the mean over the batch, so its rows are counted first
    model[2].register_full_backward_hook(lambda module, into, out: None)
how = {"microbatches": 12} if alone else {**asked["how"], "threads": 1}
if "planned" in asked and rank == 0:
    captured = Captured(model, (torch.zeros(2, 8, dtype=torch.float64),))
    boards = tuple(
        Device(name=f"board{number}", speed=speed, memory_bytes=2**40) for number, speed in enumerate(asked["planned"])
    )
    how["on_loss"] = penstock.OnLoss(how["on_loss"], profile=profile_of(captured), cluster=Cluster(devices=boards))
pipe = penstock.Pipeline(model, torch.zeros(2, 8, dtype=torch.float64), **how)
optimizer = pipe.optimizer(lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
if unlike == "groups":
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
scheduler = pipe.scheduler(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 24))
loader = pipe.loader(Data(), batch_size=12, shuffle=True)
moments = [moment for moment in asked.get("moments", []) if moment[0] == rank and not joins]


def dies(module, name):
    """End this process in its step, at a call of a function."""
    was = getattr(module, name)

    def called(*given, **named):
        for _, step, where in moments:
            if where == name and pipe.trainer.step == step:
                (folder / "lost").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return was(*given, **named)

    setattr(module, name, called)


dies(gradients.Synchronizer, "leaf_done")
dies(gradients, "all_reduce")
dies(trainers, "mean_loss")
dies(migration, "PlacedStages")
dies(checkpoint, "write_stages")
if rank >= 0 and asked.get("second") == rank:

    def follow():
        while not (folder / "lost").exists():
            time.sleep(0.05)
        time.sleep(3.0)  # the first one has noticed, and waits for another
        (folder / "second lost").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=follow, daemon=True).start()
losses, accuracies = {}, {}
for epoch in range(loader.epoch, 6):
    for x, y in loader:
        if [rank, pipe.trainer.step] == asked.get("slow"):
            time.sleep(6.5)  # longer than an answer is waited for
        loss = float(pipe.train_step(x, y, F.cross_entropy))
        losses[pipe.trainer.step] = loss
        for _, step, where in moments:
            if where == "clip" and pipe.trainer.step == step:
                os.kill(os.getpid(), signal.SIGKILL)
        pipe.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if not alone and pipe.trainer.step % 5 == 0 and asked.get("checkpoints"):
            pipe.save_checkpoint(folder / f"checkpoint{pipe.trainer.step}", optimizer, scheduler)
    for x, y in Loader(pipe.trainer, Data(), batch_size=44):
        for _, step, where in moments:
            if where == "evaluate" and pipe.trainer.step == step:
                os.kill(os.getpid(), signal.SIGKILL)
        accuracies[epoch] = pipe.evaluate(x, y, F.cross_entropy)
pipe.save(folder / ("alone" if alone else "together"))
if rank <= 0:
    hosts = pipe.trainer.world.hosts or ["here"]
    replicas = pipe.trainer.now.placed.grid.replicas
    told = {"losses": losses, "accuracies": accuracies, "lr": optimizer.param_groups[0]["lr"],
            "hosts": sorted({hosts[r] for each in replicas for r in each.stages}),
            "shape": [len(replicas), len(replicas[0].devices)]}
    (folder / ("alone.json" if alone else "joined.json" if joins else "together.json")).write_text(json.dumps(told))
pipe.close()
'''

KILLED = -signal.SIGKILL


def train(
    tmp_path: Path, size: int, asked: dict[str, object], *, newcomers: int = 0, unlike: Sequence[str] = ()
) -> list[int]:
    """Train in one process and in several; returns how these ended, once what was learned is the same."""
    script, port = tmp_path / "script.py", str(free_port())
    script.write_text(SCRIPT)
    given = [str(tmp_path), port, json.dumps(asked)]
    reference = [str(tmp_path), port, json.dumps({})]
    others = [(0, [str(tmp_path), port, json.dumps({**asked, "unlike": kind})]) for kind in unlike]
    groups = [(0, reference), (size, given), *[(0, given)] * newcomers, *others]
    _alone, ended, *_came = run_groups(script, groups, 150.0)
    alone, together = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("alone", "together"))
    for what in ("losses", "accuracies"):
        assert together[what].keys() == alone[what].keys()
        assert together[what] == pytest.approx(alone[what], rel=1e-9)
    assert together["lr"] == pytest.approx(alone["lr"])
    expected, found = (FileWeights(tmp_path / name) for name in ("alone", "together"))
    for name in expected.names():
        torch.testing.assert_close(found.load(name), expected.load(name), rtol=1e-8, atol=1e-10)
    return [end.status for end in ended]


def test_training_survives_three_lost_ranks(tmp_path: Path) -> None:
    """In a backward, while sums go round, between a step and its clipping; another rank's loop is slow meanwhile."""
    moments = [[5, 2, "leaf_done"], [1, 6, "all_reduce"], [2, 9, "clip"]]
    how = {"stages": 2, "replicas": 3, "microbatches": 4, "on_loss": "continue"}
    ended = train(tmp_path, 6, {"how": how, "moments": moments, "slow": [4, 6]})
    assert ended == [0, KILLED, KILLED, 0, 0, KILLED]


def test_training_survives_losses_at_critical_moments(tmp_path: Path) -> None:
    """Once some have the step and others not, while weights move, in an evaluation; then a stage without a replica."""
    moments = [
        [3, 2, "mean_loss"],
        [2, 2, "PlacedStages"],
        [1, 8, "evaluate"],
        [5, 13, "leaf_done"],
        [4, 15, "write_stages"],
    ]
    how = {"stages": 2, "replicas": 3, "microbatches": 4, "on_loss": "continue"}
    ended = train(tmp_path, 6, {"how": how, "moments": moments, "checkpoints": True})
    assert ended == [0] + [KILLED] * 5


@pytest.mark.parametrize("hooks", [False, True])
def test_two_losses_are_replaced_by_newcomers(hooks: bool, tmp_path: Path) -> None:
    how = {"stages": 2, "replicas": 2, "microbatches": 6, "on_loss": "wait"}
    asked = {"how": how, "moments": [[3, 7, "leaf_done"]], "second": 2, "joins": "second lost", "hooks": hooks}
    ended = train(tmp_path, 4, asked, newcomers=2)
    assert ended == [0, 0, KILLED, KILLED]
    assert json.loads((tmp_path / "together.json").read_text())["shape"] == [2, 2]
    joined, together = (json.loads((tmp_path / f"{n}.json").read_text()) for n in ("joined", "together"))
    assert [*joined["losses"]] == [str(step) for step in range(8, 25)]
    assert together["losses"].items() >= joined["losses"].items()
    assert joined["lr"] == together["lr"]


def test_newcomer_with_another_script_is_refused(tmp_path: Path) -> None:
    how = {"stages": 2, "replicas": 2, "microbatches": 6, "on_loss": "wait"}
    asked: dict[str, object] = {"how": how, "moments": [[3, 7, "leaf_done"]], "joins": "lost"}
    ended = train(tmp_path, 4, asked, newcomers=1, unlike=["model", "groups"])
    assert ended == [0, 0, 0, KILLED]
    assert json.loads((tmp_path / "together.json").read_text())["shape"] == [2, 2]
    assert (tmp_path / "model").read_text().startswith("UsageError: the training run at 127.0.0.1:")
    said = (tmp_path / "groups").read_text()
    assert said.startswith("UsageError: ")
    assert "this process has [2] groups of parameters" in said
    assert said.endswith("has [1]")


def test_survivors_are_replanned(tmp_path: Path) -> None:
    """One board is much slower than the others: it has no part, however many are left."""
    how = {"stages": 2, "replicas": 2, "microbatches": 6, "on_loss": "continue"}
    asked = {
        "how": how, "moments": [[1, 3, "leaf_done"]], "planned": [1.0, 1.0, 0.001, 1.0], "joins": "lost", "comes": 1,
    }  # fmt: skip
    ended = train(tmp_path, 4, asked, newcomers=1)
    assert ended == [0, KILLED, 0, 0]
    told = json.loads((tmp_path / "together.json").read_text())
    assert told["hosts"] == ["board0", "board1", "board3"]


class Alone:
    """What keeps a training together that is of one process."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def together(
        self, work: Callable[[], dict[str, Any]], undo: Callable[[], None] = lambda: None, *, admits: bool = False
    ) -> list[dict[str, Any]]:
        del admits
        try:
            return [work()]
        except RunError:
            undo()
            raise

    def place(self) -> None:
        return None

    def saw_checkpoint(self, folder: Path) -> None: ...

    def close(self) -> None: ...


def test_a_step_that_fails_leaves_buffers_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    rows = [(torch.full((3,), float(row)), row % 2) for row in range(8)]
    with penstock.Pipeline(model, torch.zeros(2, 3), microbatches=2) as pipe:
        pipe.trainer.survivors = Alone(pipe.trainer)  # type: ignore[assignment]
        tried: list[int] = []

        def fails_later(output: Tensor, labels: Tensor) -> Tensor:
            if torch.is_grad_enabled():  # not where it is found out how the loss combines over rows
                tried.append(len(labels))
            if len(tried) == 2:
                raise RuntimeError("lost")
            return F.cross_entropy(output, labels)

        buffers = pipe.trainer.now.tensors.others
        before = {name: tensor.clone() for name, tensor in buffers.items()}
        inputs, labels = next(iter(pipe.loader(rows, batch_size=8)))
        with pytest.raises(RunError, match="lost"):
            pipe.train_step(inputs, labels, fails_later)
        assert tried == [4, 4]
        assert all(torch.equal(buffers[name], tensor) for name, tensor in before.items())
        pipe.train_step(inputs, labels, fails_later)
        assert not all(torch.equal(buffers[name], tensor) for name, tensor in before.items())
        with pytest.raises(UsageError, match=r"unchanged tensors of pipe\.loader"):
            pipe.train_step(inputs * 2, labels, fails_later)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"schedule": "F0 B0"}, "a custom one does not"),
        (
            {"on_loss": OnLoss("continue", cluster=Cluster(devices=(Device(name="a", speed=1.0, memory_bytes=1),)))},
            "profile and cluster, or neither",
        ),
        ({}, "at least two processes"),
    ],
)
def test_options_that_exclude_on_loss_are_refused(asked: dict[str, Any], message: str) -> None:
    model = torch.nn.Linear(3, 2)
    with (
        pytest.raises(UsageError, match=message),
        penstock.Pipeline(model, torch.zeros(2, 3), **{"on_loss": "continue"} | asked) as pipe,
    ):
        pipe.train_step(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long), F.cross_entropy)


def test_a_profile_is_of_the_model_that_trains() -> None:
    other = profile_of(Captured(nn.Sequential(nn.Linear(3, 3), nn.GELU(), nn.Linear(3, 2)), (torch.zeros(2, 3),)))
    cluster = Cluster(devices=(Device(name="a", speed=1.0, memory_bytes=1),))
    with (
        pytest.raises(PlanError, match="profile this model"),
        penstock.Pipeline(
            nn.Linear(3, 2), torch.zeros(2, 3), on_loss=OnLoss("continue", profile=other, cluster=cluster)
        ) as pipe,
    ):
        pipe.train_step(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long), F.cross_entropy)


def test_settings_that_do_not_go_together() -> None:
    settings = FitSettings(model="a", data="b", stages=2)
    with pytest.raises(UsageError, match="leave costs out"):
        settings.replace(costs="profile.json")
    for given in ({}, {"on_loss": "continue"}):
        with pytest.raises(UsageError, match="leave from_cluster out"):
            settings.replace(from_cluster="cluster.toml", **given)
    with pytest.raises(UsageError, match="leave --on-loss out"):
        settings.replace(on_loss="continue", elastic=True)
    with pytest.raises(UsageError, match="HOST:PORT"):
        settings.replace(join="somewhere")
