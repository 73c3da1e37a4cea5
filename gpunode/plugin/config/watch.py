"""Watcher of the config file while the plugin serves: edits and SIGHUP take effect, and an invalid edit
changes nothing.

A check is one stat of the file in each of the part's turns, so symlinks that are replaced (a ConfigMap's
``..data``, config-manager's link) count as edits. A file is loaded once two checks have read the same: a
half-written one causes no error. Loading is not done in the part's turn, because CDI specifications may have
to be written first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from operator import attrgetter
from typing import Protocol

from gpunode.errors import GpunodeError
from gpunode.plugin.background import BackgroundTask
from gpunode.plugin.config.options import OPTIONS
from gpunode.plugin.config.resolve import OptionSources
from gpunode.plugin.config.settings import Settings
from gpunode.plugin.config.values import ConfigProblem
from gpunode.plugin.logfmt import Log

AGAIN_SECONDS = 0.2


class SettingsOwner(Protocol):
    """The owner of the settings: the plugin's ledger, or `gpunode labels --watch`."""

    settings: Settings
    config_trouble: str

    def configure(self, settings: Settings) -> None: ...


class ConfigWatch:
    """A part; see `gpunode.plugin.model.ServicePart`. Without a file only SIGHUP counts: it rereads the GPUs.

    `owner.config_trouble` says why the present file isn't the active one; empty if it is. `hurry` reads the
    GPUs now, `take_hangup` returns whether SIGHUP arrived since its last call.
    """

    def __init__(
        self,
        owner: SettingsOwner,
        log: Log,
        hurry: Callable[[], None],
        sources: OptionSources,
        take_hangup: Callable[[], bool],
        taken: bytes,
        task: BackgroundTask | None = None,
    ) -> None:
        self._owner = owner
        self._log = log
        self._hurry = hurry
        self._sources = sources
        self._take_hangup = take_hangup
        self._task = task or BackgroundTask("config")
        self._path = sources.file
        self._considered: bytes | str = taken
        self._pending: bytes | str | None = None
        self._signature: object = None
        self._next = 0.0

    def tick(self, now: float) -> float | None:
        if self._task.busy:  # requests that arrive meanwhile are handled next
            return None
        hung_up = self._take_hangup()
        if hung_up:
            self._log.info("reading the GPUs and the config file again", signal="SIGHUP")
            self._hurry()
        if self._path and (hung_up or now >= self._next):
            self._look(hung_up)
            self._next = now + (AGAIN_SECONDS if self._pending is not None else 0.0)
        return None if self._pending is None else max(0.0, self._next - now)

    def close(self) -> None:
        """Does nothing: no resource was acquired."""

    def _look(self, hung_up: bool) -> None:
        signature = self._sign()
        if signature == self._signature and self._pending is None and not hung_up:
            return
        self._signature = signature
        content = self._read()
        if content == self._considered and not hung_up:
            self._pending = None
        elif content == self._pending or hung_up:
            self._pending, self._considered = None, content
            self._task.start(partial(self._take, content))
        else:
            self._pending = content

    def _sign(self) -> object:
        try:
            status = self._sources.reader.stat(self._path)
        except GpunodeError as error:
            return error.message
        return status and (
            status.st_dev,
            status.st_ino,
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
        )

    def _read(self) -> bytes | str:
        """The bytes, or why there are none."""
        try:
            return self._sources.read()
        except GpunodeError as error:
            return error.message

    def _take(self, content: bytes | str) -> None:
        if isinstance(content, str):
            self._refuse([ConfigProblem("", "", content)])
            return
        resolved = self._sources.resolve(content)
        if resolved.problems:
            self._refuse(resolved.problems)
            return
        before = self._owner.settings
        settings, waiting = _without_restart(resolved.settings, before)
        try:
            self._owner.configure(settings)
        except GpunodeError as error:
            self._refuse([resolved.refused(error)])
            return
        self._owner.config_trouble = ""
        for warning in resolved.warnings:
            self._log.warning(warning.text, **warning.fields)
        changed = ", ".join(_changed(before, settings)) or "nothing"
        self._log.info("config file loaded", file=self._path, changed=changed)
        if waiting:
            self._log.warning("these changes need a restart", options=", ".join(waiting))

    def _refuse(self, problems: Sequence[ConfigProblem]) -> None:
        self._owner.config_trouble = "; ".join(problem.text for problem in problems)
        self._log.error(
            "the config file was rejected; the last valid one stays active",
            file=self._path,
            problems=len(problems),
        )
        for problem in problems:
            self._log.error(problem.text, **problem.fields)


def _without_restart(desired: Settings, before: Settings) -> tuple[Settings, list[str]]:
    """The settings that can change now, and the flags of those that can't."""
    fixed = [(option.flags[0], option.path, attrgetter(option.path)) for option in OPTIONS if not option.live]
    changed = [(flag, path, read(before)) for flag, path, read in fixed if read(desired) != read(before)]
    for _, path, value in changed:
        section, _, name = path.rpartition(".")
        if section:
            name, value = section, getattr(desired, section)._replace(**{name: value})
        desired = replace(desired, **{name: value})
    return desired, [flag for flag, _, _ in changed]


def _changed(before: Settings, now: Settings) -> list[str]:
    names = [field.name for field in fields(Settings)]
    return [name.replace("_", "-") for name in names if getattr(before, name) != getattr(now, name)]
