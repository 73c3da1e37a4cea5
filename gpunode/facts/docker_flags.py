"""dockerd's command line against its file: a setting in both is fatal, whatever the two values are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gpunode.errors import GpunodeError
from gpunode.facts.processes import option_value
from gpunode.facts.units import read_unit
from gpunode.host import Host

# moby daemon/config: flags that may be repeated bear a plural name in daemon.json
_PLURALS = {
    "host": "hosts",
    "label": "labels",
    "feature": "features",
    "dns-opt": "dns-opts",
    "log-opt": "log-opts",
    "exec-opt": "exec-opts",
    "storage-opt": "storage-opts",
    "cdi-spec-dir": "cdi-spec-dirs",
    "default-ulimit": "default-ulimits",
    "default-network-opt": "default-network-opts",
    "default-address-pool": "default-address-pools",
    "host-gateway-ip": "host-gateway-ips",
    "authorization-plugin": "authorization-plugins",
    "insecure-registry": "insecure-registries",
    "registry-mirror": "registry-mirrors",
    "node-generic-resource": "node-generic-resources",
    "cluster-store-opt": "cluster-store-opts",
    "add-runtime": "runtimes",
}
_SHORT = {"H": "host", "D": "debug", "l": "log-level", "b": "bridge", "G": "group", "p": "pidfile"}
_SHORT |= {"s": "storage-driver", "g": "graph", "r": "restart"}
_BOTH_ALLOWED = {"runtimes"}  # the one directive that dockerd merges from flag and file
# objects in daemon.json that are one setting; of any other object dockerd takes the members (flatOptions)
WHOLE = {"runtimes", "log-opts", "default-ulimits", "default-network-opts", "cluster-store-opts"}
WHOLE |= {"features", "builder", "nri-opts"}
# where distributions keep the flags that their unit takes from its environment
_ENVIRONMENT_FILES = ("/etc/default/docker", "/etc/sysconfig/docker")


def settings_of(argv: tuple[str, ...]) -> tuple[str, ...]:
    """What a command line sets, under the names that daemon.json has for it."""
    found = []
    for argument in argv[1:]:
        flag = re.match(r"--([a-z0-9-]+)(?:=|$)", argument)
        short = re.match(r"-([A-Za-z])", argument)
        name = flag[1] if flag else _SHORT.get(short[1], "") if short else ""
        found.append(_PLURALS.get(name, name))
    return tuple(dict.fromkeys(filter(None, found)))


def flag_conflicts(argv: tuple[str, ...], config: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys of daemon.json that dockerd was also given as a flag; it refuses to start with any of them."""
    keys = file_settings(config)
    return tuple(key for key in settings_of(argv) if key in keys and key not in _BOTH_ALLOWED)


def file_settings(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What a daemon.json sets: its keys, and in place of an object that only groups some, their keys."""
    found: list[str] = []
    for key, value in config.items():
        found += value if isinstance(value, dict) and key not in WHOLE else [key]
    return tuple(dict.fromkeys(found))


def flag_features(argv: tuple[str, ...]) -> dict[str, bool]:
    """What ``--feature NAME`` and ``--feature NAME=true`` switch (dockerd 28.0 and up)."""
    found: dict[str, bool] = {}
    for position, argument in enumerate(argv):
        head, equals, value = argument.partition("=")
        if head == "--feature":
            given = value if equals else "".join(argv[position + 1 : position + 2])
            name, _, state = given.partition("=")
            found[name] = state.lower() not in ("false", "0", "f")
    return found


def flag_runtimes(argv: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the runtimes that ``--add-runtime NAME=PATH`` registers."""
    found = []
    for position, argument in enumerate(argv):
        head, equals, value = argument.partition("=")
        if head == "--add-runtime":
            given = value if equals else "".join(argv[position + 1 : position + 2])
            found.append(given.partition("=")[0])
    return tuple(found)


def flag_default(argv: tuple[str, ...]) -> str:
    """What ``--default-runtime`` says; empty if it isn't given."""
    return option_value(argv[1:], "--default-runtime") or ""


def flag_place(host: Host, unit: str | None, key: str) -> str:
    """``FILE:LINE`` of the flag for `key` in a unit, a drop-in or an environment file, else empty."""
    names = [name for name, plural in _PLURALS.items() if plural == key] or [key]
    shorts = "|".join(rf"-{short}\b" for short, name in _SHORT.items() if name in names)
    pattern = re.compile("|".join(filter(None, [*(rf"--{name}\b(?!-)" for name in names), shorts])))
    found = read_unit(host, unit) if unit else None
    for path in (*reversed(found.files if found else ()), *_ENVIRONMENT_FILES):
        try:
            lines = (host.read_text(path) or "").splitlines()
        except GpunodeError:
            continue
        for number, line in enumerate(lines, start=1):
            if pattern.search(line) and not line.lstrip().startswith(("#", ";")):
                return f"{path}:{number}"
    return ""
