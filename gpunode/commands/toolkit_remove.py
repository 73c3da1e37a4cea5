"""`gpunode toolkit remove`: take out what `toolkit install` brought, once no engine needs it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpunode.commands import status
from gpunode.commands.toolkit_install import OPERATION
from gpunode.errors import PreconditionError
from gpunode.facts.writers import is_nvidia_program
from gpunode.host import Host
from gpunode.host.journal import OPEN_STATES, Entry, Journal, state_of
from gpunode.output.result import Block, Change, Progress, Result, Style, Text
from gpunode.packages.apply import Job, Run, carry_out, edits_of, file_blocks, require_live
from gpunode.packages.find import find_manager
from gpunode.packages.manager import WAIT_SECONDS, Command, FileChange, Manager, PackageState
from gpunode.packages.repository import SUFFIX
from gpunode.packages.toolkit import PACKAGES
from gpunode.runtime.find import FINDERS

KIND = "ToolkitRemoval"
REMOVAL = "toolkit-remove"
LEFTOVERS = (
    "/etc/nvidia-container-runtime/config.toml",
    "/etc/nvidia-container-toolkit",
    "/var/run/cdi/nvidia.yaml",
    "/etc/cdi/nvidia.yaml",
)


@dataclass(frozen=True)
class Options:
    """The command line's options; `lock_seconds` is --lock-timeout."""

    dry_run: bool = False
    lock_seconds: float = WAIT_SECONDS


@dataclass(frozen=True)
class ToolkitRemoval:
    """`data` of the envelope. `packages` go or went; `kept` are those that gpunode didn't bring, `left` files
    that stay and what they are, `by_hand` the command for what is kept."""

    manager: str
    packages: tuple[str, ...]
    kept: tuple[str, ...]
    changes: tuple[Change, ...]
    commands: tuple[str, ...]
    left: tuple[str, ...]
    by_hand: str
    dry_run: bool


@dataclass(frozen=True)
class Brought:
    """What the journal says that gpunode brought: packages that were not there, whether it held them, and
    files that were not there and are as it wrote them; `changed` are those that somebody edited since,
    `aside` the new names of files that were switched off."""

    packages: tuple[str, ...]
    held: bool
    files: tuple[str, ...]
    changed: tuple[str, ...]
    aside: tuple[str, ...]


def run(host: Host, options: Options, progress: Progress) -> Result:
    """Remove, or say what would be; kind ToolkitRemoval. `PreconditionError` while an engine uses it."""
    manager = find_manager(host)
    if not options.dry_run:
        require_live(host)
    brought = _brought(host, Journal.of(host).entries())
    states = manager.installed(PACKAGES)
    going = tuple(name for name in brought.packages if states[name].installed)
    kept = tuple(name for name in PACKAGES if states[name].installed and name not in going)
    if going:
        _require_unused(host, progress)
    commands = _commands(manager, states, going, brought)
    if commands:
        with progress.step(f"asking {manager.name} what would go along"):
            _require_alone(manager, commands, going)
    files = tuple(FileChange(path, None, "") for path in brought.files)
    changes = tuple(edit.change() for edit in edits_of(host, files))
    if not options.dry_run:
        _carry_out(host, manager, states, commands, files, options, progress)
    data = ToolkitRemoval(
        manager.name,
        going,
        kept,
        changes,
        tuple(one.text for one in commands),
        tuple(_left(host, brought)),
        manager.remove(kept).text if kept else "",
        options.dry_run,
    )
    return Result(KIND, data, blocks=tuple(_blocks(data, files)))


def _carry_out(
    host: Host,
    manager: Manager,
    states: Mapping[str, PackageState],
    commands: Sequence[Command],
    files: Sequence[FileChange],
    options: Options,
    progress: Progress,
) -> None:
    """Packages first: while the repository is there, they can be put back."""
    before = {name: states[name].installed for name in PACKAGES}
    # killed between the two, the next run must still know of the files
    context = {"filesLeft": [one.path for one in files]}
    job = Job(host, manager, REMOVAL, progress, PACKAGES, before, context, options.lock_seconds, stays=False)

    def act(run: Run) -> None:
        for command in commands:
            run(command)

    carry_out(job, lambda: (), act)
    now = {name: state.installed for name, state in manager.installed(PACKAGES).items()}
    rest = Job(host, manager, REMOVAL, progress, PACKAGES, now, stays=False)
    carry_out(rest, lambda: files, lambda _run: None)


def _brought(host: Host, entries: Sequence[Entry]) -> Brought:
    """Since the last removal: what went then isn't ours any more."""
    installs: list[Entry] = []
    for entry in entries:
        operation = entry.manifest.get("operation")
        if entry.state == "committed" and operation == REMOVAL and not entry.manifest.get("filesLeft"):
            installs = []
        elif entry.state in (*OPEN_STATES, "committed") and operation == OPERATION:
            installs.append(entry)  # one that was killed has brought what is there
    first: dict[str, str] = {}
    for entry in installs:
        packages = entry.manifest.get("packages")
        for name, version in packages.items() if isinstance(packages, dict) else ():
            first.setdefault(name, version)
    files: dict[str, str] = {}
    for entry in installs:
        for file in entry.files:
            if not file["existed"] and SUFFIX not in file["path"]:
                files[file["path"]] = ""
            if file["path"] in files and file["after"]:
                files[file["path"]] = state_of(file, host.read_bytes(file["path"]))
    return Brought(
        tuple(name for name in PACKAGES if first.get(name) == ""),
        any(entry.manifest.get("held") for entry in installs),
        tuple(path for path, state in files.items() if state == "ours"),
        tuple(path for path, state in files.items() if state == "foreign"),
        tuple(file["path"] for entry in installs for file in entry.files if SUFFIX in file["path"]),
    )


def _commands(
    manager: Manager, states: Mapping[str, PackageState], going: Sequence[str], brought: Brought
) -> tuple[Command, ...]:
    held = [name for name in going if states[name].held]
    if held and not brought.held:
        raise PreconditionError(
            f"held at their version, and not by gpunode: {', '.join(held)}", hint=manager.release(held).text
        )
    release = (manager.release(held),) if held else ()
    return (*release, manager.remove(going)) if going else ()


def _require_alone(manager: Manager, commands: Sequence[Command], going: Sequence[str]) -> None:
    if not commands or len(commands) > 1:
        return  # apt says nothing of held packages before they are released
    others = [one.name for one in manager.preview(commands[-1]) if not one.after and one.name not in going]
    if others:
        raise PreconditionError(
            f"with the toolkit these would go, which gpunode didn't bring: {', '.join(others)}",
            hint=manager.remove(others).text,
            code="needed",
        )


def _require_unused(host: Host, progress: Progress) -> None:
    """An engine whose default runtime is gone starts no container at all."""
    try:
        data = status.run(host, status.Options(), progress).data
    except PreconditionError:
        return  # no engine
    users: dict[str, str] = {}
    for engine in data.engines:
        for handler in engine.handlers:
            if is_nvidia_program(handler.path):
                name = engine.manager if engine.manager in FINDERS else engine.name
                where = handler.file or "the running daemon"
                users.setdefault(name, f"{name} has the runtime {handler.name} ({where})")
    if users:
        flags = " ".join(f"--runtime {name}" for name in users)
        raise PreconditionError(
            f"still in use: {'; '.join(users.values())}",
            hint=f"take it out first: gpunode unconfigure-runtime {flags}",
            code="in-use",
        )


def _left(host: Host, brought: Brought) -> Iterator[str]:
    for path in brought.changed:
        yield f"{path}: changed since gpunode wrote it"
    for path in brought.aside:
        if host.exists(path):
            yield f"{path}: put aside by gpunode; rename it to have it back"
    for path in LEFTOVERS:
        if host.exists(path):
            yield f"{path}: configuration; the packages don't remove it"


def _blocks(data: ToolkitRemoval, files: Sequence[FileChange]) -> Iterator[Block]:
    yield from file_blocks(files, data.changes, dry_run=data.dry_run)
    for command in data.commands:
        yield Text(f"{'would run' if data.dry_run else 'ran'}: {command}", Style.COMMAND)
    if not data.commands and not data.changes:
        yield Text("there is nothing here that gpunode toolkit install brought", Style.GOOD)
    for left in data.left:
        yield Text(f"left alone: {left}", Style.DIM)
    if data.kept:
        yield Text(f"left alone, installed by others: {', '.join(data.kept)}", Style.DIM)
        yield Text(f"to remove them: {data.by_hand}", Style.COMMAND)
