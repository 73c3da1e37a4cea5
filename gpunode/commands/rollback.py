"""`gpunode rollback [ID]`: restore the files of a journal entry and restart the engine."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gpunode.host import Host
from gpunode.host.journal import Entry, Journal, lock_path
from gpunode.output.result import Block, Change, Diff, Progress, Result, Style, Text
from gpunode.runtime import find
from gpunode.runtime.apply import Past, change_files, past, take_back
from gpunode.runtime.engine import Active, Engine, Plan, Request
from gpunode.runtime.removal import Original, cdi_users
from gpunode.runtime.workflow import LOCK_SECONDS, Intent, RestartReport, RuntimeConfiguration, change, shown


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
    if not options.dry_run and _killed(Journal.of(host), options.id):
        done = _finish(host, options, progress)
        if done is not None:
            return done
    entry = Journal.of(host).committed(options.id)
    manifest = entry.manifest
    if not manifest.get("engine"):
        return _files_only(host, options, entry, progress)

    def prepare(engines: tuple[Engine, ...], journal: Journal) -> tuple[Intent, ...]:
        back = past(host, journal, entry)

        def plan(active: Active | None) -> Plan:
            return Original(back.edits, back.units).plan(engines[0], back.names, active)

        def in_force(active: Active) -> bool:
            return all(_is_as_before(active, manifest, name) for name in back.names)

        intent = Intent(
            "rollback",
            back.names,
            plan,
            in_force,
            kind="Rollback",
            done=lambda: back.finish(journal),
            notes=(*_also(back), *_bereft(back, journal)),
        )
        return (intent,)

    request = Request(
        runtimes=(find.name_of(manifest),),
        config=str(manifest.get("config", "")),
        socket=str(manifest.get("socket", "")),
        restart_command=options.restart_command or str(manifest.get("restartCommand", "")),
        dry_run=options.dry_run,
        no_restart=options.no_restart,
        no_verify=options.no_verify,
        yes=options.yes,
    )
    return change(host, request, prepare, progress)


def _killed(journal: Journal, name: str) -> tuple[Entry, ...]:
    """The operations that began and did not end, if `name` is one of them or empty."""
    found = journal.unfinished()
    return found if not name or name in {entry.id for entry in found} else ()


def _finish(host: Host, options: Options, progress: Progress) -> Result | None:
    """Take a killed run back, which is what a rollback of it means; None if it only was still running."""
    journal = Journal.of(host)
    with host.lock(lock_path(host), LOCK_SECONDS):
        killed = _killed(journal, options.id)
        if not killed:
            return None
        notes = take_back(host, options.restart_command, journal, progress)
    changes = tuple(
        Change(path, "restored" if host.exists(path) else "removed")
        for path in dict.fromkeys(file["path"] for entry in killed for file in entry.files)
    )
    data = _of_files(killed[-1].manifest, changes)
    blocks = tuple(Text(f"{change.path} {change.action}", Style.GOOD) for change in changes)
    return Result("Rollback", data, messages=notes, blocks=blocks)


def _files_only(host: Host, options: Options, entry: Entry, progress: Progress) -> Result:
    """Restore an entry of no engine: nobody has to be asked or restarted."""
    journal = Journal.of(host)
    back = functools.cache(lambda: past(host, journal, entry))  # looked at once, under the lock
    did = change_files(
        host,
        "rollback",
        lambda: back().edits,
        progress,
        context={"config": str(entry.manifest.get("config", ""))},
        named_units=entry.units,
        done=lambda: back().finish(journal),
        dry_run=options.dry_run,
    )
    changes = tuple(shown(edit, "Rollback") for edit in did.edits)
    data = replace(_of_files(entry.manifest, changes), journal=did.journal, dry_run=options.dry_run)
    mark = " (dry run)" if options.dry_run else ""
    blocks: list[Block] = []
    for restored in changes:
        blocks.append(Text(f"{restored.path} {restored.action}{mark}", Style.GOOD))
        blocks += [Diff(restored.diff)] if options.dry_run and restored.diff else []
    return Result("Rollback", data, messages=(*did.notes, *_also(back())), blocks=tuple(blocks))


def _of_files(manifest: Mapping[str, Any], changes: tuple[Change, ...]) -> RuntimeConfiguration:
    return RuntimeConfiguration(
        engine=str(manifest.get("engine", "")),
        engine_version="",
        config_version=None,
        config=str(manifest.get("config", "")),
        config_source="the journal",
        changes=changes,
        restart=RestartReport("none", performed=False, seconds=0.0, command="", reason=""),
        active=None,
        journal="",
        dry_run=False,
    )


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


def _also(back: Past) -> tuple[str, ...]:
    """Says which later changes of the same files go as well."""
    later = [entry.id for entry in back.entries if entry is not back.entry]
    return (f"this takes back what came later as well: {', '.join(later)}",) if later else ()


def _bereft(back: Past, journal: Journal) -> tuple[str, ...]:
    """Says which other engines use the CDI specification that goes."""
    own = find.name_of(back.entry.manifest)
    users = [name for name in cdi_users(journal) if name != own]
    gone = [edit.path for edit in back.edits if edit.generated and edit.after is None]
    if not users or not gone:
        return ()
    names = ", ".join(users)
    return (f"{gone[0]} goes, needed by {names} as well; to write it again: gpunode cdi refresh",)
