"""zypper: SUSE Linux Enterprise and openSUSE. Its exit codes are more precise than its output (zypper(8))."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpunode.host.process import Completed
from gpunode.packages.dnf import RPM_LOCKS, Rpm
from gpunode.packages.manager import (
    HINTS,
    Command,
    Failure,
    PackageRequest,
    PackageState,
    Trouble,
    failed,
    failure,
)

_ASK_SECONDS = 120.0
_QUIET = ("zypper", "--non-interactive")
_NOTHING_FOUND = 104
_DONE = (0, 100, 101, 102, 103)  # 102: a reboot is suggested, 103: zypper itself was updated
_ZYPP_CODE = 4  # an error of the library: mostly of the solver, but also a failed download
_CODES = {
    _ZYPP_CODE: Trouble.DEPENDENCIES,
    7: Trouble.LOCKED,
    _NOTHING_FOUND: Trouble.NOT_FOUND,
}
_PATTERNS = (
    (Trouble.LOCKED, r"System management is locked"),
    (Trouble.SIGNATURE, r"[Ss]ignature verification failed|is not signed|Unknown GPG key|key expired"),
    (Trouble.NO_SPACE, r"Not enough (free )?space"),
    (Trouble.NOT_FOUND, r"not found in package names|No provider of|No matching items"),
    (Trouble.DEPENDENCIES, r"^Problem: |nothing provides"),
    (Trouble.NO_REPOSITORY, r"File '.*/repomd\.xml' not found on medium"),
    (Trouble.NETWORK, r"Could not resolve|Download \(curl\) error|Timeout exceeded|Valid metadata not found"),
    (Trouble.NETWORK, r"Repository .* is invalid|File .* not found on medium"),
    (Trouble.OTHER, r"^Problem reading|^Failed to |RPM failed|^Error:| failed:$"),  # its reason comes first
)
_SOLVABLE = re.compile(r"<solvable ([^>]*)/?>")
_ATTRIBUTE = re.compile(r'([a-z]+)="([^"]*)"')


@dataclass(frozen=True)
class Zypper(Rpm):
    """zypper(8) of one node."""

    family = "suse"
    name: str = "zypper"

    @property
    def lock_files(self) -> tuple[str, ...]:
        """zypp records its process in /run/zypp.pid and locks rpm's file while it writes."""
        return ("/run/zypp.pid", *RPM_LOCKS)

    def look(self, names: Sequence[str]) -> Mapping[str, PackageState]:
        argv = [*_QUIET, "--no-refresh", "--xmlout", "search", "--details", "--match-exact", "-t", "package"]
        answer = self.host.run([*argv, *names], timeout=_ASK_SECONDS)
        if answer.timed_out or answer.code not in (*_DONE, _NOTHING_FOUND):
            raise failed("zypper search", failure(answer, _PATTERNS))
        offers: dict[str, list[tuple[str, str]]] = {}
        for match in _SOLVABLE.finditer(answer.stdout):
            solvable = dict(_ATTRIBUTE.findall(match[1]))
            repository = solvable.get("repository", "")
            if solvable.get("name") in names and repository != "(System Packages)":
                offers.setdefault(solvable["name"], []).append((solvable.get("edition", ""), repository))
        return self.states(names, offers)

    def refresh(self, only: str = "") -> Command:
        """`only` is a repository's alias. The key is the one that its file names."""
        argv = (*_QUIET, "--gpg-auto-import-keys", "refresh", *((only,) if only else ()))
        return Command(argv, seconds=300.0, changes=False)

    def install(self, packages: Sequence[PackageRequest], *, downgrade: bool = False) -> Command:
        return self._install(downgrade, *(word for package in packages for word in _version_limits(package)))

    def install_files(self, paths: Sequence[str], *, downgrade: bool = False) -> Command:
        """NVIDIA signs its repository's index and not its packages."""
        return self._install(downgrade, "--allow-unsigned-rpm", *paths)

    def _install(self, downgrade: bool, *rest: str) -> Command:
        older = ("--oldpackage",) if downgrade else ()
        return Command((*_QUIET, "install", *older, *rest))

    def remove(self, names: Sequence[str]) -> Command:
        return Command((*_QUIET, "remove", *names))

    def hold(self, names: Sequence[str]) -> Command:
        return Command((*_QUIET, "addlock", *names), seconds=_ASK_SECONDS)

    def release(self, names: Sequence[str]) -> Command:
        return Command((*_QUIET, "removelock", *names), seconds=_ASK_SECONDS)

    def explain(self, done: Completed) -> Failure | None:
        if not done.timed_out and done.code in _DONE:
            return None
        why = failure(done, _PATTERNS)
        trouble = _CODES.get(done.code)
        if trouble is None or (done.code == _ZYPP_CODE and why.trouble is not Trouble.OTHER):
            return why
        return Failure(trouble, why.said, HINTS.get(trouble, ""))


def _version_limits(package: PackageRequest) -> tuple[str, ...]:
    """zypper has no pattern for versions, but accepts two limits for one package."""
    if not package.version and (limit := package.limit):
        end = f"{limit}.0" if "." in limit else int(limit) + 1  # 595.91.07_k6.4 sorts before 595.91.07.0
        return (f"{package.name}>={limit}", f"{package.name}<{end}")
    return (f"{package.name}={package.version}" if package.version else package.name,)
