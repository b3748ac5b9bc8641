"""A whole search on small images: it measures, prunes, trains on, goes on and says what it found."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from PIL import Image

from penstock.compress import steps
from penstock.compress.search import CompressSettings
from penstock.compress.steps import compress
from penstock.errors import DataError, UsageError
from penstock.zoo.data.image_names import open_images
from penstock.zoo.models.models import load_model

MODEL = "timm:vit_tiny_patch16_224,img_size=8,patch_size=2,depth=2,embed_dim=48,num_heads=3"
RUNTIMES = ("eager", "onnxruntime:int8")


def settings(folder: Path, **fields: Any) -> CompressSettings:
    asked: dict[str, Any] = {
        "model": MODEL, "data": "digits", "output": str(folder), "max_drop": 0.5, "ratios": (0.4,), "epochs": 1,
        "num_rows": 200, "num_test_rows": 20, "runtimes": RUNTIMES, "importance": "taylor", "keep": (1,),
    }  # fmt: skip
    return CompressSettings(**asked | fields)


def test_continued_search_repeats_no_work(tmp_path: Path) -> None:
    told: list[str] = []
    outcome = compress(settings(tmp_path), lambda found: told.append(found.name))
    kept = json.loads((tmp_path / "layers-0.json").read_text())[0]["layer"]
    assert told[:4] == ["eager", "onnxruntime:int8", f"onnxruntime:int8+{kept}", "eager, 40% pruned"]
    assert len(told) == 6
    whole, pruned = outcome.found[0], outcome.found[3]
    assert pruned.num_parameters < 0.8 * whole.num_parameters
    assert outcome.met
    assert all(0 <= each.accuracy <= 1 and each.rows_per_s > 0 for each in outcome.found)
    smaller = load_model(f"{MODEL},num_classes=10", weights=Path(pruned.weights), whole=True).module
    assert sum(p.numel() for p in smaller.parameters()) == pruned.num_parameters
    weights = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    assert len(weights) > 1
    again = compress(settings(tmp_path, max_drop=None, target_speedup=1e6), lambda found: told.append(found.name))
    assert len(told) == 6
    assert {path: path.stat().st_mtime_ns for path in weights} == weights, "nothing is done twice"
    for before, now in zip(outcome.found, again.found, strict=True):  # the rates alone are measured again
        assert replace(before, rates=(), rows_per_s=1.0) == replace(now, rates=(), rows_per_s=1.0)
        assert statistics.median(now.rates) == now.rows_per_s
    assert not again.met


def test_measured_images_are_not_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    searching = steps._CompressionSearch(settings(tmp_path), tmp_path, [])
    assert not set(searching._rows) & set(searching._learned)
    asked: list[Any] = []
    monkeypatch.setattr(steps, "fit", asked.append)
    searching._original()
    searching._pruned(0.4)
    assert asked[0].hold_out == steps.HOLD_OUT
    assert asked[0].num_rows == 200


def pictures(folder: Path, numbers: range) -> str:
    """Pictures of two classes, each with its number as its content."""
    for number in numbers:
        file = folder / "ab"[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number, 0, 0)).save(file)
    return str(folder)


def test_test_images_among_the_learned_ones_are_not_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, test = pictures(tmp_path / "data", range(20)), pictures(tmp_path / "test", range(14, 26))
    asked = settings(tmp_path / "run", data=data, test=test, num_rows=None)
    searching = steps._CompressionSearch(asked, tmp_path, [])
    names = [open_images(test).name(row) for row in searching._rows]
    assert names == ["a/20.png", "a/22.png", "a/24.png", "b/21.png", "b/23.png", "b/25.png"]
    assert capsys.readouterr().err.startswith("note: 6 of 12 images of --test are also in --data")
    with pytest.raises(DataError, match="all 20 images of --test"):
        steps._CompressionSearch(replace(asked, test=data), tmp_path, [])


def test_unsuitable_images_are_refused(tmp_path: Path, photos_without_labels: str) -> None:
    with pytest.raises(DataError, match="images without a label"):
        compress(settings(tmp_path, data=photos_without_labels))
    with pytest.raises(DataError, match=r"every 5th image is kept .* got only 3"):
        compress(settings(tmp_path / "few", num_rows=3))
    with pytest.raises(UsageError, match="a search needs exactly one aim"):
        compress(settings(tmp_path, max_drop=None))


@pytest.fixture
def photos_without_labels(tmp_path: Path) -> str:
    folder = tmp_path / "photos"
    folder.mkdir()
    Image.new("RGB", (8, 8)).save(folder / "one.png")
    return str(folder)
