"""Settings that each release of Docker needs in its file, from recorded trees without a running daemon."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpunode.errors import ConfigError, PreconditionError, ValidationError
from gpunode.facts.daemons import Daemon
from gpunode.host import Host
from gpunode.runtime import docker
from gpunode.runtime.docker import DockerEngine
from gpunode.runtime.engine import Active, DesiredConfig, Handler, Plan, UnwantedConfig
from tests.files import write

PATH = "/etc/docker/daemon.json"
NVIDIA = Handler("nvidia", "nvidia-container-runtime")
CDI = DesiredConfig((NVIDIA,), cdi=True)


def engine(
    root: Path, text: str | None, version: tuple[int, ...] = (28, 5, 2), *argv: str, **fields: str
) -> DockerEngine:
    path = fields.get("config_path", PATH)
    if text is not None:
        write(root, path, text)
    daemon = Daemon(
        "docker", None, version, path, "", "/run/docker.sock", None, ("dockerd", *argv),
        manager=fields.get("manager", ""),
    )  # fmt: skip
    return DockerEngine(Host(root, environ={}), daemon)


def after(plan: Plan) -> dict[str, object]:
    tree = json.loads(plan.edits[0].after or b"{}")
    assert isinstance(tree, dict)
    return tree


@pytest.mark.parametrize(
    ("version", "text", "features", "verb"),
    [
        ((26, 1, 5), "{}", {"cdi": True}, "restart"),
        ((28, 1, 1), "{}", {"cdi": True}, "restart"),
        ((28, 2, 0), "{}", None, "reload"),
        ((29, 2, 0), "{}", None, "reload"),
        ((29, 2, 0), '{"features": {"cdi": false, "x": true}}', {"cdi": True, "x": True}, "restart"),
        ((26, 1, 5), '{"features": {"cdi": true}}', {"cdi": True}, "reload"),
        ((26, 1, 5), '{"features": null}', {"cdi": True}, "restart"),
    ],
)
def test_cdi_key_is_written_only_if_cdi_is_not_enabled_by_default(
    tmp_path: Path, version: tuple[int, ...], text: str, features: object, verb: str
) -> None:
    plan = engine(tmp_path, text, version).plan(CDI, None)
    assert after(plan).get("features") == features
    assert (plan.verb, plan.switched_cdi) == (verb, verb == "restart")


def test_cdi_enabled_by_a_flag_needs_no_key_and_disabled_by_a_flag_is_refused(tmp_path: Path) -> None:
    on = engine(tmp_path, "{}", (28, 0, 4), "--feature", "cdi").plan(CDI, None)
    assert "features" not in after(on) and not on.switched_cdi
    with pytest.raises(ConfigError, match="flag for features"):
        engine(tmp_path, "{}", (28, 0, 4), "--feature", "cdi=false").plan(CDI, None)


def test_dockerd_started_before_its_cdi_key_is_restarted(tmp_path: Path) -> None:
    text = '{"runtimes": {"nvidia": {"path": "nvidia-container-runtime"}}, "features": {"cdi": true}}'
    active = Active(("nvidia", "runc"), "runc", {"nvidia": "nvidia-container-runtime"}, cdi=False)
    plan = engine(tmp_path, text, (26, 1, 5)).plan(CDI, active)
    assert (plan.edits[0].action, plan.verb) == ("unchanged", "restart")


def test_removal_deletes_an_enabled_cdi_key_and_keeps_a_disabled_one(tmp_path: Path) -> None:
    on = engine(tmp_path, '{"features": {"cdi": true, "x": true}}', (26,))
    plan = on.plan_removal(UnwantedConfig(("nvidia",), cdi=True), None)
    assert (after(plan), plan.verb) == ({"features": {"x": True}}, "restart")
    off = engine(tmp_path, '{"features": {"cdi": false}}', (29,))
    assert not off.plan_removal(UnwantedConfig(("nvidia",), cdi=True), None).changed


def test_entries_of_nvidia_ctk_and_operator_are_removed_and_the_default_restored(
    tmp_path: Path,
) -> None:
    names = ("nvidia", "nvidia-cdi", "nvidia-legacy")
    entries = {name: {"path": f"/usr/local/nvidia/toolkit/{name}", "args": []} for name in names}
    text = json.dumps({"default-runtime": "nvidia", "runtimes": {**entries, "crun": {"path": "crun"}}})
    removal = engine(tmp_path, text)
    tree = after(removal.plan_removal(UnwantedConfig(names, "crun"), None))
    assert tree == {"default-runtime": "crun", "runtimes": {"crun": {"path": "crun"}}}
    assert after(removal.plan_removal(UnwantedConfig(names, "gone"), None)) == {
        "runtimes": {"crun": {"path": "crun"}}
    }
    alone = engine(tmp_path, json.dumps({"default-runtime": "nvidia", "runtimes": entries}))
    edit = alone.plan_removal(UnwantedConfig(names), None).edits[0]
    assert edit.after is not None and json.loads(edit.after) == {}


def test_operator_entry_is_replaced_by_the_program_of_this_node(tmp_path: Path) -> None:
    text = '{"runtimes": {"nvidia": {"path": "/usr/local/nvidia/toolkit/nvidia-container-runtime"}}}'
    own = engine(tmp_path, text)
    assert own.program == "nvidia-container-runtime"
    plan = own.plan(DesiredConfig((NVIDIA,)), None)
    assert after(plan)["runtimes"] == {"nvidia": {"path": NVIDIA.path, "runtimeArgs": []}}
    typed = engine(tmp_path, '{"runtimes": {"nvidia": {"runtimeType": "io.x.v1", "options": {"a": 1}}}}')
    assert after(typed.plan(DesiredConfig((NVIDIA,)), None))["runtimes"] == {
        "nvidia": {"path": NVIDIA.path, "runtimeArgs": []}
    }


def test_full_path_of_this_nodes_own_runtime_is_kept(tmp_path: Path) -> None:
    program = tmp_path / "usr/bin/nvidia-container-runtime"
    program.parent.mkdir(parents=True)
    program.write_text("x")
    program.chmod(0o755)
    text = '{"runtimes": {"nvidia": {"path": "/usr/bin/nvidia-container-runtime", "args": []}}}'
    own = engine(tmp_path, text)
    assert own.program == "/usr/bin/nvidia-container-runtime"
    assert not own.plan(DesiredConfig((Handler("nvidia", own.program),)), None).changed


def test_snap_dockerd_uses_only_programs_of_the_snap(tmp_path: Path) -> None:
    path = "/var/snap/docker/current/config/daemon.json"
    snap = engine(tmp_path, "{}", config_path=path, manager="snap")
    assert snap.program == "/snap/docker/current/usr/bin/nvidia-container-runtime"
    for program in (snap.program, "/usr/bin/nvidia-container-runtime"):
        with pytest.raises(PreconditionError, match="sees only the programs"):
            snap.plan(DesiredConfig((Handler("nvidia", program),)), None)
    inside = tmp_path / snap.program.lstrip("/")
    inside.parent.mkdir(parents=True)
    inside.write_text("x")
    inside.chmod(0o755)
    plan = snap.plan(DesiredConfig((Handler("nvidia", snap.program),)), None)
    assert plan.changed and any("nvidia-support.disabled" in note for note in plan.notes)


def test_default_set_by_a_flag_needs_no_key(tmp_path: Path) -> None:
    flagged = engine(tmp_path, "{}", (28,), "--default-runtime=nvidia")
    plan = flagged.plan(DesiredConfig((NVIDIA,), set_as_default=True), None)
    assert "default-runtime" not in after(plan)
    with pytest.raises(ConfigError, match="--default-runtime for the runtime nvidia"):
        flagged.plan_removal(UnwantedConfig(("nvidia",)), None)


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ('{\n  "runtimes": []\n}', 2, "runtimes is not an object"),
        ('{\n\n  "features": "cdi"\n}', 3, "features is not an object"),
        ('{"debug": true,\n "default-runtime": 1}', 2, "default-runtime is not a string"),
    ],
)
def test_wrong_type_is_refused_with_its_line(tmp_path: Path, text: str, line: int, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        engine(tmp_path, text).plan(CDI, None)
    assert refused.value.message.startswith(f"{PATH}:{line}: {message}")
    assert f"+{line} " in refused.value.hint


@pytest.mark.parametrize(
    ("text", "version", "reason"),
    [
        ('{\n"runtimes": {\n"runc": {"path": "x"}}}', (28,), '3: the runtime name "runc" is reserved'),
        ('{"runtimes": {"a": "b"}}', (28,), '1: the runtime "a" is not an object'),
        ('{"runtimes": {"a": {"path": "x", "runtimeType": "y"}}}', (24,), ""),
        ('{"runtimes": {"a": {}}}', (25,), '1: the runtime "a" needs either a path or a runtimeType'),
        ('{\n"default-runtime": "a"}', (28,), '2: default-runtime "a" is not among runtimes'),
        ('{"default-runtime": "io.containerd.kata.v2"}', (23,), ""),
        ('{"default-runtime": "io.containerd.runc.v2"}', (20, 10), ""),
        ('{"default-runtime": "io.containerd.kata.v2", "runtimes": null}', (20, 10), "1: default-runtime"),
        ('\ufeff{"debug": true}', (20, 10), "1: dockerd 20.10 can't read a byte order mark"),
        ("\n", (20, 10), "1: dockerd 20.10 takes {} for an empty file"),
        ('{"proxies": {"http-proxy": "x"}}', (20, 10), "1: dockerd 20.10 doesn't know http-proxy"),
        ('{"proxies": {"http-proxy": "x"}, "runtimes": null, "default-runtime": null}', (23,), ""),
    ],
)
def test_refusals_of_each_dockerd_release(text: str, version: tuple[int, ...], reason: str) -> None:
    message = docker.refused_by_dockerd(text, PATH, version)
    assert message.startswith(reason) and bool(message) == bool(reason)


def test_file_broken_before_the_change_is_named_as_such(tmp_path: Path) -> None:
    own = engine(tmp_path, '{\n"default-runtime": "gone"\n}')
    with pytest.raises(ValidationError) as refused:
        own.validate(own.plan(DesiredConfig((NVIDIA,)), None), None)
    assert refused.value.message.startswith(f"dockerd refuses {PATH} as it is: {PATH}:2: ")
    assert f"+2 {PATH}" in refused.value.hint
