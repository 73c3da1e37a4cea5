"""Trust: which programs gpunode runs, which processes are the node's own, and what it reads and writes for
other users.

One rule, docs/security.md. "We" are the user who runs gpunode.

- A program is run only if root and we alone can write it: its file, every directory above it and every link
  on the way. Nothing is executed through /proc/PID.
- A process is the node's own if all its user ids are root's or ours, its program isn't setuid, it has no PID
  namespace of its own, and it shares our user namespace, root directory and mount namespace, or is a system
  service of systemd. Any other process is untrusted, whatever its name: it is no engine and no kubelet of
  this node.
- A path that another user names is read as that user could read it; one that a process in a container names
  is resolved below its root directory. No link leads out of there, and only regular files are opened.
- A file is written through a symlink only if root or we made the link, into the directory that was checked:
  it is held open. In a directory of another user, or that others can write, nothing of a file is kept.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from gpunode.errors import PreconditionError
from gpunode.host.files import DanglingLink, Place, listable, named, path_steps

_MAX_STEPS = 400
_UNMAPPED = "is not mapped in this user namespace"
_SERVICE = re.compile(r"(?:/[^/]+\.slice)+/[^/]+\.service(?:/.*)?")
_CONTAINER = re.compile(r"[0-9a-f]{64}")
_OF_PROCESS = re.compile(r"/proc/([0-9]+)/")

Check = Callable[[os.stat_result, str, os.stat_result | None, bool], bool]


# --- running --------------------------------------------------------------------------------------------


def find_program(name: str, path: str) -> tuple[str, str]:
    """The file to execute for `name`, searched on `path` as a shell does, and why none may be executed.

    Both are empty if there is no such program.
    """
    if name in (sys.executable, os.path.realpath(sys.executable)):
        return name, ""  # it is running already
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
    """PATH without the directories in which another user can create a program (including sticky ones), and
    without missing ones, because our children search it too."""
    return ":".join(
        entry for entry in path.split(":") if entry.startswith("/") and not refusal(entry, directory=True)
    )


def refusal(path: str, *, directory: bool = False) -> str:
    """Why the program `path`, or anything in the directory `path`, must not be executed; empty if only root
    and this user can have written it."""
    try:
        with walk("/", path, _only_ours) as place:
            status = os.fstat(place.existing())
    except OSError as error:
        return str(error.strerror)
    if not directory and not stat.S_ISREG(status.st_mode):
        return "it is not a file"
    return f"{path} can be written by other users" if is_shared(status) else ""


def _only_ours(directory: os.stat_result, step: str, status: os.stat_result | None, last: bool) -> bool:
    """A `Check`: only root and this user can have made this step."""
    if step.startswith("/proc/"):
        raise PermissionError(errno.EACCES, "it was specified through another process")
    if status is not None and not _trusted(status):
        raise PermissionError(errno.EACCES, _foreign_owner(step, status.st_uid))
    if status is not None and _replaceable(directory, status):
        above = step.rpartition("/")[0] or "/"
        raise PermissionError(errno.EACCES, f"{above} can be written by other users")
    return True


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
    """Hint for a program that isn't run for this reason."""
    if _UNMAPPED in reason:
        return "run gpunode on the node itself, or map the owner into the container's user namespace"
    return "make root the only owner and writer of it and its directories: chown root:root, chmod go-w"


# --- writing --------------------------------------------------------------------------------------------


def held(root: str, path: str, *, follow: bool, live: bool, make: int = 0) -> AbstractContextManager[Place]:
    """The place to write to; see `walk`.

    `PreconditionError` for a path through another user's symlink. A link at the end is followed only with
    `follow`, and never in a shared directory.
    """

    def check(directory: os.stat_result, step: str, status: os.stat_result | None, last: bool) -> bool:
        if status is None or not stat.S_ISLNK(status.st_mode):
            return True
        if last and not make and (not follow or (live and is_shared(directory))):
            return False
        process = _OF_PROCESS.match(step)
        foreign = process is not None and process[1] != str(os.getpid())
        if live and (foreign or not _trusted(status) or _replaceable(directory, status)):
            raise PreconditionError(
                f"can't write {path}: {step} is a symlink that another user may have created",
                hint=f"see where the link points, then specify another file: ls -l {step}",
                code="planted-link",
            )
        return True

    return walk(root, path, check, make)


def is_shared(directory: os.stat_result) -> bool:
    """Whether other users may make, rename and remove files in a directory: it belongs to another user, or
    others can write it. The sticky bit protects existing files, but not new names."""
    return not _trusted(directory) or _others_may_write(directory)


def _replaceable(directory: os.stat_result, entry: os.stat_result) -> bool:
    """Whether another user can replace an entry that root or we own."""
    return not _trusted(directory) or (_others_may_write(directory) and not _kept_apart(directory, entry))


def _trusted(status: os.stat_result) -> bool:
    return status.st_uid in (0, os.geteuid()) or status.st_uid == _machine_root()


def _machine_root() -> int:
    """The uid of the machine's root here: in a user namespace without root, the overflow user's
    (user_namespaces(7)). /proc always belongs to root."""
    try:
        return os.lstat("/proc").st_uid
    except OSError:
        return 0


def _others_may_write(status: os.stat_result) -> bool:
    """Whether a group has its user's number, and so one member, as most distributions create them."""
    private = status.st_uid != 0 and status.st_uid == status.st_gid
    return bool(status.st_mode & stat.S_IWOTH) or (bool(status.st_mode & stat.S_IWGRP) and not private)


def _kept_apart(directory: os.stat_result, entry: os.stat_result) -> bool:
    """Whether an entry that root or we own can't be replaced there: the directory is sticky, like /tmp. A
    mount point doesn't count, because a user's FUSE file system can claim any owner."""
    return bool(directory.st_mode & stat.S_ISVTX) and directory.st_dev == entry.st_dev


@contextmanager
def walk(root: str, path: str, check: Check, make: int = 0) -> Iterator[Place]:
    """The end of `path` below `root`, reached by opening one directory at a time.

    `check` gets the directory, the path and the stat of each step (None: it doesn't exist), and whether it is
    the last one; it raises, or returns whether a symlink is followed. No link leads out of `root`; those of
    /proc count by their text. The end may be missing. With `make` every missing step becomes a directory: the
    end with this mode, those before with 0755, regardless of the umask. Nothing is made behind a link,
    because the file system that holds its target may not be mounted.
    """
    stack = [os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)]
    try:
        names: list[str] = []
        todo = path_steps(path)
        link, target, after = "", "", 0  # links that are being followed, and how many steps follow each
        for _ in range(_MAX_STEPS):
            if not todo:
                end = "/".join((root.rstrip("/"), *names)) or "/"
                above = stack[-3] if len(stack) > 2 else None
                directory = stack[-2] if names else stack[-1]
                yield Place(above, directory, names[-1] if names else ".", stack[-1], end)
                return
            part = todo.pop()
            link = link if len(todo) >= after else ""
            if part == "..":
                if names:
                    os.close(stack.pop())
                    names.pop()
                continue
            around, step = os.fstat(stack[-1]), "/".join((root.rstrip("/"), *names, part))
            mode = 0 if link or not make else 0o755 if todo else make
            descriptor, created = _made_step(stack[-1], part, bool(todo), mode)
            if descriptor is None:
                check(around, step, None, not todo)
                if link:
                    text = f"{link if after else 'it'} is a symlink to {target}, which does not exist"
                    raise DanglingLink(errno.ENOENT, text, link)
                if todo:
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
                yield Place(stack[-2] if len(stack) > 1 else None, stack[-1], part, None, step)
                return
            stack.append(descriptor)
            status = os.fstat(descriptor)
            if check(around, step, status, not todo) and stat.S_ISLNK(status.st_mode):
                text = os.readlink("", dir_fd=descriptor)
                link, target, after = (link, target, after) if link else (step, text, len(todo))
                keep = 1 if text.startswith("/") else len(names) + 1
                for opened in stack[keep:]:
                    os.close(opened)
                del stack[keep:], names[keep - 1 :]
                todo += path_steps(text)
                continue
            names.append(part)
            if created:
                _set_mode(descriptor, around, status, mode)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
    finally:
        for opened in stack:
            os.close(opened)


def _made_step(directory: int, name: str, inside: bool, mode: int) -> tuple[int | None, bool]:
    """`_open_step`; with a `mode` a missing entry becomes a directory. Also returns whether it was made
    here."""
    descriptor, created = _open_step(directory, name, inside), False
    if descriptor is None and mode:
        with suppress(FileExistsError):
            os.mkdir(name, mode, dir_fd=directory)
            created = True
        descriptor = _open_step(directory, name, inside)
    return descriptor, created


def _set_mode(descriptor: int, around: os.stat_result, status: os.stat_result, mode: int) -> None:
    """Give a directory that was just made this mode, regardless of the umask.

    Another user may have put another entry of ours there since; an empty directory reveals nothing.
    """
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
        with listable(descriptor) as directory:
            if not _replaceable(around, status) or not os.listdir(directory):  # noqa: PTH208
                os.fchmod(directory, mode)


def _open_step(directory: int, name: str, inside: bool) -> int | None:
    """A descriptor (O_PATH) of an entry, None if there is none; with `inside` an automount point is mounted,
    which requires O_DIRECTORY in open(2)."""
    flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        if inside:
            with suppress(NotADirectoryError):
                return os.open(name, flags | os.O_DIRECTORY, dir_fd=directory)
        return os.open(name, flags, dir_fd=directory)
    except FileNotFoundError:
        return None


# --- processes ------------------------------------------------------------------------------------------


def owner_in(status: str, unknown: int) -> int:
    """The user for whom a process acts, from its /proc/PID/status; `unknown` if that isn't readable.

    A setuid program's ids include that of the user who chose its arguments.
    """
    for line in status.splitlines():
        if line.startswith("Uid:"):
            ids = [int(word) for word in line.split()[1:5] if word.isdecimal()]
            return next((user_id for user_id in ids if user_id != 0), 0) if ids else unknown
    return unknown


def setuid_program(pid: int) -> bool:
    """Whether a process runs a setuid or setgid program; False without permission to see it."""
    try:
        return bool(os.stat(f"/proc/{pid}/exe").st_mode & (stat.S_ISUID | stat.S_ISGID))  # noqa: PTH116
    except OSError:
        return False


def root_directory(pid: str) -> tuple[int, int] | None:
    """Identity of a process's root directory; None if this user can't see it."""
    try:
        status = os.stat(f"/proc/{pid}/root")  # noqa: PTH116
    except OSError:
        return None
    return status.st_dev, status.st_ino


def in_system_service(cgroup: str) -> bool:
    """Whether /proc/PID/cgroup says that systemd started the process as a service of the system's.

    Such a service may have its own mount namespace (PrivateTmp=) and root directory (a snap).
    """
    groups = [line.split(":", 2)[2] for line in cgroup.splitlines() if line.count(":") >= 2]
    return any(map(_SERVICE.fullmatch, groups)) and not in_container(cgroup)


def in_container(cgroup: str) -> bool:
    """Whether /proc/PID/cgroup names a container."""
    return _CONTAINER.search(cgroup) is not None


# --- reading --------------------------------------------------------------------------------------------


@contextmanager
def opened_as(uid: int, root: str, path: str, *, follow: bool = True) -> Iterator[tuple[int, str]]:
    """A descriptor (O_PATH) of the object at `path` below `root`, and its path there without symlinks.

    See `walk`. PermissionError where the user `uid` may not enter. Membership in groups doesn't count: a
    directory that only a group may enter is refused.
    """

    def check(directory: os.stat_result, step: str, status: os.stat_result | None, last: bool) -> bool:
        if not _may(uid, directory, stat.S_IXOTH):
            raise PermissionError(errno.EACCES, f"user {uid} has no permission to enter it", path)
        return follow or not last

    with walk(root, path, check) as place:
        yield place.existing(), place.path


@contextmanager
def readable_as(uid: int, root: str, path: str) -> Iterator[tuple[Path, int]]:
    """A path of ours to the regular file or directory that `path` is, if `uid` may read it, and its size.

    Read no more than that size: the files of /proc have none, and show more to root than to `uid`.
    """
    with opened_as(uid, root, path) as (descriptor, _):
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)  # opening a device can have effects
        if not _may(uid, status, stat.S_IROTH):
            raise PermissionError(errno.EACCES, f"user {uid} has no permission to read it", path)
        yield Path(named(descriptor)), status.st_size


@contextmanager
def socket_as(uid: int, path: str) -> Iterator[str]:
    """A path of ours to the socket at `path`, which must belong to `uid`."""
    with opened_as(uid, "/", path) as (descriptor, _):
        status = os.fstat(descriptor)
        if not stat.S_ISSOCK(status.st_mode) or status.st_uid != uid:
            raise PermissionError(errno.EACCES, f"it is not a socket of user {uid}", path)
        yield named(descriptor)


def _may(uid: int, status: os.stat_result, right: int) -> bool:
    """Whether `uid` has a permission, given as the bit for others."""
    if uid == 0:
        return True
    return bool(status.st_mode & (right << 6 if status.st_uid == uid else right))
