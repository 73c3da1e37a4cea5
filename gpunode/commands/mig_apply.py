"""`gpunode mig apply`: change the GPUs to the layout of a configuration, or leave them as they were."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from gpunode.cdi.build import Form, Sources
from gpunode.cdi.locations import NVIDIA_UNITS, STANDARD, nvidia_refreshes
from gpunode.cdi.nodes import MIG_MINORS, mig_minors
from gpunode.commands import cdi, mig_boot, mig_plan
from gpunode.commands.mig_plan import LayoutRequest
from gpunode.errors import GpunodeError, PreconditionError
from gpunode.facts.mig import manager
from gpunode.facts.node import Node
from gpunode.host import Host
from gpunode.host.journal import lock_path
from gpunode.host.transaction import LOCK_SECONDS, attempt, uninterrupted
from gpunode.kubernetes.access import Access
from gpunode.mig import node_labels, unfinished
from gpunode.mig.apply import MigNotRestoredError, Tools, carry_out
from gpunode.mig.model import GpuLayout, Layouts
from gpunode.mig.plan import PresentDevice, devices_of
from gpunode.mig.session import MigSession
from gpunode.mig.users import GpusInUseError, NvmlPause, Obstacle, StoppedUsers, bring_back, drain
from gpunode.output.result import Block, Change, ErrorInfo, ExitCode, Progress, Result, Style, Text

# After a MIG layout has changed: device files, CDI, the unit that applies it at boot, and the report.


class MigApplication(NamedTuple):
    """`data`: the plan that was applied, and its result. `devices` are the MIG devices that these GPUs have
    now, `new` those of them that didn't exist before, `gone` UUIDs that no longer exist. `drained` are the
    services and pods stopped meanwhile, `cdi` is what happened to the specification, `changes` are the files
    of --persist, and `journal` undoes them."""

    plan: mig_plan.MigPlan
    applied: bool
    devices: tuple[PresentDevice, ...] = ()
    new: tuple[PresentDevice, ...] = ()
    gone: tuple[str, ...] = ()
    drained: tuple[str, ...] = ()
    cdi: str = ""
    changes: tuple[Change, ...] = ()
    journal: str = ""
    dry_run: bool = False


class CdiUpdate(NamedTuple):
    """What happened to the CDI specification (empty where there is none), and what failed: with an outdated
    one containers get the wrong devices, so that is an error, although the layout was applied."""

    cdi: str = ""
    notes: tuple[str, ...] = ()
    errors: tuple[ErrorInfo, ...] = ()


def settle(host: Host, progress: Progress) -> CdiUpdate:
    """Device files for new instances, and a new CDI specification if this node has one.

    Never raises for a failure of these, because the layout was applied.
    """
    notes = _make_nodes(host)
    try:
        cdi = _describe(host, progress)
    except GpunodeError as error:
        text = f"the layout was applied, but the CDI specification was not updated: {error.message}"
        return CdiUpdate(
            "failed", notes, (ErrorInfo("mig-cdi", text, "fix that, then run: gpunode cdi refresh"),)
        )
    return CdiUpdate(cdi, notes)


def _make_nodes(host: Host) -> tuple[str, ...]:
    """nvidia-smi creates the device files of instances as a side effect; the GPU operator uses it for that
    too."""
    numbers = mig_minors(host.read_text(MIG_MINORS) or "")
    desired = {
        f"/dev/nvidia-caps/nvidia-cap{number}"
        for name, number in numbers.items()
        # ``gpu0/gi1/access`` is ``gpu0/mig/gi1/access`` in the driver's directory of capabilities
        if name.startswith("gpu")
        and host.exists(f"/proc/driver/nvidia/capabilities/{name.replace('/', '/mig/', 1)}")
    }
    if all(host.exists(path) for path in desired):
        return ()
    host.run(("nvidia-smi", "-L"), timeout=60.0)
    missing = sorted(path for path in desired if not host.exists(path))
    return (f"{', '.join(missing)} does not exist yet: nvidia-smi -L creates it",) if missing else ()


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
    result = cdi.refresh_specification(host, Sources(), Form(), progress)
    changes = result.data.changes
    return f"{changes[0].path} {changes[0].action}" if changes else ""


def applied(
    plan: mig_plan.MigPlan,
    before: Sequence[GpuLayout],
    after: Layouts,
    notes: Sequence[str] = (),
    drained: Sequence[str] = (),
    update: CdiUpdate | None = None,
) -> Result:
    """The result of a run that changed the GPUs `before`; without an `update` there was nothing to change."""
    old = [device for gpu in before for device in devices_of(gpu.instances)]
    old_uuids, uuids = {device.uuid for device in old}, {gpu.uuid for gpu in before}
    gpus = [gpu for gpu in after.gpus if gpu.uuid in uuids]
    now = tuple(device for gpu in gpus for device in devices_of(gpu.instances))
    here = {device.uuid for device in now}
    data = MigApplication(
        plan,
        applied=update is not None,
        devices=now,
        new=tuple(device for device in now if device.uuid not in old_uuids),
        gone=tuple(device.uuid for device in old if device.uuid and device.uuid not in here),
        drained=tuple(drained),
        cdi=update.cdi if update else "",
    )
    notes, errors = (*notes, *(update.notes if update else ())), update.errors if update else ()
    failed = ("fail", ExitCode.FAILED) if errors else ("ok", ExitCode.OK)
    return Result(KIND, data, *failed, notes, errors, tuple(_changes(data, gpus)))


def _changes(data: MigApplication, gpus: Sequence[GpuLayout]) -> Iterator[Block]:
    label = data.plan.label
    if not data.applied:
        yield Text(f"{label}: unchanged", Style.GOOD)
        return
    for gpu in gpus:
        mode = f"MIG {'on' if gpu.current else 'off'}"
        waits = f", {'on' if gpu.pending else 'off'} after a reset or a reboot" if gpu.mode_pending else ""
        yield Text(f"GPU {gpu.index}  {gpu.name}  {mode}{waits}", Style.HEADING)
        for device in devices_of(gpu.instances):
            mark, style = ("  new", Style.GOOD) if device in data.new else ("", Style.PLAIN)
            yield Text(f"  {device.profile} at {device.at}  {device.uuid}{mark}", style)
    if data.cdi:
        yield Text(f"CDI: {data.cdi}")
    yield Text(f"{label} applied", Style.GOOD)


def persist(
    host: Host, selection: mig_plan.ConfigSelection, result: Result, boot: bool, progress: Progress
) -> Result:
    """Install the unit if requested; the result with what happened."""
    if not boot:
        notes = mig_boot.another_at_boot(host, selection)
        return replace(result, messages=(*result.messages, *notes))
    try:
        changed = mig_boot.install(host, selection, progress)
    except GpunodeError as error:
        text = f"the layout was applied, but not set up to be applied at boot: {error.message}"
        errors = (*result.errors, ErrorInfo("mig-persist", text, error.hint))
        return replace(result, status="fail", exit_code=ExitCode.FAILED, errors=errors)
    blocks = [Text(f"{mig_boot.UNIT} applies {selection.label} at each boot", Style.GOOD)]
    if changed.journal:
        blocks.append(Text(f"undo that with: gpunode rollback {changed.journal}", Style.DIM))
    return replace(
        result,
        data=result.data._replace(changes=changed.changes, journal=changed.journal),
        messages=(*result.messages, *changed.notes),
        blocks=(*result.blocks, *blocks),
    )


KIND = "MigApplication"
_RESET_SECONDS = 300.0


def once(
    host: Host,
    request: LayoutRequest,
    labels: MigLabels,
    progress: Progress,
    shielded: Callable[[], AbstractContextManager[None]] = uninterrupted,
) -> Result:
    """Apply, and report the result with these labels; kind MigApplication. If nothing is to change,
    nothing is touched. `shielded` defers signals.

    `PreconditionError` (exit 3) before anything is changed: not root, GPU in use, not possible on this node.
    `RolledBackError` (exit 4) if it failed and the previous layout was restored, `MigNotRestoredError` (exit
    1) if that failed as well.
    """
    require(host)
    unfinished_run = unfinished.load_unfinished(host)
    if (
        unfinished_run is not None
        and unfinished_run.drained.restart_commands
        and not unfinished.lives(host, unfinished_run)
    ):
        progress.note(
            f"{mig_plan.begun(unfinished_run)} has left stopped: {', '.join(unfinished_run.drained.names)}"
        )
    with labels.refusals(request.selected_config):
        selection = mig_plan.choose(request, labels.asked)
        labels.begin(selection.label)
        if request.persist:
            mig_boot.refuse_persist(host, selection)
        with host.lock(lock_path(host), LOCK_SECONDS):
            done = _Run(host, request, selection, labels, progress, shielded).done()
    return persist(host, selection, done, request.persist, progress)


def require(host: Host) -> None:
    """`PreconditionError` where MIG can't be changed at all."""
    if not host.live:
        raise PreconditionError(
            "MIG is only changed on the node itself", hint="leave --root out, or add --dry-run"
        )
    if not host.is_root:
        raise PreconditionError("changing MIG needs root", hint="run it again with sudo")


def _continuing_arguments(request: LayoutRequest, labels: MigLabels, label: str) -> tuple[str, ...]:
    """The arguments that continue this run if it is killed."""
    file = request.config_file if request.config_file == "-" else str(Path(request.config_file).absolute())
    flags = {
        "--mode-only": request.mode_only,
        "--skip-reset": request.skip_reset,
        "--persist": request.persist,
        "--node-labels": labels.asked_for and not labels.words,
    }
    return (
        *("mig", "apply", "-f", file, "-c", label),
        *(flag for flag, on in flags.items() if on),
        *(part for word in request.drain or () for part in ("--drain", word)),
        *labels.words,
    )


def dry_run(host: Host, request: LayoutRequest, labels: MigLabels, progress: Progress) -> Result:
    """What `once` would do."""
    selection = mig_plan.choose(request, labels.asked)
    node_plan, busy = mig_plan.look_and_plan(host, selection, progress)
    notes = mig_plan.all_notes(host, node_plan)
    plan = mig_plan.data_of(selection.path, selection.label, node_plan, busy)
    blocks: list[Block] = [
        *mig_plan.blocks(plan, busy),
        *(Text(f"would stop {word}") for word in request.drain or ()),
    ]
    unfinished_run = unfinished.load_unfinished(host) if host.is_root else None
    if unfinished_run is not None and not unfinished.lives(host, unfinished_run):
        blocks += [
            Text(f"would start {name} again") for name in unfinished_run.drained._replace(pids=()).names
        ]
    changes: tuple[Change, ...] = ()
    if request.persist:
        changes = tuple(edit.change() for edit in mig_boot.edits(host, selection))
        blocks += mig_boot.persist_preview(host, selection)
    data = MigApplication(plan, applied=False, changes=changes, dry_run=True)
    return Result(KIND, data, messages=notes, blocks=tuple(blocks))


class _Run:
    """One run, under the node's lock."""

    def __init__(
        self,
        host: Host,
        request: LayoutRequest,
        selection: mig_plan.ConfigSelection,
        labels: MigLabels,
        progress: Progress,
        shielded: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._host, self._request, self._chosen = host, request, selection
        self._labels, self._progress = labels, progress
        self._pause = NvmlPause(host, progress)
        self._tools = Tools(
            open=lambda: MigSession(host), reset=self._reset, uninterrupted=shielded, announce=progress.step
        )
        self._recorder = unfinished.RunRecorder(host, _continuing_arguments(request, labels, selection.label))
        self._rests = bool(self._recorder.drained.restart_commands)  # and must be started again at the end
        self._still = StoppedUsers()

    def done(self) -> Result:
        """Plan and carry out; services stopped for it, or by a killed run, are started again in any case."""
        failed = True
        try:
            done = self._done()
            failed = False
        finally:
            with self._tools.uninterrupted():
                self._restart_drained()
                try:
                    half = self._host.exists(unfinished.snapshot_path(self._host))
                    self._recorder.end(self._still, half=half, failed=failed)
                except GpunodeError as error:
                    self._progress.note(f"what this run had stopped can't be recorded: {error.message}")
        return done

    def _done(self) -> Result:
        node_plan, busy = self._plan()

        def outcome(after: Layouts, *happened: Any) -> Result:
            plan = mig_plan.data_of(self._chosen.path, self._chosen.label, node_plan, ())
            return applied(plan, [gpu_plan.gpu for gpu_plan in node_plan.plans], after, *happened)

        if not node_plan.changes:
            unfinished.end(self._host, node_plan.left.unasked)
            self._restart_drained()
            self._labels.tell(self._state(node_plan.layouts))
            return outcome(node_plan.layouts, node_plan.notes)
        notes = (*node_plan.notes, *mig_plan.remarks(self._host, node_plan.plans))
        self._refuse(node_plan, busy if not self._request.drain else ())
        with self._drained(busy) as drained:
            if self._request.drain:
                node_plan, busy = self._plan()
                self._refuse(node_plan, busy)
            with self._pause.if_needed(mig_plan.takes_reset(node_plan.plans)):
                after = self._change(node_plan)
                follow_up = settle(self._host, self._progress)
        self._labels.tell(node_labels.FAILED if follow_up.errors else self._state(after))
        return outcome(after, notes, drained.names, follow_up)

    def _state(self, layouts: Layouts) -> str:
        """With --mode-only the instances may still be missing, and a mode may wait for a reboot."""
        return node_labels.SUCCESS if mig_plan.holds(self._chosen, layouts) else node_labels.PENDING

    def _plan(self) -> tuple[mig_plan.LayoutPlan, tuple[Obstacle, ...]]:
        return mig_plan.look_and_plan(self._host, self._chosen, self._progress)

    def _refuse(self, node_plan: mig_plan.LayoutPlan, busy: Sequence[Obstacle]) -> None:
        if busy:
            raise GpusInUseError(busy)
        waits = [
            gpu_plan.gpu.index
            for gpu_plan in node_plan.plans
            if gpu_plan.changes_mode and gpu_plan.reset == "needed"
        ]
        if waits and self._request.skip_reset and not self._request.mode_only:
            raise PreconditionError(
                f"GPU {', '.join(map(str, waits))} takes a reset to switch MIG, and --skip-reset was given",
                hint="leave it out; or let the mode wait for a reboot: --mode-only --skip-reset",
                code="mig-reset",
            )

    @contextmanager
    def _drained(self, busy: Sequence[Obstacle]) -> Iterator[StoppedUsers]:
        self._rests = True
        recorder = self._recorder
        try:
            words = tuple(self._request.drain or ())
            yield drain(self._host, words, busy, self._progress, recorder.drained, recorder.stop)
        finally:
            self._restart_drained()

    def _restart_drained(self) -> None:
        """Called once."""
        if self._rests:
            self._rests = False
            with self._tools.uninterrupted():
                troubles, self._still = bring_back(self._host, self._recorder.drained, self._progress)
                for trouble in troubles:
                    self._progress.note(trouble)

    def _change(self, node_plan: mig_plan.LayoutPlan) -> Layouts:
        half = {gpu.uuid for gpu in node_plan.left.half}
        plans = tuple(
            gpu_plan
            for gpu_plan in node_plan.plans
            if gpu_plan in node_plan.steps or gpu_plan.gpu.uuid in half
        )
        self._labels.tell(node_labels.PENDING)
        self._recorder.begin()

        def act() -> Layouts:
            return carry_out(
                self._host,
                self._tools,
                plans,
                node_plan.left,
                skip_reset=self._request.skip_reset,
                mode_only=self._request.mode_only,
            )

        def failed(error: BaseException) -> None:
            self._labels.tell(node_labels.FAILED, softly=True)
            follow_up = settle(self._host, self._progress)
            for note in (*follow_up.notes, *(info.message for info in follow_up.errors)):
                self._progress.note(note)
            if not isinstance(error, GpunodeError):
                self._progress.note("the previous layout was restored")
            elif half and not isinstance(error, MigNotRestoredError):
                names = ", ".join(f"GPU {gpu.index}" for gpu in node_plan.left.half)
                self._progress.note(f"{names}: restored to the layout before the interrupted run")

        return attempt(act, failed, self._tools.uninterrupted)

    def _reset(self, gpus: Sequence[GpuLayout]) -> None:
        """With NVIDIA's own program, only these GPUs; no process may have them open."""
        names = ", ".join(f"GPU {gpu.index}" for gpu in gpus)
        argv = ("nvidia-smi", "-r", "-i", ",".join(gpu.pci for gpu in gpus))
        self._pause.close()
        with self._progress.step(f"reset {names}"):
            answer = self._host.run(argv, timeout=_RESET_SECONDS)
        if not answer.ok:
            output = " ".join((answer.stdout + answer.stderr).split())[-400:]
            reason = "took too long" if answer.timed_out else output or f"exit code {answer.code}"
            hint = "find the processes that use it: gpunode mig plan, fuser -v /dev/nvidia*"
            if any(gpu.virtualization == 1 for gpu in gpus):
                hint = "a virtual machine may need a reboot: --mode-only --skip-reset, reboot, then apply"
            raise GpunodeError(f"{' '.join(argv)}: {reason}", hint=hint, code="mig-reset")


# The Node's labels, which `mig apply` reports to the cluster during the run and at the end.


class OtherMigManagerError(PreconditionError):
    """A MIG manager runs on this node, and the labels are its own."""

    default_code = "mig-keeper"


def label_command(host: Host, label: str, node: str = "") -> str:
    """The command by which an administrator requests a configuration."""
    name = node or host.environ.get("NODE_NAME") or "NAME"
    return shlex.join(("kubectl", "label", "--overwrite", "node", name, f"{node_labels.CONFIG}={label}"))


def refuse_another(host: Host, label: str) -> None:
    """`OtherMigManagerError` where another MIG manager runs."""
    other_manager = manager(Node(host))
    if other_manager:
        raise OtherMigManagerError(
            f"{other_manager}, acts on {node_labels.CONFIG} itself:"
            " both would change the layout of these GPUs",
            hint=f"let it do it: {label_command(host, label)}",
        )


class MigLabels:
    """The labels of one run: unless they are `asked_for`, or this is a pod, no API server is queried or
    written. `labels` are those to use, if known already. `sent_state` is the last state sent, even if the
    server refused it."""

    def __init__(
        self,
        host: Host,
        access: Access,
        node: str,
        progress: Progress,
        asked_for: bool,
        labels: node_labels.NodeMigLabels | None = None,
    ) -> None:
        self._host, self._progress = host, progress
        self._access, self._node = access, node
        self.asked_for = asked_for
        self._on = asked_for or node_labels.in_pod(host)
        self._labels = labels
        self._label = ""
        self.sent_state = ""

    @property
    def words(self) -> tuple[str, ...]:
        """The options with which another run finds the same Node."""
        access = self._access
        pairs = (
            ("--kubeconfig", access.kubeconfig),
            ("--context", access.context),
            ("--server", access.server),
            ("--node", self._node),
        )
        return tuple(part for pair in pairs if pair[1] for part in pair)

    def asked(self) -> str:
        """The configuration that the Node requests, if any."""
        if not self._on:
            return ""
        self._label = self._connected().asked(self._host, self._progress)
        return self._label

    def begin(self, label: str) -> None:
        """Select this configuration. `UsageError` if it isn't a label, `OtherMigManagerError`; what
        `access.connect` raises."""
        self._label = label
        if not self._on:
            return
        node_labels.check(label)
        refuse_another(self._host, label)
        self._connected()

    @contextmanager
    def refusals(self, label: str) -> Iterator[None]:
        """A failure before the first report leaves the labels unchanged, because they are still correct; but
        if the Node requests this configuration its state becomes failed.
        """
        self._label = label
        try:
            yield
        except GpunodeError as error:
            may_report = self._on and not isinstance(error, OtherMigManagerError)
            if may_report and not self.sent_state and self._is_requested():
                self.tell(node_labels.FAILED, softly=True)
            raise

    def _is_requested(self) -> bool:
        desired = self._label
        try:
            requested = self.asked()
        except GpunodeError:
            return False
        return bool(requested) and requested == (desired or requested)

    def tell(self, state: str, *, softly: bool = False) -> None:
        """Send the labels. A server that fails stops the run only if nothing was changed yet."""
        if not self._on:
            return
        self.sent_state = state
        try:
            self._connected().tell(self._host, self._progress, self._label, state)
        except GpunodeError as error:
            if state == node_labels.PENDING and not softly:
                raise
            self._progress.note(f"the node's labels don't say {state}: {error.message}")

    def _connected(self) -> node_labels.NodeMigLabels:
        if self._labels is None:
            self._labels = node_labels.connected(self._host, self._access, self._node)
        return self._labels
