"""Lines of the kernel's and other logs that a finding quotes: the cause of a series, not its last line."""

import pytest

from fixtures.machines import machine, recorded_host
from gpunode.checks.runner import run_checks
from gpunode.commands.demo import build_machine
from gpunode.facts.node import Node
from gpunode.host import Host

LOG = "/.gpunode/kernel.log"


def finding(host, identifier):
    return next(one for one in run_checks(Node(host)) if one.id == identifier)


def quoted(found, source="dmesg"):
    return [one.value.partition("] ")[2] for one in found.evidence if one.source == source]


def test_first_module_load_error_is_quoted_first(tmp_path):
    lines = quoted(finding(recorded_host("module-fails-to-load", tmp_path), "module-not-loaded"))
    assert lines == [
        "nvidia 0000:18:00.0: Unable to change power state from D3cold to D0, device inaccessible",
        "NVRM: None of the NVIDIA devices were initialized.",
    ]


def test_gpu_that_fails_to_start_is_an_error_with_one_line_per_failure(tmp_path):
    found = finding(recorded_host("gpu-init-failed", tmp_path), "pci-gpu-count-mismatch")
    assert found.status.value == "fail"
    assert quoted(found) == [
        "nvidia 0000:01:00.0: Unable to change power state from D3cold to D0, device inaccessible",
        "NVRM: GPU 0000:01:00.0: RmInitAdapter failed! (0x22:0x56:884)",
        "NVRM: GPU 0000:01:00.0: rm_init_adapter failed, device minor number 0",
    ]


def test_failures_of_another_gpu_are_not_quoted(tmp_path):
    spec = machine("healthy-h100")
    inventory = spec["recording"]["nvml"]["inventory"]
    gone = next(gpu["pci"] for gpu in inventory["gpus"] if gpu["index"] == 2)
    inventory["gpus"] = [gpu for gpu in inventory["gpus"] if gpu["index"] != 2]
    own, other = (f"NVRM: GPU {pci}: RmInitAdapter failed! (0x22:0x56:884)" for pci in (gone, "0000:db:00.0"))
    spec["files"][LOG] = f"[    8.1] {other}\n[    8.2] {own}\n"
    found = finding(Host(build_machine(spec, tmp_path / "m"), environ={}), "pci-gpu-count-mismatch")
    assert (found.status.value, quoted(found)) == ("warn", [own])


def test_repeated_xids_are_evidence_for_a_hanging_nvml(tmp_path):
    (line,) = quoted(finding(recorded_host("nvml-hang-gsp-timeouts", tmp_path), "nvml-hang"))
    assert line.startswith("NVRM: Xid (PCI:0000:5d:00): 119, pid=4100")
    assert line.endswith("(the first of 40)")


def test_failed_akmods_build_is_quoted(tmp_path):
    found = finding(recorded_host("akmods-build-failed", tmp_path), "kernel-unsupported")
    (shown,) = (one for one in found.evidence if one.source.startswith("/var/cache/akmods/"))
    assert "nv-mmap.c:320:5: error: implicit declaration" in shown.value


@pytest.mark.parametrize("name", ["operator-driver-stuck", "operator-driver-gone"])
def test_operator_driver_log_is_evidence_and_the_fix_is_no_package(name, tmp_path):
    bad = [one for one in run_checks(Node(recorded_host(name, tmp_path))) if one.status.value == "fail"]
    assert len(bad) == 1
    sources = [one.source for one in bad[0].evidence]
    (log,) = (one for one in sources if "/nvidia-driver-ctr/" in one)
    assert bad[0].fixes[0].command == f"tail -n 50 {log}"


def test_init_container_of_the_operators_driver_is_quoted(tmp_path):
    spec = machine("operator-driver-stuck")
    driver = next(path for path in spec["files"] if "/nvidia-driver-ctr/" in path)
    pod = driver.rpartition("/nvidia-driver-ctr/")[0]
    del spec["files"][driver]
    line = "2026-11-20T08:14:01.1Z stderr F failed to drain node: cannot delete Pods with local storage\n"
    spec["files"][f"{pod}/k8s-driver-manager/0.log"] = line
    found = finding(Host(build_machine(spec, tmp_path / "m"), environ={}), "module-not-loaded")
    (shown,) = (one for one in found.evidence if "/k8s-driver-manager/" in one.source)
    assert shown.value == "failed to drain node: cannot delete Pods with local storage"


def test_mig_instance_files_in_a_driver_container_are_accepted(tmp_path):
    spec = machine("healthy-mig-h100")
    devices = spec["recording"]["devices"]
    moved = {f"/run/nvidia/driver{path}": node for path, node in devices.items() if "/nvidia-caps/" in path}
    kept = {path: node for path, node in devices.items() if "/nvidia-caps/" not in path}
    spec["recording"]["devices"] = {**kept, **moved}
    found = finding(Host(build_machine(spec, tmp_path / "m"), environ={}), "mig-caps-missing")
    assert found.status.value == "pass"


@pytest.mark.parametrize(
    ("name", "identifier", "unit"),
    [
        ("docker-not-running", "docker-not-running", "docker.service"),
        ("containerd-not-running", "containerd-not-restarted", "containerd.service"),
        ("crio-not-running", "crio-not-running", "crio.service"),
        ("kubelet-not-running", "kubelet-not-running", "kubelet.service"),
    ],
)
@pytest.mark.parametrize("result", ["exit-code", "success"])
def test_last_log_line_of_a_failed_daemon_is_quoted(tmp_path, name, identifier, unit, result):
    spec = machine(name)
    state = (
        f"Result={result}\nId={unit}\nNames={unit}\nLoadState=loaded\nActiveState=failed\nSubState=failed\n"
    )
    spec["files"].pop("/etc/crio/crio.conf.d/99-nvidia.conf", None)  # a better explanation of CRI-O's failure
    commands = spec["recording"].setdefault("commands", {})
    for command in [one for one in commands if one.startswith("systemctl show")]:
        del commands[command]
    commands[f"systemctl show {unit}"] = {"stdout": state}
    commands[f"journalctl -b -q -n 1 --no-pager -o cat _SYSTEMD_UNIT={unit}"] = {"stdout": "bad file: why\n"}
    found = finding(Host(build_machine(spec, tmp_path / "m"), environ={}), identifier)
    assert found.status.value == "fail"
    lines = [one.value for one in found.evidence if one.source == f"journalctl -u {unit}"]
    assert lines == (["bad file: why"] if result == "exit-code" else [])
    assert any(one.source == unit for one in found.evidence)
