"""Container daemons on this node, and the configuration file that each one uses.

If a running process and a unit file disagree, the process counts: it serves containers now.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from gpunode.errors import GpunodeError
from gpunode.facts.processes import Process, option_value
from gpunode.facts.registry import DISTRIBUTIONS, ENGINES
from gpunode.facts.systemd import SystemdUnit, read_unit
from gpunode.host import Host

_VERSION_SECONDS = 1.0  # a daemon that runs answers in 3 ms


class Daemon(NamedTuple):
    """One container daemon of the node.

    `version` is () if unknown. `config_source` says how `config_path` was found, for users. `process` is None
    if it isn't running; `argv` are the running process's arguments, else the unit's. `manager` is what writes
    its configuration and starts it (k3s, rke2, k0s, microk8s, snap), empty for the system's own. `user` is
    the owner of the systemd that runs a rootless one, empty for the system's. `log` is the file that it logs
    to, empty for the journal.
    """

    name: str
    binary: str | None
    version: tuple[int, ...]
    config_path: str
    config_source: str
    socket: str
    unit: str | None
    argv: tuple[str, ...] = ()
    process: Process | None = None
    manager: str = ""
    user: str = ""
    log: str = ""

    @property
    def release(self) -> str:
        """The version as its project writes it: Docker's had months from 17.03 to 19.03. Empty if unknown."""
        parts = [str(part) for part in self.version]
        if self.name == "docker" and (17,) <= self.version < (20,):
            parts[1:2] = [part.zfill(2) for part in parts[1:2]]
        return ".".join(parts)


def find_daemon(name: str, host: Host, config: str | None = None) -> Daemon | None:
    """The daemon of an engine, by `find_docker` of facts/docker.py and so on; loads only that module."""
    daemon: Daemon | None = getattr(import_module(f"gpunode.facts.{name}"), f"find_{name}")(host, config)
    return daemon


def as_daemon_user(host: Host, daemon: Daemon) -> Host:
    """The host as the user of a rootless daemon sees it: for all paths from this user."""
    return host.as_user(daemon.process.uid) if daemon.process else host


def parse_version(output: str) -> tuple[int, ...]:
    """The version in what ``containerd --version`` or ``dockerd --version`` prints; () if there is none.

    Distributions decorate it (``1.6.20~ds1``, ``20.10.24+dfsg1``, ``v2.1.9``); only the numbers count.
    """
    match = re.search(r"(?<![\w.])v?(\d+)\.(\d+)(?:\.(\d+))?", output)
    return tuple(int(part) for part in match.groups() if part is not None) if match else ()


def record_version(host: Host, name: str, version: tuple[int, ...]) -> None:
    """What a daemon reported, as its program would print it: a recorded machine has no other source."""
    host.heard("commands", f"{name} --version", {"stdout": f"{name} {'.'.join(map(str, version))}"})


def daemon_version(host: Host, name: str, binary: str | None) -> tuple[int, ...]:
    """Version of the installed program: the daemon's own, else the one on PATH."""
    for program in dict.fromkeys(filter(None, (binary, name))):
        answer = host.run([program, "--version"], timeout=5.0)
        if answer.ok:
            return parse_version(answer.stdout)
    return ()


def cri_version(host: Host, daemon: Daemon) -> tuple[int, ...]:
    """Version reported by the running daemon; its program runs (20 ms) only if the daemon reports none."""
    if host.live and daemon.process is not None:
        from gpunode.daemons.cri import running_version

        answer = parse_version(running_version(host, daemon.socket, _VERSION_SECONDS))
        if answer:
            record_version(host, daemon.name, answer)
            return answer
    return daemon_version(host, daemon.name, daemon.binary)


def find_binary(host: Host, name: str, process: Process | None, unit: SystemdUnit | None) -> str | None:
    """Path of the daemon's program: of the running process, else of the unit, else on PATH."""
    if process is not None:
        link = exe_of(host, process.pid)
        if link:
            return link
        if process.argv[0].startswith("/"):
            return process.argv[0]
    if unit is not None and unit.program == name and host.executable(unit.argv[0]):
        return unit.argv[0]
    return host.which(name)


def exe_of(host: Host, pid: int) -> str | None:
    """The program that a process runs; None if it is hidden."""
    try:
        return (host.readlink(f"/proc/{pid}/exe") or "").removesuffix(" (deleted)") or None
    except (OSError, GpunodeError):
        return None  # another user's process hides it


def process_unit(host: Host, process: Process, name: str) -> SystemdUnit | None:
    """The unit in whose control group a process runs, if that unit is the one that starts `name`."""
    for line in host.text_or_empty(f"/proc/{process.pid}/cgroup").splitlines():
        owner = line.rpartition(":")[2].rpartition("/")[2]
        if owner.endswith(".service"):
            unit = read_unit(host, owner)
            if unit is not None and unit.program == name:
                return unit
    return None


def same_file(host: Host, left: str, right: str) -> bool:
    """Whether two paths lead to the same file."""
    return left == right or host.realpath(left) == host.realpath(right)


class KnownDaemon(NamedTuple):
    """What to look for: an engine of `ENGINES`, its packaged unit, its default file and its file flags."""

    name: str
    unit: str
    config: str
    flags: tuple[str, ...]

    def config_of(self, argv: tuple[str, ...]) -> str:
        """The configuration file that a command line makes the daemon read."""
        return option_value(argv[1:], *self.flags) or self.config


def locate(host: Host, known: KnownDaemon, processes: Sequence[Process], config: str | None) -> Daemon | None:
    """Find the daemon of the file `config`, else the system's own; None without process, unit and program.
    The caller adds its version and its socket.

    The system's own is the process in the packaged unit's control group, else one that reads the unit's file,
    else, on a node without such a unit, the one that reads the default file or is the only one.
    """
    program = ENGINES[known.name].program
    packaged = read_unit(host, known.unit)
    if packaged is not None and packaged.program != program:
        packaged = None
    path = config or known.config_of(packaged.argv if packaged else ())
    process = _pick(host, known, processes, packaged, path, explicit=bool(config))
    unit = None
    if process is not None:
        path = known.config_of(process.argv)
        value = option_value(process.argv[1:], *known.flags)
        source = f"started with {known.flags[0]} {value}" if value else "default path"
        source = f"process {process.pid}, {source}"
        unit = process_unit(host, process, program)
        if unit is None and packaged is not None and host.systemd_runs() and packaged.argv == process.argv:
            unit = packaged  # the control group may be hidden, or missing in a recording
    elif packaged is not None and same_file(host, known.config_of(packaged.argv), path):
        unit, source = packaged, f"{packaged.name} ({packaged.files[0]})"
    elif packaged is None and host.which(program) is None:
        return None
    else:
        source = "the specified path" if config else "the default path"
    argv = process.argv if process else unit.argv if unit else ()
    binary = find_binary(host, program, process, unit)
    return Daemon(
        name=known.name,
        binary=binary,
        version=(),
        config_path=path,
        config_source=source,
        socket="",
        unit=unit.name if unit else None,
        argv=argv,
        process=process,
    )


def _pick(
    host: Host,
    known: KnownDaemon,
    processes: Sequence[Process],
    unit: SystemdUnit | None,
    config: str,
    *,
    explicit: bool,
) -> Process | None:
    if not explicit and unit is not None:
        for process in processes:
            own = process_unit(host, process, unit.program)
            if own is not None and own.name == unit.name:
                return process
    for process in processes:
        if same_file(host, known.config_of(process.argv), config):
            return process
    return processes[0] if len(processes) == 1 and unit is None and not explicit else None


def socket_path(address: str) -> str:
    """The path in ``unix:///run/x.sock``, or a bare path as it is; empty for any other kind of address."""
    if address.startswith("unix://"):
        return address.removeprefix("unix://")
    return address if address.startswith("/") else ""


# The owner of a containerd: dockerd, which starts one for itself, or a Kubernetes distribution.

_OWNERS = {
    "/docker/containerd/": "docker",
    **{distribution.directory: name for name, distribution in DISTRIBUTIONS.items()},
}
_DISTRIBUTION_UNITS = {unit: name for name, row in DISTRIBUTIONS.items() for unit in row.units}


def owner(config_path: str) -> str:
    """What manages the containerd of this file: docker, k3s, rke2, k0s, microk8s; empty for the system."""
    return next((name for part, name in _OWNERS.items() if part in config_path), "")


def manager(host: Host, process: Process) -> str:
    """What runs a containerd process: docker or a distribution, by its service, else by its file."""
    unit = distribution_unit(host, process)
    if unit:
        return _DISTRIBUTION_UNITS[unit]
    by_path = owner(process.option("--config", "-c") or "")
    if by_path or not (process.option("--address", "-a") or "").startswith("/run/k3s/"):
        return by_path
    # a custom data directory: k3s and rke2 share socket and layout
    units = ((name, unit) for name in ("k3s", "rke2") for unit in DISTRIBUTIONS[name].units)
    return next((name for name, unit in units if read_unit(host, unit) is not None), "k3s")


def distribution_unit(host: Host, process: Process) -> str:
    """The distribution's service that runs a process, by its control group; empty if none or unknown."""
    text = host.text_or_empty(f"/proc/{process.pid}/cgroup")
    parts = (part for line in text.splitlines() for part in line.split("/"))
    return next((part for part in parts if part in _DISTRIBUTION_UNITS), "")
