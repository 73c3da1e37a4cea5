"""`gpunode toolkit status`: the four packages, where they come from, and what disagrees."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpunode.commands.toolkit_install import NEXT, killed_runs
from gpunode.facts.packages import locked
from gpunode.host import Host
from gpunode.output.result import Block, Cell, ExitCode, Progress, Result, Style, Table, Text
from gpunode.packages.find import find_manager, recorded_states
from gpunode.packages.manager import Manager, PackagesError, PackageState
from gpunode.packages.repository import Judged, State, judge, shelf_of, wanted_repository
from gpunode.packages.toolkit import PACKAGES, common_version

KIND = "ToolkitStatus"
_INSTALL = "gpunode toolkit install"
_FAMILY = {"apt": "debian", "dnf": "rhel", "zypper": "suse"}
_SAID = {
    State.RETIRED: "is retired: NVIDIA no longer serves it",
    State.DUPLICATE: "names the repository a second time",
    State.OTHER_KEY: "is to be signed by a key that is missing or isn't NVIDIA's",
}


@dataclass(frozen=True)
class Options:
    """There are none."""


@dataclass(frozen=True)
class ToolkitPackage:
    """One of the four; empty where it isn't installed or offered. `origins` are those of what is installed,
    `pinned` is by a hold, a preference or a lock."""

    name: str
    installed: str
    candidate: str
    origins: tuple[str, ...]
    candidate_origins: tuple[str, ...]
    pinned: bool


@dataclass(frozen=True)
class ToolkitStatus:
    """`data` of the envelope. `version` is what all four are at, empty if they aren't; `next` a command."""

    manager: str
    version: str
    packages: tuple[ToolkitPackage, ...]
    repositories: tuple[Judged, ...]
    problems: tuple[str, ...]
    next: str


def run(host: Host, options: Options, progress: Progress) -> Result:
    """Look, change nothing; kind ToolkitStatus. Exit 1 if something is to be put right."""
    manager = find_manager(host)
    shelf = shelf_of(host, manager)
    wanted = wanted_repository()
    judged = judge(shelf.entries(wanted), wanted, shelf.address(wanted), shelf.file)
    with progress.step(f"asking {manager.name} what is here and what is offered"):
        states, trouble = _states(host, manager)
    packages = tuple(_package(host, manager, states[name]) for name in PACKAGES)
    killed = tuple(f"an install runs now or was killed half-way: {name}" for name in killed_runs(host))
    problems = (*trouble, *killed, *_problems(states, judged))
    version = common_version(states)
    installed = any(state.installed for state in states.values())
    data = ToolkitStatus(
        manager.name, version, packages, judged, problems, _next(version, problems, installed=installed)
    )
    return Result(
        KIND,
        data,
        status="warn" if problems else "ok",
        exit_code=ExitCode.FAILED if problems else ExitCode.OK,
        messages=_remarks(packages),
        blocks=tuple(_blocks(data)),
    )


def _states(host: Host, manager: Manager) -> tuple[Mapping[str, PackageState], tuple[str, ...]]:
    """All that is known, and why it isn't more."""
    try:
        return manager.look(PACKAGES), ()
    except PackagesError as error:
        if host.live:
            return manager.installed(PACKAGES), (error.message,)
    return recorded_states(host, PACKAGES), ()


def _package(host: Host, manager: Manager, state: PackageState) -> ToolkitPackage:
    return ToolkitPackage(
        state.name,
        state.installed,
        state.candidate,
        state.origins(state.installed) if state.installed else (),
        state.origins(state.candidate) if state.candidate else (),
        state.held or locked(host, _FAMILY[manager.name], state.name),
    )


def _problems(states: Mapping[str, PackageState], judged: tuple[Judged, ...]) -> Iterator[str]:
    installed = {name: state.installed for name, state in states.items() if state.installed}
    if len(set(installed.values())) > 1:
        told = ", ".join(f"{name} {version}" for name, version in installed.items())
        yield f"the packages are at different versions: {told}"
    if installed and len(installed) < len(PACKAGES):
        yield f"not installed: {', '.join(name for name in PACKAGES if name not in installed)}"
    if half := [name for name, state in states.items() if state.unfinished]:
        yield f"unpacked and not configured: {', '.join(half)}"
    held = [name for name, state in states.items() if state.held]
    if held and len(held) < len(PACKAGES):
        yield f"held without the others, so that an upgrade takes them apart: {', '.join(held)}"
    for one in judged:
        if one.state in _SAID:
            yield f"{one.entry.path}, line {one.entry.line}: {one.entry.address} {_SAID[one.state]}"


def _remarks(packages: tuple[ToolkitPackage, ...]) -> tuple[str, ...]:
    origins = dict.fromkeys(origin for one in packages for origin in one.candidate_origins)
    if len(origins) < 2:
        return ()
    return (f"more than one repository has the toolkit, and the newest wins: {', '.join(origins)}",)


def _next(version: str, problems: tuple[str, ...], *, installed: bool) -> str:
    if problems or not installed:
        return _INSTALL
    return NEXT if version else _INSTALL


def _blocks(data: ToolkitStatus) -> Iterator[Block]:
    rows = tuple(
        (
            one.name,
            Cell(one.installed or "-", Style.PLAIN if one.installed else Style.DIM),
            one.candidate or "-",
            ", ".join(one.origins or one.candidate_origins) or "-",
            "yes" if one.pinned else "no",
        )
        for one in data.packages
    )
    yield Table(("PACKAGE", "INSTALLED", "NEWEST", "FROM", "PINNED"), rows)
    good = (State.USED, State.CHANNEL, State.REPLACED)
    for one in data.repositories:
        style = Style.GOOD if one.state in good else Style.WARN
        yield Text(f"{one.entry.path}:{one.entry.line}  {one.entry.address}  {one.state}", style)
    for problem in data.problems:
        yield Text(problem, Style.WARN)
    yield Text(f"next: {data.next}", Style.COMMAND)
