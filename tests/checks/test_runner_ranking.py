"""Frequent faults are recorded on several distributions; healthy nodes of every class have no findings."""

import re

import pytest

from fixtures.machines import HEALTHY, expected, machine, names, recorded_host
from gpunode.checks.catalogue import BY_ID
from gpunode.checks.finding import FindingStatus
from gpunode.checks.runner import run_checks
from gpunode.facts.node import Node

# by rank, most frequent first: faults of users, by the check that names them
RANKING = (
    ("driver-lib-mismatch", "unattended-upgrades-driver"),
    ("toolkit-missing", "docker-not-restarted"),
    ("containerd-runtime-missing", "crio-runtime-missing", "containerd-not-restarted"),
    # an accidental default runtime is visible in the plugin's environment
    ("plugin-cannot-see-nvml", "runtimeclass-missing"),
    ("dev-char-symlinks", "cgroup-device-revoked"),
    ("module-not-loaded", "dkms-not-built", "kernel-headers-missing"),
    # cuda-driver-version also reports programs with a CUDA newer than the driver
    ("image-needs-newer-driver", "cuda-driver-version", "ptx-unsupported-toolchain", "no-kernel-image"),
    ("cdi-spec-stale", "cdi-uvm-absent-in-spec", "cdi-unsupported-version", "cdi-duplicate"),
    ("nouveau-loaded", "gpu-bound-other-driver", "nova-core-loaded"),
    ("kmod-flavour", "gpu-arch-dropped", "bar-too-small"),
    # the last is where error 802 shows that has no other cause
    ("fabricmanager-missing", "fabricmanager-version", "cuda-uninitialised"),
    ("uvm-not-loaded", "dev-nodes-missing"),
    (
        *("containerd-cri-disabled", "containerd-config-version", "containerd-systemdcgroup"),
        "containerd-imports-clobber",
    ),
    ("docker-flag-file-conflict", "docker-config-invalid-json", "docker-default-runtime"),
    ("secureboot-unsigned",),
    ("docker-snap", "docker-rootless", "no-cgroups-wrong", "docker-desktop"),
    ("k3s-nvidia-not-detected", "microk8s-paths", "k0s-dropin"),
    (
        *("allocatable-zero", "plugin-socket-dead", "mig-mode-pending", "mig-enabled-no-instances"),
        *("mig-strategy-mismatch", "mig-config-lost", "mig-cdi-stale", "mig-nvml-regression"),
    ),
    ("gpu-lost", "gpu-reset-required", "row-remap-pending", "xid-recent", "persistence-off"),
    ("toolkit-cve", "accept-envvar-unprivileged", "selinux-nvml"),
)

CLASSES = {
    "bare metal, eight GPUs on NVSwitches": "healthy-h100-nvswitch",
    "workstation": "healthy-workstation",
    "virtual machine": "healthy-vm-passthrough",
    "k3s": "healthy-k3s",
    "rke2": "healthy-rke2",
    "CRI-O": "healthy-crio",
    "Jetson": "healthy-jetson-orin",
    "WSL": "healthy-wsl2",
    "MIG": "healthy-mig-h100",
    "vGPU": "healthy-vgpu-guest",
}


def distribution(name: str) -> str:
    """The ID in the machine's os-release."""
    found = re.search(r'^ID="?([\w-]+)', machine(name)["files"]["/etc/os-release"], re.MULTILINE)
    assert found, name
    return found[1]


@pytest.fixture(scope="module")
def distributions() -> dict[str, set[str]]:
    """By check the distributions of the machines on which it finds something."""
    found: dict[str, set[str]] = {}
    for name in names():
        for identifier, status in expected(name).items():
            if status in ("fail", "warn"):
                found.setdefault(identifier, set()).add(distribution(name))
    return found


def test_ranking_has_twenty_ranks_of_checks() -> None:
    assert len(RANKING) == 20
    assert {one for rank in RANKING for one in rank} <= set(BY_ID)


@pytest.mark.parametrize("identifier", [one for rank in RANKING for one in rank])
def test_each_frequent_fault_is_recorded_on_two_distributions(identifier, distributions) -> None:
    assert len(distributions[identifier]) >= 2, distributions[identifier]


@pytest.mark.parametrize("kind", CLASSES)
def test_healthy_node_of_each_class_is_recorded_and_has_no_findings(kind, tmp_path) -> None:
    """Notes included: an owner has nothing irrelevant to read."""
    name = CLASSES[kind]
    findings = run_checks(Node(recorded_host(name, tmp_path)))
    said = [one for one in findings if one.note or one.status not in (FindingStatus.PASS, FindingStatus.SKIP)]
    assert name in HEALTHY and expected(name) == {} and said == []
    assert any(one.status is FindingStatus.PASS for one in findings)


def test_machine_with_nvswitches_is_bare_metal_with_eight_gpus(tmp_path) -> None:
    node = Node(recorded_host(CLASSES["bare metal, eight GPUs on NVSwitches"], tmp_path))
    assert (node.kind, len(node.gpus), bool(node.switches)) == ("bare-metal", 8, True)


def test_at_least_sixty_machines_are_recorded() -> None:
    assert len(names()) >= 60


def test_every_machine_named_healthy_is_listed_as_healthy() -> None:
    assert {name for name in names() if name.startswith("healthy-")} == set(HEALTHY)
