"""torchrun with several nodes, and the script that starts it by hand on each machine, on the hosts of a lab."""

import os
import re
from pathlib import Path

import pytest

from penstock.cluster.lab import HostSpec, LabSpec, lab_session
from tests.cluster.labs import Collected
from tests.cluster.sshd import needs_root
from tests.processes import ROOT

pytestmark = needs_root
MODEL = "timm:vit_tiny_patch16_224,img_size=8,patch_size=2,depth=2,embed_dim=16,num_heads=2,in_chans=1,num_classes=10"


@pytest.mark.long
def test_the_script_on_two_nodes() -> None:
    hosts = tuple(
        HostSpec(name=f"node{index}", cpu=0.8, memory_bytes=1200 * 2**20, bandwidth_bytes_per_s=125_000_000.0)
        for index in range(2)
    )
    shown = Collected()
    run = f"exec {ROOT}/scripts/run.sh 2 1 $NODE_RANK $MASTER_ADDR {MODEL} --num-images 6 --passes 1"
    with lab_session(LabSpec(name=f"n{os.getpid()}", hosts=hosts)) as lab:
        command = ["env", "-u", "RANK", "-u", "WORLD_SIZE", "-u", "LOCAL_RANK", "bash", "-c", run]
        with lab.start(command, output=shown, env={"PYTHONPATH": f"{ROOT}/src"}) as started:
            codes = started.wait(150)
    assert codes == {"node0": 0, "node1": 0}, [line.text for line in shown.lines]
    for host in ("node0", "node1"):
        assert re.search(r"\d", shown.of(host)[-1]), shown.of(host)
    assert Path(ROOT, "scripts/run.sh").exists()
