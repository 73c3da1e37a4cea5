"""The rule of gpunode/host/trust.py, through `Host` and the command line."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gpunode.errors import DaemonError, GpunodeError, PreconditionError
from gpunode.host import NOT_TRUSTED, Host
from tests.security.container import process_below

OTHER = 61001


def program(path: Path, uid: int = 0, mode: int = 0o755) -> str:
    """A program that prints its own name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\necho executed\n")
    os.chown(path, uid, uid)
    path.chmod(mode)
    return str(path)


def refused(path: str, **environ: str) -> str:
    """Why a program isn't run; empty if it was."""
    done = Host(environ={**os.environ, **environ}).run([path])
    assert (done.code == NOT_TRUSTED) == ("executed" not in done.stdout), done
    return done.stderr if done.code == NOT_TRUSTED else ""


def test_program_owned_by_root_is_run(place: Path) -> None:
    assert refused(program(place / "bin/tool")) == ""


def test_program_owned_by_another_user_is_not_run(place: Path) -> None:
    assert f"belongs to user {OTHER}" in refused(program(place / "bin/tool", uid=OTHER))


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o1777])
def test_program_writable_by_others_is_not_run(place: Path, mode: int) -> None:
    assert "can be written by other users" in refused(program(place / "tool", mode=mode))


@pytest.mark.parametrize("mode", [0o775, 0o777])
def test_program_in_a_directory_writable_by_others_is_not_run(place: Path, mode: int) -> None:
    path = program(place / "a/b/tool")
    (place / "a").chmod(mode)
    assert f"{place}/a can be written by other users" in refused(path)


def test_program_in_a_directory_of_another_user_is_not_run(place: Path) -> None:
    path = program(place / "a/b/tool")
    os.chown(place / "a", OTHER, OTHER)
    assert f"{place}/a belongs to user {OTHER}" in refused(path)


def test_root_program_in_a_sticky_directory_is_run(place: Path) -> None:
    path = program(place / "a/tool")
    (place / "a").chmod(0o1777)
    assert refused(path) == ""


def test_symlink_and_its_target_must_both_be_trusted(place: Path) -> None:
    program(place / "bad/tool", uid=OTHER)
    program(place / "good/tool")
    (place / "good/link").symlink_to("../bad/tool")
    assert "belongs to user" in refused(f"{place}/good/link")
    (place / "good/own").symlink_to("tool")
    assert refused(f"{place}/good/own") == ""
    os.chown(place / "good/own", OTHER, OTHER, follow_symlinks=False)
    assert "belongs to user" in refused(f"{place}/good/own")


def test_program_path_through_proc_is_not_run() -> None:
    done = Host().run([f"/proc/{os.getpid()}/exe", "-c", "print('executed')"])
    assert (done.code, done.stdout) == (NOT_TRUSTED, "")


def test_path_directory_writable_by_others_is_skipped(place: Path) -> None:
    for name in ("good", "open"):
        program(place / name / "tool")
    (place / "open").chmod(0o1777)
    (place / "good/shows").write_text('#!/bin/sh\necho "$PATH"\n')
    (place / "good/shows").chmod(0o755)
    host = Host(environ={"PATH": f"{place}/open:.:{place}/good:/usr/bin:/bin"})
    assert host.run(["shows"]).stdout.strip() == f"{place}/good:/usr/bin:/bin"


@pytest.mark.parametrize("mode", [0o775, 0o777, 0o1777])
def test_program_found_only_in_an_unsafe_path_directory_is_named_with_the_reason(
    place: Path, mode: int
) -> None:
    program(place / "open/tool")
    (place / "open").chmod(mode)
    done = Host(environ={"PATH": f"{place}/open:/usr/bin"}).run(["tool"])
    assert done.code == NOT_TRUSTED
    assert done.stderr == f"tool was not run: {place}/open can be written by other users"


def test_root_programs_are_run_in_a_user_namespace_without_root(place: Path) -> None:
    """As in a sandbox, or after `unshare --user`: all files of root belong to the overflow user there."""
    path, theirs = program(place / "tool"), program(place / "open/tool", mode=0o777)
    script = f"""
import ctypes, os
from pathlib import Path
from gpunode.host import Host
import gpunode.host.trust, subprocess
os.setgroups([])
os.setresgid({OTHER}, {OTHER}, {OTHER})
os.setresuid({OTHER}, {OTHER}, {OTHER})
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: else /proc/self belongs to root
if ctypes.CDLL(None).unshare(0x10000000) != 0:  # CLONE_NEWUSER
    raise SystemExit("no user namespace")
Path("/proc/self/setgroups").write_text("deny")
Path("/proc/self/uid_map").write_text("0 {OTHER} 1")
Path("/proc/self/gid_map").write_text("0 {OTHER} 1")
assert os.stat({path!r}).st_uid not in (0, {OTHER})
print(*[Host().run([one]).code for one in ({path!r}, {theirs!r})])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    if "no user namespace" in done.stderr:
        pytest.skip("an ordinary user can't make a user namespace here")
    assert done.stdout.split() == ["0", str(NOT_TRUSTED)], done.stderr


def test_untrusted_program_is_not_found_by_name(place: Path) -> None:
    program(place / "theirs/tool", uid=OTHER)
    ours = program(place / "ours/tool")
    assert Host(environ={"PATH": f"{place}/theirs:{place}/ours"}).which("tool") == ours


def test_without_a_trusted_path_no_program_of_the_current_directory_is_run(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(place / "tool")
    monkeypatch.chdir(place)
    for path in ("", ".", f"{place}/missing"):
        assert Host(environ={"PATH": path}).run(["tool"]).code == 127


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("home/own", "own"),
        ("home/link", "own"),
        ("shown", "shown"),
        ("home/to-secret", None),
        ("secret", None),
        ("closed/shown", None),
        ("home/to-closed", None),
        ("home/fifo", None),
        ("home/zero", None),
        ("home/environ", None),
        ("home/up", None),
        ("home/process", None),
        ("proc/secret", None),
        ("proc/shown", "shown"),
    ],
)
def test_file_named_by_a_user_is_read_with_that_users_rights(
    place: Path, path: str, text: str | None
) -> None:
    files = {"home/own": "own", "shown": "shown", "secret": "canary", "closed/shown": "canary"}
    for name, content in files.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(content)
    (place / "secret").chmod(0o600)
    (place / "closed").chmod(0o700)
    os.mkfifo(place / "home/fifo")
    targets = {"link": "own", "to-secret": f"{place}/secret", "to-closed": f"{place}/closed/shown"}
    targets |= {"zero": "/dev/zero", "environ": "/proc/self/environ", "up": "../" * 40 + "etc/shadow"}
    targets |= {"process": f"/proc/{os.getpid()}/root{place}/secret"}
    for name, target in targets.items():
        (place / "home" / name).symlink_to(target)
    for one in ((place / "home"), *(place / "home").iterdir()):
        os.chown(one, OTHER, OTHER, follow_symlinks=False)
    top = f"/proc/{os.getpid()}/root{place}" if path.startswith("proc/") else place
    try:
        data = Host().as_user(OTHER).read_text(f"{top}/{path.removeprefix('proc/')}")
    except GpunodeError as error:
        data = None
        assert "canary" not in error.message
    assert (data or None) == text


def test_user_view_runs_nothing_and_lists_only_what_the_user_may_read(place: Path) -> None:
    path = program(place / "tool")
    (place / "closed").mkdir(mode=0o700)
    theirs = Host().as_user(OTHER)
    assert theirs.run([path]).code == NOT_TRUSTED
    assert "tool" in theirs.listdir(str(place))
    with pytest.raises(GpunodeError):
        theirs.listdir(f"{place}/closed")


def test_only_the_users_own_socket_is_contacted_for_that_user(place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{place}/s")
        listening.listen()
        theirs = Host().as_user(OTHER)
        with pytest.raises(DaemonError):
            theirs.connect_unix(f"{place}/s")
        os.chown(place / "s", OTHER, OTHER)
        theirs.connect_unix(f"{place}/s").close()
        assert theirs.socket_state(f"{place}/s") == "listening"


def test_path_below_another_root_stays_below_it(place: Path) -> None:
    """An absolute link leads to the container's own file."""
    root = place / "rootfs"
    (root / "etc").mkdir(parents=True)
    (root / "etc/hostname").write_text("container")
    (root / "leak").symlink_to("/etc/hostname")
    (root / "gone").symlink_to("/etc/passwd")
    (root / "up").symlink_to("../../../../etc/passwd")
    (root / "line\nbreak").symlink_to("/etc/passwd")
    with process_below(root) as pid:
        host, inside = Host(), f"/proc/{pid}/root"
        assert host.read_text(f"{inside}/leak") == "container"
        assert host.read_tail(f"{inside}/leak", 4) == "iner"
        for name in ("gone", "up", "etc/../../gone", "line\nbreak"):
            assert host.read_text(f"{inside}/{name}") is None
            assert not host.exists(f"{inside}/{name}") and host.stat(f"{inside}/{name}") is None
        assert set(host.listdir(f"{inside}/etc")) == {"hostname"}
        assert not host.is_own(pid)


def test_own_process_belongs_to_this_node() -> None:
    assert Host().is_own(os.getpid())


@pytest.mark.parametrize(("numbers", "own"), [("7", True), ("7 1", False)])
def test_container_run_by_a_system_service_is_not_the_nodes_own(
    tmp_path: Path, numbers: str, own: bool
) -> None:
    """systemd-nspawn's containers have a control group below that of their service."""
    process = tmp_path / "proc/7"
    process.mkdir(parents=True)
    (process / "status").write_text(f"Uid:\t0\t0\t0\t0\nNSpid:\t{numbers}\n")
    (process / "cgroup").write_text("0::/machine.slice/systemd-nspawn@box.service/payload\n")
    assert Host(tmp_path).is_own(7) is own


@pytest.mark.parametrize(("user", "own"), [("user:[1]", True), ("user:[2]", False)])
def test_process_in_another_user_namespace_is_not_the_nodes_own(tmp_path: Path, user: str, own: bool) -> None:
    for pid, space in ((1, "user:[1]"), (7, user)):
        process = tmp_path / f"proc/{pid}"
        (process / "ns").mkdir(parents=True)
        (process / "status").write_text("Uid:\t0\t0\t0\t0\n")
        (process / "ns/user").symlink_to(space)
        (process / "ns/mnt").symlink_to("mnt:[1]")
    assert Host(tmp_path).is_own(7) is own


def test_file_created_first_by_another_user_does_not_keep_its_owner(place: Path) -> None:
    shared = place / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "out").write_text("theirs")
    os.chown(shared / "out", OTHER, OTHER)
    Host().write_atomic(f"{shared}/out", b"ours")
    assert ((shared / "out").stat().st_uid, (shared / "out").read_text()) == (0, "ours")


def test_root_symlink_is_written_through(place: Path) -> None:
    (place / "real").write_text("old")
    (place / "link").symlink_to("real")
    Host().write_atomic(f"{place}/link", b"new")
    assert (place / "link").is_symlink() and (place / "real").read_text() == "new"


def test_planted_symlink_is_an_error_with_its_name(place: Path) -> None:
    (place / "theirs").symlink_to("/etc")
    os.chown(place / "theirs", OTHER, OTHER, follow_symlinks=False)
    with pytest.raises(PreconditionError, match="theirs is a symlink that another user may have created"):
        Host().write_atomic(f"{place}/theirs/gpunode-test", b"")
