"""A language model that does not fit one host of a lab: what the planner says of one and of four, and what they do."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.labs import lab_text
from penstock.plan.choose import make_plan
from penstock.spec.cluster import Cluster, Device
from penstock.spec.profile import read_profile

_CPU = 0.35
_MIB = 2**20
_PART = 0.75  # of the memory that one host would need
_LENGTH = 256


def fits(name: str, prompt: str, folder: Path) -> dict[str, Any]:
    """Profile on a host with room, plan for one and for four hosts with too little for the whole model, and run both.

    The answer of the four is compared with that of this machine in one stage.
    """
    profile, plan = folder / "profile.json", folder / "plan.json"
    roomy = _lab(folder, 1, 4096)
    words = ["profile", name, "--generate", "--rows", "1,4,8", "--max-length", _LENGTH, "-o", profile]
    _penstock(["lab", "run", roomy, "--", sys.executable, "-m", "penstock", *words], check=True)
    anything = Cluster(devices=(Device(name="one", speed=1.0, memory_bytes=2**50),))
    needs = make_plan(read_profile(profile), anything).prediction.devices[0].memory_bytes
    memory = int(_PART * needs / _MIB)
    one, four = (_lab(folder, hosts, memory) for hosts in (1, 4))
    refused = _penstock(["plan", profile, one])
    _penstock(["plan", profile, four, "-o", plan], check=True)
    ask = ["generate", name, "--prompt", prompt, "--max-new-tokens", 24]
    alone = _penstock([*ask, "--stages", 1, "--set", "slots=1", "--max-length", _LENGTH, "--cluster", one])
    together, here = folder / "together.json", folder / "here.json"
    _penstock([*ask, "--plan", plan, "--cluster", four, "--json", together], check=True)
    _penstock([*ask, "--stages", 1, "--set", "slots=8", "--max-length", _LENGTH, "--json", here], check=True)
    chosen = json.loads(plan.read_text())
    return {
        "needs_mib": round(needs / _MIB), "host_mib": memory, "refused": refused.stderr.strip(),
        "one_host": alone.stderr.strip().splitlines()[-1:], "one_host_status": alone.returncode,
        "stages": len(chosen["pipelines"][0]["stages"]), "generation": chosen["generation"],
        "equal": _texts(together) == _texts(here), "text": _texts(together),
    }  # fmt: skip


def _lab(folder: Path, hosts: int, memory: int) -> Path:
    file = folder / f"{hosts}x{memory}.toml"
    file.write_text(lab_text("fits", [_CPU] * hosts, memory=f"{memory} MiB"))
    return file


def _texts(file: Path) -> list[str]:
    return [row["text"] for row in json.loads(file.read_text())["rows"]]


def _penstock(words: Sequence[object], *, check: bool = False) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=check)
