"""The commands that install the toolkit's four packages at one version, and whether any are needed. Pure.

Only their later releases require each other at exactly the same version, so every command names all four: a
partial upgrade leaves a runtime that starts no container.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from gpunode.errors import UsageError
from gpunode.host import Host
from gpunode.output.result import ExitCode
from gpunode.packages.dnf import compare
from gpunode.packages.manager import (
    Command,
    Manager,
    PackageRequest,
    PackagesError,
    PackageState,
    Trouble,
    matches,
)
from gpunode.packages.repository import facts

States = Mapping[str, PackageState]
PACKAGES = facts().packages
_REVISION = "-1"  # all of NVIDIA's packages of a release have had this revision


class Goal(NamedTuple):
    """The request: a version, the newest with `upgrade`, else any that all have; `hold` keeps it."""

    version: str = ""
    upgrade: bool = False
    hold: bool = False


class Steps(NamedTuple):
    """The commands, and the version of each package after them.

    The version is the manager's whole one, empty if it isn't known before the repository has been read.
    `install` is the transaction among the commands, None if none is needed.
    """

    commands: tuple[Command, ...] = ()
    install: Command | None = None
    versions: Mapping[str, str] = MappingProxyType({})


def common_version(states: States) -> str:
    """The one version (``1.20.0-1``) at which all four are installed; empty if they differ."""
    versions = {states[name].installed for name in PACKAGES}
    return versions.pop() if len(versions) == 1 else ""


def settled(states: States, goal: Goal) -> bool:
    """Whether the installed four match the goal."""
    version = common_version(states)
    if any(states[name].unfinished for name in PACKAGES):
        return False
    if not version or (goal.version and not matches(version, goal.version)):
        return False
    return (
        not goal.upgrade or bool(goal.version) or all(states[name].candidate == version for name in PACKAGES)
    )


def plan(manager: Manager, states: States, goal: Goal, *, killed: bool = False) -> Steps:
    """The commands to run, once the repository's files are correct. `PackagesError` if it isn't possible.

    `killed` means that an earlier run of gpunode was killed; then dpkg's unfinished work is completed first.
    It is completed in any case if one of the four is unfinished; unfinished packages of others are left to
    their owners.
    """
    if settled(states, goal):
        free = [name for name in PACKAGES if not states[name].held]
        holding = (manager.hold(free),) if goal.hold and free else ()
        return Steps(holding, versions={name: states[name].installed for name in PACKAGES})
    versions = _versions(states, goal)
    desired = [PackageRequest(name, versions[name]) for name in PACKAGES]
    install = manager.install(
        desired, downgrade=any(_older(states[name], versions[name]) for name in PACKAGES)
    )
    return around(manager, states, goal, install, versions, killed=killed)


def around(
    manager: Manager,
    states: States,
    goal: Goal,
    install: Command,
    versions: Mapping[str, str],
    *,
    killed: bool = False,
) -> Steps:
    """An install with the holds released before it and set after it.

    `PackagesError` for packages that the user holds, unless they are to be held again.
    """
    held = [name for name in PACKAGES if states[name].held]
    if held and not goal.hold:
        raise PackagesError(
            f"held at {', '.join(sorted({states[name].installed for name in held}))}: {', '.join(held)}",
            hint=f"{manager.release(held).text}, or hold the new version in place of it: --hold",
            code="held",
            exit_code=ExitCode.PRECONDITION,
        )
    half = killed or any(states[name].unfinished for name in PACKAGES)
    end = manager.finish() if half else None
    first = (*((end,) if end else ()), *((manager.release(held),) if held else ()))
    last = (manager.hold(PACKAGES),) if goal.hold else ()
    return Steps((*first, install, *last), install, versions)


def shared_versions(states: States) -> tuple[str, ...]:
    """The versions that are available of every package, newest first."""
    first, *others = (states[name] for name in PACKAGES)
    return tuple(
        offer.version
        for offer in first.available
        if offer.origins
        and all(
            any(offer.version == other.version and other.origins for other in state.available)
            for state in others
        )
    )


def require_offered(states: States, versions: Mapping[str, str]) -> None:
    """`PackagesError` if a version isn't offered, with those that are."""
    for name, version in versions.items():
        if version and states[name].offered(version) is None:
            there = ", ".join(shared_versions(states)[:5])
            raise PackagesError(
                f"no repository of this node offers {name} {version}",
                hint=f"all four are offered in {there}"
                if there
                else "see what there is: gpunode toolkit status",
                code=str(Trouble.NOT_FOUND),
            )
    missing = [name for name in PACKAGES if not states[name].candidate and not versions.get(name)]
    if hidden := [name for name in missing if any(offer.origins for offer in states[name].available)]:
        there = ", ".join(shared_versions(states)[:5])
        raise PackagesError(
            f"a pin or priority on this node blocks all versions of {', '.join(hidden)}",
            hint=f"correct it (apt-cache policy {hidden[0]}), or name one of {there}: --version",
            code=str(Trouble.HELD),
        )
    if missing:
        raise PackagesError(
            f"no repository of this node offers {', '.join(missing)}",
            hint="a mirror must hold the packages of this architecture; see gpunode toolkit status",
            code=str(Trouble.NOT_FOUND),
        )


def _versions(states: States, goal: Goal) -> dict[str, str]:
    if goal.version:
        return {name: _whole(states[name], goal.version) for name in PACKAGES}
    newest = {name: states[name].candidate for name in PACKAGES}
    if not all(newest.values()):
        return dict.fromkeys(PACKAGES, "")
    if len(set(newest.values())) > 1:
        shared = shared_versions(states)
        raise PackagesError(
            "the newest versions differ: "
            + ", ".join(f"{name} {version}" for name, version in newest.items()),
            hint=f"choose one that all four have: --version {shared[0]}"
            if shared
            else "two repositories disagree",
            code="versions-differ",
            exit_code=ExitCode.PRECONDITION,
        )
    return newest


def _whole(state: PackageState, version: str) -> str:
    """The repository's full version; before it is known, NVIDIA's own numbering."""
    offer = state.offered(version)
    return offer.version if offer else version if "-" in version else f"{version}{_REVISION}"


def _older(state: PackageState, version: str) -> bool:
    """Whether `version` comes after the installed one in a list that is newest first."""
    order = [offer.version for offer in state.available]
    if state.installed not in order or version not in order:
        return False
    return order.index(version) > order.index(state.installed)


# The toolkit's packages as files in a directory, for machines without a network.

_SECONDS = 30.0


class PackageFile(NamedTuple):
    """One file, and its metadata."""

    path: str
    name: str
    version: str
    architecture: str


def read_directory(host: Host, manager: Manager, directory: str) -> tuple[PackageFile, ...]:
    """The toolkit's packages among the files of a directory. `UsageError` for a damaged one."""
    ending = "*.deb" if manager.name == "apt" else "*.rpm"
    if not host.is_dir(directory):
        raise UsageError(
            f"{directory} is not a directory", hint=f"--from takes the directory of {ending} files"
        )
    files = [_read(host, manager, path) for path in host.glob(directory, ending)]
    return tuple(file for file in files if file.name in PACKAGES)


def _read(host: Host, manager: Manager, path: str) -> PackageFile:
    form = r"%{NAME}\t%{EVR}\t%{ARCH}\n"
    argv = ["rpm", "-qp", "--nosignature", "--qf", form, path]
    if manager.name == "apt":
        argv = ["dpkg-deb", "--show", "--showformat", r"${Package}\t${Version}\t${Architecture}\n", path]
    answer = host.run(argv, timeout=_SECONDS)
    words = answer.stdout.strip().split("\t")
    if not answer.ok or len(words) != 3:
        reason = (answer.stderr.strip().splitlines() or ["it contains no package metadata"])[-1]
        raise UsageError(f"{path} is not a complete package: {reason}", hint="copy it again")
    return PackageFile(path, *words)


def chosen(
    host: Host, manager: Manager, files: Iterable[PackageFile], version: str
) -> tuple[PackageFile, ...]:
    """The four of one version for this machine. `UsageError` if there isn't exactly one such set."""
    argv = ["dpkg", "--print-architecture"] if manager.name == "apt" else ["rpm", "-E", "%{_arch}"]
    here = host.run(argv, timeout=_SECONDS).stdout.strip()
    fitting = [file for file in files if file.architecture in (here, "all", "noarch")]
    sets: dict[str, dict[str, PackageFile]] = {}
    for file in fitting:
        if not version or matches(file.version, version):
            sets.setdefault(file.version, {})[file.name] = file
    whole = {
        number: package_files for number, package_files in sets.items() if set(package_files) == set(PACKAGES)
    }
    if len(whole) == 1:
        only = next(iter(whole.values()))
        return tuple(
            only[name] for name in reversed(PACKAGES)
        )  # in the order of their dependencies, for the reader
    hint = f"put the four packages of one release into it: {', '.join(PACKAGES)}"
    if whole:
        hint = "choose one: --version VERSION"
    raise UsageError(_trouble(whole, sets, version, here), hint=hint)


def _trouble(whole: Iterable[str], sets: dict[str, dict[str, PackageFile]], version: str, here: str) -> str:
    if whole:
        return f"there are several versions: {', '.join(sorted(whole))}"
    what = f" {version}" if version else ""
    if not sets:
        return f"there is no package of the toolkit{what} for {here or 'this machine'}"
    number, files = max(sets.items(), key=lambda item: len(item[1]))
    missing = ", ".join(name for name in PACKAGES if name not in files)
    return f"the four packages have to be of one version; of {number} for {here} these are missing: {missing}"


def is_downgrade(manager: Manager, states: States, files: Sequence[PackageFile]) -> bool:
    """Whether a file is older than the installed version; for apt any different version counts."""
    pairs = [(states[file.name].installed, file.version) for file in files if states[file.name].installed]
    if manager.name == "apt":
        return any(installed != version for installed, version in pairs)
    return any(compare(version, installed) < 0 for installed, version in pairs)
