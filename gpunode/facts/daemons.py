"""Which container daemons are on this node, and which configuration file each one really uses.

Where a running process and a unit file disagree, the process is right: it is what serves containers now.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpunode.facts.processes import Process


@dataclass(frozen=True)
class Daemon:
    """One container daemon as found on the node.

    `version` is () if it can't be told. `config_source` says how `config_path` was found, for people.
    `process` is None if it isn't running; `argv` are the running process's arguments, else the unit's.
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
