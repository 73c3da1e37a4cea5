"""The fabric manager's package has different names in different repositories."""

import pytest

from fixtures.machines import machine
from gpunode.checks.fabric import matching_manager
from gpunode.commands.demo import build_machine
from gpunode.facts.node import Node
from gpunode.host import Host
from tests.required import required

NVIDIA = "deb https://developer.download.nvidia.com/compute/cuda/repos/ubuntu2204/x86_64 /\n"
STATUS = "Package: {}\nStatus: install ok installed\nVersion: {}\n"
RESTART = "systemctl enable nvidia-fabricmanager && systemctl restart nvidia-fabricmanager"


def command(name, version, files, tmp_path):
    spec = machine(name)
    spec["files"] |= files
    node = Node(Host(build_machine(spec, tmp_path), environ={}))
    return required(matching_manager(node, version)).command


@pytest.mark.parametrize(
    ("version", "repository", "installed", "package"),
    [
        ("580.159.03", "", "", "nvidia-fabricmanager-580=580.159.03*"),
        ("595.71.05", "", "", "nvidia-fabricmanager-595=595.71.05*"),
        ("580.159.03", NVIDIA, "", "nvidia-fabricmanager=580.159.03*"),
        ("570.211.01", NVIDIA, "", "nvidia-fabricmanager-570=570.211.01*"),
        ("580.159.03", "", "nvidia-fabricmanager-535", "nvidia-fabricmanager-580=580.159.03*"),
        ("535.309.01", "", "nvidia-fabric-manager", "nvidia-fabric-manager=535.309.01*"),
        ("535.309.01", NVIDIA, "nvidia-fabricmanager-535", "nvidia-fabricmanager-535=535.309.01*"),
    ],
)
def test_apt_package_name_follows_the_repository(version, repository, installed, package, tmp_path):
    files = {
        "/etc/apt/sources.list.d/cuda.list": repository,
        "/var/lib/dpkg/status": STATUS.format(installed, "535.288.01-1") if installed else "",
    }
    fix = command("healthy-h100", version, files, tmp_path)
    assert fix == f"apt install '{package}' && {RESTART}"


@pytest.mark.parametrize(
    ("version", "package"),
    [
        ("580.159.03", "nvidia-fabricmanager-580.159.03"),
        ("550.144.03", "nvidia-fabric-manager-550.144.03"),
    ],
)
def test_renamed_rpm_packages_are_recognized(version, package, tmp_path):
    fix = command("healthy-docker-rocky9", version, {}, tmp_path)
    assert fix == f"dnf install {package} && {RESTART}"
