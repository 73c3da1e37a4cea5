"""`gpunode reset` where nothing is running: the plan of a node below --root, refusals, and its entries."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from gpunode.cdi import refresh, spec
from gpunode.cdi.locations import STANDARD
from gpunode.commands import mig_boot
from gpunode.commands.reset import METRICS, MPS_DROP_IN, PACKAGED_MPS_DROP_IN
from gpunode.host import Host
from gpunode.host.journal import Journal
from gpunode.plugin.service import MARKER, UNIT_FILE
from tests.cli import REPOSITORY, Ran, command, gpunode
from tests.ordinary_user import AS_ORDINARY_USER, public_directory

CONFIG = "/etc/docker/daemon.json"
EDITED = '{\n  "debug": true\n}\n'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A node with dockerd, which gpunode has configured, and whose toolkit's settings it has changed."""
    root = tmp_path / "root"
    for directory in ("proc", "sys", "etc/docker", "etc/nvidia-container-runtime", "usr/bin"):
        (root / directory).mkdir(parents=True)
    for program in ("dockerd", "nvidia-container-runtime"):
        path = root / "usr/bin" / program
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    (root / CONFIG[1:]).write_text(EDITED)
    (root / "etc/nvidia-container-runtime/config.toml").write_text("# mine\n")
    configured = run(root, "configure-runtime", "--runtime", "docker")
    assert configured.code == 0, configured.err
    return root


def run(root: Path, *argv: str) -> Ran:
    return gpunode("--root", str(root), *argv)


def files(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def plan(root: Path) -> Ran:
    before = files(root)
    planned = run(root, "reset", "--dry-run", "-o", "json")
    assert files(root) == before
    return planned


def states(planned: Ran) -> dict[str, str]:
    steps = planned.document["data"]["steps"]
    return {step["name"]: step["state"] for step in steps if step["state"] != "right"}


def test_the_plan_has_each_file_and_changes_none(root: Path) -> None:
    level = "nvidia-container-runtime.log-level=debug"
    assert run(root, "toolkit", "config", "set", level).code == 0
    (root / UNIT_FILE[1:]).parent.mkdir(parents=True)
    (root / UNIT_FILE[1:]).write_text(f"{MARKER}\n[Service]\n")
    planned = plan(root)
    assert planned.code == 0, planned.err
    assert states(planned) == dict.fromkeys(("plugin", "runtime-docker", "toolkit-config"), "planned")
    results = {step["name"]: step["result"] for step in planned.document["data"]["steps"]}
    assert [(one["path"], one["action"]) for one in results["plugin"]["changes"]] == [(UNIT_FILE, "removed")]
    assert results["plugin"]["commands"] == [
        "systemctl disable --now gpunode-device-plugin.service",
        "systemctl daemon-reload",
    ]
    (docker,) = results["runtime-docker"]["changes"]
    assert docker["path"] == CONFIG and '-        "nvidia"' in docker["diff"].replace("    ", "        ")
    assert results["toolkit-config"]["changes"][0]["action"] == "restored"
    commands = {step["name"]: step["command"] for step in planned.document["data"]["steps"]}
    assert commands["runtime-docker"] == "gpunode unconfigure-runtime --runtime docker"
    assert commands["toolkit-config"].startswith("gpunode rollback ")
    assert planned.document["data"]["journal"] == "/var/lib/gpunode/journal"


def test_no_kubeconfig_is_suggested_below_a_root_where_no_api_server_is_queried(root: Path) -> None:
    kubeconfig = root / "etc/kubernetes/kubelet.conf"
    kubeconfig.parent.mkdir(parents=True)
    kubeconfig.write_text("")
    commands = {step["name"]: step["command"] for step in plan(root).document["data"]["steps"]}
    assert commands["node-labels"] == commands["node-resources"] == "gpunode reset"


def test_each_runtime_of_an_engine_is_removed_and_edits_are_kept(root: Path) -> None:
    assert run(root, "configure-runtime", "--runtime", "docker", "--nvidia-runtime-name", "test").code == 0
    edited = json.loads((root / CONFIG[1:]).read_text()) | {"log-driver": "journald"}
    (root / CONFIG[1:]).write_text(json.dumps(edited))
    planned = plan(root)
    assert (planned.code, states(planned)) == (0, {"runtime-docker": "planned"})
    (step,) = [one for one in planned.document["data"]["steps"] if one["name"] == "runtime-docker"]
    command = "gpunode unconfigure-runtime --runtime docker"
    assert step["command"] == f"{command} && {command} --nvidia-runtime-name test"


def test_runtime_that_is_left_after_another_one_was_removed_is_planned(root: Path) -> None:
    assert run(root, "configure-runtime", "--runtime", "docker", "--nvidia-runtime-name", "test").code == 0
    assert run(root, "unconfigure-runtime", "--runtime", "docker", "--nvidia-runtime-name", "test").code == 0
    planned = plan(root)
    assert (planned.code, states(planned)) == (0, {"runtime-docker": "planned"})


def test_unknown_engine_in_the_journal_does_not_end_the_plan(root: Path) -> None:
    (manifest,) = (root / "var/lib/gpunode/journal").glob("*-configure-runtime/manifest.json")
    entry = json.loads(manifest.read_text()) | {"engine": "lxd", "manager": ""}
    manifest.write_text(json.dumps(entry))
    planned = plan(root)
    assert (planned.code, states(planned)) == (0, {"runtime-lxd": "planned"}), planned.err


def test_a_file_that_another_program_changed_stays_and_is_named(root: Path) -> None:
    level = "nvidia-container-runtime.log-level=debug"
    assert run(root, "toolkit", "config", "set", level).code == 0
    config = root / "etc/nvidia-container-runtime/config.toml"
    config.write_text(config.read_text() + "# theirs\n")
    planned = plan(root)
    assert states(planned) == {"runtime-docker": "planned", "toolkit-config": "left"}
    (left,) = planned.document["data"]["left"]
    assert left["why"] == "changed by another program since: /etc/nvidia-container-runtime/config.toml"
    (shown,) = (root / "var/lib/gpunode/journal").glob("*-toolkit-config")
    assert left["command"] == f"gpunode journal show {shown.name}"
    assert planned.document["status"] == "warn"


MARKED = {
    "plugin": {UNIT_FILE: f"{MARKER}\n[Service]\n", MPS_DROP_IN: "[Service]\n"},
    "doctor-metrics": {METRICS: "# HELP gpunode_finding Findings\n"},
    "mig-at-boot": {mig_boot.UNIT_FILE: f"{mig_boot.MARKER}\n[Service]\n"},
    "cdi": {
        STANDARD: f"{spec.MARKER}\nkind: nvidia.com/gpu\n",
        refresh.SERVICE_FILE: f"{refresh.MARKER}\n[Service]\n",
        refresh.RULES_FILE: f"{refresh.MARKER}\n",
    },
}
"""Files by step, which gpunode's mark identifies without the journal."""


@pytest.mark.parametrize("ours", [True, False])
def test_only_files_with_our_mark_are_removed(root: Path, ours: bool) -> None:
    (root / PACKAGED_MPS_DROP_IN[1:]).parent.mkdir(parents=True)
    (root / PACKAGED_MPS_DROP_IN[1:]).write_text("[Service]\n")
    for files_of_step in MARKED.values():
        for path, text in files_of_step.items():
            (root / path[1:]).parent.mkdir(parents=True, exist_ok=True)
            (root / path[1:]).write_text(text if ours else "# mine\n")
    planned = plan(root)
    expected = {"runtime-docker", *MARKED} if ours else {"runtime-docker"}
    assert set(states(planned)) == expected
    for step in planned.document["data"]["steps"]:
        if ours and step["name"] in MARKED:
            removed = {change["path"]: change["action"] for change in step["result"]["changes"]}
            assert removed == dict.fromkeys(MARKED[step["name"]], "removed")


def test_an_engine_that_is_gone_has_its_files_restored(root: Path) -> None:
    (root / "usr/bin/dockerd").unlink()
    planned = plan(root)
    assert states(planned) == {"runtime-docker": "planned"}
    (step,) = (one for one in planned.document["data"]["steps"] if one["name"] == "runtime-docker")
    assert [(one["path"], one["action"]) for one in step["result"]["changes"]] == [(CONFIG, "restored")]
    assert step["result"]["commands"] == []


def test_a_runtime_of_another_tool_stays_as_that_tool_had_it(root: Path) -> None:
    theirs = json.dumps({"runtimes": {"nvidia": {"path": "nvidia-container-runtime", "args": []}}})
    assert run(root, "unconfigure-runtime", "--runtime", "docker").code == 0
    (root / CONFIG[1:]).write_text(theirs)
    assert run(root, "configure-runtime", "--runtime", "docker", "--set-as-default").code == 0
    planned = plan(root)
    (step,) = (one for one in planned.document["data"]["steps"] if one["name"] == "runtime-docker")
    assert step["command"].startswith("gpunode rollback ")
    (change,) = step["result"]["changes"]
    assert change["action"] == "restored" and f"\n+{theirs}\n" in change["diff"]


def _removal(root: Path, program: str) -> tuple[int, str]:
    """Status and stderr of the packages' script on this node, where `program` is the installed gpunode."""
    installed = root / "opt/gpunode/bin/gpunode"
    installed.parent.mkdir(parents=True, exist_ok=True)
    installed.write_text(f"#!/bin/sh\n{program}\n")
    installed.chmod(0o755)
    script = root / "opt/gpunode/warn-of-changes"
    shutil.copy(REPOSITORY / "packaging/warn-of-changes", script)
    environ = {**os.environ, "KUBECONFIG": "/etc/kubernetes/admin.conf"}
    done = subprocess.run([script], env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == ""
    return done.returncode, done.stderr


def test_removal_of_the_package_warns_while_changes_stay(root: Path) -> None:
    program = f'[ -z "$KUBECONFIG" ] && exec {shlex.join(command("--root", str(root)))} "$@"'
    code, printed = _removal(root, program)
    assert code == 0 and printed.startswith(
        "warning: gpunode's changes to this node stay\nhint: run gpunode reset"
    )
    assert run(root, "unconfigure-runtime", "--runtime", "docker").code == 0
    assert _removal(root, program) == (0, "")


@pytest.mark.parametrize("program", ["exit 1", "kill $$", "no-such-program"])
def test_removal_of_the_package_succeeds_without_a_program_that_runs(tmp_path: Path, program: str) -> None:
    assert _removal(tmp_path, program) == (0, "")


def test_nothing_to_reset(tmp_path: Path) -> None:
    for directory in ("proc", "sys", "etc"):
        (tmp_path / directory).mkdir()
    planned = run(tmp_path, "reset", "--dry-run")
    assert (planned.code, planned.out) == (0, "nothing to reset\n")
    assert files(tmp_path) == {}


@pytest.mark.parametrize("options", [(), ("--dry-run",), ("--yes",)])
def test_an_ordinary_user_is_refused(options: tuple[str, ...]) -> None:
    """Only root may read the journal, so there is no plan either."""
    with public_directory() as place:
        refused = gpunode("reset", *options, prefix=AS_ORDINARY_USER, env={"HOME": str(place)})
    assert refused.code == 3, refused
    assert refused.err == "error: a reset needs root\nhint: run it again with sudo\n"


def test_only_a_dry_run_is_possible_below_another_root(root: Path) -> None:
    before = files(root)
    refused = run(root, "reset", "--yes")
    assert refused.code == 3 and "hint: add --dry-run, or leave out --root" in refused.err
    assert files(root) == before


def test_a_damaged_copy_is_an_error_of_its_step(root: Path) -> None:
    assert run(root, "toolkit", "config", "set", "nvidia-container-runtime.log-level=debug").code == 0
    (copy,) = root.glob("var/lib/gpunode/journal/*-toolkit-config/00-config.toml")
    copy.write_text("damaged")
    planned = plan(root)
    assert planned.code == 1
    assert states(planned) == {"runtime-docker": "planned", "toolkit-config": "failed"}
    (error,) = planned.document["errors"]
    assert error["message"].startswith("toolkit-config: the copy of ") and error["hint"]


def test_a_file_that_holds_what_an_older_entry_found_is_restored_already(root: Path) -> None:
    """A reset that was killed before it marked the entries: the newer of two doesn't know the content."""
    config = root / "etc/nvidia-container-runtime/config.toml"
    for level in ("debug", "warning"):
        assert run(root, "toolkit", "config", "set", f"nvidia-container-runtime.log-level={level}").code == 0
    config.write_text("# mine\n")
    assert set(states(plan(root))) == {"runtime-docker"}
    journal = Journal.of(Host(root=root))
    entries = [one for one in journal.entries() if one.manifest["operation"] == "toolkit-config"]
    edits, foreign = journal.plan_undo(entries[::-1])
    assert [edit.action for edit in edits] == ["unchanged"] and foreign == ()


def test_malformed_server_is_refused_before_the_plan(root: Path) -> None:
    ran = run(root, "reset", "--dry-run", "--server", "foo")
    error, hint = ran.err.splitlines()
    assert (ran.code, ran.out, error) == (2, "", "error: --server: 'foo' is not the address of an API server")
    assert hint.startswith("hint: name a kubectl proxy, such as http://127.0.0.1:8001"), "as --help says"
