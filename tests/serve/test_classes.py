"""Images over HTTP: the classes of one process, from any client, also while a process is lost."""

import io
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from PIL import Image

from penstock.pipeline import Pipeline
from penstock.zoo.models.models import load_model
from tests.cli.conftest import SMALL
from tests.serve.servers import Server, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(SMALL, "--open", "--stages", 2) as made:
        yield made
        ended = made.end(signal.SIGINT)
        assert ended.status == 130, ended.stderr


def picture(index: int, kind: str = "PNG") -> bytes:
    data = io.BytesIO()
    Image.effect_noise((40 + index, 30), 10.0 + 20 * index).convert("RGB").save(data, kind)
    return data.getvalue()


def line(width: int, height: int) -> bytes:
    data = io.BytesIO()
    Image.new("L", (width, height)).save(data, "PNG")
    return data.getvalue()


def alone(data: bytes) -> list[float]:
    zoo = load_model(SMALL, seed=0)
    assert zoo.transform is not None
    pixels = zoo.transform(Image.open(io.BytesIO(data)).convert("RGB"))[None]
    with Pipeline(zoo.module, (pixels,), stages=1, weights=zoo.weights, threads=1) as pipe:
        scores: list[float] = next(iter(pipe.stream([pixels])))[0].softmax(0).tolist()
    return scores


def test_classes_are_those_of_one_process(server: Server) -> None:
    pictures = [picture(index) for index in range(8)]

    def ask(data: bytes) -> httpx.Response:
        return httpx.post(f"{server.url}/v1/classify?top=4", content=data, timeout=60)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, pictures))
        lost = server.workers()[-1]
        os.kill(lost.pid, signal.SIGKILL)
        again = list(pool.map(ask, pictures))
    assert [answer.json() for answer in again] == [answer.json() for answer in answers]
    for data, answer in zip(pictures, answers, strict=True):
        found = {each["class"]: each["score"] for each in answer.json()["classes"]}
        assert [found[index] for index in range(4)] == pytest.approx(alone(data), abs=1e-5)
    form = httpx.post(f"{server.url}/v1/classify?top=4", files={"image": ("a.png", pictures[0], "image/png")})
    assert form.json() == answers[0].json()
    after_text = httpx.post(
        f"{server.url}/v1/classify?top=4", data={"note": "a picture"}, files={"image": ("a.png", pictures[0])}
    )
    assert after_text.json() == answers[0].json()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no image",
        b"\x89PNG\r\n\x1a\n" + b"\0" * 50,
        picture(1)[:-200],
        line(1, 100_000),
        line(100_000, 1),
        line(1, 2**26),
        line(2**13 + 1, 2**13),
    ],
)
def test_invalid_image_is_refused(server: Server, data: bytes) -> None:
    answer = httpx.post(f"{server.url}/v1/classify", content=data)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "image")


def test_wrong_classification_request_is_refused(server: Server) -> None:
    for top in ("0", "-1", "a", "9999999999"):
        assert httpx.post(f"{server.url}/v1/classify?top={top}", content=picture(1)).json()["error"]["param"] == "top"
    for kind in ("multipart/form-data", "multipart/form-data; boundary=x"):
        answer = httpx.post(f"{server.url}/v1/classify", content=picture(1), headers={"Content-Type": kind})
        assert answer.status_code == 400
    assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}).status_code == 404
    assert httpx.post(f"{server.url}/v1/classify", content=picture(1, "JPEG")).status_code == 200


OWN = """
import torch
from torch import nn

class Mean(nn.Module):
    def forward(self, images):
        return images.mean((2, 3))

def prepared():
    return {"module": Mean(), "example": torch.zeros(1, 3, 4, 4), "class_names": ["red", "green", "blue"]}
"""


def test_a_classifier_of_one_s_own_in_another_preparation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "served.py").write_text(OWN)
    data = io.BytesIO()
    Image.new("RGB", (9, 7), (0, 255, 0)).save(data, "PNG")
    with serving("served:prepared", "--open", "--stages=1", "--set=preprocess=size=4,mean=0,0.5,0,std=0.5") as server:
        answer = httpx.post(f"{server.url}/v1/classify?top=3", content=data.getvalue(), timeout=60).json()
        server.end()
    assert [each["name"] for each in answer["classes"]] == ["green", "red", "blue"]
    expected = torch.tensor([1.0, 0.0, 0.0]).softmax(0).tolist()
    assert [each["score"] for each in answer["classes"]] == pytest.approx(expected)
