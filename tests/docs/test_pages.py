"""Pages begin with a command or a few lines of Python, and the Python that stands alone runs."""

import re
from pathlib import Path

import pytest

from penstock.cli import main as main_module
from tests.fewer import long
from tests.processes import ROOT, run_python

PAGES = sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_begins_with_a_command(page: Path) -> None:
    start = "\n".join(page.read_text().splitlines()[:14])
    assert re.search(r"^(```console\n|```python\n|    )\S|^`python -m", start, re.MULTILINE), start


def test_commands_name_verbs() -> None:
    for page in PAGES:
        for verb in re.findall(r"^\$ penstock (\w+)", page.read_text(), re.MULTILINE):
            assert verb in main_module._HELP, (page.name, verb)


@pytest.mark.parametrize("page", ["start", *map(long, ("api", "differences", "inference", "own-loop"))])
def test_python_blocks_of_pages_run(page: str, tmp_path: Path) -> None:
    (code, *_) = re.findall(r"```python\n(import .*?)```", (ROOT / "docs" / f"{page}.md").read_text(), re.DOTALL)
    done = run_python("-c", f"import os; os.chdir({str(tmp_path)!r})\n{code}", deadline_s=120.0)
    assert done.status == 0, done.stderr
