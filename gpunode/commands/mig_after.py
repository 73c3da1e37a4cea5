"""After a MIG layout has changed: device files, CDI, the unit that applies it at boot, and what to tell."""

from __future__ import annotations

from collections.abc import Iterator

from gpunode.cdi.nodes import MIG_MINORS, mig_minors
from gpunode.cdi.places import NVIDIA_UNITS, STANDARD, nvidia_refreshes
from gpunode.cdi.refresh import program
from gpunode.commands import cdi_refresh, mig_show, mig_wanted
from gpunode.dataclass import dataclass
from gpunode.errors import ConfigError, GpunodeError, PreconditionError, UsageError
from gpunode.facts.daemons import systemd_runs
from gpunode.facts.mig_layout import keeper
from gpunode.facts.node import Node
from gpunode.host import Host
from gpunode.mig import persist
from gpunode.mig.layout import GpuLayout, Layouts
from gpunode.mig.plan import Device, devices_of
from gpunode.result import Block, Diff, ErrorInfo, ExitCode, Progress, Result, Style, Text
from gpunode.runtime.engine import FileEdit
from gpunode.runtime.files import FilesChanged, change_files

OPERATION = "mig-persist"


@dataclass(frozen=True)
class MigApplication:
    """`data`: the plan that was carried out, and what came of it. `devices` are the MIG devices that these
    GPUs have now, `new` those of them that weren't there before, `gone` UUIDs that no longer exist. `drained`
    is what was stopped meanwhile, `cdi` what became of the specification, `journal` undoes --persist."""

    plan: mig_show.MigPlan
    applied: bool
    devices: tuple[Device, ...] = ()
    new: tuple[Device, ...] = ()
    gone: tuple[str, ...] = ()
    drained: tuple[str, ...] = ()
    cdi: str = ""
    journal: str = ""
    dry_run: bool = False


@dataclass(frozen=True)
class Done:
    """What a run came to: the plan, its GPUs before, all layouts afterwards."""

    plan: mig_show.MigPlan
    before: tuple[GpuLayout, ...]
    after: Layouts
    changed: bool
    notes: tuple[str, ...] = ()
    drained: tuple[str, ...] = ()
    cdi: str = ""
    errors: tuple[ErrorInfo, ...] = ()


@dataclass(frozen=True)
class Settled:
    """What became of the CDI specification (empty where there is none), and what went wrong: containers get
    the devices of an old one wrong, so that is an error, though the layout holds."""

    cdi: str = ""
    notes: tuple[str, ...] = ()
    errors: tuple[ErrorInfo, ...] = ()


def settle(host: Host, progress: Progress) -> Settled:
    """Device files for new instances, and the CDI specification anew if this node has one.

    Never raises for a failure of these: the layout holds all the same.
    """
    notes = _make_nodes(host)
    try:
        cdi = _describe(host, progress)
    except GpunodeError as error:
        text = f"the layout is there, and the CDI specification is still the old one: {error.message}"
        return Settled("failed", notes, (ErrorInfo("mig-cdi", text, "mend that, then: gpunode cdi refresh"),))
    return Settled(cdi, notes)


def _make_nodes(host: Host) -> tuple[str, ...]:
    """nvidia-smi makes the files of instances on its way; the GPU operator has it do so as well."""
    numbers = mig_minors(host.read_text(MIG_MINORS) or "")
    wanted = {
        f"/dev/nvidia-caps/nvidia-cap{number}"
        for name, number in numbers.items()
        if name.startswith("gpu") and host.exists(f"/proc/driver/nvidia/capabilities/{_inside(name)}")
    }
    if all(host.exists(path) for path in wanted):
        return ()
    host.run(("nvidia-smi", "-L"), timeout=60.0)
    missing = sorted(path for path in wanted if not host.exists(path))
    return (f"{', '.join(missing)} is not there yet: nvidia-smi -L makes it",) if missing else ()


def _inside(name: str) -> str:
    """``gpu0/gi1/access`` as the driver's directory of capabilities spells it: ``gpu0/mig/gi1/access``."""
    gpu, _, rest = name.partition("/")
    return f"{gpu}/mig/{rest}"


def _describe(host: Host, progress: Progress) -> str:
    if nvidia_refreshes(host):
        service = next(unit for unit in NVIDIA_UNITS if unit.endswith(".service"))
        argv = ("systemctl", "--no-block", "start", service)
        answer = host.run(argv, timeout=30.0)
        if not answer.ok:
            raise GpunodeError(
                f"{' '.join(argv)}: {answer.stderr.strip() or f'exit code {answer.code}'}",
                hint=f"see systemctl status {service}",
                code="cdi",
            )
        return f"{service} was started"
    if host.read_bytes(STANDARD) is None:
        return ""
    result = cdi_refresh.run(host, cdi_refresh.Options(), progress)
    changes = result.data.changes
    return f"{changes[0].path} {changes[0].action}" if changes else ""


# --- at boot ---------------------------------------------------------------------------------------------


def refuse_persist(host: Host, chosen: mig_wanted.Chosen) -> None:
    """Before anything is changed: `PreconditionError` where no unit can do it, or another does already;
    `ConfigError` where one of its name is somebody else's."""
    _edits(host, chosen)
    if not systemd_runs(host):
        raise PreconditionError(
            "systemd doesn't run on this node, so it can't apply the layout at boot",
            hint="run `gpunode mig apply` from whatever starts services here, before the engines",
            code="no-systemd",
        )
    other = keeper(Node(host), besides=persist.UNIT)
    if other:
        raise PreconditionError(
            f"{other} makes the instances at boot already: the two would take turns",
            hint="leave --persist out, or disable the other one first",
            code="mig-keeper",
        )


def _unit_text(host: Host, chosen: mig_wanted.Chosen) -> str:
    try:
        return persist.unit(program(host), chosen.label)
    except ValueError as error:
        raise UsageError(
            f"{chosen.label!r} can't stand in a unit", hint="rename the configuration"
        ) from error


def _edits(host: Host, chosen: mig_wanted.Chosen) -> tuple[FileEdit, ...]:
    files = (
        (persist.CONFIG_FILE, chosen.data),
        (persist.UNIT_FILE, _unit_text(host, chosen).encode()),
    )
    found = []
    for path, data in files:
        before = host.read_bytes(path)
        ours = path != persist.UNIT_FILE or before is None or before.startswith(persist.MARKER.encode())
        if not ours:
            raise ConfigError(
                f"{path} is there and gpunode didn't make it",
                hint=f"look at it, and move it away if nobody needs it: cat {path}",
            )
        found.append(FileEdit(path, before, data))
    return tuple(found)


def persist_preview(host: Host, chosen: mig_wanted.Chosen) -> Iterator[Block]:
    """What --persist would write, or why it would not. `ConfigError` for a stranger's unit."""
    try:
        refuse_persist(host, chosen)
    except PreconditionError as error:
        yield Text(f"--persist would be refused: {error.message}; {error.hint}", Style.WARN)
    for edit in _edits(host, chosen):
        change = edit.change()
        yield Text(f"{change.path} {change.action} (dry run)")
        if change.diff:
            yield Diff(change.diff)


def finish(host: Host, chosen: mig_wanted.Chosen, done: Done, boot: bool, progress: Progress) -> Result:
    """Install the unit if asked for, and tell what came of it all."""
    notes, errors = list(done.notes), list(done.errors)
    journal, shown = "", list(_told(done))
    if boot:
        try:
            changed = _install(host, chosen, progress)
        except GpunodeError as error:
            text = f"the layout is there, and nothing applies it at the next boot: {error.message}"
            errors.append(ErrorInfo("mig-persist", text, error.hint))
        else:
            journal = changed.journal
            notes += changed.notes
            shown.append(Text(f"{persist.UNIT} applies {chosen.label} at each boot", Style.GOOD))
            if journal:
                shown.append(Text(f"undo that with: gpunode rollback {journal}", Style.DIM))
    else:
        notes += _another_at_boot(host, chosen)
    old, now = _devices(done)
    known = {one.uuid for one in old}
    here = {one.uuid for one in now}
    data = MigApplication(
        done.plan,
        applied=done.changed,
        devices=now,
        new=tuple(one for one in now if one.uuid not in known),
        gone=tuple(one.uuid for one in old if one.uuid and one.uuid not in here),
        drained=done.drained,
        cdi=done.cdi,
        journal=journal,
    )
    if not errors:
        return Result("MigApplication", data, messages=tuple(notes), blocks=tuple(shown))
    failed = (ExitCode.FAILED, tuple(notes), tuple(errors), tuple(shown))
    return Result("MigApplication", data, "fail", *failed)


def _install(host: Host, chosen: mig_wanted.Chosen, progress: Progress) -> FilesChanged:
    return change_files(
        host,
        OPERATION,
        lambda: _edits(host, chosen),
        progress,
        context={"label": chosen.label},
        named_units=(persist.UNIT,),
    )


def _another_at_boot(host: Host, chosen: mig_wanted.Chosen) -> Iterator[str]:
    """A layout that holds until the next boot, where an earlier --persist brings its own back."""
    unit = host.read_text(persist.UNIT_FILE) or ""
    if not unit.startswith(persist.MARKER):
        return
    try:
        same = unit == persist.unit(program(host), chosen.label)
    except ValueError:
        same = False
    if not same or host.read_bytes(persist.CONFIG_FILE) != chosen.data:
        yield f"{persist.UNIT} still applies an earlier layout at each boot: add --persist to have this one"


def _devices(done: Done) -> tuple[tuple[Device, ...], tuple[Device, ...]]:
    old = tuple(one for gpu in done.before for one in devices_of(gpu.instances))
    uuids = {gpu.uuid for gpu in done.before}
    now = tuple(one for gpu in done.after.gpus if gpu.uuid in uuids for one in devices_of(gpu.instances))
    return old, now


def _told(done: Done) -> Iterator[Block]:
    label = done.plan.label
    if not done.changed:
        yield Text(f"{label}: unchanged", Style.GOOD)
        return
    old, _ = _devices(done)
    known = {one.uuid for one in old}
    before = {gpu.uuid: gpu for gpu in done.before}
    for gpu in done.after.gpus:
        if gpu.uuid not in before:
            continue
        mode = f"MIG {'on' if gpu.current else 'off'}"
        waits = f", {'on' if gpu.pending else 'off'} after a reset or a reboot" if gpu.mode_pending else ""
        yield Text(f"GPU {gpu.index}  {gpu.name}  {mode}{waits}", Style.HEADING)
        for one in devices_of(gpu.instances):
            mark = "" if one.uuid in known else "  new"
            yield Text(f"  {one.profile} at {one.at}  {one.uuid}{mark}", Style.GOOD if mark else Style.PLAIN)
    if done.cdi:
        yield Text(f"CDI: {done.cdi}")
    yield Text(f"{label} applied", Style.GOOD)
