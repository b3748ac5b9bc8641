"""The version of penstock, which processes of a run compare when they join, and its lowest version of PyTorch."""

__version__ = "0.1.0"
LOWEST_TORCH = "2.10"  # the same as in pyproject.toml
