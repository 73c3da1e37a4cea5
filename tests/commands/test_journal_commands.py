"""`gpunode journal list|show`: past changes, and which can be rolled back now."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpunode.host.journal import digest
from tests.cli import Ran, clean_environment, command, gpunode
from tests.ordinary_user import AS_ORDINARY_USER, public_directory
from tests.runtime.test_toolkit_file import PACKAGED

MODE = "nvidia-container-runtime.mode"


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """A node with the toolkit's file, on which the mode was set to cdi and then to legacy."""
    place = tmp_path / "etc/nvidia-container-runtime/config.toml"
    place.parent.mkdir(parents=True)
    place.write_text(PACKAGED)
    for mode in ("cdi", "legacy"):
        assert gpunode("toolkit", "config", "set", f"{MODE}={mode}", "--root", str(tmp_path)).code == 0
    return tmp_path


def journal(node: Path, *argv: str) -> Ran:
    return gpunode("journal", *argv, "--root", str(node), "-o", "json")


def entries(node: Path) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = journal(node, "list").document["data"]["entries"]
    return listed


def config(node: Path) -> Path:
    return node / "etc/nvidia-container-runtime/config.toml"


def test_entries_are_listed_oldest_first_with_their_rollback_state(node: Path) -> None:
    listed = entries(node)
    assert [one["operation"] for one in listed] == ["toolkit-config"] * 2
    assert [(one["rollback"], one["reason"]) for one in listed] == [(True, "")] * 2
    assert listed[0]["when"].endswith("Z") and listed[0]["when"][:4] == listed[0]["id"][:4]
    assert listed[0]["files"] == ["/etc/nvidia-container-runtime/config.toml"]


def test_list_agrees_with_rollback(node: Path) -> None:
    config(node).write_text("# somebody else's\n")
    last = entries(node)[-1]
    assert not last["rollback"] and "changed" in last["reason"]
    assert gpunode("rollback", last["id"], "--root", str(node)).code == 1
    config(node).write_text(PACKAGED.replace('mode = "auto"', 'mode = "legacy"'))
    assert entries(node)[-1]["rollback"]
    assert gpunode("rollback", last["id"], "--root", str(node)).code == 0
    states = {one["operation"]: (one["state"], one["rollback"]) for one in entries(node)[1:]}
    assert states == {"toolkit-config": ("rolled-back", False), "rollback": ("committed", False)}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"packages": {"x": ""}}, "it changed packages: it is undone by the command that made it"),
        ({"packages": {"x": ""}, "state": "rolled-back"}, "it is already rolled back"),
        ({"state": "applied"}, "it is running or was interrupted: the next run rolls it back"),
    ],
)
def test_reason_against_a_rollback_is_listed(node: Path, change: dict[str, Any], reason: str) -> None:
    path = node / "var/lib/gpunode/journal" / entries(node)[-1]["id"] / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    last = entries(node)[-1]
    assert (last["rollback"], last["reason"]) == (False, reason)


def test_show_prints_the_diff_and_details_of_the_last_change(node: Path) -> None:
    data = journal(node, "show").document["data"]
    assert data["entry"]["id"] == entries(node)[-1]["id"]
    (file,) = data["files"]
    assert (file["action"], file["now"], file["problem"]) == ("updated", "ours", "")
    assert '-mode = "cdi"' in file["diff"] and '+mode = "legacy"' in file["diff"]
    assert data["details"]["settings"] == [f"{MODE}=legacy"]


def test_show_restores_an_earlier_change_from_the_later_backup(node: Path) -> None:
    first = entries(node)[0]["id"]
    (file,) = journal(node, "show", first).document["data"]["files"]
    assert file["now"] == "changed"
    assert '-mode = "auto"' in file["diff"] and '+mode = "cdi"' in file["diff"]


def test_show_reports_that_the_written_text_was_not_kept(node: Path) -> None:
    config(node).write_text("# somebody else's\n")
    (file,) = journal(node, "show").document["data"]["files"]
    assert (file["now"], file["diff"]) == ("changed", "")
    assert "not kept" in file["problem"]
    config(node).unlink()
    ran = gpunode("journal", "show", "--root", str(node))
    assert ran.code == 0 and "not kept" in ran.out


def test_show_agrees_with_the_state_of_a_failed_install(node: Path) -> None:
    """A failed `toolkit install`: its packages and the file of its repository are gone again."""
    place = node / "var/lib/gpunode/journal" / entries(node)[-1]["id"] / "manifest.json"
    created = {"path": "/etc/x.list", "existed": False, "before": digest(None), "after": digest(b"deb")}
    manifest = json.loads(place.read_text())
    files = [manifest["files"][0] | {"backup": ""} | created]
    failed = {"packages": {"x": ""}, "state": "rolled-back", "files": files}
    place.write_text(json.dumps(manifest | failed))
    shown = gpunode("journal", "show", "--root", str(node))
    assert shown.out.splitlines()[-2:] == [
        "/etc/x.list created; it was removed again",
        "  what was written then is not kept",
    ]
    assert "no: it is already rolled back" in shown.out
    ran = gpunode("rollback", place.parent.name, "--root", str(node))
    assert ran.code == 2 and ran.err.splitlines()[0].endswith(" can't be rolled back: it is rolled-back")


def test_show_reports_a_damaged_backup(node: Path) -> None:
    last = entries(node)[-1]["id"]
    (backup,) = (node / "var/lib/gpunode/journal" / last).glob("00-*")
    backup.write_text("rot")
    (file,) = journal(node, "show").document["data"]["files"]
    assert "is damaged" in file["problem"]


def test_unknown_entry_is_a_usage_error(node: Path) -> None:
    ran = journal(node, "show", "20200101T000000Z-nothing")
    assert ran.code == 2
    assert ran.document["errors"][0]["hint"] == f"list them: gpunode --root {node} journal list"


def test_empty_journal_lists_without_error(tmp_path: Path) -> None:
    ran = gpunode("journal", "list", "--root", str(tmp_path))
    assert ran.code == 0 and "nothing was changed yet" in ran.out
    assert gpunode("journal", "show", "--root", str(tmp_path)).code == 2


def test_malformed_directories_do_not_break_the_list(node: Path) -> None:
    place = node / "var/lib/gpunode/journal"
    (place / "stray").write_text("a file")
    broken = ["", "{", "[]", '{"files": 5}', '{"files": [{"path": 1}]}', "\x00", '{"state": 5}']
    for number, manifest in enumerate((*broken, '{"sequence": "x"}')):
        (place / f"20200101T00000{number}Z-odd").mkdir()
        (place / f"20200101T00000{number}Z-odd/manifest.json").write_text(manifest)
    ran = journal(node, "list")
    assert ran.code == 0
    data = ran.document["data"]
    assert [one["operation"] for one in data["entries"]] == ["", "toolkit-config", "toolkit-config"]
    assert data["damaged"] == [*(f"20200101T00000{number}Z-odd" for number in range(len(broken))), "stray"]
    assert gpunode("journal", "show", "--root", str(node)).code == 0


def test_wrong_types_in_a_manifest_cause_no_crash(node: Path) -> None:
    last = entries(node)[-1]["id"]
    place = node / "var/lib/gpunode/journal" / last / "manifest.json"
    manifest = json.loads(place.read_text())
    place.write_text(
        json.dumps({**manifest, "runtimes": 5, "units": {"a": 1}, "engine": [], "operation": None})
    )
    assert gpunode("journal", "list", "--root", str(node)).code == 0
    assert gpunode("journal", "show", "--root", str(node)).code == 0


def test_reading_the_journal_without_root_is_refused_with_a_hint() -> None:
    with public_directory() as place:
        (place / "var/lib/gpunode/journal").mkdir(parents=True, mode=0o700)
        ran = gpunode("journal", "list", "--root", str(place), prefix=AS_ORDINARY_USER)
    assert ran.code == 3
    assert "only root may read the journal" in ran.err and "hint: run it again with sudo" in ran.err


def test_removed_engine_does_not_stop_a_later_run(tmp_path: Path) -> None:
    """A run was killed, and its engine is gone: its file is restored, and others can be changed."""
    config, state = tmp_path / "config.toml", tmp_path / "state"
    config.write_text("new")
    place = state / "journal/20260101T000000Z-configure-runtime"
    place.mkdir(parents=True)
    (place / "00-config.toml").write_text("")
    file = {"path": str(config), "existed": True, "mode": 420, "uid": 0, "gid": 0, "backup": "00-config.toml"}
    file |= {"before": digest(b""), "after": digest(b"new"), "interim": []}
    manifest = {"state": "applied", "engine": "k0s", "manager": "k0s", "verb": "restart", "files": [file]}
    (place / "manifest.json").write_text(json.dumps(manifest))
    argv = ("toolkit", "config", "set", "disable-require=true", "--config", str(config))
    ran = gpunode(*argv, env={"GPUNODE_STATE_DIR": str(state)})
    assert ran.code == 0, ran.err
    assert "k0s could not be restarted: k0s is not installed" in ran.err
    assert config.read_text() == "disable-require = true\n"
    listed = gpunode("journal", "list", "-o", "json", env={"GPUNODE_STATE_DIR": str(state)}).document
    assert [one["state"] for one in listed["data"]["entries"]] == ["rolled-back", "committed"]


def test_rollback_of_a_killed_run_claims_nothing_of_files_that_later_runs_changed(tmp_path: Path) -> None:
    """The daemon did not restart in the recovery, then the file was changed with --no-restart."""
    config, state, restarted = tmp_path / "daemon.json", tmp_path / "state", tmp_path / "restarted"
    config.write_text("{}")
    for number, (reached, before, after) in enumerate(
        (("applied", "old", "new"), ("committed", "old", "{}"))
    ):
        place = state / f"journal/20260101T00000{number}Z-configure-runtime"
        place.mkdir(parents=True)
        (place / "00-daemon.json").write_text(before)
        file = {"path": str(config), "existed": True, "mode": 0o644, "uid": 0, "gid": 0, "interim": []}
        file |= {
            "backup": "00-daemon.json",
            "before": digest(before.encode()),
            "after": digest(after.encode()),
        }
        manifest = {"state": reached, "engine": "docker", "verb": "restart", "sequence": number}
        manifest |= {"config": str(config), "restartCommand": f"touch {restarted}", "files": [file]}
        (place / "manifest.json").write_text(json.dumps(manifest))
    argv = ("rollback", "20260101T000000Z-configure-runtime", "-o", "json")
    ran = gpunode(*argv, env={"GPUNODE_STATE_DIR": str(state)})
    assert ran.code == 0, ran.err
    assert [one["action"] for one in ran.document["data"]["changes"]] == ["unchanged"]
    assert "later runs changed its files, which stay" in ran.document["messages"][0]
    assert config.read_text() == "{}" and not restarted.exists()


def test_rollback_killed_after_its_last_write_is_finished_by_the_next_run(tmp_path: Path) -> None:
    """Its files are restored, and the entry must not stay the last one that can be rolled back."""
    config, state = tmp_path / "config", tmp_path / "state"
    config.write_text("old")
    place = state / "journal/20260101T000000Z-toolkit-config"
    place.mkdir(parents=True)
    (place / "00-config").write_text("old")
    file = {"path": str(config), "existed": True, "mode": 0o600, "uid": 0, "gid": 0, "backup": "00-config"}
    file |= {"before": digest(b"old"), "after": digest(b"new"), "interim": []}
    manifest = {"state": "committed", "engine": "", "operation": "toolkit-config", "files": [file]}
    (place / "manifest.json").write_text(json.dumps(manifest))
    ran = gpunode("rollback", env={"GPUNODE_STATE_DIR": str(state)})
    assert ran.code == 0, ran.err
    assert json.loads((place / "manifest.json").read_text())["state"] == "rolled-back"
    assert config.stat().st_mode & 0o777 == 0o600


# by file of a killed run: its text before, what the run wrote, its text now, and what a rollback makes of it
KILLED = {
    "changed": ("old", "new", "new", "restored"),
    "created": (None, "new", "new", "removed"),
    "removed": ("old", None, None, "restored"),
    "edited": ("old", "new", "somebody else's", "unchanged"),
    "unwritten": (None, "new", None, "unchanged"),
}


def test_rollback_of_a_killed_run_restores_removes_or_keeps_each_file(tmp_path: Path) -> None:
    state = tmp_path / "state"
    place = state / "journal/20260101T000000Z-toolkit-config"
    place.mkdir(parents=True)
    files = []
    for number, (name, (before, after, present, _)) in enumerate(KILLED.items()):
        if present is not None:
            (tmp_path / name).write_text(present)
        backup = f"{number:02}-{name}" if before else ""
        if before:
            (place / backup).write_text(before)
        file = {
            "path": str(tmp_path / name),
            "existed": before is not None,
            "mode": 0o640,
            "uid": 0,
            "gid": 0,
        }
        file |= {"backup": backup, "interim": []}
        for key, text in (("before", before), ("after", after)):
            file[key] = digest(None if text is None else text.encode())
        files.append(file)
    manifest = {"state": "applied", "engine": "", "operation": "toolkit-config", "files": files}
    (place / "manifest.json").write_text(json.dumps(manifest))
    env = {"GPUNODE_STATE_DIR": str(state)}
    ran = gpunode("rollback", "-o", "json", env=env)
    assert ran.code == 0, ran.err
    changes = {Path(one["path"]).name: one["action"] for one in ran.document["data"]["changes"]}
    assert changes == {name: action for name, (*_, action) in KILLED.items()}
    contents = {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()}
    assert contents == {"changed": "old", "removed": "old", "edited": "somebody else's"}
    modes = {name: (tmp_path / name).stat().st_mode & 0o777 for name in ("changed", "removed")}
    assert modes == {"changed": 0o640, "removed": 0o640}
    kept = f"{tmp_path}/edited was changed by another program since and was left alone; look at it: diff "
    assert [kept in message for message in ran.document["messages"]] == [False, True]
    data = gpunode("journal", "show", place.name, "-o", "json", env=env).document["data"]
    assert data["entry"]["state"] == "rolled-back"
    assert {Path(one["path"]).name: one["now"] for one in data["files"]} == {
        name: "changed" if name == "edited" else "before" for name in KILLED
    }


def test_empty_journal_of_an_ordinary_user_hints_at_the_nodes() -> None:
    with public_directory() as place:
        environ = clean_environment({"HOME": str(place)})
        argv = [*AS_ORDINARY_USER, *command("journal", "list")]
        done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (
        0,
        "this is your own journal; for the node's run it with sudo\n",
    )


def test_full_disk_leaves_no_damaged_entry(node: Path) -> None:
    place = node / "var/lib/gpunode"
    script = f"mount -t tmpfs -o size=4k full {place} && printf x > {place}/full && "
    edit = command("toolkit", "config", "set", f"{MODE}=auto", "--root", str(node))
    script += (
        f'{shlex.join(edit)}; echo "rc $?"; {shlex.join(command("journal", "list", "--root", str(node)))}'
    )
    argv = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script]
    ran = subprocess.run(argv, env=clean_environment(), capture_output=True, text=True, check=False)
    if "rc " not in ran.stdout:
        pytest.skip("needs the right to mount")
    assert "rc 1" in ran.stdout and "No space left on device" in ran.stderr, ran.stderr
    assert "damaged" not in ran.stderr
