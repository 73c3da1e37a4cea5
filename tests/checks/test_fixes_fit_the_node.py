"""Commands that depend on how this very node got its driver and engines: each must be right as it stands."""

from dataclasses import replace

import pytest

from fixtures.machines import machine
from gpunode.checks import fixes
from gpunode.checks.docker import remedies as docker
from gpunode.checks.runner import run_checks
from gpunode.facts.daemons import Daemon
from gpunode.facts.machine_file import build_machine
from gpunode.facts.node import Node
from gpunode.host import Host

REPOSITORIES = "https://developer.download.nvidia.com/compute/cuda/repos"


def commands(spec, root):
    """Fix commands by check id."""
    findings = run_checks(Node(Host(build_machine(spec, root), environ={})))
    return {finding.id: finding.fix[0].command for finding in findings if finding.fix}


def without_driver(release, device="0x2330"):
    spec = machine("driver-not-installed")
    spec["files"]["/etc/os-release"] = release
    for path in spec["files"]:
        if path.startswith("/sys/bus/pci") and path.endswith("/device"):
            spec["files"][path] = f"{device}\n"
    return spec


DEBIAN = 'ID=debian\nVERSION_ID="12"\n'
ROCKY = 'ID="rocky"\nID_LIKE="rhel centos fedora"\nVERSION_ID="9.4"\n'
AMAZON = 'ID="amzn"\nID_LIKE="fedora"\nVERSION_ID="2023"\n'
SLES = 'ID="sles"\nID_LIKE="suse"\nVERSION_ID="15.6"\n'


@pytest.mark.parametrize(
    ("release", "first", "last"),
    [
        (
            DEBIAN,
            f"curl -fsSLO {REPOSITORIES}/debian12/x86_64/cuda-keyring_1.1-1_all.deb && dpkg -i",
            "apt install nvidia-open && reboot",
        ),
        (
            ROCKY,
            f"curl -fsSL {REPOSITORIES}/rhel9/x86_64/cuda-rhel9.repo -o /etc/yum.repos.d/cuda-rhel9.repo",
            "dnf module enable nvidia-driver:open-dkms && "
            "dnf install kernel-devel-$(uname -r) nvidia-open && reboot",
        ),
        (
            AMAZON,
            f"curl -fsSL {REPOSITORIES}/amzn2023/x86_64/cuda-amzn2023.repo",
            "dnf install kernel-devel-$(uname -r) nvidia-open && reboot",
        ),
        (
            SLES,
            f"zypper addrepo {REPOSITORIES}/sles15/x86_64/cuda-sles15.repo",
            "zypper install nvidia-open && reboot",
        ),
    ],
)
def test_the_driver_comes_from_a_repository_that_the_command_adds(release, first, last, tmp_path):
    command = commands(without_driver(release), tmp_path)["driver-not-installed"]
    assert command.startswith(first)
    assert command.endswith(last)


def test_a_repository_that_is_there_is_not_added_again(tmp_path):
    spec = without_driver(DEBIAN)
    spec["files"]["/etc/apt/sources.list.d/cuda.list"] = f"deb {REPOSITORIES}/debian12/x86_64/ /\n"
    assert commands(spec, tmp_path)["driver-not-installed"] == "apt install nvidia-open && reboot"


def test_a_volta_gpu_gets_no_open_module(tmp_path):
    command = commands(without_driver(DEBIAN, "0x1db5"), tmp_path)["driver-not-installed"]
    assert "nvidia-open" not in command
    assert command.endswith("apt install cuda-drivers-580 && reboot")


def next_kernel(dep, release="5.15.0-122-generic"):
    """The node of dkms-next-kernel, whose module came otherwise than by DKMS."""
    spec = machine("dkms-next-kernel")
    spec["files"] = {path: text for path, text in spec["files"].items() if "/var/lib/dkms" not in path}
    spec["files"][f"/lib/modules/{release}/modules.dep"] = dep
    return spec


@pytest.mark.parametrize(
    ("dep", "package"),
    [
        ("kernel/nvidia-550/nvidia.ko:\n", "linux-modules-nvidia-550-5.15.0-124-generic"),
        ("kernel/nvidia-550srv/nvidia.ko:\n", "linux-modules-nvidia-550-server-5.15.0-124-generic"),
        (
            "kernel/nvidia-550srv-open/nvidia.ko.zst:\n",
            "linux-modules-nvidia-550-server-open-5.15.0-124-generic",
        ),
    ],
)
def test_ubuntus_prebuilt_modules_are_installed_and_not_built(dep, package, tmp_path):
    found = commands(next_kernel(dep), tmp_path)
    assert found == {"dkms-not-built": f"apt update && apt install {package}"}


def test_a_driver_of_the_run_file_is_built_by_the_run_file(tmp_path):
    spec = next_kernel("kernel/drivers/video/nvidia.ko:\n")
    spec["executables"].append("/usr/bin/nvidia-uninstall")
    command = commands(spec, tmp_path)["dkms-not-built"]
    assert command == "sh NVIDIA-Linux-$(uname -m)-580.159.03.run --kernel-name=5.15.0-124-generic"


@pytest.mark.parametrize("key", ["/var/lib/shim-signed/mok/MOK.der", "/var/lib/dkms/mok.pub"])
def test_the_key_to_enrol_is_the_one_that_is_there(key, tmp_path):
    spec = machine("secureboot-key-not-enrolled")
    spec["files"][key] = "certificate"
    assert commands(spec, tmp_path)["secureboot-unsigned"] == f"mokutil --import {key} && reboot"


def test_an_unsigned_module_is_built_again_before_its_key_is_enrolled(tmp_path):
    spec = machine("secureboot-unsigned")
    spec["files"]["/var/lib/dkms/mok.pub"] = "certificate"
    command = commands(spec, tmp_path)["secureboot-unsigned"]
    assert command.startswith("dkms build --force nvidia/580.159.03 -k $(uname -r) && dkms install")


def test_every_missing_device_file_is_made(tmp_path):
    spec = machine("healthy-h100")
    for gone in ("/dev/nvidiactl", "/dev/nvidia3"):
        del spec["recording"]["devices"][gone]
    command = commands(spec, tmp_path)["dev-nodes-missing"]
    assert command == "nvidia-modprobe -c255 -c3 && nvidia-modprobe -c0 -u"


def test_device_files_of_a_driver_container_are_not_missing(tmp_path):
    assert commands(machine("gpu-operator-driver"), tmp_path) == {}


def test_a_dead_plugin_is_restarted_as_a_unit_where_it_is_one_and_else_as_a_pod(tmp_path):
    spec = machine("plugin-socket-dead")
    assert "crictl stop" in commands(spec, tmp_path / "pod")["plugin-socket-dead"]
    unit = "/etc/systemd/system/gpunode-device-plugin.service"
    spec["files"][unit] = "[Service]\nExecStart=/usr/bin/gpunode plugin serve\n"
    found = commands(spec, tmp_path / "unit")["plugin-socket-dead"]
    assert found == "systemctl restart gpunode-device-plugin"


def test_a_socket_left_beside_a_plugin_that_answers_is_only_removed(tmp_path):
    spec = machine("plugin-socket-dead")
    spec["recording"]["sockets"]["/var/lib/kubelet/device-plugins/gpunode.sock"] = "listening"
    command = commands(spec, tmp_path)["plugin-socket-dead"]
    assert command == "rm /var/lib/kubelet/device-plugins/nvidia-gpu.sock"


@pytest.mark.parametrize(
    ("manager", "unit", "command"),
    [
        ("k3s", "k3s-agent.service", "systemctl restart k3s-agent"),
        ("rke2", None, "systemctl restart rke2"),
        ("k0s", "k0sworker.service", "systemctl restart k0sworker"),
        ("microk8s", "snap.microk8s.daemon-containerd.service", "snap restart microk8s.daemon-containerd"),
    ],
)
def test_a_distributions_containerd_is_restarted_by_the_distribution(manager, unit, command):
    assert fixes.restart_managed(manager, unit) == command


def test_each_docker_is_restarted_by_whoever_starts_it():
    system = Daemon("docker", None, (27, 3), "/etc/docker/daemon.json", "", "/run/docker.sock", None)
    snap = replace(system, config_path="/var/snap/docker/2893/config/daemon.json", manager="snap")
    own = replace(system, config_path="/home/anna/.config/docker/daemon.json", user="anna")
    assert docker.restart(system, "reload") == "systemctl reload docker"
    assert docker.restart(snap, "reload") == "snap restart docker"
    assert docker.restart(own) == "systemctl --user restart docker"
    assert (docker.edit(own, 3).needs_root, docker.edit(system, 3).needs_root) == (False, True)


def test_a_file_that_k3s_renders_is_never_to_be_edited(tmp_path):
    found = commands(machine("k3s-template-repeats-a-table"), tmp_path / "template")
    template = "/var/lib/rancher/k3s/agent/etc/containerd/config-v3.toml.tmpl"
    assert found["containerd-config-version"] == f"${{EDITOR:-vi}} {template} && systemctl restart k3s"
    spec = machine("k3s-template-repeats-a-table")
    del spec["files"][template]
    found = commands(spec, tmp_path / "none")
    assert found["containerd-config-version"] == "systemctl restart k3s"


def test_k3s_is_configured_by_its_own_name_even_beside_another_containerd(tmp_path):
    spec = machine("k3s-runtime-missing")
    # a template of one's own: what k3s would find by itself doesn't count
    spec["files"]["/var/lib/rancher/k3s/agent/etc/containerd/config-v3.toml.tmpl"] = "# no runtime nvidia\n"
    found = commands(spec, tmp_path)
    assert found["containerd-runtime-missing"] == "gpunode configure-runtime --runtime k3s"


@pytest.mark.parametrize(
    ("name", "identifier"),
    [
        ("mig-nvml-regression", "mig-nvml-regression"),
        ("mig-nvml-regression-suse", "mig-nvml-regression"),
        ("driver-refuses-kernel", "kernel-unsupported"),
        ("driver-cve-rocky9", "driver-cve"),
    ],
)
def test_a_newer_driver_comes_from_where_this_node_can_get_one(name, identifier, tmp_path):
    """Nobody is told to upgrade a package that isn't there, from a repository that isn't either."""
    command = commands(machine(name), tmp_path)[identifier]
    assert command.startswith(("apt install ubuntu-drivers-common", "zypper addrepo", "curl -fsSL https"))


@pytest.mark.parametrize("package", ["docker.io", "docker-ce"])
def test_an_old_docker_is_upgraded_by_the_package_it_came_in(package, tmp_path):
    spec = machine("docker-version-old")
    spec["files"]["/etc/os-release"] = DEBIAN
    status = f"Package: {package}\nStatus: install ok installed\nVersion: 18.09.1\n\n"
    spec["files"]["/var/lib/dpkg/status"] = status
    command = commands(spec, tmp_path)["docker-version-old"]
    assert command == f"apt update && apt install --only-upgrade {package}"
