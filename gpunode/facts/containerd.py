"""containerd on this node: which one, and its configuration with everything that it imports."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any

from gpunode.dataclass import dataclass, field
from gpunode.errors import ConfigError, GpunodeError
from gpunode.facts.containerd_imports import expand_import
from gpunode.facts.daemons import (
    Daemon,
    Kind,
    as_recorded,
    daemon_version,
    find_binary,
    locate,
    parse_version,
    socket_path,
)
from gpunode.facts.distributions import DISTRIBUTIONS, find_distribution, manager, owner
from gpunode.facts.processes import Process, option_value, running
from gpunode.facts.toml_places import line_of_key, place
from gpunode.host import Host

DEFAULT_CONFIG = "/etc/containerd/config.toml"
DEFAULT_SOCKET = "/run/containerd/containerd.sock"
KIND = Kind("containerd", "containerd.service", DEFAULT_CONFIG, ("--config", "-c"))
CRI_PLUGINS = {1: "cri", 2: "io.containerd.grpc.v1.cri", 3: "io.containerd.cri.v1.runtime"}
LARGEST = 512 << 10  # characters; the largest seen has 80 KB, and editing takes 4 s a megabyte
_VERSION_SECONDS = 1.0  # a daemon that runs answers in 3 ms
BYTE_ORDER_MARK = "\ufeff"  # containerd skips one at the start of its file, Python's parser does not
# any of these in disabled_plugins takes the CRI away from the kubelet
CRI_IDS = (*CRI_PLUGINS.values(), "io.containerd.cri.v1.images")


def find_containerd(host: Host, config: str | None = None) -> Daemon | None:
    """The containerd that reads `config`, else the system's own; None if there is none on this node.

    One that dockerd started for itself is never meant. If only a Kubernetes distribution's (k3s, rke2, k0s,
    microk8s) runs or is here, that one is given, and its `manager` names the distribution.
    """
    processes = list(running(host, "containerd"))
    if config:
        managed = owner(config)
        own = find_distribution(host, managed, processes) if managed in DISTRIBUTIONS else None
        return own if own and own.config_path == config else _daemon(host, processes, config)
    managers = {process.pid: manager(host, process) for process in processes}
    own_ones = [process for process in processes if not managers[process.pid]]
    theirs = [managers[one.pid] for one in processes if managers[one.pid] in DISTRIBUTIONS]
    if theirs and not own_ones:
        return find_distribution(host, theirs[0], processes)
    system = _daemon(host, own_ones, None)
    stopped = (find_distribution(host, name, processes) for name in DISTRIBUTIONS)
    return system or next(filter(None, stopped), None)


def _daemon(host: Host, processes: list[Process], config: str | None) -> Daemon | None:
    found = locate(host, KIND, processes, config)
    if found is None:
        return None
    binary = find_binary(host, "containerd", found.process, found.unit)
    socket = _socket(host, found.argv, found.config)
    return Daemon(
        name="containerd",
        binary=binary,
        version=cri_version(host, "containerd", binary, found.process, socket),
        config_path=found.config,
        config_source=found.source,
        socket=socket,
        unit=found.unit.name if found.unit else None,
        argv=found.argv,
        process=found.process,
        manager=owner(found.config),
    )


def cri_version(
    host: Host, name: str, binary: str | None, process: Process | None, socket: str
) -> tuple[int, ...]:
    """The version that the running daemon gives; its program is only started (20 ms) where it gives none."""
    if host.live and process is not None:
        from gpunode.daemons.cri_status import quick_version

        answer = parse_version(quick_version(host, socket, _VERSION_SECONDS))
        if answer:
            as_recorded(host, name, answer)
            return answer
    return daemon_version(host, name, binary)


def _socket(host: Host, argv: tuple[str, ...], config: str) -> str:
    given = option_value(argv[1:], "--address", "-a")
    if given:
        return socket_path(given) or given
    try:
        merged = load_config(host, config).merged
    except GpunodeError:
        return DEFAULT_SOCKET  # whoever edits or checks the file says what is wrong with it
    for name in (("grpc",), ("plugins", "io.containerd.server.v1.grpc")):
        address = dig(merged, *name, "address")
        if isinstance(address, str) and address:
            return socket_path(address) or address
    return DEFAULT_SOCKET


def dig(tree: Any, *keys: str) -> Any:
    """The value under nested tables, None where one is missing or no table."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


@dataclass(frozen=True)
class MissingImport:
    """A file that an import names, `pattern` as it stands in `importer`, and that doesn't exist."""

    path: str
    importer: str
    pattern: str


@dataclass(frozen=True)
class ContainerdConfig:
    """containerd's configuration: the main file (`main`, `main_text`) and, in `merged`, with its imports.

    `files` are those that exist, main file first, in merging order; `versions` maps each to its `version`,
    `trees` to what it holds. `release` is the containerd that reads them, () if that isn't known.
    """

    path: str
    exists: bool
    main_text: str
    main: dict[str, Any]
    merged: dict[str, Any]
    files: tuple[str, ...]
    versions: dict[str, int] = field(default_factory=dict)
    missing_imports: tuple[MissingImport, ...] = ()
    trees: dict[str, dict[str, Any]] = field(default_factory=dict)
    release: tuple[int, ...] = ()

    @property
    def version(self) -> int:
        """The main file's `version`; 1 if it names none, as containerd takes it."""
        return self.versions.get(self.path, 1)

    @property
    def deep(self) -> bool:
        """Whether this containerd merges imports key by key: 2.0 and up, which alone read version 3."""
        return self.release >= (2,) if self.release else self.version >= 3

    @property
    def plugin(self) -> str:
        """Id of the plugin table that holds the CRI's runtimes in this version.

        containerd 2.3 migrates a file without version whatever the name of its table.
        """
        if self.version == 1 and self.release >= (2, 3):
            tables = _table(self.merged.get("plugins"))
            return next((name for name in CRI_PLUGINS.values() if name in tables), CRI_PLUGINS[1])
        return CRI_PLUGINS[min(self.version, 3)] if self.version > 0 else CRI_PLUGINS[1]

    @cached_property
    def cri(self) -> dict[str, Any]:
        """The merged CRI table; {} if there is none."""
        table = _table(dig(self.merged, "plugins", self.plugin))
        if not self.deep or self.version not in (2, 3):
            return table
        # containerd 2 lays the migrated table of version 2 below one with the newer name
        older, newer = (_table(dig(self.merged, "plugins", CRI_PLUGINS[number])) for number in (2, 3))
        migrates = self.version == 2 or self.release >= (2, 3)
        return _merge_tables(older, newer) if migrates else newer

    @property
    def runtimes(self) -> dict[str, Any]:
        """Handlers by name, merged; one that no file spells out (containerd's own runc) isn't here."""
        return _table(dig(self.cri, "containerd", "runtimes"))

    @property
    def default_runtime(self) -> str:
        """Name of the default handler; ``runc`` unless a file says otherwise."""
        return self.named_default or "runc"

    @property
    def named_default(self) -> str:
        """Name of the default handler as a file spells it out; empty if none does."""
        name = dig(self.cri, "containerd", "default_runtime_name")
        return name if isinstance(name, str) else ""

    @property
    def disabled(self) -> tuple[str, ...]:
        """Entries of `disabled_plugins` that switch the CRI off."""
        listed = self.merged.get("disabled_plugins")
        return tuple(one for one in listed if one in CRI_IDS) if isinstance(listed, list) else ()

    @property
    def imports(self) -> tuple[str, ...]:
        """The main file's own import patterns."""
        listed = self.main.get("imports")
        return tuple(one for one in listed if isinstance(one, str)) if isinstance(listed, list) else ()


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def load_config(
    host: Host, path: str, daemon_version: tuple[int, ...] = (), without: frozenset[str] = frozenset()
) -> ContainerdConfig:
    """Read containerd's file and its imports; `ConfigError` names file, line and column of what isn't TOML.

    containerd before 2.0 replaces a plugin's whole table by a later file's, 2.0 and up merge it key by key;
    without `daemon_version` the file's own version tells (3 and up can only be read by 2.0 and up). Files in
    `without` are passed over, as if they were not there.
    """
    text = host.read_text(path)
    main = parse_toml(text or "", path)
    trees = {path: main}
    versions = {path: version_of(main, path, text or "")}
    missing = _read_imports(host, trees, versions, daemon_version, without)
    deep = daemon_version >= (2,) if daemon_version else versions[path] >= 3
    merged: dict[str, Any] = {}
    for tree in trees.values():
        merged = merge(merged, tree, deep=deep)
    files = tuple(trees) if text is not None else tuple(trees)[1:]
    return ContainerdConfig(
        path, text is not None, text or "", main, merged, files, versions, missing, trees, daemon_version
    )


def _read_imports(
    host: Host,
    trees: dict[str, Any],
    versions: dict[str, int],
    release: tuple[int, ...],
    without: frozenset[str],
) -> tuple[MissingImport, ...]:
    """Add every imported file to `trees`, breadth first like containerd; gives the ones that don't exist."""
    missing = []
    waiting = list(trees)
    while waiting:
        importer = waiting.pop(0)
        listed = trees[importer].get("imports")
        for pattern in listed if isinstance(listed, list) else []:
            named = expand_import(host, importer, pattern, release) if isinstance(pattern, str) else ()
            for found in named:
                if found in trees or found in without:
                    continue
                text = host.read_text(found)
                if text is None:
                    missing.append(MissingImport(found, importer, pattern))
                    continue
                trees[found] = parse_toml(text, found)
                versions[found] = version_of(trees[found], found, text)
                waiting.append(found)
    return tuple(missing)


def parse_toml(text: str, path: str) -> dict[str, Any]:
    """The plain tree of a TOML file; `ConfigError` with file, line and column, or if it is far too large."""
    import tomllib

    if len(text) > LARGEST:
        raise ConfigError(
            f"{path} has {len(text) >> 10} KB, which no engine's configuration has",
            hint=f"see what was written there: head -c 500 {path}",
        )
    try:
        return tomllib.loads(text.removeprefix(BYTE_ORDER_MARK))
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"^(.*?) \(at line (\d+), column (\d+)\)$", str(error))
        line, column = (int(place[2]), int(place[3])) if place else (max(1, len(text.splitlines())), 1)
        reason = place[1] if place else str(error).removesuffix(" (at end of document)")
        raise ConfigError(
            f"{path}:{line}:{column}: {reason[:1].lower()}{reason[1:]}",
            hint=f"correct that line: ${{EDITOR:-vi}} +{line} {path}",
        ) from error
    except RecursionError as error:
        raise ConfigError(
            f"{path}: nested too deeply to be a containerd configuration", hint=f"look at it: less {path}"
        ) from error


def version_of(tree: dict[str, Any], path: str, text: str = "") -> int:
    """The file's `version`; absent (or 0) is 1 as for containerd. An error names the line in `text`."""
    version = tree.get("version", 1)
    if isinstance(version, bool) or not isinstance(version, int) or version < 0:
        line = line_of_key(text, ("version",))
        raise ConfigError(
            f"{place(path, line)}: version is {version!r}, containerd wants a whole number",
            hint=f"correct it: ${{EDITOR:-vi}} +{max(line, 1)} {path}",
        )
    return version or 1


def merge(base: dict[str, Any], other: dict[str, Any], *, deep: bool) -> dict[str, Any]:
    """`other` laid over `base` the way containerd merges an imported file; neither is changed."""
    result = dict(base)
    for key, value in other.items():
        here = result.get(key)
        if isinstance(here, list) and isinstance(value, list):
            result[key] = here + [one for one in value if one not in here]
        elif isinstance(here, dict) and isinstance(value, dict):
            result[key] = _merge_tables(here, value) if deep else {**here, **value}
        else:
            result[key] = value
    return result


def _merge_tables(base: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in other.items():
        here = result.get(key)
        if isinstance(here, dict) and isinstance(value, dict):
            value = _merge_tables(here, value)
        result[key] = value
    return result
