"""The driver's commands fit the GPUs, the packages and the kernel of the very node."""

import pytest

from fixtures.machines import expected, options, recorded_host
from gpunode.checks.runner import Selection, run_checks
from gpunode.facts.node import Node, Questions

COMMANDS = {
    "kmod-flavour-blackwell": "apt install nvidia-driver-580-server-open && reboot",
    "kmod-flavour-rocky9": "dnf module enable nvidia-driver:580-dkms",
    "gpu-arch-dropped": "zypper install nvidia-driver-G06-kmp-default",
    "gpu-arch-dropped-rocky9": "dnf module enable nvidia-driver:580-dkms",
    "gpu-arch-next-upgrade": "apt install cuda-drivers-580",
    "driver-too-old-for-gpu-rocky9": "nvidia-open && reboot",
    "driver-two-installs": (
        "nvidia-uninstall && apt install --reinstall libnvidia-compute-580-server && reboot"
    ),
    "driver-lib-mismatch-rocky9": "reboot",
    "driver-lib-mismatch-stays": "apt update && apt install nvidia-open && reboot",
    "gsp-firmware": "apt install --reinstall nvidia-firmware-580-server-580.159.03 && reboot",
    "kernel-headers-missing": "apt install linux-headers-5.15.0-122-generic",
    "module-disabled-rocky9": "sed -i '2s/^/# /' /etc/modprobe.d/no-gpu.conf && modprobe nvidia",
    "secureboot-unsigned-rocky9": "mokutil --import /var/lib/dkms/mok.pub && reboot",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_fits_the_node(name, tmp_path):
    (identifier,) = expected(name)
    node = Node(recorded_host(name, tmp_path), Questions(**options(name)))
    (finding,) = [one for one in run_checks(node, Selection(only=(identifier,))) if one.id == identifier]
    assert COMMANDS[name] in finding.fix[0].command


WHO = {
    "driver-lib-mismatch-unattended": ("/var/log/apt/history.log", 4, "by /usr/bin/unattended-upgrade"),
    "driver-lib-mismatch-rocky9": ("/var/log/dnf.rpm.log", 1, "nvidia-driver-cuda-libs"),
}


@pytest.mark.parametrize("name", WHO)
def test_a_mismatch_names_the_transaction_that_brought_it(name, tmp_path):
    path, line, words = WHO[name]
    findings = run_checks(Node(recorded_host(name, tmp_path)), Selection(only=("driver-lib-mismatch",)))
    shown = [one for finding in findings for one in finding.evidence if one.source == path]
    assert [one.line for one in shown] == [line] and words in shown[0].value
