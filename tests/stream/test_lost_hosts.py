"""A host of a lab is cut off, or loses its power: the others say so within ten seconds."""

import os
import sys
import time

import pytest

from penstock.cluster.lab import HostSpec, LabSpec, lab_session
from tests.cluster.labs import LAB_MARKS, Collected, until
from tests.processes import PROGRAMS, ROOT

pytestmark = LAB_MARKS


@pytest.mark.parametrize(("victim", "power_off"), [(0, False), (1, True)])
def test_lost_host_is_named(victim: int, power_off: bool) -> None:
    hosts = tuple(
        HostSpec(name=f"host{index}", cpu=0.5, memory_bytes=800 * 2**20, bandwidth_bytes_per_s=12_500_000.0)
        for index in range(3)
    )
    shown = Collected()
    with lab_session(LabSpec(name=f"l{os.getpid()}{victim}", hosts=hosts)) as lab:
        command = [sys.executable, str(PROGRAMS / "lost_hosts.py")]
        env = {"PYTHONPATH": f"{ROOT}/src:{ROOT}"}
        with lab.start(command, env=env, output=shown, end_together=False):
            until(lambda: "streaming" in shown.of("host0"), 90)
            lab.cut(f"host{victim}")
            cut_s = time.monotonic()
            if power_off:
                lab.kill(f"host{victim}")
            others = [host.name for index, host in enumerate(hosts) if index != victim]
            until(lambda: all(any("lost at" in line for line in shown.of(name)) for name in others), 30)
    for name in others:
        line = next(line for line in shown.of(name) if line.startswith("lost at"))
        at_s, message = float(line.split()[2].rstrip(":")), line.partition(": ")[2]
        assert at_s - cut_s < 12.0
        assert message.startswith(f"rank {victim} on host{victim} ")
