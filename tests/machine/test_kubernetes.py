"""`gpunode setup --kubernetes` on a booted machine, up to the plugin's own unit.

The kubelet is gpunode's stub as kubelet.service, because Debian has no kubelet; there is no API server.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.machine.booted import SCENARIO, Machine
from tests.plugin import kubelet_stub

UNIT = "gpunode-device-plugin.service"
UNIT_FILE = f"/etc/systemd/system/{UNIT}"
ALLOCATABLE = "/run/allocatable"
ALLOCATABLE_LOG = "/run/allocatable.log"
"""A line for each change: seconds since the epoch, and how many GPUs are allocatable from then on."""
_KUBELET = f"""\
import pathlib, time
from gpunode.host import Host
from kubelet_stub import KubeletStub

stub = KubeletStub(Host())
stub.start()
count = -1
while True:
    count = stub.wait_other("nvidia.com/gpu", count)
    with open("{ALLOCATABLE_LOG}", "a") as log:
        log.write(f"{{time.time()}} {{count}}\\n")
    pathlib.Path("{ALLOCATABLE}").write_text(str(count))
"""
_UNIT = """\
[Unit]
After=containerd.service
[Service]
Environment=PYTHONPATH={packages}
ExecStart=/usr/local/lib/kubelet/kubelet /usr/local/lib/kubelet/kubelet.py {options}
Restart=always
[Install]
WantedBy=multi-user.target
"""


@pytest.fixture(scope="module")
def node(machine: Machine) -> Machine:
    """With a kubelet, using containerd, that has joined a cluster."""
    return node_with_kubelet(machine)


def node_with_kubelet(machine: Machine) -> Machine:
    """Give a machine with gpunode in /opt/gpunode the stub of a kubelet."""
    script = "import sys; print(*sys.path[1:], sep=':')"
    packages = machine.sh(f'/opt/gpunode/bin/python3 -c "{script}"').strip()
    machine.write("/usr/local/lib/kubelet/kubelet.py", _KUBELET)
    stub = Path(kubelet_stub.__file__).read_text()
    machine.write("/usr/local/lib/kubelet/kubelet_stub.py", stub)
    machine.write("/var/lib/kubelet/config.yaml", "kind: KubeletConfiguration\ncgroupDriver: cgroupfs\n")
    # a kubelet is recognized by its name, which a copy of the interpreter has here
    machine.sh("cp $(readlink -f /usr/bin/python3) /usr/local/lib/kubelet/kubelet")
    options = "--container-runtime-endpoint=unix:///run/containerd/containerd.sock"
    machine.write("/etc/systemd/system/kubelet.service", _UNIT.format(packages=packages, options=options))
    machine.sh("systemctl daemon-reload && systemctl enable --now kubelet")
    return machine


def changes(machine: Machine) -> list[tuple[float, int]]:
    """What the kubelet has logged: see `ALLOCATABLE_LOG`."""
    lines = [line.split() for line in machine.read(ALLOCATABLE_LOG).splitlines()]
    return [(float(at), int(count)) for at, count in lines]


def becomes(machine: Machine, count: str) -> None:
    machine.wait(lambda: machine.read(ALLOCATABLE) == count, lambda: machine.journal(UNIT))


def comes_back(machine: Machine, command: str) -> None:
    """Run a command after which the kubelet loses both GPUs, and wait until it has them again."""
    seen = len(changes(machine))
    machine.sh(command)
    # they are allocatable until the kubelet notices
    machine.wait(lambda: len(changes(machine)) > seen, lambda: machine.journal(UNIT))
    becomes(machine, "2")


@pytest.fixture
def fresh(node: Machine) -> Machine:
    """Without what an earlier test set up."""
    done = node.gpunode("reset", "--yes")
    assert done.code == 0, done.out + done.err
    return node


@pytest.fixture
def ready(node: Machine) -> Machine:
    """Set up, by an earlier test or now."""
    done = node.gpunode("setup", "--kubernetes")
    assert done.code == 0, done.out + done.err + node.journal(UNIT)
    becomes(node, "2")
    return node


def test_plugin_that_never_serves_is_removed_again(fresh: Machine) -> None:
    fresh.write(
        f"{UNIT_FILE}.d/none.conf",
        "[Service]\nEnvironment=GPUNODE_PLUGIN_SERVE_KUBELET_SOCKET=/run/none/kubelet.sock\n",
    )
    fresh.sh("mkdir -p /run/none")
    done = fresh.gpunode("setup", "--kubernetes", "--wait", "1")
    assert done.code == 4, done.out + done.err
    assert fresh.show(UNIT)["ActiveState"] == "inactive" and fresh.run("test", "-e", UNIT_FILE).code == 1
    assert "undo it with: gpunode rollback" in done.out
    fresh.sh(f"rm -r {UNIT_FILE}.d && systemctl daemon-reload")


def test_fresh_node_ends_with_allocatable_gpus(fresh: Machine) -> None:
    done = fresh.gpunode("setup", "--kubernetes")
    assert done.code == 0, done.out + done.err + fresh.journal(UNIT)
    assert fresh.is_active(UNIT) and fresh.show(UNIT)["NRestarts"] == "0"
    becomes(fresh, "2")
    status = fresh.gpunode("plugin", "status")
    assert status.code == 0 and "2 of 2 nvidia.com/gpu healthy" in status.out, status.out + status.err
    doctor = fresh.gpunode("doctor")
    assert doctor.code == 0, doctor.out
    again = fresh.gpunode("setup", "--kubernetes", "-o", "json")
    states = {step["name"]: step["state"] for step in again.document["data"]["steps"]}
    assert (states["runtime"], states["plugin"]) == ("right", "right")


def test_unhealthy_gpu_is_not_allocatable(ready: Machine) -> None:
    SCENARIO.with_gpu(1, lost=True).write(ready.shared / "scenario.txt")
    try:
        becomes(ready, "1")
    finally:
        SCENARIO.write(ready.shared / "scenario.txt")


def test_gpus_stay_allocatable_after_restarts_and_a_reboot(ready: Machine) -> None:
    comes_back(ready, f"systemctl restart {UNIT}")
    comes_back(ready, f"systemctl restart kubelet && systemctl kill --signal=KILL {UNIT}")
    ready.reboot()
    becomes(ready, "2")
    assert ready.show(UNIT)["NRestarts"] == "0", ready.journal(UNIT)
    assert ready.sh("systemctl --failed --plain --no-legend") == ""


def test_rollback_stops_and_removes_the_unit(ready: Machine) -> None:
    done = ready.gpunode("rollback")
    assert done.code == 0, done.err
    assert ready.show(UNIT)["LoadState"] == "not-found"
    becomes(ready, "0")
