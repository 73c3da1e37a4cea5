"""What a package manager is to us: questions that change nothing, and commands to be shown before they run.

A `Manager` never runs what it plans. Its questions go through `Host.run`, its commands come back as
`Command`; whoever has shown them runs them with `packages.run.run_command`, which waits for another process's
lock visibly and with a limit. `packages.find.find_manager` gives the node's own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from gpunode.errors import GpunodeError
from gpunode.host import Host
from gpunode.host.process import Completed
from gpunode.output.result import ExitCode, Progress


class PackagesError(GpunodeError):
    """The package manager can't answer, or didn't do what it was asked; its own words are in the message."""

    default_code = "packages"


@dataclass(frozen=True)
class Available:
    """One version that can be had. `version` is the manager's whole one: ``1.20.0-1``, ``3:595.91.07-1.el9``.

    `origins` are the addresses (apt) or ids (dnf, zypper) of the repositories that offer it; none if it is
    merely installed.
    """

    version: str
    origins: tuple[str, ...] = ()


@dataclass(frozen=True)
class PackageState:
    """One package. `installed` and `candidate` are empty where there is none; `candidate` is what an install
    without a version would take, whichever pins and priorities there are. `available` is newest first.

    `unfinished` is one that dpkg has unpacked or begun to, and not configured.
    """

    name: str
    installed: str = ""
    candidate: str = ""
    available: tuple[Available, ...] = ()
    held: bool = False
    unfinished: bool = False

    def offered(self, version: str) -> Available | None:
        """That version: the whole one, or one without the packager's revision (``1.20.0`` for ``1.20.0-1``).

        Of several revisions the newest.
        """
        exact = [one for one in self.available if one.version == version]
        return next(iter([*exact, *(one for one in self.available if matches(one.version, version))]), None)

    def origins(self, version: str) -> tuple[str, ...]:
        """Where that version comes from; empty if from nowhere that is known."""
        found = self.offered(version)
        return found.origins if found else ()


def matches(version: str, wanted: str) -> bool:
    """Whether ``3:1.20.0-1.el9`` is what somebody who says ``1.20.0``, ``1.20.0-1`` or all of it means."""
    without_epoch = version.partition(":")[2] or version
    return wanted in (version, without_epoch, without_epoch.partition("-")[0])


@dataclass(frozen=True)
class Wanted:
    """A package to install, at the manager's whole version. Where no version is known: the newest of the
    driver `branch`, or the candidate if that is 0."""

    name: str
    version: str = ""
    branch: int = 0


@dataclass(frozen=True)
class Command:
    """One program as it is shown and run. `environ` is beside ours, `seconds` is how long it may be silent: a
    kernel module's build says nothing for minutes.

    `changes` tells whether it changes packages: then it isn't interrupted half-way. `tolerated` is one whose
    failure the next command would show, if it mattered.
    """

    argv: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 1800.0
    changes: bool = True
    tolerated: bool = False

    @property
    def name(self) -> str:
        """The program, and its verb where that comes next: ``apt-get install``, ``dnf``."""
        return " ".join(self.argv[: 1 if self.argv[1:2] and self.argv[1].startswith("-") else 2])

    @property
    def text(self) -> str:
        """As a person would type it."""
        import shlex

        return " ".join([*(f"{name}={value}" for name, value in self.environ.items()), shlex.join(self.argv)])


@dataclass(frozen=True)
class FileChange:
    """A file that is to hold `content`, or to go if that is None. The reason is for people."""

    path: str
    content: bytes | None
    reason: str = ""


@dataclass(frozen=True)
class PackageChange:
    """What a transaction does to one package: empty `before` if it is new, empty `after` if it goes."""

    name: str
    before: str = ""
    after: str = ""


@dataclass(frozen=True)
class Plan:
    """Files first, then the commands in order. `undo` puts the packages back, where the manager can.

    `changes` is what the commands amount to, as far as it can be told before they run.
    """

    files: tuple[FileChange, ...] = ()
    commands: tuple[Command, ...] = ()
    changes: tuple[PackageChange, ...] = ()
    undo: tuple[Command, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether everything is as it should be already."""
        return not self.files and not self.commands


@dataclass(frozen=True)
class Lock:
    """Who is at work: the file that is locked, the process, and its name as far as they are known (0, "")."""

    path: str
    pid: int = 0
    name: str = ""

    def __str__(self) -> str:
        who = self.name or "another process"
        return f"{who} (process {self.pid})" if self.pid else who


class Trouble(StrEnum):
    """Why a command failed, as far as it can be told from what the manager prints."""

    LOCKED = "locked"
    SIGNATURE = "signature"  # a key that is missing, expired or refused
    CONFLICTING_SOURCES = "conflicting-sources"  # two entries for one repository that name different keys
    NETWORK = "network"
    CERTIFICATE = "certificate"  # of TLS; a proxy's own, mostly
    CLOCK = "clock"  # what is signed or certified isn't valid yet, or no more
    NO_REPOSITORY = "no-repository"  # the server answers, and has none there
    NOT_FOUND = "not-found"  # no such package or version
    HELD = "held"  # there is such a version, and a lock or an exclusion hides it
    DEPENDENCIES = "dependencies"
    INTERRUPTED = "interrupted"  # an earlier transaction was; it must be finished first
    NO_SPACE = "no-space"
    READ_ONLY = "read-only"
    TIMED_OUT = "timed-out"
    OTHER = "other"


@dataclass(frozen=True)
class Failure:
    """What went wrong in the manager's own words, one line, and what to do about it."""

    trouble: Trouble
    said: str
    hint: str = ""


class Manager(Protocol):
    """apt, dnf or zypper of one node. Questions raise `PackagesError` where the manager can't answer."""

    @property
    def name(self) -> str:
        """apt, dnf or zypper."""

    @property
    def lock_files(self) -> tuple[str, ...]:
        """What a process at work holds locked."""

    def look(self, names: Sequence[str]) -> Mapping[str, PackageState]:
        """Each of `names`; one that the manager doesn't know has a state without versions."""

    def installed(self, names: Sequence[str]) -> Mapping[str, PackageState]:
        """What is installed and held, without a word about repositories: also where those are in disorder."""

    def preview(self, command: Command) -> tuple[PackageChange, ...]:
        """What an install or remove command would do; empty where the manager can't tell without doing it."""

    def refresh(self, only: str = "") -> Command:
        """Read the repositories' indexes anew, or that of one alone: its file for apt, its id for others."""

    def install(self, packages: Sequence[Wanted], *, downgrade: bool = False) -> Command:
        """All in one transaction. `downgrade` allows older versions than the installed ones."""

    def install_files(self, paths: Sequence[str], *, downgrade: bool = False) -> Command:
        """Packages out of files, absolute paths, in one transaction."""

    def remove(self, names: Sequence[str]) -> Command:
        """Installed packages, with nothing else that could be of use to others."""

    def hold(self, names: Sequence[str]) -> Command:
        """Keep them at their version until `release`."""

    def require_holding(self) -> None:
        """`PackagesError` where `hold` would fail for want of a plugin."""

    def release(self, names: Sequence[str]) -> Command:
        """Take the hold off."""

    def finish(self) -> Command | None:
        """What ends a transaction that was killed half-way; None where there is nothing to end."""

    def explain(self, done: Completed) -> Failure | None:
        """Why a command of this manager failed; None if it did what it was asked."""


# Who holds a package manager's lock, from the kernel's list of locks (proc_locks(5)).

_LINE = re.compile(r"^\d+: (?:POSIX|FLOCK|OFDLCK)\s+\S+\s+WRITE (-?\d+) ([0-9a-f]+):([0-9a-f]+):(\d+) ")
_AT_WORK = (
    *("apt", "apt-get", "aptitude", "dpkg", "unattended-upgr", "packagekitd", "synaptic", "apt.systemd.dai"),
    *("dnf", "dnf5", "dnf-automatic", "yum", "rpm", "zypper", "YaST", "y2base"),
)


def holder(host: Host, paths: Sequence[str]) -> Lock | None:
    """The first of these files that another process holds locked; None if none is, or it can't be told.

    A lock that an overlay or a container hides isn't seen; the manager itself says so when it is started.
    """
    listed = [match for line in _locks(host).splitlines() if (match := _LINE.match(line))]
    for path in paths:
        found = host.stat(path) if listed else None
        for match in listed if found else ():
            assert found is not None
            if int(match[4]) != found.st_ino or int(match[1]) == os.getpid():
                continue
            pid = max(0, int(match[1]))
            name = _name(host, pid)
            same_device = (int(match[2], 16), int(match[3], 16)) == (
                os.major(found.st_dev),
                os.minor(found.st_dev),
            )
            if same_device or name in _AT_WORK:  # a file of btrfs or an overlay has two device numbers
                return Lock(path, pid, name)
    return None


def _locks(host: Host) -> str:
    try:
        return host.read_text("/proc/locks") or ""
    except GpunodeError:
        return ""


def _name(host: Host, pid: int) -> str:
    try:
        return (host.read_text(f"/proc/{pid}/comm") or "").strip() if pid else ""
    except GpunodeError:
        return ""


# Running a package manager's command: never while another process is at work, and never half of it.

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
) -> Completed:
    """Run it to its end. Another process's lock is waited for, said on stderr, `wait_seconds` at most.

    `whole` keeps a command that changes packages from being interrupted. `PackagesError` if it fails; its
    code is the `Trouble`, and `package-manager-locked` has the exit code of a precondition.
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
                return done
            if failure.trouble is not Trouble.LOCKED:
                raise failed(command, failure)
            # a lock that wasn't seen, or that somebody else was quicker to take
            if waiting.over:
                raise _too_long(None, failure.said)
            waiting.tell(f"waiting: {failure.said}")
            host.sleep(_RETRY_SECONDS)
            wait_for_others(host, manager, progress, deadline - host.monotonic())


class _Waiting:
    """Says what is waited for at once and then four times a minute; nobody shall think that it hangs."""

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
            self.progress.note(f"{what} ({max(0, round(self.deadline - now))} s at most)")


def failed(command: Command, failure: Failure) -> PackagesError:
    """The error that a command's failure is."""
    return PackagesError(
        f"{command.name}: {failure.said}",
        hint=failure.hint or "run it manually to see its complete output",
        code=str(failure.trouble),
    )


def wait_for_others(host: Host, manager: Manager, progress: Progress, seconds: float) -> None:
    """Until no other process holds the manager's lock, as far as is seen. `PackagesError` if one stays."""
    waiting = _Waiting(host, progress, host.monotonic() + seconds)
    while (lock := holder(host, manager.lock_files)) is not None:
        if waiting.over:
            raise _too_long(lock, "")
        waiting.tell(f"waiting for {lock}, which holds {lock.path}")
        host.sleep(_POLL_SECONDS)


def _too_long(lock: Lock | None, said: str) -> PackagesError:
    return PackagesError(
        f"{lock} holds {lock.path} and doesn't release it" if lock else said,
        hint="wait for it to end, then run this again; --lock-timeout SECONDS waits longer",
        code=LOCKED,
        exit_code=ExitCode.PRECONDITION,
    )


# Why a package manager failed, from what it prints: the first pattern that is found.

Pattern = tuple[Trouble, str]
# what the kernel, the clock and TLS refuse reads alike in all of them, and is why whatever else is said
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
    """The first line that a pattern fits, else the last one that says anything but `noise`."""
    text = f"{done.stdout}\n{done.stderr}"
    lines = [line.strip() for line in text.splitlines() if line.strip() and not re.search(noise, line)]
    if done.timed_out:
        return _made(Trouble.TIMED_OUT, "it printed nothing for too long and was killed")
    for trouble, pattern in (*_COMMON, *patterns):
        for line in lines:
            if re.search(pattern, line):
                return _made(trouble, line)
    return _made(Trouble.OTHER, lines[-1] if lines else f"exit code {done.code}")


def _made(trouble: Trouble, said: str) -> Failure:
    printable = "".join(char if char.isprintable() else " " for char in said)
    return Failure(trouble, printable[:_SHOWN], HINTS.get(trouble, ""))
