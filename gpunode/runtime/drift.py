"""Differences between an engine's files and its running daemon, and the command that fixes each. Pure."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from gpunode.errors import GpunodeError
from gpunode.facts.daemons import Daemon
from gpunode.facts.effective import EngineSettings, configure_options, own_default
from gpunode.facts.writers import is_nvidia_program
from gpunode.runtime import find
from gpunode.runtime.engine import Active, Engine

_MERGES_DEEPLY = (2,)  # containerd; before, a drop-in's plugin table replaces the main file's


@dataclass(frozen=True)
class Drift:
    """One difference. `subject` is the handler or the key; `fix` the command that fixes it, empty if none.

    `kind` is stable: not-active, not-in-file, other-path, other-default, other-cdi, shadowed, lost and
    read-before (the daemon shows its files, and had not read them when it started).
    """

    kind: str
    subject: str
    detail: str
    fix: str


class Remedies(NamedTuple):
    """The commands that make a daemon read its files again; `reread` may be a reload where one is enough."""

    reread: str
    restart: str


def drift(
    daemon: Daemon, files: EngineSettings, active: Active | None, remedies: Remedies
) -> tuple[Drift, ...]:
    """All differences.

    None are known where the files can't be read; only those of copies if no daemon was queried.
    """
    if files.problem:
        return ()
    drifts = list(_copies(daemon, files))
    if active is not None:
        drifts += _handlers(daemon, files, active, remedies)
        drifts += _default(daemon, files, active, remedies)
        if files.cdi is not None and active.cdi is not None and files.cdi != active.cdi:
            states = ("on in the file, off", "off in the file, on")
            detail = f"{states[not files.cdi]} in the running daemon"
            drifts.append(Drift("other-cdi", "CDI", detail, remedies.restart))
    restarts = (remedies.reread, remedies.restart)
    # a restart fixes what a reload would, too, but removes the runtimes that are in no file
    keep = next((each.fix for each in drifts if each.kind == "not-in-file" and each.fix not in restarts), "")
    if keep or any(entry.fix == remedies.restart for entry in drifts):
        fix = keep or remedies.restart
        drifts = [replace(entry, fix=fix) if entry.fix in restarts else entry for entry in drifts]
    return tuple(drifts)


def _handlers(daemon: Daemon, files: EngineSettings, active: Active, remedies: Remedies) -> Iterator[Drift]:
    lost = files.lacks(active.handlers)
    nvidia = [n for n in lost if n.startswith("nvidia") or is_nvidia_program(active.paths.get(n, ""))]
    options = configure_options(nvidia, active.default if active.default in nvidia else "")
    configure = ("gpunode", "configure-runtime", "--runtime", find.name_of_daemon(daemon), *options)
    for name in lost:
        where = f"{active.paths.get(name, '')} in the running daemon, in no file".lstrip()
        detail = f"{where}: it is gone after the next restart"
        if name in nvidia:
            yield Drift("not-in-file", name, detail, shlex.join(configure))
        else:
            detail += f"; to keep it, add it to {daemon.config_path} first"
            yield Drift("not-in-file", name, detail, remedies.restart)
    for handler in files.handlers:
        now = active.paths.get(handler.name, "")
        if handler.name not in active.handlers:
            detail = f"it is in {handler.file} but not in the running daemon"
            yield Drift("not-active", handler.name, detail, remedies.reread)
        elif handler.path and now and handler.path != now:
            detail = f"{handler.path} in {handler.file}, {now} in the running daemon"
            yield Drift("other-path", handler.name, detail, remedies.reread)


def _default(daemon: Daemon, files: EngineSettings, active: Active, remedies: Remedies) -> Iterator[Drift]:
    expected = files.default or own_default(daemon)
    if expected and active.default and expected != active.default:
        where = "in the file" if files.default else "the engine's own, as no file names one"
        detail = f"{expected} ({where}), {active.default} in the running daemon"
        yield Drift("other-default", "default runtime", detail, remedies.reread)


def _copies(daemon: Daemon, files: EngineSettings) -> Iterator[Drift]:
    """Settings of a generated drop-in that the main file has changed since."""
    replaced = daemon.version < _MERGES_DEEPLY
    name = daemon.manager or daemon.name
    fix = f"gpunode configure-runtime --runtime {name} --replace"
    for file in files.files:
        if file.copy is None:
            continue
        for key in file.copy.shadowed:
            detail = f"{file.path} holds an old copy, so the main file's value has no effect"
            yield Drift("shadowed", ".".join(key), detail, fix)
        for key in file.copy.lost if replaced else ():
            detail = f"{file.path} replaces the table that contains it, so it has no effect"
            yield Drift("lost", ".".join(key), detail, fix)


# Queries to several daemons at once, with a timeout.

_SECONDS = 3.0  # a healthy daemon answers within milliseconds, a busy one within a second


class DaemonAnswer(NamedTuple):
    """A daemon's answer, or in `silence` why there is none."""

    active: Active | None = None
    silence: str = ""


def query_all(engines: Sequence[Engine]) -> tuple[DaemonAnswer, ...]:
    """The answers, in the engines' order, after 3 seconds at most; a late one counts as silent."""
    answers: dict[int, DaemonAnswer] = {}

    def query(number: int, engine: Engine) -> None:
        try:
            answers[number] = DaemonAnswer(engine.query())
        except GpunodeError as error:
            answers[number] = DaemonAnswer(None, error.message)

    # daemon threads: one that hangs in a socket must not keep the program from exiting
    threads = [threading.Thread(target=query, args=pair, daemon=True) for pair in enumerate(engines)]
    for thread in threads:
        thread.start()
    deadline = engines[0].host.monotonic() + _SECONDS if engines else 0.0
    for thread, engine in zip(threads, engines, strict=True):
        thread.join(max(0.0, deadline - engine.host.monotonic()))
    late = DaemonAnswer(None, f"no answer within {_SECONDS:g} seconds")
    return tuple(answers.get(number, late) for number in range(len(engines)))
