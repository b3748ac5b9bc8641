"""Labels of images as classes of a model, and damaged images: which confidences cannot be given, what is left out."""

import csv
import json
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch._utils import ExceptionWrapper

from penstock.errors import DataError, UsageError
from penstock.recipes import loop
from penstock.recipes.classify import check_head, confidences
from penstock.recipes.data_formats import make_task
from penstock.recipes.images import Labels, check_images, match_labels, without_traceback
from penstock.recipes.launch import fit
from penstock.recipes.settings import FitSettings
from penstock.zoo.data.folders import read_labels
from penstock.zoo.data.image_names import open_images
from penstock.zoo.models.models import ZooModel, load_model
from penstock.zoo.weights.weight_files import read_classes, save_weights
from penstock.zoo.weights.weights import ModuleWeights
from tests.cli.conftest import penstock  # noqa: F401

SMALL = "timm:vit_tiny_patch16_224,depth=1,img_size=8,patch_size=4,embed_dim=12,num_heads=2"
Run = Callable[..., tuple[int, str, str]]


def folders(root: Path, names: Sequence[str], images: int = 1) -> Path:
    for place, name in enumerate(names):
        (root / name).mkdir(parents=True)
        for index in range(images):
            Image.new("RGB", (8, 8), (20 * place, index, 0)).save(root / name / f"{index}.png")
    return root


def model(num_classes: int, names: Sequence[str] | None = None) -> ZooModel:
    module = nn.Linear(1, num_classes)
    module.num_classes = num_classes  # type: ignore[assignment]
    return replace(
        zoo(), module=module, class_names=tuple(names) if names else None, is_random=False, num_classes=num_classes
    )


@cache
def zoo() -> ZooModel:
    return load_model(f"{SMALL},num_classes=2")


@pytest.mark.parametrize(
    "names",
    [[str(n) for n in range(1, 13)], ["Cat", "apple", "dog"], ["class_2", "class_10"], ["B", "a"], ["x9", "X10"]],
)
def test_classes_without_names_need_an_order_if_two_are_possible(tmp_path: Path, names: list[str]) -> None:
    images, known = open_images(folders(tmp_path, names)), model(len(names))
    with pytest.raises(UsageError, match=r"class \d+ is the folder"):
        match_labels(known, images)
    for order, expected in (("torchvision", tuple(sorted(names))), ("natural", images.classes)):
        found = match_labels(known, images, order)
        assert found.names == expected
        named = [expected[found.classes[found.images.label(row) or 0]] for row in range(len(images))]
        assert named == [images.name(row).partition("/")[0] for row in range(len(images))]
    by_name = match_labels(model(len(names), sorted(names)), images)
    assert [sorted(names)[place] for place in by_name.classes.values()] == list(images.classes)


def test_no_order_is_asked_for_where_both_are_the_same_or_it_is_known(tmp_path: Path) -> None:
    images = open_images(folders(tmp_path / "same", ["cat", "dog"]))
    assert match_labels(model(2), images) == Labels(images=images, names=("cat", "dog"), classes={0: 0, 1: 1})
    hundred = replace(images, classes=tuple(map(str, range(100))), by_folder=False)  # as CIFAR-100 has them
    assert len(match_labels(model(100), hundred).classes) == 100
    random = replace(model(2), is_random=True)
    assert match_labels(random, open_images(folders(tmp_path / "other", ["2", "10"]))).names == ("2", "10")
    with pytest.raises(UsageError, match="leave class_order out"):
        match_labels(model(2, ["cat", "dog"]), images, "natural")
    with pytest.raises(UsageError, match="got sorted"):
        match_labels(model(2), images, "sorted")


@pytest.mark.parametrize(
    ("names", "known", "unknown"),
    [
        (["cat", "dogs"], ["cat", "dog"], "dogs"),
        (["Cat", "dog"], ["cat", "dog"], "Cat"),
        (["cat", "cats"], ["Cat", "cat"], "cats"),
        (["n01440764", "n99999999"], [f"name {n}" for n in range(1000)], "n01440764"),
    ],
)
def test_names_that_differ_have_no_accuracy_and_a_reason(
    tmp_path: Path, names: list[str], known: list[str], unknown: str
) -> None:
    found = match_labels(model(len(known), known), open_images(folders(tmp_path, names)))
    assert found.classes == {}
    assert found.names == tuple(known)
    assert unknown in str(found.reason)


def test_a_file_of_folders_is_their_order(tmp_path: Path) -> None:
    images = open_images(folders(tmp_path / "photos", ["n2", "n10", "a"]))
    (tmp_path / "map.txt").write_text("n10\na\nn2\n")
    for names in (None, ["one", "two", "three"]):
        found = match_labels(model(3, names), images, str(tmp_path / "map.txt"))
        assert [found.classes[images.classes.index(name)] for name in ("n10", "a", "n2")] == [0, 1, 2]
        assert list(found.names) == (names or ["n10", "a", "n2"])
    some = open_images(folders(tmp_path / "some", ["n2"]))
    assert match_labels(model(3), some, str(tmp_path / "map.txt")).classes == {0: 2}
    for text in ("n10\na\n", "n10\na\nb\n", "n10\na\nn2\nn2\n", ""):
        (tmp_path / "map.txt").write_text(text)
        with pytest.raises(UsageError, match=r"map\.txt must have"):
            match_labels(model(3), images, str(tmp_path / "map.txt"))
    with pytest.raises(UsageError, match="torchvision, natural or a text file"):
        match_labels(model(3), images, "alphabetical")


def test_names_that_differ_by_case_are_two_classes(tmp_path: Path) -> None:
    images = open_images(folders(tmp_path, ["A", "a", "b"]))
    found = match_labels(model(3, ["b", "A", "a"]), images)
    assert {images.classes[label]: place for label, place in found.classes.items()} == {"A": 1, "a": 2, "b": 0}


def test_folders_of_synsets_are_classes_of_imagenet(tmp_path: Path) -> None:
    images = open_images(folders(tmp_path, ["n01443537", "n15075141"]))
    for known in (None, [f"name {n}" for n in range(1000)]):
        assert match_labels(model(1000, known), images).classes == {0: 1, 1: 999}


@pytest.mark.parametrize("count", [4, 3, 9])
def test_another_number_of_classes_has_a_reason(tmp_path: Path, count: int) -> None:
    found = match_labels(model(count), open_images(folders(tmp_path, ["a", "b"])))
    assert (found.names, found.classes) == ((), {})
    assert f"{count} classes" in str(found.reason)


def test_parts_of_a_data_set_are_not_classes(tmp_path: Path) -> None:
    images = open_images(folders(tmp_path, ["train/cat", "val/cat"]))
    with pytest.raises(UsageError, match="train and val"):
        match_labels(model(2), images)
    assert match_labels(model(2, ["train", "val"]), images).classes == {0: 0, 1: 1}


def test_one_output_is_no_accuracy(tmp_path: Path) -> None:
    found = match_labels(model(1), open_images(folders(tmp_path, ["a"])))
    assert (found.classes, "one output" in str(found.reason)) == ({}, True)


def test_training_goes_on_from_a_head_only_in_a_known_order(tmp_path: Path) -> None:
    data, weights = folders(tmp_path / "ds", ["1", "2", "10"], images=4), tmp_path / "w" / "w.safetensors"
    weights.parent.mkdir()
    save_weights(load_model(f"{SMALL},num_classes=3").weights, weights)
    settings = FitSettings(
        model=f"{SMALL},num_classes=3", data=str(data), weights=str(weights), output=str(tmp_path / "run")
    )
    with pytest.raises(UsageError, match="class 1 is the folder 10"):
        make_task(settings)
    (weights.parent / "config.json").write_text(json.dumps({"label_names": ["1", "10", "2"]}))
    assert read_classes(make_task(settings).metadata) == ("1", "10", "2")
    other = msgspec.structs.replace(settings, weights=None)
    assert read_classes(make_task(other).metadata) == ("1", "2", "10")


VIT = "hf:vit,image_size=8,patch_size=4,hidden_size=8,num_hidden_layers=1,num_attention_heads=2,intermediate_size=8"


@pytest.mark.parametrize(
    "name", [f"{SMALL},num_classes=0", "timm:resnet18,num_classes=0", "hf:gpt2,n_layer=1,n_embd=8,n_head=2"]
)
def test_a_model_without_head_is_refused(name: str) -> None:
    found = load_model(name)
    with pytest.raises(UsageError, match="no classification head"):
        check_head(found)


def test_a_regression_is_refused() -> None:
    with pytest.raises(UsageError, match="problem_type regression"):
        check_head(load_model(f"{VIT},num_labels=1,problem_type=regression"))


@pytest.mark.parametrize(
    ("options", "apply"),
    [
        ("num_labels=1", torch.sigmoid),
        ("num_labels=3,problem_type=multi_label_classification", torch.sigmoid),
        ("num_labels=3,problem_type=single_label_classification", lambda x: x.softmax(-1)),
        ("num_labels=3", lambda x: x.softmax(-1)),
    ],
)
def test_confidences_are_those_of_transformers(options: str, apply: Any) -> None:
    found = load_model(f"{VIT},{options}")
    check_head(found)
    logits = torch.tensor([[0.4, -1.0, 2.0]])[:, : found.num_classes]
    assert torch.equal(confidences(found, logits), apply(logits))
    assert confidences(found, torch.full_like(logits, torch.inf)).isnan().any()


def test_nan_is_an_error_of_its_row(penstock: Run, tmp_path: Path) -> None:  # noqa: F811
    data = folders(tmp_path / "ds", ["2", "10"])
    found = load_model(f"{SMALL},num_classes=2", whole=True)
    found.module.head.bias.data[1] = torch.nan  # type: ignore[union-attr, operator]
    weights = tmp_path / "w.safetensors"
    save_weights(ModuleWeights(found.module), weights)
    given = ["infer", f"{SMALL},num_classes=2", "--weights", weights, "--images", data, "--stages", 1]
    assert penstock(*given)[0] == 2
    for name in ("out.csv", "out.jsonl"):
        status, out, err = penstock(*given, "--set", "class_order=torchvision", "-o", tmp_path / name)
        assert (status, "2 of 2 images failed" in err, "accuracy" in out) == (1, True, False)
    with (tmp_path / "out.csv").open() as file:
        assert [(row["prediction"], "NaN" in row["error"]) for row in csv.DictReader(file)] == [("", True)] * 2
    assert [set(json.loads(line)) for line in (tmp_path / "out.jsonl").open()] == [{"image", "label", "error"}] * 2


@pytest.mark.parametrize(
    ("names", "rows", "kept"),
    [
        (["train/a", "train/b", "val/a", "val/b"], 20, 20),
        (["Train/a", "Train/b", "Valid/b", "test/a"], 20, 10),
        (["set/training/a", "set/training/b", "set/validation/a"], 20, 10),
        (["train/a", "train/b", "test/a"], 18, 2),
    ],
)
def test_train_and_val_folders_are_recognized(tmp_path: Path, names: list[str], rows: int, kept: int) -> None:
    data = folders(tmp_path / "ds", names, images=10)
    task = make_task(FitSettings(model=SMALL, data=str(data), output=str(tmp_path / "run")))
    assert read_classes(task.metadata) == ("a", "b")
    assert (len(task.training), len(task.validation)) == (rows, kept)  # type: ignore[arg-type]
    assert any(word in task.notes[0] for word in ("train", "Train"))
    assert ("test is not used" in task.notes[0]) == any("test" in name for name in names)


@pytest.mark.parametrize("names", [["val/a", "test/a"], ["train/a", "other/b"], ["train/a", "train/b", "train/c/"]])
def test_folders_that_are_no_data_set_of_classes(tmp_path: Path, names: list[str]) -> None:
    data = folders(tmp_path / "ds", [name for name in names if not name.endswith("/")], images=10)
    for name in names:
        (data / name).mkdir(exist_ok=True)
    settings = FitSettings(model=SMALL, data=str(data), output=str(tmp_path / "run"))
    if "other/b" in names:
        assert read_classes(make_task(settings).metadata) == ("other", "train")
        return
    with pytest.raises(DataError, match=r"val and|test and|class c "):
        make_task(settings)
    with pytest.raises(DataError, match=r"val and|test and|class c "):
        make_task(msgspec.structs.replace(settings, data="digits", validation=str(data)))


def flat(root: Path) -> Path:
    root.mkdir()
    for index in range(4):
        Image.new("RGB", (32, 32), (60 * index, 255 - 60 * index, 30)).save(root / f"val {index}.JPEG")
    return root


@pytest.mark.parametrize(
    "text",
    [
        "val 0.JPEG 1\nval 1.JPEG 2\nval 2.JPEG 1\nval 3.JPEG 0\n",
        "image,label\r\nval 0,1\r\nval 1,2\r\nval 2,1\r\nval 3,0\r\n",
        "\ufeffval 0.JPEG\tdog\n\nval 1.JPEG\tcow\nval 2.JPEG\tdog\nval 3.JPEG\tcat\nother.JPEG\tcat",
        '"val 0.JPEG",dog,x\n"val 1.JPEG",cow,x\n./val 2.JPEG,dog\nval 3.JPEG,cat\n',
    ],
)
def test_labels_of_a_flat_folder(tmp_path: Path, text: str) -> None:
    images = open_images(flat(tmp_path / "val"))
    (tmp_path / "val.txt").write_text(text, encoding="utf-8")
    found = match_labels(model(3, ["cat", "dog", "cow"]), read_labels(tmp_path / "val.txt", images))
    assert [found.classes[label] for label in found.images.labels if label is not None] == [1, 2, 1, 0]


def test_labels_by_synset_and_by_number_above_the_images(tmp_path: Path) -> None:
    images = open_images(flat(tmp_path / "val"))
    (tmp_path / "a.csv").write_text(
        "ImageId,PredictionString\nval 0,n01443537 85 1 499 272\nval 2,n15075141 1 2 3 4 \n"
    )
    found = match_labels(model(1000, [f"name {n}" for n in range(1000)]), read_labels(tmp_path / "a.csv", images))
    assert [label is None for label in found.images.labels] == [False, True, False, True]
    assert sorted(found.classes.values()) == [1, 999]
    (tmp_path / "b.txt").write_text("val 0 65\nval 1 970\n")
    assert sorted(match_labels(model(1000), read_labels(tmp_path / "b.txt", images)).classes.values()) == [65, 970]
    assert match_labels(model(970), read_labels(tmp_path / "b.txt", images)).reason


@pytest.mark.parametrize(
    ("text", "said"),
    [("490\n361\n", "line 1"), ("val 0 1\nval 0.JPEG 2\n", "two labels"), ("a 1\nb 2\n", "any of the 4"), ("", "any")],
)
def test_files_that_are_no_labels(tmp_path: Path, text: str, said: str) -> None:
    images = open_images(flat(tmp_path / "val"))
    (tmp_path / "val.txt").write_text(text)
    with pytest.raises(DataError, match=said):
        read_labels(tmp_path / "val.txt", images)
    with pytest.raises(DataError, match="No such file"):
        read_labels(tmp_path / "none.txt", images)


def test_a_checkpoint_of_the_official_training_script(penstock: Run, tmp_path: Path) -> None:  # noqa: F811
    """As DeiT's main.py saves it, converted, on a flat folder with a file of labels; the accuracy is the model's."""
    name = "timm:deit_tiny_patch16_224,depth=1,img_size=32,patch_size=8,num_classes=5"
    found = load_model(name, whole=True, seed=3)
    optimizer = torch.optim.AdamW(found.module.parameters())
    torch.save(
        {
            "model": load_model(name, whole=True, seed=4).module.state_dict(), "optimizer": optimizer.state_dict(),
            "lr_scheduler": {"base_values": np.float64(5e-4)}, "epoch": 299, "scaler": {"scale": 65536.0},
            "model_ema": found.module.state_dict(),
            "args": Namespace(model="deit_tiny_patch16_224", output_dir=Path("out"), lr=5e-4),
        },
        tmp_path / "checkpoint.pth",
    )  # fmt: skip
    weights = tmp_path / "deit.safetensors"
    status, out, _ = penstock("convert", tmp_path / "checkpoint.pth", "-o", weights)
    assert (status, "model_ema, not from model;" in out) == (0, True)
    images = open_images(flat(tmp_path / "val"))
    assert found.transform is not None
    with torch.no_grad():
        right = [int(found.module(found.transform(images.read(row))[None]).argmax()) for row in range(4)]
    labels = [*right[:3], (right[3] + 1) % 5]
    (tmp_path / "val.txt").write_text("".join(f"val {row}.JPEG {label}\n" for row, label in enumerate(labels)))
    given = ["--images", tmp_path / "val", "--set", f"labels={tmp_path}/val.txt", "--weights", weights, "--stages", 2]
    status, out, err = penstock("infer", name, *given, "-o", tmp_path / "out.csv")
    assert (status, "accuracy 75.00%" in out) == (0, True), err
    (tmp_path / "val.txt").write_text("val 0.JPEG 5\n")
    status, _, err = penstock("infer", name, *given, "-o", tmp_path / "out.csv")
    assert (status, "cannot be compared" in err) == (2, True)


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
