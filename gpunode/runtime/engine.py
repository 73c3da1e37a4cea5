"""Types of runtime configuration, and the base class of the container engines.

An engine reads and plans without changing anything. A `Plan` holds whole file contents and a verb; apply.py
is the only code that carries one out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from gpunode.errors import ConfigError, DaemonError, PreconditionError
from gpunode.facts.daemons import Daemon
from gpunode.facts.registry import ENGINES
from gpunode.host import NOT_TRUSTED, Host
from gpunode.host.journal import FileEdit
from gpunode.host.process import Completed
from gpunode.host.trust import advice

PROGRAM = "/usr/bin/nvidia-container-runtime"  # for an engine that needs an absolute path


class Handler(NamedTuple):
    """A runtime of an engine: its name and its program."""

    name: str
    path: str


class DesiredConfig(NamedTuple):
    """The desired configuration: runtime handlers, the first as default if requested, and CDI.

    Without handlers only CDI is configured. `replace` allows replacing a drop-in that other tools generated,
    a copy of the engine's whole section, with a minimal one.
    """

    handlers: tuple[Handler, ...] = ()
    set_as_default: bool = False
    cdi: bool = False
    replace: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the handlers."""
        return tuple(handler.name for handler in self.handlers)

    @property
    def default(self) -> str:
        """The handler that should be the default; empty if the default isn't changed."""
        return self.handlers[0].name if self.set_as_default and self.handlers else ""

    def replaces(self, default: str) -> str:
        """`default` if another runtime becomes the default, else empty."""
        return default if self.default not in ("", default) else ""

    def refuse_without_cdi(self, daemon: Daemon) -> None:
        """`PreconditionError` if CDI is requested and this release doesn't have it; an unknown one may."""
        engine = ENGINES[daemon.name]
        if self.cdi and daemon.version and daemon.version < engine.cdi:
            first = ".".join(map(str, engine.cdi))
            raise PreconditionError(
                f"{engine.title} {daemon.release} has no CDI, which came with {first}",
                hint=f"leave out --cdi or upgrade {engine.title}",
            )


class UnwantedConfig(NamedTuple):
    """What to remove: handlers, and with `cdi` the setting that turned its CDI on.

    A default that was one of them becomes `previous_default` again, the engine's own if that is empty.
    """

    names: tuple[str, ...]
    previous_default: str = ""
    cdi: bool = False


def decode(data: bytes | None, path: str) -> str:
    """File content for editing; `ConfigError` with the position of a byte that isn't UTF-8."""
    try:
        return (data or b"").decode("utf-8")
    except UnicodeDecodeError as error:
        line = (data or b"")[: error.start].count(b"\n") + 1
        column = error.start - (data or b"").rfind(b"\n", 0, error.start)
        raise ConfigError(
            f"{path}:{line}:{column}: not UTF-8", hint=f"look at that line: sed -n {line}p {path} | cat -v"
        ) from error


def refuse_untrusted(answer: Completed) -> None:
    """`PreconditionError` if a daemon's program was not executed, because other users can write it."""
    if answer.code == NOT_TRUSTED:
        raise PreconditionError(answer.stderr, hint=advice(answer.stderr))


class PlannedFiles(NamedTuple):
    """New text of every file that changes, None for one to remove, and what a plan says of the change.

    `version` is containerd's file version. For `previous_default` and `switched_cdi` see `Plan`.
    """

    texts: Mapping[str, str | None]
    notes: tuple[str, ...] = ()
    version: int | None = None
    previous_default: str = ""
    switched_cdi: bool = False


def edits_to(host: Host, texts: Mapping[str, str | None], otherwise: str = "") -> tuple[FileEdit, ...]:
    """The edits to these texts, where None removes a file; without any, the file `otherwise` unchanged."""
    edits = tuple(
        FileEdit(path, host.read_bytes(path), None if text is None else text.encode())
        for path, text in texts.items()
    )
    return edits or ((unchanged(host, otherwise),) if otherwise else ())


def unchanged(host: Host, path: str) -> FileEdit:
    """A file to show that a plan leaves as it is."""
    content = host.read_bytes(path)
    return FileEdit(path, content, content)


def verb_for(
    edits: Iterable[FileEdit], effective: bool, change: tuple[str, str], stale: str = ""
) -> tuple[str, str]:
    """Verb and reason of a plan: `change` if a file changes, a restart if the files aren't effective."""
    if any(edit.action != "unchanged" for edit in edits):
        return change
    stale = stale or "the files are correct, but the running containerd has not loaded them"
    return ("none", "") if effective else ("restart", stale)


class Plan(NamedTuple):
    """The steps and the reason. `verb` is none, reload, restart or wait; `reason` explains it.

    ``wait`` is for files that another program applies, as k0s does: gpunode only waits for the daemon's
    answer. `config_version` is containerd's file version, None elsewhere. `previous_default` is the default
    runtime that this plan replaces, empty if none. `had_runtime` is whether the files had a runtime of the
    plan. `units` are systemd units among the files: enabled after writing, disabled before their removal.
    `switched_cdi` is whether it turns the engine's CDI on. `remaining` are runtimes that the owner of the
    engine registers by itself, so they stay after a removal. `restores` is whether it restores files byte for
    byte, so that the daemon's settings need no comparison. `confirm` says what running containers lose, which
    the user must confirm first; empty if nothing.
    """

    engine: str
    edits: tuple[FileEdit, ...]
    verb: str = "none"
    reason: str = ""
    notes: tuple[str, ...] = ()
    config_version: int | None = None
    previous_default: str = ""
    had_runtime: bool = False
    units: tuple[str, ...] = ()
    switched_cdi: bool = False
    remaining: tuple[str, ...] = ()
    restores: bool = False
    confirm: str = ""

    @property
    def changed(self) -> tuple[FileEdit, ...]:
        """Only the edits that change something."""
        return tuple(edit for edit in self.edits if edit.action != "unchanged")

    @property
    def own(self) -> Plan:
        """The engine's own plan, for the files that it reads."""
        return self._replace(edits=tuple(edit for edit in self.edits if not edit.beside))

    def with_beside(self, edits: tuple[FileEdit, ...], units: tuple[str, ...] = ()) -> Plan:
        """The plan with the additional files, and the systemd units among them."""
        return self._replace(edits=(*self.edits, *edits), units=(*self.units, *units))


_NO_PATHS: Mapping[str, str] = MappingProxyType({})


class Active(NamedTuple):
    """The running daemon's configuration. `paths` maps handlers to programs if it reports them.

    `cdi` is whether its CDI is on, None if it isn't reported.
    """

    handlers: tuple[str, ...]
    default: str
    paths: Mapping[str, str] = _NO_PATHS
    running_containers: int = 0
    live_restore: bool = False
    cdi: bool | None = None

    def without(self, names: tuple[str, ...]) -> Active:
        """The same answer without these handlers."""
        return self._replace(handlers=tuple(name for name in self.handlers if name not in names))

    def lacks(self, names: tuple[str, ...]) -> bool:
        """Whether it has none of these handlers."""
        return not any(name in self.handlers for name in names)

    def has(self, desired: DesiredConfig) -> bool:
        """Whether the desired configuration is active."""
        there = all(
            handler.name in self.handlers and self.paths.get(handler.name, handler.path) == handler.path
            for handler in desired.handlers
        )
        cdi = self.cdi is not False or not desired.cdi
        return there and cdi and desired.default in ("", self.default)


@dataclass(frozen=True)
class Engine(ABC):
    """A container engine that can be configured. `active` is its daemon's report, None if it is down.

    `drop_in` is the drop-in that the user named, empty for the engine's own.
    """

    host: Host
    daemon: Daemon
    drop_in: str = ""

    @property
    def program(self) -> str:
        """The runtime program to register if the user names none."""
        return PROGRAM

    @abstractmethod
    def plan(self, desired: DesiredConfig, active: Active | None) -> Plan:
        """The plan from the present files to `desired`."""

    @abstractmethod
    def plan_removal(self, unwanted: UnwantedConfig, active: Active | None) -> Plan:
        """The plan to remove `unwanted`, from any author."""

    @abstractmethod
    def plan_edits(self, edits: tuple[FileEdit, ...], names: tuple[str, ...], active: Active | None) -> Plan:
        """The plan around edits that remove `names`, or restore files as they were before."""

    @abstractmethod
    def validate(self, plan: Plan, expected: DesiredConfig | None) -> tuple[str, ...]:
        """Let the daemon itself read staged copies; `ValidationError` if it refuses. Returns notes."""

    @abstractmethod
    def query(self) -> Active:
        """Query the running daemon; `DaemonError` if it doesn't answer."""

    def query_if_up(self) -> Active | None:
        """What the daemon reports now; None if it doesn't run, isn't reachable or must not be contacted."""
        if not self.host.live:
            return None
        try:
            return self.query()
        except DaemonError:
            return None

    def reload_edits(self) -> tuple[FileEdit, ...]:
        """The present files with the `undo` text that a reload needs; () if a restart must read them."""
        return ()


def injects_twice(path: str) -> str:
    """The note about an old hook of CRI-O or podman that stays beside a runtime."""
    return (
        f"{path} is NVIDIA's old OCI hook: beside the runtime it injects GPUs a second time;"
        f" rm {path}, or let --cdi remove it"
    )


# The options of every change of an engine.


@dataclass(frozen=True)
class Request:
    """`runtimes` are the engines to change, ``auto`` for the installed one.

    `config`, `drop_in_config` and `socket` are the files and the daemon, if not the engine's own.
    `restart_command` is the user's own, for a node where systemd doesn't run the daemon. Without `yes`,
    `confirm` asks the user before containers are stopped. `configures` is whether the engines are configured
    and not only changed back, so that the next step is to verify them. `restart_hint` is the hint where the
    daemon can't be restarted, for a command without `--restart-command` and `--no-restart`.
    """

    runtimes: tuple[str, ...] = ("auto",)
    config: str = ""
    drop_in_config: str = ""
    socket: str = ""
    restart_command: str = ""
    restart_hint: str = ""
    dry_run: bool = False
    exit_code: bool = False
    no_restart: bool = False
    no_verify: bool = False
    yes: bool = False
    confirm: Callable[[str], bool] = lambda _question: False
    configures: bool = False

    def agreed(self, question: str) -> bool:
        """Whether the user accepts this, by `--yes` or an answer; a dry run asks nothing."""
        return self.yes or (not self.dry_run and self.confirm(question))
