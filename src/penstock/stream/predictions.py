"""Predictions on disk: one row per image, written as it comes, and found again to go on from."""

import csv
import io
import json
from pathlib import Path
from types import TracebackType
from typing import Any

from penstock.errors import UsageError

COLUMNS = ("image", "label", "prediction", "class", "confidence", "error")


class PredictionFile:
    """A CSV (`.csv`) or JSON-lines (anything else) file that grows by one complete row at a time.

    Example:
        with PredictionFile(Path("predictions.csv")) as file:
            file.write({"image": "cat.jpg", "prediction": 281, "confidence": 0.9})
    """

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        self.path = path
        self._is_csv = path.suffix.lower() == ".csv"
        self.done: list[dict[str, Any]] = []
        try:
            if resume and path.exists():
                self.done = self._keep_complete_rows()
            self._file = path.open("a" if self.done else "w", encoding="utf-8", newline="")
        except OSError as error:
            raise UsageError(f"{path} cannot be written ({error.strerror}); choose another --output") from None
        if self._is_csv and not self.done:
            self._write_line(_csv_line(dict(zip(COLUMNS, COLUMNS, strict=True))))

    def write(self, row: dict[str, Any]) -> None:
        """Append a row and hand it to the operating system, so that a crash later on loses nothing."""
        self._write_line(_csv_line(row) if self._is_csv else json.dumps(row, ensure_ascii=False) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> "PredictionFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _write_line(self, line: str) -> None:
        self._file.write(line)
        self._file.flush()

    def _keep_complete_rows(self) -> list[dict[str, Any]]:
        """Read the rows of an earlier run; a last line without its end was being written and is dropped."""
        data = self.path.read_bytes()
        complete = data[: data.rfind(b"\n") + 1]
        if complete != data:
            self.path.write_bytes(complete)
        text = complete.decode("utf-8")
        try:
            if self._is_csv:
                return list(csv.DictReader(io.StringIO(text)))
            return [json.loads(line) for line in text.splitlines()]
        except ValueError as error:
            raise UsageError(f"{self.path} is not a file of predictions ({error}); leave --resume out") from None


def _csv_line(row: dict[str, Any]) -> str:
    buffer = io.StringIO()
    csv.DictWriter(buffer, COLUMNS, lineterminator="\n", restval="").writerow(row)
    return buffer.getvalue()
