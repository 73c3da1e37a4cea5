"""What speaks against a change, said before its first byte is written."""

from __future__ import annotations

from gpunode.errors import ConfigError, PreconditionError
from gpunode.host import NOT_TRUSTED, Completed, Host
from gpunode.host.trust import advice
from gpunode.runtime.engine import Active, Engine, Plan
from gpunode.runtime.request import Request
from gpunode.runtime.restart import Restarter


def refuse(engine: Engine, plan: Plan, active: Active | None, restarter: Restarter, request: Request) -> None:
    """`ConfigError` or `PreconditionError` if the files can't be written or the daemon not be restarted."""
    for edit in plan.changed if engine.host.is_root or not request.dry_run else ():
        _refuse_unwritable(engine.host, edit.path)
    if plan.confirm and not request.yes:
        raise PreconditionError(
            plan.confirm,
            hint="remove them first, or go on all the same with --yes",
            code="containers-running",
        )
    if plan.verb in ("none", "wait") or request.no_restart or not engine.host.live:
        return
    restarter.require(plan.verb)
    daemon = engine.daemon
    if request.socket and daemon.process and engine.host.socket_state(daemon.socket) == "absent":
        raise PreconditionError(
            f"{daemon.name} runs (pid {daemon.process.pid}) and {daemon.socket} does not exist",
            hint="leave out --socket, or name the daemon's own",
        )
    stops = active is not None and active.running_containers > 0 and not active.live_restore
    if plan.verb == "restart" and stops and active is not None and not request.yes:
        raise PreconditionError(
            f"restarting Docker stops its {active.running_containers} running container(s): {plan.reason}",
            hint="go on all the same with --yes, or write now and restart later with --no-restart",
            code="containers-running",
        )


def refuse_untrusted(answer: Completed) -> None:
    """`PreconditionError` if a daemon's program was not executed, because other users can write it."""
    if answer.code == NOT_TRUSTED:
        raise PreconditionError(answer.stderr, hint=advice(answer.stderr))


def _refuse_unwritable(host: Host, path: str) -> None:
    if host.is_symlink(path) and not host.exists(path):
        raise ConfigError(
            f"{path} is a symlink to {host.readlink(path)}, which does not exist",
            hint=f"create its target or remove the link: rm {path}",
        )
    if not host.writable(path):
        there = path if host.exists(path) else path.rpartition("/")[0]
        reason = "immutable, or on a read-only file system" if host.is_root else "closed to this user"
        look = f"lsattr -d {there}; findmnt -T {there}" if host.is_root else f"ls -ld {there}"
        raise PreconditionError(f"can't write {path}: it is {reason}", hint=f"look at it: {look}")
