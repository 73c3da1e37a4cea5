"""Platform checks: cases without a finding, and cases with a more specific command."""

import itertools

import pytest

from fixtures.machines import machine, merged
from gpunode.checks import platform
from gpunode.checks.finding import FindingStatus
from gpunode.commands.demo import build_machine
from gpunode.facts.node import Node
from gpunode.host import Host
from tests.required import required


@pytest.fixture
def node(tmp_path):
    count = itertools.count()

    def built(name, **change):
        place = tmp_path / str(next(count))
        return Node(Host(build_machine(merged(machine(name), change), place), environ={}))

    return built


def test_enabled_boolean_settles_older_denials(node):
    here = node("selinux-nvml", files={"/sys/fs/selinux/booleans/container_use_xserver_devices": "1 1"})
    assert platform.selinux_nvml.run(here).status is FindingStatus.PASS


@pytest.mark.parametrize(
    ("profile", "command"),
    [
        ("lxc-207_</var/lib/lxc>", "pct set 207 -features nesting=1 && pct reboot 207"),
        ("lxc-container-default-cgns", "follow https://pve.proxmox.com/wiki/Linux_Container"),
        ("docker-default", "follow https://docs.docker.com/"),
        ("cri-containerd.apparmor.d", "follow https://kubernetes.io/"),
    ],
)
def test_apparmor_denial_names_the_profile_and_its_fix(node, profile, command):
    text = f'[1.0] audit: type=1400 audit(1768089300.1:8): apparmor="DENIED" profile="{profile}" '
    here = node("apparmor-denied", files={"/.gpunode/kernel.log": f'{text} name="/dev/nvidiactl"\n'})
    verdict = platform.apparmor_denied.run(here)
    assert (verdict.status, profile in verdict.summary) == (FindingStatus.WARN, True)
    assert required(verdict.fix).command.startswith(command)


def test_new_kernel_without_the_nvidia_module_is_not_worth_a_reboot(node):
    here = node("dkms-next-kernel", files={"/run/reboot-required.pkgs": "linux-image-5.15.0-124-generic\n"})
    verdict = platform.reboot_required.run(here)
    assert (verdict.status, verdict.note) == (FindingStatus.PASS, False)


def test_kubelet_configured_for_cgroup_v1_gets_a_note(node):
    config = "kind: KubeletConfiguration\nfailCgroupV1: false\n"
    here = node("kubelet-refuses-cgroups-v1", files={"/var/lib/kubelet/config.yaml": config})
    verdict = platform.memory_cgroup_v1.run(here)
    assert (verdict.status, verdict.note) == (FindingStatus.PASS, True)


def test_older_kubelet_release_is_not_reported_for_cgroup_v1(node):
    commands = {"/usr/bin/kubelet --version": {"stdout": "Kubernetes v1.34.3\n"}}
    here = node("kubelet-refuses-cgroups-v1", recording={"commands": commands})
    assert platform.memory_cgroup_v1.run(here).note


def test_library_hiding_the_windows_driver_is_removed_with_its_package(node):
    status = (
        "Package: libnvidia-compute-580\nStatus: install ok installed\nVersion: 580.95.05-0ubuntu1\n\n"
        "Package: bash\nStatus: install ok installed\nVersion: 5.1\n"
    )
    verdict = platform.wsl2.run(node("wsl2-linux-driver", files={"/var/lib/dpkg/status": status}))
    assert required(verdict.fix).command == "apt remove libnvidia-compute-580 && ldconfig"
    beside = platform.wsl2.run(node("healthy-wsl2", files={"/var/lib/dpkg/status": status}))
    assert beside.status is FindingStatus.PASS


def test_old_toolkit_on_jetson_matters_only_for_device_plugins(node):
    commands = {"/usr/bin/nvidia-ctk --version": {"stdout": "NVIDIA Container Toolkit CLI version 1.10.0\n"}}
    alone = platform.jetson.run(node("healthy-jetson-orin", recording={"commands": commands}))
    assert alone.status is FindingStatus.PASS
    kubelet = {"/var/lib/kubelet/config.yaml": "kind: KubeletConfiguration\n"}
    verdict = platform.jetson.run(
        node("healthy-jetson-orin", recording={"commands": commands}, files=kubelet)
    )
    assert verdict.status is FindingStatus.WARN
    assert required(verdict.fix).command == "gpunode toolkit install --upgrade"


def test_jetson_with_a_cdi_specification_needs_no_csv_lists(node):
    spec = "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices: []\n"
    here = node("jetson-without-lists", files={"/etc/cdi/nvidia.yaml": spec})
    assert platform.jetson.run(here).status is FindingStatus.PASS


def test_privileged_lxc_container_may_change_cgroups(node):
    here = node("lxc-unprivileged", files={"/proc/1/uid_map": "         0          0 4294967295\n"})
    assert platform.lxc_nested.run(here).status is FindingStatus.PASS


@pytest.mark.parametrize(
    ("release", "command"),
    [
        ("ID=nixos\nNAME=NixOS\n", "nixos-rebuild switch"),
        ("ID=talos\nNAME=Talos\n", "follow https://factory.talos.dev/"),
        ("ID=bottlerocket\nNAME=Bottlerocket\n", "follow https://bottlerocket.dev/"),
        ("ID=cos\nNAME=COS\n", "cos-extensions install gpu"),
        ("ID=coreos\nNAME=Something\n", "follow https://docs.nvidia.com/"),
    ],
)
def test_immutable_system_gets_its_own_install_command(node, release, command):
    verdict = platform.immutable.run(node("toolkit-missing", files={"/etc/os-release": release}))
    assert verdict.note and required(verdict.fix).command.startswith(command)
