"""The version of penstock, which processes of a run compare when they join."""

__version__ = "0.1.0.dev0"
