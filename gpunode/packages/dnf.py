"""dnf 4, dnf 5 and yum: RHEL, Fedora, Amazon Linux and their derivatives."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cmp_to_key
from typing import ClassVar

from gpunode.facts.packages import locked
from gpunode.host import Host
from gpunode.host.process import Completed
from gpunode.output.result import ExitCode
from gpunode.packages.manager import (
    Available,
    Command,
    Failure,
    Manager,
    PackageRequest,
    PackagesError,
    PackageState,
    Trouble,
    failed,
    failure,
)

# The common part of dnf and zypper: rpm's database, and its order of versions (rpm-version(7)).

RPM_LOCKS = ("/var/lib/rpm/.rpm.lock", "/usr/lib/sysimage/rpm/.rpm.lock")
_RPM_ASK_SECONDS = 30.0
_PART = re.compile(r"[0-9]+|[a-zA-Z]+|[~^]")


@dataclass(frozen=True)
class Rpm(Manager):
    """What dnf and zypper leave to rpm. `family` is the distribution's."""

    host: Host
    family: ClassVar[str]

    def installed(self, names: Sequence[str]) -> Mapping[str, PackageState]:
        """From rpm, which has no repositories."""
        return self.states(names, {})

    def states(
        self, names: Sequence[str], offers: Mapping[str, Sequence[tuple[str, str]]]
    ) -> Mapping[str, PackageState]:
        """The packages as rpm knows them, with the versions that are available and their repositories."""
        versions: dict[str, str] = {}
        for name, version in _queried(self.host, "-q", *names):
            if name not in versions or compare(version, versions[name]) > 0:
                versions[name] = version
        return {name: self._state(name, versions.get(name, ""), offers.get(name, ())) for name in names}

    def _state(self, name: str, version: str, offers: Sequence[tuple[str, str]]) -> PackageState:
        offered = newest_first(offers)
        candidate = offered[0].version if offered else version
        missing = version and all(offer.version != version for offer in offered)
        available = newest_first([*offers, (version, "")]) if missing else offered
        return PackageState(name, version, candidate, available, locked(self.host, self.family, name))

    def everything(self) -> frozenset[tuple[str, str]]:
        """Of some packages, such as kernels, there are several versions. A gpg-pubkey is a key."""
        return frozenset(row for row in _queried(self.host, "-qa") if row[0] != "gpg-pubkey")


def _queried(host: Host, *arguments: str) -> Iterator[tuple[str, str]]:
    answer = host.run(
        ["rpm", arguments[0], "--qf", r"%{NAME}\t%{EVR}\n", *arguments[1:]], timeout=_RPM_ASK_SECONDS
    )
    if not answer.ok and "-qa" in arguments:
        raise PackagesError(f"rpm doesn't list the packages: {answer.stderr.strip()[-200:]}")
    for line in answer.stdout.splitlines():  # missing packages are reported in a line without a tab
        name, tab, version = line.partition("\t")
        if tab:
            yield name, version


def newest_first(offers: Iterable[tuple[str, str]]) -> tuple[Available, ...]:
    """Versions with their repositories, from (version, repository) pairs."""
    origins: dict[str, list[str]] = {}
    for version, repository in offers:
        known = origins.setdefault(version, [])
        if repository and repository not in known:
            known.append(repository)
    ordered = sorted(origins, key=cmp_to_key(compare), reverse=True)
    return tuple(Available(version, tuple(origins[version])) for version in ordered)


def compare(first: str, second: str) -> int:
    """-1, 0 or 1 as rpm orders ``epoch:version-release``; no epoch is epoch 0."""
    return next(
        (
            order
            for left, right in zip(_split(first), _split(second), strict=True)
            if (order := _part(left, right))
        ),
        0,
    )


def _split(version: str) -> tuple[str, str, str]:
    epoch, colon, rest = version.partition(":")
    number, _, release = (rest if colon else version).partition("-")
    return (epoch if colon else "0"), number, release


def _part(first: str, second: str) -> int:
    left_parts, right_parts = _PART.findall(first), _PART.findall(second)
    for left, right in zip(left_parts, right_parts, strict=False):
        if (order := _word(left, right)) != 0:
            return order
    if len(left_parts) == len(right_parts):
        return 0
    longer, sign = (left_parts, 1) if len(left_parts) > len(right_parts) else (right_parts, -1)
    return -sign if longer[min(len(left_parts), len(right_parts))] == "~" else sign


def _word(left: str, right: str) -> int:
    """A tilde is older than anything, a caret older than any word; numbers are newer than letters."""
    for mark in "~^":
        if mark in (left, right) and left != right:
            return -1 if left == mark else 1
    if left.isdigit() and right.isdigit():
        return (int(left) > int(right)) - (int(left) < int(right))
    if left.isdigit() != right.isdigit():
        return 1 if left.isdigit() else -1
    return (left > right) - (left < right)


_ASK_SECONDS = 120.0  # it may read the repositories' metadata first
_QUERY = r"%{name} %{evr} %{repoid}\n"  # dnf 5 expands \n and takes \t literally
_LOCKED_CODE = 200  # dnf(8): a problem with acquiring or releasing of locks
_PATTERNS = (
    (Trouble.LOCKED, r"already locked by|Failed to obtain.* lock|can't create transaction lock"),
    (Trouble.LOCKED, r"Waiting for process with pid"),
    (Trouble.SIGNATURE, r"GPG check FAILED|repomd.xml.asc|Bad GPG signature|repomd.*signature|OpenPGP check"),
    (Trouble.SIGNATURE, r"is not signed|Public key for .* is not installed|key import failed|key expired"),
    (Trouble.NO_SPACE, r"At least .* more space needed|needs \S+ more space on"),
    (Trouble.HELD, r"excluded by versionlock|filtered out by exclude filtering"),
    (Trouble.NOT_FOUND, r"No match for argument|Unable to find a match|No package .* available"),
    (Trouble.DEPENDENCIES, r"conflicting requests|nothing provides|package .* conflicts with|^Problem"),
    (Trouble.NOT_FOUND, r"\.rpm.*Status code: 404|Status code: 404 .*\.rpm"),
    (Trouble.NO_REPOSITORY, r"Status code: 404|returned error: 404"),
    (Trouble.NETWORK, r"Could ?n[o']t resolve|Cannot download|Failed to download|Status code: [45]"),
    (Trouble.NETWORK, r"Curl error|All mirrors were (already )?tried|Librepo error"),
    (Trouble.OTHER, r"^Error"),
)


@dataclass(frozen=True)
class Dnf(Rpm):
    """dnf(8) of one node; `program` is dnf5, dnf or yum."""

    family = "rhel"
    program: str = "dnf"
    name: str = "dnf"

    @property
    def lock_files(self) -> tuple[str, ...]:
        """The files of rpm and of dnf's metadata.

        Where dnf records its process itself, it also waits itself and prints its own message.
        """
        return (*RPM_LOCKS, "/var/cache/dnf/metadata_lock.pid")

    def look(self, names: Sequence[str]) -> Mapping[str, PackageState]:
        """From rpm and ``repoquery``, which respects pins and modules."""
        argv = [self.program, "-q", "repoquery", "--available", "--qf", _QUERY, *names]
        answer = self.host.run(argv, timeout=_ASK_SECONDS)
        if not answer.ok:
            raise failed(f"{self.program} repoquery", failure(answer, _PATTERNS))
        offers: dict[str, list[tuple[str, str]]] = {}
        for line in answer.stdout.splitlines():
            words = line.split()
            if len(words) == 3:
                offers.setdefault(words[0], []).append((words[1].removeprefix("0:"), words[2]))
        return self.states(names, offers)

    def refresh(self, only: str = "") -> Command:
        """`only` is a repository's id. ``-y`` accepts the key that its file names.

        Fedora skips a repository that it can't read or that has a wrong signature; for this one that is an
        error.
        """
        must = f"--setopt={only}.skip_if_unavailable=False"
        alone = ("--disablerepo=*", f"--enablerepo={only}", must) if only else ()
        argv = (self.program, "-y", *self._impatient, "makecache", "--refresh", *alone)
        return Command(argv, seconds=300.0, changes=False)

    def install(self, packages: Sequence[PackageRequest], *, downgrade: bool = False) -> Command:
        """dnf installs the version that is named, even an older one, without an option."""
        return self._change("install", *(package.named("-") for package in packages))

    def install_files(self, paths: Sequence[str], *, downgrade: bool = False) -> Command:
        """Without repositories, since files are meant for machines without a network.

        An older file needs the verb ``downgrade``. dnf 5 fails on ``--disablerepo=*`` where no repository is
        configured.
        """
        alone = "--setopt=reposdir=/dev/null" if self.program == "dnf5" else "--disablerepo=*"
        return self._change("downgrade" if downgrade else "install", alone, *paths)

    def remove(self, names: Sequence[str]) -> Command:
        return self._change("remove", "--noautoremove", *names)

    def _change(self, verb: str, *rest: str) -> Command:
        return Command((self.program, "-y", *self._impatient, verb, *rest))

    @property
    def _impatient(self) -> tuple[str, ...]:
        """Without this option dnf 4 waits for another process's lock forever, with no output."""
        return () if self.program == "dnf5" else ("--setopt=exit_on_lock=True",)

    def hold(self, names: Sequence[str]) -> Command:
        """Needs the versionlock plugin, which dnf 5 has built in."""
        return Command((self.program, "-y", "versionlock", "add", *names), seconds=_ASK_SECONDS)

    def require_holding(self) -> None:
        """dnf 4 has versionlock as a plugin, which no distribution installs by default."""
        if self.program == "dnf5" or not self.host.live:
            return
        if not self.host.run((self.program, "-q", "versionlock", "list"), timeout=_ASK_SECONDS).ok:
            raise PackagesError(
                f"{self.program} can't hold packages: its versionlock plugin isn't installed",
                hint=f"{self.program} install 'dnf-command(versionlock)', or leave out --hold",
                code="no-versionlock",
                exit_code=ExitCode.PRECONDITION,
            )

    def release(self, names: Sequence[str]) -> Command:
        return Command((self.program, "-y", "versionlock", "delete", *names), seconds=_ASK_SECONDS)

    def explain(self, done: Completed) -> Failure | None:
        if done.ok:
            return None
        why = failure(done, _PATTERNS)
        return Failure(Trouble.LOCKED, why.said) if done.code == _LOCKED_CODE else why
