"""The device plugin as a service of this node: its unit through the journal, and the wait for the kubelet."""

from __future__ import annotations

from contextlib import suppress

from gpunode.dataclass import dataclass
from gpunode.errors import DaemonError, GpunodeError, PreconditionError, RolledBackError
from gpunode.facts.daemons import systemd_runs
from gpunode.facts.unit_states import UnitState, read_unit_states
from gpunode.host import Host
from gpunode.plugin.observe.own_status import OwnStatus, read_own_status
from gpunode.plugin.settings import Settings
from gpunode.plugin.unit import UNIT, UNIT_FILE, find_unit, hidden_program, unit_text
from gpunode.result import Block, Change, Diff, Progress, Result, Style, Text
from gpunode.runtime import units
from gpunode.runtime.apply import uninterrupted
from gpunode.runtime.engine import FileEdit
from gpunode.runtime.files import FilesChanged, change_files

OPERATION = "device-plugin"
_SYSTEMCTL_SECONDS = 60.0
_LOOK = f"journalctl -u {UNIT} -n 20, and gpunode plugin status"


@dataclass(frozen=True)
class Options:
    """`arguments` are options of `plugin serve`; `wait`: seconds for the kubelet to take the GPUs."""

    arguments: tuple[str, ...] = ()
    dry_run: bool = False
    wait: float = 60.0


@dataclass(frozen=True)
class PluginService:
    """`data` of the envelope. `status` is the plugin's own word, empty if it wasn't started."""

    unit: str
    changes: tuple[Change, ...]
    commands: tuple[str, ...]
    status: str
    journal: str
    dry_run: bool


def state(host: Host) -> UnitState | None:
    """What systemd says of the unit; None if it says nothing."""
    return read_unit_states(host).get(UNIT)


def wanted_edit(host: Host, options: Options) -> FileEdit:
    """The unit's file as it should be. One that somebody else wrote stays as it is."""
    found = find_unit(host)
    own = found.content is None or found.ours
    return FileEdit(
        UNIT_FILE, found.content, unit_text(host, options.arguments).encode() if own else found.content
    )


def own_status(host: Host) -> OwnStatus | None:
    """What our plugin tells of itself; None if it can't be read or none has served."""
    with suppress(GpunodeError):
        return read_own_status(host, Settings.state_dir)
    return None


def run(host: Host, options: Options, progress: Progress) -> Result:
    """Write the unit, enable and start it, and wait until the kubelet has taken the GPUs; kind PluginService.

    `PreconditionError` where it couldn't run; `RolledBackError` if the kubelet doesn't take them: then the
    unit is as it was.
    """
    _refuse(host)
    commands = _commands(host, wanted_edit(host, options))
    if options.dry_run or not host.live:
        done = change_files(
            host, OPERATION, lambda: (wanted_edit(host, options),), progress, dry_run=options.dry_run
        )
        return _result(host, options, (done.edits[0],), commands, done.journal, "", done.notes)
    done = _change(host, options, progress)
    if not done.journal:  # the file was right already: only the unit has to come
        _enable(host, options, progress)
    status = own_status(host)
    told = status.status if status else ""
    return _result(host, options, done.edits, commands, done.journal, told, done.notes)


def _refuse(host: Host) -> None:
    if not systemd_runs(host):
        raise PreconditionError(
            "systemd doesn't run on this node, so it can't start the device plugin",
            hint="use --plugin daemonset, or start gpunode plugin serve from whatever starts services here",
            code="no-systemd",
        )
    hidden = hidden_program(host)
    if hidden:
        raise PreconditionError(
            f"gpunode is installed at {hidden}, where the plugin's service can't see it (ProtectHome)",
            hint="install it in a virtual environment in /opt/gpunode, as README says",
            code="gpunode-in-home",
        )


def _runs(host: Host) -> bool:
    found = state(host)
    return found is not None and found.runs


def _commands(host: Host, edit: FileEdit) -> tuple[str, ...]:
    """What is run beside writing the file; a running plugin is started anew if its unit changes."""
    if edit.action == "unchanged":
        return (f"systemctl enable --now {UNIT}",)
    again = (f"systemctl restart {UNIT}",) if _runs(host) else ()
    return ("systemctl daemon-reload", f"systemctl enable --now {UNIT}", *again)


def _change(host: Host, options: Options, progress: Progress) -> FilesChanged:
    """Write and start; what fails takes both back, and a plugin that ran before runs again as it did."""
    ran = _runs(host)
    restarted: list[str] = []

    def activate() -> None:
        if ran:  # enabling it has not started it anew
            restarted.append(UNIT)
            _systemctl(host, "restart", UNIT)
        _wait(host, options, progress)

    def plan() -> tuple[FileEdit, ...]:
        return (wanted_edit(host, options),)

    try:
        return change_files(host, OPERATION, plan, progress, named_units=(UNIT,), activate=activate)
    except BaseException:
        if restarted:
            with uninterrupted():
                host.run(("systemctl", "restart", UNIT), timeout=_SYSTEMCTL_SECONDS)
        raise


def _enable(host: Host, options: Options, progress: Progress) -> None:
    found = state(host)
    try:
        units.Moves(coming=(UNIT,)).settle(host)
        _wait(host, options, progress)
    except BaseException as error:
        with uninterrupted():
            _as_before(host, found)
        if isinstance(error, DaemonError):
            raise RolledBackError(f"{error}; the service is as before", hint=_LOOK) from error
        raise


def _as_before(host: Host, found: UnitState | None) -> None:
    if found is None or not found.runs:
        host.run(("systemctl", "stop", UNIT), timeout=_SYSTEMCTL_SECONDS)
    if found is None or not found.at_boot:
        host.run(("systemctl", "disable", UNIT), timeout=_SYSTEMCTL_SECONDS)


def _systemctl(host: Host, *words: str) -> None:
    done = host.run(("systemctl", *words), timeout=_SYSTEMCTL_SECONDS)
    if not done.ok:
        said = (done.stderr or done.stdout).strip()[-500:]
        raise DaemonError(f"systemctl {' '.join(words)} failed: {said or f'status {done.code}'}", hint=_LOOK)


def _wait(host: Host, options: Options, progress: Progress) -> None:
    """Until the plugin says that the kubelet watches what it offers. `DaemonError` says how far it came."""
    with progress.step("waiting for the kubelet to take the GPUs"):
        if host.wait_until(lambda: serves(own_status(host)), options.wait, 0.2):
            return
    found = own_status(host)
    told = f"it says: {found.status}" if found and found.current and found.status else "it says nothing"
    raise DaemonError(
        f"the device plugin runs, but the kubelet took no GPUs within {options.wait:g} s; {told}",
        hint=_LOOK,
    )


def serves(found: OwnStatus | None) -> bool:
    """Whether our plugin serves GPUs, and the kubelet watches all that it offers."""
    return found is not None and found.state == "serving" and found.ready


def _result(
    host: Host,
    options: Options,
    edits: tuple[FileEdit, ...],
    commands: tuple[str, ...],
    journal: str,
    status: str,
    notes: tuple[str, ...],
) -> Result:
    changes = tuple(edit.change() for edit in edits)
    blocks: list[Block] = []
    for change in changes:
        mark = " (dry run)" if options.dry_run and change.action != "unchanged" else ""
        blocks.append(Text(f"{change.path} {change.action}{mark}", Style.GOOD))
        if options.dry_run and change.diff:
            blocks.append(Diff(change.diff))
    if options.dry_run or not host.live:
        mark = "would run" if options.dry_run else "not done yet, run on that node"
        blocks += [Text(f"{mark}: {command}", Style.COMMAND) for command in commands]
    if status:
        blocks.append(Text(status, Style.GOOD))
    if journal:
        blocks.append(Text(f"undo it with: gpunode rollback {journal}", Style.DIM))
    data = PluginService(UNIT, changes, commands, status, journal, options.dry_run)
    return Result("PluginService", data, messages=notes, blocks=tuple(blocks))
