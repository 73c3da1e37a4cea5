"""The units and the udev rule: systemd and udev accept them, and they keep the GPUs accessible."""

import re
import shutil
import subprocess

import pytest

from gpunode.cdi import refresh
from gpunode.commands.demo import build_machine
from gpunode.host import Host

REPEATABLE = {"PathChanged"}


@pytest.fixture(scope="module")
def texts():
    return {path: data.decode() for path, data in refresh.files(Host())}


def settings(text):
    lines = (line for line in text.splitlines() if line and not line.startswith(("#", "[")))
    found = [line.partition("=")[::2] for line in lines]
    keys = [key for key, _ in found if key not in REPEATABLE]
    assert len(keys) == len(set(keys))
    return dict(found)


def test_installed_units_are_known_by_path_and_start_with_our_marker(texts):
    assert list(texts) == [refresh.SERVICE_FILE, refresh.PATH_FILE, refresh.RULES_FILE]
    assert all(text.startswith(refresh.MARKER + "\n") for text in texts.values())


def test_service_runs_this_gpunode_and_may_write_one_directory(texts):
    service = settings(texts[refresh.SERVICE_FILE])
    program, *words = service["ExecStart"].split()
    assert words[-2:] == ["cdi", "refresh"]
    assert Host().executable(program)
    assert (service["ProtectSystem"], service["RuntimeDirectory"]) == ("strict", "cdi")
    assert "ReadWritePaths" not in service


def test_service_retries_without_limit_except_after_precondition_failures(texts):
    service = settings(texts[refresh.SERVICE_FILE])
    assert service["StartLimitIntervalSec"] == "0"
    assert (service["Restart"], service["RestartPreventExitStatus"]) == ("on-failure", "3")
    assert int(service["RestartSec"]) >= 10


@pytest.mark.parametrize(("release", "restarts"), [("239 (239-82.el8)", False), ("252 (252.39-1)", True)])
def test_old_systemd_gets_a_unit_without_unsupported_settings(release, restarts, tmp_path):
    """Before 244 a oneshot unit with Restart= is refused as a whole."""
    commands = {"systemctl --version": {"stdout": f"systemd {release}\n+PAM +AUDIT\n"}}
    host = Host(build_machine({"recording": {"commands": commands}}, tmp_path), environ={})
    unit = settings(refresh.files(host)[0][1].decode())
    assert ("Restart" in unit, "RestartPreventExitStatus" in unit) == (restarts, restarts)
    assert unit["Type"] == "oneshot"


def test_service_sandbox_does_not_hide_the_gpus(texts):
    """ProtectClock implies a DeviceAllow, which blocks every device that it doesn't name."""
    forbidden = {"PrivateDevices", "DeviceAllow", "DevicePolicy", "ProtectClock", "ProcSubset", "PrivateTmp"}
    assert forbidden & set(settings(texts[refresh.SERVICE_FILE])) == set()


def test_unloaded_driver_is_not_loaded_again(texts):
    """Between unloading the first and the last module, nothing may open the devices either."""
    service = settings(texts[refresh.SERVICE_FILE])
    assert service["ExecStartPre"].startswith("-/bin/sh -c '[ ! -e /proc/driver/nvidia/version ] || ")
    removals = [
        line for line in texts[refresh.RULES_FILE].splitlines() if "remove" in line and "module" in line
    ]
    assert [re.findall(r'KERNEL=="([^"]+)"', line) for line in removals] == [["nvidia|nvidia_current"]]


def test_udev_rule_only_starts_the_service_and_only_for_nvidia(texts):
    rules = [line for line in texts[refresh.RULES_FILE].replace("\\\n", "").splitlines() if line[0] != "#"]
    runs = [line for line in rules if "RUN" in line]
    assert runs == ['RUN+="/usr/bin/systemctl --no-block start gpunode-cdi-refresh.service"'] or re.fullmatch(
        r'RUN\+="/\S+/systemctl --no-block start gpunode-cdi-refresh\.service"', runs[0]
    )
    asked = [line for line in rules if "SUBSYSTEM" in line]
    assert all("nvidia" in line or "10DE" in line for line in asked)
    assert [line.split("GOTO=")[1] for line in asked] == ['"gpunode"'] * len(asked)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("name", ["a b", "100%", "$x", "plain"])
def test_systemd_accepts_a_program_path_with_special_characters(name, tmp_path):
    program = tmp_path / name / "gpunode"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / "odd.service"
    unit.write_text(f"[Service]\nType=oneshot\nExecStart={refresh._quoted(str(program))} cdi refresh\n")
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_units_of_a_recorded_node_start_that_nodes_program(tmp_path):
    host = Host(build_machine({"executables": ["/usr/local/bin/gpunode"]}, tmp_path), environ={})
    assert b"ExecStart=/usr/local/bin/gpunode cdi refresh\n" in refresh.files(host)[0][1]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_analyze_verify_reports_no_problem(texts, tmp_path):
    files = [path for path in texts if path.endswith((".service", ".path"))]
    for path in files:
        (tmp_path / path.rpartition("/")[2]).write_text(texts[path])
    names = [str(tmp_path / path.rpartition("/")[2]) for path in files]
    done = subprocess.run(["systemd-analyze", "verify", *names], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("udevadm") is None, reason="udevadm is not installed")
def test_udevadm_verify_reports_no_problem(texts, tmp_path):
    rules = tmp_path / "90-gpunode-cdi.rules"
    rules.write_text(texts[refresh.RULES_FILE])
    done = subprocess.run(["udevadm", "verify", str(rules)], capture_output=True, text=True, check=False)
    if "Unknown" in done.stderr and "verify" in done.stderr:
        pytest.skip("this udevadm has no verify (254 and later)")
    assert done.returncode == 0, done.stdout + done.stderr
