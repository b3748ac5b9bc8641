"""Everything that a run's folder gives: page, trace, tables, pictures."""

import os
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import UsageError
from penstock.report.account import Account, make_account
from penstock.report.advice import advise
from penstock.report.chrome import write_chrome_trace
from penstock.report.figures import loads, memory, throughput, timeline, waterfall
from penstock.report.measured import measure_stream
from penstock.report.page import make_page
from penstock.report.pictures import draw_pictures
from penstock.report.tables import all_tables, markdown
from penstock.tracing.trace import Run, read_run


@dataclass(frozen=True, slots=True)
class Report:
    """What was written, and the account."""

    account: Account
    lead: tuple[str, ...]
    advice: tuple[str, ...]
    files: tuple[Path, ...]


def write_report(folder: str | os.PathLike[str], *, pictures: bool = True) -> Report:
    """Read a run's folder and write its report into it.

    Leaves `report.html`, `trace.json` for Perfetto, `tables.md`, a CSV file for each table, and pictures.

    Example:
        write_report("runs/one").account.speedup

    Raises `DataError` for a folder that holds no whole run, `UsageError` where something is not installed.
    """
    place = Path(folder)
    run = read_run(place)
    stream = measure_stream(run)
    account = make_account(run, stream)
    lead, advice = lead_lines(run, account), advise(run, stream, account)
    tables = all_tables(run, stream, account)
    by_key = {table.key: table for table in tables}
    figures = [waterfall(account, by_key["account"]), timeline(run, stream), loads(run, stream, by_key["stages"]),
               throughput(run)]  # fmt: skip
    remembered = memory(run)
    figures += [remembered] if remembered else []
    others = [table for table in tables if table.key not in {"account", "stages"}]
    files = [place / "report.html", place / "trace.json", place / "tables.md"]
    page = make_page(f"{run.facts.model} in {len(run.facts.ranks)} stages", lead, figures, others, advice)
    try:
        files[0].write_text(page, encoding="utf-8")
        write_chrome_trace(run, files[1])
        files[2].write_text(markdown(tables), encoding="utf-8")
        for table in tables:
            files.append(place / f"{table.key}.csv")
            files[-1].write_text(table.csv(), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{place} cannot be written ({error.strerror}); copy the run to another folder") from None
    files += draw_pictures(place, stream, account) if pictures else []
    return Report(account, tuple(lead), tuple(advice), tuple(files))


def lead_lines(run: Run, account: Account) -> list[str]:
    """Say in two sentences what the run reached and what it lost most to."""
    facts = run.facts
    rate = facts.num_rows / facts.total_s
    first = (
        f"{facts.num_rows} rows in {facts.total_s:.2f} s, {rate:.4g} rows/s: {account.speedup:.2f} times one device, "
        f"of {account.num_times:.2f}."
    )
    return [first, f"Most is lost to {account.largest.title} ({account.largest.times:.2f}): {account.largest.why}."]
