"""The steps of setup: what a step is, how steps run, and those that install the device plugin.

A step is data: its name, the command that does the same by itself, and two functions. `look` only reads.
`run` is the command itself, or its own dry run. It undoes its changes when it fails or is interrupted, so
that between steps the node is always consistent. A step is skipped where there is nothing to do, and one that
needs a failed step doesn't run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from gpunode.commands import manifests
from gpunode.commands.node import NodeChange
from gpunode.errors import DaemonError, GpunodeError, PreconditionError, RolledBackError
from gpunode.facts.kubelet import pod_resources_socket, root_directory
from gpunode.facts.node import Node
from gpunode.facts.services import UnitState, read_unit_states
from gpunode.host import Host
from gpunode.host.journal import FileEdit, Journal, rollback_command
from gpunode.host.transaction import (
    FilesChanged,
    UnitChanges,
    attempt,
    change_files,
    not_restored,
    restore_unit_states,
    systemctl,
    unit_states,
)
from gpunode.kubernetes.api import ClusterError, Json, named
from gpunode.kubernetes.changes import Held, create, delete
from gpunode.kubernetes.changes import look as look_at
from gpunode.kubernetes.manifests import PluginSet, documents, labels, rbac
from gpunode.output.result import (
    Block,
    Cell,
    Change,
    ErrorInfo,
    ExitCode,
    Progress,
    Result,
    Style,
    Table,
    Text,
    change_blocks,
)
from gpunode.plugin.config.settings import Settings
from gpunode.plugin.observe.status_file import OwnStatus, read_own_status
from gpunode.plugin.service import UNIT, UNIT_FILE, find_unit, hidden_program, unit_text
from gpunode.runtime.restart import engine_restart

if TYPE_CHECKING:
    from gpunode.kubernetes.client import Cluster

_STYLES = {
    "right": Style.DIM,
    "done": Style.GOOD,
    "planned": Style.GOOD,
    "left": Style.WARN,
    "failed": Style.BAD,
    "interrupted": Style.BAD,
    "waiting": Style.DIM,
}
# the table's word for a state of the JSON contract
_WORDS = {"right": "ok", "left": "manual", "waiting": "pending"}


Show = Callable[..., None]
"""Prints blocks while the command runs; see `Session.show`."""


class StepState(NamedTuple):
    """State of the node before a step, and the reason.

    `right`: there is nothing to do. `left`: there is, but not for gpunode; `why` has the details.
    """

    why: str
    right: bool = False
    left: bool = False


class NodeStep(NamedTuple):
    """One step; see the module. The functions raise `GpunodeError`.

    `run` is called with whether it is a dry run. `needs` names the steps without which the step doesn't run:
    every earlier one if None.
    """

    name: str
    command: str
    look: Callable[[], StepState]
    run: Callable[[bool], Result]
    needs: tuple[str, ...] | None = None


class StepReport(NamedTuple):
    """Result of a step, for programs; `result` is that command's own data, null if it didn't run.

    `state`: right (skipped), done, planned (a dry run), left (to the user), failed, interrupted, or
    waiting (for an earlier one).
    """

    name: str
    command: str
    state: str
    why: str
    seconds: float = 0.0
    result: object = None


class StepResults(NamedTuple):
    """All steps in order, and the failed or interrupted steps' own results."""

    steps: tuple[StepReport, ...]
    messages: tuple[str, ...] = ()
    failures: tuple[Result, ...] = ()

    @property
    def failure(self) -> Result | None:
        """The first failed step's own result, if one failed."""
        return next(iter(self.failures), None)

    @property
    def stopped_at(self) -> StepReport | None:
        return next((step for step in self.steps if step.state in ("failed", "interrupted")), None)

    @property
    def left(self) -> tuple[StepReport, ...]:
        return tuple(step for step in self.steps if step.state == "left")


def not_shown(*blocks: Block) -> None:
    """A `show` that prints nothing."""


def journal_ids(host: Host) -> frozenset[str]:
    """The journal's present entries; none where this user may not read it."""
    with suppress(GpunodeError):
        return frozenset(entry.id for entry in Journal.of(host).entries())
    return frozenset()


DescribeInterruption = Callable[[str, Sequence[StepReport]], ErrorInfo]
"""Returns the error after Ctrl-C during a step's command, which was rolled back; empty between two steps."""


def interruption(
    host: Host, before: frozenset[str], command: str, reports: Sequence[StepReport]
) -> ErrorInfo:
    """Changes that remain after Ctrl-C during set-up, and the commands that undo them: files, of which the
    journal held `before` at the start, and objects in the cluster."""
    command = command or "set-up"
    changed: list[str] = []
    undo: list[str] = []
    for report in reversed(reports):
        data = report.result if report.state == "done" else None
        if isinstance(data, ClusterObjects):
            changed += [change.object for change in data.changes if change.action == "created"]
            undo += data.undo
        elif isinstance(data, NodeChange) and data.undo:
            changed.append(f"Node {data.node}")
            undo.append(data.undo)
    with suppress(GpunodeError):
        entries = [entry for entry in Journal.of(host).active() if entry.id not in before]
        files = dict.fromkeys(file.path for entry in entries for file in entry.files)
        undo += [rollback_command(host, entry.id) for entry in reversed(entries) if entry.undoable]
        if any(entry.of_packages for entry in entries):
            changed.append("installed packages")
            undo.append("gpunode toolkit remove")
        changed = [*files, *changed]
    if not changed:
        return ErrorInfo("interrupted", f"interrupted during {command}; nothing was left changed")
    return ErrorInfo(
        "interrupted",
        f"interrupted during {command}; changed: {', '.join(changed)}",
        f"undo it with: {' && '.join(undo)}",
    )


def walk(
    host: Host,
    steps: Iterable[NodeStep],
    show: Show = not_shown,
    *,
    dry_run: bool,
    problems: bool = True,
    describe: DescribeInterruption | None = None,
) -> StepResults:
    """Run the steps and show each when it is done; with `problems` also the error that stopped it. A dry run
    shows every step's plan, including those after one that would fail. `describe` returns the error of an
    interruption, by default with the commands that undo the finished steps."""
    describe = describe or partial(interruption, host, journal_ids(host))
    reports: list[StepReport] = []
    messages: dict[str, None] = {}
    failures: list[Result] = []
    try:
        for step in steps:
            blocker = "" if dry_run else _blocker(step, reports)
            if blocker and not (step.needs is not None and _is_right(step)):
                reports.append(StepReport(step.name, step.command, "waiting", f"waits for {blocker}"))
                continue
            report, result = _run_step(host, step, show, dry_run, describe, reports)
            reports.append(report)
            if result is not None:
                errors = result.errors if problems else ()
                show(*result.blocks, *(Text(info.message, Style.BAD) for info in errors), Text(""))
            messages |= dict.fromkeys(result.messages if result is not None else ())
            if result is not None and report.state in ("failed", "interrupted"):
                failures.append(result)
    except KeyboardInterrupt:  # between two steps, or while a step's result is printed
        info = describe("", reports)
        raise GpunodeError(
            info.message, hint=info.hint, code=info.code, exit_code=ExitCode.INTERRUPTED
        ) from None
    return StepResults(tuple(reports), tuple(messages), tuple(failures))


def _run_step(
    host: Host,
    step: NodeStep,
    show: Show,
    dry_run: bool,
    describe: DescribeInterruption,
    reports: Sequence[StepReport],
) -> tuple[StepReport, Result | None]:
    """Run one step. An expected failure becomes its result, so that the report still has the earlier
    steps."""
    started, heading = host.monotonic(), [Text(f"$ {step.command}", Style.COMMAND)]
    try:
        state = step.look()
        if state.right or state.left:
            return StepReport(step.name, step.command, "right" if state.right else "left", state.why), None
        show(heading.pop())
        result = step.run(dry_run)
        good = result.exit_code == ExitCode.OK
        became = ("planned" if dry_run else "done") if good else "failed"
        reason = state.why if good else next((error.message for error in result.errors), "see what it says")
    except GpunodeError as error:
        result = Result("Error", None, "error", error.exit_code, errors=(error.info(),))
        became, reason = "failed", error.message
    except KeyboardInterrupt:
        info = describe(step.command, reports)
        result = Result("Error", None, "error", ExitCode.INTERRUPTED, errors=(info,))
        became, reason = "interrupted", "interrupted; this step was rolled back"
    if heading:  # it couldn't read the node's state
        show(*heading)
    seconds = round(host.monotonic() - started, 2)
    return StepReport(step.name, step.command, became, reason, seconds, result.data), result


def _is_right(step: NodeStep) -> bool:
    """Whether there is nothing to do; False if the step can't read the node's state."""
    with suppress(GpunodeError):
        return step.look().right
    return False


def _blocker(step: NodeStep, reports: Sequence[StepReport]) -> str:
    """The first earlier step that failed and that this one needs; empty if there is none."""
    for report in reports:
        needed = step.needs is None or report.name in step.needs
        if report.state == "interrupted" or (needed and report.state in ("failed", "waiting")):
            return report.name
    return ""


def overview(steps: Sequence[StepReport]) -> Table:
    """Every step with its result and the reason."""
    rows = tuple(
        (step.name, Cell(_WORDS.get(step.state, step.state), _STYLES[step.state]), step.why) for step in steps
    )
    return Table(("STEP", "STATE", "REASON"), rows)


# Objects that a step of `setup --kubernetes` creates in the cluster: a RuntimeClass, the plugin's DaemonSet.


class ObjectChange(NamedTuple):
    """One object, such as ``DaemonSet kube-system/gpunode-device-plugin``; `action`: created or unchanged."""

    object: str
    action: str


class ClusterObjects(NamedTuple):
    """`data` of the envelope. `undo` are command lines that delete what was created."""

    server: str
    source: str
    changes: tuple[ObjectChange, ...]
    undo: tuple[str, ...]
    dry_run: bool


def refuse_others(objects: Sequence[Held], command: str) -> None:
    """`ClusterError` for an existing object that differs: it is left unchanged."""
    for held in objects:
        if held.differs:
            raise ClusterError(
                f"{named(held.desired)} is in the cluster and differs at {', '.join(held.differs[:3])};"
                " it was left alone",
                hint=f"look at it, then replace it if that is meant: {command} | kubectl apply -f -",
                code="kubernetes-differs",
            )


def make_objects(
    host: Host,
    cluster: Cluster,
    desired: Sequence[Json],
    progress: Progress,
    *,
    dry_run: bool,
    settle: Callable[[], None] = lambda: None,
) -> Result:
    """Create those that are missing, all or none; kind ClusterObjects. If `settle` raises, they are deleted.

    `ClusterError`; `RolledBackError` if `settle` fails after objects were created.
    """
    objects = look_at(host, cluster, desired, progress)
    missing = [held.desired for held in objects if held.existing is None]
    if not dry_run:
        created: list[Json] = []

        def make() -> None:
            with progress.step(f"making {len(missing)} objects at {cluster.server}"):
                created.extend(create(cluster, missing))
            settle()

        attempt(make, lambda error: _delete_again(cluster, created, error))
    actions = tuple(
        ObjectChange(named(held.desired), "created" if held.existing is None else "unchanged")
        for held in objects
    )
    undo = tuple(_undo(item) for item in reversed(missing))
    data = ClusterObjects(cluster.server, cluster.source, actions, undo, dry_run)
    return Result("ClusterObjects", data, blocks=_blocks(data, missing))


def _delete_again(cluster: Cluster, created: Sequence[Json], error: BaseException) -> None:
    if not created:
        return  # `create` has deleted the objects that it created
    remaining = delete(cluster, created)
    if remaining:
        commands = [_undo(item) for item in reversed(created) if named(item) in remaining]
        message = str(error) if isinstance(error, GpunodeError) else "interrupted"
        raise ClusterError(
            f"{message}; these were created and could not be deleted: {', '.join(remaining)}",
            hint=f"delete them: {' && '.join(commands)}",
        ) from error
    if isinstance(error, GpunodeError):
        raise RolledBackError(f"{error}; what was made is deleted again", hint=error.hint) from error


def _undo(item: Json) -> str:
    metadata = item["metadata"]
    place = f" --namespace {metadata['namespace']}" if metadata.get("namespace") else ""
    return f"kubectl delete {str(item['kind']).lower()} {metadata['name']}{place}"


def _blocks(data: ClusterObjects, missing: Sequence[Json]) -> tuple[Block, ...]:
    mark = " (dry run)" if data.dry_run else ""
    blocks: list[Block] = [
        Text(f"{change.object} {change.action}{mark if change.action == 'created' else ''}", Style.GOOD)
        for change in data.changes
    ]
    if data.dry_run:
        blocks += [Text(line, Style.COMMAND) for line in documents(missing).splitlines()]
    else:
        blocks += [Text(f"undo it with: {command}", Style.DIM) for command in data.undo]
    return tuple(blocks)


# The device plugin as a service of this node: its unit, through the journal, and the wait for the kubelet.

OPERATION = "device-plugin"
_LOOK = f"journalctl -u {UNIT} -n 20, and gpunode plugin status"


class PluginService(NamedTuple):
    """`data` of the envelope. `status` is the plugin's own report, empty if it wasn't started."""

    unit: str
    changes: tuple[Change, ...]
    commands: tuple[str, ...]
    status: str
    journal: str
    dry_run: bool


def state(host: Host) -> UnitState | None:
    """The unit's state in systemd; None if systemd doesn't report it."""
    return read_unit_states(host).get(UNIT)


def unit_edit(host: Host, arguments: Sequence[str]) -> FileEdit:
    """The desired unit file, with these options of `plugin serve`. One that gpunode didn't write stays
    unchanged.
    """
    unit_file = find_unit(host)
    own = unit_file.content is None or unit_file.ours
    return FileEdit(
        UNIT_FILE, unit_file.content, unit_text(host, tuple(arguments)).encode() if own else unit_file.content
    )


def own_status(host: Host) -> OwnStatus | None:
    """Our plugin's own status report; None if it can't be read or no plugin has served."""
    with suppress(GpunodeError):
        return read_own_status(host, Settings.state_dir)
    return None


def bring_service(
    host: Host, arguments: Sequence[str], wait: float, progress: Progress, *, dry_run: bool
) -> Result:
    """Write the unit, enable and start it, and wait until the kubelet has registered the GPUs; kind
    PluginService.

    `arguments` are options of `plugin serve`; `wait`: seconds for the kubelet to register the GPUs.
    `PreconditionError` where it can't run; `RolledBackError` if the kubelet doesn't register them: the unit
    is then restored.
    """
    _refuse(host)
    commands = _commands(host, unit_edit(host, arguments))
    if dry_run or not host.live:
        done = change_files(
            host,
            OPERATION,
            lambda: (unit_edit(host, arguments),),
            engine_restart(host, progress),
            dry_run=dry_run,
        )
        return _result(host, done, commands, "", dry_run=dry_run)
    done = _change(host, arguments, wait, progress)
    if not done.journal:  # the file needed no change: only the unit must be started
        _enable(host, wait, progress)
    status = own_status(host)
    return _result(host, done, commands, status.status if status else "", dry_run=False)


def _refuse(host: Host) -> None:
    if not host.systemd_runs():
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
    unit = state(host)
    return unit is not None and unit.runs


def _commands(host: Host, edit: FileEdit) -> tuple[str, ...]:
    """Commands that run together with writing the file; a running plugin is restarted if its unit changes."""
    if edit.action == "unchanged":
        return (f"systemctl enable --now {UNIT}",)
    restart = (f"systemctl restart {UNIT}",) if _runs(host) else ()
    return ("systemctl daemon-reload", f"systemctl enable --now {UNIT}", *restart)


def _change(host: Host, arguments: Sequence[str], wait: float, progress: Progress) -> FilesChanged:
    """Write and start; a failure undoes both, and a plugin that ran before runs again with its old unit."""
    ran = _runs(host)
    restarted: list[str] = []

    def activate() -> None:
        if ran:  # `enable --now` has not restarted it
            restarted.append(UNIT)
            systemctl(host, "restart", UNIT)
        _wait(host, wait, progress)

    def plan() -> tuple[FileEdit, ...]:
        return (unit_edit(host, arguments),)

    def write() -> FilesChanged:
        restarter = engine_restart(host, progress)
        return change_files(host, OPERATION, plan, restarter, named_units=(UNIT,), activate=activate)

    def restart(error: BaseException) -> None:
        if restarted:
            _or_not_restored(error, lambda: systemctl(host, "restart", UNIT))

    return attempt(write, restart)


def _or_not_restored(error: BaseException, undo: Callable[[], None]) -> None:
    try:
        undo()
    except DaemonError as problem:
        raise not_restored(error, (problem,)) from error


def _enable(host: Host, wait: float, progress: Progress) -> None:
    before = unit_states(host, (UNIT,))

    def enable() -> None:
        UnitChanges(enable=(UNIT,)).after_files(host)
        _wait(host, wait, progress)

    def roll_back(error: BaseException) -> None:
        _or_not_restored(error, lambda: restore_unit_states(host, before))
        if isinstance(error, DaemonError):
            raise RolledBackError(f"{error}; the service is as before", hint=_LOOK) from error

    attempt(enable, roll_back)


def _wait(host: Host, wait: float, progress: Progress) -> None:
    """Until the plugin says that the kubelet watches what it offers. `DaemonError` says how far it came."""
    with progress.step("waiting for the kubelet to take the GPUs"):
        if host.wait_until(lambda: serves(own_status(host)), wait, 0.2):
            return
    own = own_status(host)
    status = f"it says: {own.status}" if own and own.current and own.status else "it says nothing"
    raise DaemonError(
        f"the device plugin runs, but the kubelet took no GPUs within {wait:g} s; {status}",
        hint=_LOOK,
    )


def serves(status: OwnStatus | None) -> bool:
    """Whether our plugin serves GPUs, and the kubelet watches all that it offers."""
    return status is not None and status.state == "serving" and status.ready


def _result(
    host: Host, done: FilesChanged, commands: tuple[str, ...], status: str, *, dry_run: bool
) -> Result:
    blocks = change_blocks(done.changes, dry_run=dry_run)
    if dry_run or not host.live:
        mark = "would run" if dry_run else "not done yet, run on that node"
        blocks += [Text(f"{mark}: {command}", Style.COMMAND) for command in commands]
    if status:
        blocks.append(Text(status, Style.GOOD))
    if done.journal:
        blocks.append(Text(f"undo it with: {rollback_command(host, done.journal)}", Style.DIM))
    data = PluginService(UNIT, done.changes, commands, status, done.journal, dry_run)
    return Result("PluginService", data, messages=done.notes, blocks=tuple(blocks))


_REGULAR_ROOT = "/var/lib/kubelet"
# DevicePluginCDIDevices is on by default from then on (Kubernetes, Feature Gates); before it, by annotations
_KUBELET_WITH_CDI = (1, 29)
_PULL_SECONDS = 0.5
_PATIENCE = 15.0  # NVIDIA's plugin registers within seconds of a kubelet's start


class AdvertisedGpus(NamedTuple):
    """Who hands GPUs to the kubelet: `ours` if it is this node's service; `counts` by resource."""

    names: tuple[str, ...]
    counts: tuple[tuple[str, int], ...]
    ours: bool

    @property
    def serves(self) -> bool:
        return any(count for _, count in self.counts)

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in self.counts)
        return f"{counts} by {' and '.join(self.names) or 'a device plugin'}"


def serving(host: Host) -> AdvertisedGpus:
    """As the kubelet reports it now; where it can't be queried, as the node's files say."""
    node = Node(host)
    allocatable = node.allocatable
    reliable = allocatable is not None and (
        allocatable.live or not host.live
    )  # a checkpoint outlives its plugin
    counts = {name: len(ids) for name, ids in allocatable.nvidia.items()} if allocatable and reliable else {}
    plugins = node.plugin_processes
    names = tuple(f"{plugin.name} (process {plugin.process.pid})" for plugin in plugins)
    others = [plugin for plugin in plugins if plugin.name != "gpunode" or plugin.container]
    unit = state(host)
    is_own = bool(unit and unit.runs) and not others
    return AdvertisedGpus(names, tuple(sorted(counts.items())), is_own)


def arguments(host: Host, cdi: bool) -> tuple[str, ...]:
    """The options of `plugin serve` that this node takes: GPUs by CDI, and a kubelet in another place."""
    node = Node(host)
    options: tuple[str, ...] = ()
    if cdi:
        version = node.kubelet_version
        old = bool(version) and version[:2] < _KUBELET_WITH_CDI
        options += (f"--device-list-strategy={'cdi-annotations' if old else 'cdi-cri'}",)
    if root_directory(node.kubelet) != _REGULAR_ROOT:
        options += (f"--pod-resources-socket={pod_resources_socket(node.kubelet)}",)
    return options


def _other_plugin(
    host: Host, current: AdvertisedGpus, patience: float, progress: Progress
) -> StepState | None:
    """Another plugin serves, or should: a second one would only take the kubelet's registration from it.

    It gets `patience` seconds to do so: an earlier step may have restarted engine or kubelet (k3s is both).
    """
    if current.ours:
        return None
    if current.names and not current.serves and patience and host.live:
        with progress.step(
            f"waiting for {current.names[0]} to offer its GPUs to the kubelet, {patience:g} s at most"
        ):
            host.wait_until(lambda: serving(host).serves, patience, _PULL_SECONDS)
        current = serving(host)
    if current.serves:
        return StepState(f"{current} and stays (docs/device-plugin.md says how to replace it)", right=True)
    if not current.names:
        return None
    raise PreconditionError(
        f"{current.names[0]} runs here and has offered no GPU to the kubelet",
        hint="see why: gpunode doctor; or take it away, then run this again",
        code="plugin-serves-nothing",
    )


# --- a service of the node ------------------------------------------------------------------------------


def service_step(host: Host, cdi: bool, wait: float, progress: Progress, *, dry_run: bool) -> NodeStep:
    """The packaged unit, enabled and started. Without a change there is nothing to wait for."""
    patience = 0.0 if dry_run else min(wait, _PATIENCE)

    def bring(dry_run: bool) -> Result:
        return bring_service(host, arguments(host, cdi), wait, progress, dry_run=dry_run)

    def look() -> StepState:
        other_state = _other_plugin(host, serving(host), patience, progress)
        if other_state is not None:
            return other_state
        unit = state(host)
        unit_file, edit = find_unit(host), unit_edit(host, arguments(host, cdi))
        if unit_file.content is None:
            return StepState(f"{UNIT} doesn't exist")
        if edit.action != "unchanged":
            return StepState(f"{UNIT} is of another release or has other options")
        if unit is None or not unit.runs:
            return StepState(f"{UNIT} doesn't run")
        if not unit.at_boot:
            return StepState(f"{UNIT} isn't started at boot")
        own = own_status(host)
        if host.live and not serves(own):
            return StepState(f"the kubelet hasn't registered its GPUs{f': {own.status}' if own else ''}")
        return StepState(own.status if own and own.status else f"{UNIT} runs", right=True)

    return NodeStep("plugin", f"systemctl enable --now {UNIT}", look, bring)


# --- a DaemonSet ----------------------------------------------------------------------------------------


def daemon_set_step(
    host: Host,
    cluster: Cluster | None,
    plugin: Callable[[], PluginSet],
    image: str,
    wait: float,
    progress: Progress,
    *,
    dry_run: bool,
) -> NodeStep:
    """The plugin's service account and its DaemonSet, which runs on every node with GPUs."""
    patience = 0.0 if dry_run else min(wait, _PATIENCE)
    command = f"gpunode manifests daemon-set --namespace {manifests.OWN_NAMESPACE}"
    command += f" --image {image}" if image else ""

    def look() -> StepState:
        current = serving(host)
        if current.serves and current.ours:
            return StepState(f"{current}, {UNIT}; only one device plugin may run", right=True)
        other_state = _other_plugin(host, current, patience, progress)
        if other_state is not None:
            return other_state
        if cluster is None:
            raise PreconditionError(
                "a DaemonSet is made through the API server, and there is no way to one from here",
                hint=f"where kubectl works: {command} | kubectl apply -f -; then run this again",
                code="no-cluster",
            )
        objects = look_at(host, cluster, desired(), progress)
        refuse_others(objects, command)
        if all(held.existing is not None for held in objects):
            return StepState("its DaemonSet is in the cluster, but serves no GPU of this node yet")
        return StepState("no device plugin serves this node")

    def desired() -> tuple[Json, ...]:
        return daemon_set_objects(plugin())

    def make(dry_run: bool) -> Result:
        assert cluster is not None  # `look` has skipped the step
        notes = manifests.missing_image(plugin().image)
        for note in () if dry_run else notes:
            progress.note(note)
        result = make_objects(
            host,
            cluster,
            desired(),
            progress,
            dry_run=dry_run,
            settle=lambda: _wait_for_pod(host, cluster, manifests.OWN_NAMESPACE, wait, progress),
        )
        return replace(result, messages=notes) if dry_run else result

    return NodeStep("plugin", f"{command} | kubectl apply -f -", look, make)


def daemon_set_objects(plugin: PluginSet) -> tuple[Json, ...]:
    """What `gpunode manifests` prints: the account without rights, and the DaemonSet."""
    return (*rbac(plugin.namespace, ("plugin",)), *manifests.plugin_objects(plugin))


def _wait_for_pod(host: Host, cluster: Cluster, namespace: str, wait: float, progress: Progress) -> None:
    with progress.step("waiting for the plugin's pod on this node, and for the kubelet to take the GPUs"):
        if host.wait_until(lambda: serving(host).serves, wait, _PULL_SECONDS):
            return
    reason = _pod_reasons(cluster, namespace)
    hint = f"see its image and node: kubectl describe nodes; with more patience: --wait {2 * wait:g}s"
    if "ErrImageNeverPull" in reason:
        hint = manifests.IMAGE_HINT
    raise DaemonError(f"the kubelet took no GPUs within {wait:g} s: {reason}", hint=hint)


def _pod_reasons(cluster: Cluster, namespace: str) -> str:
    """What the plugin's pods wait for, in the words of Kubernetes."""
    try:
        pods = cluster.list("Pod", namespace, labels=labels("device-plugin"))
    except GpunodeError as error:
        return error.message
    reasons = {
        f"{waiting.get('reason', '')} {waiting.get('message', '')}".strip()
        for pod in pods
        for status in (pod.get("status") or {}).get("containerStatuses") or ()
        for waiting in [(status.get("state") or {}).get("waiting") or {}]
        if waiting
    }
    if reasons:
        return "; ".join(sorted(reasons))[:300]
    return "no pod of the DaemonSet was made" if not pods else "its pods report no reason"
