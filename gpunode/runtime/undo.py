"""Going back: the files as they were before a runtime was configured, taken from the journal."""

from __future__ import annotations

from typing import Any

from gpunode.journal import Entry, Journal, digest
from gpunode.runtime.engine import Engine, FileEdit

OPERATION = "configure-runtime"


def original_files(engine: Engine, journal: Journal, name: str) -> tuple[FileEdit, ...]:
    """Edits that restore the files byte for byte; empty if gpunode did not write what they hold now.

    Several runs may have written, so it goes back entry by entry until the files don't know the runtime.
    """
    now: dict[str, bytes | None] = {}
    then: dict[str, bytes | None] = {}
    for entry in reversed(_entries(engine, journal, name)):
        for file in entry.files:
            path = file["path"]
            now.setdefault(path, engine.host.read_bytes(path))
            if digest(then.get(path, now[path])) != file["after"]:
                return ()
        then |= {file["path"]: journal.original(entry, file) for file in entry.files}
        if not entry.manifest.get("hadRuntime"):
            return tuple(FileEdit(path, now[path], content) for path, content in then.items())
    return ()


def previous_default(engine: Engine, journal: Journal, name: str) -> str:
    """The default runtime that the last run which set `name` as default has replaced; empty if none."""
    found = [_text(entry.manifest.get("previousDefault")) for entry in _entries(engine, journal, name)]
    return next((value for value in reversed(found) if value), "")


def _entries(engine: Engine, journal: Journal, name: str) -> tuple[Entry, ...]:
    wanted = {"operation": OPERATION, "config": engine.daemon.config_path, "runtime": name}
    return tuple(
        entry
        for entry in journal.entries()
        if entry.state == "committed"
        and all(entry.manifest.get(key) == value for key, value in wanted.items())
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
