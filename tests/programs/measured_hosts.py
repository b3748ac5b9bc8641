"""Measures the hosts of torchrun's processes, and prints the result as JSON."""

import json
from dataclasses import asdict

from penstock.group.entry import join_torchrun
from penstock.measure.hosts import measure_hosts

with join_torchrun(followed=True) as world:
    measured = measure_hosts(world, seconds=0.1)
if measured is not None:
    print("MEASURED", json.dumps(asdict(measured)), flush=True)
