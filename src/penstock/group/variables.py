"""Environment variables by which a process is told of its run's key; torch is not needed to know them."""

KEY = "PENSTOCK_KEY"  # the path of the run's key
TRUSTED = "PENSTOCK_TRUSTED"  # the network is: nothing is said of a run without a key
