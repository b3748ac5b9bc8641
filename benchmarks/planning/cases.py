"""The cases that are measured in the lab: listed here before they are run.

A row of a case has `case` "prediction", what was varied, and throughputs `predicted` and `measured`; a row may
also carry figures of the summary by name in `summary`, such as `uneven_efficiency`.
"""

from typing import Any


def lab_rows(*, quick: bool) -> list[dict[str, Any]]:
    """Measure the cases and give their rows; there are none yet."""
    del quick
    return []
