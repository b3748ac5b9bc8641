"""The largest batch that fits into memory, found by trying."""

from collections.abc import Callable

from penstock.errors import RunError
from penstock.recipes.settings import FitSettings
from penstock.recipes.several import Place, Row, run_row

_STEPS = 2  # the second one has the optimizer's state


def find_largest_batch(
    settings: FitSettings, place: Place, tell: Callable[[Row], None] = lambda _row: None
) -> tuple[int, list[Row]]:
    """Double the batch until it no longer fits, then halve the distance; returns the size and every try.

    Each try trains two steps in processes of its own. The answer is exact to a sixteenth of itself, and no
    more than the rows that there are.

    Raises `RunError` where a try fails for another reason than memory, or the smallest batch does not fit.
    """
    rows: list[Row] = []
    tried: list[int] = []  # how large batches really were
    smallest = (settings.replicas or 1) * (settings.microbatches or 1)

    def fits(size: int) -> bool:
        asked = settings.replace(
            batch_size=size, steps=_STEPS, validate=False, save=False, resume=False, num_rows=None,
            output=str(settings.folder / f"batch-{size}"),
        )  # fmt: skip
        row = run_row(f"batch {size}", asked, place)
        rows.append(row)
        tell(row)
        if row.failed is not None and not row.out_of_memory:
            raise RunError(f"a batch of {size} fails for another reason than memory: {row.failed}")
        if row.result is None:
            return False
        tried.append(max(epoch.batch_rows for epoch in row.result.epochs))
        peak = max(max(epoch.peak_memory_bytes) for epoch in row.result.epochs)
        return place.memory_bytes is None or peak <= place.memory_bytes

    if not fits(smallest):
        raise RunError(f"not even a batch of {smallest} fits; use more stages, or --checkpointing")
    good, bad = smallest, 2 * smallest
    while fits(bad):
        good, bad = bad, 2 * bad
        if tried[-1] < good:
            return tried[-1], rows
    while bad - good > max(1, good // 16):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good, rows
