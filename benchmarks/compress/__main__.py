"""More than n times: `python -m benchmarks.compress --json FILE`; see the README beside this file."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

import penstock
from benchmarks.compress.subject import NAME
from benchmarks.labs import ROOT, lab_text
from benchmarks.training.__main__ import environment
from penstock.cluster.lab import take_down
from penstock.compress.measure import OnRuntimes, names_of_runtimes
from penstock.compress.search import CompressSettings, Found, Outcome, baseline, draw_frontier
from penstock.compress.steps import compress
from penstock.errors import PlanError
from penstock.recipes.tasks import spread
from penstock.zoo.data.image_names import open_images
from penstock.zoo.models.models import load_model

LAB, HOSTS, CPU = "compress", 4, 0.35
DEIT = "timm:deit_small_patch16_224"
MAX_DROP = 0.01


def main() -> None:
    """Run the parts and write table, figure and JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compress")
    parser.add_argument("--json", type=Path, required=True, help="every row and the summary")
    parser.add_argument("--weights", type=Path, help="of the ViT, as benchmarks.compress.pretrain writes them")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="CIFAR-10 tars")
    parser.add_argument("--folder", type=Path, default=Path("runs/compress-benchmark"), help="what the search keeps")
    parser.add_argument("--figure", type=Path, help="draw the frontier")
    parser.add_argument("--microbatch-size", type=int, default=1, help="images at a time of the search's rates")
    parser.add_argument("--epochs", type=int, default=2, help="of the search, for each part pruned")
    parser.add_argument("--rows", type=int, default=8000, help="images that are learned from")
    parser.add_argument("--ratio", type=float, action="append", help="to prune in the search; may be repeated")
    parser.add_argument("--quick", action="store_true", help="fewer images, two ratios, one epoch")
    parser.add_argument(
        "--only", action="append", choices=["lab", "search", "recipe", "serial"], help="some parts again"
    )
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"environment": environment()}
    if given.json.exists() and given.only:
        result |= json.loads(given.json.read_text())
    wanted = given.only or ["lab", "search", "recipe", "serial"]
    if "lab" in wanted:
        take_down(LAB)
        result["lab"] = in_lab(given.folder, images=24 if given.quick else 96)
        keep(given.json, result)
    if {"search", "recipe", "serial"} & set(wanted) and given.weights is None:
        sys.exit("the ViT's weights are not given; train them with python -m benchmarks.compress.pretrain, --weights")
    if "search" in wanted:
        result["search"] = msgspec.to_builtins(search(given))
        keep(given.json, result)
    if "recipe" in wanted:
        result["recipe"] = msgspec.to_builtins(recipe(given))
        keep(given.json, result)
    if given.figure is not None and "search" in result:
        draw_frontier(msgspec.convert(result["search"], Outcome), given.figure)
    if "serial" in wanted:
        rows = [msgspec.convert(row, Found) for row in result["search"]["found"]]
        result["serial"] = serial_beside_pipeline(rows, given.data, 200 if given.quick else 500)
        keep(given.json, result)
    show(result)


def keep(file: Path, result: dict[str, Any]) -> None:
    """Write what there is so far."""
    result["summary"] = summarize(result)
    file.write_text(json.dumps(result, indent=1) + "\n")


def in_lab(folder: Path, *, images: int) -> dict[str, Any]:
    """Stream DeiT-S through one host and four on every runtime; speed-ups are over one host that computes eagerly."""
    lab = folder / "lab.toml"
    lab.write_text(lab_text(LAB, [CPU] * HOSTS))
    found: dict[str, Any] = {}
    for runtime in names_of_runtimes():
        file = folder / "bench.json"
        command = [
            sys.executable, "-m", "penstock", "bench", DEIT, "--stages", f"1,{HOSTS}", "--num-images", images,
            "--set", "serial_images=12", "--cluster", lab, "--runtime", runtime, "--json", file,
        ]  # fmt: skip
        env = {**os.environ, "PYTHONPATH": f"{ROOT}/src"}
        done = subprocess.run([str(part) for part in command], env=env, capture_output=True, text=True)
        if done.returncode:
            print(f"{runtime}: {(done.stderr.splitlines() or ['failed'])[-1]}", file=sys.stderr)
            continue
        found[runtime] = [row for row in json.loads(file.read_text())["rows"] if row["mode"] != "serial"]
        print(f"{runtime}: {[round(row['speedup'], 2) for row in found[runtime]]}", file=sys.stderr)
    return found


def search(given: argparse.Namespace) -> Outcome:
    """Look for the fastest form of the ViT that loses at most a point on test images."""
    return found_by(
        given, "search", ratios=(0.3,) if given.quick else given.ratio or (0.15, 0.3, 0.45, 0.6),
        epochs=1 if given.quick else given.epochs, batch_size=64, lr=1e-3, optimizer="adamw",
    )  # fmt: skip


def recipe(given: argparse.Namespace) -> Outcome:
    """Prune by the known recipe: 15% of all layers together, by Hessians over ten batches, then SGD for 15 epochs."""
    return found_by(
        given, "recipe", ratios=(0.15,), epochs=1 if given.quick else 15, batch_size=16, lr=5e-4, optimizer="sgd",
        weight_decay=1e-4, importance="hessian", everywhere=True, round_to=2,
    )  # fmt: skip


def found_by(given: argparse.Namespace, name: str, **how: Any) -> Outcome:
    """Run a search, and measure with 2,000 images."""
    kind = f"{name}-{'quick' if given.quick else given.rows}-{given.microbatch_size}-{how['epochs']}"
    settings = CompressSettings(
        model=NAME, weights=str(given.weights.resolve()), data=str(given.data / "cifar10-train.tar"),
        test=str(given.data / "cifar10-test.tar"), max_drop=MAX_DROP, output=str(given.folder / kind),
        num_rows=2000 if given.quick else given.rows, num_test_rows=500 if given.quick else 2000,
        microbatch_size=given.microbatch_size, keep=(), **how,
    )  # fmt: skip
    return compress(settings, lambda found: print(
        f"{found.name}: {found.accuracy:.2%} right, {found.rows_per_s:.0f} images/s", file=sys.stderr
    ))  # fmt: skip


def serial_beside_pipeline(found: list[Found], data: Path, num_images: int) -> list[dict[str, Any]]:
    """Classify test images in one process and through stages, whole and pruned, on several runtimes."""
    torch.set_num_threads(1)
    most = max((each for each in found if each.accuracy >= baseline(found).accuracy - MAX_DROP and each.ratio),
               key=lambda each: each.ratio, default=None)  # fmt: skip
    images = open_images(str(data / "cifar10-test.tar"))
    rows: list[dict[str, Any]] = []
    for each in (baseline(found), *([] if most is None else [most])):
        zoo = load_model(NAME, weights=Path(each.weights), whole=True)
        assert zoo.transform is not None
        chosen = spread(len(images), num_images)
        inputs = torch.stack([zoo.transform(images.read(index)) for index in chosen])
        labels = torch.tensor([images.label(index) for index in chosen])
        on = OnRuntimes(zoo.module, zoo.example_args)
        expected = classify_serially(on, "eager", inputs)
        for runtime in names_of_runtimes():
            try:
                alone = classify_serially(on, runtime, inputs)
            except PlanError:
                continue
            rows.append(row_of(each, runtime, 0, alone, labels, expected, alone))
            for stages in (2, 3, 4, 6) if runtime in {"eager", "onnxruntime:int8"} else (4,):
                with (
                    penstock.Pipeline(zoo.module, (inputs[:1],), stages=stages, runtime=runtime, threads=1) as pipe,
                    torch.no_grad(),
                ):
                    scores = torch.cat(list(pipe.stream(inputs.split(1))))
                rows.append(row_of(each, runtime, stages, scores, labels, expected, alone))
            print(json.dumps(rows[-1]), file=sys.stderr)
    return rows


def row_of(
    found: Found, runtime: str, stages: int, scores: Tensor, labels: Tensor, expected: Tensor, alone: Tensor
) -> dict[str, Any]:
    """Return a row: accuracy, agreement with eager, and with the same runtime in one process (no stages)."""
    classes = scores.argmax(1)
    return {
        "pruned": found.ratio, "runtime": runtime, "stages": stages,
        "accuracy": float((classes == labels).double().mean()),
        "agreement": float((classes == expected.argmax(1)).double().mean()),
        "as_one_process": float((classes == alone.argmax(1)).double().mean()), "bit_equal": torch.equal(scores, alone),
    }  # fmt: skip


def classify_serially(model: OnRuntimes, runtime: str, inputs: Tensor) -> Tensor:
    """Return the scores of images, one at a time."""
    loaded = model.load(runtime)
    with torch.no_grad():
        return torch.cat([loaded({"batch": 1}, [image[None].clone()])[0] for image in inputs])


def summarize(result: dict[str, Any]) -> dict[str, Any]:
    """Return the figures that count; None for what was not run."""
    fastest = max((rows[-1]["speedup"] for rows in result.get("lab", {}).values()), default=None)
    agreement = speed = drop = accuracy = None
    if "serial" in result:
        whole = [row for row in result["serial"] if not row["pruned"]]
        accuracy = whole[0]["accuracy"]
        agreement = min(row["agreement"] for row in whole)
    if "search" in result:
        found = [msgspec.convert(row, Found) for row in result["search"]["found"]]
        base = baseline(found)
        whole_s = {each.runtime: each.rows_per_s for each in found if not each.ratio}
        held = [each for each in found if each.ratio and each.runtime in whole_s
                and each.accuracy >= base.accuracy - MAX_DROP]  # fmt: skip
        if held:  # against the whole model on the same runtime
            best = max(held, key=lambda each: each.rows_per_s / whole_s[each.runtime])
            speed, drop = best.rows_per_s / whole_s[best.runtime], base.accuracy - best.accuracy
    return {"total_speedup_4": fastest, "top1_agreement": agreement, "pruning_speedup": speed,
            "pruning_accuracy_drop": drop, "accuracy": accuracy}  # fmt: skip


def show(result: dict[str, Any]) -> None:
    """Print the tables."""
    print("| runtime | one host | four hosts | of four times one | top class as eager |")
    print("| --- | --- | --- | --- | --- |")
    for runtime, rows in result.get("lab", {}).items():
        one, four = rows[0], rows[-1]
        part = four["speedup"] / one["speedup"] / HOSTS
        print(
            f"| {runtime} | {one['speedup']:.2f} | {four['speedup']:.2f} | {part:.2f} | {four['top1_agreement']:.1%} |"
        )
    for part in ("search", "recipe"):
        if part not in result:
            continue
        found = [msgspec.convert(row, Found) for row in result[part]["found"]]
        base = baseline(found)
        print(f"\n{part}\n\n| pruned | runtime | parameters | accuracy | images/s | times |")
        print("| --- | --- | --- | --- | --- | --- |")
        for each in found:
            print(
                f"| {each.ratio:.0%} | {each.runtime} | {each.num_parameters / 1e6:.2f} M | {each.accuracy:.2%} | "
                f"{each.rows_per_s:.0f} | {each.rows_per_s / base.rows_per_s:.2f} |"
            )
    if "serial" in result:
        print("\n| pruned | runtime | stages | accuracy | top class as eager | as in one process | same bits |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for row in result["serial"]:
            where, same = row["stages"] or "one process", "yes" if row["bit_equal"] else "no"
            parts = " | ".join(f"{row[key]:.2%}" for key in ("accuracy", "agreement", "as_one_process"))
            print(f"| {row['pruned']:.0%} | {row['runtime']} | {where} | {parts} | {same} |")
    print(json.dumps(result["summary"]))


if __name__ == "__main__":
    main()
