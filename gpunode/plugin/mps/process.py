"""One control daemon as a process: started by us, or found alive after a plugin that was killed.

It runs with ``-f``, so it stays our child and its output, the log, goes to control.log. That is a file and no
pipe, so the daemon survives us, and its clients with it: whoever comes next adopts it. Who it is is written
down as pid, start time and program; no process that isn't exactly that one is ever signalled.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import PurePosixPath
from typing import Protocol

from gpunode._process import Daemon, start_daemon
from gpunode.dataclass import dataclass
from gpunode.errors import DaemonError, GpunodeError
from gpunode.host import Host
from gpunode.plugin.mps.control import Control, taken
from gpunode.plugin.mps.layout import DaemonSpec
from gpunode.plugin.mps.modes import FILE as MODES_FILE

FILE = "daemon.json"
_QUIT_SECONDS = 3.0
_TERM_SECONDS = 1.5


class Running(Protocol):
    """A daemon's process."""

    @property
    def pid(self) -> int: ...

    def ended(self) -> int | None:
        """Its exit status, None while it runs; 0 where it isn't known."""

    def signal(self, name: str) -> None: ...

    def end_children(self) -> None:
        """End the servers that a daemon leaves behind when it is killed."""


@dataclass(frozen=True)
class Identity:
    """Which process a daemon is. `started` is field 22 of /proc/PID/stat, ticks since boot; `gpus` as given
    to it."""

    pid: int
    started: int
    program: str
    gpus: tuple[str, ...]

    @classmethod
    def of(cls, host: Host, pid: int, gpus: tuple[str, ...]) -> Identity | None:
        """None if there is no such process, or it may not be looked at."""
        try:
            text = host.read_text(f"/proc/{pid}/stat") or ""
            program = host.readlink(f"/proc/{pid}/exe")
        except GpunodeError:
            return None
        fields = text.rpartition(")")[2].split()  # the name in the second field may hold anything
        if program is None or len(fields) < 20 or fields[0] == "Z":
            return None
        return cls(pid, int(fields[19]), program.removesuffix(" (deleted)"), gpus)

    def alive(self, host: Host) -> bool:
        """Whether this very process still runs."""
        return Identity.of(host, self.pid, self.gpus) == self


class Adopted:
    """A daemon that an earlier process started."""

    def __init__(self, host: Host, identity: Identity) -> None:
        self._host = host
        self._identity = identity
        self.pid = identity.pid

    def ended(self) -> int | None:
        return None if self._identity.alive(self._host) else 0

    def signal(self, name: str) -> None:
        if self.ended() is None:
            self._host.signal(self.pid, name)

    def end_children(self) -> None:
        """Not ours to tell: its group may be anybody's by now."""


def start(host: Host, program: str, spec: DaemonSpec) -> Daemon:
    """Start the daemon of `spec`; its directories are there. `DaemonError` says why it can't be."""
    env = {
        "PATH": f"{PurePosixPath(program).parent}:{host.environ.get('PATH', '')}",  # the server lies there
        "CUDA_MPS_PIPE_DIRECTORY": spec.pipe,
        "CUDA_MPS_LOG_DIRECTORY": spec.log,
        "CUDA_VISIBLE_DEVICES": ",".join(spec.gpus),
        **{name: host.environ[name] for name in ("LD_LIBRARY_PATH",) if name in host.environ},
    }
    try:
        daemon = start_daemon((program, "-f"), host.path(f"{spec.log}/control.log"), env)
    except OSError as error:
        raise DaemonError(f"{program} can't be started: {error.strerror or error}") from error
    identity = Identity.of(host, daemon.pid, spec.gpus)
    if identity is not None:
        host.write_atomic(f"{spec.directory}/{FILE}", (json.dumps(asdict(identity)) + "\n").encode())
    return daemon


def left_behind(host: Host, spec: DaemonSpec) -> Identity | None:
    """The daemon of this directory that an earlier process started and that still runs."""
    try:
        read = json.loads(host.read_text(f"{spec.directory}/{FILE}") or "{}")
        found = Identity(int(read["pid"]), int(read["started"]), read["program"], tuple(read["gpus"]))
    except (ValueError, KeyError, TypeError, GpunodeError):
        return None
    return found if found.alive(host) else None


def end(host: Host, control: Control, running: Running) -> None:
    """Ask it to quit, which ends its servers; then SIGTERM, then SIGKILL. Takes six seconds at most.

    ``quit -t`` waits that long for clients before it ends their servers. One that is deaf isn't asked.
    """
    if running.ended() is None and not control.deaf:
        control.send(f"quit -t {_QUIT_SECONDS - 1:.0f}", seconds=_QUIT_SECONDS)
    for name, seconds in (("", 0.0 if control.deaf else 0.3), ("TERM", _TERM_SECONDS), ("KILL", 0.5)):
        if name and running.ended() is None:
            running.signal(name)
        if host.wait_until(lambda: running.ended() is not None, seconds):
            break
    running.end_children()


def forget(host: Host, spec: DaemonSpec, root: str) -> None:
    """Remove what we and the ended daemon left, and the directories as far as they hold nothing else."""
    for name in (FILE, ".started"):
        host.remove(f"{spec.directory}/{name}")
    if taken(host, spec.pipe):
        return  # a daemon that isn't ours
    for name in ("control", "control_lock", "control_privileged", "log"):  # the daemon leaves its sockets
        host.remove(f"{spec.pipe}/{name}")
    host.remove(f"{spec.log}/control.log")
    for path in (spec.pipe, spec.log, spec.directory):
        host.remove_empty_directory(path)
    domain = f"{root}/{spec.resource.partition('/')[0]}"
    for path in (f"{root}/{spec.resource}", domain):
        host.remove_empty_directory(path)


def remains(host: Host, root: str) -> list[DaemonSpec]:
    """What was written down below `root`: a daemon to be ended or compute modes to be restored in each."""
    found = []
    for domain in host.listdir(root):
        for name in host.listdir(f"{root}/{domain}"):
            resource = f"{root}/{domain}/{name}"
            inner = [f"{resource}/{gpu}" for gpu in host.listdir(resource)]
            for directory in (resource, *inner):
                if host.is_file(f"{directory}/{FILE}") or host.is_file(f"{directory}/{MODES_FILE}"):
                    found.append(DaemonSpec(f"{domain}/{name}", (), directory))
    return found
