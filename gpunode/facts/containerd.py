"""containerd on this node: which one, and its configuration with everything that it imports."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from gpunode.errors import ConfigError, GpunodeError
from gpunode.facts.daemons import Daemon, Kind, daemon_version, find_binary, locate, socket_path
from gpunode.facts.processes import Process, option_value, running
from gpunode.host import Host

DEFAULT_CONFIG = "/etc/containerd/config.toml"
DEFAULT_SOCKET = "/run/containerd/containerd.sock"
KIND = Kind("containerd", "containerd.service", DEFAULT_CONFIG, ("--config", "-c"))
CRI_PLUGINS = {1: "cri", 2: "io.containerd.grpc.v1.cri", 3: "io.containerd.cri.v1.runtime"}
BYTE_ORDER_MARK = "\ufeff"  # containerd skips one at the start of its file, Python's parser does not
# any of these in disabled_plugins takes the CRI away from the kubelet
CRI_IDS = (*CRI_PLUGINS.values(), "io.containerd.cri.v1.images")
# whose containerd it is, by where its configuration lies
_OWNERS = {
    "/docker/containerd/": "docker",
    "/rancher/k3s/": "k3s",
    "/rancher/rke2/": "rke2",
    "/k0s": "k0s",
    "/snap/microk8s/": "microk8s",
}
DISTRIBUTIONS = ("k3s", "rke2", "k0s", "microk8s")


def owner(config_path: str) -> str:
    """Who manages the containerd of this file: docker, k3s, rke2, k0s, microk8s; empty for the system."""
    return next((name for part, name in _OWNERS.items() if part in config_path), "")


def find_containerd(host: Host, config: str | None = None) -> Daemon | None:
    """The containerd that reads `config`, else the system's own; None if there is none on this node.

    One that dockerd started for itself is never meant. If only a Kubernetes distribution's (k3s, rke2, k0s,
    microk8s) runs here, that one is given and `config_source` names it.
    """
    processes = [process for process in running(host) if process.name == "containerd"]
    if not config:
        own = [one for one in processes if not owner(KIND.config_of(one.argv))]
        theirs = [one for one in processes if owner(KIND.config_of(one.argv)) in DISTRIBUTIONS]
        processes = own if own or not theirs else theirs[:1]
        if theirs and not own:
            return _daemon(host, processes, KIND.config_of(processes[0].argv))
    return _daemon(host, processes, config)


def _daemon(host: Host, processes: list[Process], config: str | None) -> Daemon | None:
    found = locate(host, KIND, processes, config)
    if found is None:
        return None
    binary = find_binary(host, "containerd", found.process, found.unit)
    managed = owner(found.config)
    return Daemon(
        name="containerd",
        binary=binary,
        version=daemon_version(host, "containerd", binary, found.process),
        config_path=found.config,
        config_source=found.source + (f" (managed by {managed})" if managed else ""),
        socket=_socket(host, found.argv, found.config),
        unit=found.unit.name if found.unit else None,
        argv=found.argv,
        process=found.process,
    )


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
class ContainerdConfig:
    """containerd's configuration: the main file (`main`, `main_text`) and, in `merged`, with its imports.

    `files` are those that exist, main file first, in merging order; `versions` maps each to its `version`.
    """

    path: str
    exists: bool
    main_text: str
    main: dict[str, Any]
    merged: dict[str, Any]
    files: tuple[str, ...]
    versions: dict[str, int] = field(default_factory=dict)
    missing_imports: tuple[str, ...] = ()

    @property
    def version(self) -> int:
        """The main file's `version`; 1 if it names none, as containerd takes it."""
        return self.versions.get(self.path, 1)

    @property
    def plugin(self) -> str:
        """Id of the plugin table that holds the CRI's runtimes in this version."""
        return CRI_PLUGINS[min(self.version, 3)] if self.version > 0 else CRI_PLUGINS[1]

    @cached_property
    def cri(self) -> dict[str, Any]:
        """The merged CRI table; {} if there is none."""
        return _table(dig(self.merged, "plugins", self.plugin))

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


def load_config(host: Host, path: str, daemon_version: tuple[int, ...] = ()) -> ContainerdConfig:
    """Read containerd's file and its imports; `ConfigError` names file, line and column of what isn't TOML.

    containerd before 2.0 replaces a plugin's whole table by a later file's, 2.0 and up merge it key by key;
    without `daemon_version` the file's own version tells (3 and up can only be read by 2.0 and up).
    """
    text = host.read_text(path)
    main = parse_toml(text or "", path)
    trees = {path: main}
    versions = {path: version_of(main, path)}
    missing = _read_imports(host, trees, versions)
    deep = daemon_version >= (2,) if daemon_version else versions[path] >= 3
    merged: dict[str, Any] = {}
    for tree in trees.values():
        merged = merge(merged, tree, deep=deep)
    files = tuple(trees) if text is not None else tuple(trees)[1:]
    return ContainerdConfig(path, text is not None, text or "", main, merged, files, versions, missing)


def _read_imports(host: Host, trees: dict[str, Any], versions: dict[str, int]) -> tuple[str, ...]:
    """Add every imported file to `trees`, breadth first like containerd; gives the ones that don't exist."""
    missing = []
    waiting = list(trees)
    while waiting:
        importer = waiting.pop(0)
        listed = trees[importer].get("imports")
        for pattern in listed if isinstance(listed, list) else []:
            for found in expand_import(host, importer, pattern) if isinstance(pattern, str) else ():
                if found in trees:
                    continue
                text = host.read_text(found)
                if text is None:
                    missing.append(found)
                    continue
                trees[found] = parse_toml(text, found)
                versions[found] = version_of(trees[found], found)
                waiting.append(found)
    return tuple(missing)


def expand_import(host: Host, importer: str, pattern: str) -> tuple[str, ...]:
    """Files that one import pattern means: relative to the importing file, a glob only if it has a ``*``."""
    base = pattern if pattern.startswith("/") else f"{importer.rpartition('/')[0]}/{pattern}"
    if "*" not in base:
        return (base,)
    found = [""]
    for part in base.strip("/").split("/"):
        if re.search(r"[*?\[]", part):
            found = [path for parent in found for path in host.glob(parent or "/", part)]
        else:
            found = [f"{parent}/{part}" for parent in found]
    return tuple(path for path in found if host.is_file(path))


def parse_toml(text: str, path: str) -> dict[str, Any]:
    """The plain tree of a TOML file; `ConfigError` with file, line and column."""
    import tomllib

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
        raise ConfigError(f"{path}: nested too deeply to be a containerd configuration") from error


def version_of(tree: dict[str, Any], path: str) -> int:
    """The file's `version`; absent (or 0) is 1 as for containerd."""
    version = tree.get("version", 1)
    if isinstance(version, bool) or not isinstance(version, int) or version < 0:
        raise ConfigError(
            f"{path}: version is {version!r}, containerd wants a whole number",
            hint=f"correct it: ${{EDITOR:-vi}} {path}",
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
