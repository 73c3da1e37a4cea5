"""Fixes that gpunode may carry out, and those left to the user."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from gpunode.checks import driver_packages, fixes
from gpunode.checks.catalogue import ALL_CHECKS
from gpunode.checks.finding import Finding, FindingStatus, Fix
from gpunode.checks.fixes import FAMILIES, allowed_steps, planned_fixes, steps_of
from gpunode.checks.report import in_order


def finding(fix: Fix, status: FindingStatus = FindingStatus.FAIL, name: str = "one") -> Finding:
    return Finding(name, "", status, "error", "it is broken", fixes=(fix,))


@pytest.mark.parametrize(
    ("fix", "way", "without", "allowed"),
    [
        (fixes.LOAD_UVM, "safe", 2, 2),
        (fixes.REFRESH_CDI, "safe", 1, 1),
        (fixes.BLACKLIST_NOUVEAU.debian, "safe", 2, 3),
        (fixes.BLACKLIST_NOUVEAU.rhel, "safe", 3, 4),
        (fixes.START_KUBELET, "allow", 0, 1),
        (fixes.CONFIGURE_DOCKER, "allow", 0, 1),
        (fixes.REBOOT, "allow", 0, 1),
        (driver_packages.INSTALL_DRIVER, "hand", 0, 0),
        (fixes.READ_KERNEL_LOG, "hand", 0, 0),
        (fixes.EDIT_DAEMON_JSON, "hand", 0, 0),
        (Fix("systemctl edit --full x && systemctl restart x", disruptive="restart"), "hand", 0, 0),
        (fixes.rebind("0000:3b:00.0"), "hand", 0, 0),
    ],
    ids=lambda value: getattr(value, "command", None),
)
def test_only_safe_fixes_run_without_permission(fix: Fix, way: str, without: int, allowed: int) -> None:
    (mend,) = planned_fixes([finding(fix)])
    assert mend.way == way
    assert len(allowed_steps(mend, ())) == without
    assert len(allowed_steps(mend, ("restart", "drain", "reboot"))) == allowed


def test_each_kind_of_disruption_needs_its_own_permission() -> None:
    upgrade = Fix("gpunode driver install --yes", disruptive="drain")
    both = replace(finding(upgrade), fixes=(upgrade, fixes.REBOOT))
    (planned,) = planned_fixes([both])
    assert (planned.way, planned.disruptive, planned.look) == ("allow", "reboot", False)
    assert allowed_steps(planned, ("reboot",)) == ()
    assert len(allowed_steps(planned, ("drain", "reboot"))) == 2


def test_errors_are_fixed_before_warnings_and_passed_checks_are_skipped() -> None:
    fix = fixes.LOAD_UVM
    found = (
        finding(fix, FindingStatus.PASS, "pci-no-gpu"),
        finding(fix, FindingStatus.WARN, "driver-cve"),
        finding(fix, FindingStatus.FAIL, "kubelet-not-running"),
    )
    planned = planned_fixes(in_order(found))
    assert [one.id for one in planned] == ["kubelet-not-running", "driver-cve"]


@pytest.mark.parametrize(
    "command", ["modprobe a; rm -rf /", "modprobe $(cat x)", "modprobe a && rm x", "systemctl a > b"]
)
def test_commands_that_need_a_shell_or_another_program_are_not_run(command: str) -> None:
    assert steps_of(Fix(command)) == ()


@pytest.mark.parametrize("check", ALL_CHECKS, ids=lambda check: check.id)
def test_executed_steps_match_the_displayed_command(check) -> None:
    for family in FAMILIES:
        fix = check.fix_for(family)
        steps = steps_of(fix)
        assert not fix.safe or steps
        for step in steps:
            if step.argv and step.argv != ("systemctl", "reboot"):
                assert all(word in shlex.split(fix.command) or word in fix.command for word in step.argv)
            elif step.path:
                assert step.path in fix.command
