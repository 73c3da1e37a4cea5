"""The drop-in that lets the plugin's systemd unit run MPS control daemons."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gpunode.plugin.config.settings import MPS_ROOT

PACKAGING = Path(__file__).parents[3] / "packaging"
PLUGIN = PACKAGING / "gpunode-device-plugin.service"
DROP_IN = PACKAGING / "gpunode-device-plugin-mps.conf"


def settings() -> list[tuple[str, str]]:
    """(key, value) of every line of the unit and the drop-in; anything that is none of comment, section or
    setting fails."""
    found = []
    for line in (*PLUGIN.read_text().splitlines(), *DROP_IN.read_text().splitlines()):
        if not line or line.startswith("#") or re.fullmatch(r"\[(Unit|Service|Install)\]", line):
            continue
        setting = re.fullmatch(r"(\w+)=(.*)", line)
        assert setting, line
        found.append((setting[1], setting[2]))
    return found


def value(key: str) -> str:
    """The last one, which is effective."""
    return [given for name, given in settings() if name == key][-1]


def test_no_setting_occurs_twice() -> None:
    keys = [line.partition("=")[0] for line in DROP_IN.read_text().splitlines() if "=" in line[:30]]
    assert len(keys) == len(set(keys))


def test_service_is_supervised_and_always_restarted() -> None:
    assert (value("Type"), value("NotifyAccess"), value("Restart")) == ("notify", "main", "always")
    assert value("StartLimitIntervalSec") == "0"
    assert value("ExecReload") == "/bin/kill -HUP $MAINPID"
    assert value("Environment") == "GPUNODE_PLUGIN_SERVE_MPS=true"


def test_daemons_survive_the_service_and_it_has_time_to_stop_them() -> None:
    assert value("KillMode") == "process"
    assert int(value("TimeoutStopSec")) > 10
    assert value("MemoryMax") == "infinity"


def test_service_may_write_its_root_and_sees_the_nodes_shared_memory() -> None:
    assert (f"/run/{value('RuntimeDirectory')}", value("RuntimeDirectoryPreserve")) == (MPS_ROOT, "yes")
    assert value("ReadWritePaths") == "/dev/shm"
    assert value("PrivateTmp") == "no"
    assert not {"PrivateIPC", "PrivateUsers"} & {key for key, _ in settings()}


def test_service_may_set_compute_modes_and_open_the_gpus() -> None:
    assert "CAP_SYS_ADMIN" in value("CapabilityBoundingSet").split()
    assert value("SystemCallFilter") == ""
    forbidden = {"PrivateDevices", "DeviceAllow", "DevicePolicy", "ProtectClock", "ProcSubset"}
    assert forbidden & {key for key, _ in settings()} == set()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_analyze_verify_reports_no_problem(tmp_path: Path) -> None:
    copy = tmp_path / PLUGIN.name
    text = PLUGIN.read_text().replace("/usr/local/bin/gpunode", shutil.which("true") or "/bin/true")
    copy.write_text(text)
    drop_in = tmp_path / f"{PLUGIN.name}.d" / "mps.conf"
    drop_in.parent.mkdir()
    drop_in.write_text(DROP_IN.read_text())
    done = subprocess.run(
        ["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
