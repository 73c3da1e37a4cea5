"""A run of `mig apply` while it lasts: since when, by which command, and what it has stopped meanwhile.

It is on disk before the first thing is stopped, so whoever finds it after a kill -9 knows what still stands
still, and what goes on. The layouts themselves are in `snapshot.py`.
"""

from __future__ import annotations

import json
import os
from typing import Any

from gpunode.dataclass import dataclass, field, replace
from gpunode.errors import GpunodeError
from gpunode.gpu.traces import boot_id
from gpunode.host import Host
from gpunode.journal import state_directory
from gpunode.mig.drain import Drained
from gpunode.result import plain


@dataclass(frozen=True)
class Run:
    """`since` is seconds since the epoch, `command` the words after gpunode that go on with it.

    `process` is its process id and start (clock ticks since boot, proc_pid_stat(5)); (0, "") once it has
    ended.
    """

    since: float
    command: tuple[str, ...]
    drained: Drained = field(default_factory=Drained)
    process: tuple[int, str] = (0, "")


def path_of(host: Host) -> str:
    """Where it lies."""
    return f"{state_directory(host)}/mig-run.json"


def load(host: Host) -> Run | None:
    """The run that hasn't come to its end; none from before the last boot, which starts what is to run."""
    try:
        data = json.loads(host.read_text(path_of(host)) or "null")
        if not isinstance(data, dict) or data.get("boot") != boot_id(host):
            return None
        run = data["run"]
        command = tuple(map(str, run["command"]))
        pid, started = run["process"]
        return Run(float(run["since"]), command, _drained(run["drained"]), (int(pid), str(started)))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _drained(data: dict[str, Any]) -> Drained:
    return Drained(
        tuple(map(str, data["units"])),
        bool(data["module"]),
        tuple(map(int, data["pids"])),
        tuple(map(str, data["containers"])),
    )


def lives(host: Host, run: Run) -> bool:
    """Whether it still works: then nothing was left half-way."""
    pid, started = run.process
    return pid > 0 and _start(host, pid) == started


def _start(host: Host, pid: int) -> str:
    try:
        fields = (host.read_text(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()
    except GpunodeError:
        return ""
    return fields[19] if len(fields) > 19 and fields[0] not in "ZX" else ""


class Keeper:
    """Keeps the record of one run, and goes on from an earlier one's. To be used under the node's lock."""

    def __init__(self, host: Host, command: tuple[str, ...]) -> None:
        self._host = host
        self.earlier = load(host)
        drained = self.earlier.drained if self.earlier is not None else Drained()
        pid = os.getpid()
        self._run = Run(host.now(), command, drained, (pid, _start(host, pid)))
        self._begun = False

    @property
    def drained(self) -> Drained:
        """What stands still, by this run or the one before."""
        return self._run.drained

    def begin(self) -> None:
        """Before anything is changed."""
        self._begun = True
        self._write(self._run)

    def stop(self, drained: Drained) -> None:
        """Before one more thing is stopped."""
        self._run = replace(self._run, drained=drained)
        self.begin()

    def end(self, still: Drained, *, half: bool, failed: bool) -> None:
        """`still` couldn't be started again; `half`: some GPU is still between two layouts, by this run if it
        has `failed`."""
        self._run = replace(self._run, drained=still)
        base = self._run if self._begun and failed else self.earlier or self._run
        if still.again or (half and (self._begun or self.earlier is not None)):
            self._write(replace(base, drained=still, process=(0, "")))
        elif self._host.read_text(path_of(self._host)) is not None:
            self._host.remove(path_of(self._host))

    def _write(self, run: Run) -> None:
        self._host.make_dirs(state_directory(self._host), mode=0o700)
        data = {"boot": boot_id(self._host), "run": plain(run)}
        self._host.write_atomic(path_of(self._host), json.dumps(data).encode(), mode=0o600, keep=False)
