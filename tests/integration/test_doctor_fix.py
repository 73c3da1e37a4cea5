"""`doctor --fix --apply` on a live node: a private mount namespace whose /sys, /proc and /dev show a GPU.

modprobe and nvidia-modprobe are programs of the test that do what the real ones do: those are not available
without a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli import checked
from tests.waiting import PATIENCE

_UNSHARE = ("unshare", "--mount", "--propagation", "private")
_ALLOWED = subprocess.run(
    [*_UNSHARE, "sh", "-c", "mount -t tmpfs none /mnt && mknod /mnt/null c 1 3"],
    capture_output=True,
    check=False,
)
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(_ALLOWED.returncode != 0, reason="needs root that may mount and make device nodes"),
]

GPU = "0000:3b:00.0"
VERSION = "580.159.03"
_PROC_DEVICES = "Character devices:\n  1 mem\n195 nvidia\n508 nvidia-uvm\n\nBlock devices:\n259 blkext\n"
_SETUP = """\
set -e
mount --bind {place}/pci /sys/bus/pci/devices
mount --bind {place}/module /sys/module
mount --bind {place}/driver /proc/driver
mount --bind {place}/devices /proc/devices
mount -t tmpfs -o mode=0755 none {place}/dev
for node in null:1:3 urandom:1:9 nvidiactl:195:255 nvidia0:195:0; do
    IFS=: read -r name major minor <<END
$node
END
    mknod -m 0666 {place}/dev/$name c $major $minor
done
mount --bind {place}/dev /dev
cp -a /etc {place}/etc && mkdir -p {place}/etc/modprobe.d
mount --bind {place}/etc /etc
# the same root without the files that mark a container, whose kernel modules are its host's matter
mkdir -p {place}/root
for path in /*; do
    if [ -L "$path" ]; then cp -Pf "$path" {place}/root/
    elif [ -d "$path" ]; then mkdir -p "{place}/root$path" && mount --rbind "$path" "{place}/root$path"
    fi
done
exec chroot {place}/root sh -c 'cd "$0" && exec "$@"' "$PWD" "$@"
"""
_MODPROBE = """\
#!/bin/sh
echo "modprobe $*" >> {place}/called
[ -e {place}/broken ] && { echo "modprobe: FATAL: Module nvidia-uvm not found" >&2; exit 1; }
mkdir -p {place}/module/nvidia_uvm && echo live > {place}/module/nvidia_uvm/initstate
"""
_NVIDIA_MODPROBE = """\
#!/bin/sh
echo "nvidia-modprobe $*" >> {place}/called
mknod -m 0666 /dev/nvidia-uvm c 508 0
mknod -m 0666 /dev/nvidia-uvm-tools c 508 1
"""


class Node:
    def __init__(self, place: Path) -> None:
        self.place = place
        pci = place / "pci" / GPU
        for path, text in {
            pci / "vendor": "0x10de",
            pci / "device": "0x2330",
            pci / "class": "0x030200",
            place / "module/nvidia/version": VERSION,
            place / "module/nvidia/initstate": "live",
            place / "driver/nvidia/version": f"NVRM version: NVIDIA UNIX Open Kernel Module  {VERSION}",
            place / f"driver/nvidia/gpus/{GPU}/information": "Device Minor: \t 0\n",
        }.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        (pci / "driver").symlink_to("../../../../bus/pci/drivers/nvidia")
        (place / "devices").write_text(_PROC_DEVICES)
        (place / "dev").mkdir()
        self.program("modprobe", _MODPROBE)
        self.program("nvidia-modprobe", _NVIDIA_MODPROBE)

    def program(self, name: str, text: str) -> None:
        path = self.place / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.replace("{place}", str(self.place)))
        path.chmod(0o755)

    def doctor(self, *words: str) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "PATH": f"{self.place}/bin:{os.environ['PATH']}",
            "GPUNODE_STATE_DIR": str(self.place / "state"),
        }
        setup = ("sh", "-c", _SETUP.replace("{place}", str(self.place)), "sh")
        return subprocess.run(
            [*_UNSHARE, *setup, sys.executable, "-m", "gpunode", "doctor", *words],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
        )

    def fixes(self, *words: str) -> Any:
        done = self.doctor(*words, "-o", "json")
        return checked(done.stdout)

    @property
    def called(self) -> list[str]:
        path = self.place / "called"
        return path.read_text().splitlines() if path.exists() else []

    def journal(self) -> list[Any]:
        return [
            json.loads(path.read_text()) for path in sorted(self.place.glob("state/journal/*/manifest.json"))
        ]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_plan_is_printed_and_nothing_is_changed(node: Node) -> None:
    done = node.doctor("uvm-not-loaded", "--fix")
    assert done.returncode == 1, done.stderr
    assert "modprobe nvidia-uvm && nvidia-modprobe -c0 -u" in done.stdout
    assert "safe: --apply does it" in done.stdout
    assert (node.called, node.journal()) == ([], [])


def test_safe_fix_is_applied_and_its_check_runs_again(node: Node) -> None:
    report = node.fixes("uvm-not-loaded", "--fix", "--apply")
    (done,) = report["data"]["done"]
    assert (done["id"], done["outcome"], report["exitCode"]) == ("uvm-not-loaded", "mended", 0), report
    assert node.called == ["modprobe nvidia-uvm", "nvidia-modprobe -c0 -u"]
    (entry,) = node.journal()
    assert (entry["operation"], entry["state"], entry["check"]) == (
        "doctor-fix",
        "committed",
        "uvm-not-loaded",
    )
    assert entry["commands"] == node.called


def test_safe_fix_stops_before_its_reboot(node: Node) -> None:
    bound = node.place / "pci" / GPU / "driver"
    bound.unlink()
    bound.symlink_to("../../../../bus/pci/drivers/nouveau")
    for name in ("update-initramfs", "dracut", "systemctl"):
        node.program(name, f'#!/bin/sh\necho "{name} $*" >> {{place}}/called\n')
    planned = node.doctor("nouveau-loaded", "--fix").stdout
    assert "  safe: --apply does it, except for systemctl reboot, which needs --allow reboot\n" in planned
    report = node.fixes("nouveau-loaded", "--fix", "--apply")
    (done,) = report["data"]["done"]
    assert (done["outcome"], report["exitCode"]) == ("done", 1), report
    assert done["message"] == "it takes effect after: systemctl reboot (--allow reboot)"
    assert "blacklist nouveau" in (node.place / "etc/modprobe.d/blacklist-nouveau.conf").read_text()
    assert done["commands"] and not any("reboot" in call for call in node.called)
    assert all(command in node.called for command in done["commands"])
    node.fixes("nouveau-loaded", "--fix", "--apply", "--allow", "reboot")
    assert node.called[-1] == "systemctl reboot"


def test_programs_run_under_the_lock(node: Node) -> None:
    is_locked = (
        "flock --nonblock --conflict-exit-code 9 {place}/state/lock true\n"
        "[ $? = 9 ] && echo locked >> {place}/called || exit 1\n"
    )
    node.program("modprobe", _MODPROBE + is_locked)
    report = node.fixes("uvm-not-loaded", "--fix", "--apply")
    assert report["exitCode"] == 0, report
    assert node.called == ["modprobe nvidia-uvm", "locked", "nvidia-modprobe -c0 -u"]


def test_failed_program_is_reported_with_its_output(node: Node) -> None:
    (node.place / "broken").touch()
    done = node.doctor("uvm-not-loaded", "--fix", "--apply")
    assert done.returncode == 1
    assert (
        "uvm-not-loaded failed: modprobe nvidia-uvm: modprobe: FATAL: Module nvidia-uvm not found"
        in done.stdout
    )
    assert node.journal() == []


def test_fix_without_effect_is_not_reported_as_fixed(node: Node) -> None:
    node.program("modprobe", "#!/bin/sh\n")
    node.program("nvidia-modprobe", "#!/bin/sh\n")
    done = node.doctor("uvm-not-loaded", "--fix", "--apply")
    assert done.returncode == 1
    assert "uvm-not-loaded not-mended:" in done.stdout


def test_healthy_node_has_nothing_to_fix(node: Node) -> None:
    node.doctor("uvm-not-loaded", "--fix", "--apply")
    node.program("modprobe", "#!/bin/sh\nexit 1\n")
    done = node.doctor("pci-no-gpu", "module-not-loaded", "--fix", "--apply")
    assert (done.returncode, done.stdout.strip()) == (0, "Nothing to fix")
