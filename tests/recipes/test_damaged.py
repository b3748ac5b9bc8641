"""Damaged images: found before the first epoch, left out if wanted, and never the loss of an epoch."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch._utils import ExceptionWrapper

from penstock.errors import DataError, UsageError
from penstock.recipes import loop
from penstock.recipes.damaged import check_images, without_traceback
from penstock.recipes.launch import fit
from penstock.recipes.settings import FitSettings
from penstock.zoo.data.image_names import open_images
from tests.recipes.test_labels import SMALL, folders

Run = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("place", ["train/a", "val/b"])
def test_damaged_images_are_found_before_the_first_epoch(tmp_path: Path, place: str) -> None:
    data = folders(tmp_path / "ds", ["train/a", "train/b", "val/a", "val/b"], images=2)
    whole = (data / place / "0.png").read_bytes()
    (data / place / "0.png").write_bytes(whole[:-30])
    (data / place / "1.png").write_bytes(b"")
    run = tmp_path / "run"
    settings = FitSettings(model=SMALL, data=str(data), output=str(run), batch_size=4)
    with pytest.raises(DataError, match=r"2 of 8 images cannot be read, the first one: .*0\.png"):
        fit(settings)
    listed = (run / "damaged.txt").read_text().splitlines()
    assert [Path(name).name for name in listed] == ["0.png", "1.png"]
    assert all(Path(name).is_file() for name in listed)
    assert not (run / "model.safetensors").exists()
    for name in listed:
        Path(name).unlink()
        (Path(name)).write_bytes(whole)
    assert fit(settings).last is not None


def test_a_damaged_image_in_a_loading_process_is_one_line() -> None:
    said = "the image a/0.png cannot be read (it is damaged)"
    try:
        raise DataError(said)
    except DataError:
        wrapped = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(DataError, match="Traceback") as caught:
        wrapped.reraise()
    assert str(without_traceback(caught.value)) == said
    assert without_traceback(DataError(said)).args == (said,)


def damage(data: Path, *names: str) -> None:
    for name in names:
        whole = (data / name).read_bytes()
        (data / name).write_bytes(whole[:-30])


@pytest.mark.parametrize("stages", [1, 2])
def test_damaged_images_are_left_out_on_every_rank(tmp_path: Path, stages: int) -> None:
    data = folders(tmp_path / "ds", ["train/a", "train/b", "val/a", "val/b"], images=4)
    damage(data, "train/a/1.png", "train/b/3.png", "val/b/0.png")
    settings = FitSettings(
        model=SMALL, data=str(data), output=str(tmp_path / "run"), batch_size=3, skip_damaged=True, stages=stages,
        num_workers=stages - 1, epochs=2,
    )  # fmt: skip
    found = fit(settings)
    assert [epoch.step for epoch in found.epochs] == [2, 4]  # 6 of 8 images
    names = [Path(line).parts[-3:] for line in (tmp_path / "run" / "damaged.txt").read_text().splitlines()]
    assert sorted(names) == [("train", "a", "1.png"), ("train", "b", "3.png"), ("val", "b", "0.png")]
    again = fit(settings.replace(resume=True, epochs=3))  # from the listing, without another check
    assert [epoch.step for epoch in again.epochs] == [2, 4, 6]
    with pytest.raises(UsageError, match="skip_damaged"):
        fit(settings.replace(resume=True, skip_damaged=False))


def test_damaged_rows_are_skipped_with_a_teacher(tmp_path: Path) -> None:
    data = folders(tmp_path / "ds", ["a", "b"], images=11)
    damage(data, "a/1.png")
    settings = FitSettings(model=SMALL, data=str(data), output=str(tmp_path / "one"), skip_damaged=True)
    fit(settings)
    taught = settings.replace(output=str(tmp_path / "two"), teacher=str(tmp_path / "one" / "model.safetensors"))
    assert fit(taught).last is not None


def test_a_class_whose_images_are_all_damaged_is_named(tmp_path: Path) -> None:
    data = folders(tmp_path / "ds", ["train/a", "train/b", "val/a", "val/b"], images=2)
    damage(data, "val/a/0.png", "val/a/1.png")
    settings = FitSettings(model=SMALL, data=str(data), output=str(tmp_path / "run"), skip_damaged=True)
    assert fit(settings).last is not None  # b is still validated
    damage(data, "train/b/0.png", "train/b/1.png")
    with pytest.raises(DataError, match=r"no image of the class b of .*train can be read"):
        fit(settings.replace(output=str(tmp_path / "other")))
    damage(data, "val/b/0.png", "val/b/1.png")
    with pytest.raises(DataError, match="no image of the class"):
        fit(settings.replace(output=str(tmp_path / "third")))


def test_arrays_are_not_checked(tmp_path: Path) -> None:
    images = open_images("digits")
    assert check_images([("digits", images, [len(images)])], tmp_path, 8) == []  # a row that could not be read


def test_an_option_for_images_is_refused_for_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    for option in ({"skip_damaged": True}, {"preprocess": "mean=0.5"}):
        with pytest.raises(UsageError, match=f"--{next(iter(option)).replace('_', '-')} is for images"):
            fit(FitSettings(model="hf:gpt2", data=str(tmp_path / "a.txt"), output=str(tmp_path / "run"), **option))


def test_an_epoch_is_kept_if_its_validation_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = folders(tmp_path / "ds", ["a", "b"], images=10)
    settings = FitSettings(model=SMALL, data=str(data), output=str(tmp_path / "run"), batch_size=9, epochs=2)

    def fails(*_arguments: Any) -> Any:
        raise DataError("the image is gone")

    with monkeypatch.context() as patch:
        patch.setattr(loop, "evaluate_all", fails)
        with pytest.raises(DataError, match="is gone"):
            fit(settings)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000002"]
    assert [epoch.step for epoch in fit(settings.replace(resume=True)).epochs] == [2, 4]
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [each["step"] for each in steps if each["kind"] == "step"] == [1, 2, 3, 4]
    first, second = (each for each in steps if each["kind"] == "epoch")
    assert first["train_loss"] == sum(each["loss"] for each in steps[:2]) / 2
    assert (first["epoch"], first["batch_rows"], second["epoch"]) == (0, 9, 1)
