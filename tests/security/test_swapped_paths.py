"""A write of root ends in the directory that was checked, whenever a user swaps a part of the path."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from gpunode.errors import GpunodeError, PreconditionError
from gpunode.host import Host
from gpunode.host.journal import FileEdit, Journal
from gpunode.host.transaction import change_files
from gpunode.runtime import removal

OTHER = 61001
# the system calls of Python between which another process can act
CALLS = (
    *("open", "mkdir", "replace", "rename", "unlink", "rmdir", "chmod", "chown", "symlink", "readlink"),
    *("stat", "lstat", "fstat", "access", "listdir", "listxattr", "fchmod", "fchown"),
)
CHANGES: dict[str, Callable[[str], object]] = {
    "write": lambda path: Host().write_atomic(path, b"ours"),
    "write and forget": lambda path: Host().write_atomic(path, b"ours", keep=False),
    "write with an owner": lambda path: Host().write_atomic(path, b"ours", owner=(0, 0)),
    "write from above": lambda path: Host().write_atomic(path, b"ours", above=True),
    "make directories": lambda path: Host().make_dirs(f"{os.path.dirname(path)}/new/deeper"),
    "make a link": lambda path: Host().make_link(f"{os.path.dirname(path)}/new", "/nowhere"),
    "remove": lambda path: Host().remove(path),
    "remove the directory": lambda path: Host().remove_tree(os.path.dirname(path)),
    "remove leftovers": lambda path: Host().remove_leftovers(path),
    "rename": lambda path: Host().rename(path, f"{path}.new"),
    "set the owner": lambda path: Host().set_owner(path, 0, 0, 0o644),
    "set the mode": lambda path: Host().set_mode(path, 0o644),
    "lock": lambda path: Host().lock(path, 0.1).__enter__(),
}


def theirs(path: Path, uid: int = OTHER) -> Path:
    """Give everything below to a user."""
    for one in (path, *path.rglob("*")):
        os.chown(one, uid, uid, follow_symlinks=False)
    return path


def tree(top: Path, text: str) -> Path:
    """A file in a directory of a directory, and the leftovers of a killed write."""
    (top / "way/dir").mkdir(parents=True)
    for name in ("file", ".file.abcdefgh.gpunode"):
        (top / "way/dir" / name).write_text(text)
        (top / "way/dir" / name).chmod(0o600)
    return top


def state(top: Path) -> dict[str, tuple[object, ...]]:
    found: dict[str, tuple[object, ...]] = {}
    for path in (top, *top.rglob("*")):
        seen = path.lstat()
        text = path.read_text() if path.is_file() else ""
        found[str(path)] = (seen.st_ino, seen.st_mode, seen.st_uid, seen.st_nlink, seen.st_mtime_ns, text)
    return found


def plant(component: Path, target: Path) -> None:
    """Replace the file with a link of another user."""
    with suppress(FileNotFoundError):
        component.rename(component.with_name("aside"))
    component.symlink_to(target)
    os.chown(component, OTHER, OTHER, follow_symlinks=False)


def swapped_at(number: int, swap: Callable[[], None], change: Callable[[], object]) -> bool:
    """Whether a change made so many system calls that `swap` happened, before the one with this number."""
    calls, inside = 0, False

    def watched(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal calls, inside
            if not inside:
                if calls == number:
                    inside = True
                    swap()
                    inside = False
                calls += 1
            return inner(*args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, watched(getattr(os, name)))
        with suppress(GpunodeError, OSError):
            change()
    return calls > number


@pytest.mark.parametrize("component", ["way", "way/dir", "way/dir/file"])
@pytest.mark.parametrize("kind", CHANGES)
def test_swap_at_any_moment_changes_no_other_path(place: Path, kind: str, component: str) -> None:
    outside = tree(place / "outside", "precious")
    before = state(outside)
    for number in range(500):
        top = theirs(tree(place / f"{number}", "theirs"))
        link, target, path = top / component, outside / component, f"{top}/way/dir/file"
        reached = swapped_at(number, partial(plant, link, target), partial(CHANGES[kind], path))
        assert state(outside) == before, f"swapped before system call {number}"
        if not reached:
            return
    pytest.fail("it never ends")


@pytest.mark.parametrize("component", ["way", "way/dir"])
@pytest.mark.parametrize("kind", [kind for kind in CHANGES if kind not in ("remove the directory", "lock")])
def test_planted_directory_is_an_error_with_its_name(place: Path, kind: str, component: str) -> None:
    outside, top = tree(place / "outside", "precious"), tree(place / "top", "ours")
    before = state(outside)
    plant(top / component, outside / component)
    with pytest.raises(
        PreconditionError, match=f"{component} is a symlink that another user may have created"
    ):
        CHANGES[kind](f"{top}/way/dir/file")
    assert state(outside) == before


@pytest.mark.parametrize("change", ["set the owner", "set the mode"])
def test_owner_and_mode_are_not_changed_through_a_planted_symlink(place: Path, change: str) -> None:
    outside, top = tree(place / "outside", "precious"), tree(place / "top", "ours")
    before = state(outside)
    plant(top / "way/dir/file", outside / "way/dir/file")
    with pytest.raises(GpunodeError, match="symlink"):
        CHANGES[change](f"{top}/way/dir/file")
    assert state(outside) == before


def test_owner_of_a_file_behind_a_root_symlink_is_restored(place: Path) -> None:
    (place / "real").write_text("")
    (place / "link").symlink_to("real")
    Host().set_owner(f"{place}/link", OTHER, OTHER, 0o600)
    assert ((place / "real").stat().st_uid, (place / "link").lstat().st_uid) == (OTHER, 0)


@pytest.mark.parametrize(
    ("uid", "mode"), [(OTHER, 0o755), (OTHER, 0o1755), (0, 0o777), (0, 0o1777), (0, 0o775)]
)
def test_in_a_directory_of_another_user_owner_and_mode_are_not_kept(place: Path, uid: int, mode: int) -> None:
    """A directory's owner can put any file there, as all users can in a world-writable one."""
    shared, precious = place / "shared", place / "precious"
    precious.write_text("precious")
    shared.mkdir()
    (shared / "file").write_text("theirs")
    (shared / "file").chmod(0o666)
    (shared / "link").symlink_to(precious)
    theirs(shared, OTHER)
    os.chown(shared, uid, uid)
    shared.chmod(mode)
    for name in ("file", "link"):
        Host().write_atomic(f"{shared}/{name}", b"ours")
        found = (shared / name).lstat()
        assert (found.st_uid, found.st_mode & 0o7777, (shared / name).read_text()) == (0, 0o644, "ours")
    assert precious.read_text() == "precious"
    Host().set_owner(f"{shared}/file", OTHER, OTHER, 0o666)  # it may be another file by now
    assert (shared / "file").stat().st_uid == 0


def test_root_symlink_that_another_user_can_move_is_not_followed(place: Path) -> None:
    """It is in that user's directory, under any name that the user chose."""
    shared, outside = place / "shared", tree(place / "outside", "precious")
    shared.mkdir()
    (shared / "link").symlink_to(outside)
    os.chown(shared, OTHER, OTHER)
    with pytest.raises(PreconditionError, match="is a symlink that another user may have created"):
        Host().write_atomic(f"{shared}/link/way/dir/file", b"ours")
    assert (outside / "way/dir/file").read_text() == "precious"


def test_directory_placed_by_another_user_keeps_its_mode(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a lookup and the creation of the directory, a user moves root's file to the same name."""
    sticky, theirs_ = place / "sticky", place / "theirs"
    for directory in (sticky, theirs_):
        directory.mkdir()
    sticky.chmod(0o1777)
    (theirs_ / "report").write_text("secret")
    (theirs_ / "report").chmod(0o600)
    os.chown(theirs_, OTHER, OTHER)
    make = os.mkdir

    def moved_first(name: str, *args: Any, **options: Any) -> None:
        (theirs_ / "report").rename(sticky / "cdi")
        make(name, *args, **options)

    monkeypatch.setattr(os, "mkdir", moved_first)
    with pytest.raises(GpunodeError):
        Host().make_dirs(f"{sticky}/cdi")
    assert (sticky / "cdi").stat().st_mode & 0o7777 == 0o600


@pytest.mark.parametrize(
    ("directory", "file"),
    [((0, 999, 0o2775), (0, 999, 0o640)), ((OTHER, OTHER, 0o755), (OTHER, OTHER, 0o600))],
)
@pytest.mark.parametrize("fails", [False, True])
def test_private_file_in_a_shared_directory_stays_private_and_is_restored(
    place: Path, directory: tuple[int, int, int], file: tuple[int, int, int], fails: bool
) -> None:
    shared, path = place / "shared", place / "shared/daemon.json"
    shared.mkdir()
    path.write_text("before")
    for one, (uid, gid, mode) in ((shared, directory), (path, file)):
        os.chown(one, uid, gid)
        one.chmod(mode)
    host = Host(environ={"GPUNODE_STATE_DIR": f"{place}/state"})
    journal, edit = Journal.of(host), FileEdit(str(path), b"before", b"after")
    seen: list[tuple[int, str]] = []

    def look() -> None:
        seen.append((path.stat().st_mode & 0o777, path.read_text()))
        if fails:
            raise PreconditionError("refused")

    with suppress(PreconditionError):
        change_files(host, "test", lambda: [edit], lambda _entry: None, activate=look)
    assert seen == [(file[2], "after")]
    if not fails:
        plan = removal.plan_rollback(journal, journal.committed())
        change_files(
            host, "rollback", lambda: plan.edits, lambda _entry: None, done=lambda: plan.finish(journal)
        )
    found = path.stat()
    assert (path.read_text(), found.st_uid, found.st_gid, found.st_mode & 0o7777) == ("before", *file)


def test_restored_file_gets_no_setuid_bit_if_others_can_replace_it(place: Path) -> None:
    shared = theirs(place)
    Host().write_atomic(f"{shared}/file", b"ours", mode=0o4755, owner=(0, 0))
    assert (shared / "file").stat().st_mode & 0o7777 == 0o755


def test_file_read_through_a_symlink_in_a_shared_directory_is_not_replaced(place: Path) -> None:
    shared = place / "shared"
    shared.mkdir()
    (place / "real").write_text("content")
    (shared / "link").symlink_to(place / "real")
    shared.chmod(0o2775)
    with pytest.raises(PreconditionError, match="it is a symlink in a directory") as caught:
        Host().write_atomic(f"{shared}/link", b"new", expect=b"content")
    assert (caught.value.code, (shared / "link").is_symlink()) == ("planted-link", True)


def test_rollback_replaces_a_symlink_that_another_user_planted(place: Path) -> None:
    shared, outside = place / "shared", place / "outside"
    shared.mkdir()
    path = shared / "daemon.json"
    path.write_text("before")
    host = Host(environ={"GPUNODE_STATE_DIR": f"{place}/state"})
    journal = Journal.of(host)
    entry = journal.begin("test", [FileEdit(str(path), b"before", b"after")], {})
    path.unlink()
    outside.write_text("after")
    shared.chmod(0o2775)
    path.symlink_to(outside)
    assert journal.restore_files(entry) == ()
    assert not path.is_symlink() and (path.read_text(), outside.read_text()) == ("before", "after")


def in_child(change: Callable[[], object]) -> None:
    """Call `change` in a process that may give up its root directory and its user."""
    child = os.fork()
    if child == 0:
        try:
            change()
            os._exit(0)
        except BaseException as error:  # noqa: BLE001 - the child must end here
            os.write(2, f"{error!r}\n".encode())
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_without_proc_directories_are_created_and_files_replaced(place: Path) -> None:
    (place / "proc").mkdir()
    (place / "file").write_text("old")
    (place / "file").chmod(0o640)
    with suppress(OSError):  # not every file system has user attributes
        os.setxattr(place / "file", "user.label", b"kept")
    labels = os.listxattr(place / "file")
    import_module("gpunode.host.files")  # the child can't import anything

    def change() -> None:
        os.chroot(place)
        os.umask(0o077)
        Host().make_dirs("/run/gpunode")
        Host().write_atomic("/file", b"new", expect=b"old", above=True)
        with pytest.raises(GpunodeError, match="/proc is not mounted"):
            Host().set_mode("/file", 0o600)

    in_child(change)
    assert stat.S_IMODE((place / "run/gpunode").stat().st_mode) == 0o755
    assert ((place / "file").read_text(), stat.S_IMODE((place / "file").stat().st_mode)) == ("new", 0o640)
    assert os.listxattr(place / "file") == labels


def test_directory_below_a_group_writable_one_gets_its_mode_whatever_the_umask(place: Path) -> None:
    place.chmod(0o2775)
    before = os.umask(0o077)
    try:
        Host().make_dirs(f"{place}/etc/cdi")
    finally:
        os.umask(before)
    assert [stat.S_IMODE((place / path).stat().st_mode) & 0o777 for path in ("etc", "etc/cdi")] == [0o755] * 2


def test_root_owned_output_file_in_a_sticky_directory_is_refused_at_once(place: Path) -> None:
    (place / "out").write_text("")
    place.chmod(0o1777)

    def change() -> None:
        os.setuid(OTHER)
        Host().refuse_output(f"{place}/new")
        with pytest.raises(PreconditionError, match="no permission to write in this directory"):
            Host().refuse_output(f"{place}/out")

    in_child(change)
