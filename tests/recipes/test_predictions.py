"""Rows on disk, and going on after a run that was killed."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import UsageError
from penstock.recipes.predictions import COLUMNS, PredictionFile, PredictionRun, check_replaceable, go_on_with

NAMES = [
    "cat.jpg", 'a "quoted", name.jpg', "two\nlines.jpg", "carriage\rreturn.jpg", "dos\r\nlines.jpg",
    "line\u2028separator \x85.jpg", "ünï.jpg", b"not \xff text.jpg".decode(errors="surrogateescape"), '"', "",
    "=cmd|' /C calc'!A0.jpg", "'=cmd.jpg", "''-1.jpg", "'plain.jpg", "@sum.jpg", "\ttab.jpg",
]  # fmt: skip
ROWS: list[dict[str, Any]] = [{"image": name, "prediction": index} for index, name in enumerate(NAMES)]


def write(path: Path, rows: list[dict[str, Any]], *, resume: bool = False) -> list[dict[str, Any]]:
    with PredictionFile(path, resume=resume) as file:
        for row in rows:
            file.write(row)
        return file.done


@pytest.mark.parametrize("name", ["out.csv", "out.jsonl"])
def test_run_can_be_killed_at_any_write(tmp_path: Path, name: str) -> None:
    """Cut the file after every single byte, resume, write what is missing: it is the uninterrupted file."""
    whole = tmp_path / name
    write(whole, ROWS)
    data = whole.read_bytes()
    path = tmp_path / f"cut.{name}"
    for kept in range(len(data) + 1):
        path.write_bytes(data[:kept])
        (tmp_path / f"cut.{name}.run.json").touch()
        with PredictionFile(path, resume=True) as file:
            done = [row["image"] for row in file.done]
            assert done == NAMES[: len(done)], kept
            for row in ROWS[len(done) :]:
                file.write(row)
        assert path.read_bytes() == data, kept


@pytest.mark.parametrize("name", ["out.csv", "out.jsonl"])
def test_each_row_is_on_disk_when_written(tmp_path: Path, name: str) -> None:
    """Each row is in the file as soon as `write` returns."""
    path = tmp_path / name
    with PredictionFile(path) as file:
        for count, row in enumerate(ROWS, 1):
            file.write(row)
            (tmp_path / f"seen.{name}").write_bytes(path.read_bytes())
            with PredictionFile(tmp_path / f"seen.{name}", resume=True) as reader:
                assert len(reader.done) == count


def test_predictions_start_again_without_resume(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write(path, ROWS)
    assert write(path, ROWS[:1]) == []
    assert json.loads(path.read_text()) == ROWS[0]


def test_columns_have_a_fixed_order(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    write(path, [{"image": "a", "label": 1, "prediction": 2, "class": "x", "confidence": 0.5}])
    assert path.read_text() == f"{','.join(COLUMNS)}\na,1,2,x,0.5,\n"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("out.jsonl", "hello\n"), ("out.jsonl", "[1]\n"), ("out.jsonl", '{"a": 1}\n'), ("out.csv", "a,b\n1,2\n"),
        ("out.jsonl", ""), ("out.jsonl", '{"image": "a.jpg"}\n'), ("out.csv", ""), ("out.csv", "image,label\n"),
        ("out.jsonl", "[" * 100_000 + "\n"),
    ],
)  # fmt: skip
def test_another_file_is_left_as_it_is(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text + "half")
    with pytest.raises(UsageError, match="is not a file of predictions"):
        PredictionFile(path, resume=True)
    assert path.read_text() == text + "half"


def test_unwritable_output_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        PredictionFile(tmp_path / "no folder" / "out.csv")


def _fail_before_a_row(file: PredictionFile) -> None:
    go_on_with(file, PredictionRun(model="m", weights="w", images="i", runtimes=[], num_images=9))
    raise UsageError("wrong cut")


@pytest.mark.parametrize("name", ["out.csv", "out.jsonl"])
def test_a_run_that_ends_before_its_first_row_changes_nothing(tmp_path: Path, name: str) -> None:
    path, record = tmp_path / name, tmp_path / f"{name}.run.json"
    for old in (None, "an older file"):
        if old:
            path.write_text(old)
            record.write_text(old)
        with pytest.raises(UsageError, match="wrong cut"), PredictionFile(path) as file:
            _fail_before_a_row(file)
        assert [each.read_text() for each in (path, record) if each.exists()] == [old, old] * bool(old)
    with PredictionFile(path) as file:
        go_on_with(file, PredictionRun(model="m", weights="w", images="i", runtimes=[], num_images=9))
    assert path.read_text() == (f"{','.join(COLUMNS)}\n" if name.endswith("csv") else "")
    assert "penstock-predictions" in record.read_text()


def test_one_run_at_a_time_writes_a_file(tmp_path: Path) -> None:
    path, link = tmp_path / "out.jsonl", tmp_path / "link.jsonl"
    link.symlink_to(path)
    with PredictionFile(path) as file:
        for name in (path, link):
            with pytest.raises(UsageError, match="another run"):
                PredictionFile(name, resume=True)
        file.write(ROWS[0])
    assert len(write(path, [], resume=True)) == 1


def test_names_are_not_spreadsheet_formulas(tmp_path: Path) -> None:
    write(tmp_path / "out.csv", [*ROWS, {"image": "a.jpg", "class": "=1+1", "error": "+1", "confidence": 0.5}])
    with (tmp_path / "out.csv").open(newline="", encoding="utf-8", errors="surrogateescape") as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    assert not [cell for cell in cells if cell.startswith(("=", "+", "-", "@", "\t", "\r"))]


def test_earlier_rows_are_recognized_on_resume(tmp_path: Path) -> None:
    (tmp_path / "out.csv").write_text("image,label,prediction,class,confidence,error\n=x.jpg,,1,,,\n")
    assert [row["image"] for row in write(tmp_path / "out.csv", [], resume=True)] == ["=x.jpg"]


@pytest.mark.parametrize("name", ["-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_standard_output_has_rows_only(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with PredictionFile(Path(name)) as file:
        file.write({"image": "a"})
        check_replaceable(file.path)
        go_on_with(file, PredictionRun(model="m", weights="w", images="i", runtimes=[], num_images=9))
    with PredictionFile(Path(name)) as file:
        file.write({"image": "b"})
    assert [json.loads(line)["image"] for line in capsys.readouterr().out.splitlines()] == ["a", "b"]
    assert not list(tmp_path.iterdir())
    assert not Path(f"{name}.run.json").exists()
