"""`gpunode mig apply`: make the GPUs what a configuration says, or leave them as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from gpunode.commands import mig_after, mig_half_way, mig_show, mig_wanted
from gpunode.commands.mig_labels import MigLabels
from gpunode.dataclass import dataclass, field, replace
from gpunode.errors import GpunodeError, PreconditionError, UsageError
from gpunode.gpu.mig import MigSession
from gpunode.host import Host
from gpunode.journal import lock_path
from gpunode.kubernetes.access import Access
from gpunode.mig import node_labels, snapshot, unfinished
from gpunode.mig.apply import HalfDone, Tools, carry_out
from gpunode.mig.busy import InUse, Obstacle
from gpunode.mig.clients import Room
from gpunode.mig.drain import Drained, bring_back, drain
from gpunode.mig.layout import GpuLayout, Layouts
from gpunode.result import Block, Progress, Result, Text
from gpunode.runtime.apply import uninterrupted
from gpunode.runtime.files import LOCK_SECONDS

__all__ = ["Access", "Options", "run"]

KIND = "MigApplication"
_RESET_SECONDS = 300.0


@dataclass(frozen=True)
class Options:
    """`drain` names units, processes and nvidia_drm to be stopped. `skip_reset` leaves a mode that wants a
    reset pending. With `labels` the Node's labels tell of it, by `access` and `node`; in a pod always. With
    `watch` the Node's label says which configuration, as often as it changes."""

    config_file: str = ""
    label: str = ""
    mode_only: bool = False
    skip_reset: bool = False
    drain: tuple[str, ...] = ()
    persist: bool = False
    dry_run: bool = False
    labels: bool = False
    access: Access = field(default_factory=Access)
    node: str = ""
    watch: bool = False


def run(host: Host, options: Options, progress: Progress) -> Result:
    """Apply; kind MigApplication, data `mig_after.MigApplication`. Nothing to change: nothing is touched.

    `PreconditionError` (exit 3) before anything is changed: not root, in use, can't be had here.
    `RolledBackError` (exit 4) if it failed and the previous layout is in place again, `HalfDone` (exit 1) if
    that failed as well.
    """
    if options.persist and options.mode_only:
        raise UsageError("--persist applies a whole layout at boot", hint="leave --mode-only out")
    if options.watch and not options.dry_run:
        from gpunode.commands.mig_watch import watch

        return watch(host, options)
    kept = options.labels or node_labels.in_pod(host)
    labels = MigLabels(host, options.access, options.node, progress, kept)
    if options.dry_run:
        chosen = mig_wanted.choose(options.config_file, options.label, labels.asked)
        return _dry_run(host, options, chosen, progress)
    return once(host, options, labels, progress)


def once(
    host: Host,
    options: Options,
    labels: MigLabels,
    progress: Progress,
    shielded: Callable[[], AbstractContextManager[None]] = uninterrupted,
) -> Result:
    """Apply, and tell it by these labels; see `run`. `shielded` lets signals wait."""
    require(host)
    left = unfinished.load(host)
    if left is not None and left.drained.again and not unfinished.lives(host, left):
        progress.note(f"{mig_half_way.begun(left)} has left stopped: {', '.join(left.drained.names)}")
    with labels.refusals(options.label):
        chosen = mig_wanted.choose(options.config_file, options.label, labels.asked)
        labels.begin(chosen.label)
        if options.persist:
            mig_after.refuse_persist(host, chosen)
        with host.lock(lock_path(host), LOCK_SECONDS):
            done = _Run(host, options, chosen, labels, progress, shielded).done()
    return mig_after.finish(host, chosen, done, options.persist, progress)


def require(host: Host) -> None:
    """`PreconditionError` where MIG can't be changed at all."""
    if not host.live:
        raise PreconditionError(
            "MIG is only changed on the node itself", hint="leave --root out, or add --dry-run"
        )
    if not host.is_root:
        raise PreconditionError("changing MIG needs root", hint="run it again with sudo")


def _again(options: Options, chosen: mig_wanted.Chosen) -> tuple[str, ...]:
    """The words that go on with this run, should it be killed."""
    file = options.config_file if options.config_file == "-" else str(Path(options.config_file).absolute())
    access = options.access
    given = (("--kubeconfig", access.kubeconfig), ("--context", access.context), ("--server", access.server))
    pairs = [*(("--drain", word) for word in options.drain), *given, ("--node", options.node)]
    flags = {
        "--mode-only": options.mode_only,
        "--skip-reset": options.skip_reset,
        "--persist": options.persist,
        "--node-labels": options.labels and not (any(word for _, word in given) or options.node),
    }
    return (
        *("mig", "apply", "-f", file, "-c", chosen.label),
        *(flag for flag, on in flags.items() if on),
        *(part for pair in pairs if pair[1] for part in pair),
    )


def _dry_run(host: Host, options: Options, chosen: mig_wanted.Chosen, progress: Progress) -> Result:
    found, busy = mig_wanted.look_and_plan(host, chosen, progress, mode_only=options.mode_only)
    notes = (*mig_half_way.told(host, found.layouts), *found.notes)
    notes += mig_wanted.remarks(host, found.plans) if found.changes else ()
    plan = mig_show.data_of(chosen.path, chosen.label, found, busy)
    shown: list[Block] = [
        *mig_show.blocks(plan, busy),
        *(Text(f"would stop {word}") for word in options.drain),
    ]
    left = unfinished.load(host) if host.is_root else None
    if left is not None and not unfinished.lives(host, left):
        shown += [Text(f"would start {name} again") for name in replace(left.drained, pids=()).names]
    data = mig_after.MigApplication(plan, applied=False, dry_run=True)
    if options.persist:
        shown += mig_after.persist_preview(host, chosen)
    return Result(KIND, data, messages=notes, blocks=tuple(shown))


class _Run:
    """One run, under the node's lock."""

    def __init__(
        self,
        host: Host,
        options: Options,
        chosen: mig_wanted.Chosen,
        labels: MigLabels,
        progress: Progress,
        shielded: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._host, self._options, self._chosen = host, options, chosen
        self._labels, self._progress = labels, progress
        self._room = Room(host, progress)
        self._tools = Tools(
            open=lambda: MigSession(host), reset=self._reset, uninterrupted=shielded, tell=progress.step
        )
        self._keeper = unfinished.Keeper(host, _again(options, chosen))
        self._rests = bool(self._keeper.drained.again)  # and is to be started again at the end
        self._still = Drained()

    def done(self) -> mig_after.Done:
        """Plan and carry out; what was stopped for it, or by a run that was killed, is brought back in any
        case."""
        failed = True
        try:
            done = self._done()
            failed = False
        finally:
            with self._tools.uninterrupted():
                self._bring_back()
                try:
                    half = self._host.exists(snapshot.path_of(self._host))
                    self._keeper.end(self._still, half=half, failed=failed)
                except GpunodeError as error:
                    self._progress.note(f"what this run had stopped can't be noted down: {error.message}")
        return done

    def _done(self) -> mig_after.Done:
        found, busy = self._plan()
        notes = found.notes
        if not found.changes:
            snapshot.end(self._host, found.left.unasked)
            self._bring_back()
            self._labels.tell(self._state(found.layouts))
            return self._outcome(found, found.layouts, notes, changed=False)
        notes = (*notes, *mig_wanted.remarks(self._host, found.plans))
        self._refuse(found, busy if not self._options.drain else ())
        with self._drained(busy) as drained:
            if self._options.drain:
                found, busy = self._plan()
                self._refuse(found, busy)
            with self._room.made(mig_wanted.takes_reset(found.plans)):
                after = self._change(found)
                made = mig_after.settle(self._host, self._progress)
        self._labels.tell(node_labels.FAILED if made.errors else self._state(after))
        outcome = self._outcome(found, after, (*notes, *made.notes), changed=True)
        return replace(outcome, drained=drained.names, cdi=made.cdi, errors=made.errors)

    def _state(self, layouts: Layouts) -> str:
        """With --mode-only the instances may still be missing, and a mode may wait for a reboot."""
        return node_labels.SUCCESS if mig_wanted.holds(self._chosen, layouts) else node_labels.PENDING

    def _outcome(
        self, found: mig_wanted.Planned, after: Layouts, notes: Sequence[str], *, changed: bool
    ) -> mig_after.Done:
        plan = mig_show.data_of(self._chosen.path, self._chosen.label, found, ())
        before = tuple(one.gpu for one in found.plans)
        return mig_after.Done(plan, before, after, changed, tuple(notes))

    def _plan(self) -> tuple[mig_wanted.Planned, tuple[Obstacle, ...]]:
        return mig_wanted.look_and_plan(
            self._host, self._chosen, self._progress, mode_only=self._options.mode_only
        )

    def _refuse(self, found: mig_wanted.Planned, busy: Sequence[Obstacle]) -> None:
        if busy:
            raise InUse(busy)
        waits = [one.gpu.index for one in found.plans if one.changes_mode and one.reset == "needed"]
        if waits and self._options.skip_reset and not self._options.mode_only:
            raise PreconditionError(
                f"GPU {', '.join(map(str, waits))} takes a reset to switch MIG, and --skip-reset was given",
                hint="leave it out; or let the mode wait for a reboot: --mode-only --skip-reset",
                code="mig-reset",
            )

    @contextmanager
    def _drained(self, busy: Sequence[Obstacle]) -> Iterator[Drained]:
        self._rests = True
        keeper = self._keeper
        try:
            words = self._options.drain
            yield drain(self._host, words, busy, self._progress, keeper.drained, keeper.stop)
        finally:
            self._bring_back()

    def _bring_back(self) -> None:
        """Once."""
        if self._rests:
            self._rests = False
            with self._tools.uninterrupted():
                troubles, self._still = bring_back(self._host, self._keeper.drained, self._progress)
                for trouble in troubles:
                    self._progress.note(trouble)

    def _change(self, found: mig_wanted.Planned) -> Layouts:
        half = {gpu.uuid: gpu for gpu in found.left.half}
        plans = tuple(one for one in found.plans if one in found.steps or one.gpu.uuid in half)
        before = tuple(half.get(one.gpu.uuid, one.gpu) for one in plans)
        self._labels.tell(node_labels.PENDING)
        self._keeper.begin()
        try:
            snapshot.save(self._host, before, plans, found.left)
            after = carry_out(
                self._tools,
                plans,
                before,
                skip_reset=self._options.skip_reset,
                mode_only=self._options.mode_only,
            )
        except BaseException as error:
            with self._tools.uninterrupted():
                if not isinstance(error, HalfDone):
                    snapshot.end(self._host, found.left.unasked)
                self._labels.tell(node_labels.FAILED, softly=True)
                made = mig_after.settle(self._host, self._progress)
                for note in (*made.notes, *(one.message for one in made.errors)):
                    self._progress.note(note)
                if not isinstance(error, GpunodeError):
                    self._progress.note("the previous layout is in place again")
                elif half and not isinstance(error, HalfDone):
                    names = ", ".join(f"GPU {gpu.index}" for gpu in half.values())
                    self._progress.note(f"{names}: as before the earlier run that didn't come to its end")
            raise
        snapshot.end(self._host, found.left.unasked)
        return after

    def _reset(self, gpus: Sequence[GpuLayout]) -> None:
        """By NVIDIA's own program, only these GPUs; nobody may have them open."""
        names = ", ".join(f"GPU {gpu.index}" for gpu in gpus)
        argv = ("nvidia-smi", "-r", "-i", ",".join(gpu.pci for gpu in gpus))
        self._room.close()
        with self._progress.step(f"reset {names}"):
            answer = self._host.run(argv, timeout=_RESET_SECONDS)
        if not answer.ok:
            said = " ".join((answer.stdout + answer.stderr).split())[-400:]
            reason = "took too long" if answer.timed_out else said or f"exit code {answer.code}"
            hint = "see who holds it: gpunode mig plan, fuser -v /dev/nvidia*"
            if any(gpu.virtualization == 1 for gpu in gpus):
                hint = "a virtual machine may need a reboot: --mode-only --skip-reset, reboot, then apply"
            raise GpunodeError(f"{' '.join(argv)}: {reason}", hint=hint, code="mig-reset")
