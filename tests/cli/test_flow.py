"""Profile, plan, bundle, run: every arrow of the design as a verb, on a small model."""

import csv
import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

import penstock as library
from penstock.cli.main import main
from penstock.measure import hosts, profiler
from penstock.plan.check import read_plan
from penstock.spec.profile import read_profile
from penstock.zoo.data.image_names import open_images
from penstock.zoo.models.models import load_model
from tests.cli.conftest import SMALL

Run = Callable[..., tuple[int, str, str]]
CLUSTER = """
[[devices]]
name = "desk"
speed = 1.0
memory = "2 GiB"
[[devices]]
name = "board"
speed = 0.5
memory = "2 GiB"
"""


@pytest.fixture(scope="module", autouse=True)
def measured_once() -> Iterator[None]:
    """Let all profiles here have the same figures of messages and of a worker's memory, which take seconds."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((hosts, "measure_messages"), (profiler, "worker_bytes")):
            patch.setattr(module, name, cache(getattr(module, name)))
        yield


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a profile, a cluster and a plan that has two stages."""
    folder = tmp_path_factory.mktemp("planned")
    profile, cluster, plan = (folder / name for name in ("profile.json", "cluster.toml", "plan.json"))
    cluster.write_text(CLUSTER)
    assert main(["profile", SMALL, "-o", str(profile), "--rows", "1,2", "--repeats", "3"]) == 0
    made = read_profile(profile)
    assert made.model == SMALL
    assert made.rows == (1, 2)
    assert all(second > 0 for second in (made.calibration_s, made.stage_overhead_s, made.base_bytes))
    assert main(["plan", str(profile), str(cluster), "-o", str(plan), "--no-replicas", "--rows", "2"]) == 0
    # so small a model is best on one device: two are wanted here
    text = json.loads(plan.read_text())
    cut = made.cuts[len(made.cuts) // 2]
    stage = {"precision": "float32", "runtime": "eager"}
    text["pipelines"] = [
        {
            "stages": [stage | {"device": "desk"}, stage | {"device": "board"}],
            "cut_sets": [{"cuts": [cut], "weight": 0.5}, {"cuts": [made.cuts[len(made.cuts) // 2 + 5]], "weight": 0.5}],
            "share": 1.0,
        }
    ]
    text["prediction"]["devices"] = [
        {"device": name, "load_s": 0.001, "memory_bytes": 1e6} for name in ("desk", "board")
    ]
    plan.write_text(json.dumps(text))
    read_plan(plan)
    return folder


def test_a_plan_runs_and_predicts_what_the_model_does(penstock: Run, photos: Path, planned: Path) -> None:
    output = planned / "out.csv"
    status, _, err = penstock("infer", SMALL, "--images", photos, "-o", output, "--plan", planned / "plan.json")
    assert status == 0, err
    zoo, images = load_model(SMALL, whole=True), open_images(photos)
    assert zoo.transform is not None
    with torch.no_grad():
        expected = [int(zoo.module(zoo.transform(images.read(i))[None]).argmax()) for i in range(len(images))]
    with output.open(newline="") as lines:
        assert [int(row["prediction"]) for row in csv.DictReader(lines)] == expected


def test_a_profile_of_training_with_its_images(penstock: Run, photos: Path, tmp_path: Path) -> None:
    profile, cluster, plan = (tmp_path / name for name in ("profile.json", "cluster.toml", "plan.json"))
    # a profile counts what this process holds, and this one holds what all tests before have left
    cluster.write_text(CLUSTER.replace("2 GiB", "24 GiB"))
    (photos / "cats" / "torn.png").write_bytes(b"no picture")
    few = ["--rows", 2, "--repeats", 3]
    status, out, err = penstock("profile", SMALL, "-o", profile, "--training", "--images", photos, *few)
    assert status == 0, err
    assert "backward" in out
    made = read_profile(profile)
    assert made.loader_s_per_row > 0
    assert all(unit.backward_s is not None for unit in made.units)
    status, out, err = penstock("plan", profile, cluster, "-o", plan, "--schedule", "1f1b", "--microbatches", 4)
    assert status == 0, err
    assert read_plan(plan).prediction.rows_per_s > 0
    assert penstock("profile", SMALL, "-o", profile, "--images", tmp_path / "none", *few)[0] == 2


def test_a_profile_with_runtimes_gives_a_plan_on_one(penstock: Run, tmp_path: Path) -> None:
    profile, cluster, plan = (tmp_path / name for name in ("profile.json", "cluster.toml", "plan.json"))
    cluster.write_text(CLUSTER.replace("2 GiB", "24 GiB"))
    few = ["--rows", 2, "--repeats", 3, "--runtime", "onnxruntime"]
    status, out, err = penstock("profile", SMALL, "-o", profile, *few)
    assert status == 0, err
    assert "on onnxruntime in float32, off by 0.00%" in out
    assert penstock("plan", profile, cluster, "-o", plan, "--max-error", 0.01)[0] == 0
    (column,) = read_profile(profile).runtimes
    faster = column.forward_s[0] < column.eager_s[0]
    assert read_plan(plan).pipelines[0].stages[0].runtime == ("onnxruntime" if faster else "eager")


@pytest.mark.parametrize(
    "options",
    [
        ("--training", "--runtime", "onnxruntime"), ("--data", "digits", "--runtime", "onnxruntime"),
        ("--cache-dtype", "int8"), ("--max-length", 64), ("--length", 64), ("--data", "digits", "--length", 64),
        ("--data", "digits", "--images", "digits"), ("--data", "digits", "--cache-dtype", "int8"),
        *(("--generate", *more) for more in (("--training",), ("--data", "digits"), ("--images", "digits"),
                                             ("--length", 64), ("--cache-dtype", "int7"))),
    ],
)  # fmt: skip
def test_profile_refuses_options_without_effect(penstock: Run, tmp_path: Path, options: tuple[object, ...]) -> None:
    status, _, err = penstock("profile", SMALL, "-o", tmp_path / "profile.json", *options)
    assert status == 2
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "profile.json").exists()


def test_a_plan_is_a_row_of_the_bench(penstock: Run, planned: Path, tmp_path: Path) -> None:
    plan, file = planned / "plan.json", tmp_path / "bench.json"
    few = ["--stages", 1, "--num-images", 8, "--plan", plan]
    status, _, err = penstock("bench", SMALL, *few, "--microbatch-size", 1)
    assert status == 2
    assert "got 2 of the plan" in err
    assert "and 1 before it" in err
    status, _, err = penstock("bench", SMALL, *few, "--json", file)
    assert status == 0, err
    found = json.loads(file.read_text())
    assert found["settings"]["microbatch_size"] == 2
    row = found["rows"][-1]
    assert (row["policy"], row["stages"], row["bit_equal"]) == ("plan", 2, True)
    assert row["predicted_images_per_second"] > 0


def test_a_bundle_runs_without_the_model_s_source(penstock: Run, planned: Path) -> None:
    folder = planned / "bundle"
    status, _, err = penstock(
        "split", SMALL, "--plan", planned / "plan.json", "-o", folder, "--json", planned / "said.json"
    )
    assert status == 0, err
    assert [part["device"] for part in json.loads((planned / "said.json").read_text())["parts"]] == ["desk", "board"]
    module = load_model(SMALL, whole=True).module.eval()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        images = [torch.randn(2, 3, 32, 32) for _ in range(5)]
        with library.Pipeline.from_bundle(folder, threads=1) as pipe, torch.no_grad():
            for image, (result,) in zip(images, pipe.stream(images), strict=True):
                assert torch.equal(result, module(image))
    finally:
        torch.set_num_threads(threads)


def test_folders_need_a_plan(penstock: Run, planned: Path, tmp_path: Path) -> None:
    assert penstock("split", SMALL, "-o", tmp_path / "bundle")[0] == 2
    assert penstock("split", SMALL, "--plan", planned / "plan.json", "--stages", 2)[0] == 2
    assert not (tmp_path / "bundle").exists()


def test_a_plan_of_another_model_is_one_line(penstock: Run, photos: Path, planned: Path) -> None:
    other = SMALL.replace("depth=2", "depth=3")
    status, _, err = penstock("infer", other, "--images", photos, "--plan", planned / "plan.json")
    assert status == 1
    assert "profile and plan this model" in err.splitlines()[-1]


def test_hosts_are_measured_on_a_cluster_only(penstock: Run, tmp_path: Path) -> None:
    status, _, err = penstock("hosts", "measure", tmp_path / "none.toml")
    assert status == 2
    assert "none.toml" in err
