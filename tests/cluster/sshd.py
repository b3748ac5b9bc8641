"""Machines for tests that are reached by ssh: what they need of this one."""

import os
import shutil

import pytest

from benchmarks.ssh_hosts import SSHD, SshLab, ssh_lab

__all__ = ["SSHD", "SshLab", "needs_root", "needs_sshd", "ssh_lab"]

needs_root = [
    pytest.mark.root,
    pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="labs need root"),
    pytest.mark.skipif(any(shutil.which(p) is None for p in ("ip", "tc", "unshare")), reason="labs need ip and tc"),
]
needs_sshd = [
    *needs_root,
    pytest.mark.skipif(SSHD is None or shutil.which("ssh") is None, reason="needs openssh-server and openssh-client"),
]
