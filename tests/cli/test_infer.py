"""`penstock infer` on pictures, good and bad."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from penstock.errors import DeviceLost
from penstock.recipes.settings import FitSettings
from penstock.recipes.tasks import load_for
from penstock.zoo.data.image_names import open_images
from penstock.zoo.models.models import load_model, parse_name
from tests.cli.conftest import SMALL
from tests.fewer import long
from tests.processes import free_port, run_python

Run = Callable[..., tuple[int, str, str]]


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def test_predictions_equal_the_model_s_own(penstock: Run, photos: Path, tmp_path: Path) -> None:
    output, summary = tmp_path / "out.csv", tmp_path / "summary.json"
    status, out, _ = penstock(
        "infer", SMALL, "--images", photos, "-o", output, "--stages", 2, "--set", "microbatch_size=3", "--json", summary
    )
    assert status == 0
    zoo, images = load_model(SMALL, whole=True), open_images(photos)
    assert zoo.transform is not None
    with torch.no_grad():
        expected = [int(zoo.module(zoo.transform(images.read(i))[None]).argmax()) for i in range(len(images))]
    rows = rows_of(output)
    assert [row["image"] for row in rows] == [images.name(i) for i in range(7)]
    assert [int(row["prediction"]) for row in rows] == expected
    said = json.loads(summary.read_text())
    assert said["num_images"] == 7
    assert [stage["stage"] for stage in said["stages"]] == [0, 1]
    assert "7 images at" in out


def test_rows_on_standard_output_and_the_rest_on_standard_error(penstock: Run, photos: Path, tmp_path: Path) -> None:
    status, out, err = penstock("infer", SMALL, "--images", photos, "-o", "-", "--stages", 1)
    assert (status, len([json.loads(line) for line in out.splitlines()])) == (0, 7)
    assert "7 images at" in err
    assert not (tmp_path / "-").exists()
    assert penstock("infer", SMALL, "--images", photos, "-o", "-", "--resume")[0] == 2


@pytest.mark.parametrize("name", ["out.csv", long("out.jsonl")])
def test_the_best_classes_and_the_outputs_of_each_row(penstock: Run, photos: Path, tmp_path: Path, name: str) -> None:
    given = ["infer", SMALL, "--images", photos, "-o", tmp_path / name, "--stages=1", "--set=top=3"]
    given += ["--set=logits=true"]
    assert penstock(*given)[0] == 0
    zoo, images = load_model(SMALL, whole=True), open_images(photos)
    text = (tmp_path / name).read_text().splitlines()
    rows: list[Any] = rows_of(tmp_path / name) if name.endswith("csv") else [json.loads(line) for line in text]
    for index, row in enumerate(rows):
        best, logits = (json.loads(x) if isinstance(x, str) else x for x in (row["top"], row["logits"]))
        with torch.no_grad():
            expected = zoo.module(zoo.pictures()(images.read(index))[None])[0]
        assert torch.allclose(torch.tensor(logits), expected, atol=1e-5)
        assert [each["class"] for each in best] == expected.topk(3).indices.tolist()
        assert best[0]["class"] == int(row["prediction"])
        assert round(best[0]["score"], 6) == float(row["confidence"])
    (tmp_path / name).write_text("\n".join(text[:3]) + "\n")
    status, _, err = penstock(*given[:-1], "--resume")
    assert (status, "logits True, not False" in err) == (2, True), err
    assert penstock(*given, "--resume")[0] == 0
    assert (tmp_path / name).read_text().splitlines() == text


def test_an_infinite_output_is_none(penstock: Run, photos: Path, tmp_path: Path) -> None:
    module = load_model(SMALL, whole=True).module
    module.get_parameter("head.bias").data[3] = -torch.inf
    save_file({n: t.contiguous() for n, t in module.state_dict().items()}, tmp_path / "a.safetensors")
    given = ["--images", photos, "--weights", tmp_path / "a.safetensors", "-o", tmp_path / "out.jsonl"]
    given += ["--set=logits=true"]
    assert penstock("infer", SMALL, *given, "--stages", 1)[0] == 0
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["logits"][3] for row in rows] == [None] * 7


@pytest.mark.parametrize("given", [["--images=~/photos/cats", "--images=~/photos/dogs"], ["--images", "~/photos"]])
def test_paths_may_begin_at_home(
    penstock: Run, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str]
) -> None:
    monkeypatch.setenv("HOME", str(photos.parent))
    assert penstock("infer", SMALL, *given, "--output=~/out.csv", "--json=~/out.json", "--stages", 1)[0] == 0
    assert len(rows_of(tmp_path / "out.csv")) == 7
    assert (tmp_path / "out.json").exists()
    assert not (tmp_path / "~").exists()


def test_a_picture_of_another_number_of_channels(penstock: Run, photos: Path, tmp_path: Path) -> None:
    status, _, err = penstock("infer", f"{SMALL},in_chans=4", "--images", photos)
    assert (status, err.count("\n")) == (2, 1)
    assert "4x32x32" in err
    assert penstock("infer", f"{SMALL},in_chans=1", "--images", photos, "-o", tmp_path / "a.csv", "--stages", 1)[0] == 0


OWN = """
import torch
from torch import nn
from torchvision import transforms

class Brightest(nn.Module):
    def forward(self, images):
        return images.mean((2, 3))

def learns(num_classes=2):
    return nn.Sequential(nn.Flatten(), nn.Linear(48, num_classes))

def classifier():
    return {"module": Brightest(), "transform": transforms.Compose([transforms.Resize((4, 4)), transforms.ToTensor()]),
            "class_names": ["red", "green", "blue"]}
"""


def test_a_classifier_of_one_s_own(penstock: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"{tmp_path.name}_own.py").write_text(OWN)
    for color in ("red", "lime", "blue"):
        (tmp_path / "photos" / color.replace("lime", "green")).mkdir(parents=True)
        Image.new("RGB", (9, 7), color).save(tmp_path / "photos" / color.replace("lime", "green") / "1.png")
    model = f"{tmp_path.name}_own:classifier"
    status, out, err = penstock("infer", model, "--images", "photos", "-o", "out.csv", "--stages", 1)
    assert status == 0, err
    assert [row["class"] for row in rows_of(tmp_path / "out.csv")] == ["blue", "green", "red"]
    assert "accuracy 100.00%" in out


def test_a_trained_classifier_of_one_s_own_keeps_its_preparation(
    penstock: Run, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"{tmp_path.name}_own.py").write_text(OWN)
    (photos / "birds").mkdir()
    for index in range(10):
        Image.new("RGB", (9, 7), (0, 25 * index, 0)).save(photos / "birds" / f"{index}.png")
    model, how = f"{tmp_path.name}_own:learns", "size=4,mean=0.5,std=0.25,crop_mode=squash"
    status, _, err = penstock("train", model, "--data", photos, "-o", "run", "--set", f"preprocess={how}", "--steps", 2)
    assert status == 0, err
    weights = tmp_path / "run" / "model.safetensors"
    found = load_model(model, weights=weights, whole=True)
    assert (found.preprocess, found.class_names) == (how, ("birds", "cats", "dogs"))  # as many as the data has
    image = Image.new("RGB", (9, 7), (255, 0, 0))
    assert found.pictures()(image)[:, 0, 0].tolist() == [2.0, -2.0, -2.0]
    again = load_for(
        FitSettings(model=f"{model},num_classes=3", data=str(photos), weights=str(weights)), f"{model},num_classes=3"
    )[0]
    assert again.preprocess == how
    assert penstock("infer", model, "--weights", weights, "--images", photos, "-o", "out.csv", "--stages", 1)[0] == 0
    status, _, err = penstock("infer", f"{model},num_classes=2", "--weights", weights, "--images", photos)
    assert (status, err.count("\n"), "must be that of" in err) == (2, 1, True)


def test_predictions_on_another_runtime(penstock: Run, photos: Path, tmp_path: Path) -> None:
    given = ["infer", SMALL, "--images", photos, "--stages", 2, "--set", "microbatch_size=3"]
    for name in ("eager", "onnxruntime"):
        assert penstock(*given, "--runtime", name, "-o", tmp_path / f"{name}.csv")[0] == 0
    eager, other = (rows_of(tmp_path / f"{name}.csv") for name in ("eager", "onnxruntime"))
    assert [row["prediction"] for row in other] == [row["prediction"] for row in eager]
    status, _, err = penstock(*given, "--runtime", "abacus", "-o", tmp_path / "none.csv")
    assert status == 2
    assert "got 'abacus'" in err


def test_an_unreadable_image_is_named_and_the_rest_is_done(penstock: Run, photos: Path, tmp_path: Path) -> None:
    (photos / "cats" / "broken.png").write_bytes(b"\x89PNG no more")
    output = tmp_path / "out.jsonl"
    status, _, err = penstock("infer", SMALL, "--images", photos, "-o", output, "--stages", 1)
    assert status == 1
    assert "1 of 8 images failed" in err
    assert "broken.png" in err
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(rows) == 8
    assert ["error" in row for row in rows].count(True) == 1


def test_accuracy_where_labels_and_classes_match(penstock: Run, tmp_path: Path) -> None:
    summary = tmp_path / "summary.json"
    model = SMALL.replace("num_classes=4", "num_classes=10")
    arguments = ["--images", "digits", "--num-images", 20, "-o", tmp_path / "out.csv", "--json", summary]
    status, out, _ = penstock("infer", model, *arguments, "--stages", 1, "--set", "microbatch_size=8")
    assert status == 0
    right = sum(int(row["label"]) == int(row["prediction"]) for row in rows_of(tmp_path / "out.csv"))
    assert json.loads(summary.read_text())["accuracy"] == right / 20
    assert f"accuracy {right / 20:.2%}" in out


@pytest.mark.parametrize(
    ("num_classes", "config", "classes"),
    [
        (4, None, ["", "", "", ""]),  # two folders name two classes, not the first two of four
        (2, None, ["cats", "dogs"]),
        (2, {"id2label": {"0": "tabby", "1": "poodle"}}, ["tabby", "poodle"]),
        (2, {"label_names": ["tabby", "poodle"]}, ["tabby", "poodle"]),
        (2, {"id2label": {"0": "one"}}, ["cats", "dogs"]),
    ],
)
def test_classes_have_names_if_anything_names_them(
    num_classes: int, config: dict[str, object] | None, classes: list[str], penstock: Run, photos: Path, tmp_path: Path
) -> None:
    model = SMALL.replace("num_classes=4", f"num_classes={num_classes}")
    weights, output = tmp_path / "model.safetensors", tmp_path / "out.csv"
    save_file({n: t.contiguous() for n, t in load_model(model, whole=True).module.state_dict().items()}, weights)
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    status, _, err = penstock("infer", model, "--images", photos, "--weights", weights, "-o", output, "--stages", 1)
    assert status == 0, err
    rows = rows_of(output)
    assert [row["label"] for row in rows] == ["cats"] * 3 + ["dogs"] * 4
    assert [row["class"] for row in rows] == [classes[int(row["prediction"])] for row in rows]
    assert ("id2label" in err) == (not any(classes))
    assert "random" not in err


def test_random_weights_are_reported(penstock: Run, photos: Path) -> None:
    given = ["--images", photos, "--stages", 1, "--set", "seed=3"]
    assert "random weights (seed 3)" in penstock("infer", SMALL, *given)[2]


def test_weights_from_a_file_are_used_and_checked(penstock: Run, photos: Path, tmp_path: Path) -> None:
    torch.manual_seed(7)
    base, options = parse_name(SMALL.removeprefix("timm:"))
    module = timm.create_model(base, **options)
    state = {name: tensor.contiguous() for name, tensor in module.state_dict().items()}
    save_file(state, tmp_path / "good.safetensors")
    arguments = ["--images", photos, "--stages", 1, "--num-images", 1]
    good = ["-o", tmp_path / "a.csv", "--weights", tmp_path / "good.safetensors"]
    assert penstock("infer", SMALL, *arguments, *good)[0] == 0
    assert penstock("infer", SMALL, *arguments, "-o", tmp_path / "b.csv", "--set", "seed=7")[0] == 0
    assert (tmp_path / "a.csv").read_text() == (tmp_path / "b.csv").read_text()

    wrong = dict(state) | {"head.weight": torch.zeros(9, 9)}
    save_file(wrong, tmp_path / "wrong.safetensors")
    del state["head.weight"]
    save_file(state, tmp_path / "missing.safetensors")
    for name in ("wrong", "missing"):
        status, _, err = penstock("infer", SMALL, *arguments, "--weights", tmp_path / f"{name}.safetensors")
        assert status == 2
        assert "head.weight" in err
        assert err.count("\n") == 1


@pytest.mark.usefixtures("photos")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["timm:vit_tiny_patch16_224", "--images", "{empty}"], "no images"),
        (["timm:vit_tiny_patch16_224", "--images", "{missing}"], "missing"),
        (["hf:gpt2,n_layer=2", "--images", "{photos}"], "image"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], said: str, penstock: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    places = {name: str(tmp_path / name) for name in ("empty", "missing", "photos")}
    status, _, err = penstock("infer", *[argument.format(**places) for argument in arguments])
    assert status == 2
    assert said in err
    assert err.count("\n") == 1


def test_resume_goes_on_behind_complete_rows(penstock: Run, photos: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.csv"
    arguments = ["infer", SMALL, "--images", photos, "-o", output, "--stages", 1]
    assert penstock(*arguments)[0] == 0
    whole = output.read_text()
    lines = whole.splitlines(keepends=True)
    output.write_text("".join(lines[:4]) + lines[4][:9])  # the fifth line was being written
    status, _, _ = penstock(*arguments, "--resume")
    assert status == 0
    assert output.read_text() == whole
    status, out, _ = penstock(*arguments, "--resume", "--json", tmp_path / "summary.json")
    assert (status, out) == (0, f"already finished: the predictions of all 7 images are in {output}\n")
    assert json.loads((tmp_path / "summary.json").read_text())["num_resumed"] == 7
    assert output.read_text() == whole
    other = tmp_path / "elsewhere"
    other.mkdir()
    (photos / "cats" / "1.png").rename(other / "zebra.png")
    status, _, err = penstock("infer", SMALL, "--images", other, "-o", output, "--resume")
    assert status == 2
    assert "resume with the same images" in err


@pytest.mark.parametrize("name", ["out.csv", long("out.jsonl")])
def test_an_unfinished_file_is_not_replaced(penstock: Run, photos: Path, tmp_path: Path, name: str) -> None:
    output = tmp_path / name
    arguments = ["infer", SMALL, "--images", photos, "-o", output]
    assert penstock(*arguments, "--num-images", 5)[0] == 0
    whole = output.read_bytes()
    assert penstock(*arguments, "--num-images", 5)[0] == 0  # a finished one is
    assert output.read_bytes() == whole
    torn = whole[:-3]
    output.write_bytes(torn)
    for more in ([], ["--num-images", 2]):
        status, _, err = penstock(*arguments, *more)
        assert (status, err.count("\n")) == (2, 2)  # and the note on random weights
        assert f"{output} already holds 4 of 5 predictions; continue with --resume" in err
        assert output.read_bytes() == torn
    assert penstock(*arguments, "--resume")[0] == 0
    unfinished = output.read_bytes()[:-3]
    output.write_bytes(unfinished)
    assert "already holds 6 of 7 predictions" in penstock(*arguments)[2]
    assert output.read_bytes() == unfinished
    (tmp_path / f"{name}.run.json").unlink()
    assert penstock(*arguments)[0] == 0


@pytest.mark.parametrize("other", [["--set", "seed=1"], ["--runtime", "eager:bfloat16"]])
def test_resume_adds_no_rows_of_another_model(penstock: Run, photos: Path, tmp_path: Path, other: list[object]) -> None:
    output = tmp_path / "out.csv"
    arguments = ["infer", SMALL, "--images", photos, "-o", output, "--stages", 1]
    assert penstock(*arguments, "--num-images", 3)[0] == 0
    before = output.read_text()
    status, _, err = penstock(*arguments, *other, "--resume")
    assert status == 2
    assert str(output) in err
    assert output.read_text() == before
    (tmp_path / "out.csv.run.json").unlink()  # as an earlier version has written them
    status, _, err = penstock(*arguments, "--resume")
    assert status == 0
    assert "which model" in err.replace("\n", " ")


@pytest.mark.fresh
def test_ctrl_c_leaves_rows_on_disk_and_no_process_behind(tmp_path: Path) -> None:
    output = tmp_path / "out.csv"
    model = SMALL.replace("num_classes=4", "num_classes=10")
    command = [sys.executable, "-m", "penstock", "infer", model, "--images", "digits", "-o", str(output)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 90
    while not (output.exists() and output.read_text().count("\n") > 20):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    workers = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "continue with --resume" in err
    assert not psutil.wait_procs(workers, timeout=5)[1]
    rows = rows_of(output)
    images = open_images("digits")
    assert [row["image"] for row in rows] == [images.name(i) for i in range(len(rows))]


@pytest.mark.parametrize("broken", [True, long(False)])
def test_under_torchrun_all_processes_end_well(photos: Path, tmp_path: Path, broken: bool) -> None:
    output = tmp_path / "out.csv"
    if broken:
        (photos / "broken.png").write_bytes(b"no picture")
    done = run_python(
        "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()), "-m",
        "penstock", "infer", SMALL, "--images", str(photos), "-o", str(output), deadline_s=120,
    )  # fmt: skip
    assert (done.status == 0) is not broken, done.stderr
    failed = [row for row in rows_of(output) if row["error"]]
    assert len(failed) == broken
    assert "through 2 stages" in done.stdout
    assert "rank 0" not in done.stderr
    assert done.stderr.count("error: ") == broken  # said once, by the process that feeds


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_one_line(penstock: Run, photos: Path) -> None:
    # /dev/full is read without an end: no run may read it, or leave a record next to it that has one read it
    for words in ((), ("--resume",)):
        status, _, err = penstock("infer", SMALL, "--images", photos, "-o", "/dev/full", "--stages", 1, *words)
        assert status == 1
        assert err.splitlines()[-1] == (
            "error: /dev/full cannot be written any further (No space left on device); its 0 rows are kept: "
            "free space and continue with --resume"
        )
        assert not Path("/dev/full.run.json").exists()


@pytest.mark.parametrize(("output", "ends"), [("out.csv", "; continue with --resume\n"), ("-", "start again\n")])
def test_a_run_that_ends_early_names_the_next_step(
    penstock: Run, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, ends: str
) -> None:
    def fail(*_: object) -> None:
        raise DeviceLost("rank 0 is lost: start again")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("penstock.recipes.classify.predict_images", fail)
    status, _, err = penstock("infer", SMALL, "--images", photos, "-o", output)
    assert (status, err.endswith(ends)) == (1, True), err
