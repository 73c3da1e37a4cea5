"""Oversized configuration files are refused by size, before a parser reads them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from fixtures.machines import machine, options
from gpunode.checks.finding import FindingStatus
from gpunode.checks.runner import run_checks
from gpunode.commands.demo import build_machine
from gpunode.errors import ConfigError
from gpunode.facts.node import Node, Questions
from gpunode.facts.packages import parse_apt_conf
from gpunode.host import Host
from gpunode.host.files import LARGE_BYTES, READ_BYTES, SMALL_BYTES
from tests.cli import gpunode
from tests.files import write

KUBELET = "/var/lib/kubelet/kubeadm-flags.env"
FILES = {
    "/etc/os-release": 'ID=ubuntu\nVERSION_ID="22.04"\nNAME="',
    "/etc/apt/apt.conf.d/20auto-upgrades": 'APT::Periodic::Unattended-Upgrade "1";\nX "',
    "/etc/apt/apt.conf.d/50unattended-upgrades": "Unattended-Upgrade::Package-Blacklist {\n",
    KUBELET: 'KUBELET_KUBEADM_ARGS="',
    "/etc/environment": 'NVIDIA_VISIBLE_DEVICES="',
    "/etc/docker/daemon.json": '{"runtimes": {}, "x": "',
}

REPORTED = list(FILES)[:4]
"""Those that this node's checks need; a parser took the square of their length, or may do so."""


def oversized(root: Path, path: str, size: int) -> Path:
    spec: Any = machine("healthy-h100")
    built = build_machine(spec, root)
    real = built / path.lstrip("/")
    real.parent.mkdir(parents=True, exist_ok=True)
    real.unlink(missing_ok=True)
    text = FILES[path]
    real.write_text(text + '"a";\n' * (size // 5) if text.endswith("{\n") else text + "a" * size)
    write(built, "usr/bin/unattended-upgrade", "x", 0o755)
    return built


@pytest.mark.parametrize("size", [1_500_000, 30_000_000], ids=["1.5 MB", "30 MB"])
@pytest.mark.parametrize("path", list(FILES))
def test_doctor_names_the_file_and_reads_only_up_to_the_limit(tmp_path: Path, path: str, size: int) -> None:
    root = oversized(tmp_path / "m", path, size)
    if path != "/etc/docker/daemon.json" or size > READ_BYTES:
        with pytest.raises(ConfigError, match=r"larger than (64 KiB|16 MiB)") as caught:
            Host(root, environ={}).read_text(
                path, SMALL_BYTES if path != "/etc/docker/daemon.json" else READ_BYTES
            )
        assert caught.value.hint
    ran = gpunode("--root", str(root), "doctor")
    assert ran.code in (0, 1) and "Traceback" not in ran.err
    assert "this is a bug" not in ran.err and "internal error in the check" not in ran.out
    if path in REPORTED:
        assert f"{path}: larger than 64 KiB" in ran.out
    headline = ran.out.splitlines()[0]
    assert "errors" not in headline and (
        path != KUBELET or headline.startswith(f"1 error: can't read {path}")
    )


@pytest.mark.parametrize("name", ["healthy-h100", "healthy-crio", "healthy-suse-kubelet", "healthy-k3s"])
@pytest.mark.full
def test_any_oversized_file_is_one_finding_with_its_name(tmp_path: Path, name: str) -> None:
    """Checks that need the file are skipped, whichever of the machine's files it is."""
    root = build_machine(machine(name), tmp_path / "m")
    for file in (one for one in sorted(root.rglob("*")) if one.is_file() and not one.is_symlink()):
        path, size = f"/{file.relative_to(root)}", file.stat().st_size
        if path.startswith(("/.gpunode/", "/proc/1", "/proc/2", "/proc/8", "/proc/9")):
            continue  # the recording itself, and processes, which are absent then
        os.truncate(file, LARGE_BYTES + 1)
        findings = run_checks(Node(Host(root, environ={}), Questions(**options(name))))
        os.truncate(file, size)
        bad = [one for one in findings if one.status not in (FindingStatus.PASS, FindingStatus.SKIP)]
        errors = [one for one in bad if one.status is FindingStatus.ERROR]
        assert len(bad) <= 1, (path, bad)
        assert all(one.summary == f"can't read {path}: {one.summary.rpartition(': ')[2]}" for one in errors)
        assert all(one.blocked_by in {each.id for each in bad} for one in findings if one.blocked_by), path
        assert all(path in f"{one.summary} {one.evidence}" for one in bad), (path, bad)
        assert all("can't" not in fix.command for one in bad for fix in one.fixes), (path, bad)


def test_reads_stop_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a file that grows, or that has no size, as in /proc."""
    (tmp_path / "f").write_bytes(b"x" * (SMALL_BYTES + 1))
    with pytest.raises(ConfigError, match="larger than 64 KiB"):
        Host().read_bytes(str(tmp_path / "f"), SMALL_BYTES)
    found = os.stat_result((0o100644, 0, 0, 1, 0, 0, 0, 0, 0, 0))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", lambda _: found)
        with pytest.raises(ConfigError, match="larger than 64 KiB"):
            Host().read_bytes(str(tmp_path / "f"), SMALL_BYTES)
    assert Host().read_bytes(str(tmp_path / "f"), LARGE_BYTES) == b"x" * (SMALL_BYTES + 1)


def test_apt_settings_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f'A::B{number} "v";\n' for number in range(2000))
    lines = [one.line for one in parse_apt_conf(text, "x")]
    assert lines == list(range(1, 2001))
