"""A model profiled as it trains: the same graph, with loss and loading."""

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import asdict

from penstock.errors import UsageError
from penstock.graph.cuts import graph_fingerprint
from penstock.measure.costs import MessageCosts
from penstock.plan.candidates import PlanRequest
from penstock.plan.choose import make_plan
from penstock.recipes import profiled
from penstock.recipes.data_formats import make_task
from penstock.recipes.profiled import count_inference, count_training, profile_generation, profile_task
from penstock.recipes.settings import FitSettings
from penstock.spec.profile import Profile
from penstock.train.captured import Captured
from tests.generate.tokens import save_model
from tests.pretend import module
from tests.recipes.test_data import BERT, TREES
from tests.recipes.test_fit import VIT
from tests.spec.samples import make_cluster

pytestmark = pytest.mark.usefixtures("one_thread")  # measuring sets the threads


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither messages nor a worker's memory are measured here."""
    monkeypatch.setattr(profiled, "measure_messages", MessageCosts)
    monkeypatch.setattr(profiled, "worker_bytes", lambda: 1000.0)


def test_a_profile_of_what_penstock_train_trains(tmp_path: Path) -> None:
    asked = FitSettings(model=VIT, data="digits", output=str(tmp_path))
    task = make_task(asked)
    profile = profile_task(asked, rows=(1, 2), repeats=3)
    assert profile.graph == graph_fingerprint(Captured(task.module, *task.example).graph)
    assert profile.model == VIT
    assert profile.loader_s_per_row > 0
    assert profile.update_s_per_byte > 0
    assert profile.sum_s_per_byte > 0
    assert all(unit.backward_s is not None for unit in profile.units)
    plan = make_plan(profile, make_cluster(1, 1), PlanRequest(schedule="1f1b", batch_rows=8))
    assert plan.batch_rows == 8


def bytes_of(profile: Profile) -> list[dict[str, object]]:
    return [{name: value for name, value in asdict(unit).items() if not name.endswith("_s")} for unit in profile.units]


def test_counted_bytes_are_those_of_a_profile(tmp_path: Path) -> None:
    asked = FitSettings(model=VIT, data="digits", output=str(tmp_path))
    counted = count_training(asked)
    assert bytes_of(counted) == bytes_of(profile_task(asked, rows=(1,), repeats=3))
    assert counted.units[-1].kept_bytes_per_row > 0
    save_model(tmp_path)
    measured = profile_generation(f"hf:{tmp_path}", slots=(1,), max_length=64, repeats=3)
    assert bytes_of(count_inference(f"hf:{tmp_path}", max_length=64)) == bytes_of(measured)


def test_training_and_generation_are_measured_on_a_gpu(
    pretended: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "available", True)
    asked: Any = {"model": VIT, "data": "digits", "output": str(tmp_path), "device": str(pretended)}
    trains = profile_task(FitSettings(**asked), rows=(2,), repeats=3)
    save_model(tmp_path)
    generates = profile_generation(f"hf:{tmp_path}", slots=(1,), max_length=64, repeats=3, device=pretended)
    for profile in (trains, generates):
        assert (profile.device, profile.calibration_s) == ("Pretended GPU", 0.0)
        assert all(unit.forward_s[0] > 0 for unit in profile.units)


def test_the_loss_is_the_last_unit_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.measure.profiler.measure_loss", lambda *_: [(10.0, 20.0)])
    profile = profile_task(FitSettings(model=VIT, data="digits", output=str(tmp_path)), rows=(2,), repeats=3)
    *others, last = profile.units
    assert (int(last.forward_s[0]), int((last.backward_s or (0.0,))[0])) == (10, 20)
    assert max(unit.forward_s[0] for unit in others) < 1


def test_rows_of_different_lengths_have_no_profile(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text(TREES * 12)
    with pytest.raises(UsageError, match="rows of equal size"):
        profile_task(FitSettings(model=BERT, data=str(tmp_path), output=str(tmp_path)), rows=(1,))
