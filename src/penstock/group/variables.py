"""Environment variables that describe a process's run; importable without torch."""

KEY = "PENSTOCK_KEY"  # the path of the run's key
JOIN = "PENSTOCK_JOIN"  # the host and port of the training run that this process joins
TRUSTED = "PENSTOCK_TRUSTED"  # the network is trusted: no note about a run without a key
