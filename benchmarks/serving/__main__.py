"""Run with `python -m benchmarks.serving --json FILE [--model hf:FOLDER] [--quick] [--only load|storm|odd]`.

The storm asks a small model with random weights. The load is on `--model`, a folder with a language model and its
tokenizer, and needs root: one and four hosts of a lab with 0.35 of a core each, and 1, 4, 16 and 64 clients outside of
them.
"""

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.serving.in_lab import ask, cpu_s, served
from benchmarks.serving.odd import odd
from benchmarks.serving.storm import storm
from penstock import Generator
from penstock.zoo.models.language import load_tokenizer
from penstock.zoo.models.models import load_model
from tests.generate.tokens import save_model

_TEXT = Path("../shared/data/tinyshakespeare.txt")
_WORDS = "A pipe that carries water to a turbine is a penstock , and the water that it carries turns the turbine ."


def main() -> None:
    """Measure, and write rows and summary."""
    parser = argparse.ArgumentParser(prog="benchmarks.serving", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where to write rows and summary")
    parser.add_argument("--model", help="hf:FOLDER, for the load; else the small one with random weights")
    parser.add_argument("--quick", action="store_true", help="500 requests of the storm; 1 and 16 clients")
    parser.add_argument("--faults", type=int, default=50, help="of processes during the storm")
    parser.add_argument("--only", choices=["load", "storm", "odd"], help="one part")
    given = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        small = Path(place) / "small"
        small.mkdir()
        save_model(small)
        if given.only in {None, "odd"}:
            found["odd"] = odd(small)
        if given.only in {None, "storm"}:
            found["storm"] = storm(small, 500 if given.quick else 10_000, 2 if given.quick else given.faults)
        if given.only in {None, "load"}:
            clients = (1, 16) if given.quick else (1, 4, 16, 64)
            model = given.model or f"hf:{small}"
            found["load"] = [row for hosts in (1, 4) for row in load(model, hosts, clients, Path(place))]
            found["lost_host"] = lost_host(model, Path(place))
            found["lanes"] = [lanes_alone(model, slots) for slots in (16, 4, 16, 4)]
    found["summary"] = summarize(found)
    given.json.write_text(json.dumps(found, indent=1) + "\n")
    for row in (*found.get("load", ()), *found.get("odd", ())):
        print(row)
    print(json.dumps(found["summary"]))


def summarize(found: dict[str, Any]) -> dict[str, Any]:
    """Count what the storm lost, and divide throughputs at 16 clients."""
    summary: dict[str, Any] = dict(found.get("storm", {}))
    rows = {(row["hosts"], row["clients"]): row for row in found.get("load", ())}
    if rows:
        summary["lanes_cpu_s"] = found["lanes"]
        summary["rps_4_over_1"] = round(rows[4, 16]["requests_per_s"] / rows[1, 16]["requests_per_s"], 3)
        summary["p99_gap_s"] = rows[4, 16]["gap_p99_s"]
        summary["clients"] = max(clients for _, clients in rows)
        summary["load_errors"] = sum(len(row["errors"]) for row in rows.values())
        summary["lost_host"] = found["lost_host"]
    return summary


def load(model: str, hosts: int, counts: tuple[int, ...], folder: Path) -> list[dict[str, Any]]:
    """Serve from so many hosts, with as many slots in all, and ask with so many clients."""
    rows = []
    with served(model, hosts, folder, "--set", f"slots={16 // hosts}", "--max-length", 256) as (lab, within):
        for clients in counts:
            before = cpu_s(lab)
            rows.append(measured(within, clients) | {"hosts": hosts})
            rows[-1]["cpu_s"] = [round(after - each, 2) for each, after in zip(before, cpu_s(lab), strict=True)]
            print(rows[-1], flush=True)
    return rows


def lanes_alone(model: str, slots: int) -> dict[str, Any]:
    """Answer the requests of 16 clients in this process, with 16 slots in all in lanes of so many."""
    loaded, tokenizer = load_model(model), load_tokenizer(model)
    bodies = requests(32)
    options: dict[str, Any] = {"stages": 1, "slots": slots, "lanes": 16 // slots, "max_length": 256}
    with Generator(loaded.module, tokenizer, weights=loaded.weights, **options) as generator:
        for _ in range(2):  # the first time also compiles and warms up
            begin_s = time.process_time()
            asked = [
                generator.submit(each["prompt"], max_new_tokens=each["max_tokens"], do_sample=False, eos_token_id=None)
                for each in bodies
            ]
            for request in asked:
                request.result()
            cpu_used_s = time.process_time() - begin_s
    return {"slots": slots, "cpu_s": round(cpu_used_s, 2)}


def lost_host(model: str, folder: Path) -> dict[str, Any]:
    """Serve 16 clients from four hosts, twice, the second time without the third host after a while.

    Returns how many answers failed or differ from those of the first time, and the longest time without any token.
    """
    bodies = requests(48)
    words = ("--set", "slots=4", "--max-length", 256)
    with served(model, 4, folder, *words, on_loss="continue") as (lab, within):
        whole = ask(within, bodies, 16)
        killer = threading.Timer(whole["seconds"] / 3, lab.kill, [lab.spec.hosts[2].name])
        killer.start()
        again = ask(within, bodies, 16)
        killer.join()
    wanted = [answer.get("text") for answer in whole["answers"]]
    found = [answer.get("text") for answer in again["answers"]]
    tokens_s = sorted(answer["asked_s"] + came for answer in again["answers"] for came in answer.get("came_s", ()))
    return {
        "requests": len(bodies),
        "errors": [answer["error"] for answer in again["answers"] if "error" in answer],
        "different": sum(a != b for a, b in zip(wanted, found, strict=True)),
        "seconds": [round(whole["seconds"], 1), round(again["seconds"], 1)],
        "gap_s": round(max(b - a for a, b in pairwise(tokens_s)), 2),
    }


def measured(within: list[str], clients: int) -> dict[str, Any]:
    """Ask with so many clients at a time, and return throughput and the moments of tokens."""
    bodies = requests(max(8, min(48, 2 * clients)))
    said = ask(within, bodies, clients)
    good = [answer for answer in said["answers"] if answer["status"] == 200]
    first = sorted(answer["came_s"][0] for answer in good)
    gaps = sorted(b - a for answer in good for a, b in pairwise(answer["came_s"]))
    return {
        "clients": clients, "requests": len(bodies), "seconds": round(said["seconds"], 1),
        "errors": [answer["error"] for answer in said["answers"] if "error" in answer],
        "requests_per_s": round(len(good) / said["seconds"], 4),
        "tokens_per_s": round(sum(len(answer["came_s"]) for answer in good) / said["seconds"], 2),
        "first_p50_s": round(statistics.median(first), 3), "first_p99_s": round(_part(first, 0.99), 3),
        "gap_p50_s": round(statistics.median(gaps), 3), "gap_p99_s": round(_part(gaps, 0.99), 3),
    }  # fmt: skip


def requests(number: int) -> list[dict[str, Any]]:
    """Make requests whose prompts are speeches, as long as these happen to be, and so are the answers."""
    choose = random.Random(0)
    text = _TEXT.read_text() if _TEXT.exists() else "\n\n".join(_WORDS[:size] for size in range(20, 100, 7))
    speeches = [part for part in text.split("\n\n") if 20 <= len(part) <= 400]
    return [
        {"prompt": choose.choice(speeches), "max_tokens": max(4, min(48, len(choose.choice(speeches)) // 5)),
         "temperature": 0, "ignore_eos": True}
        for _ in range(number)
    ]  # fmt: skip


def _part(values: list[float], part: float) -> float:
    return values[min(len(values) - 1, int(part * len(values)))]


if __name__ == "__main__":
    main()
