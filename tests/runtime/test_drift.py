"""Disagreements between files and a running daemon: each with its command, and none without one."""

from __future__ import annotations

import pytest

from gpunode.facts.cdi import DIRECTORIES
from gpunode.facts.daemons import Daemon
from gpunode.facts.effective import ConfigFile, ConfiguredHandler, EngineSettings
from gpunode.facts.writers import GeneratedCopy
from gpunode.runtime.drift import Remedies, drift
from gpunode.runtime.engine import Active

PATH = "/usr/bin/nvidia-container-runtime"
NVIDIA = ConfiguredHandler("nvidia", PATH, "/etc/x.toml")
FILES = EngineSettings((ConfigFile("/etc/x.toml", "main", ""),), (NVIDIA,), "runc", True, DIRECTORIES)
ACTIVE = Active(("runc", "nvidia"), "runc", {"nvidia": PATH}, cdi=True)
REMEDIES = Remedies("reload it", "restart it")


def daemon(name: str = "containerd", version: tuple[int, ...] = (2, 1, 9), manager: str = "") -> Daemon:
    return Daemon(name, None, version, "/etc/x.toml", "", "/run/x.sock", None, manager=manager)


def drifts_of(
    files: EngineSettings, active: Active | None, which: Daemon | None = None
) -> list[tuple[str, str, str]]:
    return [(one.kind, one.subject, one.fix) for one in drift(which or daemon(), files, active, REMEDIES)]


def test_equal_state_has_no_drift() -> None:
    assert drifts_of(FILES, ACTIVE) == []
    assert drifts_of(FILES._replace(default=""), ACTIVE) == []


def test_handler_not_yet_read_by_the_daemon_is_pending() -> None:
    active = ACTIVE._replace(handlers=("runc",))
    assert drifts_of(FILES, active) == [("not-active", "nvidia", "reload it")]


def test_handler_in_no_file_disappears_at_the_next_restart() -> None:
    """So a restart is no fix: the command writes the runtimes of the running daemon to its file."""
    files, fix = FILES._replace(handlers=()), "gpunode configure-runtime --runtime containerd"
    assert drifts_of(files, ACTIVE) == [("not-in-file", "nvidia", fix)]
    k3s = drifts_of(files, ACTIVE._replace(default="nvidia"), daemon(manager="k3s"))
    fix = "gpunode configure-runtime --runtime k3s --set-as-default"
    assert k3s == [("not-in-file", "nvidia", fix), ("other-default", "default runtime", fix)]
    gpu = ACTIVE._replace(handlers=("gpu", "nvidia-cdi"), paths={"gpu": PATH})
    fix = "gpunode configure-runtime --runtime containerd --nvidia-runtime-name gpu --also cdi"
    assert {one[2] for one in drifts_of(files, gpu)} == {fix}


def test_handler_of_another_program_in_no_file_is_kept_by_its_owner() -> None:
    (kata,) = drift(daemon(), FILES, ACTIVE._replace(handlers=("runc", "nvidia", "kata")), REMEDIES)
    assert kata.fix == "restart it" and kata.detail.endswith("; to keep it, add it to /etc/x.toml first")


def test_builtin_handlers_of_an_engine_are_not_drift() -> None:
    active = ACTIVE._replace(handlers=("runc", "crun", "io.containerd.runc.v2", "", "nvidia"))
    assert drifts_of(FILES, active) == []


def test_different_program_and_default_are_reported() -> None:
    active = ACTIVE._replace(default="nvidia", paths={"nvidia": "/old/nvidia-container-runtime"})
    assert drifts_of(FILES, active) == [
        ("other-path", "nvidia", "reload it"),
        ("other-default", "default runtime", "reload it"),
    ]


@pytest.mark.parametrize(
    ("which", "default", "kinds"),
    [
        (daemon("docker"), "runc", []),
        (daemon("docker"), "nvidia", ["other-default"]),
        (daemon("crio", (1, 30)), "runc", []),
        (daemon("crio", (1, 31)), "runc", ["other-default"]),
        (daemon("podman", (4, 3)), "crun", []),
    ],
)
def test_without_a_default_in_the_file_the_engines_own_applies(
    which: Daemon, default: str, kinds: list[str]
) -> None:
    files, active = FILES._replace(default=""), ACTIVE._replace(default=default)
    assert [kind for kind, _, _ in drifts_of(files, active, which)] == kinds


@pytest.mark.parametrize(
    ("in_file", "running", "kinds"), [(True, False, 1), (False, True, 1), (None, True, 0)]
)
def test_inactive_cdi_needs_a_restart(in_file: bool | None, running: bool, kinds: int) -> None:
    drifts = drifts_of(FILES._replace(cdi=in_file), ACTIVE._replace(cdi=running))
    assert drifts == [("other-cdi", "CDI", "restart it")] * kinds
    assert drifts_of(FILES._replace(cdi=in_file), ACTIVE._replace(cdi=None)) == []


def test_shadowing_copy_is_reported_even_for_a_stopped_daemon() -> None:
    copy = GeneratedCopy((("sandbox_image",),), (("cni", "bin_dir"),), {"nvidia": PATH}, "", False)
    drop_in = ConfigFile("/etc/conf.d/99-nvidia.toml", "drop-in", "", copy=copy)
    files = FILES._replace(files=(*FILES.files, drop_in))
    fix = "gpunode configure-runtime --runtime containerd --replace"
    assert drifts_of(files, None) == [("shadowed", "sandbox_image", fix)]
    old = daemon(version=(1, 7, 24))
    assert drifts_of(files, None, old) == [("shadowed", "sandbox_image", fix), ("lost", "cni.bin_dir", fix)]
    assert drifts_of(files, None, daemon(manager="k3s"))[0][2].endswith("--runtime k3s --replace")


def test_unparsable_files_are_not_compared() -> None:
    assert drifts_of(FILES._replace(handlers=(), problem="broken"), ACTIVE) == []


def test_required_restart_is_the_only_fix() -> None:
    running = ACTIVE._replace(default="runc", handlers=(*ACTIVE.handlers, "left-over"))
    fixes = {one.fix for one in drift(daemon(), FILES._replace(default="nvidia"), running, REMEDIES)}
    assert fixes == {"restart it"}
