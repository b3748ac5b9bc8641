"""Optional libraries."""

from tests.processes import run_python


def test_timm_does_not_import_wandb() -> None:
    """Its import makes a folder for temporary files, which stays if the process is killed."""
    code = (
        "import sys; from penstock.zoo.optional import optional_import; optional_import('timm', 'vision')\n"
        "import timm.utils; print('wandb' in sys.modules)"
    )
    assert run_python("-c", code, deadline_s=100).stdout.strip() == "False"
