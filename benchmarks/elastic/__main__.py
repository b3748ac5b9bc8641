"""Elastic training on emulated hosts: `python -m benchmarks.elastic --json FILE`; see the README beside this file."""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from benchmarks.elastic.figure import draw
from benchmarks.elastic.pretrain import pretrain, train_head, vary
from benchmarks.elastic.subjects import make_subject, prepare_images, prepare_sentences
from benchmarks.elastic.tables import UNFROZEN, show, tried
from benchmarks.labs import ROOT, lab_text, run_session
from benchmarks.training.__main__ import environment
from penstock.cluster.lab import take_down
from penstock.deploy.state import load_state
from penstock.engine.reference import calibrate
from penstock.errors import OutOfMemory
from penstock.graph.ops import State
from penstock.measure.profiler import profile_graph
from penstock.spec.profile import write_profile
from penstock.train.captured import Captured

LAB, HOSTS, CPU = "bench", 4, 0.35
BERT_LEARNING_RATE = 3e-4
_AS_FILE = str.maketrans({" ": "-", "/": "of", ",": None})
SMALL = "1536 MiB"  # of each host where the largest batch is looked for
BATCH, ROWS, EPOCHS, LEARNING_RATE, PRETRAINING = 128, 16, 10, 1e-3, 32  # ROWS are those of a microbatch
IMAGES, VARIANTS = 1000, 10  # what is fine-tuned on
SEEDS = (0, 1, 2)
THIRD, LATER = "alpha 1/3", "alpha 1/3, an epoch later"
FREEZING = {
    THIRD: "schedule:1/3", LATER: "schedule:1/3+after:1",
    "alpha 1/5": "schedule:1/5", "alpha 1/4": "schedule:1/4", "alpha 1/2": "schedule:1/2",
}  # fmt: skip
CLAIMED = LATER  # what the summary's figures are of
PIPELINE, STATIC, ELASTIC = "one pipeline over all hosts", "the planner's best static plan", f"elastic, {THIRD}"
DATA_PARALLEL, BOTH = "data parallel", "two pipelines of two"
OFF = {"pack": False, "replicate": False, "cache": False}


def ways() -> dict[str, dict[str, Any]]:
    """Return the rows of the lab: how each differs from the rest."""
    schedule = FREEZING[THIRD]
    pipeline = {"stages": HOSTS, "microbatches": BATCH // ROWS}
    return {
        PIPELINE: pipeline,
        DATA_PARALLEL: {"stages": 1, "replicas": HOSTS, "microbatches": BATCH // ROWS // HOSTS, "epochs": 3},
        BOTH: {"stages": 2, "replicas": 2, "microbatches": BATCH // ROWS // 2, "epochs": 3},
        STATIC: {"elastic": {"freeze": "none", **OFF, "pack": True, "replicate": True}},
        "freeze": pipeline | {"elastic": {"freeze": schedule, **OFF}},
        "freeze, pack, cache": pipeline | {"elastic": {"freeze": schedule, "replicate": False}},
        "freeze, pack, replicate": pipeline | {"elastic": {"freeze": schedule, "cache": False}},
        "all, from the pipeline": pipeline | {"elastic": {"freeze": schedule}},
        **{f"elastic, {name}": {"elastic": {"freeze": freeze}} for name, freeze in FREEZING.items()},
    }


def main() -> None:
    """Run the rows and write table, figure and JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.elastic")
    parser.add_argument("--json", type=Path, required=True, help="every row and the summary")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="CIFAR-10 tars and sst2/")
    parser.add_argument("--folder", type=Path, default=Path("runs/elastic-benchmark"), help="prepared rows and weights")
    parser.add_argument("--figure", type=Path, help="draw accuracy and time")
    parser.add_argument("--images", type=int, default=IMAGES, help="images that the ViT is fine-tuned on")
    parser.add_argument("--variants", type=int, default=VARIANTS, help="how often each of them is there, changed")
    parser.add_argument("--quick", action="store_true", help="few images, three epochs, one seed, fewer rows")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="seeds of the accuracies")
    parser.add_argument("--only", action="append", help="only rows whose name has this in it; may be repeated")
    given = parser.parse_args()
    if not (given.data / "cifar10-train.tar").exists():
        sys.exit(f"{given.data} has no cifar10-train.tar; give the folder that has it with --data")
    take_down(LAB)
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    given.folder.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"environment": environment(), "lab": {}, "bert": {}, "accuracy": {}, "migration": []}
    if given.json.exists() and given.only:
        result |= json.loads(given.json.read_text())
    base = prepare(given.data, given.folder, given.images, given.variants, quick=given.quick)

    def keep() -> None:
        result["summary"] = summarize(result)
        given.json.write_text(json.dumps(result, indent=1) + "\n")

    def wanted(name: str) -> bool:
        return not given.only or any(only in name for only in given.only)

    if wanted("migration"):
        result["migration"] = migration()
        keep()
    rows = ways()
    names = [PIPELINE, STATIC, f"elastic, {CLAIMED}"] if given.quick else list(rows)
    for name in names:
        if wanted(f"vit, {name}"):
            result["lab"][name] = in_lab(name, base["vit"] | rows[name])
            keep()
    for name in () if given.quick else (PIPELINE, STATIC, ELASTIC):
        if wanted(f"bert, {name}"):
            result["bert"][name] = in_lab(f"bert, {name}", base["bert"] | rows[name])
            keep()
    if not given.quick and wanted("largest batch"):
        result["largest"] = largest(base["vit"])
        keep()
    asked = [each for each in outside_the_lab(quick=given.quick) if wanted("accuracy: {} {}".format(*each))]
    seeds = given.seeds[:1] if given.quick else given.seeds
    for subject, found in accuracies(asked, seeds, base, given.folder).items():
        result["accuracy"][subject] = result["accuracy"].get(subject, {}) | found
        keep()
    show(result, pipeline=PIPELINE, static=STATIC, freezing=THIRD, memory=SMALL)
    if given.figure is not None:
        draw(result, given.figure)


def prepare(data: Path, folder: Path, images: int, variants: int, *, quick: bool) -> dict[str, dict[str, Any]]:
    """Prepare rows, weights and profiles, or find them in the folder; returns what all rows of a subject share."""
    num_rows, epochs = (1500, 3) if quick else (3000, EPOCHS)
    first, rest = range(5), range(5, 10)
    torch.set_num_threads(2)
    pretrained = folder / "pretrained.pt"
    if not pretrained.exists():
        many = prepare_images(data / "cifar10-train.tar", folder, first, 25_000, "pretrain")
        pretrain(many, pretrained, 2 if quick else PRETRAINING)
    rows = vary(prepare_images(data / "cifar10-train.tar", folder, rest, images, "finetune"), variants)
    weights = folder / f"weights-{rows.name}"
    if not weights.exists():
        train_head(pretrained, rows, weights)
    shared = {"epochs": epochs, "batch_size": BATCH, "lr": LEARNING_RATE, "seed": 0, "validate": "never",
              "cluster": lab_text(LAB, [CPU] * HOSTS)}  # fmt: skip
    vit = shared | {
        "subject": "vit",
        "weights": str(weights.resolve()),
        "training": str(rows.resolve()),
        "rows": num_rows,
        "validation": str(prepare_images(data / "cifar10-test.tar", folder, rest, 5000, "kept").resolve()),
    }
    bert = shared | {
        "subject": "bert",
        "lr": BERT_LEARNING_RATE,
        "training": str(prepare_sentences(data / "sst2", folder, num_rows, "sst2-train").resolve()),
        "validation": str(prepare_sentences(data / "sst2", folder, 872, "sst2-dev").resolve()),
    }
    for name, subject in (("vit", vit), ("bert", bert)):
        file = folder / f"{name}-profile.json"
        if not file.exists():
            measure(subject, file)
            measure_messages(folder / "lab.toml", file)
        subject["profile"] = str(file.resolve())
    return {"vit": vit, "bert": bert}


def measure(subject: dict[str, Any], file: Path) -> None:
    """Profile a model as it trains, by its layers and the blocks' halves, as `penstock profile` does."""
    model, training, _ = make_subject(subject)
    captured = Captured(model, (training[0][0][None].repeat(2, *[1] * training[0][0].dim()),))

    def load(state: State) -> Tensor:
        return load_state(captured.graph, state, captured.weights)

    profile = profile_graph(captured.graph, load, rows=(ROWS,), training=True, cuts=captured.layers)
    write_profile(file, msgspec.structs.replace(profile, calibration_s=calibrate()))


def measure_messages(lab: Path, profile: Path) -> None:
    """Write into a profile what messages cost in the lab, whose hosts get their share of a core in portions."""
    lab.write_text(lab_text(LAB, [CPU] * HOSTS))
    command = ["penstock", "hosts", "measure", str(lab), "--profile", str(profile), "--update"]
    subprocess.run([sys.executable, "-m", *command], env={**os.environ, "PYTHONPATH": f"{ROOT}/src"}, check=True)


def in_lab(name: str, settings: dict[str, Any], *, memory: str = "3 GiB") -> dict[str, Any]:
    """Train one way on all hosts of a lab; returns what the first host saw, and all hosts' memory."""
    settings = {"microbatches": BATCH // ROWS} | settings
    lab = lab_text(LAB, [CPU] * HOSTS, memory=memory)
    written = run_session(lab, "benchmarks.elastic.session", settings, name)
    first: dict[str, Any] = written["0"]
    first["hosts"] = [{key: each[key] for key in ("spent", "peak_memory_bytes")} for _, each in sorted(written.items())]
    chunks = settings["microbatches"] * settings.get("replicas", 1)  # over all replicas, as elastic plans keep them
    first |= {"chunks": chunks, "batch": settings["batch_size"]}
    print(f"{name}: {sum(first['seconds']):.0f} s, {[round(s, 1) for s in first['seconds']]}", file=sys.stderr)
    return first


def largest(base: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Double the batch of each algorithm until a host of little memory has too little; returns every try."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name in (DATA_PARALLEL, PIPELINE, BOTH, ELASTIC):
        tries = found[name] = []
        for batch in (512, 1024, 2048, 4096):
            settings = base | ways()[name] | {"batch_size": batch, "rows": 2 * batch, "epochs": 1}
            try:
                row = in_lab(f"{name}, batch {batch}", settings, memory=SMALL)
            except (SystemExit, OutOfMemory) as end:
                tries.append({"batch": batch, "failed": str(end)})
                print(f"{name}, batch {batch}: {end}", file=sys.stderr)
                break
            tries.append(tried(batch, row))
    return found


def outside_the_lab(*, quick: bool) -> list[tuple[str, str]]:
    """Return what is trained outside the lab, for each seed: subject and freezing."""
    if quick:
        return [("vit", UNFROZEN), ("vit", CLAIMED)]
    return [*(("vit", name) for name in (UNFROZEN, *FREEZING)), ("bert", UNFROZEN), ("bert", THIRD)]


def accuracies(
    rows: list[tuple[str, str]], seeds: Sequence[int], base: dict[str, dict[str, Any]], folder: Path
) -> dict[str, dict[str, list[float]]]:
    """Train outside the lab with the same freezing, two runs at once; returns the last accuracy for each seed."""
    asked = [(subject, name, _apart(base[subject]) | {"seed": seed} | _freezing(name))
             for seed in seeds for subject, name in rows]  # fmt: skip

    def run(number: int) -> float:
        subject, name, settings = asked[number]
        file = folder / f"accuracy-{subject}-{name.translate(_AS_FILE)}-{settings['seed']}.json"
        written = file.with_suffix(".0.json")
        if not written.exists() or file.read_text() != json.dumps(settings):  # a run that was cut short goes on
            written.unlink(missing_ok=True)
            file.write_text(json.dumps(settings))
            train_apart(file)
        found: float = json.loads(written.read_text())["accuracy"][-1]
        print(f"{subject}, {name}, seed {settings['seed']}: {found:.2%}", file=sys.stderr)
        return found

    def train_apart(file: Path) -> None:
        env = {**os.environ, "PYTHONPATH": f"{ROOT}/src:{ROOT}", "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, "-m", "benchmarks.elastic.session", str(file)], env=env, check=True)

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(run, range(len(asked))))
    result: dict[str, dict[str, list[float]]] = {}
    for (subject, name, _), accuracy in zip(asked, found, strict=True):
        result.setdefault(subject, {}).setdefault(name, []).append(accuracy)
    return result


def _apart(base: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a training in one process, on all rows: in the lab they would change no ratio."""
    kept = {key: value for key, value in base.items() if key not in {"profile", "cluster", "rows"}}
    return kept | {"stages": 1, "microbatches": 1, "validate": "end"}


def _freezing(name: str) -> dict[str, Any]:
    return {} if name == UNFROZEN else {"elastic": {"freeze": FREEZING[name], "pack": False, "replicate": False}}


def migration() -> list[dict[str, Any]]:
    """Move DeiT-S with AdamW's state between arrangements of four hosts; returns each move as the slowest saw it."""
    moves = {"moves": [[1, 4], [4, 1], [2, 2], [1, 4]]}
    written = run_session(lab_text(LAB, [CPU] * HOSTS), "benchmarks.elastic.migration", moves, "migration")
    found = [max(each, key=lambda move: float(move["seconds"])) for each in zip(*written.values(), strict=True)]
    for move in found:
        print(
            f"DeiT-S to {move['stages']} stages x {move['replicas']}: {move['seconds']:.2f} s, "
            f"{move['moved_bytes'] / 1e6:.0f} MB of at least {move['least_bytes'] / 1e6:.0f}",
            file=sys.stderr,
        )
    return found


def summarize(result: dict[str, Any]) -> dict[str, Any]:
    """Return the figures that count, of the freezing that is claimed; None for what was not run."""
    lab, accuracy, elastic = result["lab"], result["accuracy"].get("vit", {}), f"elastic, {CLAIMED}"

    def faster(baseline: str) -> float | None:
        if baseline not in lab or elastic not in lab:
            return None
        return float(sum(lab[baseline]["seconds"]) / sum(lab[elastic]["seconds"]))

    drop = None
    if UNFROZEN in accuracy and CLAIMED in accuracy:
        drop = statistics.mean(accuracy[UNFROZEN]) - statistics.mean(accuracy[CLAIMED])
    moves = [move["seconds"] for move in result["migration"]]
    return {"freezing": CLAIMED, "speedup": faster(PIPELINE), "speedup_over_best_static": faster(STATIC),
            "accuracy_drop": drop, "migrate_s": max(moves) if moves else None}  # fmt: skip


if __name__ == "__main__":
    main()
