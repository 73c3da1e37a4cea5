"""Machines with several faults: what to fix first, and which findings each fault explains."""

import pytest

from fixtures.machines import options, recorded_host
from gpunode.checks.runner import run_checks
from gpunode.commands import doctor
from gpunode.facts.node import Node, Questions
from tests.silent import SilentProgress

# by machine: the root cause that comes first, and by each cause a few of those that wait for it
CAUSES = {
    "nouveau-loaded-docker-invalid-cdi-stale": (
        "docker-config-invalid-json",
        {"module-not-loaded": "nouveau-loaded", "cdi-spec-stale": "nouveau-loaded"},
    ),
    "driver-lib-mismatch-kubelet-not-running": (
        "kubelet-not-running",
        {"nvml-hang": "driver-lib-mismatch", "kubelet-device-plugin-dir": "kubelet-not-running"},
    ),
    "dkms-not-built-runtime-missing-plugin-dead": (
        "dkms-not-built",
        {"plugin-socket-dead": "dkms-not-built", "containerd-systemdcgroup": "containerd-runtime-missing"},
    ),
    "secureboot-unsigned-containerd-stopped": (  # a drain before the reboot needs containerd
        "containerd-not-restarted",
        {
            "module-not-loaded": "secureboot-unsigned",
            "containerd-runtime-missing": "containerd-not-restarted",
        },
    ),
    "module-not-loaded-toolkit-missing": (
        "module-not-loaded",
        {"nvml-hang": "module-not-loaded", "toolkit-too-old": "toolkit-missing"},
    ),
    "containerd-stopped-kubelet-stopped": (
        "containerd-not-restarted",
        {"kubelet-not-running": "containerd-not-restarted"},
    ),
    "containerd-cri-disabled-kubelet-stopped": (
        "containerd-cri-disabled",
        {"kubelet-not-running": "containerd-cri-disabled"},
    ),
    "k3s-stopped": ("kubelet-not-running", {"kubelet-device-plugin-dir": "kubelet-not-running"}),
    "cgroups-v1-refused-systemdcgroup-off": (
        "memory-cgroup-v1",
        {"kubelet-not-running": "memory-cgroup-v1"},
    ),
    "realtime-kernel-toolkit-invalid-docker-default": (
        "kernel-unsupported",
        {"dkms-not-built": "kernel-unsupported", "no-cgroups-wrong": "toolkit-config-invalid"},
    ),
    "driver-lib-mismatch-crio-runtime-path": (
        "driver-lib-mismatch",
        {"driver-upgrade-pending": "driver-lib-mismatch"},
    ),
    "gsp-firmware-docker-unknown-key": (
        "docker-unknown-key",
        {"nvml-hang": "gsp-firmware", "docker-not-running": "docker-unknown-key"},
    ),
    "vgpu-driver-mismatch-unlicensed": (
        "vgpu-driver-mismatch",
        {"vgpu-license": "vgpu-driver-mismatch"},
    ),
    "lxc-without-devices": ("lxc-nested", {"nvml-hang": "lxc-nested"}),
    "wsl2-without-gpu": ("wsl2", {"libnvidia-ml-missing": "wsl2", "nvml-hang": "wsl2"}),
}


@pytest.mark.parametrize("name", CAUSES)
def test_root_cause_comes_first_and_blocks_its_consequences(name, tmp_path):
    first, explained = CAUSES[name]
    host = recorded_host(name, tmp_path / "machine")
    assert doctor.run(host, SilentProgress(), questions=Questions(**options(name))).data.first == first
    findings = {one.id: one for one in run_checks(Node(host, Questions(**options(name))))}
    assert {one: findings[one].blocked_by for one in explained} == explained
