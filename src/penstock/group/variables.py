"""Environment variables by which a process is told of its run; torch is not needed to know them."""

KEY = "PENSTOCK_KEY"  # the path of the run's key
JOIN = "PENSTOCK_JOIN"  # the host and port of a training that is under way, which this process joins
TRUSTED = "PENSTOCK_TRUSTED"  # the network is: nothing is said of a run without a key
