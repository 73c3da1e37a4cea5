"""Access to the machine: paths inside a root, atomic writes, children that hang, locks."""

from __future__ import annotations

import errno
import gc
import json
import os
import socket
import stat
import sys
import threading
import time
from pathlib import Path

import pytest

from gpunode.errors import ConfigError, DaemonError, GpunodeError, PreconditionError, UsageError
from gpunode.host import Host
from gpunode.host.files import explain_os_error
from tests.waiting import PATIENCE, eventually, has_ended


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_absolute_symlink_stays_inside_the_root(host: Host, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/secret").write_text("inside")
    (tmp_path / "var").mkdir()
    (tmp_path / "var/run").symlink_to("/run")
    assert host.read_text("/var/run/secret") == "inside"
    assert host.realpath("/var/run/secret") == "/run/secret"


def test_dot_dot_never_leaves_the_root(host: Host, tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").symlink_to("../../../../../../etc/hostname")
    (tmp_path / "etc/hostname").write_text("recorded")
    assert host.read_text("/etc/passwd") == "recorded"


def test_path_is_resolved_as_on_the_node(host: Host, tmp_path: Path) -> None:
    (tmp_path / "usr/lib").mkdir(parents=True)
    (tmp_path / "usr/lib/x").write_text("x")
    (tmp_path / "lib").symlink_to("usr//lib/.")
    (tmp_path / "usr/up").symlink_to("..")
    assert host.path("/./lib//x") == host.path("/usr/up/lib/x/") == tmp_path / "usr/lib/x"
    assert host.path("/lib", follow=False) == tmp_path / "lib"
    assert host.path("/../..") == tmp_path
    assert host.path("/nowhere/at/../all") == tmp_path / "nowhere/all"
    assert host.read_text("/usr/lib/x/below") is None
    assert host.read_text("/a\0b") is None


def test_symlink_loop_is_a_config_error(host: Host, tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(ConfigError, match="symbolic links"):
        host.read_text("/a")


def test_missing_file_is_none_and_a_directory_is_an_error(host: Host, tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    assert host.read_text("/etc/daemon.json") is None
    with pytest.raises(ConfigError) as caught:
        host.read_text("/etc")
    assert "directory" in caught.value.message
    assert "ls -ld /etc" in caught.value.hint


def test_reading_a_directory_leaves_no_open_descriptor(host: Host, tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    for read in (host.read_text, lambda path: host.read_tail(path, 10)):
        with pytest.raises(ConfigError, match="directory"):
            read("/")
    assert os.listdir("/proc/self/fd") == before


def test_write_keeps_mode_and_follows_a_symlink(tmp_path: Path) -> None:
    real = tmp_path / "real.json"
    real.write_text("old")
    real.chmod(0o640)
    link = tmp_path / "link.json"
    link.symlink_to(real)
    Host().write_atomic(str(link), b"new")
    assert link.is_symlink()
    assert real.read_text() == "new"
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "real.json"]


def test_private_file_replaces_a_planted_one(tmp_path: Path) -> None:
    precious, link = tmp_path / "shadow", tmp_path / "status.json"
    precious.write_text("secret")
    link.symlink_to(precious)
    Host().write_atomic(str(link), b"ours", keep=False)
    assert (precious.read_text(), link.is_symlink(), link.read_text()) == ("secret", False, "ours")
    link.chmod(0o666)
    Host().write_atomic(str(link), b"again", keep=False)
    assert (link.read_text(), stat.S_IMODE(link.stat().st_mode)) == ("again", 0o644)
    link.unlink()
    link.symlink_to(tmp_path)
    Host().write_atomic(str(link), b"ours", keep=False)
    assert link.read_text() == "ours"


def test_write_keeps_extended_attributes(tmp_path: Path) -> None:
    target = tmp_path / "labelled"
    target.write_text("old")
    try:
        os.setxattr(target, "user.label", b"kept")
    except OSError:
        pytest.skip("this file system has no user attributes")
    Host().write_atomic(str(target), b"new")
    assert os.getxattr(target, "user.label") == b"kept"


def test_dangling_symlink_is_refused(tmp_path: Path) -> None:
    link = tmp_path / "daemon.json"
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="does not exist"):
        Host().write_atomic(str(link), b"{}")
    assert link.is_symlink()


def test_file_changed_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    target = tmp_path / "daemon.json"
    target.write_text("theirs")
    with pytest.raises(ConfigError, match="changed while"):
        Host().write_atomic(str(target), b"ours", expect=b"what we read")
    assert target.read_text() == "theirs"
    assert [path.name for path in tmp_path.iterdir()] == ["daemon.json"]


def test_directory_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "daemon.json").mkdir()
    with pytest.raises(ConfigError, match="directory"):
        Host().write_atomic(str(tmp_path / "daemon.json"), b"{}")


def test_run_kills_a_timed_out_command_and_its_children() -> None:
    for seconds in (1.0, 10.0, 60.0):  # a busy machine may not have started the shell within the first
        done = Host().run(["sh", "-c", "sleep 600 & echo $!; wait"], timeout=seconds)
        assert done.timed_out
        if done.stdout:
            break
    assert eventually(lambda: has_ended(int(done.stdout))), "the grandchild still runs"


def test_run_distinguishes_a_missing_program_from_a_failing_one() -> None:
    assert Host().run(["no-such-program-here"]).code == 127
    assert Host().run(["sh", "-c", "exit 3"]).code == 3
    assert Host().run(["cat"], stdin="fed").stdout == "fed"


def test_recorded_machine_replays_and_contacts_nothing(host: Host, tmp_path: Path) -> None:
    (tmp_path / ".gpunode").mkdir()
    recording = {
        "commands": {"modinfo -F version nvidia": {"stdout": "570.86.15\n"}},
        "devices": {"/dev/nvidia0": {"major": 195, "minor": 0, "mode": "0666"}},
        "sockets": {"/run/docker.sock": "refused"},
    }
    (tmp_path / ".gpunode/recording.json").write_text(json.dumps(recording))
    assert host.run(["modinfo", "-F", "version", "nvidia"]).stdout == "570.86.15\n"
    assert host.run(["id"]).code == 127
    node = host.device("/dev/nvidia0")
    assert node is not None
    assert (node.major, node.minor, node.mode) == (195, 0, 0o666)
    assert [found.path for found in host.devices("/dev")] == ["/dev/nvidia0"]
    assert host.socket_state("/run/docker.sock") == "refused"
    assert host.socket_state("/run/other.sock") == "absent"
    with pytest.raises(DaemonError):
        host.connect_unix("/run/docker.sock")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "not JSON"),
        ("[]", "JSON object"),
        ('{"commands": []}', "recording.json: commands must be an object"),
        ('{"commands": {"id": {"code": "0"}}}', "commands.id.code must be an integer"),
        ('{"devices": {"/dev/nvidia0": {"major": 195, "minor": 0, "mode": "rw"}}}', "mode such as"),
        ('{"sockets": {"/run/docker.sock": true}}', "sockets./run/docker.sock must be a string"),
    ],
)
def test_malformed_recording_is_named(host: Host, tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / ".gpunode").mkdir()
    (tmp_path / ".gpunode/recording.json").write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        host.run(["id"])


def test_dead_socket_is_replaced_and_a_live_one_is_reported(tmp_path: Path) -> None:
    path = f"{tmp_path}/s"
    Host().listen_unix(path).close()
    with Host().listen_unix(path):
        assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
        with pytest.raises(PreconditionError, match="Address already in use") as caught:
            Host().listen_unix(path)
    assert caught.value.hint == f"find the process that uses it: ss -xlp src {path}"


def test_live_and_dead_sockets_have_distinct_states(tmp_path: Path) -> None:
    path = str(tmp_path / "s.sock")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    assert Host().socket_state(path) == "refused"
    listener.listen()
    assert Host().socket_state(path) == "listening"
    listener.close()
    assert Host().socket_state(path) == "refused"
    (tmp_path / "file").write_text("")
    assert Host().socket_state(str(tmp_path / "file")) == "not-a-socket"


def test_second_process_waits_for_the_lock_and_then_refuses(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    with (
        Host().lock(path, timeout=1),
        pytest.raises(PreconditionError) as caught,
        Host().lock(path, timeout=0.1),
    ):
        pytest.fail("both hold the lock")
    assert str(os.getpid()) in caught.value.message


@pytest.mark.parametrize("text", ["root \x1b[31mrun me", "99999999", "0", "1 2", "-1", ""])
def test_refusal_names_only_a_live_process(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lock"
    with Host().lock(str(path), timeout=1):
        path.write_text(text)
        with pytest.raises(PreconditionError) as caught, Host().lock(str(path), timeout=0.1):
            pytest.fail("both hold the lock")
    assert caught.value.message == f"another gpunode is changing this node (lock {path})"


@pytest.mark.parametrize("kind", ["symlink", "writable", "file", "foreign"])
def test_lock_in_a_directory_of_another_user_is_refused(tmp_path: Path, kind: str) -> None:
    place, elsewhere = tmp_path / "place", tmp_path / "elsewhere"
    elsewhere.mkdir()
    if kind == "symlink":
        place.symlink_to(elsewhere)
    elif kind == "file":
        place.write_text("")
    else:
        place.mkdir()
        place.chmod(0o1777 if kind == "writable" else 0o755)
    if kind == "foreign":
        if os.geteuid() != 0:
            pytest.skip("only root can give a directory to another user")
        os.chown(place, 65534, 65534)
    with pytest.raises(GpunodeError) as caught, Host().lock(str(place / "lock"), timeout=0.1):
        pytest.fail("locked")
    assert str(place) in caught.value.message and caught.value.hint
    assert list(elsewhere.iterdir()) == []


def test_directory_created_for_a_lock_is_private(tmp_path: Path) -> None:
    with Host().lock(str(tmp_path / "run/gpunode/lock"), timeout=1):
        assert (tmp_path / "run/gpunode").stat().st_mode & 0o7777 == 0o700
        assert (tmp_path / "run").stat().st_mode & 0o7777 == 0o755


def test_lock_is_handed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "lock")
    order: list[str] = []
    waits = threading.Event()
    sleep = time.sleep

    def second() -> None:
        with Host().lock(path, timeout=PATIENCE):
            order.append("second")

    def seen_to_wait(seconds: float) -> None:
        waits.set()
        sleep(seconds)

    with Host().lock(path, timeout=1):
        waiter = threading.Thread(target=second)
        monkeypatch.setattr("gpunode.host.files.time.sleep", seen_to_wait)
        waiter.start()
        assert waits.wait(PATIENCE)
        order.append("first")
    waiter.join(timeout=PATIENCE)
    assert order == ["first", "second"]


def test_notify_sends_a_datagram_to_systemd(tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(path)
        listener.settimeout(20)
        Host(environ={"NOTIFY_SOCKET": path}).notify("READY=1")
        assert listener.recv(100) == b"READY=1"


def test_which_ignores_a_truncated_install(host: Host, tmp_path: Path) -> None:
    (tmp_path / "usr/bin").mkdir(parents=True)
    program = tmp_path / "usr/bin/nvidia-ctk"
    program.write_text("")
    program.chmod(0o755)
    assert host.which("nvidia-ctk") is None
    program.write_text("#!/bin/sh\n")
    assert host.which("nvidia-ctk") == "/usr/bin/nvidia-ctk"


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="needs root to mount a tiny tmpfs")
def test_full_disk_keeps_the_old_file(tmp_path: Path) -> None:
    mounted = tmp_path / "small"
    mounted.mkdir()
    if Host().run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(mounted)]).code != 0:
        pytest.skip("no tmpfs can be mounted here")
    try:
        target = mounted / "daemon.json"
        target.write_text("{}")
        with pytest.raises(ConfigError) as caught:
            Host().write_atomic(str(target), b"x" * 200_000)
        assert "No space left" in caught.value.message
        assert "df -h" in caught.value.hint
        assert target.read_text() == "{}"
        assert [path.name for path in mounted.iterdir()] == ["daemon.json"]
    finally:
        Host().run(["umount", str(mounted)])


def test_killed_child_that_did_not_read_its_input_leaves_no_open_pipe() -> None:
    gc.collect()  # descriptors left open by an earlier test must not be closed meanwhile
    before = len(os.listdir("/proc/self/fd"))
    done = Host(environ={"PATH": os.environ["PATH"]}).run(
        ("sleep", "60"), timeout=0.2, stdin=b"x" * 4_000_000
    )
    assert done.timed_out
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("mask", [0o077, 0o000])
def test_directories_get_their_mode_whatever_the_umask(tmp_path: Path, mask: int) -> None:
    (tmp_path / "etc").mkdir(mode=0o700)
    before = os.umask(mask)
    try:
        Host(tmp_path).make_dirs("/etc/a/b", mode=0o700)
        Host(tmp_path).make_dirs("/etc/a/b")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("etc", "etc/a", "etc/a/b")]
    assert modes == [0o700, 0o755, 0o700]


def test_hint_for_root_does_not_suggest_sudo(monkeypatch: pytest.MonkeyPatch) -> None:
    for user, said in ((0, "lsattr -d /etc/a"), (1000, "sudo")):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        assert said in explain_os_error(PermissionError(errno.EPERM, "no"), "/etc/a", "write").hint
    assert "findmnt /etc/a" in explain_os_error(OSError(errno.EBUSY, "busy"), "/etc/a", "write").hint


def test_directories_are_not_created_behind_a_dangling_symlink(tmp_path: Path) -> None:
    (tmp_path / "cdi").symlink_to(tmp_path / "mnt/cdi")
    for path, text in (("cdi", "it"), ("cdi/more", f"{tmp_path}/cdi")):
        with pytest.raises(ConfigError) as caught:
            Host().make_dirs(f"{tmp_path}/{path}")
        assert f": {text} is a symlink to {tmp_path}/mnt/cdi, which does not exist" in caught.value.message
        assert caught.value.hint == f"create its target or remove the link: rm {tmp_path}/cdi"
    assert not (tmp_path / "mnt").exists()
    (tmp_path / "mnt/cdi").mkdir(parents=True)
    Host().make_dirs(f"{tmp_path}/cdi/more/deeper")
    assert (tmp_path / "mnt/cdi/more/deeper").is_dir()


def test_dangling_symlink_in_place_of_a_file_has_a_hint(tmp_path: Path) -> None:
    (tmp_path / "file").symlink_to("nowhere")
    with pytest.raises(ConfigError, match="it is a symlink to nowhere, which does not exist") as caught:
        Host().write_atomic(f"{tmp_path}/file", b"")
    assert caught.value.hint == f"create its target or remove the link: rm {tmp_path}/file"


def test_pipe_is_refused_as_output_file(tmp_path: Path) -> None:
    """As /dev/stdout is in a pipeline; the link of /proc has no path as its text."""
    reader, writer = os.pipe()
    try:
        with pytest.raises(UsageError, match="is not a file"):
            Host().refuse_output(f"/dev/fd/{writer}")
    finally:
        os.close(reader)
        os.close(writer)


def test_huge_file_is_not_read_for_the_comparison(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as stream:
        stream.truncate(1 << 33)
    with pytest.raises(ConfigError, match="larger than 16 MiB"):
        Host().write_atomic(f"{tmp_path}/file", b"new", expect=b"old")
