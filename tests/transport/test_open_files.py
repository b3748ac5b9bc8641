"""Few files that may be open are one line, and the limit is raised where that is allowed."""

import resource

import pytest

from penstock.transport.open_files import raise_file_limit
from tests.processes import run_python

SCRIPT = """
import resource, sys
soft, hard = int(sys.argv[1]), int(sys.argv[2])
import torch, penstock
from penstock.errors import PenstockError
if __name__ == "__main__":
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(4)]).eval()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        with penstock.Pipeline(model, torch.ones(1, 4), stages=3) as pipe:
            print(len(list(pipe.stream([torch.ones(1, 4)] * 3))), "outputs")
    except PenstockError as error:
        print(type(error).__name__, error)
"""


@pytest.mark.parametrize("limit", [24, 32, 40, 52])
def test_too_few_files_are_one_line(limit: int) -> None:
    ended = run_python("-c", SCRIPT, str(limit), str(limit), deadline_s=60)
    assert "Traceback" not in ended.stderr
    assert ended.stdout.startswith("RunError")
    assert str(limit) in ended.stdout


def test_the_soft_limit_is_raised() -> None:
    assert "3 outputs" in run_python("-c", SCRIPT, "32", "4096", deadline_s=60).stdout


def test_a_higher_limit_stays() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise_file_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= before[0]
