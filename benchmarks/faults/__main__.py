"""Random faults in long streams: `python -m benchmarks.faults --json FILE`; see the README beside this file."""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.faults.stream import KINDS, Stream, streaming
from benchmarks.labs import lab_text
from benchmarks.ssh_hosts import SshLab, ssh_lab
from benchmarks.training.__main__ import environment
from penstock.cluster.lab import parse_lab, take_down
from penstock.cluster.ssh.prepare import push
from penstock.cluster.ssh.remote import hosts_of
from penstock.group.launcher import module_command
from penstock.spec.cluster import read_cluster
from penstock.transport.curve import make_key

LAB, HOSTS, CPU = "faults", 4, 0.35
MODEL = "timm:vit_tiny_patch16_224,img_size=64,patch_size=8,depth=12,num_classes=10"
LARGER, DEIT = "timm:deit_tiny_patch16_224", "timm:deit_small_patch16_224"
NUM_FAULTS, PER_STREAM, SEED = 200, 40, 0
STREAM_IMAGES, FIRST_IMAGES, STEADY_IMAGES, SECURED_IMAGES = 12000, 1500, 900, 300
_PAIRS = 3
_TURNS = 3
_KEY = make_key()  # as penstock hosts run makes one for each run
_STREAM_S = 900.0  # of one stream with all its faults: longer is a hang


def main() -> None:
    """Run the rows, and write them with a summary."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults")
    parser.add_argument("--json", type=Path, required=True, help="every row and the summary")
    parser.add_argument("--faults", type=int, default=NUM_FAULTS, help="how many in all")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--turns", type=int, default=_TURNS, help="of the rows of throughput")
    parser.add_argument("--quick", action="store_true", help="20 faults, one lost first host, fewer images")
    parser.add_argument("--only", action="append", help="only rows whose name has this in it; may be repeated")
    parser.add_argument("--log", type=Path, default=Path("faults.log"), help="what the hosts write")
    given = parser.parse_args()
    take_down(LAB)
    result: dict[str, Any] = {"environment": environment(), "faults": [], "streams": [], "first": [], "steady": {}}
    if given.json.exists() and given.only:  # goes on: streams that are there are not run again
        result |= json.loads(given.json.read_text())

    def wanted(name: str) -> bool:
        return not given.only or any(part in name for part in given.only)

    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        images = make_images(folder / "images", STREAM_IMAGES)
        reference = folder / "reference.csv"
        (folder / "ssh").mkdir()
        spec = parse_lab(lab_text(LAB, [CPU] * HOSTS, memory="1 GiB"))
        with ssh_lab(spec, folder / "ssh") as lab:
            push(hosts_of(read_cluster(lab.cluster)), install=False)
            if wanted("faults") or wanted("first"):
                subprocess.run(
                    module_command(
                        "penstock", *infer(MODEL, images, reference), "--stages", "1", "--threads", "1",
                        "--on-loss", "stop", *([] if wanted("faults") else ["--num-images", str(FIRST_IMAGES)]),
                    ), check=True,
                )  # fmt: skip
            if wanted("faults"):
                number, total = len(result["streams"]), 20 if given.quick else given.faults
                while len(result["faults"]) < total:
                    many = min(PER_STREAM, total - len(result["faults"]))
                    stream_with_faults(lab, images, reference, folder, result, given.seed + number, many, given.log)
                    number += 1
                    write(given.json, result)
            if wanted("first"):
                result["first"] = [
                    lose_the_first(lab, images, reference, folder, given.seed + index, given.log)
                    for index in range(1 if given.quick else 5)
                ]
                write(given.json, result)
            if wanted("steady"):
                result["steady"] = steady(
                    lab, folder, given.log, 300 if given.quick else STEADY_IMAGES, 1 if given.quick else given.turns
                )
                write(given.json, result)
            if wanted("secured"):
                result["secured"] = secured(lab, folder, given.log, 100 if given.quick else SECURED_IMAGES)
        write(given.json, result)
    print(json.dumps(result["summary"], indent=2))


def infer(model: str, images: Path, rows: Path) -> list[str]:
    """Return the verb that writes a row for every image."""
    return ["infer", model, "--images", str(images), "-o", str(rows)]


def make_images(folder: Path, count: int, size: int = 64) -> Path:
    """Write images of noise, each another one."""
    folder.mkdir(parents=True)
    for index in range(count):
        pixels = random.Random(index).randbytes(size // 8 * size // 8 * 3)
        Image.frombytes("RGB", (size // 8, size // 8), pixels).resize((size, size)).save(folder / f"{index:05}.png")
    return folder


def stream_with_faults(
    lab: SshLab, images: Path, reference: Path, folder: Path, result: dict[str, Any], seed: int, many: int, log: Path
) -> None:
    """Stream all images with faults one after the other, and hold what was written against one process's rows."""
    draw, rows = random.Random(seed), folder / f"rows-{seed}.csv"
    hung = False
    with streaming(lab, infer(MODEL, images, rows), rows, log, key=_KEY) as stream:
        if not stream.wait_for_rows(1, 120.0):
            sys.exit(f"faults: no result came; see {log}")
        done = 0
        began_s = time.monotonic()
        while done < many and not stream.ended and not hung:
            stream.wait_for_rows(draw.randint(1, 60), 30.0)
            if stream.ended:
                break
            if len(stream.members) == 1:  # nobody is there to be lost
                time.sleep(1.0)
                continue
            fault = stream.break_(draw)
            hung |= fault.hung
            result["faults"].append(asdict(fault) | {"seed": seed})
            print(f"seed {seed}: {fault}", file=sys.stderr)
            done += 1
            stream.rejoin()
            settle_s = time.monotonic() + draw.choice([0.0, 5.0])
            while time.monotonic() < settle_s and not stream.ended:
                stream.look()
                time.sleep(0.05)
        stream.rejoin()
        while not stream.ended and not hung:
            stream.look()
            time.sleep(0.1)
            hung |= time.monotonic() - began_s > _STREAM_S
        status = stream.run.exit_codes[lab.lab.spec.hosts[0].name]
    result["streams"].append(compared(rows, reference) | {"seed": seed, "status": status, "hung": hung})
    print(f"seed {seed}: {result['streams'][-1]}", file=sys.stderr)


def compared(rows: Path, reference: Path, count: int = STREAM_IMAGES) -> dict[str, Any]:
    """Count what is missing, twice, out of order or different from the first rows of one process."""
    found, expected = (path.read_text().splitlines()[1:] for path in (rows, reference))
    expected = expected[:count]
    names = [line.partition(",")[0] for line in found]
    wanted = [line.partition(",")[0] for line in expected]
    return {
        "results": len(found),
        "lost": len(set(wanted) - set(names)),
        "duplicated": len(names) - len(set(names)),
        "out_of_order": names != sorted(names),
        "different": sum(one != other for one, other in zip(found, expected, strict=False)),
    }


def lose_the_first(lab: SshLab, images: Path, reference: Path, folder: Path, seed: int, log: Path) -> dict[str, Any]:
    """Kill the first host's process somewhere in the stream, and go on from what is there."""
    rows = folder / f"first-{seed}.csv"
    words = [*infer(MODEL, images, rows), "--num-images", str(FIRST_IMAGES)]
    with streaming(lab, words, rows, log, key=_KEY) as stream:
        stream.wait_for_rows(random.Random(seed).randint(1, 400), 120.0)
        stream.kill(lab.lab.spec.hosts[0].name)
    kept = stream.look()
    with streaming(lab, [*words, "--resume"], rows, log, key=_KEY) as stream:
        while not stream.ended:
            time.sleep(0.2)
    found = compared(rows, reference, FIRST_IMAGES) | {"kept": kept, "seed": seed}
    print(f"first host lost: {found}", file=sys.stderr)
    return found


def steady(lab: SshLab, folder: Path, log: Path, count: int, turns: int) -> dict[str, list[float]]:
    """Measure steady throughput in turns: on three hosts, after one was lost, on all, after one slowed to a third."""
    images = make_images(folder / "larger", count, 224)
    names = [host.name for host in lab.lab.spec.hosts]
    lost, slowed = names[2], names[2]

    def slow(stream: Stream) -> None:
        stream.lab.slow(slowed, cpu=CPU / 3)

    found: dict[str, list[float]] = {"three": [], "after_a_loss": [], "all": [], "after_slowing": []}
    others = [name for name in names if name != lost]
    for turn in range(turns):
        for name, own in found.items():
            rows = folder / f"{name}-{turn}.csv"
            change = {"after_a_loss": lambda stream: stream.kill(lost), "after_slowing": slow}.get(name)
            own.append(rate(lab, images, rows, log, change, on=others if name == "three" else None))
            lab.lab.slow(slowed, cpu=CPU)
    return found


def secured(lab: SshLab, folder: Path, log: Path, count: int) -> dict[str, list[float]]:
    """Measure DeiT-S without and with a key, in turns."""
    images = make_images(folder / "deit", count, 224)
    found: dict[str, list[float]] = {"plain": [], "secured": []}
    for number in range(_PAIRS):
        for name, own in (("plain", b""), ("secured", _KEY)):
            rows = folder / f"{name}-{number}.csv"
            found[name].append(rate(lab, images, rows, log, key=own, model=DEIT))
    return found


def rate(
    lab: SshLab, images: Path, rows: Path, log: Path, change: Callable[[Stream], object] | None = None,
    on: list[str] | None = None, key: bytes = _KEY, model: str = LARGER,
) -> float:  # fmt: skip
    """Return the images per second of the second half of a stream; the change comes after its first sixth."""
    total = len(list(images.iterdir()))
    with streaming(lab, infer(model, images, rows), rows, log, on=on, key=key) as stream:
        stream.wait_for_rows(total // 6, 300.0)
        if change is not None:
            change(stream)
        while not stream.ended:
            stream.look()
            time.sleep(0.02)
        half = stream.arrivals[total // 2 : -10]
    found = (len(half) - 1) / (half[-1] - half[0])
    print(f"{rows.stem}: {found:.2f} images/s", file=sys.stderr)
    return found


def summarize(result: dict[str, Any]) -> dict[str, Any]:
    """Return the figures that are held against the aims; None where the rows were not run."""
    faults, streams, first, rates = result["faults"], result["streams"], result["first"], result["steady"]
    keyed = result.get("secured")
    counted = [*streams, *first]
    gaps = [fault["gap_s"] for fault in faults]
    by_kind = {
        kind: statistics.median(own)
        for kind in KINDS
        if (own := [fault["gap_s"] for fault in faults if fault["kind"] == kind])
    }
    return {
        "faults": len(faults) + len(first) or None,
        "lost": sum(each["lost"] for each in counted) if counted else None,
        "duplicated": sum(each["duplicated"] for each in counted) if counted else None,
        "different": sum(each["different"] for each in counted) if counted else None,
        "hangs": sum(fault["hung"] for fault in faults) + sum(each["hung"] for each in streams) if faults else None,
        "median_gap_s": statistics.median(gaps) if gaps else None,
        "worst_gap_s": max(gaps) if gaps else None,
        "median_gap_by_kind_s": by_kind,
        "degraded_efficiency": statistics.median(rates["after_a_loss"]) / statistics.median(rates["three"])
        if rates
        else None,
        # three hosts and a third of one
        "slowed_efficiency": statistics.median(rates["after_slowing"])
        / (statistics.median(rates["all"]) * (3 + 1 / 3) / 4)
        if rates
        else None,
        # by how much throughput is less behind a key
        "secure_cost": 1 - statistics.median(keyed["secured"]) / statistics.median(keyed["plain"]) if keyed else None,
    }


def write(path: Path, result: dict[str, Any]) -> None:
    """Write all rows so far."""
    result["summary"] = summarize(result)
    path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
