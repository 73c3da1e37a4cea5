"""Every recorded machine: exactly its expected findings, and the root cause of blocked checks."""

import re

import pytest

from fixtures.machines import HEALTHY, KERNEL_LOG, expected, machine, names, options, recorded_host
from gpunode.checks.catalogue import ALL_CHECKS
from gpunode.checks.finding import FindingStatus
from gpunode.checks.runner import run_checks
from gpunode.commands import doctor
from gpunode.facts.node import Node, Questions
from gpunode.output.render import plain_lines
from gpunode.output.result import ExitCode
from tests.checks.remedies import holes, placeholders
from tests.silent import SilentProgress


def findings_of(host, **asked):
    return {finding.id: finding for finding in run_checks(Node(host, Questions(**asked)))}


def unusual(findings):
    fine = (FindingStatus.PASS, FindingStatus.SKIP)
    bad = {one.id: one.status.value for one in findings.values() if one.status not in fine}
    return bad | {one.id: "note" for one in findings.values() if one.note}


@pytest.mark.parametrize("name", names())
def test_machine_gives_its_expected_findings(name, tmp_path):
    """Exactly the expected findings, the root cause of blocked checks, and all facts that a user needs."""
    findings = findings_of(recorded_host(name, tmp_path), **options(name))
    found = unusual(findings)
    assert found == expected(name), [findings[one] for one in found]
    failed = {name for name, status in found.items() if status == "fail"}
    assert {one.blocked_by for one in findings.values() if one.blocked_by} <= failed
    for finding in findings.values():
        if finding.status in (FindingStatus.FAIL, FindingStatus.WARN):
            assert finding.evidence and finding.why and finding.fixes, finding
            assert [fix.command for fix in finding.fixes[1:]] in ([], ["reboot"]), finding
            assert all(evidence.source and evidence.value for evidence in finding.evidence), finding
        for fix in finding.fixes:
            assert not placeholders(fix.command) and not holes(fix.command), finding


def test_every_check_reports_a_problem_on_some_machine():
    said = {one for name in names() for one in expected(name)}
    assert {check.id for check in ALL_CHECKS if not check.deep} - said == set()


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_node_gets_a_short_report_and_exit_code_zero(name, tmp_path):
    result = doctor.run(recorded_host(name, tmp_path), SilentProgress(), strict=True)
    lines = [line for block in result.blocks for line in plain_lines(block)]
    assert (result.status, result.exit_code) == ("ok", ExitCode.OK)
    assert lines[0] == "This node is ready: no check found a fault"
    assert len(lines) <= 12


CHAINS = {
    "pci-no-gpu": (
        "pci-no-gpu",
        {"driver-not-installed", "nvml-hang", "toolkit-missing", "kubelet-not-running"},
    ),
    "nouveau-loaded": (
        "nouveau-loaded",
        {"module-not-loaded", "dev-nodes-missing", "nvml-hang", "driver-too-old"},
    ),
    "driver-not-installed": (
        "driver-not-installed",
        {"nouveau-loaded", "module-not-loaded", "toolkit-missing"},
    ),
    "driver-lib-mismatch": ("driver-lib-mismatch", {"nvml-hang", "driver-upgrade-pending", "cdi-spec-stale"}),
    "dkms-not-built": ("dkms-not-built", {"secureboot-unsigned", "module-not-loaded", "uvm-not-loaded"}),
    "secureboot-unsigned": ("secureboot-unsigned", {"module-not-loaded", "driver-lib-mismatch"}),
    "docker-ce-containerd-kubelet": (
        "containerd-cri-disabled",
        {"containerd-not-restarted", "containerd-runtime-missing", "containerd-systemdcgroup"},
    ),
    "docker-config-invalid-json": (
        "docker-config-invalid-json",
        {"docker-flag-file-conflict", "docker-not-running", "docker-runtime-missing"},
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_root_cause_blocks_the_checks_that_depend_on_it(name, tmp_path):
    cause, explained = CHAINS[name]
    findings = findings_of(recorded_host(name, tmp_path), **options(name))
    assert {one for one in explained if findings[one].blocked_by == cause} == explained


FIXES = {
    "driver-lib-mismatch": "reboot",
    "driver-not-installed": "gpunode driver install --yes",
    "libcuda-missing": "apt install libnvidia-compute-580 nvidia-utils-580 && ldconfig",
    "libraries-not-linked": "echo /usr/lib/nvidia >> /etc/ld.so.conf.d/nvidia-driver.conf && ldconfig",
    "dkms-next-kernel": (
        "apt install linux-headers-5.15.0-124-generic && dkms autoinstall -k 5.15.0-124-generic"
    ),
    "dev-node-major-stale": "rm /dev/nvidia-uvm && nvidia-modprobe -c0 -u",
    "docker-config-invalid-json": "${EDITOR:-vi} +4 /etc/docker/daemon.json",
    "docker-runtime-missing": "gpunode configure-runtime --runtime docker",
    "containerd-runtime-missing": "gpunode configure-runtime --runtime containerd",
    "containerd-not-restarted": "systemctl restart containerd",
    "kubelet-not-running": "systemctl start kubelet",
}


@pytest.mark.parametrize("name", FIXES)
def test_first_command_fits_the_evidence(name, tmp_path):
    (identifier,) = expected(name)
    assert (
        findings_of(recorded_host(name, tmp_path), **options(name))[identifier].fixes[0].command
        == FIXES[name]
    )


LINES = {
    "docker-config-invalid-json": ("/etc/docker/daemon.json", 4),
    "docker-flag-file-conflict": ("/etc/docker/daemon.json", 2),
    "containerd-cri-disabled": ("/etc/containerd/config.toml", 3),
    "containerd-config-version": ("/etc/containerd/config.toml", 1),
    "containerd-not-restarted": ("/etc/containerd/config.toml", 12),
}


@pytest.mark.parametrize("name", LINES)
def test_evidence_names_the_file_and_the_line(name, tmp_path):
    (identifier,) = expected(name)
    evidence = findings_of(recorded_host(name, tmp_path), **options(name))[identifier].evidence[0]
    assert (evidence.source, evidence.line) == LINES[name]


@pytest.mark.parametrize(
    ("name", "identifier", "manager"),
    [
        ("driver-libs-mixed", "driver-libs-mixed", "apt"),
        ("dkms-not-built-rocky9", "dkms-not-built", "dnf"),
        ("driver-libs-mixed-suse", "driver-libs-mixed", "zypper"),
    ],
)
def test_fix_command_depends_on_the_distribution(name, identifier, manager, tmp_path):
    fix = findings_of(recorded_host(name, tmp_path))[identifier].fixes[0]
    assert fix.command.startswith(f"{manager} install ")


@pytest.mark.parametrize("name", names())
def test_machine_files_describe_one_driver_and_one_kernel(name):
    """Facts from different machines would have the doctor check a node that can't exist."""
    files = machine(name).get("files", {})
    version = files.get("/sys/module/nvidia/version", "").strip()
    log = files.get(KERNEL_LOG, "")
    loaded = re.findall(r"NVRM: loading NVIDIA UNIX .*?  ([\d.]+) ", log)
    assert not version or set(loaded[-1:]) <= {version}
    assert version in files.get("/proc/driver/nvidia/version", version)
    release = files.get("/proc/sys/kernel/osrelease", "").strip()
    assert release in files.get("/proc/version", release)
    if "tegra264" in files.get("/proc/device-tree/compatible", ""):  # Thor, which L4T knows from 38 on
        assert files["/etc/nv_tegra_release"].startswith("# R38 ") and version.startswith("580.")
