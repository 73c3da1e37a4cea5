"""Trust: which programs are run, which processes are the node's own, what is read and written for others.

One rule, docs/security.md. "We" are the user who runs gpunode.

- A program is run only if root and we alone can write it: its file, every directory above it and every link
  on the way. Nothing is executed through /proc/PID.
- A process is the node's own if all its user ids are root's or ours, its program isn't setuid, it has no PID
  namespace of its own, and it shares our user namespace, root directory and mount namespace, or is a system
  service of systemd. Any other process is untrusted, whatever its name: it is no engine and no kubelet of
  this node.
- A path that another user names is read as that user could read it; one that a process in a container names
  is resolved below its root directory. No link leads out of there, and only regular files are opened.
- A file is written through a symlink only if root or we made the link.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MAX_STEPS = 400
_UNMAPPED = "is not mapped in this user namespace"
_SERVICE = re.compile(r"(?:/[^/]+\.slice)+/[^/]+\.service(?:/.*)?")
_CONTAINER = re.compile(r"[0-9a-f]{64}")


# --- running ---------------------------------------------------------------------------------------------


def find_program(name: str, path: str) -> tuple[str, str]:
    """The file to execute for `name`, searched on `path` as a shell does, and why none may be executed.

    Both are empty if there is no such program.
    """
    if name in (sys.executable, os.path.realpath(sys.executable)):
        return name, ""  # it runs already
    if "/" in name:
        places = [("", os.path.abspath(name))]  # noqa: PTH100
    else:
        absolute = (directory for directory in path.split(":") if directory.startswith("/"))
        places = [(directory, f"{directory}/{name}") for directory in absolute]
    reason = ""
    for directory, place in places:
        if os.access(place, os.X_OK) and not os.path.isdir(place):  # noqa: PTH112 - asked for every command
            problem = (refusal(directory, directory=True) if directory else "") or refusal(place)
            if not problem:
                return place, ""
            reason = reason or problem
    return "", reason


def safe_path(path: str) -> str:
    """PATH without the directories in which another user can put a program (sticky ones are such, too), and
    without missing ones: our children search it, too."""
    return ":".join(
        entry for entry in path.split(":") if entry.startswith("/") and not refusal(entry, directory=True)
    )


def refusal(path: str, *, directory: bool = False) -> str:
    """Why the program `path` must not be executed, or nothing in the directory `path`; empty if only root and
    this user can have written it."""
    try:
        problem, found = _examined(path)
    except OSError as error:
        return str(error.strerror)
    if problem:
        return problem
    if not directory and not stat.S_ISREG(found.st_mode):
        return "it is not a file"
    return f"{path} can be written by other users" if _others_may_write(found) else ""


def _examined(path: str) -> tuple[str, os.stat_result]:
    """What makes the way to `path` unsafe (empty: nothing), and the lstat of its end."""
    found = os.lstat("/")
    for directory, step, found in _walk(path):
        if step.startswith("/proc/"):
            return "it is named through another process", found
        if not _trusted(found):
            return _foreign_owner(step, found.st_uid), found
        if directory is not None and _others_may_write(directory) and not _kept_apart(directory, found):
            return f"{step.rpartition('/')[0] or '/'} can be written by other users", found
    return "", found


def _foreign_owner(path: str, uid: int) -> str:
    if uid != _number("/proc/sys/kernel/overflowuid", 65534) or _maps_everybody():
        return f"{path} belongs to user {uid}"
    return f"the owner of {path} {_UNMAPPED} (it is shown as user {uid})"


def _maps_everybody() -> bool:
    """Whether this user namespace maps all users, as the first one does (user_namespaces(7))."""
    try:
        lines = Path("/proc/self/uid_map").read_text().splitlines()
    except OSError:
        return True
    return any(line.split()[2:] == ["4294967295"] for line in lines)


def _number(path: str, default: int) -> int:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return default


def advice(reason: str) -> str:
    """What to do about a program that isn't run for this reason."""
    if _UNMAPPED in reason:
        return "run gpunode on the node itself, or map the owner into the container's user namespace"
    return "have root alone own it and its directories: chown root:root, chmod go-w"


def planted_link(path: str) -> str:
    """The first symlink on the way to `path` that another user can have made; empty if there is none."""
    try:
        for directory, step, found in _walk(path):
            if not stat.S_ISLNK(found.st_mode) or step.startswith("/proc/"):
                continue
            movable = directory is not None and _others_may_write(directory)
            if not _trusted(found) or (movable and not _kept_apart(directory or found, found)):
                return step
    except OSError:
        pass  # opening it reports the error
    return ""


def in_shared_directory(path: str) -> bool:
    """Whether a file is in a directory in which other users may make files."""
    try:
        return _others_may_write(Path(path).absolute().parent.stat())
    except OSError:
        return False


def _trusted(found: os.stat_result) -> bool:
    return found.st_uid in (0, os.geteuid(), _machine_root())


def _machine_root() -> int:
    """The number that the machine's root has here: in a user namespace without root the overflow user's
    (user_namespaces(7)). /proc always belongs to root."""
    try:
        return os.lstat("/proc").st_uid
    except OSError:
        return 0


def _others_may_write(found: os.stat_result) -> bool:
    """A group with its user's number has one member, as most distributions make them."""
    if stat.S_ISLNK(found.st_mode):
        return False
    private = found.st_uid != 0 and found.st_uid == found.st_gid
    return bool(found.st_mode & stat.S_IWOTH) or (bool(found.st_mode & stat.S_IWGRP) and not private)


def _kept_apart(directory: os.stat_result, entry: os.stat_result) -> bool:
    """Whether an entry that root or we own can't be replaced there: the directory is sticky, like /tmp. A
    mount point doesn't count, because a user's FUSE file system can claim any owner."""
    return bool(directory.st_mode & stat.S_ISVTX) and directory.st_dev == entry.st_dev


def _walk(path: str) -> Iterator[tuple[os.stat_result | None, str, os.stat_result]]:
    """Every directory and symlink on the way to an absolute path, and its end: the directory in which it is
    (None for the root), its path, its lstat."""
    top = os.lstat("/")
    yield None, "/", top
    current, stack = "", [top]
    todo = _parts(path)
    for _ in range(_MAX_STEPS):
        if not todo:
            return
        part = todo.pop()
        if part == "..":
            current = current.rpartition("/")[0]
            stack = stack[: max(1, len(stack) - 1)]
            continue
        step = f"{current}/{part}"
        found = os.lstat(step)
        yield stack[-1], step, found
        if stat.S_ISLNK(found.st_mode):
            target = os.readlink(step)  # noqa: PTH115
            if target.startswith("/"):
                current, stack = "", [top]
            todo += _parts(target)
        else:
            current = step
            stack.append(found)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)


def _parts(path: str) -> list[str]:
    """The steps of a path, the first one last."""
    return [part for part in reversed(path.split("/")) if part not in ("", ".")]


# --- processes -------------------------------------------------------------------------------------------


def owner_in(status: str, unknown: int) -> int:
    """The user on whose word a process acts, from its /proc/PID/status; `unknown` if that doesn't say.

    Of a setuid program's ids one is still the user's who chose its arguments.
    """
    for line in status.splitlines():
        if line.startswith("Uid:"):
            ids = [int(word) for word in line.split()[1:5] if word.isdecimal()]
            return next((one for one in ids if one != 0), 0) if ids else unknown
    return unknown


def setuid_program(pid: int) -> bool:
    """Whether a process runs a setuid or setgid program; whoever may not see it gets no."""
    try:
        return bool(os.stat(f"/proc/{pid}/exe").st_mode & (stat.S_ISUID | stat.S_ISGID))  # noqa: PTH116
    except OSError:
        return False


def root_directory(pid: str) -> tuple[int, int] | None:
    """Identity of a process's root directory; None where this user may not see it."""
    try:
        found = os.stat(f"/proc/{pid}/root")  # noqa: PTH116
    except OSError:
        return None
    return found.st_dev, found.st_ino


def in_system_service(cgroup: str) -> bool:
    """Whether /proc/PID/cgroup says that systemd started the process as a service of the system's.

    Such a one may have a mount namespace (PrivateTmp=) and a root directory (a snap) of its own.
    """
    groups = [line.split(":", 2)[2] for line in cgroup.splitlines() if line.count(":") >= 2]
    return any(map(_SERVICE.fullmatch, groups)) and not in_container(cgroup)


def in_container(cgroup: str) -> bool:
    """Whether /proc/PID/cgroup names a container."""
    return _CONTAINER.search(cgroup) is not None


# --- reading ---------------------------------------------------------------------------------------------


@contextmanager
def opened_as(uid: int, root: str, path: str, *, follow: bool = True) -> Iterator[tuple[int, str]]:
    """A descriptor (O_PATH) of what `path` is below `root`, and its path there without symlinks.

    The walk opens one directory at a time: no link leads out of `root`, those of /proc count by their text,
    and PermissionError is raised where the user `uid` may not enter. Membership in groups doesn't count: a
    directory that only a group may enter is refused.
    """
    stack = [os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)]
    try:
        names: list[str] = []
        todo = _parts(path)
        for _ in range(_MAX_STEPS):
            if not todo:
                yield stack[-1], "/".join((root.rstrip("/"), *names)) or "/"
                return
            part = todo.pop()
            if part == "..":
                if names:
                    os.close(stack.pop())
                    names.pop()
                continue
            if not _may(uid, os.fstat(stack[-1]), stat.S_IXOTH):
                raise PermissionError(errno.EACCES, f"user {uid} may not enter it", path)
            descriptor = os.open(part, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=stack[-1])
            if stat.S_ISLNK(os.fstat(descriptor).st_mode) and (todo or follow):
                try:
                    target = os.readlink("", dir_fd=descriptor)
                finally:
                    os.close(descriptor)
                if target.startswith("/"):
                    for one in stack[1:]:
                        os.close(one)
                    del stack[1:], names[:]
                todo += _parts(target)
            else:
                stack.append(descriptor)
                names.append(part)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
    finally:
        for one in stack:
            os.close(one)


@contextmanager
def readable_as(uid: int, root: str, path: str) -> Iterator[tuple[Path, int]]:
    """A path of ours to the regular file or directory that `path` is, if `uid` may read it, and its size.

    No more than that size is to be read: the files of /proc have none, and show more to root than to `uid`.
    """
    with opened_as(uid, root, path) as (descriptor, _):
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)  # opening a device can have effects
        if not _may(uid, found, stat.S_IROTH):
            raise PermissionError(errno.EACCES, f"user {uid} may not read it", path)
        yield Path(f"/proc/self/fd/{descriptor}"), found.st_size


@contextmanager
def socket_as(uid: int, path: str) -> Iterator[str]:
    """A path of ours to the socket at `path`, which `uid` must own."""
    with opened_as(uid, "/", path) as (descriptor, _):
        found = os.fstat(descriptor)
        if not stat.S_ISSOCK(found.st_mode) or found.st_uid != uid:
            raise PermissionError(errno.EACCES, f"it is no socket of user {uid}", path)
        yield f"/proc/self/fd/{descriptor}"


def _may(uid: int, found: os.stat_result, right: int) -> bool:
    """Whether `uid` has a right, given as the bit of others."""
    if uid == 0:
        return True
    return bool(found.st_mode & (right << 6 if found.st_uid == uid else right))
