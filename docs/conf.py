"""Sphinx configuration; `make docs` builds with warnings as errors."""

from typing import Any

from penstock.version import __version__

project = "Penstock"
author = "Penstock's developers"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = f"Penstock {version}"
# pages link to benchmarks' figures and to SECURITY.md, so the source is the whole repository
root_doc = "docs/index"
include_patterns = [
    "docs/*.md",
    "docs/guides/*.md",
    "benchmarks/*/README.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "CONTRIBUTING.md",
]
myst_heading_anchors = 4
# `name` in docstrings is code
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
# an argument in each line
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
html_show_copyright = False
napoleon_custom_sections = [("Arguments of training", "params_style")]


def _examples_are_code(_app: Any, _kind: str, _name: str, _of: Any, _options: Any, lines: list[str]) -> None:
    """Show what follows `Example:` in a docstring as code."""
    for index in reversed([index for index, line in enumerate(lines) if line.strip() == "Example:"]):
        lines[index : index + 1] = [lines[index].replace("Example:", "Example::"), ""]


def setup(app: Any) -> None:
    """Register the docstring filter with a priority before napoleon's."""
    app.connect("autodoc-process-docstring", _examples_are_code, priority=400)
