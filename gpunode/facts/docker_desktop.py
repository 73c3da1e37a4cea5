"""Docker Desktop for Linux, which runs containers in a virtual machine and redirects the `docker` command to
it.

It runs ``com.docker.backend`` as the user; the command line follows `currentContext` of the user's
~/.docker/config.json, which Desktop sets to ``desktop-linux``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gpunode.errors import GpunodeError
from gpunode.facts.processes import Process
from gpunode.facts.users import account
from gpunode.host import Host

CONTEXT = "desktop-linux"
_PROGRAM = "com.docker.backend"


@dataclass(frozen=True)
class Desktop:
    """One user's running Docker Desktop. `context` is the context of their docker command, None if unknown;
    `config` is the file that sets it."""

    user: str
    pid: int
    config: str
    context: str | None


def running_desktops(host: Host, processes: Iterable[Process]) -> tuple[Desktop, ...]:
    """One per user; only homes of users who run Desktop are read."""
    found: dict[str, Desktop] = {}
    for process in processes:
        if process.name == _PROGRAM:
            who = account(host, process.uid)
            config = f"{who.home.rstrip('/')}/.docker/config.json"
            found.setdefault(
                who.name, Desktop(who.name, process.pid, config, _context(host.as_user(process.uid), config))
            )
    return tuple(found.values())


def _context(host: Host, path: str) -> str | None:
    import json

    try:
        text = host.read_text(path)
        tree: Any = json.loads(text) if text is not None else {}
    except (GpunodeError, ValueError, RecursionError):
        return None
    name = tree.get("currentContext", "default") if isinstance(tree, dict) else None
    return name if isinstance(name, str) else None
