"""configure-runtime on real podman: for CDI it only removes the old hook, a drop-in for a named runtime."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.podman_node import PodmanNode

pytestmark = pytest.mark.podman
HOOK = {
    "version": "1.0.0",
    "hook": {"path": "/usr/bin/nvidia-container-runtime-hook", "args": ["nvidia-container-runtime-hook"]},
    "when": {"always": True, "commands": [".*"]},
    "stages": ["prestart"],
}


@pytest.fixture
def node(tmp_path: Path) -> PodmanNode:
    return PodmanNode(tmp_path).prepare()


def test_runtime_is_found_by_name_and_removed_again(node: PodmanNode) -> None:
    data = node.configure()
    assert (data["engine"], data["restart"]["performed"]) == ("podman", False)
    assert "nvidia" in data["active"]["handler"] and node.runtime("--runtime", "nvidia") == "nvidia"
    assert node.runtime() == "runc"
    again = node.configure()
    assert [change["action"] for change in again["changes"]] == ["unchanged"]
    done = node.gpunode("unconfigure-runtime")
    assert done.returncode == 0, done.stderr
    assert '"nvidia" not found' in node.runtime("--runtime", "nvidia") and not node.drop_in.exists()


@pytest.mark.full
def test_default_is_set_and_rolled_back(node: PodmanNode) -> None:
    (node.etc / "containers.conf").write_text('# ours\n[engine]\nruntime = "runc"  # not crun\n')
    assert node.configure("--set-as-default")["active"]["default"] == "nvidia"
    assert node.runtime() == "nvidia"
    done = node.gpunode("rollback")
    assert done.returncode == 0, done.stderr
    assert node.runtime() == "runc" and not node.drop_in.exists()


@pytest.mark.full
def test_runtime_in_the_administrators_file_is_not_changed(node: PodmanNode) -> None:
    conf = node.etc / "containers.conf"
    conf.write_text(f'[engine.runtimes]\nnvidia = ["{node.program}"]   # by hand\n')
    data = node.configure()
    assert [change["action"] for change in data["changes"]] == ["unchanged"] and not node.drop_in.exists()
    assert node.gpunode("unconfigure-runtime").returncode == 0
    assert "nvidia" not in conf.read_text()


def test_old_hook_is_reported_and_removed_with_the_runtime(node: PodmanNode) -> None:
    hook = node.directory / "share/oci/hooks.d/oci-nvidia-hook.json"
    other = hook.with_name("other.json")
    hook.parent.mkdir(parents=True)
    hook.write_text(json.dumps(HOOK))
    other.write_text(json.dumps({**HOOK, "hook": {"path": "/usr/bin/oci-systemd-hook"}}))
    shown = node.gpunode("configure-runtime", "--nvidia-runtime-path", str(node.program), "--dry-run")
    assert "injects GPUs a second time" in shown.stdout + shown.stderr and hook.exists()
    node.gpunode("unconfigure-runtime")
    assert not hook.exists() and other.exists()


def test_program_that_podman_cannot_find_is_refused(node: PodmanNode) -> None:
    done = node.gpunode("configure-runtime", "--nvidia-runtime-path", str(node.directory / "absent"))
    assert done.returncode == 3 and "is not there" in done.stderr and not node.drop_in.exists()


def test_broken_file_is_refused_with_its_position(node: PodmanNode) -> None:
    broken = node.etc / "containers.conf.d/50-site.conf"
    broken.parent.mkdir()
    broken.write_text("[engine\nruntime = 1\n")
    done = node.gpunode("configure-runtime", "--nvidia-runtime-path", str(node.program))
    assert done.returncode == 1, done.stdout
    assert "/etc/containers/containers.conf.d/50-site.conf:1:8: " in done.stderr
    assert not node.drop_in.exists() and broken.read_text() == "[engine\nruntime = 1\n"


def test_later_file_with_another_setting_is_named(node: PodmanNode) -> None:
    later = node.etc / "containers.conf.d/99-z.conf"
    later.parent.mkdir()
    later.write_text('[engine.runtimes]\nnvidia = ["/opt/old/nvidia-container-runtime"]\n')
    done = node.gpunode("configure-runtime", "--nvidia-runtime-path", str(node.program))
    assert done.returncode == 1 and "99-z.conf sets nvidia otherwise" in done.stderr
