"""apt: Debian, Ubuntu and their derivatives. The directories are those that apt reports (apt.conf(5))."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpunode.host import Host
from gpunode.host.process import Completed
from gpunode.packages.manager import (
    Available,
    Command,
    Failure,
    Manager,
    PackageChange,
    PackageRequest,
    PackagesError,
    PackageState,
    Trouble,
    failed,
    failure,
)

# needrestart would restart daemons after each transaction, docker and its containers among them
_ENVIRON = {"DEBIAN_FRONTEND": "noninteractive", "NEEDRESTART_MODE": "l"}
_KEEP_CONFIGURATION = ("-o", "Dpkg::Options::=--force-confdef", "-o", "Dpkg::Options::=--force-confold")
_ASK_SECONDS = 30.0
_UPDATE_SECONDS = 300.0
_PLACES = {
    "ETC": ("Dir::Etc/d", "/etc/apt/"),
    "LIST": ("Dir::Etc::sourcelist/f", "/etc/apt/sources.list"),
    "PARTS": ("Dir::Etc::sourceparts/d", "/etc/apt/sources.list.d/"),
    "STATUS": ("Dir::State::status/f", "/var/lib/dpkg/status"),
    "LISTS": ("Dir::State::lists/d", "/var/lib/apt/lists/"),
    "ARCHIVES": ("Dir::Cache::archives/d", "/var/cache/apt/archives/"),
}
_PATTERNS = (
    (Trouble.LOCKED, r"Could not get lock|frontend lock was locked|Unable to acquire the dpkg frontend lock"),
    (Trouble.LOCKED, r"is another process using it|Unable to lock (the )?(director|administration)"),
    (Trouble.CONFLICTING_SOURCES, r"Conflicting values set for option Signed-By"),
    (Trouble.SIGNATURE, r"EXPKEYSIG|KEYEXPIRED|REVKEYSIG|BADSIG|NO_PUBKEY|SHA1 is not considered secure"),
    (Trouble.SIGNATURE, r"is not signed|couldn't be verified|verification: |Clearsigned file isn't valid"),
    (Trouble.INTERRUPTED, r"dpkg was interrupted"),
    (Trouble.NO_SPACE, r"don't have enough free space"),
    (Trouble.NOT_FOUND, r"Unable to locate package|was not found$|has no installation candidate"),
    (Trouble.DEPENDENCIES, r"held broken packages|unmet dependencies|Depends: |Conflicts: "),
    (Trouble.NETWORK, r"Could not resolve|Temporary failure|Could not connect|Unable to connect|timed out"),
    (Trouble.NETWORK, r"Could not handshake|[Pp]roxy [Aa]uthentication|from proxy"),
    (Trouble.NOT_FOUND, r"\.deb  404 +"),  # indexes that are older than the repository
    (Trouble.NO_REPOSITORY, r"does not have a Release file"),
    (Trouble.NETWORK, r"^[EW]: Failed to fetch"),
    (Trouble.OTHER, r"^trying to overwrite|subprocess .*returned error"),  # the reason, after the package
    (Trouble.OTHER, r"^dpkg: error processing|^E: "),
)
_IGNORED_BY_UPDATE = re.compile(r"^W: (GPG error|Failed to fetch|An error occurred)", re.MULTILINE)
_HALF = ("U", "F", "H")  # unpacked, half-configured, half-installed; pending triggers are harmless
_VERSION = re.compile(r"^ (?:\*\*\*|   ) (\S+) -?\d+$")
_ORIGIN = re.compile(r"^ +-?\d+ (\S+)")
_INSTALLS = re.compile(r"^Inst (\S+)(?: \[([^\]]+)\])? \((\S+)")
_REMOVES = re.compile(r"^(?:Remv|Purg) (\S+) \[([^\]]+)\]")


class AptPaths(NamedTuple):
    """The directories of this apt, without a slash at the end."""

    etc: str
    sources_list: str
    sources_parts: str
    status: str
    lists: str
    archives: str


@dataclass(frozen=True)
class Apt(Manager):
    """apt-get(8), apt-cache(8) and apt-mark(8) of one node."""

    host: Host
    places: AptPaths
    name: str = "apt"

    @classmethod
    def of(cls, host: Host) -> Apt:
        """With the directories of this node's configuration."""
        keys = [word for name, (key, _) in _PLACES.items() for word in (name, key)]
        answer = host.run(["apt-config", "shell", *keys], timeout=_ASK_SECONDS)
        values = dict(_assignments(answer.stdout)) if answer.ok else {}
        return cls(
            host, AptPaths(*((values.get(name) or usual).rstrip("/") for name, (_, usual) in _PLACES.items()))
        )

    @property
    def lock_files(self) -> tuple[str, ...]:
        """dpkg's two, and those of apt's indexes and downloads."""
        dpkg = self.places.status.rpartition("/")[0]
        return (
            f"{dpkg}/lock-frontend",
            f"{dpkg}/lock",
            f"{self.places.lists}/lock",
            f"{self.places.archives}/lock",
        )

    def look(self, names: Sequence[str]) -> Mapping[str, PackageState]:
        """From ``apt-cache policy``, which needs no lock and no root."""
        answer = self.host.run(["apt-cache", "policy", *names], timeout=_ASK_SECONDS)
        if not answer.ok:
            raise failed("apt-cache policy", failure(answer, _PATTERNS))
        marks = self.host.run(["apt-mark", "showhold", *names], timeout=_ASK_SECONDS)
        held = set(marks.stdout.split()) if marks.ok else set()
        here = self.installed(names)
        half = {name for name in names if here[name].unfinished}
        known = {state.name: state for state in _policies(answer.stdout, held, half)}
        return {name: known.get(name, PackageState(name)) for name in names}

    def installed(self, names: Sequence[str]) -> Mapping[str, PackageState]:
        """From dpkg, which has no repositories.

        Its status shows whether a package is finished (dpkg-query(1)).
        """
        states = {name: PackageState(name) for name in names}
        for name, version, status in self._status("Package", *names):  # of several architectures the last
            if name in states:
                half = status[1:2] in _HALF or status[2:3] == "R"
                states[name] = PackageState(name, version, version, (), status.startswith("h"), half)
        return states

    def everything(self) -> frozenset[tuple[str, str]]:
        return frozenset((name, version) for name, version, _ in self._status("binary:Package"))

    def _status(self, name: str, *names: str) -> Iterator[tuple[str, str, str]]:
        """Name, version and status of installed packages; `name` is dpkg's field for the name."""
        form = rf"${{{name}}}\t${{Version}}\t${{db:Status-Abbrev}}\n"
        admin = self.places.status.rpartition("/")[0]
        argv = ["dpkg-query", f"--admindir={admin}", "-W", "-f", form, *names]
        answer = self.host.run(argv, timeout=_ASK_SECONDS)
        if not answer.ok and not names:
            raise PackagesError(f"dpkg doesn't list the packages: {answer.stderr.strip()[-200:]}")
        for line in answer.stdout.splitlines():
            package, version, status = (*line.split("\t"), "", "")[:3]
            if status[1:2] not in ("n", "c", ""):
                yield package, version, status

    def preview(self, command: Command) -> tuple[PackageChange, ...]:
        """``apt-get -s``: the solver's result, without a lock."""
        argv = (command.argv[0], "--simulate", *command.argv[1:])
        answer = self.host.run(argv, timeout=_UPDATE_SECONDS, env=command.environ)
        if not answer.ok:
            raise failed("apt-get can't do it", failure(answer, _PATTERNS))
        return tuple(_simulated(answer.stdout))

    def refresh(self, only: str = "") -> Command:
        """``apt-get update``; with one file only, other broken repositories are ignored."""
        alone = (
            "-o", f"Dir::Etc::sourcelist={only}", "-o", "Dir::Etc::sourceparts=-",
            "-o", "APT::Get::List-Cleanup=0",
        )  # fmt: skip
        argv = ("apt-get", "update", "-q", "-o", "APT::Update::Error-Mode=any", *(alone if only else ()))
        return Command(argv, seconds=_UPDATE_SECONDS, changes=False)

    def install(self, packages: Sequence[PackageRequest], *, downgrade: bool = False) -> Command:
        return self._change("install", downgrade, tuple(package.named("=") for package in packages))

    def install_files(self, paths: Sequence[str], *, downgrade: bool = False) -> Command:
        return self._change("install", downgrade, tuple(paths))

    def remove(self, names: Sequence[str]) -> Command:
        """Configuration files stay, as after any ``apt-get remove``."""
        return self._change("remove", False, tuple(names))

    def _change(self, verb: str, downgrade: bool, what: tuple[str, ...]) -> Command:
        allowed = ("--allow-downgrades",) if downgrade else ()
        options = _KEEP_CONFIGURATION if verb == "install" else ()
        return Command(("apt-get", verb, "-y", "-q", *allowed, *options, *what), _ENVIRON)

    def hold(self, names: Sequence[str]) -> Command:
        return Command(("apt-mark", "hold", *names), seconds=_ASK_SECONDS)

    def release(self, names: Sequence[str]) -> Command:
        return Command(("apt-mark", "unhold", *names), seconds=_ASK_SECONDS)

    def finish(self) -> Command | None:
        """``dpkg --configure -a`` with the options that apt gives dpkg; without it apt refuses to work.

        None if no package waits for it and dpkg's own log of steps (``updates``) is empty. It fails for a
        package of which the dependencies are not installed yet, but clears the log even then.
        """
        admin = self.places.status.rpartition("/")[0]
        audit = self.host.run(["dpkg", f"--admindir={admin}", "--audit"], timeout=_ASK_SECONDS)
        steps = any(name.isdigit() for name in self.host.listdir(f"{admin}/updates"))
        if not steps and not audit.stdout.strip():
            return None
        argv = ["apt-config", "dump", "--no-empty", "--format", "%v%n", "DPkg::Options"]
        lines = self.host.run(argv, timeout=_ASK_SECONDS).stdout.split("\n")
        options = (*(line for line in lines if line.startswith("-")), "--force-confdef", "--force-confold")
        return Command(("dpkg", *options, "--configure", "-a"), _ENVIRON, tolerated=True)

    def explain(self, done: Completed) -> Failure | None:
        """Also for an update that skips a repository with a warning and still exits with 0."""
        if done.ok and not ("update" in done.argv and _IGNORED_BY_UPDATE.search(done.stderr)):
            return None
        return failure(done, _PATTERNS, noise=r"^W: Some index files|^N: |^E: Some index files")


def _assignments(text: str) -> Iterator[tuple[str, str]]:
    """``NAME='value'`` as apt-config prints it for a shell."""
    for line in text.splitlines():
        name, _, value = line.partition("=")
        yield name, "".join(shlex.split(value))


def _policies(text: str, held: set[str], half: set[str]) -> Iterator[PackageState]:
    for block in re.split(r"^(?=\S)", text, flags=re.MULTILINE):
        name, colon, rest = block.partition(":\n")
        if not colon:
            continue
        heads = dict(re.findall(r"^  (Installed|Candidate): (\S+)$", rest, re.MULTILINE))
        versions: list[tuple[str, list[str]]] = []
        for line in rest.partition("Version table:")[2].splitlines():
            if match := _VERSION.match(line):
                versions.append((match[1], []))
            elif versions and (match := _ORIGIN.match(line)) and not match[1].endswith("/status"):
                versions[-1][1].append(match[1].rstrip("/"))
        available = tuple(Available(version, tuple(origins)) for version, origins in versions)
        values = {key: "" if value == "(none)" else value for key, value in heads.items()}
        here, candidate = values.get("Installed", ""), values.get("Candidate", "")
        yield PackageState(name, here, candidate, available, name in held, name in half)


def _simulated(text: str) -> Iterator[PackageChange]:
    for line in text.splitlines():
        if match := _INSTALLS.match(line):
            yield PackageChange(match[1], match[2] or "", match[3])
        elif match := _REMOVES.match(line):
            yield PackageChange(match[1], match[2])
