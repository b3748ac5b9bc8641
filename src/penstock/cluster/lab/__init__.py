"""An emulated cluster on one Linux machine: hosts with their own CPU share, memory and network."""

from penstock.cluster.lab.lab import DEFAULT_PORT, HostStatus, Lab, LabStatus, lab_session, take_down
from penstock.cluster.lab.run import LabRun
from penstock.cluster.lab.spec import PRESETS, HostSpec, LabSpec, parse_lab, preset, read_lab, write_lab
from penstock.cluster.output import OutputLine, print_line

__all__ = [
    "DEFAULT_PORT", "PRESETS", "HostSpec", "HostStatus", "Lab", "LabRun", "LabSpec", "LabStatus", "OutputLine",
    "lab_session", "parse_lab", "preset", "print_line", "read_lab", "take_down", "write_lab",
]  # fmt: skip
