"""The notebook runs from its first cell to its last."""

from pathlib import Path

import nbformat
from nbclient import NotebookClient

from tests.processes import ROOT

NOTEBOOK = ROOT / "docs" / "guides" / "first-steps.ipynb"


def test_the_notebook_runs(tmp_path: Path) -> None:
    notebook = nbformat.reads(NOTEBOOK.read_text(), as_version=4)  # type: ignore[no-untyped-call]
    assert all(not cell.get("outputs") for cell in notebook.cells), "commit it without outputs"
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = (output for cell in notebook.cells for output in cell.get("outputs", []))
    printed = "".join(output["text"] for output in outputs if output.get("name") == "stdout")
    assert printed.count("equal: True") == 2
    assert "stage 1: computed" in printed
    assert (tmp_path / "first-steps" / "report.html").exists()
