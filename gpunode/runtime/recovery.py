"""What happens to a run that was killed half-way: its files are put back and its daemon reads them again."""

from __future__ import annotations

import functools

from gpunode.errors import DaemonError, GpunodeError, Unreadable
from gpunode.host import Host
from gpunode.journal import Entry, Journal
from gpunode.result import Progress
from gpunode.runtime import find
from gpunode.runtime.apply import packages_stay, recover, reload_undo
from gpunode.runtime.engine import Active, Engine, FileEdit, decode
from gpunode.runtime.restart import Restarter

_OF_THE_ENGINE = ("config", "socket", "restartCommand", "verb")


def restarter_of(host: Host, command: str, engine: Engine) -> Restarter:
    """How `engine` is restarted: by the user's own `command`, else as this node does it."""
    again = functools.partial(find.finder_of(engine.daemon), host, engine.daemon.config_path)
    return Restarter(host, engine.daemon, again, command)


def ask_if_up(engine: Engine) -> Active | None:
    """What the daemon says now; None if it doesn't run, isn't reachable or must not be contacted."""
    if not engine.host.live:
        return None
    try:
        return engine.ask()
    except DaemonError:
        return None


def _bring_back(engine: Engine, restarter: Restarter, verb: str) -> None:
    """A reload is taken back by a reload: a restart of Docker would stop its containers."""
    if verb == "wait":
        return  # whoever applies the files sees the old ones
    if verb != "reload" or ask_if_up(engine) is None:
        restarter.perform("restart")
        return
    from gpunode.runtime.docker_plan import for_reload

    path = engine.daemon.config_path
    content = engine.host.read_bytes(path)
    undo = for_reload(decode(content, path), path).encode()
    reload_undo(engine.host, (FileEdit(path, content, content, None, undo),), restarter)


def take_back(host: Host, command: str, journal: Journal, progress: Progress) -> tuple[str, ...]:
    """Take back what a killed run left behind, and let its daemon read the files again. Needs the lock.

    `command` is the user's own for the restart, empty for the one that the killed run was given.
    """

    def restart(entry: Entry) -> None:
        known = {key: str(entry.manifest.get(key) or "") for key in _OF_THE_ENGINE}
        if entry.state != "applied" or known["verb"] in ("", "none") or not host.live:
            return  # the daemon never saw the new files
        name = find.name_of(entry.manifest)
        try:
            # an engine that was removed since must not stop every later run
            engine = find.engine(host, name, known["config"], "", known["socket"])
            own = command or known["restartCommand"]
            with progress.step(f"bringing {name} back to its files of before"):
                _bring_back(engine, restarter_of(host, own, engine), known["verb"])
        except GpunodeError as error:
            progress.note(f"{name} could not be restarted: {error.message}")

    return recover(host, journal, restart)


def half_done(host: Host, journal: Journal) -> tuple[str, ...]:
    """What a dry run says of an operation that has begun and not ended; nothing if it may not look."""
    try:
        found = journal.unfinished()
    except Unreadable:
        return ()
    return tuple(
        f"{entry.id} runs now or was killed half-way; if so, "
        + (packages_stay(entry) if entry.stays else f"the next run first takes back {_written(entry)}")
        for entry in found
    )


def _written(entry: Entry) -> str:
    return "what it wrote to " + ", ".join(str(file["path"]) for file in entry.files)
