"""containerd on this node: its process and its configuration with all imports."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from gpunode.errors import ConfigError, GpunodeError
from gpunode.facts import tables
from gpunode.facts.daemons import Daemon, KnownDaemon, cri_version, locate, manager, owner, socket_path
from gpunode.facts.distributions import find_distribution
from gpunode.facts.processes import Process, option_value, running
from gpunode.facts.registry import DISTRIBUTIONS
from gpunode.facts.toml import as_key, as_value, dig, leaves, line_of_key, parse_toml, place
from gpunode.host import Host
from gpunode.output.typed import as_dict, as_strings, as_text

# The files that containerd's `imports` name.
#
# As in containerd's own source, ``resolveImports``: a pattern is relative to the file that contains it, only
# a ``*`` makes it a glob, and a glob is Go's (``[^a]`` negates, a backslash makes the next character
# literal).

Release = tuple[int, ...]
# before these releases a relative glob was relative to the daemon's working directory, which systemd sets to
# /
_GLOB_BESIDE_FILE: dict[Release, Release] = {(1, 6): (1, 6, 29), (1, 7): (1, 7, 16)}


def import_base(importer: str, pattern: str, release: Release = ()) -> str:
    """An import as an absolute path or glob."""
    directory = importer.rpartition("/")[0]
    since = _GLOB_BESIDE_FILE.get(release[:2])
    if "*" in pattern and since is not None and release < since:
        directory = ""
    base = posixpath.normpath(pattern if pattern.startswith("/") else f"{directory}/{pattern}")
    return "/" + base.lstrip("/")


def expand_import(host: Host, importer: str, pattern: str, release: Release = ()) -> tuple[str, ...]:
    """Files that one import names; the file of a plain path need not exist."""
    base = import_base(importer, pattern, release)
    if "*" not in base:
        return (base,)
    candidates = [""]
    for part in base.strip("/").split("/"):
        if re.search(r"[*?\[\\]", part):
            candidates = [
                f"{parent}/{name}"
                for parent in candidates
                for name in host.listdir(parent or "/")
                if _matches(part, name)
            ]
        else:
            candidates = [f"{parent}/{part}" for parent in candidates]
    return tuple(path for path in candidates if host.is_file(path))


def covers(importer: str, pattern: str, path: str, release: Release = ()) -> bool:
    """Whether an import would read `path`, which need not exist."""
    base = import_base(importer, pattern, release)
    if "*" not in base:
        return base == posixpath.normpath(path)
    return _matches(base, posixpath.normpath(path))


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.fullmatch(_go_glob(pattern), name) is not None
    except re.error:  # a reversed range: containerd matches nothing with it either
        return False


def _go_glob(pattern: str) -> str:
    """A pattern of Go's filepath.Match as a regular expression; a broken class matches nothing."""
    out, rest = "", pattern
    while rest:
        char, rest = rest[0], rest[1:]
        if char == "*":
            out += "[^/]*"
        elif char == "?":
            out += "[^/]"
        elif char == "\\" and rest:
            out, rest = out + re.escape(rest[0]), rest[1:]
        elif char == "[":
            match = re.match(r"(\^?)((?:\\.|[^\]\\])+)\]", rest)
            if match is None:
                return r"(?!)"
            out += f"[{match[1]}{match[2].replace('[', chr(92) + '[')}]"
            rest = rest[match.end() :]
        else:
            out += re.escape(char)
    return out


DEFAULT_CONFIG = "/etc/containerd/config.toml"
DEFAULT_SOCKET = "/run/containerd/containerd.sock"
_KNOWN = KnownDaemon("containerd", "containerd.service", DEFAULT_CONFIG, ("--config", "-c"))
CRI_PLUGINS = {1: "cri", 2: "io.containerd.grpc.v1.cri", 3: "io.containerd.cri.v1.runtime"}
# any of these in disabled_plugins disables the CRI that the kubelet uses
CRI_IDS = (*CRI_PLUGINS.values(), "io.containerd.cri.v1.images")


def find_containerd(host: Host, config: str | None = None) -> Daemon | None:
    """The containerd that reads `config`, else the system's own; None if there is none on this node.

    The one that dockerd started for itself never counts. If only a Kubernetes distribution's (k3s, rke2, k0s,
    microk8s) runs or is installed, it is returned, and its `manager` names the distribution.
    """
    processes = list(running(host, "containerd"))
    if config:
        managed = owner(config)
        own = find_distribution(host, managed, processes) if managed in DISTRIBUTIONS else None
        return own if own and own.config_path == config else _daemon(host, processes, config)
    managers = {process.pid: manager(host, process) for process in processes}
    own_ones = [process for process in processes if not managers[process.pid]]
    distributions = [managers[process.pid] for process in processes if managers[process.pid] in DISTRIBUTIONS]
    if distributions and not own_ones:
        return find_distribution(host, distributions[0], processes)
    system = _daemon(host, own_ones, None)
    stopped = (find_distribution(host, name, processes) for name in DISTRIBUTIONS)
    return system or next(filter(None, stopped), None)


def _daemon(host: Host, processes: list[Process], config: str | None) -> Daemon | None:
    daemon = locate(host, _KNOWN, processes, config)
    if daemon is None:
        return None
    socket = _socket(host, daemon.argv, daemon.config_path)
    daemon = daemon._replace(socket=socket, manager=owner(daemon.config_path))
    return daemon._replace(version=cri_version(host, daemon))


def _socket(host: Host, argv: tuple[str, ...], config: str) -> str:
    value = option_value(argv[1:], "--address", "-a")
    if value:
        return socket_path(value) or value
    try:
        merged = load_config(host, config).merged
    except GpunodeError:
        return DEFAULT_SOCKET  # the command that edits or checks the file reports what is wrong with it
    for name in (("grpc",), ("plugins", "io.containerd.server.v1.grpc")):
        address = dig(merged, *name, "address")
        if isinstance(address, str) and address:
            return socket_path(address) or address
    return DEFAULT_SOCKET


class MissingImport(NamedTuple):
    """A file that an import names, `pattern` as written in `importer`, and that doesn't exist."""

    path: str
    importer: str
    pattern: str


@dataclass(frozen=True)
class ContainerdConfig:
    """containerd's configuration: the main file (`main`, `main_text`) and, in `merged`, with its imports.

    `files` are the existing ones, main file first, in merging order; `versions` maps each to its `version`,
    `trees` to its contents. `release` is the containerd that reads them, () if unknown.
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
        """The main file's `version`; 1 if it sets none, as in containerd."""
        return self.versions.get(self.path, 1)

    @property
    def deep(self) -> bool:
        """Whether this containerd merges imports key by key: 2.0 and newer, which are also the only ones to
        read version 3."""
        return self.release >= (2,) if self.release else self.version >= 3

    @property
    def has_cdi(self) -> bool:
        """Whether CDI is on; containerd 2 has it on unless a file disables it."""
        return self.cri.get("enable_cdi", self.deep) is True

    @property
    def plugin(self) -> str:
        """Id of the plugin table that holds the CRI's runtimes in this version.

        containerd 2.3 migrates a file without version whatever the name of its table.
        """
        if self.version == 1 and self.release >= (2, 3):
            tables = as_dict(self.merged.get("plugins"))
            return next((name for name in CRI_PLUGINS.values() if name in tables), CRI_PLUGINS[1])
        return CRI_PLUGINS[min(self.version, 3)] if self.version > 0 else CRI_PLUGINS[1]

    @cached_property
    def cri(self) -> dict[str, Any]:
        """The merged CRI table; {} if there is none."""
        table = as_dict(dig(self.merged, "plugins", self.plugin))
        if not self.deep or self.version not in (2, 3):
            return table
        # containerd 2 merges the migrated table of version 2 under the one with the newer name
        older, newer = (as_dict(dig(self.merged, "plugins", CRI_PLUGINS[number])) for number in (2, 3))
        migrates = self.version == 2 or self.release >= (2, 3)
        return _merge_tables(older, newer) if migrates else newer

    @property
    def runtimes(self) -> dict[str, Any]:
        """Handlers by name, merged; containerd's built-in runc is included only if a file defines it."""
        return as_dict(dig(self.cri, "containerd", "runtimes"))

    @property
    def default_runtime(self) -> str:
        """Name of the default handler; ``runc`` unless a file says otherwise."""
        return self.named_default or "runc"

    @property
    def named_default(self) -> str:
        """Name of the default handler that a file sets; empty if none does."""
        return as_text(dig(self.cri, "containerd", "default_runtime_name"))

    @property
    def disabled(self) -> tuple[str, ...]:
        """Entries of `disabled_plugins` that disable the CRI plugin."""
        listed = self.merged.get("disabled_plugins")
        return tuple(entry for entry in listed if entry in CRI_IDS) if isinstance(listed, list) else ()

    @property
    def imports(self) -> tuple[str, ...]:
        """The main file's own import patterns."""
        return as_strings(self.main.get("imports"))


def load_config(
    host: Host, path: str, daemon_version: tuple[int, ...] = (), without: frozenset[str] = frozenset()
) -> ContainerdConfig:
    """Read containerd's file and its imports; `ConfigError` names file, line and column of a syntax error.
    containerd before 2.0 replaces a plugin's whole table by a later file's, 2.0 and newer merge it key by
    key; without `daemon_version` the file's own version decides (only 2.0 and newer read 3).

    Files in `without` are skipped, as if they didn't exist.
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
    """Add every imported file to `trees`, breadth first like containerd; return those that don't exist."""
    missing = []
    waiting = list(trees)
    while waiting:
        importer = waiting.pop(0)
        listed = trees[importer].get("imports")
        for pattern in listed if isinstance(listed, list) else []:
            files = expand_import(host, importer, pattern, release) if isinstance(pattern, str) else ()
            for file in files:
                if file in trees or file in without:
                    continue
                text = host.read_text(file)
                if text is None:
                    missing.append(MissingImport(file, importer, pattern))
                    continue
                trees[file] = parse_toml(text, file)
                versions[file] = version_of(trees[file], file, text)
                waiting.append(file)
    return tuple(missing)


def version_of(tree: dict[str, Any], path: str, text: str = "") -> int:
    """The file's `version`; a missing one (or 0) is 1 as in containerd. An error names the line in `text`."""
    version = tree.get("version", 1)
    if isinstance(version, bool) or not isinstance(version, int) or version < 0:
        line = line_of_key(text, ("version",))
        raise ConfigError(
            f"{place(path, line)}: version is {version!r}, but must be a whole number",
            hint=f"correct it: ${{EDITOR:-vi}} +{max(line, 1)} {path}",
        )
    return version or 1


def merge(base: dict[str, Any], other: dict[str, Any], *, deep: bool) -> dict[str, Any]:
    """`other` merged over `base` as containerd merges an imported file; neither is changed."""
    result = dict(base)
    for key, value in other.items():
        here = result.get(key)
        if isinstance(here, list) and isinstance(value, list):
            result[key] = here + [element for element in value if element not in here]
        elif isinstance(here, dict) and isinstance(value, dict):
            result[key] = _merge_tables(here, value) if deep else {**here, **value}
        else:
            result[key] = value
    return result


def _merge_tables(base: dict[str, Any], overlay: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in overlay.items():
        here = result.get(key)
        if isinstance(here, dict) and isinstance(value, dict):
            value = _merge_tables(here, value)
        result[key] = value
    return result


# Settings that an imported file removes: before 2.0 containerd replaces a plugin's table by a later file's. A
# file that was meant to add a handler then removes the pause image, the registries and the cgroup driver of
# the main file (containerd issue 5837). The files only show candidates: the running daemon decides.

_TOLD_WHOLE = ("runtimes", "mirrors")  # by name: a handler that the daemon doesn't report doesn't exist
_SECRET = ("auth", "configs", "headers")


class Lost(NamedTuple):
    """One setting of the CRI's table: `file` sets it, and the table in `by` replaces that table."""

    keys: tuple[str, ...]
    value: Any
    file: str
    by: str

    @property
    def name(self) -> str:
        return ".".join(self.keys)

    @property
    def secret(self) -> bool:
        """Whether the value may be a password, which is not shown."""
        return any(word in key for key in self.keys for word in _SECRET)

    def __str__(self) -> str:
        """The setting as TOML, below the plugin's table."""
        return as_key(self.keys) + ("" if self.secret else f" = {as_value(self.value)}")


def lost_settings(config: ContainerdConfig) -> tuple[Lost, ...]:
    """In the order of the files; () for a containerd that merges key by key."""
    if tables.can("containerd", "imports-merge", config.release) or (not config.release and config.deep):
        return ()
    settings: dict[tuple[str, ...], Lost] = {}
    before: dict[tuple[str, ...], tuple[Any, str]] = {}
    for path, tree in config.trees.items():
        table = dig(tree, "plugins", config.plugin)
        if not isinstance(table, dict):
            continue
        here = dict(leaves(table))
        for keys, (value, file) in before.items():
            if keys not in here:
                settings.setdefault(keys, Lost(keys, value, file, path))
        before |= {keys: (value, path) for keys, value in here.items()}
        settings = {keys: lost for keys, lost in settings.items() if keys not in here}
    return tuple(settings.values())


def is_lost(running: Mapping[str, Any], lost: Lost) -> bool:
    """Whether the running daemon lacks it; a setting that the daemon doesn't report counts as kept."""
    value = in_force(running, lost.keys)
    if value is not None:
        return bool(value != lost.value)
    for depth, key in enumerate(lost.keys[:-1]):
        if key in _TOLD_WHOLE and isinstance(in_force(running, lost.keys[:depth]), Mapping):
            return in_force(running, lost.keys[: depth + 2]) is None
    return False


def in_force(running: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    """A setting as the running daemon reports it (CRI Status), None if it doesn't.

    It spells keys differently: ``sandboxImage`` for ``sandbox_image``, ``enableCDI`` for ``enable_cdi``.
    """
    here: Any = running
    for key in keys:
        if not isinstance(here, Mapping):
            return None
        desired = key.replace("_", "").lower()
        same = (value for name, value in here.items() if name == key or str(name).lower() == desired)
        here = next(same, None)
    return here


# What containerd ignores because of its files' versions. From containerd's source, ``LoadConfig`` and the
# plugins' ``ConfigMigration``: a file without a version is migrated to the effective one as it is read, and
# so changes nothing. Among those with a version the last one decides for all, up to 2.2: before 2.0 it
# determines under which name the CRI's table is read at all; 2.0 to 2.2 use the table of version 2 only if
# version 2 is effective, and its runtimes only if that of version 3 has none. From 2.3 on each file is
# migrated by itself, and nothing is ignored.

IMAGES = "io.containerd.cri.v1.images"
_SHORT, _OLD, _NEW = (CRI_PLUGINS[number] for number in (1, 2, 3))
_EACH_FILE_BY_ITSELF = (2, 3)


class PassedOver(NamedTuple):
    """A CRI table that isn't read: `what` lists its runtimes and settings that no other table has."""

    path: str
    plugin: str
    what: tuple[str, ...]


def version_in_force(config: ContainerdConfig) -> int:
    """The version that decides which tables are read; a main file without one is version 1 before 2.0."""
    versions = (tree.get("version") for tree in config.trees.values())
    least = 2 if config.deep else 1
    numbers = [version for version in versions if isinstance(version, int) and version >= least]
    return numbers[-1] if numbers else 3 if config.deep else 1


def passed_over(config: ContainerdConfig) -> tuple[PassedOver, ...]:
    """Tables that this containerd ignores, if something in them is lost as a result."""
    if not config.release or config.release >= _EACH_FILE_BY_ITSELF:
        return ()
    names = _names(config)
    tables = []
    for path, tree in config.trees.items():
        # 2.0 and newer expand the short plugin names of a file without version
        expanded = {_SHORT: _OLD} if config.deep and tree.get("version", 1) in (0, 1) else {}
        for plugin in (_SHORT, _OLD, _NEW):
            if isinstance(table := dig(tree, "plugins", plugin), dict):
                tables.append((path, plugin, table, expanded.get(plugin, plugin) in names))
    read_tables = [table for _, _, table, read in tables if read]
    lost = (
        (path, plugin, _lost_settings(config, table, read_tables))
        for path, plugin, table, read in tables
        if not read
    )
    return tuple(PassedOver(path, plugin, what) for path, plugin, what in lost if what)


def _names(config: ContainerdConfig) -> tuple[str, ...]:
    """Names of the tables from which runtimes are read."""
    force = version_in_force(config)
    if config.deep:
        newer = any(dig(tree, "plugins", _NEW, "containerd", "runtimes") for tree in config.trees.values())
        return (_NEW,) if force > 2 or newer else (_OLD,)
    return (_SHORT,) if force == 1 else (_OLD,)


def _lost_settings(
    config: ContainerdConfig, table: dict[str, Any], read_tables: list[dict[str, Any]]
) -> tuple[str, ...]:
    """Handlers, their cgroup driver and registries; other settings fall back to the same default."""
    parts = []
    for name, runtime in as_dict(dig(table, "containerd", "runtimes")).items():
        others = [dig(other, "containerd", "runtimes", name) for other in read_tables]
        there = [entry for entry in others if isinstance(entry, dict)]
        if not there and (name != "runc" or dig(runtime, "options", "BinaryName")):
            parts.append(name)
            continue
        systemd, *others_systemd = (
            dig(entry, "options", "SystemdCgroup") is True for entry in (runtime, *there)
        )
        if systemd and not any(others_systemd):
            parts.append(f"{name}: SystemdCgroup = true")
    registry = dig(table, "registry")
    moved = config.deep and version_in_force(config) > 2  # into a separate table, the only one that it reads
    read_table = isinstance(dig(config.merged, "plugins", IMAGES, "registry"), dict)
    if moved and not read_table and any(dig(registry, key) for key in ("config_path", "mirrors", "configs")):
        parts.append("registry")
    return tuple(parts)
