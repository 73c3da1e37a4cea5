"""`gpunode reset`: undo everything that gpunode changed on this node.

Each step is one of gpunode's own removals, so it is rolled back if it fails or is interrupted. A failed step
stops only the steps that need it. Files that neither the journal nor a mark of gpunode's identifies are
listed and not removed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import typer

from gpunode.cdi import refresh
from gpunode.commands import journal as journal_commands
from gpunode.commands import mig_boot, toolkit
from gpunode.commands import node as node_object
from gpunode.commands.options import (
    ContextOption,
    DryRunOption,
    KubeconfigOption,
    NodeOption,
    ServerOption,
    YesOption,
)
from gpunode.commands.session import Session, verb
from gpunode.commands.setup_steps import (
    NodeStep,
    Show,
    StepReport,
    StepResults,
    StepState,
    not_shown,
    overview,
    walk,
)
from gpunode.commands.unconfigure_runtime import REMOVAL_VARIANTS, cdi_files, unconfigure
from gpunode.errors import DaemonError, GpunodeError, PreconditionError, Unreadable
from gpunode.facts.kubelet import find_kubelet
from gpunode.facts.processes import running
from gpunode.facts.services import UnitState, read_unit_states
from gpunode.host import Host
from gpunode.host.journal import Entry, FileEdit, Journal, lock_path
from gpunode.host.transaction import (
    LOCK_SECONDS,
    begin,
    change_files,
    systemctl,
    unfinished_notes,
    uninterrupted,
)
from gpunode.kubernetes import access as cluster_access
from gpunode.kubernetes.access import Access
from gpunode.kubernetes.api import ExtraMissing, Json, NoAccess, NotFound
from gpunode.kubernetes.changes import capacity_patch, own_entries, patiently
from gpunode.output.result import (
    Block,
    Change,
    ErrorInfo,
    ExitCode,
    Progress,
    Result,
    Style,
    Table,
    Text,
    command_blocks,
)
from gpunode.packages.find import find_manager
from gpunode.packages.toolkit import PACKAGES
from gpunode.plugin.labels.sinks import own_labels, removal_patch
from gpunode.plugin.service import UNIT, UNIT_FILE, find_unit
from gpunode.runtime import find
from gpunode.runtime.engine import Request
from gpunode.runtime.removal import configured, removal_command
from gpunode.runtime.restart import engine_restart
from gpunode.runtime.workflow import edit_blocks, shown

KIND = "Reset"
OPERATION = "reset"
_COMMAND = "gpunode reset"
_DOCTOR_TIMER, _DOCTOR_SERVICE = "gpunode-doctor.timer", "gpunode-doctor.service"
# what gpunode-doctor.service writes for node_exporter, which would go on serving it
METRICS = "/var/lib/prometheus/node-exporter/gpunode.prom"
MPS_DROP_IN = f"{UNIT_FILE}.d/mps.conf"
PACKAGED_MPS_DROP_IN = "/usr/share/doc/gpunode/gpunode-device-plugin-mps.conf"


@dataclass(frozen=True)
class Left:
    """One thing that is not undone: the step's name, why, and the command for it."""

    name: str
    why: str
    command: str


@dataclass(frozen=True)
class Reset:
    """`data` of the envelope. `steps` has all steps in order, those with nothing to undo as ``right``."""

    steps: tuple[StepReport, ...]
    left: tuple[Left, ...]
    journal: str
    dry_run: bool


@dataclass(frozen=True)
class ResetRequest:
    """The command's options. `confirm` asks the user a question; see `Session.confirm`."""

    access: Access = Access()
    node: str = ""
    dry_run: bool = False
    yes: bool = False
    confirm: Callable[[str], bool] = lambda _question: False


def reset(host: Host, request: ResetRequest, progress: Progress, show: Show = not_shown) -> Result:
    """Undo all changes, or show how; kind Reset. Exit code 1 if a step failed.

    `PreconditionError` for a user other than root, for another root directory, and without confirmation.
    """
    if host.live and not host.is_root:
        raise PreconditionError("a reset needs root", hint="run it again with sudo")
    if not host.live and not request.dry_run:
        raise PreconditionError(
            "a reset is carried out only on the node itself", hint="add --dry-run, or leave out --root"
        )
    if request.access.server:
        with suppress(ImportError):  # the step reports the missing package
            cluster_access.find(host, request.access)  # a malformed URL is refused before the plan
    killed = unfinished_notes(Journal.of(host))
    if request.dry_run:
        results = walk(host, _steps(host, request, progress), show, dry_run=True, describe=_interruption)
        return _result(host, results, killed, dry_run=True)
    foreseen = _expected_reports(_steps(host, request, progress))
    if not killed and not any(report.state == "planned" for report in foreseen):
        return _result(host, StepResults(foreseen), (), dry_run=False)
    show(*_plan(foreseen, killed))
    if not request.yes and not request.confirm("Reset this node?"):
        raise PreconditionError(
            "nothing was changed: the reset was not confirmed",
            hint=f"see the plan with {_COMMAND} --dry-run, then run: {_COMMAND} --yes",
            code="not-confirmed",
        )
    notes: tuple[str, ...] = ()
    if killed:
        with begin(host, engine_restart(host, progress)) as (_, notes):
            pass  # it rolls back what a killed run left
    results = walk(host, _steps(host, request, progress), show, dry_run=False, describe=_interruption)
    return _result(host, results, notes, dry_run=False)


def _interruption(command: str, reports: Sequence[StepReport]) -> ErrorInfo:
    done = ", ".join(report.name for report in reports if report.state == "done")
    hint = f"go on with: {_COMMAND}; see what was done: gpunode journal list"
    during = f"interrupted during {command or _COMMAND}"
    if not done:
        return ErrorInfo("interrupted", f"{during}; nothing was undone")
    return ErrorInfo("interrupted", f"{during}; undone before it: {done}", hint)


def _expected_reports(steps: Iterator[NodeStep]) -> tuple[StepReport, ...]:
    """The steps to run, with reasons. A step that can't read the node's state is run too."""
    reports = []
    for step in steps:
        try:
            state = step.look()
        except GpunodeError as error:
            state = StepState(error.message)
        became = "right" if state.right else "left" if state.left else "planned"
        reports.append(StepReport(step.name, step.command, became, state.why))
    return tuple(reports)


def _plan(foreseen: Sequence[StepReport], killed: Sequence[str]) -> Iterator[Block]:
    rows = tuple((report.name, report.why) for report in foreseen if report.state == "planned")
    if rows:
        yield Text("To be undone:", Style.HEADING)
        yield Table(("STEP", "WHAT"), rows)
    for note in killed:
        yield Text(note, Style.WARN)
    yield Text("")


def _steps(host: Host, request: ResetRequest, progress: Progress) -> Iterator[NodeStep]:
    """Steps in order: users of the GPUs are undone before what they need."""
    journal = Journal.of(host)
    runtimes = tuple(
        _runtime_step(host, request, progress, key, entries) for key, entries in configured(journal).items()
    )
    needs = tuple(step.name for step in runtimes)
    yield _files_step(host, progress, _PLUGIN)
    yield from _cluster_steps(host, progress, request)
    yield _files_step(host, progress, _DOCTOR)
    yield _files_step(host, progress, _METRICS_FILE)
    yield _files_step(host, progress, _MIG)
    yield from runtimes
    for part in (_CDI, _SETTINGS):  # running containers of an engine that is still configured need these
        yield _files_step(host, progress, replace(part, needs=needs))
    yield _files_step(host, progress, _FIXES)
    yield _toolkit_step(host, progress, needs)
    yield from _driver_steps(host)


# Files and units.


@dataclass(frozen=True)
class ResetPart:
    """Files and systemd units of one kind.

    `operations` are those of the journal that wrote the files; `removals` returns the edits that remove files
    which gpunode's mark identifies. `units` are stopped and disabled. `command` does about the same manually;
    if it is empty, a rollback does.
    """

    name: str
    command: str = ""
    operations: tuple[str, ...] = ()
    removals: Callable[[Host], Sequence[FileEdit]] = lambda _host: ()
    units: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class FilesReset:
    """`data` of a step that restores or removes files; `commands` ran, or would run. `left` has the files
    that another program has changed since, with the journal's entry."""

    changes: tuple[Change, ...]
    commands: tuple[str, ...]
    left: Mapping[str, str]
    journal: str
    dry_run: bool


@dataclass(frozen=True)
class PartPlan:
    """What a part's step does: `stop` are the units that run or start at boot, `foreign` the files that
    another program changed since, with the journal's entry; entries in `undone` have none of these."""

    edits: tuple[FileEdit, ...]
    stop: tuple[str, ...]
    foreign: Mapping[str, str]
    undone: tuple[Entry, ...]

    @property
    def changed(self) -> tuple[FileEdit, ...]:
        return tuple(edit for edit in self.edits if edit.action != "unchanged")

    @property
    def removed_units(self) -> tuple[str, ...]:
        """The units with files to remove; removal stops and disables them."""
        return tuple(edit.path.rpartition("/")[2] for edit in self.changed if _is_unit_file(edit))

    @property
    def commands(self) -> tuple[str, ...]:
        """The commands beside the changes of files."""
        units = tuple(dict.fromkeys((*self.stop, *self.removed_units)))
        reload = any(edit.path.startswith("/etc/systemd/system/") for edit in self.changed)
        return (
            *((f"systemctl disable --now {' '.join(units)}",) if units else ()),
            *(("systemctl daemon-reload",) if reload else ()),
            *(("udevadm control --reload",) if _changes_rules(self.changed) else ()),
        )

    def __str__(self) -> str:
        stopped = (f"{' and '.join(self.stop)} runs or is started at boot",) if self.stop else ()
        return "; ".join((*stopped, *(edit.path for edit in self.changed)))


def _is_unit_file(edit: FileEdit) -> bool:
    directory, _, name = edit.path.rpartition("/")
    is_unit = name.endswith((".service", ".timer", ".path"))
    return edit.after is None and directory == "/etc/systemd/system" and is_unit


def _changes_rules(edits: Sequence[FileEdit]) -> bool:
    return any(edit.path.startswith("/etc/udev/") for edit in edits)


def _entries(journal: Journal, part: ResetPart) -> tuple[Entry, ...]:
    """The active entries of a part, newest first."""
    return tuple(
        entry for entry in journal.active()[::-1] if entry.undoable and entry.operation in part.operations
    )


def _journal_command(entry: str) -> str:
    return f"gpunode journal show {entry}"


def _planned(host: Host, part: ResetPart, entries: Sequence[Entry]) -> PartPlan:
    undo = Journal.of(host).plan_undo(entries)
    edits = {edit.path: edit for edit in (*undo.edits, *part.removals(host))}
    foreign = {
        file.path: entry.id
        for entry in entries
        for file in entry.files
        if file.path in undo.foreign and file.path not in edits
    }
    states = _unit_states(host, part.units)
    stop = tuple(
        unit for unit in part.units if unit in states and (states[unit].runs or states[unit].at_boot)
    )
    undone = tuple(entry for entry in entries if not any(file.path in foreign for file in entry.files))
    return PartPlan(tuple(edits.values()), stop, foreign, undone)


def _unit_states(host: Host, units: Sequence[str]) -> Mapping[str, UnitState]:
    return read_unit_states(host, units) if units else {}


def _files_step(host: Host, progress: Progress, part: ResetPart) -> NodeStep:
    journal = Journal.of(host)

    def planned() -> PartPlan:
        return _planned(host, part, _entries(journal, part))

    entries = _entries(journal, part)
    command = part.command or (f"gpunode rollback {entries[-1].id}" if entries else "")
    with suppress(GpunodeError):  # the step itself reports the error
        plan = planned()
        if plan.foreign and not plan.changed and not plan.stop:
            command = " && ".join(map(_journal_command, dict.fromkeys(plan.foreign.values())))

    def run(dry_run: bool) -> Result:
        if dry_run:
            return _files_result(planned(), "", (), dry_run=True)
        return _undo_files(host, progress, part, planned)

    return NodeStep(part.name, command, lambda: _state_of(planned()), run, part.needs)


def _state_of(plan: PartPlan) -> StepState:
    if plan.stop or plan.changed:
        return StepState(str(plan))
    if plan.foreign:
        return StepState(f"changed by another program since: {', '.join(plan.foreign)}", left=True)
    return StepState("nothing of gpunode's", right=True)


def _undo_files(host: Host, progress: Progress, part: ResetPart, planned: Callable[[], PartPlan]) -> Result:
    plan = planned()  # the present state of the units; the files are read again under the lock
    rest = tuple(unit for unit in plan.stop if unit not in plan.removed_units)
    journal = Journal.of(host)
    undoes = [entry.id for entry in plan.undone]

    def activate() -> None:
        with uninterrupted():
            if rest:
                systemctl(host, "disable", "--now", *rest)
            if "systemctl daemon-reload" in plan.commands and not plan.removed_units:
                systemctl(host, "daemon-reload")
            if _changes_rules(plan.changed) and host.which("udevadm"):
                host.run(("udevadm", "control", "--reload"), timeout=30.0)
        still = [unit for unit, state in _unit_states(host, part.units).items() if state.runs]
        if still:
            raise DaemonError(f"{still[0]} still runs", hint=f"see why: systemctl status {still[0]}")

    def done() -> None:
        for entry in plan.undone:
            journal.restore_owners(entry)
            journal.remove_created_directories(entry)

    changed = change_files(
        host,
        OPERATION,
        lambda: planned().edits,
        engine_restart(host, progress),
        context={"part": part.name, "undoes": undoes},
        named_units=plan.removed_units,
        stopped_units=rest,
        activate=activate,
        done=done,
    )
    return _files_result(plan, changed.journal, changed.notes, dry_run=False)


def _files_result(plan: PartPlan, journal: str, notes: tuple[str, ...], *, dry_run: bool) -> Result:
    changes = tuple(shown(edit, "Rollback") for edit in plan.changed)
    blocks = edit_blocks(plan.changed, "Rollback", dry_run=dry_run)
    blocks += command_blocks(plan.commands, dry_run=dry_run)
    data = FilesReset(changes, plan.commands, plan.foreign, journal, dry_run)
    return Result("FilesReset", data, messages=notes, blocks=tuple(blocks))


def _removal(host: Host, path: str, is_own: Callable[[bytes], bool]) -> Iterator[FileEdit]:
    content = host.read_bytes(path)
    if content is not None and is_own(content):
        yield FileEdit(path, content, None)


def _plugin_files(host: Host) -> Sequence[FileEdit]:
    """Our unit, and the drop-in for MPS if it still has the packaged content."""
    unit = find_unit(host)
    packaged = host.read_bytes(PACKAGED_MPS_DROP_IN)
    return (
        *((FileEdit(UNIT_FILE, unit.content, None),) if unit.ours else ()),
        *_removal(host, MPS_DROP_IN, lambda content: content == packaged),
    )


def _metrics_file(host: Host) -> Sequence[FileEdit]:
    return tuple(_removal(host, METRICS, lambda content: content.startswith(b"# HELP gpunode_")))


def _mig_unit(host: Host) -> Sequence[FileEdit]:
    return tuple(
        _removal(host, mig_boot.UNIT_FILE, lambda content: content.startswith(mig_boot.MARKER.encode()))
    )


_PLUGIN = ResetPart("plugin", f"systemctl disable --now {UNIT}", ("device-plugin",), _plugin_files, (UNIT,))
_DOCTOR = ResetPart(
    "doctor-timer", f"systemctl disable --now {_DOCTOR_TIMER}", units=(_DOCTOR_TIMER, _DOCTOR_SERVICE)
)
# a run of the service that has not ended would write the file again
_METRICS_FILE = ResetPart("doctor-metrics", f"rm {METRICS}", removals=_metrics_file, needs=(_DOCTOR.name,))
_MIG = ResetPart(
    "mig-at-boot", f"systemctl disable --now {mig_boot.UNIT}", ("mig-persist",), _mig_unit, (mig_boot.UNIT,)
)
_CDI = ResetPart("cdi", "gpunode cdi refresh --remove", ("cdi-refresh",), cdi_files, refresh.UNITS)
_SETTINGS = ResetPart("toolkit-config", "", ("toolkit-config",))
_FIXES = ResetPart("doctor-fixes", "", ("doctor-fix",))


# Container engines.


def _runtime_step(
    host: Host, request: ResetRequest, progress: Progress, key: tuple[str, str], entries: tuple[Entry, ...]
) -> NodeStep:
    """Remove the runtimes that `entries`, all of one engine, configured. Where gpunode changed a runtime that
    another tool had registered, the files are restored instead."""
    engine, config = key
    first, last = entries[0], entries[-1]
    names = tuple(dict.fromkeys(name for entry in entries for name in entry.runtime_names))
    variants = REMOVAL_VARIANTS if "nvidia" in names else ()  # these are removed with it
    removed = tuple(name for name in names if name not in variants) or ("nvidia",)
    restores = bool(first.had_runtime)
    finder = find.FINDERS.get(engine)
    missing = finder is None or finder(host, config or None) is None
    commands = [removal_command(host, engine, config, name) for name in removed]
    commands = [f"gpunode rollback {first.id}"] if restores or missing else commands
    files = tuple(dict.fromkeys(file.path for entry in entries for file in entry.files))
    change = Request(
        runtimes=(engine,),
        config=config,
        socket=last.socket,
        restart_command=last.restart_command,
        restart_hint=" && ".join(f"{command} --no-restart" for command in commands),
        yes=request.yes,
        confirm=request.confirm,
    )

    def run(dry_run: bool) -> Result:
        if missing:
            return _of_missing_engine(host, progress, f"runtime-{engine}", entries, dry_run=dry_run)
        each = replace(change, dry_run=dry_run)
        if restores:
            return journal_commands.roll_back(host, progress, first.id, each)
        results = [unconfigure(host, each, progress, name=name) for name in removed]
        if not dry_run:
            _finish(host, key)
        return replace(results[-1], blocks=tuple(block for result in results for block in result.blocks))

    return NodeStep(
        f"runtime-{engine}",
        " && ".join(commands),
        lambda: StepState(f"{', '.join(names)} in {', '.join(files)}"),
        run,
        (),
    )


def _finish(host: Host, key: tuple[str, str]) -> None:
    """The entries of an engine from which another tool had already removed the runtime are not active."""
    journal = Journal.of(host)
    with host.lock(lock_path(host), LOCK_SECONDS):
        for entry in configured(journal).get(key, ()):
            journal.mark(entry, "rolled-back")


def _of_missing_engine(
    host: Host, progress: Progress, name: str, entries: Sequence[Entry], *, dry_run: bool
) -> Result:
    """Restore the files of an engine that is no longer installed: there is no daemon to restart."""
    part = ResetPart(name)

    def planned() -> PartPlan:
        return _planned(host, part, tuple(entries[::-1]))

    if dry_run:
        return _files_result(planned(), "", (), dry_run=True)
    return _undo_files(host, progress, part, planned)


# Labels and resources of the Node object.


def _cluster_steps(host: Host, progress: Progress, request: ResetRequest) -> Iterator[NodeStep]:
    """Two requests, so two steps; the plugin must be stopped before both, because it may set labels
    itself."""

    @functools.cache
    def place() -> node_object.NodeLocation | StepState:
        return _place(host, progress, request)

    def step(
        name: str, describe: Callable[[Json], str], run: Callable[[node_object.NodeLocation], Result]
    ) -> NodeStep:
        def look() -> StepState:
            at = place()
            if isinstance(at, StepState):
                return at
            node = patiently(host, progress, lambda: at.cluster.get("Node", at.node))
            description = describe(node)
            return (
                StepState(f"node {at.node}: {description}")
                if description
                else StepState("none of gpunode's", right=True)
            )

        def act(_dry_run: bool) -> Result:
            at = place()
            assert not isinstance(at, StepState)  # `look` skips the step
            return run(at)

        return NodeStep(name, _access_command(host), look, act, (_PLUGIN.name,))

    yield step(
        "node-labels",
        lambda node: ", ".join(own_labels(node)[0] or own_labels(node)[1]),
        lambda at: _remove_labels(host, progress, at),
    )
    yield step(
        "node-resources",
        lambda node: ", ".join(f"{name}: {count}" for name, count in _advertised(node).items()),
        lambda at: _remove_resources(host, progress, at),
    )


def _access_command(host: Host) -> str:
    if not host.live:
        return _COMMAND
    kubelets = any(map(host.is_file, cluster_access.KUBELETS_OWN))
    return f"{_COMMAND} --kubeconfig {cluster_access.KUBELET if kubelets else 'PATH'}"


def _place(host: Host, progress: Progress, request: ResetRequest) -> node_object.NodeLocation | StepState:
    """The Node in its cluster, or why it wasn't queried."""
    requested = request.access != Access() or bool(request.node)
    if not requested and not _joined(host):
        return StepState("this machine is not a node of a cluster", right=True)
    if not host.live:
        return StepState("no API server is queried under --root", left=True)
    try:
        at = node_object.place(host, node_object.NodeTarget(request.access, request.node, request.dry_run))
    except (NoAccess, ExtraMissing) as error:
        if requested:
            raise
        return StepState(f"not looked at: {error.message}", left=True)
    try:
        node = patiently(host, progress, lambda: at.cluster.get("Node", at.node))
    except NotFound:
        return StepState(f"{at.cluster.server} has no Node {at.node}", right=not requested, left=requested)
    # the default kubeconfig may be another cluster's, with a node of the same name
    if at.source == "this machine's name" and not cluster_access.is_this_machine(host, node):
        reason = (
            f"Node {at.node} at {at.cluster.server} has another machine-id; if it is this one, add --node"
        )
        return StepState(reason, left=True)
    return at


def _joined(host: Host) -> bool:
    with suppress(Unreadable):
        kubelet = find_kubelet(host, running(host))
        return kubelet is not None and kubelet.joined
    return False


def _remove_labels(host: Host, progress: Progress, at: node_object.NodeLocation) -> Result:
    done = node_object.carry_out(host, progress, at, removal_patch)
    labels, lists = own_labels(done.before)
    changes = [node_object.KeyChange(key, value, None) for key, value in {**labels, **lists}.items()]
    return node_object.changed_node(at, done, changes)


def _advertised(node: Json) -> dict[str, str]:
    return own_entries(node, ("status", "capacity"))


def _remove_resources(host: Host, progress: Progress, at: node_object.NodeLocation) -> Result:
    def plan(node: Json) -> list[Json]:
        return [step for name in _advertised(node) for step in capacity_patch(node, name, None)]

    done = node_object.carry_out(host, progress, at, plan, status=True)
    removed = _advertised(done.before).items()
    changes = [node_object.KeyChange(name, count, None) for name, count in removed]
    return node_object.changed_node(at, done, changes, status=True)


# Packages.


def _toolkit_step(host: Host, progress: Progress, needs: tuple[str, ...]) -> NodeStep:
    def look() -> StepState:
        entries = Journal.of(host).entries()
        if not any(entry.operation == toolkit.OPERATION for entry in entries):
            return StepState("gpunode did not install it", right=True)
        installed = toolkit.own_installation(host, entries)
        here = find_manager(host).installed(PACKAGES)
        items = [name for name in installed.packages if here[name].installed] + list(installed.files)
        return StepState(", ".join(items)) if items else StepState("gpunode's is not installed", right=True)

    return NodeStep(
        "toolkit",
        "gpunode toolkit remove",
        look,
        lambda dry_run: toolkit.remove(host, progress, dry_run=dry_run, in_use=dry_run),
        needs,
    )


def _driver_steps(host: Host) -> Iterator[NodeStep]:
    """A driver that gpunode installed stays: its removal needs a reboot and makes the GPUs unusable."""
    for entry in Journal.of(host).entries():
        installed = entry.operation == "driver-install" and entry.state == "committed"
        if installed and isinstance(entry.packages, dict):
            new_packages = [name for name, version in entry.packages.items() if not version]
            yield from _driver_step(host, entry.id, new_packages)


def _driver_step(host: Host, entry: str, packages: Sequence[str]) -> Iterator[NodeStep]:
    state = StepState(f"the driver stays, which {entry} installed", left=True)

    with suppress(GpunodeError):  # without a package manager's answer nothing is known of the packages
        manager = find_manager(host)
        present = [name for name, state in manager.installed(packages).items() if state.installed]
        if present:
            yield NodeStep(
                "driver", manager.remove(present).text, lambda: state, lambda _dry_run: Result(KIND), ()
            )


# The report.


def _result(host: Host, results: StepResults, notes: tuple[str, ...], *, dry_run: bool) -> Result:
    failed = [step for step in results.steps if step.state in ("failed", "interrupted")]
    without_restart = {
        step.name: error.hint
        for step, result in zip(failed, results.failures, strict=True)
        for error in result.errors
        if error.code == "no-systemd" and step.name.startswith("runtime-")
    }
    leftovers = tuple(
        Left(step.name, step.why, without_restart.get(step.name, step.command))
        for step in results.steps
        if step.state in ("left", "failed", "interrupted", "waiting")
    )
    leftovers += tuple(
        Left(step.name, f"changed by another program since: {path}", _journal_command(entry))
        for step in results.steps
        if isinstance(step.result, FilesReset)
        for path, entry in step.result.left.items()
    )
    directory = Journal.of(host).directory
    data = Reset(results.steps, leftovers, directory, dry_run)
    done = [step for step in results.steps if step.state not in ("right", "left")]
    blocks: list[Block] = []
    if not done:
        blocks.append(Text("nothing to reset", Style.GOOD))
    else:
        blocks.append(overview(done))
        summary = "nothing was changed" if dry_run else f"every change is in the journal: {directory}"
        blocks.append(Text(summary, Style.DIM))
    for item in leftovers:
        blocks.append(Text(f"left: {item.name}: {item.why}", Style.WARN))
        blocks.append(Text(f"  {item.command}", Style.COMMAND))
    errors = tuple(
        error._replace(message=f"{report.name}: {error.message}")
        for report, result in zip(failed, results.failures, strict=True)
        for error in result.errors or (ErrorInfo("step-failed", report.why, report.command),)
    )
    code, status = ExitCode.OK, "warn" if leftovers else "ok"
    if results.failure is not None:
        interrupted = any(step.state == "interrupted" for step in results.steps)
        status, code = "fail", ExitCode.INTERRUPTED if interrupted else ExitCode.FAILED
        code = results.failure.exit_code if dry_run else code
    messages = (*notes, *results.messages)
    return Result(KIND, data, status, code, messages, errors, tuple(blocks))


reset_app = typer.Typer(rich_markup_mode=None)


@verb(reset_app, "reset", KIND)
def reset_node(
    session: Session,
    kubeconfig: KubeconfigOption = "",
    kube_context: ContextOption = "",
    server: ServerOption = "",
    node: NodeOption = "",
    dry_run: DryRunOption = False,
    yes: YesOption = False,
) -> Result:
    """Undo everything that gpunode changed on this node. The plan is shown first; gpunode's journal is kept.

    A driver that gpunode installed stays; the output has the command that removes it. Of the cluster, only
    labels and resources of this Node are removed; the last example deletes what serves every node:
    RuntimeClass, DaemonSet and its account, test pod. Needs root, even with --dry-run.

    sudo gpunode reset --dry-run

    sudo gpunode reset --kubeconfig kubelet

    gpunode manifests all | kubectl delete -f -
    """
    access = Access(kubeconfig, kube_context, server)
    request = ResetRequest(access, node, dry_run, yes, session.confirm)
    return reset(session.host, request, session.progress, session.show)
