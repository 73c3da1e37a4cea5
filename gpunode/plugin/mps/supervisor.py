"""MPS as a part of the plugin: a keeper for each daemon that the plan requires, and the devices' health.

Without a resource that is shared with MPS no code of it runs or is loaded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from threading import Event, Thread, main_thread

from gpunode.errors import DaemonError, GpunodeError
from gpunode.host import Host
from gpunode.plugin.config.settings import Settings
from gpunode.plugin.ledger import Ledger
from gpunode.plugin.logfmt import Log, OnChange
from gpunode.plugin.model import Problem, Resource, ResourcePlan, Unit
from gpunode.plugin.mps.compute_mode import ComputeModes
from gpunode.plugin.mps.daemon import (
    PROGRAM,
    AdoptedDaemon,
    ControlLog,
    MpsControl,
    Running,
    end,
    find_program,
    forget,
    has_listener,
    left_behind,
    remains,
    start,
)
from gpunode.plugin.mps.layout import MPS, NOT_YET, DaemonSpec, daemon_specs, prepare, root_of

_LOCK_SECONDS = 1.0
_TURN_SECONDS = 0.5
_CLOSE_SECONDS = 1.0


class Supervisor:
    """A `ServicePart` and a `Veto`; does nothing while no resource of the ledger's plan is shared with MPS.

    With `--mps` it keeps the daemons itself, otherwise it watches another service's.
    """

    def __init__(self, host: Host, log: Log, ledger: Ledger) -> None:
        self._host = host
        self._log = log
        self._say = OnChange(log)
        self._ledger = ledger
        self._seen: tuple[Settings, ResourcePlan] | None = None
        self._due = False
        self._desired: tuple[DaemonSpec, ...] = ()
        self._keepers: dict[str, DaemonThread] = {}
        self._ending: list[DaemonThread] = []
        self._by_gpu: Mapping[tuple[str, str], DaemonThread] = {}
        self._reported: Sequence[object] = ()
        self._lock = ExitStack()
        self._locked = ""
        self._next_lock = 0.0
        self._foreign: Problem | None = None

    # --- Veto -------------------------------------------------------------------------------------------

    def problem(self, resource: Resource, unit: Unit) -> Problem | None:
        """Called for every unit each second, from any thread."""
        if resource.sharing != MPS or unit.id not in resource.share_counts:
            return None
        keeper = self._by_gpu.get((resource.name, unit.id))
        if keeper is None:
            return self._foreign or NOT_YET
        return keeper.gpu_problems.get(unit.id) or keeper.problem

    @property
    def ready(self) -> bool:
        """Whether all required daemons are up; true if none is required."""
        return len(self._keepers) == len(self._desired) and all(
            keeper.problem is None for keeper in self._keepers.values()
        )

    # --- Part -------------------------------------------------------------------------------------------

    def tick(self, now: float) -> float | None:
        if not self._ledger.planned or self._ledger.trouble:
            return None  # while it isn't known which GPUs there are nothing is ended
        # read after `planned`: another thread publishes the first plan, and an empty one would end daemons
        settings, plan = self._ledger.settings, self._ledger.plan
        self._turn(settings, plan, now)
        # a keeper's thread has no other way to report an event
        return _TURN_SECONDS if self._keepers or settings.mps else None

    def _turn(self, settings: Settings, plan: ResourcePlan, now: float) -> None:
        if self._seen is None or self._seen[0] is not settings or self._seen[1] is not plan:
            first, self._seen, self._due = self._seen is None, (settings, plan), True
            if not first:
                return  # while both are being replaced they may not match: the next turn sees both
        if self._due:
            self._due = False
            self._desired = daemon_specs(settings, plan.resources)
        if settings.mps and not self._may(settings, now):
            return
        self._reconcile(settings)
        self._report(settings)

    def close(self) -> None:
        """Request the keepers to end; those that take longer than a second end with the process, which
        waits."""
        keepers = [*self._keepers.values(), *self._ending]
        for keeper in keepers:
            keeper.stop(hurry=True)
        deadline = self._host.monotonic() + _CLOSE_SECONDS
        for keeper in keepers:
            keeper.join(max(0.0, deadline - self._host.monotonic()))
        self._keepers, self._by_gpu = {}, {}
        if self._locked:
            self._host.remove(f"{self._locked}/.ready")
        if not any(keeper.alive for keeper in keepers):
            self._lock.close()

    # --- present and desired daemons --------------------------------------------------------------------

    def _may(self, settings: Settings, now: float) -> bool:
        """Whether this process has exclusive use of the MPS root: two that manage the same daemons would
        conflict."""
        root = root_of(settings)
        if not self._desired and not self._keepers and not self._host.exists(root):
            return False  # nothing to do and nothing left by earlier processes
        if self._locked:
            return True
        if now < self._next_lock:
            return False
        self._next_lock = now + _LOCK_SECONDS
        try:
            # clients reach their pipes through it; a lock's directory would be 0700
            self._host.make_dirs(root)
            self._lock.enter_context(self._host.lock(f"{root}/.lock", 0.0))
        except GpunodeError as error:
            reason = f"another process keeps the MPS daemons, or {root} can't be used: {error.message}"
            if self._foreign is None or self._foreign.reason != reason:
                self._foreign = Problem("mps", reason, self._host.now())
                self._say.warning(reason, hint=error.hint)
                self._ledger.tick()
            return False
        self._locked, self._foreign = root, None
        self._sweep(settings, root)
        return True

    def _reconcile(self, settings: Settings) -> None:
        """Start keepers for required daemons, end the others. Values are compared, so it is cheap."""
        self._ending = [keeper for keeper in self._ending if keeper.alive]
        changed = False
        desired = {spec.directory: spec for spec in self._desired}
        for directory, keeper in list(self._keepers.items()):
            spec = desired.get(directory)
            if spec is not None and (spec.resource, spec.gpus) == (keeper.spec.resource, keeper.spec.gpus):
                if spec != keeper.spec:
                    keeper.adjust(spec)
                continue
            keeper.stop()
            self._ending.append(self._keepers.pop(directory))
            changed = True
        for directory, spec in desired.items():
            if directory not in self._keepers:
                self._keepers[directory] = self._keeper(settings, spec)
                changed = True
        if changed:
            self._by_gpu = {(k.spec.resource, gpu): k for k in self._keepers.values() for gpu in k.spec.gpus}

    def _keeper(self, settings: Settings, spec: DaemonSpec) -> DaemonThread:
        keeper = (
            Keeper(self._host, settings, spec, self._log, list(self._ending))
            if settings.mps
            else Onlooker(self._host, settings, spec)
        )
        keeper.start()
        return keeper

    def _sweep(self, settings: Settings, root: str) -> None:
        """End what a killed plugin has left and is no longer required: daemons, compute modes."""
        desired = {spec.directory for spec in self._desired}
        for spec in remains(self._host, root):
            if spec.directory not in desired:
                keeper = Keeper(self._host, settings, spec, self._log)
                keeper.stop()
                keeper.start()
                self._ending.append(keeper)

    def _report(self, settings: Settings) -> None:
        problems = [(k.problem, k.gpu_problems) for k in self._keepers.values()]
        if problems == self._reported:
            return
        self._reported = problems
        self._ledger.tick()
        if self._locked and settings.mps:
            path = f"{self._locked}/.ready"
            if self.ready:
                self._host.write_atomic(path, b"")
            else:
                self._host.remove(path)


# The keeper of one control daemon: starts it, watches it, restarts it, and ends it, in its own thread.
#
# Everything here may take seconds: NVML, a daemon that hangs. No other thread waits for it: the supervisor
# reads `problem`.

_KEEPER_TURN_SECONDS = 0.25  # while the daemon isn't up
_CALM_SECONDS = 1.0  # while it is up: each turn costs a tenth of a millisecond
_ASK_SECONDS = 30.0  # how often the daemon must answer
_FIRST_SECONDS = 1.0  # timeout of each query until then
_UP_SECONDS = 10.0  # how long it may take until it answers first
_BACK_OFF = (0.5, 2.0, 5.0, 15.0, 30.0, 60.0)
_STEADY_SECONDS = 120.0  # after this time a failure counts as the first
_SERVER_SECONDS = 30.0  # how often a server that doesn't start is tried again
_BEFORE_SECONDS = 30.0  # how long another keeper may take to release its GPUs
_ROOT = "0"  # the user to try a server for


class DaemonThread(ABC):
    """A thread that knows whether one control daemon serves.

    `problem` is for every GPU of the daemon, `gpu_problems` for single ones, by UUID.
    """

    def __init__(self, host: Host, settings: Settings, spec: DaemonSpec, problem: Problem) -> None:
        self.spec = spec
        self.problem: Problem | None = problem
        self.gpu_problems: Mapping[str, Problem] = {}
        self._host = host
        self._settings = settings
        self._stop = Event()
        self._thread = Thread(target=self._run, name=f"mps {spec.resource}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @abstractmethod
    def adjust(self, spec: DaemonSpec) -> None:
        """Set other limits for the same GPUs."""

    def stop(self, *, hurry: bool = False) -> None:
        """Request its end; returns at once. With `hurry` within ten seconds."""
        self._stop.set()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @abstractmethod
    def _run(self) -> None: ...


class Keeper(DaemonThread):
    """Starts after the threads in `after`, which may hold the same GPUs, have ended."""

    def __init__(
        self,
        host: Host,
        settings: Settings,
        spec: DaemonSpec,
        log: Log,
        after: Sequence[DaemonThread] = (),
    ) -> None:
        super().__init__(host, settings, spec, NOT_YET._replace(since=host.now()))
        # at exit the interpreter waits for it, so that no GPU stays in MPS's compute mode
        self._thread.daemon = False
        self._desired = spec
        self._log = log
        self._hurry = False
        self._modes = ComputeModes(host, spec.directory, self._stop)
        self._tail = ControlLog(host, spec, log)
        self._control = MpsControl(host, "", spec.pipe)
        self._running: Running | None = None
        self._failures = 0
        self._next_start = self._next_ask = self._next_server = self._up_since = 0.0
        self._silent = False
        self._server_failures = 0
        self._after = after

    def adjust(self, spec: DaemonSpec) -> None:
        """Set other limits for the same GPUs: they apply to the next MPS server, which starts with the next
        client."""
        self._desired = spec

    def stop(self, *, hurry: bool = False) -> None:
        self._hurry = self._hurry or hurry
        super().stop()

    # --- the thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        deadline = self._host.monotonic() + _BEFORE_SECONDS
        for keeper in self._after:
            while keeper.alive and not self._stop.is_set() and self._host.monotonic() < deadline:
                keeper.join(_KEEPER_TURN_SECONDS)
        try:
            while not self._stop.is_set() and main_thread().is_alive():
                self._turn()
                self._stop.wait(_KEEPER_TURN_SECONDS if self.problem else _CALM_SECONDS)
        finally:
            self._end()

    def _turn(self) -> None:
        try:
            if self._running is None:
                if self._host.monotonic() >= self._next_start:
                    self._begin()
                return
            self._watch(self._running)
        except (GpunodeError, OSError) as error:
            if self._stop.is_set():
                return  # whatever the error was, the keeper is ending
            hint = error.hint if isinstance(error, GpunodeError) else ""
            self._fail(error.message if isinstance(error, GpunodeError) else str(error), hint)

    def _begin(self) -> None:
        self._control = MpsControl(self._host, find_program(self._host, self._settings), self.spec.pipe)
        prepare(self._host, self.spec, root_of(self._settings), self._log)
        self._make_exclusive()
        self._running = self._adopt() or self._start()
        self._set_limits()
        self._host.write_atomic(self.spec.started, b"")
        now = self._host.monotonic()
        self._up_since, self._next_ask, self._silent = now, now + _ASK_SECONDS, False
        self.problem = None
        limits = {"threads": f"{self.spec.percentage}%", "memory_mib": ",".join(map(str, self.spec.memory))}
        self._log.info("MPS control daemon is running", **self._names, pid=self._running.pid, **limits)

    def _make_exclusive(self) -> None:
        failed = self._modes.make_exclusive(self.spec.gpus)
        self.gpu_problems = {
            uuid: self._problem_of(self._host, f"MPS can't have this GPU: {reason}")
            for uuid, reason in failed.items()
        }
        if failed.keys() >= set(self.spec.gpus):
            raise DaemonError(
                f"MPS can't have its GPUs: {next(iter(failed.values()))}", hint="gpunode doctor"
            )

    def _adopt(self) -> Running | None:
        """Adopt the daemon of a killed plugin if it can continue; else end it."""
        identity = left_behind(self._host, self.spec)
        if identity is None:
            return None
        adopted = AdoptedDaemon(self._host, identity)
        if identity.gpus == self.spec.gpus and self._control.answers():
            self._tail.skip()
            self._log.info("using the MPS control daemon that already runs", **self._names, pid=identity.pid)
            return adopted
        self._log.info("stopping the MPS control daemon of an earlier run", **self._names, pid=identity.pid)
        end(self._host, self._control, adopted)
        return None

    def _start(self) -> Running:
        if self._listens():  # our daemon would end, and our queries until then would go to the other one
            raise self._other(f"another MPS control daemon is already running on {self.spec.pipe}")
        self._tail.skip()
        daemon = start(self._host, self._control.program, self.spec)
        self._running = daemon
        up = self._host.wait_until(
            lambda: daemon.ended() is not None or self._stop.is_set() or self._listens(), _UP_SECONDS, 0.02
        )
        if daemon.ended() is not None:
            raise self._ended_early(daemon.ended())
        if not up and not self._stop.is_set():
            raise DaemonError(f"the MPS control daemon does not answer {_UP_SECONDS:g} s after its start")
        return daemon

    def _listens(self) -> bool:
        return self._host.exists(f"{self.spec.pipe}/control") and self._control.answers(_FIRST_SECONDS)

    def _set_limits(self) -> None:
        """One share for each client, or no limit. By index: the daemon ignores limits for a UUID."""
        spec = self.spec = self._desired
        commands = [
            f"set_default_device_pinned_mem_limit {number} {mib}M"
            for number, mib in enumerate(spec.memory)
            if mib
        ]
        if spec.percentage < 100:
            commands.append(f"set_default_active_thread_percentage {spec.percentage}")
        output = self._control.query(*commands, "get_default_active_thread_percentage")
        wrong = next((line for line in output if line.startswith(("Unknown command", "Invalid"))), "")
        if wrong:
            self._log.warning(
                "limits not set", **self._names, reason=wrong, hint="use a driver of release 470 or newer"
            )

    def _watch(self, running: Running) -> None:
        self._tail.follow()
        code = running.ended()
        if code is not None:
            raise DaemonError(f"the MPS control daemon ended by itself (exit status {code})")
        now = self._host.monotonic()
        if now >= self._next_ask:
            self._check_daemon(now)
        if self._desired is not self.spec:
            self._set_limits()
        if self._tail.servers.failing:
            self._server_fails(now)
        elif self.problem is not None:
            self.problem = None
            self._log.info("the MPS server is running again", **self._names)
        if self._failures and now - self._up_since > _STEADY_SECONDS:
            self._failures = 0

    def _check_daemon(self, now: float) -> None:
        self._next_ask = now + _ASK_SECONDS
        if self._control.answers():
            self._silent = False
        elif self._silent:
            raise DaemonError("the MPS control daemon does not answer any more")
        else:
            self._silent = True
            self._next_ask = now + 1.0  # a single missed answer may be a busy moment

    def _server_fails(self, now: float) -> None:
        """The clients of a server hang. No client tries while the devices are unhealthy, so the keeper
        does."""
        servers = self._tail.servers
        if self.problem is None:
            reason = f"the MPS server does not come up ({servers.last})"
            self.problem = self._problem_of(self._host, reason)
            self._log.error(reason, **self._names, log=f"{self.spec.log}/control.log")
        elif now >= self._next_server:
            listed = any(line.strip().isdecimal() for line in self._control.query("get_server_list"))
            if listed and servers.failures == self._server_failures:
                servers.failures = 0  # a server has run through the whole interval
                return
            self._control.send(f"start_server -uid {_ROOT}")
        else:
            return
        self._server_failures = servers.failures
        self._next_server = now + _SERVER_SECONDS

    # --- failure and end --------------------------------------------------------------------------------

    def _fail(self, reason: str, hint: str = "") -> None:
        """The daemon can't serve now. Ends what is left of it, and tries again later."""
        wait = _BACK_OFF[min(self._failures, len(_BACK_OFF) - 1)]
        if self.problem is None or self.problem.reason != reason:
            self.problem = self._problem_of(self._host, reason)
            more = {"hint": hint} if hint else {}
            self._log.error(reason, **self._names, again_in=f"{wait:g} s", **more)
        self._failures += 1
        if self._running is not None:
            end(self._host, self._control, self._running)
            self._tail.follow()
            self._running = None
        self._host.remove(self.spec.started)
        self._next_start = self._host.monotonic() + wait

    def _end(self) -> None:
        """Also ends an earlier daemon that has not been adopted yet."""
        try:
            identity = None if self._running else left_behind(self._host, self.spec)
            running = AdoptedDaemon(self._host, identity) if identity else self._running
            if running is not None:
                self._host.remove(self.spec.started)
                end(self._host, self._ender(), running)
                self._tail.follow()
                self._log.info("MPS control daemon has ended", **self._names)
            self._restore()
            forget(self._host, self.spec, root_of(self._settings))
        except (GpunodeError, OSError) as error:
            hint = "the next start restores the compute modes; manually: nvidia-smi -c DEFAULT"
            self._log.error("MPS has not ended cleanly", **self._names, reason=str(error), hint=hint)

    def _ender(self) -> MpsControl:
        if self._control.program:
            return self._control
        try:
            return MpsControl(self._host, find_program(self._host, self._settings), self.spec.pipe)
        except DaemonError:  # uninstalled meanwhile: only a signal is left
            self._control.deaf = True
            return self._control

    def _restore(self) -> None:
        for uuid, reason in self._modes.restore(hurry=self._hurry).items():
            self._log.error(
                "the compute mode is still EXCLUSIVE_PROCESS",
                device=uuid,
                reason=reason,
                hint=f"nvidia-smi -i {uuid} -c DEFAULT",
            )

    def _ended_early(self, code: int | None) -> DaemonError:
        self._tail.follow()
        last_line = f": {self._tail.last}" if self._tail.last else ""
        reason = f"the MPS control daemon ends at once (exit status {code}){last_line}"
        if "already running" in last_line:
            return self._other(reason)
        return DaemonError(reason, hint=f"gpunode doctor; {self.spec.log}/control.log")

    def _other(self, reason: str) -> DaemonError:
        hint = f"end the other one: echo quit | CUDA_MPS_PIPE_DIRECTORY={self.spec.pipe} {PROGRAM}"
        return DaemonError(reason, hint=hint)

    @property
    def _names(self) -> dict[str, object]:
        return {"resource": self.spec.resource, "gpus": ",".join(self.spec.gpus)}

    @staticmethod
    def _problem_of(host: Host, reason: str) -> Problem:
        return Problem("mps", reason, host.now())


# Watches a daemon that another service runs, such as NVIDIA's.

_SECONDS = 10.0
_SOON_SECONDS = 1.0  # while it isn't up
_MOUNTED = "/mps"  # where NVIDIA's deployment mounts the node's MPS root in the plugin's container


class Onlooker(DaemonThread):
    """Like a `Keeper`, without managing the daemon."""

    def __init__(self, host: Host, settings: Settings, spec: DaemonSpec) -> None:
        reason = f"no MPS control daemon answers at {spec.pipe}; plugin serve --mps runs one"
        self._absent = Problem("mps", reason, host.now())
        super().__init__(host, settings, spec, self._absent)

    def adjust(self, spec: DaemonSpec) -> None:
        """Does nothing: limits are set by the service that runs the daemon."""
        self.spec = spec

    def _run(self) -> None:
        while not self._stop.is_set():
            up = self._answers()
            self.problem = None if up else self._absent
            self._stop.wait(_SECONDS if up else _SOON_SECONDS)

    def _answers(self) -> bool:
        pipe = self.spec.pipe
        mounted = f"{_MOUNTED}/{self.spec.resource}/pipe"
        if not self._host.is_dir(pipe) and self._host.is_dir(mounted):
            pipe = mounted
        if not self._host.exists(f"{pipe}/control"):
            return False
        try:
            program = find_program(self._host, self._settings)
        except DaemonError:  # a container without the driver's programs: a listening process is enough
            return has_listener(self._host, pipe)
        return MpsControl(self._host, program, pipe).answers()
