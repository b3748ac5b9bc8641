"""Few files that may be open are one line, and the limit is raised where that is allowed."""

import resource

import pytest

from penstock.transport.open_files import raise_file_limit
from tests.processes import PROGRAMS, run_python

SCRIPT = str(PROGRAMS / "few_open_files.py")


@pytest.mark.parametrize("limit", [24, 32, 40, 52])
def test_too_few_files_are_one_line(limit: int) -> None:
    ended = run_python(SCRIPT, str(limit), str(limit), deadline_s=60)
    assert "Traceback" not in ended.stderr
    assert ended.stdout.startswith("RunError")
    assert str(limit) in ended.stdout


def test_the_soft_limit_is_raised() -> None:
    assert "3 outputs" in run_python(SCRIPT, "32", "4096", deadline_s=60).stdout


def test_a_higher_limit_stays() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise_file_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= before[0]
