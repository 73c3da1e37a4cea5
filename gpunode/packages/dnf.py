"""dnf 4, dnf 5 and yum: RHEL, Fedora, Amazon Linux and their kin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpunode.dataclass import dataclass
from gpunode.facts.package_locks import locked
from gpunode.host import Completed, Host
from gpunode.packages.manager import (
    Command,
    Failure,
    PackageChange,
    PackagesError,
    PackageState,
    Trouble,
    Wanted,
)
from gpunode.packages.rpm import installed, newest_first
from gpunode.packages.words import failure
from gpunode.result import ExitCode

_ASK_SECONDS = 120.0  # it may read the repositories' metadata first
_QUERY = r"%{name} %{evr} %{repoid}\n"  # dnf 5 knows \n and takes \t as it stands
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
class Dnf:
    """dnf(8) of one node; `program` is dnf5, dnf or yum."""

    host: Host
    program: str = "dnf"
    name: str = "dnf"

    @property
    def lock_files(self) -> tuple[str, ...]:
        """rpm's, and that of dnf's metadata; where dnf notes its process itself it waits in its own words."""
        return (
            "/var/lib/rpm/.rpm.lock",
            "/usr/lib/sysimage/rpm/.rpm.lock",
            "/var/cache/dnf/metadata_lock.pid",
        )

    def look(self, names: Sequence[str]) -> Mapping[str, PackageState]:
        """From rpm and ``repoquery``, which sees what pins and modules leave."""
        here = installed(self.host, names)
        argv = [self.program, "-q", "repoquery", "--available", "--qf", _QUERY, *names]
        answer = self.host.run(argv, timeout=_ASK_SECONDS)
        if not answer.ok:
            why = failure(answer, _PATTERNS)
            raise PackagesError(f"{self.program} repoquery: {why.said}", hint=why.hint, code=str(why.trouble))
        offers: dict[str, list[tuple[str, str]]] = {}
        for line in answer.stdout.splitlines():
            words = line.split()
            if len(words) == 3:
                offers.setdefault(words[0], []).append((words[1].removeprefix("0:"), words[2]))
        return {name: self._state(name, here.get(name, ""), offers.get(name, [])) for name in names}

    def _state(self, name: str, version: str, offers: Sequence[tuple[str, str]]) -> PackageState:
        available = newest_first(offers)
        candidate = available[0].version if available else version
        everything = (
            available
            if any(one.version == version for one in available) or not version
            else (newest_first([*offers, (version, "")]))
        )
        return PackageState(name, version, candidate, everything, locked(self.host, "rhel", name))

    def installed(self, names: Sequence[str]) -> Mapping[str, PackageState]:
        """From rpm, which knows no repositories."""
        here = installed(self.host, names)
        return {name: self._state(name, here.get(name, ""), []) for name in names}

    def preview(self, command: Command) -> tuple[PackageChange, ...]:
        """dnf tells it in tables of its own language; nothing is claimed."""
        return ()

    def refresh(self, only: str = "") -> Command:
        """`only` is a repository's id. ``-y`` takes the key that its file names.

        Fedora passes over a repository that it can't read or whose signature is wrong; this one it may not.
        """
        must = f"--setopt={only}.skip_if_unavailable=False"
        alone = ("--disablerepo=*", f"--enablerepo={only}", must) if only else ()
        argv = (self.program, "-y", *self._impatient, "makecache", "--refresh", *alone)
        return Command(argv, seconds=300.0, changes=False)

    def install(self, packages: Sequence[Wanted], *, downgrade: bool = False) -> Command:
        """dnf takes the version that is named, an older one too, without being told so."""
        return self._change("install", *map(_named, packages))

    def install_files(self, paths: Sequence[str], *, downgrade: bool = False) -> Command:
        """With no repository: whoever brings files has no network. An older file is a downgrade by name.

        To dnf 5 ``--disablerepo=*`` is an error where there is no repository: it looks for them in nothing.
        """
        alone = "--setopt=reposdir=/dev/null" if self.program == "dnf5" else "--disablerepo=*"
        return self._change("downgrade" if downgrade else "install", alone, *paths)

    def remove(self, names: Sequence[str]) -> Command:
        return self._change("remove", "--noautoremove", *names)

    def _change(self, verb: str, *rest: str) -> Command:
        return Command((self.program, "-y", *self._impatient, verb, *rest))

    @property
    def _impatient(self) -> tuple[str, ...]:
        """Without it dnf 4 waits for another's lock for ever, and nobody sees it."""
        return () if self.program == "dnf5" else ("--setopt=exit_on_lock=True",)

    def hold(self, names: Sequence[str]) -> Command:
        """Needs the versionlock plugin, which dnf 5 has built in."""
        return Command((self.program, "-y", "versionlock", "add", *names), seconds=_ASK_SECONDS)

    def require_holding(self) -> None:
        """dnf 4 has versionlock as a plugin, which no distribution installs by itself."""
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

    def finish(self) -> Command | None:
        """rpm configures as it unpacks; what is missing is installed by the next transaction."""
        return None

    def explain(self, done: Completed) -> Failure | None:
        if done.ok:
            return None
        why = failure(done, _PATTERNS)
        return Failure(Trouble.LOCKED, why.said) if done.code == _LOCKED_CODE else why


def _named(package: Wanted) -> str:
    version = package.version or (f"{package.branch}.*" if package.branch else "")
    return f"{package.name}-{version}" if version else package.name
