"""What a package manager is to us: questions that change nothing, and commands to be shown before they run.

A `Manager` never runs what it plans. Its questions go through `Host.run`, its commands come back as
`Command`; whoever has shown them runs them with `packages.run.run_command`, which waits for another process's
lock visibly and with a limit. `packages.find.find_manager` gives the node's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Protocol

from gpunode.dataclass import dataclass, field
from gpunode.errors import GpunodeError
from gpunode.host import Completed


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
