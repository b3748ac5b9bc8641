"""Examples in docstrings that say what comes out give that."""

import json

from tests.processes import PROGRAMS, run_python


def test_docstring_examples_hold() -> None:
    done = run_python(str(PROGRAMS / "docstring_examples.py"), deadline_s=120.0)
    attempted, failed = json.loads(done.stdout.splitlines()[-1])
    assert failed == [], done.stdout
    assert attempted > 100
