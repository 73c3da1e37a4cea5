"""The step of `setup --kubernetes` that brings the device plugin: a service of the node, or a DaemonSet."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpunode.commands import setup_steps
from gpunode.commands.setup_steps import State, Step
from gpunode.errors import DaemonError, GpunodeError, PreconditionError, RolledBackError
from gpunode.facts.node import Node
from gpunode.facts.services import UnitState, read_unit_states
from gpunode.host import Host
from gpunode.host.journal import FileEdit
from gpunode.host.transaction import FilesChanged, UnitChanges, attempt, change_files
from gpunode.output.result import Block, Change, Diff, Progress, Result, Style, Text
from gpunode.plugin.config.settings import Settings
from gpunode.plugin.observe.status_file import OwnStatus, read_own_status
from gpunode.plugin.service import UNIT, UNIT_FILE, find_unit, hidden_program, unit_text
from gpunode.runtime.apply import engine_restart

if TYPE_CHECKING:
    from gpunode.commands.manifests import PluginOptions as Manifest
    from gpunode.kubernetes.api import Json
    from gpunode.kubernetes.client import Cluster


# The device plugin as a service of this node: its unit through the journal, and the wait for the kubelet.

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
            host,
            OPERATION,
            lambda: (wanted_edit(host, options),),
            engine_restart(host, progress),
            dry_run=options.dry_run,
        )
        return _result(host, options, (done.edits[0],), commands, done.journal, "", done.notes)
    done = _change(host, options, progress)
    if not done.journal:  # the file was right already: only the unit has to come
        _enable(host, options, progress)
    status = own_status(host)
    told = status.status if status else ""
    return _result(host, options, done.edits, commands, done.journal, told, done.notes)


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

    def write() -> FilesChanged:
        back = engine_restart(host, progress)
        return change_files(host, OPERATION, plan, back, named_units=(UNIT,), activate=activate)

    def restart(_error: BaseException) -> None:
        if restarted:
            host.run(("systemctl", "restart", UNIT), timeout=_SYSTEMCTL_SECONDS)

    return attempt(write, restart)


def _enable(host: Host, options: Options, progress: Progress) -> None:
    found = state(host)

    def enable() -> None:
        UnitChanges(enable=(UNIT,)).after_files(host)
        _wait(host, options, progress)

    def back(error: BaseException) -> None:
        _as_before(host, found)
        if isinstance(error, DaemonError):
            raise RolledBackError(f"{error}; the service is as before", hint=_LOOK) from error

    attempt(enable, back)


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


_REGULAR_ROOT = "/var/lib/kubelet"
# DevicePluginCDIDevices is on by default from then on (Kubernetes, Feature Gates); before it, by annotations
_KUBELET_WITH_CDI = (1, 29)
_PULL_SECONDS = 0.5
_PATIENCE = 15.0  # NVIDIA's plugin registers within seconds of a kubelet's start


@dataclass(frozen=True)
class Serving:
    """Who hands GPUs to the kubelet: `ours` if it is this node's service; `counts` by resource."""

    names: tuple[str, ...]
    counts: tuple[tuple[str, int], ...]
    ours: bool

    @property
    def serves(self) -> bool:
        return any(count for _, count in self.counts)

    def __str__(self) -> str:
        told = ", ".join(f"{count} {name}" for name, count in self.counts)
        return f"{told} by {' and '.join(self.names) or 'a device plugin'}"


def serving(host: Host) -> Serving:
    """As the kubelet tells it now; where nobody may be asked, as the node's files do."""
    node = Node(host)
    allocatable = node.allocatable
    known = allocatable is not None and (
        allocatable.live or not host.live
    )  # a checkpoint outlives its plugin
    counts = {name: len(ids) for name, ids in allocatable.nvidia.items()} if allocatable and known else {}
    plugins = node.plugin_processes
    names = tuple(f"{one.name} (process {one.process.pid})" for one in plugins)
    others = [one for one in plugins if one.name != "gpunode" or one.container]
    unit = state(host)
    ours = bool(unit and unit.runs) and not others
    return Serving(names, tuple(sorted(counts.items())), ours)


def arguments(host: Host, cdi: bool) -> tuple[str, ...]:
    """The options of `plugin serve` that this node takes: GPUs by CDI, and a kubelet in another place."""
    from gpunode.facts.kubelet import pod_resources_socket, root_directory

    node = Node(host)
    given: tuple[str, ...] = ()
    if cdi:
        version = node.kubelet_version
        old = bool(version) and version[:2] < _KUBELET_WITH_CDI
        given += (f"--device-list-strategy={'cdi-annotations' if old else 'cdi-cri'}",)
    if root_directory(node.kubelet) != _REGULAR_ROOT:
        given += (f"--pod-resources-socket={pod_resources_socket(node.kubelet)}",)
    return given


def _foreign(host: Host, found: Serving, patience: float, progress: Progress) -> State | None:
    """Another plugin serves, or should: a second one would only take the kubelet's registration from it.

    It gets `patience` seconds to do so: an earlier step may have restarted engine or kubelet (k3s is both).
    """
    if found.ours:
        return None
    if found.names and not found.serves and patience and host.live:
        with progress.step(
            f"waiting for {found.names[0]} to offer its GPUs to the kubelet, {patience:g} s at most"
        ):
            host.wait_until(lambda: serving(host).serves, patience, _PULL_SECONDS)
        found = serving(host)
    if found.serves:
        return State(f"{found}; it is left as it is (docs/device-plugin.md says how to switch)", right=True)
    if not found.names:
        return None
    raise PreconditionError(
        f"{found.names[0]} runs here and has offered no GPU to the kubelet",
        hint="see why: gpunode doctor; or take it away, then run this again",
        code="plugin-serves-nothing",
    )


# --- a service of the node ------------------------------------------------------------------------------


def service_step(host: Host, cdi: bool, wait: float, progress: Progress, *, dry_run: bool) -> Step:
    """The packaged unit, enabled and started. Nothing is waited for where nothing has been done."""
    patience = 0.0 if dry_run else min(wait, _PATIENCE)

    def options(dry_run: bool) -> Options:
        return Options(arguments(host, cdi), dry_run, wait)

    def look() -> State:
        other = _foreign(host, serving(host), patience, progress)
        if other is not None:
            return other
        unit = state(host)
        found, edit = find_unit(host), wanted_edit(host, options(True))
        if found.content is None:
            return State(f"{UNIT} is not there")
        if edit.action != "unchanged":
            return State(f"{UNIT} is another release's, or for other options")
        if unit is None or not unit.runs:
            return State(f"{UNIT} doesn't run")
        if not unit.at_boot:
            return State(f"{UNIT} isn't started at boot")
        told = own_status(host)
        if host.live and not serves(told):
            return State(f"the kubelet hasn't taken its GPUs{f': {told.status}' if told else ''}")
        return State(told.status if told and told.status else f"{UNIT} runs", right=True)

    return Step(
        "plugin",
        f"systemctl enable --now {UNIT}",
        look,
        lambda: run(host, options(True), progress),
        lambda: run(host, options(False), progress),
    )


# --- a DaemonSet ----------------------------------------------------------------------------------------


def daemon_set_step(
    host: Host, cluster: Cluster | None, manifest: Manifest, wait: float, progress: Progress, *, dry_run: bool
) -> Step:
    """The plugin's account and its DaemonSet, in every node's interest: it comes to all that have GPUs."""
    patience = 0.0 if dry_run else min(wait, _PATIENCE)
    command = f"gpunode manifests daemon-set --namespace {manifest.namespace}" + (
        f" --image {manifest.image}" if manifest.image else ""
    )

    def look() -> State:
        found = serving(host)
        if found.serves and found.ours:
            return State(f"{found}, {UNIT}; two plugins would be one too many", right=True)
        other = _foreign(host, found, patience, progress)
        if other is not None:
            return other
        if cluster is None:
            raise PreconditionError(
                "a DaemonSet is made through the API server, and there is no way to one from here",
                hint=f"where kubectl works: {command} | kubectl apply -f -; then run this again",
                code="no-cluster",
            )
        held = setup_steps.look(host, cluster, wanted(), progress)
        setup_steps.refuse_others(held, command)
        if all(one.existing is not None for one in held):
            return State("its DaemonSet is in the cluster, and serves no GPU here yet")
        return State("no device plugin serves here")

    def wanted() -> tuple[Json, ...]:
        return daemon_set_objects(host, manifest)

    def make(dry_run: bool) -> Result:
        assert cluster is not None  # `look` has refused
        return setup_steps.make(
            host,
            cluster,
            wanted(),
            progress,
            dry_run=dry_run,
            settle=lambda: _wait_for_pod(host, cluster, manifest.namespace, wait, progress),
        )

    return Step("plugin", f"{command} | kubectl apply -f -", look, lambda: make(True), lambda: make(False))


def daemon_set_objects(host: Host, manifest: Manifest) -> tuple[Json, ...]:
    """What `gpunode manifests` prints: the account without rights, and the DaemonSet."""
    from gpunode.commands import manifests
    from gpunode.kubernetes.manifests import rbac

    return (*rbac(manifest.namespace, ("plugin",)), *manifests.run_plugin(host, manifest).data.objects)


def _wait_for_pod(host: Host, cluster: Cluster, namespace: str, wait: float, progress: Progress) -> None:
    with progress.step("waiting for the plugin's pod on this node, and for the kubelet to take the GPUs"):
        if host.wait_until(lambda: serving(host).serves, wait, _PULL_SECONDS):
            return
    why = _why(host, cluster, namespace)
    hint = f"see its image and node: kubectl describe nodes; with more patience: --wait {2 * wait:g}"
    if "ErrImageNeverPull" in why:
        hint = (
            "no registry has gpunode's image: put it on the node, or name yours: --image (docs/kubernetes.md)"
        )
    raise DaemonError(f"the kubelet took no GPUs within {wait:g} s: {why}", hint=hint)


def _why(host: Host, cluster: Cluster, namespace: str) -> str:
    """What the plugin's pods wait for, in Kubernetes' own words."""
    from gpunode.kubernetes.manifests import labels

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
    return "no pod of the DaemonSet was made" if not pods else "its pods haven't told why"
