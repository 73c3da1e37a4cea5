"""The docker snap: a confined dockerd with a file, a unit and an NVIDIA runtime of its own.

Its wrapper starts dockerd with ``--config-file=$SNAP_DATA/config/daemon.json``, where SNAP_DATA ends in the
snap's revision; ``current`` beside it is a symlink to that revision's, and a refresh copies the directory.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from gpunode.facts.daemons import Daemon, parse_version, same_file
from gpunode.facts.docker_file import socket_of
from gpunode.facts.processes import Process
from gpunode.facts.units import read_unit
from gpunode.host import Host

CONFIG = "/var/snap/docker/current/config/daemon.json"
UNIT = "snap.docker.dockerd.service"
PROGRAMS = "/snap/docker/current/usr/bin"  # what dockerd can start there: it sees no program of the host
_DATA = "/var/snap/docker/"


def find_snap(host: Host, processes: Sequence[Process], config: str | None = None) -> Daemon | None:
    """The snap's dockerd, running or installed; None without one, or if `config` isn't its file."""
    process = next((one for one in processes if is_snap(one)), None)
    if process is None and read_unit(host, UNIT) is None:
        return None
    own = process.option("--config-file") if process else None
    path = CONFIG if own is None or same_file(host, own, CONFIG) else own
    if config and not same_file(host, config, path):
        return None
    argv = process.argv if process else ()
    return Daemon(
        name="docker",
        binary=None,  # outside its confinement it lacks its libraries
        version=_version(host),
        config_path=path,
        config_source="the docker snap" + (f", process {process.pid}" if process else ""),
        socket=socket_of(host, argv, path),
        unit=UNIT,
        argv=argv,
        process=process,
        manager="snap",
    )


def is_snap(process: Process) -> bool:
    """Whether a dockerd is the snap's, by the file that its wrapper names."""
    return (process.option("--config-file") or "").startswith(_DATA)


def _version(host: Host) -> tuple[int, ...]:
    """The snap bears dockerd's version; its description is in every mounted revision."""
    described = host.read_text("/snap/docker/current/meta/snap.yaml") or ""
    found = re.search(r"^version: *['\"]?([^'\"\n]+)", described, re.MULTILINE)
    return parse_version(found[1]) if found else ()
