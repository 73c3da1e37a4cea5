"""Running processes, from /proc of the host's root."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from gpunode.errors import GpunodeError
from gpunode.facts.registry import DAEMONS
from gpunode.gpu.driver_traces import boot_id
from gpunode.host import Host

# daemons that gpunode looks for: only the node's own count
_DAEMONS = {
    *(engine.program for engine in DAEMONS.values()),
    *("cri-dockerd", "kubelet", "k3s", "k3s-server", "k3s-agent", "kubelite"),
}
# other programs whose arguments or environment are read
_SETTINGS = {
    *("nvidia-device-plugin", "nvidia_gpu_device_plugin", "nvidia-gpu-device-plugin", "nvidia-ctk-installer"),
    *("nvidia-toolkit", "com.docker.backend"),
}


class Process(NamedTuple):
    """One running process; `started` is seconds since the epoch. `uid` is the user for whom it acts; it is 0
    for programs whose settings are never read."""

    pid: int
    argv: tuple[str, ...]
    started: float
    uid: int = 0

    @property
    def name(self) -> str:
        """The program's base name, as it was started; k3s replaces its arguments with ``k3s server``."""
        return _name(self.argv)

    def option(self, *names: str) -> str | None:
        """The value of ``--name VALUE`` or ``--name=VALUE``, the last one given; None if absent."""
        return option_value(self.argv[1:], *names)


def option_value(argv: tuple[str, ...], *names: str) -> str | None:
    """The last value given for one of `names` (with their dashes) in an argument list."""
    values = option_values(argv, *names)
    return values[-1] if values else None


def option_values(argv: tuple[str, ...], *names: str) -> tuple[str, ...]:
    """Every value given for an option that may be repeated, in order."""
    values = []
    for position, argument in enumerate(argv):
        head, equals, value = argument.partition("=")
        if head in names:
            if equals:
                values.append(value)
            elif position + 1 < len(argv):
                values.append(argv[position + 1])
    return tuple(values)


def environment(host: Host, pid: int) -> Mapping[str, str]:
    """A process's environment at its start; {} without permission to read it."""
    text = host.text_or_empty(f"/proc/{pid}/environ")
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


def status_fields(host: Host, pid: int) -> Mapping[str, str]:
    """The fields of /proc/PID/status (proc_pid_status(5)); {} if the process has ended."""
    lines = (line.partition(":") for line in host.text_or_empty(f"/proc/{pid}/status").splitlines())
    return {name: value.strip() for name, _, value in lines}


def start_ticks(host: Host, pid: int | str) -> int | None:
    """When a process started, in clock ticks since the boot (proc(5)); None if it doesn't exist or is a
    zombie.

    Together with the boot id it identifies a process: the kernel reuses a number alone.
    """
    text = host.read_text(f"/proc/{pid}/stat") or ""
    fields = text.rpartition(")")[2].split()  # the name in the second field may contain anything
    if fields[:1] == ["Z"]:
        return None
    return int(fields[19]) if len(fields) > 19 and fields[19].isdecimal() else None


def own_identity(host: Host) -> dict[str, Any]:
    """Identity of this process, valid for readers outside its container too; see `identifies`."""
    return {
        "pid": os.getpid(),
        "pidNamespace": host.readlink("/proc/self/ns/pid") or "",
        "startTicks": start_ticks(host, "self"),
        "bootId": boot_id(host),
    }


def identifies(host: Host, identity: object, pid: int) -> bool:
    """Whether an `own_identity` is that of process `pid`, which may be in a container of this node."""
    if not isinstance(identity, dict) or identity.get("startTicks") is None:
        return False
    # its numbers in every PID namespace that it is in, its own last
    numbers = status_fields(host, pid).get("NSpid", "").split()
    return (
        identity.get("bootId") == boot_id(host)
        and identity.get("pidNamespace") == host.readlink(f"/proc/{pid}/ns/pid")
        and numbers[-1:] == [str(identity.get("pid"))]
        and identity.get("startTicks") == start_ticks(host, pid)
    )


def boot_time(host: Host) -> float:
    """When this kernel started, in seconds since the epoch (``btime`` in /proc/stat); 0 if unknown."""
    for line in (host.read_text("/proc/stat") or "").splitlines():
        seconds = line.removeprefix("btime ")
        if line.startswith("btime ") and seconds.isdecimal():
            return float(seconds)
    return 0.0


def uptime(host: Host) -> float:
    """Seconds since the boot (/proc/uptime); 0 if unknown."""
    first = (host.read_text("/proc/uptime") or "").partition(" ")[0]
    return float(first) if first.replace(".", "", 1).isdecimal() and len(first) < 16 else 0.0


def running(host: Host, *names: str) -> tuple[Process, ...]:
    """Every process of this node with a command line, or only those of the programs `names`.

    Kernel threads, zombies and hidden ones are left out. So are daemons that aren't the node's own: the
    kubelet of a kind cluster or a dockerd in a pod serves no pods of this node, though the node's /proc lists
    it, and every user can call a program containerd.
    """
    boot = boot_time(host)
    ticks = os.sysconf("SC_CLK_TCK")
    processes = []
    for pid in host.listdir("/proc"):
        if not pid.isdigit():
            continue
        try:
            process = _process(host, pid, names, boot, ticks)
        except GpunodeError:
            continue  # the process has ended, or this user can't read it
        if process is not None and (process.name not in _DAEMONS or _counts(host, process)):
            processes.append(process)
    return tuple(processes)


def _counts(host: Host, process: Process) -> bool:
    """Whether a daemon is this node's, or a user's rootless Docker, and not in a container."""
    if process.name == "dockerd" and process.uid != 0:
        return not host.in_pid_namespace(process.pid)
    return host.is_own(process.pid)


def _process(host: Host, pid: str, names: tuple[str, ...], boot: float, ticks: int) -> Process | None:
    """One process, read only as far as needed to exclude it: a node may run thousands."""
    raw = host.read_bytes(f"/proc/{pid}/cmdline")
    if not raw:
        return None
    argv = tuple(part.decode("utf-8", "surrogateescape") for part in raw.rstrip(b"\0").split(b"\0"))
    if names and _name(argv) not in names:
        return None
    started = start_ticks(host, pid)
    if started is None:
        return None
    uid = 0
    if _name(argv) in _DAEMONS | _SETTINGS or b"gpunode" in raw:
        uid = host.owner(int(pid))
        if host.read_bytes(f"/proc/{pid}/cmdline") != raw:
            return None  # another process has the number now, and these arguments may be either's
    return Process(int(pid), argv, boot + started / ticks, uid)


def _name(argv: tuple[str, ...]) -> str:
    return argv[0].partition(" ")[0].rpartition("/")[2]


def locked_memory(host: Host, pid: int) -> int | None:
    """Bytes that a process may lock (proc_pid_limits(5)); -1 without limit, None if unknown."""
    for line in (host.read_text(f"/proc/{pid}/limits") or "").splitlines():
        if line.startswith("Max locked memory"):
            soft = line.removeprefix("Max locked memory").split()[0:1]
            if soft == ["unlimited"]:
                return -1
            return int(soft[0]) if soft and soft[0].isdecimal() and len(soft[0]) < 21 else None
    return None
