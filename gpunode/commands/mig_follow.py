"""`gpunode mig apply --watch`: the layout follows the Node's label for as long as this runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from gpunode.commands import mig_apply, mig_plan
from gpunode.commands.mig_apply import MigLabels, OtherMigManagerError, label_command, refuse_another
from gpunode.commands.mig_plan import LayoutRequest
from gpunode.commands.session import until_signal
from gpunode.errors import GpunodeError, UsageError
from gpunode.host import Host
from gpunode.kubernetes.access import Access
from gpunode.kubernetes.api import ClusterError, Conflict, Unauthorized, Unavailable, Unreachable
from gpunode.mig import node_labels
from gpunode.mig.session import MigError
from gpunode.mig.users import GpusInUseError, Obstacle
from gpunode.output.result import Result, Text
from gpunode.plugin.labels.watch import LogProgress
from gpunode.plugin.logfmt import Log, OnChange, open_log
from gpunode.plugin.service import Systemd

# The requests of the Node's label and the file, the last action, and the time of the next check.
#
# The Node is read every ten seconds, which needs no other rights than `mig apply` has; a change runs `mig
# apply`. A refused or failed request isn't retried until its obstacle is gone.

ASK_SECONDS = 10.0  # one GET of one Node
SETTLE_SECONDS = 0.2  # a half-written file isn't read
BUSY_SECONDS = 15.0  # each check opens NVML
AGAIN_SECONDS, LONGEST_SECONDS = 5.0, 120.0  # after a temporary failure, twice as long each time
LOCKED = "locked"


class LabelFollower:
    """The request, the last action, and the time of the next check.

    `interruptible` is a context in which a terminating signal is raised (True) or deferred (False).
    """

    def __init__(
        self,
        host: Host,
        request: LayoutRequest,
        access: Access,
        node: str,
        labels: node_labels.NodeMigLabels,
        log: Log,
        interruptible: Callable[[bool], AbstractContextManager[None]],
    ) -> None:
        self._host, self._request, self._labels, self._log = host, request, labels, log
        self._access, self._node = access, node
        self._interruptible = interruptible
        self._say = OnChange(log)
        self.file = str(Path(request.config_file).absolute())
        self.label, self.said, self.passes = "", "", 0
        self._known = False  # whether the Node's label was read yet
        self._state = ""
        self._pending: bytes | str | None = None
        self._content: bytes | str | None = None
        self._done: bytes | str | None = None  # the file that this label was last applied from
        self._busy: tuple[Obstacle, ...] = ()
        self._failures = self._silent = self._unheard = 0
        self._ask_at = self._try_at = self._busy_at = self._resend_at = 0.0

    @property
    def status(self) -> str:
        """Status text for the service manager."""
        if self._silent:
            return "the API server can't be queried"
        return f"{self.label or 'no label'}{': ' if self.said else ''}{self.said}"

    def turn(self, hurry: bool) -> float:
        """Check, and act if needed; return seconds until the next check. `hurry`: don't wait."""
        now = self._host.monotonic()
        unchanged = self._read()
        answered = (hurry or now >= self._ask_at) and self._query_node()
        if self._known and unchanged:
            if not self.label:
                self._say.warning("nothing is done without a label", label=node_labels.CONFIG)
            elif self._is_due(now, hurry):
                self._apply_once()
            elif answered and self.said not in ("", self._state) and now >= self._resend_at:
                self._resend_state(now)
        return self._pause(unchanged)

    def _pause(self, unchanged: bool) -> float:
        now = self._host.monotonic()
        due = [self._ask_at]
        due += [self._try_at] if self._failures else []
        due += [self._busy_at] if self._busy else []
        due += [now + SETTLE_SECONDS] if not unchanged else []
        return max(0.0, min(due) - now)

    def _read(self) -> bool:
        """Whether the file is unchanged since the last check, and so isn't being written."""
        try:
            content: bytes | str | None = self._host.read_bytes(self.file)
        except GpunodeError as error:
            content = error.message
        unchanged = content == self._pending
        self._pending = content
        if unchanged or self._content is None:
            self._content = content if content is not None else "it is not there"
            return True
        return False

    def _query_node(self) -> bool:
        """Whether the Node has answered."""
        try:
            label, self._state = self._labels.seen()
        except ClusterError as error:
            self._silent += 1
            self._ask_at = self._host.monotonic() + _backoff(self._silent)
            self._say.warning("the Node can't be read", reason=error.message, hint=error.hint)
            return False
        if self._silent:
            self._log.info("the Node can be read again")
        if self._silent or label:
            self._say.reset()
        self._silent, self._known = 0, True
        self._ask_at = self._host.monotonic() + ASK_SECONDS
        if label != self.label:
            before = self.label or "none"
            self._log.info("the Node requests another layout", label=label or "none", before=before)
            self.label, self.said = label, ""
            self._done, self._busy, self._failures = None, (), 0
        return True

    def _is_due(self, now: float, hurry: bool) -> bool:
        if self._done is None:
            return True
        if self._content != self._done:
            self._log.info("the configuration file has changed", file=self.file)
            return True
        if self._failures:
            return hurry or now >= self._try_at
        return bool(self._busy) and (hurry or now >= self._busy_at) and self._is_unblocked()

    def _is_unblocked(self) -> bool:
        """Whether the processes that blocked the change are gone."""
        self._busy_at = self._host.monotonic() + BUSY_SECONDS
        try:
            selection = mig_plan.choose(self._current_request())
            _, busy = mig_plan.look_and_plan(self._host, selection, LogProgress(self._log))
        except GpunodeError as error:
            self._say.warning("the blocking processes are unknown", reason=error.message)
            return False
        free = not {_key(obstacle) for obstacle in self._busy} & {_key(obstacle) for obstacle in busy}
        if free:
            self._log.info("the blocking processes have ended", label=self.label)
        return free

    def _current_request(self) -> LayoutRequest:
        return replace(self._request, config_file=self.file, selected_config=self.label)

    def _apply_once(self) -> None:
        """Run `mig apply` once."""
        assert self._content is not None
        self.passes += 1
        self._done, self._busy = self._content, ()
        request = self._current_request()
        progress = _StepLog(self._log)
        self._log.info("applying", label=self.label, file=self.file)
        labels = MigLabels(self._host, self._access, self._node, progress, True, self._labels)
        try:
            with self._interruptible(True):
                result = mig_apply.once(
                    self._host, request, labels, progress, lambda: self._interruptible(False)
                )
        except GpunodeError as error:
            self._failed(error, labels)
            return
        finally:
            self._ask_at = 0.0  # the label may have changed, and the last report may be lost
        self._failures, self.said = 0, labels.sent_state
        for note in result.messages:
            self._log.info(note)
        for info in result.errors:
            self._log.error(info.message, hint=info.hint, label=self.label)
        action = "applied" if result.data.applied else "unchanged"
        self._log.info("the layout is as requested", label=self.label, action=action, state=self.said)

    def _failed(self, error: GpunodeError, labels: MigLabels) -> None:
        if isinstance(error, OtherMigManagerError):
            raise error
        now, self.said = self._host.monotonic(), labels.sent_state or node_labels.FAILED
        retry = _may_pass(error)
        self._failures = self._failures + 1 if retry else 0
        self._try_at = now + _backoff(self._failures)
        if isinstance(error, GpusInUseError):
            self._busy, self._busy_at = error.obstacles, now + BUSY_SECONDS
        when = "when the label or the file changes, or after a restart"
        if retry:
            when = f"in {self._try_at - now:g} s"
        elif self._busy:
            when += ", or that has ended"
        self._log.error(
            "the layout isn't applied",
            label=self.label,
            state=self.said,
            reason=error.message,
            hint=error.hint,
            tried_again=when,
        )

    def _resend_state(self, now: float) -> None:
        """The Node doesn't show the state that was sent: the server was down, or a client changed it."""
        try:
            self._labels.tell(self._host, LogProgress(self._log), self.label, self.said)
        except ClusterError as error:
            self._unheard += 1
            self._resend_at = now + _backoff(self._unheard)
            self._log.warning("the Node's state can't be set", state=self.said, reason=error.message)
        else:
            self._unheard = 0
            self._log.info("the Node's state is set again", state=self.said, was=self._state or "none")


def _backoff(failures: int) -> float:
    return min(AGAIN_SECONDS * 2.0 ** min(max(failures - 1, 0), 20), LONGEST_SECONDS)


def _may_pass(error: GpunodeError) -> bool:
    """A temporary failure (API server down, driver not yet loaded, another gpunode running): nothing was
    changed."""
    passing = (Unreachable, Unavailable, Conflict, Unauthorized, MigError)
    return isinstance(error, passing) or error.code == LOCKED


def _key(obstacle: Obstacle) -> tuple[object, ...]:
    return obstacle.kind, obstacle.gpu, obstacle.name, obstacle.pid, obstacle.pod, obstacle.container


class _StepLog(LogProgress):
    """The steps of a change are reported as well."""

    @contextmanager
    def step(self, text: str) -> Iterator[None]:
        self._log.info(text)
        yield


FILE_SECONDS = 1.0  # each check reads a small file


class MigWatch(NamedTuple):
    """`data` with --watch: how often a layout was applied or refused, and the last one applied."""

    passes: int
    label: str
    state: str


def watch(host: Host, request: LayoutRequest, access: Access, node: str) -> Result:
    """Run until SIGTERM or Ctrl-C; like `mig apply` these roll back a change in progress.

    `UsageError` for options that make no sense with it; `PreconditionError` where MIG can't be changed, or
    another follows the label; what `access.connect` raises. A server that doesn't answer is waited for.
    """
    _refuse(host, request, node)
    mig_apply.require(host)
    refuse_another(host, "LABEL")
    labels = node_labels.connected(host, access, node, follows=True)
    with until_signal() as signals:
        log = open_log(sys.stderr, host.environ)

        def interrupt() -> None:
            raise KeyboardInterrupt

        @contextmanager
        def interruptible(on: bool) -> Iterator[None]:
            before, signals.on_end = signals.on_end, interrupt if on else lambda: None
            try:
                if on and signals:
                    interrupt()
                yield
            finally:
                signals.on_end = before

        follower = LabelFollower(host, request, access, node, labels, log, interruptible)
        systemd = Systemd(host, log)
        systemd.tell("READY=1")
        log.info("following the label", node=labels.node, label=node_labels.CONFIG)
        try:
            while not signals:
                pause = follower.turn(signals.take_hangup())
                systemd.report(follower.status)
                if not signals:
                    signals.wait(min(pause, FILE_SECONDS))
        except KeyboardInterrupt:
            if not signals:
                raise
        finally:
            systemd.tell("STOPPING=1")
    for name in signals:
        log.info("stopped", signal=name)
    times = f"{follower.passes} times" if follower.passes != 1 else "once"
    data = MigWatch(follower.passes, follower.label, follower.said)
    return Result("MigApplication", data, blocks=(Text(f"a layout was looked after {times}"),))


def _refuse(host: Host, request: LayoutRequest, node: str) -> None:
    if not request.config_file:
        raise UsageError("no configuration file was given", hint="name it: --config-file FILE")
    if request.config_file == "-":
        raise UsageError("--watch reads the file again and again", hint="name one: --config-file FILE")
    if request.selected_config:
        raise UsageError(
            f"with --watch the Node's label {node_labels.CONFIG} says which configuration",
            hint="leave --selected-config and its variables out, and set the label:"
            f" {label_command(host, request.selected_config, node)}",
        )
    if request.persist:
        raise UsageError("--watch applies the layout when it starts", hint="leave --persist out")
