"""`gpunode rollback [ID]`: restore the files of a journal entry and restart the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpunode.errors import ConfigError
from gpunode.host import Host
from gpunode.journal import Entry, Journal
from gpunode.result import Progress, Result
from gpunode.runtime.engine import Active, Engine, FileEdit, Plan
from gpunode.runtime.workflow import Intent, Request, change


@dataclass(frozen=True)
class Options:
    """The command line's options under their own names; `id` empty is the last entry."""

    id: str = ""
    dry_run: bool = False
    no_restart: bool = False
    restart_command: str = ""
    no_verify: bool = False
    yes: bool = False


def run(host: Host, options: Options, progress: Progress) -> Result:
    """Restore one entry's files with mode and owner; kind Rollback, data as for RuntimeConfiguration.

    `ConfigError` if someone changed one of them since: nothing is restored then.
    """
    entry = Journal.of(host).committed(options.id)
    manifest = entry.manifest
    name = str(manifest.get("runtime", ""))

    def prepare(engine: Engine, journal: Journal) -> Intent:
        _refuse_foreign(journal, entry)

        def plan(active: Active | None) -> Plan:
            return engine.restoring(_edits(host, journal, entry), name, active)

        def done() -> None:
            journal.own(entry)
            journal.mark(entry, "rolled-back")

        def in_force(active: Active) -> bool:
            return _is_as_before(active, manifest, name)

        return Intent("rollback", name, plan, in_force, kind="Rollback", done=done)

    request = Request(
        runtime=str(manifest.get("engine", "")),
        config=str(manifest.get("config", "")),
        socket=str(manifest.get("socket", "")),
        restart_command=options.restart_command or str(manifest.get("restartCommand", "")),
        dry_run=options.dry_run,
        no_restart=options.no_restart,
        no_verify=options.no_verify,
        yes=options.yes,
    )
    return change(host, request, prepare, progress)


def _is_as_before(active: Active, manifest: Mapping[str, Any], name: str) -> bool:
    """Whether the daemon has the runtime, and it as default, just as it did then.

    A daemon that had not read its files then may also have become what they say. True if nobody could ask
    it then.
    """
    before = manifest.get("activeBefore")
    if not isinstance(before, dict):
        return True
    has, had = name in active.handlers, name in before.get("handlers", ())
    was_default = before.get("default") == name
    if has == had:
        return (active.default == name) == was_default
    return has == manifest.get("hadRuntime") and (has or active.default != name)


def _refuse_foreign(journal: Journal, entry: Entry) -> None:
    changed = journal.foreign(entry)
    if changed:
        raise ConfigError(
            f"{', '.join(changed)} changed after {entry.id}; nothing was restored",
            hint=f"roll back later entries first, or compare by hand: ls {entry.directory}",
        )


def _edits(host: Host, journal: Journal, entry: Entry) -> tuple[FileEdit, ...]:
    return tuple(
        FileEdit(file["path"], host.read_bytes(file["path"]), journal.original(entry, file))
        for file in entry.files
    )
