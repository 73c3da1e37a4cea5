"""CRI-O's plan in particular: inherited settings, removals, refusals, and notes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fixtures.crio import make_node
from gpunode.errors import ConfigError, DaemonError, PreconditionError, UsageError, ValidationError
from gpunode.facts.crio import find_crio
from gpunode.host import Host
from gpunode.host.journal import FileEdit
from gpunode.output.typed import toml
from gpunode.runtime.crio import CrioEngine
from gpunode.runtime.engine import Active, DesiredConfig, Handler, Plan, UnwantedConfig
from tests.files import write

NVIDIA = DesiredConfig((Handler("nvidia", "/usr/bin/nvidia-container-runtime"),))
DROP_IN = "/etc/crio/crio.conf.d/99-nvidia.toml"
TOOLKIT = "/etc/nvidia-container-runtime/config.toml"
HOOK = "/usr/share/containers/oci/hooks.d/oci-nvidia-hook.json"


def engine(root: Path, drop_in: str = "") -> CrioEngine:
    host = Host(root, environ={})
    daemon = find_crio(host)
    assert daemon is not None
    return CrioEngine(host, daemon, drop_in)


def edits(plan: Plan) -> dict[str, str]:
    return {edit.path: edit.action for edit in plan.changed}


def handler(plan: Plan, name: str = "nvidia") -> dict[str, Any]:
    edit = next(edit for edit in plan.edits if edit.path == DROP_IN)
    table = toml((edit.after or b"").decode())["crio"]["runtime"]["runtimes"][name]
    assert isinstance(table, dict)
    return table


def test_drop_in_contains_only_the_handler(tmp_path: Path) -> None:
    plan = engine(make_node(tmp_path, "packaged")).plan(NVIDIA, None)
    (edit,) = plan.changed
    assert edit.after is not None and (edit.path, edit.action) == (DROP_IN, "created")
    assert edit.after.decode() == (
        "[crio.runtime.runtimes.nvidia]\n"
        'runtime_path = "/usr/bin/nvidia-container-runtime"\n'
        'runtime_type = "oci"\n'
        'runtime_root = "/run/crun"\n'
        'monitor_path = "/usr/libexec/crio/conmon"\n'
        'allowed_annotations = ["io.containers.trace-syscall"]\n'
    )


def test_handler_of_a_virtual_machine_is_never_copied(tmp_path: Path) -> None:
    table = handler(engine(make_node(tmp_path, "kata-default")).plan(NVIDIA, None))
    assert table["runtime_root"] == "/run/crun"
    assert not {"privileged_without_host_devices", "runtime_pull_image"} & table.keys()


def test_variants_are_registered_with_the_same_options(tmp_path: Path) -> None:
    path = "/usr/bin/nvidia-container-runtime"
    desired = DesiredConfig(
        (*NVIDIA.handlers, Handler("nvidia-cdi", f"{path}.cdi"), Handler("nvidia-legacy", f"{path}.legacy"))
    )
    plan = engine(make_node(tmp_path, "openshift")).plan(desired, None)
    ours, cdi = handler(plan), handler(plan, "nvidia-cdi")
    assert cdi == {**ours, "runtime_path": f"{path}.cdi"} and ours["monitor_cgroup"] == "pod"


def test_additions_of_the_administrator_are_kept_unless_replaced(tmp_path: Path) -> None:
    root = make_node(tmp_path, "packaged")
    write(
        root,
        DROP_IN,
        "# mine\n[crio.runtime.runtimes.nvidia]\nruntime_path = '/old'\nruntime_root = '/run/mine' # so\n",
    )
    plan = engine(root).plan(NVIDIA, None)
    assert handler(plan)["runtime_root"] == "/run/mine" and b"# mine" in (plan.changed[0].after or b"")
    replaced = engine(root).plan(DesiredConfig(NVIDIA.handlers, replace=True), None)
    assert handler(replaced)["runtime_root"] == "/run/crun"


def test_missing_monitor_is_replaced_by_the_one_of_other_handlers(tmp_path: Path) -> None:
    root = make_node(tmp_path, "nvidia-ctk-effective")
    (root / "usr/libexec/crio/conmon").rename(root / "usr/libexec/crio/conmon-2")
    base = root / "etc/crio/crio.conf.d/10-crio.conf"
    base.write_text(base.read_text().replace("crio/conmon", "crio/conmon-2"))
    assert handler(engine(root).plan(NVIDIA, None))["monitor_path"] == "/usr/libexec/crio/conmon-2"


def test_monitor_of_the_package_is_named_if_no_other_setting_does(tmp_path: Path) -> None:
    root = make_node(tmp_path, "commented-out")
    assert handler(engine(root).plan(NVIDIA, None))["monitor_path"] == "/usr/libexec/crio/conmon"
    write(root, "/etc/crio/crio.conf", '[crio.runtime]\nconmon = "/opt/conmon"\n')
    assert "monitor_path" not in handler(engine(root).plan(NVIDIA, None))


def test_leftovers_in_every_directory_are_removed(tmp_path: Path) -> None:
    plan = engine(make_node(tmp_path, "leftovers")).plan(NVIDIA, None)
    assert edits(plan) == {
        DROP_IN: "created",
        f"{DROP_IN}.bak": "removed",
        "/etc/crio/conf.d/99-nvidia.toml": "removed",
    }
    assert any("never reads it" in note for note in plan.notes) and plan.verb == "restart"


def test_leftover_with_foreign_settings_keeps_them(tmp_path: Path) -> None:
    root = make_node(tmp_path, "leftovers")
    backup = write(
        root,
        f"{DROP_IN}.bak",
        (root / f"{DROP_IN}.bak".lstrip("/")).read_text() + "\n[crio.image]\npause_image = 'p'\n",
    )
    plan = engine(root).plan(NVIDIA, None)
    assert edits(plan)[f"{DROP_IN}.bak"] == "updated"
    after = next(edit.after for edit in plan.changed if edit.path.endswith(".bak"))
    assert toml((after or b"").decode()) == {"crio": {"image": {"pause_image": "p"}}} and backup.exists()


def test_temporary_file_of_a_killed_write_is_a_leftover(tmp_path: Path) -> None:
    root = make_node(tmp_path, "nvidia-ctk-effective")
    hidden = "/etc/crio/crio.conf.d/.99-nvidia.toml.x1.gpunode"
    write(root, hidden, (root / DROP_IN.lstrip("/")).read_text())
    assert edits(engine(root).plan(NVIDIA, None)) == {hidden: "removed"}
    assert edits(engine(root).plan_removal(UnwantedConfig(("nvidia",)), None))[hidden] == "removed"


def test_removing_an_unread_file_needs_no_restart(tmp_path: Path) -> None:
    root = make_node(tmp_path, "nvidia-ctk-effective")
    write(root, "/etc/crio/conf.d/99-nvidia.toml", (root / DROP_IN.lstrip("/")).read_text())
    plan = engine(root).plan(NVIDIA, None)
    assert edits(plan) == {"/etc/crio/conf.d/99-nvidia.toml": "removed"} and plan.verb == "none"


def test_later_file_loses_only_the_handler(tmp_path: Path) -> None:
    plan = engine(make_node(tmp_path, "later-file")).plan(NVIDIA, None)
    later = next(edit for edit in plan.changed if edit.path.endswith("zz-site.conf"))
    assert later.after == b"# the site's own settings\n[crio.runtime]\npids_limit = 8192\n\n"
    assert any(":5 has a handler nvidia that would replace" in note for note in plan.notes)


def test_later_default_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"zz-default\.conf:3 names another default") as caught:
        engine(make_node(tmp_path, "later-default")).plan(
            DesiredConfig(NVIDIA.handlers, set_as_default=True), None
        )
    assert "+3 /etc/crio/crio.conf.d/zz-default.conf" in caught.value.hint


@pytest.mark.parametrize(("flag", "variable"), [("--default-runtime=runc", ""), ("", "DEFAULT_RUNTIME=runc")])
def test_flag_that_overrides_the_files_is_refused(tmp_path: Path, flag: str, variable: str) -> None:
    root = make_node(tmp_path, "packaged")
    start(root, flag, variable)
    with pytest.raises(ConfigError, match="--default-runtime runc"):
        engine(root).plan(DesiredConfig(NVIDIA.handlers, set_as_default=True), None)
    assert engine(root).plan(NVIDIA, None).changed


@pytest.mark.parametrize("name", ["nvidia", "other"])
def test_handler_set_by_a_flag_overrides_the_files_too(tmp_path: Path, name: str) -> None:
    root = make_node(tmp_path, "packaged")
    start(root, "", f"RUNTIMES=a:/b:/c,{name}:/opt/runtime:/run")
    if name == "other":
        assert engine(root).plan(NVIDIA, None).changed
        return
    with pytest.raises(ConfigError, match="--runtimes nvidia:/opt/runtime:/run"):
        engine(root).plan(NVIDIA, None)


def start(root: Path, flag: str, variable: str) -> None:
    write(root, "/proc/9/cmdline", f"/usr/bin/crio\0{flag}\0")
    write(root, "/proc/9/environ", f"CONTAINER_{variable}\0")
    write(root, "/proc/9/stat", "9 (crio) S " + " ".join(["0"] * 40))


def test_drop_in_is_written_to_the_directory_crio_reads(tmp_path: Path) -> None:
    root = make_node(tmp_path, "packaged")
    own = "/etc/crio/crio.conf.d/50-gpu.conf"
    assert edits(engine(root, own).plan(NVIDIA, None)) == {own: "created"}
    with pytest.raises(UsageError, match=r"/etc/crio/crio\.conf\.d, not /etc/crio/conf\.d"):
        engine(root, "/etc/crio/conf.d/99-nvidia.toml").plan(NVIDIA, None)


# --- the toolkit's runtimes ---------------------------------------------------------------------------------


def test_toolkit_gets_the_runtime_paths_of_crio(tmp_path: Path) -> None:
    root = make_node(tmp_path, "packaged")
    write(
        root,
        TOOLKIT,
        '# ours\n[nvidia-container-runtime]\nruntimes = ["runc", "crun"] # names\nmode = "auto"\n',
    )
    plan = engine(root).plan(NVIDIA, None)
    after = next(edit.after or b"" for edit in plan.changed if edit.path == TOOLKIT).decode()
    listed = ["/usr/libexec/crio/crun", "/usr/libexec/crio/runc", "runc", "crun"]
    assert toml(after) == {"nvidia-container-runtime": {"runtimes": listed, "mode": "auto"}}
    assert "# ours" in after and "# names" in after
    write(root, TOOLKIT, after)
    assert TOOLKIT not in edits(engine(root).plan(NVIDIA, None))


def test_toolkit_that_finds_a_runtime_is_not_changed(tmp_path: Path) -> None:
    root = make_node(tmp_path, "packaged")
    write(root, TOOLKIT, "")
    assert edits(engine(root).plan(NVIDIA, None)).get(TOOLKIT) == "updated"
    write(root, "/usr/bin/runc", "x").chmod(0o755)
    assert TOOLKIT not in edits(engine(root).plan(NVIDIA, None))


def test_missing_toolkit_file_is_not_created_but_reported(tmp_path: Path) -> None:
    plan = engine(make_node(tmp_path, "packaged")).plan(NVIDIA, None)
    assert TOOLKIT not in edits(plan)
    listed = "/usr/libexec/crio/crun,/usr/libexec/crio/runc,runc,crun"
    command = f"gpunode toolkit config set --create nvidia-container-runtime.runtimes={listed}"
    assert any(command in note for note in plan.notes)


# --- CDI ----------------------------------------------------------------------------------------------------


def test_cdi_needs_no_change_of_crio_and_removes_the_old_hook(tmp_path: Path) -> None:
    root = make_node(tmp_path, "packaged")
    assert engine(root).plan(DesiredConfig(cdi=True), None).changed == ()
    write(root, HOOK, '{"hook": {"path": "/usr/bin/nvidia-container-runtime-hook"}}')
    plan = engine(root).plan(DesiredConfig(cdi=True), None)
    assert (edits(plan), plan.verb) == ({HOOK: "removed"}, "restart")
    beside = engine(root).plan(NVIDIA, None)
    assert HOOK not in edits(beside) and any("a second time" in note for note in beside.notes)
    assert edits(engine(root).plan_removal(UnwantedConfig(("nvidia",)), None)) == {HOOK: "removed"}


def test_cdi_reports_directories_that_this_crio_does_not_read(tmp_path: Path) -> None:
    root = make_node(tmp_path, "packaged")
    write(root, "/etc/crio/crio.conf.d/20-cdi.conf", '[crio.runtime]\ncdi_spec_dirs = ["/srv/cdi"]\n')
    assert any(
        "cdi_spec_dirs" in note and "/srv/cdi" in note
        for note in engine(root).plan(DesiredConfig(cdi=True), None).notes
    )
    with pytest.raises(PreconditionError, match=r"1\.22\.5 has no CDI"):
        engine(make_node(tmp_path / "old", "packaged", "1.22.5")).plan(DesiredConfig(cdi=True), None)


# --- the daemon ---------------------------------------------------------------------------------------------


def record(root: Path, answer: object) -> None:
    path = root / ".gpunode/recording.json"
    recording = json.loads(path.read_text())
    recording["daemons"] = {"/var/run/crio/crio.sock": {"config": answer}}
    path.write_text(json.dumps(recording))


def test_recorded_daemon_is_used(tmp_path: Path) -> None:
    root = make_node(tmp_path, "packaged")
    record(
        root, '[crio.runtime]\ndefault_runtime = "crun"\n[crio.runtime.runtimes.crun]\nruntime_path = "/c"\n'
    )
    active = engine(root).query()
    assert (active.handlers, active.default, active.paths) == (("crun",), "crun", {"crun": "/c"})


@pytest.mark.parametrize("answer", ["no toml", "", "[crio]\nruntime = 1", "crio.runtime.runtimes = []"])
def test_invalid_responses_are_daemon_errors(tmp_path: Path, answer: object) -> None:
    root = make_node(tmp_path, "packaged")
    record(root, answer)
    with pytest.raises(DaemonError):
        engine(root).query()


def test_daemon_with_unread_files_is_restarted(tmp_path: Path) -> None:
    crio = engine(make_node(tmp_path, "nvidia-ctk-effective"))
    assert crio.plan(NVIDIA, Active(("crun",), "crun")).verb == "restart"
    path = {"nvidia": "/usr/bin/nvidia-container-runtime"}
    assert crio.plan(NVIDIA, Active(("crun", "nvidia"), "crun", path)).verb == "none"
    still = engine(make_node(tmp_path / "plain", "packaged"))
    assert still.plan_removal(UnwantedConfig(("nvidia",)), Active(("nvidia",), "crun")).verb == "restart"


def test_default_that_no_file_defines_is_refused_before_writing(tmp_path: Path) -> None:
    crio = engine(make_node(tmp_path, "nvidia-in-main"))
    path = "/etc/crio/crio.conf"
    before = crio.host.read_bytes(path) or b""
    after = before.replace(b"runtimes.nvidia]", b"runtimes.other]")
    with pytest.raises(ValidationError, match="default_runtime is nvidia"):
        crio.validate(Plan("crio", (FileEdit(path, before, after),)), None)
