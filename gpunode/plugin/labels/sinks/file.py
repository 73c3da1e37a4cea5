"""A feature file for Node Feature Discovery's local source: ``key=value`` lines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath

from gpunode.errors import ConfigError
from gpunode.host import Host
from gpunode.plugin.labels.model import key_problem, settled
from gpunode.plugin.labels.sinks import change, lines
from gpunode.result import Change

_ATTEMPTS = 5


class FeatureFile:
    """See `Sink`. It outlives us: labels that come and go with a restart would move pods."""

    def __init__(self, host: Host, path: str) -> None:
        self._host = host
        self._path = path

    def put(self, labels: Mapping[str, str], dry_run: bool) -> Change:
        """`ConfigError` if something else than labels lies there, or a symlink; `GpunodeError` if it can't be
        written.

        Whoever else writes there meanwhile is taken note of: what is so already by then is left alone.
        """
        if self._host.is_symlink(self._path):  # whoever may write here could have any file overwritten
            raise ConfigError(
                f"{self._path} is a symlink to {self._host.readlink(self._path)}; it was left alone",
                hint="name the file that it leads to, or remove the link",
            )
        for _ in range(_ATTEMPTS - 1):
            data = self._host.read_bytes(self._path)
            try:
                return self._put(data, labels, dry_run)
            except ConfigError:
                if self._host.read_bytes(self._path) == data:  # nobody wrote: it is something else
                    raise
        return self._put(self._host.read_bytes(self._path), labels, dry_run)

    def _put(self, data: bytes | None, labels: Mapping[str, str], dry_run: bool) -> Change:
        before = None if data is None else _labels(self._path, data)
        after = labels if before is None else settled(labels, before)
        told = change(self._path, before, after)
        if told.action != "unchanged" and not dry_run:
            self._host.make_dirs(str(PurePosixPath(self._path).parent))
            self._host.write_atomic(self._path, lines(after).encode(), expect=data, keep=False)
        return told


def _labels(path: str, data: bytes) -> dict[str, str]:
    """What an earlier run, or GPU feature discovery, wrote there."""
    found = {}
    for line in data.decode("utf-8", "replace").splitlines():
        key, equals, value = line.strip().partition("=")
        if not key or key.startswith("#"):
            continue
        if not equals or "/" not in key or key_problem(key):
            raise ConfigError(
                f"{path} is no feature file: it holds {line.strip()[:60]!r}; it was left alone",
                hint="name another file, or remove this one",
            )
        found[key] = value
    return found
