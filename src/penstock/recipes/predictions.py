"""Predictions on disk: one row per image or prompt, written when computed, and read again to resume."""

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from penstock.errors import RunError, UsageError
from penstock.files import LineFile, StandardOutput, is_stdout, record_of
from penstock.spec.fields import decode_json, read_bytes, write_json
from penstock.text import counted, guard_cell, note, unguard_cell

COLUMNS = ("image", "label", "prediction", "class", "confidence", "error")


class PredictionFile:
    """A file of predictions, CSV if named `.csv` and otherwise JSON lines, that grows by complete rows.

    `-` and /dev/stdout are standard output. The first row, or the end of the block without an error, replaces what the
    file held and writes `record` next to it; until then both are unchanged. The file is locked until it is closed.

    The first of `columns` identifies a row, and an earlier row has the `needed` ones or an error. `again` is the advice
    for resuming a file, `anew` for starting without it.

    Example:
        with PredictionFile(Path("predictions.csv")) as file:
            file.write({"image": "cat.jpg", "prediction": 281, "confidence": 0.9})
    """

    record: msgspec.Struct | None = None

    def __init__(
        self,
        path: Path,
        *,
        resume: bool = False,
        columns: Sequence[str] = COLUMNS,
        needed: Sequence[str] = ("image", "prediction"),
        again: str = "continue with --resume",
        anew: str = "leave --resume out",
    ) -> None:
        self.path, self.anew = path, anew
        self._columns, self._needed, self._again = columns, {*needed}, again
        self._is_csv, self._has_begun = _is_csv(path), False
        self.done: list[dict[str, Any]] = []
        try:
            self._file: LineFile = StandardOutput() if is_stdout(path) else LineFile(path)
        except BlockingIOError:
            raise UsageError(f"another run writes {path}; wait for its end, or choose another --output") from None
        except OSError as error:
            raise UsageError(f"{path} cannot be written ({error.strerror}); choose another --output") from None
        try:
            if resume and path.is_file() and not is_stdout(path):
                self.done, self._file.kept = self._complete_rows()
        except BaseException:
            self._file.close()
            raise
        self._num_rows = len(self.done)

    def write(self, row: dict[str, Any]) -> None:
        """Append a row and flush it to the operating system, so that a crash of this process does not lose it.

        Raises `RunError` if the disk has no space; earlier rows are kept.
        """
        self._begin()
        self._write_line(_csv_line(row, self._columns) if self._is_csv else json.dumps(row, ensure_ascii=False) + "\n")
        self._num_rows += 1

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> "PredictionFile":
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            if error is None:
                self._begin()
        finally:
            self.close()

    def _begin(self) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        self._file.begin()  # before the record, which would belong to the rows of another run
        if self.record is not None:
            write_json(record_of(self.path), self.record)
        if self._is_csv and not self.done:
            self._write_line(self._header())

    def _write_line(self, line: str) -> None:
        try:
            self._file.write(line)
        except OSError as error:
            self._file.close()
            if isinstance(error, BrokenPipeError):
                raise RunError(f"the reader of {self.path} ended after {counted(self._num_rows, 'row')}") from None
            raise RunError(
                f"{self.path} cannot be written any further ({error.strerror}); its "
                f"{counted(self._num_rows, 'row')} are kept: free space and {self._again}"
            ) from None

    def _complete_rows(self) -> tuple[list[dict[str, Any]], int]:
        """Return the rows of an earlier run and their bytes, without an incomplete last row."""
        try:
            rows, num_bytes = _complete_rows(self.path, is_csv=self._is_csv)
        except (ValueError, csv.Error, RecursionError) as error:
            raise UsageError(f"{self.path} is not a file of predictions ({error}); {self.anew}") from None
        if not all(isinstance(row, dict) and self._is_own(row) for row in rows):
            names = " and ".join(sorted(self._needed))
            raise UsageError(f"{self.path} is not a file of predictions (rows must have {names}); {self.anew}")
        # without a row only the record or the header shows that the bytes are the beginning of one
        data = b"" if rows or record_of(self.path).is_file() else self.path.read_bytes()
        if data and not (self._is_csv and data.startswith(self._header().encode())):
            raise UsageError(f"{self.path} is not a file of predictions (no complete row); {self.anew}")
        return rows, num_bytes if rows else 0

    def _is_own(self, row: dict[str, Any]) -> bool:
        return self._columns[0] in row and ("error" in row or self._needed <= row.keys())

    def _header(self) -> str:
        return _csv_line(dict(zip(self._columns, self._columns, strict=True)), self._columns)


class PredictionRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The run that wrote a prediction file, saved next to it as FILE.run.json and compared on `--resume`.

    `weights` is the fingerprint of the model's tensors, `runtimes` the runtimes of its stages. `num_images` is the
    number of rows of the finished file, which a resumed run may change. `top`, `logits` and `preprocess` are
    the options of these names.
    """

    format: Literal["penstock-predictions"] = "penstock-predictions"
    model: str
    weights: str
    images: str
    runtimes: list[str]
    num_images: int
    top: int = 0
    logits: bool = False
    preprocess: str = ""


def check_replaceable(path: Path) -> None:
    """Raise `UsageError` if a run without `--resume` would overwrite an unfinished file of predictions.

    Finished and other files may be replaced.
    """
    if not path.is_file() or is_stdout(path):
        return
    try:
        record = msgspec.json.decode(record_of(path).read_bytes(), type=PredictionRun)
        rows, _ = _complete_rows(path, is_csv=_is_csv(path))
    except (OSError, ValueError, csv.Error, msgspec.MsgspecError, RecursionError):
        return
    if 0 < len(rows) < record.num_images:
        raise UsageError(
            f"{path} already holds {len(rows)} of {record.num_images} predictions; continue with --resume, or "
            "choose another --output"
        )


def go_on_with(file: PredictionFile, run: msgspec.Struct) -> None:
    """Compare a run with the existing record of its prediction file, and have the file save its record.

    Raises `UsageError` naming the difference.
    """
    path = record_of(file.path)
    if not file.path.is_file() or is_stdout(file.path):
        return
    if file.done and path.exists():
        before = decode_json(
            read_bytes(path, "the record of a prediction file", UsageError), type(run), f"{path}", UsageError
        )
        for name in run.__struct_fields__:
            if name == "num_images":
                continue
            now, was = getattr(run, name), getattr(before, name)
            if now != was:
                raise UsageError(
                    f"{file.path} was written with the {name} {was}, not {now}; resume with the same {name}, or "
                    f"{file.anew}"
                )
    elif file.done:
        note(f"{path} is missing, so it is unknown which model wrote the {len(file.done)} rows of {file.path}")
    file.record = run


def _is_csv(path: Path) -> bool:
    return path.suffix.lower() == ".csv"


def _complete_rows(path: Path, *, is_csv: bool) -> tuple[list[Any], int]:
    """Return the complete rows of a file and their bytes; raises `ValueError` and `csv.Error` for anything else."""
    data = path.read_bytes()
    complete = data[: _end_of_rows(data, quoted=is_csv)]
    # split at line ends only: JSON and CSV rows may contain other characters at which `splitlines` splits
    lines = io.StringIO(complete.decode("utf-8", errors="surrogateescape"), newline="\n")
    if is_csv:
        return [_unguarded(row) for row in csv.DictReader(lines, strict=True)], len(complete)
    return [json.loads(line) for line in lines], len(complete)


def _end_of_rows(data: bytes, *, quoted: bool) -> int:
    """Find the end of the last complete row: a line end, in CSV outside of quotes."""
    end = data.rfind(b"\n") + 1
    while quoted and data[:end].count(b'"') % 2:
        end = data.rfind(b"\n", 0, end - 1) + 1
    return end


def _unguarded(row: dict[str, Any]) -> dict[str, Any]:
    return {key: unguard_cell(value) if isinstance(value, str) else value for key, value in row.items()}


def _csv_line(row: dict[str, Any], columns: Sequence[str]) -> str:
    buffer = io.StringIO()
    # image names must not be evaluated as formulas when the file is opened in a spreadsheet
    row = {key: guard_cell(value) if isinstance(value, str) else value for key, value in row.items()}
    texts = {key: json.dumps(value, ensure_ascii=False) for key, value in row.items() if isinstance(value, list)}
    # the writer quotes values that contain its line terminator, so use the longer terminator
    csv.DictWriter(buffer, columns, lineterminator="\r\n", restval="").writerow(row | texts)
    return buffer.getvalue().removesuffix("\r\n") + "\n"
