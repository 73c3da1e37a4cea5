"""configure-runtime against a real containerd: active afterwards, or unchanged."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fixtures.engines import start_containerd
from gpunode.daemons.cri import Cri
from gpunode.facts.toml import dig, parse_toml
from gpunode.host import Host
from gpunode.runtime.containerd import dump
from tests.cli import gpunode
from tests.integration.configuring import Cli, configuring
from tests.integration.conftest import path_of
from tests.waiting import PATIENCE, eventually

pytestmark = pytest.mark.containerd

P2 = "io.containerd.grpc.v1.cri"
PACKAGED = f"""version = 2

[plugins]
  [plugins."{P2}"]
    [plugins."{P2}".cni]
      bin_dir = "/usr/lib/cni"
      conf_dir = "/etc/cni/net.d"
  [plugins."io.containerd.internal.v1.opt"]
    path = "{{directory}}/opt"
"""
FROM_DOCKER = '# Docker\'s containerd.io package\ndisabled_plugins = ["cri"]\n\n#[grpc]\n#  uid = 0\n'


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    with configuring(start_containerd(PACKAGED), tmp_path) as started:
        yield started


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def handlers(cli: Cli) -> tuple[str, ...]:
    with Cri(Host(), cli.engine.socket) as cri:
        return cri.status().handlers


def test_packaged_file_gets_the_runtime_and_the_daemon_has_it(cli: Cli) -> None:
    before = cli.engine.pid
    data = cli.data("configure-runtime")
    assert [change["action"] for change in data["changes"]] == ["updated"]
    assert "nvidia" in data["active"]["handler"] and data["active"]["default"] == "runc"
    assert set(handlers(cli)) == {"runc", "nvidia"}
    assert cli.engine.pid != before


@pytest.mark.full
def test_only_the_runtime_changes_in_the_effective_containerd_config(cli: Cli) -> None:
    host = Host()
    before = dump(host, "containerd", str(cli.engine.config))
    cli.data("configure-runtime")
    after = dump(host, "containerd", str(cli.engine.config))
    assert before is not None and after is not None
    new = dig(after, "plugins", P2, "containerd", "runtimes").pop("nvidia")
    assert new["options"]["BinaryName"] == str(cli.program)
    for tree in (before, after):
        runc = dig(tree, "plugins", P2, "containerd", "runtimes", "runc")
        runc["options"] = {key: value for key, value in runc["options"].items() if value}
    assert after == before


def test_second_run_is_unchanged_and_restarts_nothing(cli: Cli) -> None:
    cli.data("configure-runtime")
    pid, stat = cli.engine.pid, cli.engine.config.stat()
    data = cli.data("configure-runtime")
    assert [change["action"] for change in data["changes"]] == ["unchanged"]
    assert data["restart"]["verb"] == "none" and data["journal"] == ""
    assert (cli.engine.pid, cli.engine.config.stat().st_mtime_ns) == (pid, stat.st_mtime_ns)


@pytest.mark.full
def test_runtime_in_the_file_but_not_in_the_daemon_only_restarts(cli: Cli) -> None:
    cli.data("configure-runtime", "--no-restart")
    assert "nvidia" not in handlers(cli)
    stat = cli.engine.config.stat()
    data = cli.data("configure-runtime")
    assert data["changes"][0]["action"] == "unchanged" and data["restart"]["performed"]
    assert "nvidia" in handlers(cli)
    assert cli.engine.config.stat().st_mtime_ns == stat.st_mtime_ns


def test_restart_that_systemd_cannot_do_is_left_to_the_user(cli: Cli) -> None:
    manual = "restart containerd manually: systemd doesn't run it on this node"
    argv = cli.argv("configure-runtime", "--no-restart")[3:]
    planned = gpunode(*argv[:1], "--dry-run", *argv[2:], env=cli.environ)
    assert (planned.code, "would run" in planned.out) == (3, False)
    assert f"\n{manual}\n" in planned.out and "a real run would be refused" in planned.err
    done = gpunode(*argv, env=cli.environ)
    assert done.code == 0 and f"\nnot done yet: {manual}\n" in done.out, done.out


@pytest.mark.parametrize("command", ["/nonexistent", "false"])
def test_wrong_restart_command_leaves_the_node_as_it_was(cli: Cli, command: str) -> None:
    pid, before = cli.engine.pid, digest(cli.engine.config)
    done = cli.run("configure-runtime", restart=command)
    assert (done.returncode, cli.engine.pid, digest(cli.engine.config)) == (4, pid, before)
    message, hint = done.stderr.splitlines()
    assert message.startswith(f"error: {command} failed with status ")
    assert message.endswith("; the files are as before and containerd runs with them")
    assert hint == "hint: correct --restart-command, then run this again"
    cli.data("configure-runtime", "--no-restart")
    done = cli.run("configure-runtime", restart=command)  # nothing to write
    assert (done.returncode, done.stderr.splitlines()[1]) == (1, hint)


def test_restart_command_that_stops_the_daemon_is_not_as_it_was(cli: Cli) -> None:
    """The second run of the command, with the old files, doesn't start it again."""
    done = cli.run("configure-runtime", restart=cli.script(f"kill {cli.engine.pid}; sleep 1; exit 1"))
    assert done.returncode == 1 and "rolled back, but containerd does not run" in done.stderr
    assert "--restart-command" not in done.stderr


def test_unconfigure_restores_the_bytes_after_several_runs(cli: Cli) -> None:
    before = digest(cli.engine.config)
    cli.data("configure-runtime")
    assert cli.data("configure-runtime", "--set-as-default")["active"]["default"] == "nvidia"
    data = cli.data("unconfigure-runtime")
    assert data["active"] == {"handler": ["runc"], "default": "runc"}
    assert digest(cli.engine.config) == before


def test_earlier_file_that_containerd_refuses_is_not_restored_but_the_default_is(cli: Cli) -> None:
    text = cli.engine.config.read_text().replace(
        "[plugins]\n",
        f"""[plugins]
  [plugins."{P2}".containerd]
    default_runtime_name = "other"
    [plugins."{P2}".containerd.runtimes.other]
      runtime_type = "io.containerd.runc.v2"
""",
    )
    # in version 2 plugins have other names
    cli.engine.config.write_text(f'disabled_plugins = ["cri"]\n{text}')
    assert cli.data("configure-runtime", "--set-as-default")["active"]["default"] == "nvidia"
    refused = cli.run("rollback")
    assert refused.returncode == 1
    command = f"gpunode unconfigure-runtime --runtime containerd --config {cli.engine.config}"
    assert f"to remove only the runtime: {command}\n" in refused.stderr
    done = cli.run("unconfigure-runtime")
    assert "cannot restore the previous files, so only the runtimes are removed" in done.stderr
    with Cri(Host(), cli.engine.socket) as cri:
        assert (cri.status().default_handler, cri.status().handlers) == ("other", ("other",))


def test_rollback_restores_bytes_mode_and_owner(cli: Cli) -> None:
    cli.engine.config.chmod(0o640)
    os.chown(cli.engine.config, 0, 6)
    before = digest(cli.engine.config)
    cli.data("configure-runtime")
    data = cli.data("rollback")
    assert data["changes"][0]["action"] == "restored"
    stat = cli.engine.config.stat()
    assert (digest(cli.engine.config), stat.st_mode & 0o7777, stat.st_gid) == (before, 0o640, 6)
    assert handlers(cli) == ("runc",)
    again = cli.run("rollback")
    assert again.returncode == 2 and "every change has been rolled back" in again.stderr


@pytest.mark.full
def test_disabled_cri_of_the_docker_package_is_enabled(tmp_path: Path) -> None:
    with configuring(start_containerd(FROM_DOCKER), tmp_path) as cli:
        data = cli.data("configure-runtime")
        assert set(data["active"]["handler"]) == {"nvidia", "runc"}
        assert data["configVersion"] == 2
        assert "# Docker's containerd.io package" in cli.engine.config.read_text()


def test_daemon_that_fails_to_restart_is_rolled_back(cli: Cli) -> None:
    before = digest(cli.engine.config)
    # the daemon is really restarted with the old file, and really fails with the new one
    failing = cli.script(
        f"grep -q nvidia {cli.engine.config} && echo 'no such plugin' >&2 && exit 7\n"
        f"exec {cli.engine.restart_command}"
    )
    done = cli.run("configure-runtime", restart=failing)
    assert done.returncode == 4, done.stderr
    assert "no such plugin" in done.stderr and "hint:" in done.stderr
    assert digest(cli.engine.config) == before
    assert cli.engine.running and handlers(cli) == ("runc",)


@pytest.mark.full
def test_daemon_without_the_runtime_after_its_restart_is_rolled_back(cli: Cli) -> None:
    before = digest(cli.engine.config)
    done = cli.run("configure-runtime", restart="true")  # reports a restart and does nothing
    assert done.returncode == 4, done.stderr
    assert "not with what was configured" in done.stderr
    assert digest(cli.engine.config) == before and handlers(cli) == ("runc",)


def test_broken_file_is_refused_before_any_write(cli: Cli) -> None:
    cli.engine.config.write_text("version = 2\n[plugins\n")
    pid = cli.engine.pid
    done = cli.run("configure-runtime")
    assert done.returncode == 1
    assert f"{cli.engine.config}:2:9: " in done.stderr
    assert cli.engine.config.read_text() == "version = 2\n[plugins\n" and cli.engine.pid == pid
    assert not (cli.state / "journal").exists() or not any((cli.state / "journal").iterdir())


@pytest.mark.full
def test_wrong_type_is_refused_by_containerd_or_by_us(cli: Cli) -> None:
    text = f'version = 2\n[plugins."{P2}"]\nsandbox_image = 3\n'
    cli.engine.config.write_text(text)
    done = cli.run("configure-runtime")
    assert done.returncode == 1 and "containerd refuses" in done.stderr
    assert cli.engine.config.read_text() == text


def test_kill_between_write_and_restart_is_recovered_by_the_next_run(cli: Cli) -> None:
    before = digest(cli.engine.config)
    mark = cli.state.parent / "waiting"
    blocked = cli.script(f"touch {mark}; exec sleep 60")
    run = cli.start("configure-runtime", restart=blocked)
    assert eventually(mark.exists)
    _kill_with_children(run)
    assert digest(cli.engine.config) != before
    done = cli.run("configure-runtime", "--dry-run")
    assert done.returncode == 0 and digest(cli.engine.config) != before  # a dry run writes nothing
    done = cli.run("unconfigure-runtime")
    assert done.returncode == 0, done.stderr
    assert "killed half-way" in done.stdout + done.stderr
    assert digest(cli.engine.config) == before and handlers(cli) == ("runc",)


@pytest.mark.full
def test_rollback_right_after_a_killed_run_undoes_it(cli: Cli) -> None:
    before = digest(cli.engine.config)
    mark = cli.state.parent / "waiting"
    run = cli.start("configure-runtime", restart=cli.script(f"touch {mark}; exec sleep 60"))
    assert eventually(mark.exists)
    _kill_with_children(run)
    done = cli.run("configure-runtime", "--dry-run", "-o", "json")
    assert f"killed half-way; if so, the next run first rolls back {cli.engine.config}" in (done.stdout)
    done = cli.run("rollback")
    assert done.returncode == 0 and "killed half-way" in done.stderr, done.stderr
    assert digest(cli.engine.config) == before and handlers(cli) == ("runc",)
    assert cli.run("rollback").returncode == 2


def test_interrupt_at_the_restart_rolls_back_and_exits_130(cli: Cli) -> None:
    before = digest(cli.engine.config)
    mark = cli.state.parent / "waiting"
    once = cli.script(f"test -e {mark} && exec {cli.engine.restart_command}; touch {mark}; exec sleep 60")
    run = cli.start("configure-runtime", restart=once)
    assert eventually(mark.exists)
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=PATIENCE)
    assert run.returncode == 130, errors
    assert digest(cli.engine.config) == before and handlers(cli) == ("runc",)


def _kill_with_children(run: subprocess.Popen[str]) -> None:
    """SIGKILL for gpunode; its blocked restart command is ended too, as a power loss would."""
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    run.kill()
    run.communicate(timeout=PATIENCE)
    for child in children:
        os.kill(int(child), signal.SIGKILL)


@pytest.mark.full
def test_two_concurrent_runs_succeed_and_only_one_changes_the_file(cli: Cli) -> None:
    runs = [cli.start("configure-runtime", "-o", "json") for _ in range(2)]
    outputs = [run.communicate(timeout=PATIENCE)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert sorted('"action": "updated"' in text for text in outputs) == [False, True]


@pytest.mark.parametrize("verb", ["configure-runtime", "unconfigure-runtime"])
@pytest.mark.parametrize("options", [(), ("--no-restart",), ("--dry-run", "--exit-code")], ids=" ".join)
@pytest.mark.full
def test_import_of_a_missing_file_is_refused_before_any_write(
    cli: Cli, verb: str, options: tuple[str, ...]
) -> None:
    """containerd 1 can't start with it, so a restart would leave the node without containerd.

    The import names the drop-in that gpunode would write on containerd 2.
    """
    if verb == "unconfigure-runtime":
        cli.data("configure-runtime")
        options = tuple(option for option in options if option != "--exit-code")
    pid = cli.engine.pid
    text = cli.engine.config.read_text()
    missing = cli.engine.config.parent / "conf.d/99-nvidia.toml"
    cli.engine.config.write_text(f'imports = ["{missing}"]\n{text}')
    before = cli.engine.config.read_bytes()
    done = cli.run(verb, *options)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{cli.engine.config}:1: imports {missing}, which does not exist" in done.stderr
    assert cli.engine.config.read_bytes() == before
    assert cli.engine.pid == pid and set(handlers(cli)) >= {"runc"}


@pytest.mark.full
@pytest.mark.parametrize("name", ["mine.toml", "conf.d/99-nvidia.toml"])
def test_containerd_2_starts_after_an_administrator_deleted_the_drop_in(tmp_path: Path, name: str) -> None:
    path = path_of("forky")
    engine = start_containerd("version = 3\n", binary=shutil.which("containerd", path=path) or "", path=path)
    unread = engine.directory / "conf.d/old.toml"  # the import must not make containerd read it
    unread.parent.mkdir()
    unread.write_text("imports = ['/none.toml']\n")
    drop_in = engine.directory / name
    with configuring(engine, tmp_path) as cli:
        for _ in range(2):
            cli.data("configure-runtime", "--drop-in-config", str(drop_in))
            assert "nvidia" in handlers(cli)
            drop_in.unlink()
            engine.restart()
            assert "nvidia" not in handlers(cli)


@pytest.mark.full
def test_runtime_that_inherits_the_v1_shim_is_unchanged_by_a_second_run(tmp_path: Path) -> None:
    text = (
        '[plugins.cri.containerd.runtimes.runc]\n  runtime_type = "io.containerd.runc.v1"\n'
        '[plugins."io.containerd.internal.v1.opt"]\n  path = "{directory}/opt"\n'
    )
    with configuring(start_containerd(text), tmp_path) as cli:
        cli = replace(cli, program=cli.program.rename(tmp_path / "nvidia-container-runtime"))
        cli.data("configure-runtime")
        runtimes = dig(
            parse_toml(cli.engine.config.read_text(), ""), "plugins", "cri", "containerd", "runtimes"
        )
        assert runtimes["nvidia"]["runtime_type"] == "io.containerd.runc.v1"
        before = cli.engine.config.read_bytes()
        data = cli.data("configure-runtime")
        assert [change["action"] for change in data["changes"]] == ["unchanged"]
        assert cli.engine.config.read_bytes() == before
