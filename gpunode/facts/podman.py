"""Podman on this node: no daemon, only a program and the files that it reads at each run.

containers.conf(5): the distribution's file, the administrator's, then ``*.conf`` of its ``.d`` directory in
alphabetical order; a later file overrides a key, and a runtime under ``engine.runtimes`` as a whole. podman
reports and ignores a file that can't be parsed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from gpunode.errors import ConfigError
from gpunode.facts.daemons import Daemon, daemon_version
from gpunode.facts.toml import dig, parse_toml
from gpunode.host import Host
from gpunode.output.typed import as_dict, as_strings

CONFIG = "/etc/containers/containers.conf"
DROP_INS = f"{CONFIG}.d"
_PACKAGED = "/usr/share/containers/containers.conf"


def find_podman(host: Host, config: str | None = None) -> Daemon | None:
    """The podman on PATH; None if there is none. `config` is ignored: podman's files have fixed paths."""
    binary = host.which("podman")
    if binary is None:
        return None
    version = daemon_version(host, "podman", binary)
    return Daemon("podman", binary, version, config or CONFIG, "the path built into podman", "", None)


class PodmanFile(NamedTuple):
    """One containers.conf."""

    path: str
    text: str
    tree: dict[str, Any]

    @property
    def runtimes(self) -> dict[str, list[str]]:
        """Runtimes by name, each with the paths that podman tries in order."""
        return as_dict(dig(self.tree, "engine", "runtimes"))


class PodmanConfig(NamedTuple):
    """The files of the system, in the order in which podman reads them."""

    files: tuple[PodmanFile, ...]

    @property
    def runtimes(self) -> dict[str, list[str]]:
        """The runtimes in the files; podman knows crun, runc and some others without any file."""
        merged: dict[str, list[str]] = {}
        for file in self.files:
            merged |= file.runtimes
        return merged

    def setting(self, key: str) -> Any:
        """``engine.KEY`` from the last file that sets it, None if none does."""
        values = [dig(file.tree, "engine", key) for file in self.files]
        return next((value for value in reversed(values) if value is not None), None)

    def strings(self, key: str) -> tuple[str, ...]:
        """A list setting's strings; empty if no file has it."""
        return as_strings(self.setting(key))


def load_podman(host: Host) -> PodmanConfig:
    """Read the system's files. `ConfigError` names file, line and column of a syntax error."""
    files = []
    for path in (*_with_drop_ins(host, _PACKAGED), *_with_drop_ins(host, CONFIG)):
        text = host.read_text(path)
        if text is not None:
            file = PodmanFile(path, text, parse_toml(text, path))
            _refuse_wrong_types(file)
            files.append(file)
    return PodmanConfig(tuple(files))


def _with_drop_ins(host: Host, path: str) -> Iterable[str]:
    return (path, *host.glob(f"{path}.d", "*.conf"))


def _refuse_wrong_types(file: PodmanFile) -> None:
    engine = file.tree.get("engine", {})
    runtimes = engine.get("runtimes", {}) if isinstance(engine, dict) else None
    fine = isinstance(runtimes, dict) and all(
        isinstance(paths, list) and all(isinstance(path, str) for path in paths)
        for paths in runtimes.values()
    )
    if not fine or not isinstance(engine.get("runtime", ""), str):
        raise ConfigError(
            f"{file.path}: podman can't read its [engine] table: runtimes must be lists of paths, runtime "
            "a name",
            hint=f"correct it: ${{EDITOR:-vi}} {file.path}",
        )
