"""Every unit that gpunode ships or installs, under a real systemd: started, reloaded, stopped, rebooted.

`/run` is a fresh tmpfs at each boot, and a sandbox is set up for ExecStartPre= as well as for ExecStart=, so
only a boot shows whether a unit makes the directories that it needs.
"""

from __future__ import annotations

import re
from pathlib import Path

from fixtures.mps_control import PROGRAM, mps_stub
from fixtures.stubs import SCENARIO_IN_CONTAINER, SCENARIO_VARIABLE
from tests.cli import REPOSITORY
from tests.machine.booted import CHECKOUT, SHARED, Machine

PLUGIN, MPS = "gpunode-device-plugin.service", "gpunode-device-plugin-mps.conf"
DROP_INS = f"/etc/systemd/system/{PLUGIN}.d"
DOCTOR, DOCTOR_TIMER = "gpunode-doctor.service", "gpunode-doctor.timer"
REFRESH, REFRESH_PATH = "gpunode-cdi-refresh.service", "gpunode-cdi-refresh.path"
COLLECTOR = "/var/lib/prometheus/node-exporter"
MIG = "gpunode-mig.service"
LAYOUT = """\
version: v1
mig-configs:
  halves:
    - devices: all
      mig-enabled: true
      mig-devices:
        3g.40gb: 2
"""
SHARED_GPUS = """\
version: v1
sharing:
  mps:
    resources:
      - name: nvidia.com/gpu
        replicas: 2
"""


def install_by_its_comment(machine: Machine, unit: str) -> None:
    """Run the commands in the comment at the head of a unit in packaging/."""
    head = (REPOSITORY / "packaging" / unit).read_text().partition("\n\n")[0]
    words = " ".join(line.removeprefix("#").strip() for line in head.splitlines())
    match = re.match(
        r"Install: (mkdir -p /etc/systemd/system/\S+)? ?(cp .*? /etc/systemd/system/\S*) "
        r"(systemctl daemon-reload) && (\S+ (?:\S+ --now|restart) \S+)",
        words,
    )
    assert match is not None, head
    for command in filter(None, match.groups()):
        machine.sh(f"cd {CHECKOUT} && {command}")


def main_pid(machine: Machine, unit: str) -> int:
    return int(machine.show(unit)["MainPID"])


def lives(machine: Machine, unit: str) -> None:
    """It can be reloaded, restarted, stopped and started, and no start of it failed."""
    first = main_pid(machine, unit)
    assert first > 0 and machine.is_active(unit), machine.journal(unit)
    machine.sh(f"systemctl reload {unit}")
    assert main_pid(machine, unit) == first
    machine.sh(f"systemctl restart {unit}")
    assert main_pid(machine, unit) not in (0, first)
    machine.sh(f"systemctl stop {unit}")
    assert machine.show(unit)["ActiveState"] == "inactive", machine.journal(unit)
    machine.sh(f"systemctl start {unit}")
    properties = machine.show(unit)
    assert (properties["ActiveState"], properties["NRestarts"]) == ("active", "0"), machine.journal(unit)


def test_device_plugin_runs_on_a_machine_without_a_kubelet(machine: Machine) -> None:
    machine.sh("test ! -e /var/lib/kubelet && test ! -e /run/cdi")
    install_by_its_comment(machine, PLUGIN)
    lives(machine, PLUGIN)
    made = machine.sh(
        "stat -c '%a %n' /var/lib/kubelet/device-plugins /var/lib/kubelet/plugins_registry /run/cdi"
    )
    assert [line.split()[0] for line in made.splitlines()] == ["750", "750", "755"]


def test_mps_daemons_run_as_a_unit(machine: Machine, tmp_path: Path) -> None:
    stub = mps_stub(tmp_path / "mps", python="/usr/bin/python3")
    machine.write(f"/usr/bin/{PROGRAM}", stub.program.read_text(), mode=0o755)
    machine.write("/etc/gpunode/plugin.yaml", SHARED_GPUS)
    machine.write("/etc/gpunode/env", "CONFIG_FILE=/etc/gpunode/plugin.yaml\nMPS_ROOT=/run/nvidia/mps\n")
    # the stub of NVML keeps compute modes in a file
    drop_in = f"[Service]\nEnvironment={SCENARIO_VARIABLE}={SHARED}/scenario.txt\nReadWritePaths={SHARED}\n"
    machine.write(f"{DROP_INS}/stub.conf", drop_in)
    install_by_its_comment(machine, MPS)
    lives(machine, PLUGIN)
    machine.wait(lambda: machine.run("pgrep", "-f", PROGRAM).code == 0, lambda: machine.journal(PLUGIN))


def test_mps_daemons_have_private_shared_memory(machine: Machine) -> None:
    """With the drop-in that docs/mps.md shows."""
    drop_in = re.search(
        r"^ +```ini\n(.*?)```", (REPOSITORY / "docs/mps.md").read_text(), re.DOTALL | re.MULTILINE
    )
    assert drop_in is not None
    machine.write(f"{DROP_INS}/shm.conf", drop_in[1])
    machine.sh(f"systemctl stop {PLUGIN} && rm -rf /run/nvidia && systemctl daemon-reload")
    machine.sh(f"systemctl start {PLUGIN}")
    lives(machine, PLUGIN)
    theirs = machine.sh(f"stat -c %i /run/nvidia/mps/shm /proc/{main_pid(machine, PLUGIN)}/root/dev/shm")
    assert len(set(theirs.split())) == 1


def test_doctor_metrics_unit_for_prometheus(machine: Machine) -> None:
    install_by_its_comment(machine, DOCTOR)
    machine.sh(f"systemctl start {DOCTOR}")
    assert machine.show(DOCTOR)["ConditionResult"] == "no"
    machine.sh(f"mkdir -p {COLLECTOR} && systemctl start {DOCTOR}")
    assert machine.show(DOCTOR)["Result"] == "success", machine.journal(DOCTOR)
    assert 'gpunode_node_gpus{model="NVIDIA H100 80GB HBM3"} 2' in machine.sh(f"cat {COLLECTOR}/gpunode.prom")
    assert machine.show(DOCTOR_TIMER)["NextElapseUSecMonotonic"] not in ("", "infinity")


def test_cdi_refresh_units(machine: Machine) -> None:
    done = machine.gpunode("cdi", "refresh", "--install")
    assert done.code == 0, done.err
    machine.sh("rm /run/cdi/nvidia.yaml")
    machine.sh(f"systemctl restart {REFRESH}")
    assert machine.show(REFRESH)["Result"] == "success", machine.journal(REFRESH)
    assert "nvidia.com/gpu" in machine.sh("cat /run/cdi/nvidia.yaml")
    machine.sh("rm /run/cdi/nvidia.yaml && touch /usr/bin/nvidia-cdi-hook && ldconfig")
    machine.wait(lambda: machine.read("/run/cdi/nvidia.yaml") != "", lambda: machine.journal(REFRESH))


def test_all_units_run_after_a_reboot(machine: Machine) -> None:
    machine.reboot()
    for unit in (PLUGIN, DOCTOR_TIMER, REFRESH_PATH):
        assert machine.is_active(unit), machine.journal(unit)
    machine.wait(lambda: machine.read("/run/cdi/nvidia.yaml") != "", lambda: machine.journal(REFRESH))
    machine.sh(f"systemctl start {DOCTOR}")
    assert machine.sh("systemctl --failed --plain --no-legend") == ""
    assert machine.show(PLUGIN)["NRestarts"] == "0", machine.journal(PLUGIN)
    lives(machine, PLUGIN)


def test_installed_units_are_removed(machine: Machine) -> None:
    assert machine.gpunode("cdi", "refresh", "--remove").code == 0
    machine.sh(f"systemctl disable --now {PLUGIN} {DOCTOR_TIMER}")
    for unit in (PLUGIN, DOCTOR_TIMER, REFRESH, REFRESH_PATH):
        assert not machine.is_active(unit)
    assert machine.show(REFRESH)["LoadState"] == "not-found"


def test_cdi_units_are_installed_and_rolled_back(machine: Machine) -> None:
    for command in (("cdi", "refresh", "--install"), ("rollback",)):
        done = machine.gpunode(*command)
        assert done.code == 0, done.err
        installed = command[0] == "cdi"
        assert machine.is_active(REFRESH_PATH) == installed
        assert (machine.show(REFRESH_PATH).get("UnitFileState") == "enabled") == installed
    for command in (("cdi", "refresh", "--install"), ("cdi", "refresh", "--remove"), ("rollback",)):
        done = machine.gpunode(*command)
        assert done.code == 0, done.err
    assert machine.is_active(REFRESH_PATH) and machine.show(REFRESH_PATH).get("UnitFileState") == "enabled"
    assert machine.gpunode("cdi", "refresh", "--remove").code == 0
    assert machine.show(REFRESH_PATH)["LoadState"] == "not-found"


def test_mig_layout_is_restored_at_each_boot(machine: Machine) -> None:
    machine.sh(
        "rm -f /run/cdi/nvidia.yaml"
    )  # the machine shows no /proc/driver/nvidia-caps to refresh it from
    machine.write("/root/mig.yaml", LAYOUT)
    done = machine.gpunode("mig", "apply", "-f", "/root/mig.yaml", "-c", "halves", "--persist")
    assert done.code == 0, done.out + done.err
    for _ in range(2):
        assert machine.gpunode("mig", "assert", "-f", "/root/mig.yaml", "-c", "halves").code == 0
        # as a reboot leaves the GPUs
        machine.sh(f"rm {SCENARIO_IN_CONTAINER}.mig")
        assert machine.gpunode("mig", "assert", "-f", "/root/mig.yaml", "-c", "halves").code == 5
        machine.reboot()
        assert machine.is_active(MIG), machine.journal(MIG)
    assert machine.gpunode("rollback").code == 0
    assert machine.show(MIG)["LoadState"] == "not-found"
