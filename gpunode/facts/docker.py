"""Docker on this node: which dockerd, which daemon.json, and whether flags and file contradict each other."""

from __future__ import annotations

import re
from typing import Any

from gpunode.errors import ConfigError, GpunodeError
from gpunode.facts.daemons import Daemon, Kind, daemon_version, find_binary, locate, socket_path
from gpunode.facts.processes import Process, owner, running
from gpunode.host import Host

DEFAULT_CONFIG = "/etc/docker/daemon.json"
DEFAULT_SOCKET = "/run/docker.sock"
KIND = Kind("dockerd", "docker.service", DEFAULT_CONFIG, ("--config-file",))

# moby daemon/config: flags that may be repeated bear a plural name in daemon.json
_PLURALS = {
    "host": "hosts",
    "label": "labels",
    "dns-opt": "dns-opts",
    "log-opt": "log-opts",
    "exec-opt": "exec-opts",
    "storage-opt": "storage-opts",
    "cdi-spec-dir": "cdi-spec-dirs",
    "default-ulimit": "default-ulimits",
    "default-network-opt": "default-network-opts",
    "default-address-pool": "default-address-pools",
    "authorization-plugin": "authorization-plugins",
    "insecure-registry": "insecure-registries",
    "registry-mirror": "registry-mirrors",
    "node-generic-resource": "node-generic-resources",
    "cluster-store-opt": "cluster-store-opts",
    "add-runtime": "runtimes",
}
_SHORT = {"H": "host", "D": "debug", "l": "log-level", "b": "bridge", "G": "group", "p": "pidfile"}
_SHORT |= {"s": "storage-driver", "g": "graph"}
_BOTH_ALLOWED = {"runtimes"}  # the one directive that dockerd merges from flag and file


def find_docker(host: Host, config: str | None = None) -> Daemon | None:
    """The dockerd that reads `config`, else the system's; None if there is no dockerd on this node."""
    found = locate(host, KIND, _processes(host), config)
    if found is None:
        return None
    binary = find_binary(host, "dockerd", found.process, found.unit)
    return Daemon(
        name="docker",
        binary=binary,
        version=daemon_version(host, "dockerd", binary, found.process),
        config_path=found.config,
        config_source=found.source,
        socket=_socket(host, found.argv, found.config),
        unit=found.unit.name if found.unit else None,
        argv=found.argv,
        process=found.process,
    )


def _processes(host: Host) -> tuple[Process, ...]:
    """root's own: a rootless dockerd has another file, another socket and another user's containers."""
    return tuple(one for one in running(host) if one.name == "dockerd" and owner(host, one) == 0)


def rootless_docker(host: Host) -> Process | None:
    """A dockerd that an ordinary user runs, None if there is none."""
    found = (one for one in running(host) if one.name == "dockerd" and owner(host, one) != 0)
    return next(found, None)


def _socket(host: Host, argv: tuple[str, ...], config: str) -> str:
    """The first unix socket that dockerd listens on: from -H/--host, else `hosts` in its file."""
    for address in (*_hosts(argv), *_hosts_in_file(host, config)):
        if address.startswith("fd://"):
            return DEFAULT_SOCKET  # docker.socket of the package listens there for it
        path = socket_path(address)
        if path:
            return path
    return DEFAULT_SOCKET


def _hosts(argv: tuple[str, ...]) -> list[str]:
    found = []
    for position, argument in enumerate(argv):
        head, equals, value = argument.partition("=")
        if head in ("-H", "--host"):
            found += [value] if equals else list(argv[position + 1 : position + 2])
        elif argument.startswith("-H") and len(argument) > 2:
            found.append(argument[2:])
    return found


def _hosts_in_file(host: Host, config: str) -> list[str]:
    try:
        hosts = parse_daemon_json(host.read_text(config) or "", config).get("hosts")
    except GpunodeError:
        return []  # whoever edits or checks the file says what is wrong with it
    return [one for one in hosts if isinstance(one, str)] if isinstance(hosts, list) else []


def parse_daemon_json(text: str, path: str) -> dict[str, Any]:
    """The object in a daemon.json; an empty file and ``null`` are {} as dockerd takes them.

    `ConfigError` names file, line and column of what isn't JSON, and a key that stands there twice.
    """
    import json

    body = text.removeprefix("\ufeff")
    if not body.strip(" \t\r\n"):
        return {}

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise _twice(twice, body, path)
        return dict(pairs)

    def refuse(constant: str) -> Any:
        raise ConfigError(f"{path}: {constant} is no JSON value", hint=f"correct it: ${{EDITOR:-vi}} {path}")

    try:
        loaded = json.loads(body, object_pairs_hook=unique, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path}:{error.lineno}:{error.colno}: {_reason(error.msg)}",
            hint=f"correct that line: ${{EDITOR:-vi}} +{error.lineno} {path}",
        ) from error
    except RecursionError as error:
        raise ConfigError(f"{path}: nested too deeply to be a Docker configuration") from error
    except ValueError as error:  # an integer of more digits than Python converts
        raise ConfigError(f"{path}: {error}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} holds no JSON object, but {_name(loaded)}", hint=f"look at it: cat {path}")
    return loaded


def _twice(key: str, text: str, path: str) -> ConfigError:
    """Names the place of the second one; without it if other objects in the file have such a key as well."""
    import json

    name = re.escape(json.dumps(key, ensure_ascii=False))
    found = [match.start() for match in re.finditer(rf"{name}\s*:", text)]
    lines = [text.count("\n", 0, position) + 1 for position in found]
    place, more, jump = path, "", ""
    if len(found) == 2:
        place = f"{path}:{lines[1]}:{found[1] - text.rfind(chr(10), 0, found[1])}"
        more, jump = f", first on line {lines[0]}", f"+{lines[1]} "
    return ConfigError(
        f'{place}: the key "{key}" stands in one object twice{more}',
        hint=f"keep the one that is meant: ${{EDITOR:-vi}} {jump}{path}",
    )


def _reason(message: str) -> str:
    known = {"Extra data": "text after the end of the JSON object"}
    return known.get(message, message[:1].lower() + message[1:])


def _name(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "something else")


def flag_conflicts(argv: tuple[str, ...], config: dict[str, Any]) -> tuple[str, ...]:
    """Keys of daemon.json that dockerd was also given as a flag; it refuses to start with any of them."""
    found = []
    for argument in argv[1:]:
        flag = re.match(r"--([a-z0-9-]+)(?:=|$)", argument)
        short = re.match(r"-([A-Za-z])", argument)
        name = flag[1] if flag else _SHORT.get(short[1], "") if short else ""
        key = _PLURALS.get(name, name)
        if key and key in config and key not in _BOTH_ALLOWED:
            found.append(key)
    return tuple(dict.fromkeys(found))
