"""Labs that benchmarks measure in: put up, a session run on every host, taken down."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.cluster.lab import lab_session, parse_lab, read_lab
from penstock.cluster.output import OutputLine

ROOT = Path(__file__).parents[1]


def lab_text(name: str, shares: Sequence[float], *, bandwidth: str = "1 Gbit/s", memory: str = "3 GiB") -> str:
    """Write the file of a lab whose hosts have these shares of a core."""
    hosts = "".join(
        f'[[hosts]]\nname = "host{index}"\ncpu = {share}\nmemory = "{memory}"\n' for index, share in enumerate(shares)
    )
    return f'name = "{name}"\nbandwidth = "{bandwidth}"\n{hosts}'


def run_session(lab: str, module: str, given: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Run a module on every host of a lab, each with the path of a JSON file of what is given.

    Gives what the hosts wrote beside it, each file by what stands between `session.` and `.json`. Ends the
    benchmark with `name` and the reason where a host fails.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        file = Path(folder) / "session.json"
        file.write_text(json.dumps(given))
        command = [sys.executable, "-m", module, str(file)]
        env = {"PYTHONPATH": f"{ROOT}/src:{ROOT}"}
        with lab_session(parse_lab(lab)) as hosts, hosts.start(command, output=show, env=env) as started:
            started.wait()
        if started.first_failure:
            sys.exit(f"{name}: {started.first_failure}")
        return {
            each.stem.partition(".")[2]: json.loads(each.read_text()) for each in Path(folder).glob("session.*.json")
        }


def generate(lab: Path, model: str, prompts: Sequence[str], *options: object) -> dict[str, Any]:
    """Run `penstock generate` on the hosts of a lab, and return what it writes with `--json`."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder, lab_session(read_lab(lab)):
        file, output = Path(folder) / "prompts.txt", Path(folder) / "output.json"
        file.write_text("\n".join(prompts))
        words = ["generate", model, "--file", file, "--cluster", lab, "--json", output, *options]
        subprocess.run([sys.executable, "-m", "penstock", *map(str, words)], check=True)
        said: dict[str, Any] = json.loads(output.read_text())
        return said


def show(line: OutputLine) -> None:
    """Print progress and whatever went wrong, without torch's remark on host names in a lab."""
    if "hostname of the client socket" not in line.text:
        print(f"{line.host} | {line.text}", file=sys.stderr)
