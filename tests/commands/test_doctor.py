"""The command: its options, its JSON contract, and its text output."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from fixtures.machines import recorded_host
from gpunode.checks import catalogue
from gpunode.commands import doctor
from gpunode.errors import UsageError
from gpunode.facts.node import Questions
from gpunode.host import Host
from gpunode.output.html import page
from gpunode.output.render import plain_lines
from gpunode.output.result import ExitCode, Style, Text
from gpunode.output.typed import plain
from tests.silent import SilentProgress

SELECTION = ("only", "skip", "ignore", "preflight")
QUESTIONS = ("expect_gpus", "cuda", "image", "deep")


def report(host, **options):
    selection = doctor.selected(**{name: options.pop(name) for name in SELECTION if name in options})
    questions = Questions(**{name: options.pop(name) for name in QUESTIONS if name in options})
    return doctor.run(host, SilentProgress(), selection, questions, **options)


def lines(result):
    return [line for block in result.blocks for line in plain_lines(block)]


def test_json_output_follows_the_contract(tmp_path):
    document = json.loads(json.dumps(report(recorded_host("driver-lib-mismatch", tmp_path)).envelope()))
    assert (document["kind"], document["status"], document["exitCode"]) == ("DoctorReport", "fail", 1)
    node = document["data"]["node"]
    assert {"class", "distro", "kernel", "engines", "gpus"} <= set(node)
    assert (node["class"], node["distro"]["family"], len(node["gpus"])) == ("bare-metal", "debian", 8)
    assert [engine["name"] for engine in node["engines"]] == ["docker", "containerd"]
    finding = next(one for one in document["data"]["findings"] if one["id"] == "driver-lib-mismatch")
    fields = "id title status severity summary evidence why fix blockedBy refs milliseconds"
    assert set(fields.split()) <= set(finding)
    assert finding["evidence"][0] == {
        "source": "/sys/module/nvidia/version",
        "value": "580.159.03 (loaded module)",
        "line": None,
    }
    fix = {
        "command": "reboot",
        "needsRoot": True,
        "disruptive": "reboot",
        "safe": False,
        "steps": [],
        "change": "",
        "look": False,
        "note": "",
        "effect": "reboots this machine",
        "before": "",
    }
    assert finding["fix"] == [fix]
    assert sum(document["data"]["counts"].values()) == len(document["data"]["findings"])


def test_warnings_count_only_when_strict(tmp_path):
    host = recorded_host("driver-upgrade-pending", tmp_path)
    assert (report(host).status, report(host).exit_code) == ("warn", ExitCode.OK)
    assert report(host, strict=True).exit_code is ExitCode.FAILED


def test_only_runs_the_named_check(tmp_path):
    result = report(recorded_host("driver-upgrade-pending", tmp_path), only=("pci-no-gpu",))
    assert [one.id for one in result.data.findings] == ["pci-no-gpu"]
    assert result.exit_code is ExitCode.OK


def test_only_with_a_blocked_check_still_fails_with_its_cause(tmp_path):
    result = report(recorded_host("pci-no-gpu", tmp_path), only=("nvml-hang",))
    assert [(one.id, one.blocked_by) for one in result.data.findings] == [
        ("pci-no-gpu", None),
        ("nvml-hang", "pci-no-gpu"),
    ]
    assert result.exit_code is ExitCode.FAILED


def test_ignored_check_neither_fails_nor_blocks(tmp_path):
    result = report(recorded_host("docker-flag-file-conflict", tmp_path), skip=("docker-flag-file-conflict",))
    findings = {one.id: one for one in result.data.findings}
    assert findings["docker-flag-file-conflict"].summary == "skipped by --skip"
    assert findings["docker-not-running"].blocked_by is None


@pytest.mark.parametrize("option", ["only", "skip"])
def test_unknown_id_is_a_usage_error_with_the_nearest_id(option, tmp_path):
    with pytest.raises(UsageError) as raised:
        report(Host(tmp_path), **{option: ("nouveau-loded",)})
    assert "nouveau-loaded" in raised.value.hint


def test_verdict_comes_first_and_the_first_command_last(tmp_path):
    result = report(recorded_host("dkms-not-built", tmp_path))
    shown = lines(result)
    assert shown[0] == "1 error: no NVIDIA module was built for the running kernel 5.15.0-124-generic"
    assert result.blocks[0].style is Style.BAD
    (waiting,) = [line for line in shown if line.startswith("WAIT ")]
    assert waiting.endswith(" checks  not run until dkms-not-built is fixed")
    assert shown[-6] == "Fix first, as root: dkms-not-built"
    assert shown[-5].startswith("  1. apt install linux-headers-5.15.0-124-generic && dkms")
    assert shown[-4] == "     (disrupts nothing that runs)"
    assert shown[-3].startswith("     If this fails, another kernel has a module. ")
    assert shown[-2:] == ["  2. gpunode doctor", "More: gpunode explain dkms-not-built"]


def test_failed_layer_is_one_problem_however_many_checks_depend_on_it(tmp_path):
    result = report(recorded_host("nouveau-loaded", tmp_path))
    problems = [block for block in result.blocks if isinstance(block, Text) and block.style is Style.BAD]
    assert len(problems) == 2  # the verdict and the problem itself


@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="this machine has an NVIDIA driver")
def test_machine_without_a_gpu_has_one_root_cause():
    result = report(Host())
    findings = result.data.findings
    assert result.exit_code is ExitCode.FAILED
    assert [one.id for one in findings if one.status.value == "fail"] == ["pci-no-gpu"]
    others = [one for one in findings if one.id != "pci-no-gpu"]
    assert {one.status.value for one in others} == {"skip"}
    assert all(one.blocked_by == "pci-no-gpu" or "not applicable" in one.summary for one in others)


def test_examined_machine_is_not_changed(tmp_path):
    host = recorded_host("dev-nodes-missing", tmp_path)

    def state():
        return {path: path.lstat().st_mtime_ns for path in sorted(host.root.rglob("*"))}

    before = state()
    report(host)
    assert state() == before


def test_unreadable_node_is_not_ready(tmp_path):
    class Closed(Host):
        def path(self, path, *, follow=True):
            if str(path).startswith("/etc/containerd"):
                raise PermissionError(13, "Permission denied", str(path))
            return super().path(path, follow=follow)

    recorded = recorded_host("healthy-h100", tmp_path)
    result = report(Closed(recorded.root, environ={}))
    shown = lines(result)
    assert re.fullmatch(r"No fault found, but \d+ checks could not run without root", shown[0])
    assert result.blocks[0].style is Style.WARN
    (reason,) = [line for line in shown if line.startswith("not checked, needs root")]
    assert "/etc/containerd/config.toml" in reason


def test_unknown_kind_of_node_is_not_ready(tmp_path):
    for name in ("etc", "proc", "sys"):
        (tmp_path / name).mkdir()
    (tmp_path / "etc/nv_tegra_release").write_text("# R36\n")
    shown = lines(report(Host(tmp_path, environ={}), only=("nouveau-loaded",)))
    assert shown[0] == "No check ran: not applicable on this kind of node (tegra)"


def test_command_names_the_service_it_restarts(tmp_path):
    shown = lines(report(recorded_host("docker-not-restarted", tmp_path / "node")))
    assert "  1. systemctl reload docker" in shown
    assert not any("restarts" in line for line in shown)
    (tmp_path / "other").mkdir()
    shown = lines(report(recorded_host("docker-not-running", tmp_path / "other")))
    assert any(line.startswith("  1. systemctl restart docker") for line in shown), shown[-4:]


def test_report_prints_the_age_of_its_reference_tables(tmp_path, monkeypatch):
    """Nothing is called up to date: bulletins published since are in no table."""
    host = recorded_host("healthy-h100", tmp_path)
    result = report(host)
    (oldest, *_) = sorted(result.data.tables, key=lambda one: one.date)
    assert {"name", "date", "source", "ageDays"} == set(plain(oldest))
    assert lines(result)[-1].startswith(
        f"Based on NVIDIA's releases and bulletins up to {oldest.date} ({oldest.age_days} day"
    )
    monkeypatch.setattr(Host, "now", lambda host: 4102444800.0)  # 2100
    assert lines(report(host))[-1].endswith(" days ago): newer ones are unknown")
    assert not any("up to date" in line for line in lines(report(host)))


@pytest.mark.parametrize(
    ("machine", "kind"),
    [
        ("healthy-vm-passthrough", "in a virtual machine"),
        ("healthy-wsl2", "WSL2"),
        ("healthy-jetson-orin", "Tegra"),
    ],
)
def test_second_line_names_the_kind_of_node(machine, kind, tmp_path):
    lines = plain_lines(report(recorded_host(machine, tmp_path)).blocks[1])
    assert f" · {kind} · " in f"{' '.join(lines)} · "


def test_ignored_check_that_crashed_hides_no_finding(tmp_path, monkeypatch):
    def breaks(node):
        raise RuntimeError("out of order")

    broken = replace(catalogue.BY_ID["gpu-arch-dropped"], run=breaks)
    monkeypatch.setitem(catalogue.BY_ID, broken.id, broken)
    checks = tuple(catalogue.BY_ID[check.id] for check in catalogue.ALL_CHECKS)
    monkeypatch.setattr("gpunode.checks.runner.ALL_CHECKS", checks)
    result = report(recorded_host("driver-lib-mismatch", tmp_path), ignore=("all:known",))
    findings = {finding.id: finding for finding in result.data.findings}
    assert findings[broken.id].ignored == "known"
    assert findings["driver-lib-mismatch"].ignored == "known"
    assert {finding.blocked_by for finding in findings.values()} == {None, "driver-lib-mismatch"}


def test_no_command_is_wrapped(tmp_path):
    result = report(recorded_host("secureboot-unsigned", tmp_path))
    commands = [fix.command for finding in result.data.findings for fix in finding.fixes]
    assert commands[1:] == ["reboot"]
    shown = [block for block in result.blocks if isinstance(block, Text) and commands[0] in block.text]
    assert len(shown) == 1
    assert {block.style for block in shown} == {Style.COMMAND}


@pytest.mark.parametrize(
    ("options", "headline"),
    [
        ({"only": ("uvm-not-loaded",)}, "No fault found by 1 check; the other checks did not run"),
        ({"skip": ("driver-eol:known", "driver-cve")}, "No fault found, 2 checks skipped"),
        ({"preflight": "kubernetes"}, "No fault blocks kubernetes"),
        (
            {"preflight": "kubernetes", "skip": ("driver-eol",)},
            "No fault blocks kubernetes, 1 check skipped",
        ),
    ],
)
def test_partial_run_does_not_call_the_node_ready(options, headline, tmp_path):
    result = report(recorded_host("healthy-h100", tmp_path), **options)
    assert lines(result)[0] == headline
    head = page(json.loads(json.dumps(result.envelope())))
    assert f'<p class="verdict">{headline}</p>' in head
    chosen = result.data.selection
    assert [bool(getattr(chosen, name)) for name in ("only", "skip", "preflight")] == [
        name in options for name in ("only", "skip", "preflight")
    ]
