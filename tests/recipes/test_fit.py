"""Whole runs on digits: what they leave behind, and how they are continued and compared."""

import errno
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from msgspec.structs import replace
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from penstock.compress.prune import Pruning, prune, save_pruned
from penstock.errors import DataError, OutOfMemory, PlanError, RunError, UsageError
from penstock.files import LineFile
from penstock.group.launcher import WorkerExit
from penstock.plan.check import read_plan
from penstock.recipes import launch
from penstock.recipes.data_formats import make_task
from penstock.recipes.launch import explain_exit, fit, fit_apart
from penstock.recipes.metrics import EpochResult, FitResult, drop_old_checkpoints, newest_checkpoint
from penstock.recipes.settings import FitSettings, check_resumed
from penstock.recipes.several import Row, draw_comparison, mode_runs, run_row
from penstock.recipes.tasks import taught_loss
from penstock.spec.plan import write_plan
from penstock.train.captured import Captured
from penstock.zoo.models.models import load_model, parse_name
from penstock.zoo.weights.weight_files import save_weights
from tests.recipes.test_data import BERT, TREES
from tests.train.test_arrangement import plan_for

VIT = "timm:vit_tiny_patch16_224,img_size=8,patch_size=4,depth=2,embed_dim=24,num_heads=3"
Run = Callable[..., tuple[int, str, str]]

pytestmark = pytest.mark.usefixtures("one_thread")


def settings(folder: Path, **changes: Any) -> FitSettings:
    given = FitSettings(model=VIT, data="digits", num_rows=120, batch_size=20, output=str(folder), threads=1)
    return given.replace(**changes)


def planned(given: FitSettings, file: Path) -> Path:
    """A plan of two devices, one with six microbatches of two rows, one with four."""
    task = make_task(given)
    write_plan(file, plan_for(Captured(task.module, *task.example), [(6, []), (4, [])]))
    return file


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    read = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in read if line["kind"] == kind]


def test_a_run_leaves_metrics_checkpoints_and_the_model(tmp_path: Path) -> None:
    result = fit(settings(tmp_path / "run", epochs=2, clip=1.0, lr_schedule="cosine", weight_decay=0.01))
    steps, epochs = lines(tmp_path / "run", "step"), lines(tmp_path / "run", "epoch")
    assert [line["step"] for line in steps] == list(range(1, 13))
    assert [line["warm_up"] for line in steps] == [True] * 2 + [False] * 10
    assert {"load_s", "forward_s", "backward_s", "synchronize_s", "sent_bytes", "num_synchronizations",
            "synchronized_bytes", "synchronizations_per_s", "peak_memory_bytes"} <= set(steps[0])  # fmt: skip
    assert len(epochs) == len(result.epochs) == 2
    assert epochs[0]["train_s"] == pytest.approx(sum(line["seconds"] for line in steps[2:6]))
    assert epochs[1]["units_per_s"] == pytest.approx((5 * 20 + 8) / epochs[1]["train_s"])
    assert result.epochs[1].train_loss < result.epochs[0].train_loss
    model = load_model(VIT + ",num_classes=10", whole=True).module
    model.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
    with pytest.raises(UsageError, match="already holds a run"):
        fit(settings(tmp_path / "run"))


def test_a_run_is_continued_where_it_stopped(tmp_path: Path) -> None:
    whole = fit(settings(tmp_path / "whole", steps=9, autocast=True))
    fit(settings(tmp_path / "parts", steps=4, autocast=True))
    rest = fit(settings(tmp_path / "parts", steps=9, autocast=True, resume=True))
    assert [line["loss"] for line in lines(tmp_path / "parts", "step")] == [
        line["loss"] for line in lines(tmp_path / "whole", "step")
    ]
    assert rest.epochs[-1].validation_loss == whole.epochs[-1].validation_loss
    # also of the steps before it stopped
    assert rest.epochs[0].train_loss == pytest.approx(whole.epochs[0].train_loss)
    with pytest.raises(UsageError, match="leave --resume out"):
        fit(settings(tmp_path / "nothing", resume=True))


def test_options_against_the_plan_are_refused(tmp_path: Path) -> None:
    plan = str(planned(settings(tmp_path), tmp_path / "plan.json"))
    for changes, said in (
        ({"stages": 2}, "the plan already sets stages; leave this option out"),
        ({"replicas": 2, "processes": 3}, "the plan already sets replicas and processes; leave these options out"),
        ({"batch_size": 32}, "20 rows; got 32; leave --batch-size out"),
        ({"schedule": "gpipe"}, "1f1b; got gpipe; leave --schedule out"),
    ):
        with pytest.raises(UsageError, match=said):
            fit(settings(tmp_path / "run", plan=plan, **changes))
    streams = replace(read_plan(plan), schedule="forward-only", num_microbatches=None)
    write_plan(tmp_path / "streams.json", streams)
    with pytest.raises(PlanError, match="the plan must be for training"):
        fit(settings(tmp_path / "run", plan=str(tmp_path / "streams.json")))


def test_separate_processes_learn_the_same(tmp_path: Path) -> None:
    alone = fit(settings(tmp_path / "alone", steps=5))
    plan = planned(settings(tmp_path), tmp_path / "plan.json")
    apart = fit(settings(tmp_path / "apart", steps=5, plan=str(plan)))
    assert apart.num_processes == 2
    assert apart.epochs[0].train_loss == pytest.approx(alone.epochs[0].train_loss, rel=1e-5)
    assert apart.epochs[0].accuracy == alone.epochs[0].accuracy
    assert (tmp_path / "apart" / "metrics-rank1.jsonl").exists()


def test_failure_in_another_process_is_reported(tmp_path: Path) -> None:
    row = run_row("nowhere", settings(tmp_path / "row", data="nowhere"), None)
    assert "nowhere not found" in str(row.failed)
    with pytest.raises(DataError, match="nowhere not found"):
        fit_apart(settings(tmp_path / "nowhere", data="nowhere"))


def test_a_process_that_somebody_killed_is_not_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = WorkerExit(1, -9)
    monkeypatch.setattr(launch, "num_killed", lambda: 7)
    assert type(explain_exit(killed, 7)) is RunError
    for before in (6, None):  # another one since, or a system that does not say
        found = explain_exit(killed, before)
        assert type(found) is OutOfMemory
        assert "rank 1 was killed because memory ran out" in str(found)
    assert type(explain_exit(WorkerExit(1, 3), 6)) is RunError


def test_sentences_of_different_lengths(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text(TREES * 12)
    asked = FitSettings(model=BERT, data=str(tmp_path), batch_size=7, output=str(tmp_path / "run"), epochs=6, stages=2,
                        processes=1, microbatches=2, lr=1e-2)  # fmt: skip
    result = fit(asked)
    assert result.epochs[-1].unit == "sentences"
    assert result.epochs[-1].train_loss < result.epochs[0].train_loss


def test_weights_of_a_model_with_other_classes_are_taken(tmp_path: Path) -> None:
    fit(settings(tmp_path / "first", steps=1))
    start = str(tmp_path / "first" / "model.safetensors")
    given = f"{VIT},num_classes=10"
    again = fit(settings(tmp_path / "second", model=given, steps=1, weights=start, lr=0.0))
    assert again.new_tensors == []
    saved = load_file(tmp_path / "second" / "model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in load_file(start).items())


def test_a_new_head_is_initialized_as_the_model_s_constructor_does(tmp_path: Path) -> None:
    save_weights(load_model(VIT).weights, tmp_path / "w.safetensors")
    asked = settings(tmp_path / "run", steps=1, weights=str(tmp_path / "w.safetensors"), lr=0.0, seed=4)
    assert fit(asked).new_tensors == ["head.weight", "head.bias"]
    torch.manual_seed(4)
    base, options = parse_name(f"{VIT},num_classes=10".removeprefix("timm:"))
    head = timm.create_model(base, **options).head
    saved = load_file(tmp_path / "run" / "model.safetensors")
    assert torch.equal(saved["head.weight"], head.weight)


def test_compared_modes_have_their_processes(tmp_path: Path) -> None:
    runs = dict(mode_runs(["single", "model", "pipeline", "data", "both"], settings(tmp_path, threads=None), 8))
    assert {name: run.num_processes for name, run in runs.items()} == {
        "single": 1, "model": 2, "pipeline": 2, "data": 2, "both": 4,
    }  # fmt: skip
    assert {run.threads for run in runs.values()} == {2}
    assert [runs[name].microbatches for name in ("model", "pipeline")] == [1, 4]
    cut = settings(tmp_path, cuts=["blocks.0:after"])
    assert cut.num_processes == 2
    both = mode_runs(["single", "pipeline"], cut, 8)
    assert [(run.stages, run.cuts) for _, run in both] == [(1, None), (2, cut.cuts)]
    with pytest.raises(UsageError, match="; got 3; leave"):
        cut.replace(stages=3)
    with pytest.raises(UsageError, match=r"single, .*; got both ways"):
        mode_runs(["both ways"], settings(tmp_path), 2)


def test_runs_that_had_ended_keep_their_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = settings(tmp_path / "run", epochs=2)
    fit(asked)
    written = (asked.folder / "settings.json").read_bytes()
    capsys.readouterr()
    assert not fit(asked.replace(epochs=1, resume=True)).trained
    assert (asked.folder / "settings.json").read_bytes() == written
    assert check_resumed(asked.replace(resume=True), asked.replace(stages=2)) == [
        "1 process instead of 2 processes (--stages and --replicas are not kept)"
    ]


def test_a_run_without_an_epoch_is_compared(tmp_path: Path) -> None:
    asked = settings(tmp_path)
    found = Row(name="a", settings=asked, result=FitResult(settings=asked, num_processes=1, epochs=[], new_tensors=[]))
    assert (found.document()["processes"], found.document()["train_loss"]) == (1, None)
    assert len(draw_comparison([found], tmp_path)) == 2


def test_a_lab_is_not_used_under_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(UsageError, match="without torchrun"):
        fit(settings(tmp_path), tmp_path / "lab.toml")


def row(asked: FitSettings, name: str = "", failed: str | None = None, memory: int = 0) -> Row:
    epoch = EpochResult(
        epoch=0, step=2, batch_rows=min(asked.batch_size, 700), unit="images", train_loss=1.0, train_s=2.0,
        units_per_s=50.0, validation_loss=None, accuracy=None, peak_memory_bytes=[memory], sent_bytes=[0],
    )  # fmt: skip
    found = FitResult(settings=asked, num_processes=1, epochs=[epoch], new_tensors=[])
    return Row(name=name, settings=asked, result=None if failed else found, failed=failed, out_of_memory=bool(failed))


def test_comparison_has_two_figures(tmp_path: Path) -> None:
    asked = settings(tmp_path)
    files = draw_comparison([row(asked, "single"), row(asked, "data", "out of memory")], tmp_path)
    assert [file.name for file in files] == ["training_time.png", "throughput.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


def test_the_newest_checkpoint_is_that_of_the_latest_step(tmp_path: Path) -> None:
    asked = settings(tmp_path / "run", steps=1)
    fit(asked)
    folder = asked.folder / "checkpoints"
    for step in (999_998, 999_999, 1_000_000):
        shutil.copytree(folder / "step-000001", folder / f"step-{step}")
    found = newest_checkpoint(asked)
    assert found is not None
    assert found.name == "step-1000000"
    drop_old_checkpoints(asked, folder / "step-1000000")
    assert {path.name for path in folder.iterdir()} == {"step-999999", "step-1000000"}


def test_a_torn_checkpoint_is_passed_over_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(settings(tmp_path / "run", steps=6, checkpoint_every=2))
    folder = tmp_path / "run" / "checkpoints"
    assert {path.name for path in folder.iterdir()} == {"step-000004", "step-000006"}
    index = folder / "step-000006" / "checkpoint.json"
    index.write_bytes(index.read_bytes()[:400])
    fit(settings(tmp_path / "run", steps=8, resume=True, validate=False))
    said = [line for line in capsys.readouterr().err.splitlines() if "step-000006" in line]
    assert len(said) == 1
    assert said[0].startswith("note: skipped step-000006: ")
    assert "is not a checkpoint" in said[0]
    assert [line["step"] for line in lines(tmp_path / "run", "step")] == list(range(1, 9))


def test_training_goes_on_where_metrics_do_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []

    def full(_file: LineFile, line: str) -> None:
        written.append(line)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(LineFile, "write", full)
    result = fit(settings(tmp_path / "run", steps=3))
    assert result.last is not None
    assert result.last.step == 3
    assert len(written) == 4, "three steps and an epoch"
    said = [line for line in capsys.readouterr().err.splitlines() if "metrics" in line]
    assert len(said) == 1
    assert said[0].startswith("note: metrics of rank 0 cannot be written to ")
    assert "(No space left on device); " in said[0]


def test_the_best_epoch_is_kept_and_stays_the_best_when_a_run_goes_on(tmp_path: Path) -> None:
    given = settings(tmp_path / "run", epochs=3, lr=0.01)
    result = fit(given)
    accuracies = [epoch.accuracy for epoch in result.epochs]
    with safe_open(tmp_path / "run" / "best.safetensors", framework="pt") as kept:
        assert float(kept.metadata()["penstock.accuracy"]) == max(a for a in accuracies if a is not None)
    before = (tmp_path / "run" / "best.safetensors").read_bytes()
    more = fit(given.replace(epochs=4, resume=True, lr=1.0))
    assert more.epochs[:3] == result.epochs
    assert more.epochs[3].accuracy is not None
    if more.epochs[3].accuracy <= max(a for a in accuracies if a is not None):
        assert (tmp_path / "run" / "best.safetensors").read_bytes() == before


class Killed(BaseException):
    """An end of which a run is not told."""


@pytest.mark.parametrize("name", ["best.safetensors", "checkpoint.json"])
def test_a_run_that_is_killed_ends_with_the_files_of_one_that_is_not(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends when the file is put into its place: the first time, the second time and so on."""

    def files(folder: Path) -> dict[str, dict[str, Tensor]]:
        found = sorted(path for path in folder.rglob("*") if path.suffix not in {".lock", ".jsonl"} and path.is_file())
        # an incomplete checkpoint is written again beside itself
        kept = {re.sub(r"(stage-0)\.1", r"\1", str(path.relative_to(folder))): path for path in found}
        return {each: load_file(path) if path.suffix == ".safetensors" else {} for each, path in kept.items()}

    def ends(source: Any, target: Any) -> None:
        if Path(target).name == name and next(left, None) is None:
            raise Killed
        replace_file(source, target)

    given = settings(tmp_path / "whole", epochs=2, lr=0.01, num_rows=60)
    fit(given)
    whole, replace_file = files(given.folder), os.replace
    epochs = [(line["accuracy"], line["train_loss"]) for line in lines(given.folder, "epoch")]
    for number in itertools.count():
        left, run = iter(range(number)), given.replace(output=str(tmp_path / f"{number}"))
        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", ends)
            try:
                fit(run)
                break
            except Killed:
                pass
        if newest_checkpoint(run) is None:
            continue
        fit(run.replace(resume=True))
        found = files(run.folder)
        assert found.keys() == whole.keys()
        for each, tensors in whole.items():
            assert all(torch.equal(found[each][key], tensor) for key, tensor in tensors.items()), (number, each)
        assert [(line["accuracy"], line["train_loss"]) for line in lines(run.folder, "epoch")] == epochs
    assert number > 0


def test_a_teacher_changes_what_is_learned_and_not_how_accuracy_is_counted(tmp_path: Path) -> None:
    fit(settings(tmp_path / "teacher", epochs=2, lr=0.01))
    teacher = str(tmp_path / "teacher" / "model.safetensors")
    alone, taught = fit(settings(tmp_path / "a")), fit(settings(tmp_path / "b", teacher=teacher))
    assert alone.epochs[0].train_loss != taught.epochs[0].train_loss
    same: dict[str, Any] = {"model": f"{VIT},num_classes=10", "weights": teacher, "lr": 0.0}
    copied = fit(settings(tmp_path / "c", teacher=teacher, **same))
    assert copied.epochs[0].accuracy == fit(settings(tmp_path / "d", **same)).epochs[0].accuracy


def test_rows_that_are_held_out_are_in_neither_part(tmp_path: Path) -> None:
    task = make_task(settings(tmp_path, hold_out=5, num_rows=100))
    assert (len(task.training), len(task.validation)) == (72, 8)  # type: ignore[arg-type]


def test_a_narrowed_model_is_trained_and_saved_as_one(tmp_path: Path) -> None:
    name = f"{VIT},num_classes=10"
    whole = load_model(name, whole=True)
    file = tmp_path / "pruned.safetensors"
    how = Pruning(ratio=0.5, importance="magnitude", everywhere=False)
    save_pruned(prune(whole.module, whole.example_args[0], how), whole.module, file)
    fit(settings(tmp_path / "run", weights=str(file)))
    for saved in ("model", "best"):
        trained = load_model(name, weights=tmp_path / "run" / f"{saved}.safetensors").module
        narrowed = load_model(name, weights=file).module
        assert {n: p.shape for n, p in trained.named_parameters()} == {
            n: p.shape for n, p in narrowed.named_parameters()
        }


@pytest.mark.parametrize("labels", [torch.tensor([1, 0]), torch.tensor([[1.0, 0.0, 3.0], [0.0, 2.0, -1.0]])])
def test_teacher_adds_its_part_to_the_loss(labels: Tensor) -> None:
    logits = torch.tensor([[0.5, -0.5], [1.0, 2.0]])
    loss, count = taught_loss(logits, labels)
    own = functional.cross_entropy(logits, torch.tensor([1, 0]), reduction="sum")
    if labels.dim() > 1:
        p, q = (labels[:, 1:] / 2).softmax(-1), (logits / 2).softmax(-1)
        own = 0.5 * own + 0.5 * 4 * (p * (p.log() - q.log())).sum()
    assert count == 2
    torch.testing.assert_close(loss, own)
    with pytest.raises(UsageError, match="3 classes; got 2"):
        taught_loss(logits, torch.zeros(2, 4))


@pytest.mark.parametrize(("option", "value"), [("teacher", "w.safetensors"), ("hold_out", 5)])
def test_image_options_are_refused_for_text(option: str, value: Any, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be " * 50)
    given = settings(tmp_path / "run", model="hf:gpt2", data=str(text), **{option: value})
    with pytest.raises(UsageError, match=rf"--{option.replace('_', '-')} is for images"):
        make_task(given)


def test_length_is_for_every_kind_of_text(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--length is for sentences and text"):
        make_task(settings(tmp_path / "run", model="timm:resnet18", data="digits", length=8))
