"""dockerd's daemon.json as text: what is in it, where it is broken, and where its daemon listens."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

from gpunode.errors import ConfigError, DaemonError, GpunodeError
from gpunode.facts.daemons import as_recorded, daemon_version, parse_version, socket_path
from gpunode.facts.processes import Process, option_value
from gpunode.host import Host

DEFAULT_SOCKET = "/run/docker.sock"
_VERSION_SECONDS = 1.0  # a dockerd that runs answers in 2 ms


def socket_of(host: Host, argv: tuple[str, ...], config: str, default: str = DEFAULT_SOCKET) -> str:
    """The first unix socket that dockerd listens on: from -H/--host, else `hosts` in its file."""
    for address in addresses(host, argv, config):
        if address.startswith("fd://"):
            return default  # docker.socket of the package listens there for it
        path = socket_path(address)
        if path:
            return path
    return default


def addresses(host: Host, argv: tuple[str, ...], config: str) -> tuple[str, ...]:
    """What dockerd was told to listen on: -H/--host, and `hosts` in its file (a file that can't be read has
    none)."""
    return (*_hosts(argv), *_hosts_in_file(host, config))


def verifies_clients(host: Host, argv: tuple[str, ...], config: str) -> bool:
    """Whether dockerd asks whoever comes over the network for a certificate (--tlsverify)."""
    word = option_value((*argv[1:], ""), "--tlsverify")
    if word is not None:
        return word.lower() not in ("false", "0", "f")
    try:
        return parse_daemon_json(host.read_text(config) or "", config, twice=True).get("tlsverify") is True
    except GpunodeError:
        return False


def listens_there(host: Host, argv: tuple[str, ...], config: str) -> bool:
    """Whether the socket of `socket_of` is this dockerd's: one that listens on TCP alone has none."""
    found = addresses(host, argv, config)
    return not found or any(one.startswith("fd://") or one == "unix://" or socket_path(one) for one in found)


def docker_version(host: Host, binary: str | None, process: Process | None, socket: str) -> tuple[int, ...]:
    """The running dockerd's own word; its program is only started (35 ms) where `socket` says nothing."""
    if host.live and process is not None and socket:
        from gpunode.daemons.docker_api import DockerApi

        with suppress(DaemonError):
            told = parse_version(DockerApi(host, socket, _VERSION_SECONDS).program_version())
            if told:
                as_recorded(host, "dockerd", told)
                return told
    return daemon_version(host, "dockerd", binary)


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
        hosts = parse_daemon_json(host.read_text(config) or "", config, twice=True).get("hosts")
    except GpunodeError:
        return []  # whoever edits or checks the file says what is wrong with it
    return [one for one in hosts if isinstance(one, str)] if isinstance(hosts, list) else []


def parse_daemon_json(text: str, path: str, *, twice: bool = False) -> dict[str, Any]:
    """The object in a daemon.json; an empty file and ``null`` are {} as dockerd takes them.

    `ConfigError` names file, line and column of what isn't JSON, and a key that stands there twice. With
    `twice` the last one counts, as dockerd has it; whoever edits the file mustn't guess.
    """
    import json

    body = text.removeprefix("\ufeff")
    if not body.strip(" \t\r\n"):
        return {}

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        double = next((key for key in keys if keys.count(key) > 1), None)
        if double is not None and not twice:
            raise _twice(double, body, path)
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
        raise ConfigError(
            f"{path}: nested too deeply to be a Docker configuration", hint=f"look at it: less {path}"
        ) from error
    except ValueError as error:  # an integer of more digits than Python converts
        raise ConfigError(f"{path}: {error}", hint=f"correct it: ${{EDITOR:-vi}} {path}") from error
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
