"""The systemd unit: systemd accepts it, and ignores no line of it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gpunode.plugin.config.settings import Settings
from gpunode.plugin.kubelet.link import registry

UNIT = Path(__file__).parents[2] / "packaging/gpunode-device-plugin.service"
REPEATABLE = {"ExecStartPre"}


def settings() -> list[tuple[str, str, str]]:
    """(section, key, value) of every line; anything that is none of comment, section or setting fails."""
    section, found = "", []
    for line in UNIT.read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        if header := re.fullmatch(r"\[(\w+)\]", line):
            section = header[1]
            continue
        setting = re.fullmatch(r"(\w+)=(.*)", line)
        assert setting, line
        found.append((section, setting[1], setting[2]))
    return found


def value(key: str) -> str:
    (only,) = [given for _, name, given in settings() if name == key]
    return only


def test_no_setting_occurs_twice() -> None:
    keys = [(section, key) for section, key, _ in settings() if key not in REPEATABLE]
    assert len(keys) == len(set(keys))


def test_service_is_supervised_and_always_restarted() -> None:
    assert (value("Type"), value("NotifyAccess"), value("Restart")) == ("notify", "main", "always")
    assert int(value("WatchdogSec")) >= 10
    assert value("StartLimitIntervalSec") == "0"


def test_service_may_write_only_its_directories_and_has_no_capability() -> None:
    """The sockets' directories, the specifications', and that of the health memory."""
    ours = Settings()
    assert value("ProtectSystem") == "strict"
    assert value("ReadWritePaths").split() == [f"-{ours.directory}", f"-{registry(ours)}"]
    assert ours.state_dir == f"/var/lib/{value('StateDirectory')}"
    made = [given for _, key, given in settings() if key == "ExecStartPre" and "mkdir" in given]
    for path in value("ReadWritePaths").split():
        assert any(path[1:] in command.split() for command in made), f"{path} must exist at the start"
    assert (value("RuntimeDirectory"), value("RuntimeDirectoryPreserve")) == ("cdi", "yes")
    assert value("CapabilityBoundingSet") == ""
    assert value("NoNewPrivileges") == "yes"
    assert value("RestrictAddressFamilies") == "AF_UNIX"


def test_reload_sends_the_supported_signal() -> None:
    assert value("ExecReload") == "/bin/kill -HUP $MAINPID"


def test_sandbox_does_not_hide_the_gpus() -> None:
    """ProtectClock implies a DeviceAllow, which blocks every device that it doesn't name."""
    forbidden = {"PrivateDevices", "DeviceAllow", "DevicePolicy", "ProtectClock", "ProcSubset"}
    assert forbidden & {key for _, key, _ in settings()} == set()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_analyze_verify_reports_no_problem(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/usr/local/bin/gpunode", shutil.which("true") or "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
