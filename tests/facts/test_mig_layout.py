"""What restores MIG devices after a reboot, and the MIG settings of a device plugin."""

import json

import pytest

from fixtures.machines import machine
from gpunode.checks.catalogue import BY_ID
from gpunode.checks.finding import FindingStatus
from gpunode.commands.demo import build_machine
from gpunode.facts.device_plugins import PluginProcess, mig_strategy, shares_by_mps
from gpunode.facts.mig import keeper, known_fault
from gpunode.facts.node import Node
from gpunode.facts.processes import Process
from gpunode.host import Host
from gpunode.host.recording import RECORDING


def node(root, **files):
    """A MIG node whose own manager is disabled, with files of the administrator."""
    spec = machine("mig-config-lost")
    spec["files"] |= files
    return Node(Host(build_machine(spec, root), environ={}))


def test_layout_is_not_restored_without_a_boot_unit(tmp_path):
    assert keeper(node(tmp_path)) == ""


CUT = "#!/bin/sh\nnvidia-smi mig -cgi 9,9 -C\n"


@pytest.mark.parametrize(
    ("path", "files"),
    [
        (
            "/etc/systemd/system/cut.service",
            {"/etc/systemd/system/cut.service": "ExecStart=/bin/sh -c 'nvidia-smi mig -cgi 9 -C'\n"},
        ),
        (
            "/etc/systemd/system/cut.service",
            {"/etc/systemd/system/cut.service": "ExecStart=-/opt/cut.sh --all\n", "/opt/cut.sh": CUT},
        ),
        ("/etc/nvidia/gpu_config.json", {"/etc/nvidia/gpu_config.json": '{"GPUPartitionSize": "1g.10gb"}'}),
        ("/etc/cron.d/mig", {"/etc/cron.d/mig": "@reboot root nvidia-mig-parted apply -f /etc/mig.yaml\n"}),
        (
            "/etc/rc.local",
            {"/etc/rc.local": "#!/bin/sh\n/usr/local/sbin/gpus\n", "/usr/local/sbin/gpus": CUT},
        ),
    ],
)
def test_script_of_the_node_restores_the_layout(path, files, tmp_path):
    assert keeper(node(tmp_path, **files)) == path


def test_script_without_mig_commands_restores_nothing(tmp_path):
    files = {
        "/etc/systemd/system/app.service": "ExecStart=/opt/app/run\n",
        "/opt/app/run": "#!/bin/sh\nexec python serve.py\n",
    }
    assert keeper(node(tmp_path, **files)) == ""


def test_large_program_is_not_read(tmp_path):
    files = {"/etc/systemd/system/app.service": "ExecStart=/opt/app\n", "/opt/app": CUT + "x" * (300 << 10)}
    assert keeper(node(tmp_path, **files)) == ""


def test_operator_mig_manager_restores_the_layout(tmp_path):
    files = {
        "/proc/77/cmdline": "/usr/bin/nvidia-mig-manager\0",
        "/proc/77/stat": "77 (nvidia-mig-mana) S 1 77 77 0 -1 4194560 0 0 0 0 0 0 0 0 20 0 30 0 6000 0 0\n",
    }
    assert keeper(node(tmp_path, **files)).endswith("nvidia-mig-manager")


def test_without_systemd_data_the_layout_is_not_reported_as_lost(tmp_path):
    node(tmp_path)
    place = tmp_path / RECORDING
    recording = json.loads(place.read_text())
    kept = {name: output for name, output in recording["commands"].items() if "systemctl" not in name}
    place.write_text(json.dumps(recording | {"commands": kept}))
    assert BY_ID["mig-config-lost"].run(Node(Host(tmp_path, environ={}))).status is FindingStatus.SKIP


@pytest.mark.parametrize(
    ("version", "fixed"),
    [
        ("570.124.06", "570.172.08"),
        ("570.158.01", "570.172.08"),
        ("570.172.08", None),
        ("570.86.15", None),
        ("580.65.06", None),
        ("", None),
        ("garbled", None),
    ],
)
def test_driver_releases_that_miscount_instances(version, fixed):
    assert known_fault(version) == fixed


@pytest.mark.parametrize(
    ("argv", "environment", "text", "strategy", "mps"),
    [
        ((), {}, "", "", False),
        (("--mig-strategy=single",), {"MIG_STRATEGY": "mixed"}, "", "single", False),
        ((), {"MIG_STRATEGY": "mixed"}, "flags:\n  migStrategy: single\n", "mixed", False),
        ((), {}, 'flags:\n  migStrategy: "single"\nsharing:\n  mps:\n    resources: []\n', "single", True),
        ((), {}, "sharing:\n  timeSlicing:\n    resources: []\n", "", False),
        ((), {}, "sharing:\n  timeSlicing: {}\nother:\n  mps: 1\n", "", False),
    ],
)
def test_settings_of_a_plugin_are_read_from_all_sources(argv, environment, text, strategy, mps, tmp_path):
    (tmp_path / "plugin.yaml").write_text(text)
    process = Process(7, ("nvidia-device-plugin", *argv), 0.0)
    plugin = PluginProcess(process, "", environment | {"CONFIG_FILE": "/plugin.yaml"})
    host = Host(tmp_path)
    assert (mig_strategy(host, plugin), shares_by_mps(host, plugin)) == (strategy, mps)
