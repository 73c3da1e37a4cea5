"""The options that every change of an engine takes, whatever it changes."""

from __future__ import annotations

from gpunode.dataclass import dataclass


@dataclass(frozen=True)
class Request:
    """`runtimes` are the engines to change, ``auto`` for the one that is here.

    `config`, `drop_in_config` and `socket` say which files and daemon, if not those that the engine uses.
    `restart_command` is the user's own, for a node where systemd doesn't run the daemon.
    """

    runtimes: tuple[str, ...] = ("auto",)
    config: str = ""
    drop_in_config: str = ""
    socket: str = ""
    restart_command: str = ""
    dry_run: bool = False
    exit_code: bool = False
    no_restart: bool = False
    no_verify: bool = False
    yes: bool = False
    configures: bool = False
