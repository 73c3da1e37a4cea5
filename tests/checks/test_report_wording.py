"""A report is readable at night: few lines, no repetition, and the real impact of a command."""

import pytest

from fixtures.machines import recorded_host
from gpunode.checks.fixes import POWER_OFF
from gpunode.checks.report import disturbance, evidence_lines
from gpunode.commands import doctor
from gpunode.facts.node import Questions
from gpunode.output.render import SilentProgress, plain_lines
from gpunode.output.result import Evidence, Fix


@pytest.mark.parametrize(
    ("command", "prefix"),
    [
        ("gpunode configure-runtime --runtime docker --cdi", "restarts Docker"),
        (
            "gpunode configure-runtime --runtime docker --set-as-default",
            "reloads Docker; if it needs a restart",
        ),
        ("dnf upgrade docker-ce", "restarts Docker"),
        ("${EDITOR:-vi} /etc/docker/daemon.json && snap restart docker", "restarts Docker"),
        ("gpunode configure-runtime --runtime containerd", "restarts containerd"),
        ("systemctl restart rke2-server", "restarts this node's Kubernetes"),
        ("systemctl restart crio", "restarts CRI-O"),
        ("systemctl disable --now crio", "stops CRI-O"),
        ("systemctl restart kubelet", "restarts the kubelet"),
        ("crictl ps --quiet --name nvidia-device-plugin | xargs crictl stop", "restarts the device plugin"),
        ("crictl stop 4f1c4f1c4f1c", "restarts the named containers"),
        ("wsl.exe --update && wsl.exe --shutdown", "ends everything that runs in WSL"),
        ("something else", "restarts a daemon"),
    ],
)
def test_disturbance_of_a_restart_is_read_from_the_command(command, prefix):
    assert disturbance(Fix(command, disruptive="restart")).startswith(prefix)


def test_disturbance_of_drain_power_off_and_reboot_is_named():
    assert disturbance(Fix("x", disruptive="drain")) == "stops GPU work"
    assert disturbance(POWER_OFF.other).startswith("powers the node off")
    assert disturbance(Fix("x && reboot", disruptive="reboot")) == "reboots the node"
    assert disturbance(Fix("x")) == ""


def test_evidence_that_differs_in_one_path_component_is_merged():
    alike = [Evidence(f"/sys/bus/pci/devices/{one}/driver", "vfio-pci") for one in ("a", "b", "c")]
    other = Evidence("/etc/modprobe.d/vfio.conf", "options vfio-pci", 3)
    assert list(evidence_lines([*alike, other])) == [
        "/sys/bus/pci/devices/{a,b,c}/driver: vfio-pci",
        "/etc/modprobe.d/vfio.conf:3: options vfio-pci",
    ]


@pytest.mark.parametrize(
    "sources",
    [
        ("/dev/nvidia0", "/dev/nvidia1"),
        ("/a/b/c", "/a/x/y", "/a/b/d"),
        ("NVML, GPU 0", "NVML, GPU 1", "NVML, GPU 2"),
        ("/dev/a b", "/dev/c", "/dev/d"),
    ],
)
def test_evidence_that_a_shell_cannot_expand_is_not_merged(sources):
    assert len(list(evidence_lines([Evidence(one, "x") for one in sources]))) == len(sources)


def test_command_that_fixes_several_findings_is_printed_once(tmp_path):
    host = recorded_host("cuda-driver-version-suse", tmp_path)
    blocks = doctor.run(host, SilentProgress(), questions=Questions(cuda="13.0")).blocks
    lines = [line for block in blocks for line in plain_lines(block)]
    commands = [line for line in lines if line.startswith("  Fix: ") and "the same as" not in line]
    assert len(commands) == len(set(commands))
    assert sum(commands[0].removeprefix("  Fix: ") in line for line in lines) == 1
    assert lines.count("  Fix: the same as for cuda-driver-version") == 2
    assert "Fix first, as root: cuda-driver-version" in lines
