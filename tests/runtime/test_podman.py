"""Podman's plan on recorded nodes: changes for CDI, changes for a named runtime, and notes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from gpunode.errors import DaemonError, PreconditionError, UsageError
from gpunode.facts.podman import find_podman
from gpunode.host import Host
from gpunode.runtime.engine import DesiredConfig, Handler, Plan, UnwantedConfig
from gpunode.runtime.podman import DROP_IN, PodmanEngine
from tests.files import write

NVIDIA = DesiredConfig((Handler("nvidia", "/usr/bin/nvidia-container-runtime"),))
CDI = DesiredConfig(NVIDIA.handlers, cdi=True)
HOOK = "/usr/share/containers/oci/hooks.d/oci-nvidia-hook.json"


def info(name: str, path: str) -> dict[str, object]:
    return {"stdout": json.dumps({"host": {"ociRuntime": {"name": name, "path": path}}})}


def node(root: Path, version: str = "4.3.1", commands: Mapping[str, object] | None = None) -> PodmanEngine:
    write(root, "/usr/bin/podman", "x").chmod(0o755)
    recorded: dict[str, object] = {"/usr/bin/podman --version": {"stdout": f"podman version {version}\n"}}
    recorded |= commands or {}
    write(root, "/.gpunode/recording.json", json.dumps({"commands": recorded}))
    host = Host(root, environ={})
    daemon = find_podman(host)
    assert daemon is not None
    return PodmanEngine(host, daemon)


def edits(plan: Plan) -> dict[str, str]:
    return {edit.path: edit.action for edit in plan.changed}


def after(plan: Plan, path: str = DROP_IN) -> str:
    return next(edit.after or b"" for edit in plan.edits if edit.path == path).decode()


def test_named_runtime_is_written_to_a_drop_in(tmp_path: Path) -> None:
    plan = node(tmp_path).plan(NVIDIA, None)
    assert (edits(plan), plan.verb) == ({DROP_IN: "created"}, "wait")
    assert after(plan) == '[engine.runtimes]\nnvidia = ["/usr/bin/nvidia-container-runtime"]\n'


def test_default_keeps_other_settings_of_the_drop_in(tmp_path: Path) -> None:
    engine = node(tmp_path)
    write(tmp_path, "/etc/containers/containers.conf", '[engine]\nruntime = "crun"\n')
    write(tmp_path, DROP_IN, "[containers]\npids_limit = 9 # ours\n")
    plan = engine.plan(DesiredConfig(NVIDIA.handlers, set_as_default=True), None)
    assert plan.previous_default == "crun"
    assert '[engine]\nruntime = "nvidia"' in after(plan) and "pids_limit = 9 # ours" in after(plan)


def test_cdi_changes_no_file_of_podman(tmp_path: Path) -> None:
    plan = node(tmp_path).plan(CDI, None)
    assert (plan.changed, plan.verb, plan.notes) == ((), "none", ())


def test_cdi_removes_the_old_hook_and_the_runtime_only_reports_it(tmp_path: Path) -> None:
    engine = node(tmp_path)
    write(tmp_path, HOOK, '{"hook": {"path": "/usr/bin/nvidia-container-toolkit"}}')
    assert edits(engine.plan(CDI, None)) == {HOOK: "removed"}
    beside = engine.plan(NVIDIA, None)
    assert HOOK not in edits(beside) and any("a second time" in note for note in beside.notes)


def test_cdi_is_refused_before_4_1(tmp_path: Path) -> None:
    with pytest.raises(PreconditionError, match=r"podman 3\.4\.2 has no CDI"):
        node(tmp_path, "3.4.2").plan(CDI, None)
    assert node(tmp_path, "3.4.2").plan(NVIDIA, None).changed


def test_cdi_directories_without_ours_are_reported(tmp_path: Path) -> None:
    engine = node(tmp_path, "5.2.0")
    conf = write(tmp_path, "/etc/containers/containers.conf", '[engine]\ncdi_spec_dirs = ["/srv/cdi"]\n')
    assert any("/srv/cdi" in note for note in engine.plan(CDI, None).notes)
    conf.write_text('[engine]\ncdi_spec_dirs = ["/srv/cdi", "/etc/cdi"]\n')
    assert engine.plan(CDI, None).notes == ()


def test_selinux_gets_its_command(tmp_path: Path) -> None:
    engine = node(tmp_path)
    write(tmp_path, "/sys/fs/selinux/enforce", "1")
    assert any("setsebool -P container_use_devices on" in note for note in engine.plan(CDI, None).notes)
    write(tmp_path, "/sys/fs/selinux/enforce", "0")
    assert engine.plan(CDI, None).notes == ()


def test_removal_keeps_the_package_file_and_other_runtimes(tmp_path: Path) -> None:
    engine = node(tmp_path)
    write(tmp_path, "/usr/share/containers/containers.conf", '[engine.runtimes]\nnvidia = ["/x"]\n')
    conf = "/etc/containers/containers.conf"
    write(
        tmp_path,
        conf,
        '[engine]\nruntime = "nvidia"\n\n[engine.runtimes]\nnvidia = ["/x"]\nkata = ["/k"] # vm\n',
    )
    write(tmp_path, DROP_IN, '[engine.runtimes]\nnvidia = ["/x"]\n')
    plan = engine.plan_removal(UnwantedConfig(("nvidia",)), None)
    assert (edits(plan), plan.verb) == ({conf: "updated", DROP_IN: "removed"}, "wait")
    assert after(plan, conf) == '[engine]\n\n[engine.runtimes]\nkata = ["/k"] # vm\n'


def test_removal_without_changes_runs_no_command(tmp_path: Path) -> None:
    plan = node(tmp_path).plan_removal(UnwantedConfig(("nvidia",)), None)
    assert (plan.changed, plan.verb) == ((), "none")


def test_podman_is_queried_for_each_runtime_of_its_files(tmp_path: Path) -> None:
    answers = {
        "/usr/bin/podman info --format json": info("crun", "/usr/bin/crun"),
        "/usr/bin/podman --runtime nvidia info --format json": info("nvidia", "/n"),
        "/usr/bin/podman --runtime gone info --format json": {
            "code": 125,
            "stderr": 'Error: "gone" not found',
        },
    }
    engine = node(tmp_path, commands=answers)
    write(tmp_path, DROP_IN, '[engine.runtimes]\nnvidia = ["/n"]\ngone = ["/g"]\n')
    active = engine.query()
    assert (active.handlers, active.default) == (("crun", "nvidia"), "crun")
    assert active.paths == {"crun": "/usr/bin/crun", "nvidia": "/n"}


@pytest.mark.parametrize(
    "answer",
    [
        {"code": 125, "stderr": "Error: boom"},
        {"stdout": "[]"},
        {"stdout": "{"},
        {"stdout": '{"host": {"ociRuntime": 1}}'},
    ],
)
def test_invalid_responses_are_errors(tmp_path: Path, answer: object) -> None:
    engine = node(tmp_path, commands={"/usr/bin/podman info --format json": answer})
    with pytest.raises(DaemonError, match="podman info"):
        engine.query()


def test_file_that_podman_does_not_read_is_refused(tmp_path: Path) -> None:
    engine = node(tmp_path)
    daemon = find_podman(engine.host, "/srv/containers.conf")
    assert daemon is not None
    with pytest.raises(UsageError, match="not /srv/containers"):
        PodmanEngine(engine.host, daemon).plan(NVIDIA, None)
