"""Docker on this node: which dockerd, and which daemon.json it reads."""

from __future__ import annotations

from gpunode.facts.daemons import Daemon, Kind, find_binary, locate
from gpunode.facts.docker_file import docker_version, listens_there, socket_of
from gpunode.facts.docker_rootless import find_rootless
from gpunode.facts.docker_snap import find_snap, is_snap
from gpunode.facts.processes import Process, running
from gpunode.host import Host

DEFAULT_CONFIG = "/etc/docker/daemon.json"
KIND = Kind("dockerd", "docker.service", DEFAULT_CONFIG, ("--config-file",))


def find_docker(host: Host, config: str | None = None) -> Daemon | None:
    """The dockerd that reads `config`, else the one that is meant here; None if there is none on this node.

    An ordinary user means their own rootless one if they have one. Else it is the system's, or the snap's
    where only that runs or is installed.
    """
    daemons = running(host, "dockerd")
    own = find_rootless(host, daemons, config)
    if own is not None:
        return own
    roots = tuple(one for one in daemons if one.uid == 0)
    snap = find_snap(host, roots, config)
    if snap is not None and config:
        return snap
    system = _system(host, tuple(one for one in roots if not is_snap(one)), config)
    if snap is not None and (system is None or (system.process is None and snap.process is not None)):
        return snap
    return system


def _system(host: Host, processes: tuple[Process, ...], config: str | None) -> Daemon | None:
    found = locate(host, KIND, processes, config)
    if found is None:
        return None
    binary = find_binary(host, "dockerd", found.process, found.unit)
    socket = socket_of(host, found.argv, found.config)
    asked = socket if listens_there(host, found.argv, found.config) else ""
    return Daemon(
        name="docker",
        binary=binary,
        version=docker_version(host, binary, found.process, asked),
        config_path=found.config,
        config_source=found.source,
        socket=socket,
        unit=found.unit.name if found.unit else None,
        argv=found.argv,
        process=found.process,
    )


def rootless_docker(host: Host) -> Process | None:
    """A dockerd that an ordinary user runs, None if there is none."""
    found = (one for one in running(host, "dockerd") if one.uid != 0)
    return next(found, None)
