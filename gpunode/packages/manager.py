"""The interface to a package manager: queries that change nothing, and commands to show before they run.

A `Manager` never runs what it plans. Its queries go through `Host.run`, its commands are returned as
`Command`; after showing them the caller runs them with `run_command`, which waits for another
process's lock with a message and a timeout. `packages.find.find_manager` returns the node's own.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import NamedTuple, Protocol

from gpunode.errors import GpunodeError
from gpunode.host import Host
from gpunode.host.process import Completed
from gpunode.output.result import ExitCode, Progress
from gpunode.output.typed import StrEnum


class PackagesError(GpunodeError):
    """The package manager failed, or can't report what was queried; the message has its own output."""

    default_code = "packages"


class Available(NamedTuple):
    """One available version. `version` is the manager's whole one: ``1.20.0-1``, ``3:595.91.07-1.el9``.

    `origins` are the addresses (apt) or ids (dnf, zypper) of the repositories that offer it; none if it is
    only installed.
    """

    version: str
    origins: tuple[str, ...] = ()


class PackageState(NamedTuple):
    """One package. `installed` and `candidate` are empty if there is none.

    `candidate` is what an install without a version would take, by all pins and priorities. `available` is
    newest first. `unfinished` is one that dpkg has unpacked, or started to unpack, but not configured.
    """

    name: str
    installed: str = ""
    candidate: str = ""
    available: tuple[Available, ...] = ()
    held: bool = False
    unfinished: bool = False

    def offered(self, version: str) -> Available | None:
        """The matching version: the whole one, or one without the packager's revision.

        ``1.20.0`` matches ``1.20.0-1``. Of several revisions the newest.
        """
        exact = [offer for offer in self.available if offer.version == version]
        return next(
            iter([*exact, *(offer for offer in self.available if matches(offer.version, version))]), None
        )

    def origins(self, version: str) -> tuple[str, ...]:
        """The repositories of that version; empty if none is known."""
        offer = self.offered(version)
        return offer.origins if offer else ()


def matches(version: str, desired: str) -> bool:
    """Whether ``1.20.0``, ``1.20.0-1`` or the whole version means ``3:1.20.0-1.el9``."""
    without_epoch = version.partition(":")[2] or version
    return desired in (version, without_epoch, without_epoch.partition("-")[0])


class PackageRequest(NamedTuple):
    """A package to install, at the manager's whole version.

    Where that isn't known: the newest of `limit`, which is a driver branch (580) or version (580.159.03), or
    the candidate without one.
    """

    name: str
    version: str = ""
    limit: str = ""

    def named(self, sign: str) -> str:
        """The argument for apt and dnf, with the manager's `sign` before a version or the limit's pattern."""
        pattern = f"{self.limit}-*" if "." in self.limit else f"{self.limit}.*"
        version = self.version or (pattern if self.limit else "")
        return f"{self.name}{sign}{version}" if version else self.name


class Command(NamedTuple):
    """One program as it is shown and run.

    `environ` is added to the current environment, `seconds` is the timeout without output: a kernel module's
    build prints nothing for minutes. `changes` is whether it changes packages: then it isn't interrupted. The
    failure of a `tolerated` command is ignored, because the next command would show it if it mattered.
    """

    argv: tuple[str, ...]
    environ: Mapping[str, str] = MappingProxyType({})
    seconds: float = 1800.0
    changes: bool = True
    tolerated: bool = False

    @property
    def name(self) -> str:
        """The program, and its verb where that comes next: ``apt-get install``, ``dnf``."""
        return " ".join(self.argv[: 1 if self.argv[1:2] and self.argv[1].startswith("-") else 2])

    @property
    def text(self) -> str:
        """The command as a user would type it."""
        return " ".join([*(f"{name}={value}" for name, value in self.environ.items()), shlex.join(self.argv)])


class FileChange(NamedTuple):
    """A file that must have `content`, or be removed if that is None. `reason` is for the user."""

    path: str
    content: bytes | None
    reason: str = ""


class PackageChange(NamedTuple):
    """A transaction's effect on one package: `before` is empty if it is new, `after` if it is removed."""

    name: str
    before: str = ""
    after: str = ""


class Lock(NamedTuple):
    """The holder of a lock: the locked file, the process, and its name as far as they are known (0, "")."""

    path: str
    pid: int = 0
    name: str = ""

    def __str__(self) -> str:
        holder_name = self.name or "another process"
        return f"{holder_name} (process {self.pid})" if self.pid else holder_name


class Trouble(StrEnum):
    """Why a command failed, as far as the manager's output shows."""

    LOCKED = "locked"
    SIGNATURE = "signature"  # a key that is missing, expired or refused
    CONFLICTING_SOURCES = "conflicting-sources"  # two entries for one repository that name different keys
    NETWORK = "network"
    CERTIFICATE = "certificate"  # of TLS; mostly a proxy's own
    CLOCK = "clock"  # a signature or certificate that isn't valid yet, or has expired
    NO_REPOSITORY = "no-repository"  # the server responds, but doesn't have it
    NOT_FOUND = "not-found"  # no such package or version
    HELD = "held"  # the version exists, but a lock or an exclusion hides it
    DEPENDENCIES = "dependencies"
    INTERRUPTED = "interrupted"  # an earlier transaction was interrupted; it must be finished first
    NO_SPACE = "no-space"
    READ_ONLY = "read-only"
    TIMED_OUT = "timed-out"
    OTHER = "other"


class Failure(NamedTuple):
    """The error in the manager's own words, one line, and the hint."""

    trouble: Trouble
    said: str
    hint: str = ""


class Manager(Protocol):
    """apt, dnf or zypper of one node. Queries raise `PackagesError` if the manager fails."""

    @property
    def name(self) -> str:
        """apt, dnf or zypper."""

    @property
    def lock_files(self) -> tuple[str, ...]:
        """The files that a running manager locks."""

    def look(self, names: Sequence[str]) -> Mapping[str, PackageState]:
        """The state of each of `names`; one that the manager doesn't know has no versions."""

    def installed(self, names: Sequence[str]) -> Mapping[str, PackageState]:
        """What is installed and held, without repositories: works even if those are broken."""

    def everything(self) -> frozenset[tuple[str, str]]:
        """Name and version of every installed package; the name with its architecture where apt needs it.

        `PackagesError` if the database can't be read.
        """

    def preview(self, command: Command) -> tuple[PackageChange, ...]:
        """The effect of an install or remove command; empty where the manager has no preview: dnf prints
        localized tables, zypper localized text."""
        return ()

    def refresh(self, only: str = "") -> Command:
        """Refresh the repositories' indexes, or only one: `only` is its file for apt, its id for others."""

    def install(self, packages: Sequence[PackageRequest], *, downgrade: bool = False) -> Command:
        """Install all in one transaction. `downgrade` allows older versions than the installed ones."""

    def install_files(self, paths: Sequence[str], *, downgrade: bool = False) -> Command:
        """Install packages from files, absolute paths, in one transaction."""

    def remove(self, names: Sequence[str]) -> Command:
        """Remove installed packages, but not those that others may need."""

    def hold(self, names: Sequence[str]) -> Command:
        """Keep the packages at their version until `release`."""

    def require_holding(self) -> None:
        """`PackagesError` where `hold` would fail because a plugin is missing; apt and zypper need none."""
        return

    def release(self, names: Sequence[str]) -> Command:
        """Release the hold."""

    def finish(self) -> Command | None:
        """The command that finishes a killed transaction; None if there is none to finish. rpm configures
        packages as it unpacks them, and the next transaction installs the missing ones."""
        return None

    def explain(self, done: Completed) -> Failure | None:
        """Why a command of this manager failed; None if it succeeded."""


# The holder of a package manager's lock, from the kernel's list of locks (proc_locks(5)).

_LINE = re.compile(r"^\d+: (?:POSIX|FLOCK|OFDLCK)\s+\S+\s+WRITE (-?\d+) ([0-9a-f]+):([0-9a-f]+):(\d+) ")
_AT_WORK = (
    *("apt", "apt-get", "aptitude", "dpkg", "unattended-upgr", "packagekitd", "synaptic", "apt.systemd.dai"),
    *("dnf", "dnf5", "dnf-automatic", "yum", "rpm", "zypper", "YaST", "y2base"),
)


def holder(host: Host, paths: Sequence[str]) -> Lock | None:
    """The first of these files that another process has locked; None if none is, or if that is unknown.

    A lock that an overlay or a container hides isn't found; the manager itself reports it when it starts.
    """
    lines = host.text_or_empty("/proc/locks").splitlines()
    listed = [match for line in lines if (match := _LINE.match(line))]
    for path in paths:
        status = host.stat(path) if listed else None
        for match in listed if status else ():
            assert status is not None
            if int(match[4]) != status.st_ino or int(match[1]) == os.getpid():
                continue
            pid = max(0, int(match[1]))
            name = host.text_or_empty(f"/proc/{pid}/comm").strip() if pid else ""
            same_device = (int(match[2], 16), int(match[3], 16)) == (
                os.major(status.st_dev),
                os.minor(status.st_dev),
            )
            if same_device or name in _AT_WORK:  # a file of btrfs or an overlay has two device numbers
                return Lock(path, pid, name)
    return None


# Run a package manager's command: never while another process runs one, and always to its end.

WAIT_SECONDS = 600.0
LOCKED = "package-manager-locked"
_POLL_SECONDS = 0.2
_RETRY_SECONDS = 1.0
_TELL_SECONDS = 15.0


def run_command(
    host: Host,
    manager: Manager,
    command: Command,
    progress: Progress,
    *,
    wait_seconds: float = WAIT_SECONDS,
    whole: Callable[[Command], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> None:
    """Run it to its end. It waits for another process's lock, with a message on stderr.

    The timeout is `wait_seconds`. `whole` keeps a command that changes packages from being interrupted.
    `PackagesError` if it fails; its code is the `Trouble`, and `package-manager-locked` has the exit code of
    a precondition.
    """
    deadline = host.monotonic() + wait_seconds
    wait_for_others(host, manager, progress, wait_seconds)
    waiting = _Waiting(host, progress, deadline)
    with progress.following(command.text, command.name) as alive:
        while True:
            with whole(command) if command.changes else nullcontext():
                done = host.run(command.argv, timeout=command.seconds, env=command.environ, watch=alive)
            failure = manager.explain(done)
            if failure is None:
                return
            if failure.trouble is not Trouble.LOCKED:
                raise failed(command.name, failure)
            # a lock that wasn't found, or that another process took first
            if waiting.over:
                raise _too_long(None, failure.said)
            waiting.tell(f"waiting: {failure.said}")
            host.sleep(_RETRY_SECONDS)
            wait_for_others(host, manager, progress, deadline - host.monotonic())


class _Waiting:
    """Prints what the command waits for, at once and then four times a minute: it isn't stuck."""

    def __init__(self, host: Host, progress: Progress, deadline: float) -> None:
        self.host, self.progress, self.deadline = host, progress, deadline
        self.next = 0.0

    @property
    def over(self) -> bool:
        return self.host.monotonic() >= self.deadline

    def tell(self, what: str) -> None:
        now = self.host.monotonic()
        if now >= self.next:
            self.next = now + _TELL_SECONDS
            self.progress.info(f"{what} ({max(0, round(self.deadline - now))} s at most)")


def failed(command: str, failure: Failure) -> PackagesError:
    """The error for a command's failure."""
    return PackagesError(
        f"{command}: {failure.said}",
        hint=failure.hint or "run it manually to see its complete output",
        code=str(failure.trouble),
    )


def wait_for_others(host: Host, manager: Manager, progress: Progress, seconds: float) -> None:
    """Wait until no other process holds the manager's lock. `PackagesError` after the timeout."""
    waiting = _Waiting(host, progress, host.monotonic() + seconds)
    while (lock := holder(host, manager.lock_files)) is not None:
        if waiting.over:
            raise _too_long(lock, "")
        waiting.tell(f"waiting for {lock}, which holds {lock.path}")
        host.sleep(_POLL_SECONDS)


def _too_long(lock: Lock | None, message: str) -> PackagesError:
    return PackagesError(
        f"{lock} holds {lock.path} and doesn't release it" if lock else message,
        hint="wait for it to end, then run this again; --lock-timeout DURATION waits longer",
        code=LOCKED,
        exit_code=ExitCode.PRECONDITION,
    )


# Why a package manager failed, from its output: the first pattern that matches.

Pattern = tuple[Trouble, str]
# errors of the kernel, the clock and TLS read alike in all managers, and explain the others
_COMMON: tuple[Pattern, ...] = (
    (Trouble.READ_ONLY, r"Read-only file system"),
    (Trouble.NO_SPACE, r"No space left on device|Disk quota exceeded"),
    (Trouble.CLOCK, r"^E: Release file .* is (not valid yet|expired)"),
    (Trouble.CLOCK, r"[Cc]ertificate.*(expired|not( yet)? (valid|activated)|not yet valid)"),
    (
        Trouble.CERTIFICATE,
        r"Certificate verification failed|certificate is NOT trusted|SSL certificate problem",
    ),
)
HINTS = {
    Trouble.SIGNATURE: "the repository's key is missing, expired or another; give the right one: --key FILE",
    Trouble.CONFLICTING_SOURCES: "two files name this repository with different keys: gpunode toolkit status",
    Trouble.NETWORK: "the repository can't be reached: see its name, the network and the proxy (sudo drops "
    "http_proxy: sudo -E), or use --repository URL or --from DIR",
    Trouble.CERTIFICATE: "this node doesn't trust its certificate: add the CA of the proxy or the mirror "
    "(update-ca-certificates, update-ca-trust)",
    Trouble.CLOCK: "this node's clock is wrong (timedatectl), or the mirror isn't kept up any more",
    Trouble.NO_REPOSITORY: "there is nothing at that address: --repository takes the one that contains "
    "stable/deb or stable/rpm",
    Trouble.NOT_FOUND: "see what there is: gpunode toolkit status",
    Trouble.HELD: "a version lock or an exclusion blocks it: gpunode toolkit status",
    Trouble.INTERRUPTED: "finish the earlier transaction first: dpkg --configure -a",
    Trouble.NO_SPACE: "free disk space, then run this again: df -h, df -i",
    Trouble.READ_ONLY: "a file system is read-only, and dmesg may say why: findmnt -O ro",
    Trouble.TIMED_OUT: "see in what state it left the packages before going on",
}
_SHOWN = 300


def failure(done: Completed, patterns: Sequence[Pattern], *, noise: str = r"(?!)") -> Failure:
    """The first line that matches a pattern, else the last one that isn't `noise`."""
    text = f"{done.stdout}\n{done.stderr}"
    lines = [line.strip() for line in text.splitlines() if line.strip() and not re.search(noise, line)]
    if done.timed_out:
        return _failure(Trouble.TIMED_OUT, "it printed nothing for too long and was killed")
    for trouble, pattern in (*_COMMON, *patterns):
        for line in lines:
            if re.search(pattern, line):
                return _failure(trouble, line)
    return _failure(Trouble.OTHER, lines[-1] if lines else f"exit code {done.code}")


def _failure(trouble: Trouble, text: str) -> Failure:
    printable = "".join(char if char.isprintable() else " " for char in text)
    return Failure(trouble, printable[:_SHOWN], HINTS.get(trouble, ""))
