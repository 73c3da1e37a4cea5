"""gpunode's own services, which keep NVML open: they close it while GPUs are reset, and look again then.

Both are requested by a signal (docs/health.md), in a pod as on the node: this node sees the processes of all
its containers. Any process can look like gpunode by its command line, so only one that is known by its unit,
or by the number and start time in its own status file, is signalled or expected to make room.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from gpunode.dataclass import dataclass
from gpunode.errors import GpunodeError, PreconditionError
from gpunode.facts.daemons import process_unit
from gpunode.facts.device_plugins import PLUGIN_STATE, keeps_nvml_open, status_path
from gpunode.facts.processes import Process, identifies, running
from gpunode.host import Host
from gpunode.result import Progress

_CLOSE_SECONDS = 20.0  # it takes two; more where the driver answers slowly
_CHILD = "gpunode.gpu.sentinel"
_SIGNALS = {"USR1": 10, "HUP": 1}  # signal(7)


@dataclass(frozen=True)
class Clients:
    """Process ids of those services, and of the children in which they ask NVML."""

    services: tuple[int, ...] = ()
    children: tuple[int, ...] = ()

    @property
    def all(self) -> frozenset[int]:
        """Who isn't in the way: they make room."""
        return frozenset((*self.services, *self.children))


def clients(host: Host, processes: Sequence[Process]) -> Clients:
    """The services that are known to be gpunode's and handle both signals, which end any other process."""
    services = tuple(
        one.pid
        for one in processes
        if keeps_nvml_open(one.argv) and _heeds(_field(host, one.pid, "Sig")) and _is_known(host, one)
    )
    children = tuple(
        one.pid
        for one in processes
        if services and _CHILD in one.argv and _parent(_field(host, one.pid, "PPid:")) in services
    )
    return Clients(services, children)


def _is_known(host: Host, process: Process) -> bool:
    """Whether a process of root's (or of ours) is the main process of a unit that starts gpunode, or the one
    that a status file of that user's names."""
    trusted = {0, host.uid}
    if host.owner(process.pid) not in trusted:
        return False
    if process_unit(host, process, "gpunode") is not None:
        return True
    state_dir = process.option("--state-dir") or PLUGIN_STATE
    path = status_path(state_dir)
    try:
        seen = host.stat(path)
        text = host.read_text(path) if seen is not None and seen.st_uid in trusted else None
        return identifies(host, json.loads(text), process.pid) if text else False
    except (GpunodeError, ValueError, RecursionError):
        return False


def _field(host: Host, pid: int, name: str) -> tuple[str, ...]:
    """Lines of /proc/PID/status that begin so (proc_pid_status(5)); none if it is gone."""
    try:
        text = host.read_text(f"/proc/{pid}/status") or ""
    except GpunodeError:
        return ()
    return tuple(line for line in text.splitlines() if line.startswith(name))


def _parent(lines: Sequence[str]) -> int:
    number = lines[0].split()[-1] if lines else ""
    return int(number) if number.isdecimal() else 0


def _heeds(lines: Sequence[str]) -> bool:
    """Whether both signals are caught, or blocked until they will be."""
    masks = [line.split()[-1] for line in lines if line.startswith(("SigCgt:", "SigBlk:"))]
    caught = 0
    for mask in masks:
        caught |= int(mask, 16)
    return all(caught >> (number - 1) & 1 for number in _SIGNALS.values())


class Room:
    """Keeps NVML closed in our own services for as long as it takes."""

    def __init__(self, host: Host, progress: Progress) -> None:
        self._host, self._progress = host, progress

    @contextmanager
    def made(self, closed: bool) -> Iterator[None]:
        """`closed`: NVML is closed in them meanwhile. They look again at the end, however it comes."""
        if closed:
            self.close()
        try:
            yield
        finally:
            self._tell(self._clients().services, "HUP")

    def close(self) -> None:
        """Have NVML closed, for two minutes from now. `PreconditionError` if one of them doesn't."""
        found = self._clients()
        if not found.services:
            return
        names = ", ".join(map(str, found.services))
        with self._progress.step(f"have gpunode's own services close NVML (process {names})"):
            self._tell(found.services, "USR1")
            closed = self._host.wait_until(lambda: not self._clients().children, _CLOSE_SECONDS, 0.2)
        if not closed:
            self._tell(found.services, "HUP")
            raise PreconditionError(
                f"process {names} has not closed NVML within {_CLOSE_SECONDS:g} s",
                hint="look why, or have it stopped: --drain gpunode-device-plugin",
                code="mig-busy",
            )

    def _clients(self) -> Clients:
        return clients(self._host, running(self._host))

    def _is_service(self, pid: int) -> bool:
        return pid in self._clients().services

    def _tell(self, services: Sequence[int], name: str) -> None:
        for pid in services:
            try:
                self._host.signal(pid, name, partial(self._is_service, pid))
            except OSError:
                continue  # it has ended; one that lives and can't be signalled still holds the GPU's device
