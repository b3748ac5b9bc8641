"""What runtimes might gain that Penstock has not: `python -m benchmarks.compress.alternatives --json FILE`.

- AOTInductor, weights folded in: compiled ahead of time, in float32 and in bfloat16;
- 8 bits with scales from calibration images (static), beside scales of each microbatch (dynamic), which Penstock has.
"""

import argparse
import copy
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import timm
import torch
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from torch import Tensor, nn

from benchmarks.compress.subject import NAME
from benchmarks.labs import ROOT
from benchmarks.training.__main__ import environment
from penstock.compress.measure import OnRuntimes
from penstock.recipes.tasks import spread
from penstock.runtime.onnx.exported import Engine
from penstock.runtime.onnx.onnx_runtime import OnnxRuntime
from penstock.zoo.data.image_names import open_images
from penstock.zoo.models.models import load_model

CALIBRATION = 32
Run = Callable[[Tensor], Tensor]


def main() -> None:
    """Measure one image at a time on one thread, all in turns, and print a table for each model."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compress.alternatives")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--weights", type=Path, help="of the ViT of CIFAR-10, for accuracies")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="CIFAR-10 tars")
    parser.add_argument("--passes", type=int, default=60)
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger().setLevel(logging.ERROR)  # advice of the package on quantizing
    torch.manual_seed(0)
    deit = timm.create_model("deit_small_patch16_224").eval()
    random = torch.randn(CALIBRATION, 3, 224, 224)
    result: dict[str, Any] = {"environment": environment(), "deit_small": compare(deit, random, given.passes)}
    if given.weights is not None:
        zoo = load_model(NAME, weights=given.weights, whole=True)
        learned, tested = (open_images(str(given.data / f"cifar10-{name}.tar")) for name in ("train", "test"))
        assert zoo.transform is not None
        seen = torch.stack([zoo.transform(learned.read(index)) for index in spread(len(learned), CALIBRATION)])
        chosen = spread(len(tested), 2000)
        images = torch.stack([zoo.transform(tested.read(index)) for index in chosen])
        labels = torch.tensor([tested.label(index) for index in chosen])
        result["cifar_vit"] = compare(zoo.module.eval(), seen, given.passes, (images, labels))
    given.json.write_text(json.dumps(result, indent=1) + "\n")
    show(result)


@torch.no_grad()
def compare(
    model: nn.Module, seen: Tensor, passes: int, tested: tuple[Tensor, Tensor] | None = None
) -> list[dict[str, Any]]:
    """Return a row for each runtime; `seen` are images to calibrate with, `tested` others with their labels."""
    example = seen[:1]
    on = OnRuntimes(model, (example,))
    runs: dict[str, Run] = {}
    prepare_s: dict[str, float] = {}

    def add(name: str, make: Callable[[], Run]) -> None:
        begin = time.perf_counter()
        runs[name] = make()
        runs[name](example.clone())
        prepare_s[name] = time.perf_counter() - begin

    def as_in_penstock(runtime: str) -> Run:
        loaded = on.load(runtime)
        return lambda image: loaded(on.sizes, [image])[0]

    for name in ("eager", "eager:bfloat16", "onnxruntime", "onnxruntime:int8", "openvino", "openvino:bfloat16"):
        add(name, lambda name=name: as_in_penstock(name))  # type: ignore[misc]
    add("AOTInductor", lambda: compiled(model, example))
    add("AOTInductor, bfloat16", lambda: compiled(InBfloat16(copy.deepcopy(model).bfloat16()).eval(), example))
    add("onnxruntime, static int8", lambda: calibrated(on, seen))
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(passes):
        for name, run in runs.items():
            image = seen[number % len(seen)][None].clone()
            begin = time.perf_counter()
            run(image)
            seconds[name].append(time.perf_counter() - begin)
    median_s = {name: statistics.median(each) for name, each in seconds.items()}
    rows = []
    for name, run in runs.items():
        expected, found = (scores(each, seen) for each in (runs["eager"], run))
        rows.append({
            "runtime": name, "image_s": median_s[name], "times_eager": median_s["eager"] / median_s[name],
            "prepare_s": prepare_s[name], "error": float((found - expected).norm() / expected.norm()),
            "accuracy": None if tested is None
            else float((scores(run, tested[0]).argmax(1) == tested[1]).double().mean()),
        })  # fmt: skip
    return rows


def scores(run: Run, images: Tensor) -> Tensor:
    """Return what a runtime gives for images, one at a time."""
    return torch.cat([run(image[None].clone()).clone() for image in images])


class InBfloat16(nn.Module):
    """A model with weights and activations in bfloat16, between float32 ends."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> Tensor:
        out: Tensor = self.model(image.bfloat16()).float()
        return out


def compiled(model: nn.Module, example: Tensor) -> Run:
    """Compile a model ahead of time by AOTInductor, with its weights folded into what is compiled."""
    exported = torch.export.export(model, (example,))
    with tempfile.TemporaryDirectory(prefix="penstock-inductor-") as folder:
        package = torch._inductor.aoti_compile_and_package(
            exported, package_path=f"{folder}/model.pt2", inductor_configs={"freezing": True}
        )
        loaded = torch._inductor.aoti_load_package(package)

    def run(image: Tensor) -> Tensor:
        out: Tensor = loaded(image)
        return out

    return run


class KeepsModel(OnnxRuntime):
    """ONNX Runtime, and the ONNX model that it was given."""

    model: onnx.ModelProto

    def _compile(self, model: onnx.ModelProto) -> Engine:
        self.model = model
        return super()._compile(model)


class Images(CalibrationDataReader):  # type: ignore[misc]
    """Images as the package asks for them."""

    def __init__(self, name: str, images: Sequence[Tensor]) -> None:
        self._rest = iter([{name: image[None].numpy()} for image in images])

    def get_next(self) -> dict[str, Any] | None:
        """Return the next image, and None after the last one."""
        return next(self._rest, None)


def calibrated(on: OnRuntimes, seen: Tensor) -> Run:
    """Quantize constant matrices and what they are multiplied with, by the least and largest values of images."""
    kept = KeepsModel(on.program, on.tensors)
    kept(on.sizes, [seen[:1].clone()])
    (entry,) = kept.model.graph.input
    with tempfile.TemporaryDirectory(prefix="penstock-int8-") as folder:
        whole, quantized = f"{folder}/model.onnx", f"{folder}/int8.onnx"
        onnx.save(kept.model, whole)
        quantize_static(
            whole, quantized, Images(entry.name, list(seen)), quant_format=QuantFormat.QDQ,
            op_types_to_quantize=["MatMul"], per_channel=True, activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8, extra_options={"MatMulConstBOnly": True},
        )  # fmt: skip
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        session = onnxruntime.InferenceSession(quantized, options, providers=["CPUExecutionProvider"])
    return lambda image: torch.from_numpy(session.run(None, {entry.name: image.numpy()})[0])


def show(result: dict[str, Any]) -> None:
    """Print a table for each model."""
    for name, rows in result.items():
        if name == "environment":
            continue
        print(f"| {name} | ms an image | times eager | seconds until ready | error | accuracy |")
        print("| --- | --- | --- | --- | --- | --- |")
        for row in rows:
            accuracy = "" if row["accuracy"] is None else f"{row['accuracy']:.2%}"
            print(
                f"| {row['runtime']} | {1e3 * row['image_s']:.2f} | {row['times_eager']:.2f} | "
                f"{row['prepare_s']:.1f} | {row['error']:.2%} | {accuracy} |"
            )
        print()


if __name__ == "__main__":
    main()
