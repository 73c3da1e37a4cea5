"""The NVIDIA Container Toolkit's config.toml: where it lies, which keys it has, what they may hold.

Keys, types and defaults are those of toolkit 1.20; older releases read a part of them and skip the rest. The
runtime, its hook and nvidia-ctk each read the file whenever they start, so a change needs no restart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from gpunode.dataclass import dataclass
from gpunode.errors import UsageError
from gpunode.host import Host

DEFAULT_PATH = "/etc/nvidia-container-runtime/config.toml"
CAPABILITIES = ("compat32", "compute", "display", "graphics", "ngx", "utility", "video")
LEVELS = ("panic", "fatal", "error", "warning", "warn", "info", "debug", "trace")  # logrus
MODES = ("auto", "cdi", "csv", "jit-cdi", "legacy")
_FROM_CONTAINER = "features.allow-ldconfig-from-container"


@dataclass(frozen=True)
class Key:
    """One setting. `kind` is bool, string or list; `default` is None for what only counts once it is set.

    `allowed` are the values (of each element, for a list) that the toolkit knows, empty if any will do.
    `problem` tells what is wrong with a value of the right type, empty if nothing is.
    """

    name: str
    kind: str
    default: bool | str | tuple[str, ...] | None
    allowed: tuple[str, ...] = ()
    problem: Callable[[Any], str] = lambda value: ""

    @property
    def path(self) -> tuple[str, ...]:
        return tuple(self.name.split("."))


def _absolute(value: str) -> str:
    return "" if not value or value.startswith("/") else "it must be an absolute path"


def _required(value: Any) -> str:
    return "" if value else "it must not be empty"


def _paths(value: list[str]) -> str:
    return _required(value) or next(filter(None, map(_absolute, value)), "")


def _ldconfig(value: str) -> str:
    return "" if value.removeprefix("@").startswith("/") else "it must be an absolute path, behind an @"


def _kind(value: str) -> str:
    fits = re.fullmatch(r"[A-Za-z][\w.-]*/[A-Za-z][\w.-]*", value)
    return "" if fits else "it must be VENDOR/CLASS, such as nvidia.com/gpu"


def _capabilities(value: str) -> str:
    if value in ("", "all"):
        return ""
    wrong = [one for one in value.split(",") if one not in CAPABILITIES]
    return f"it knows {', '.join(CAPABILITIES)}, not {wrong[0]!r}" if wrong else ""


def _environment(value: list[str]) -> str:
    return next((f"{one!r} is not NAME=VALUE" for one in value if "=" not in one[1:]), "")


_FILES = "/etc/nvidia-container-runtime/host-files-for-container.d"
_CLI, _RUNTIME, _HOOK = "nvidia-container-cli", "nvidia-container-runtime", "nvidia-container-runtime-hook"
_FEATURES = (
    "allow-cuda-compat-libs-from-container", "allow-ldconfig-from-container",
    "allow-unknown-oci-spec-fields", "disable-cuda-compat-lib-hook", "disable-imex-channel-creation",
    "ignore-imex-channel-requests", "no-additional-gids-for-device-nodes",
)  # fmt: skip
KEYS: tuple[Key, ...] = (
    Key("disable-require", "bool", False),
    Key("swarm-resource", "string", ""),
    Key("accept-nvidia-visible-devices-envvar-when-unprivileged", "bool", True),
    Key("accept-nvidia-visible-devices-as-volume-mounts", "bool", False),
    Key("supported-driver-capabilities", "string", ",".join(CAPABILITIES), problem=_capabilities),
    Key(f"{_CLI}.root", "string", "", problem=_absolute),
    Key(f"{_CLI}.path", "string", ""),
    Key(f"{_CLI}.environment", "list", (), problem=_environment),
    Key(f"{_CLI}.debug", "string", "", problem=_absolute),
    Key(f"{_CLI}.ldcache", "string", "", problem=_absolute),
    Key(f"{_CLI}.load-kmods", "bool", True),
    Key(f"{_CLI}.no-cgroups", "bool", False),
    Key(f"{_CLI}.user", "string", ""),
    Key(f"{_CLI}.ldconfig", "string", "@/sbin/ldconfig", problem=_ldconfig),
    Key(f"{_RUNTIME}.debug", "string", "/dev/null", problem=_absolute),
    Key(f"{_RUNTIME}.log-level", "string", "info", LEVELS),
    Key(f"{_RUNTIME}.runtimes", "list", ("runc", "crun"), problem=_required),
    Key(f"{_RUNTIME}.mode", "string", "auto", MODES),
    Key(f"{_RUNTIME}.modes.csv.mount-spec-path", "string", _FILES, problem=_absolute),
    Key(f"{_RUNTIME}.modes.csv.compat-container-root", "string", None, problem=_absolute),
    Key(f"{_RUNTIME}.modes.cdi.spec-dirs", "list", ("/etc/cdi", "/var/run/cdi"), problem=_paths),
    Key(f"{_RUNTIME}.modes.cdi.default-kind", "string", "nvidia.com/gpu", problem=_kind),
    Key(f"{_RUNTIME}.modes.cdi.annotation-prefixes", "list", ("cdi.k8s.io/",), problem=_required),
    Key(
        f"{_RUNTIME}.modes.legacy.cuda-compat-mode",
        "string",
        "ldconfig",
        ("ldconfig", "mount", "hook", "disabled"),
    ),
    Key(f"{_RUNTIME}.modes.jit-cdi.nvcdi-feature-flags", "list", None),
    Key(f"{_RUNTIME}.modes.jit-cdi.nvcdi-disable-hooks", "list", None),
    Key(f"{_HOOK}.path", "string", _HOOK, problem=_required),
    Key(f"{_HOOK}.skip-mode-detection", "bool", False),
    Key("nvidia-ctk.path", "string", "nvidia-ctk", problem=_required),
    *(Key(f"features.{name}", "bool", None) for name in _FEATURES),
)


def locate(host: Host, given: str = "") -> tuple[str, str]:
    """The file and, for people, why it is that one: as the toolkit's programs look for it.

    They take ``$NVIDIA_CTK_CONFIG_FILE_PATH``, else the one below ``$XDG_CONFIG_HOME``, else the one in /etc.
    Variables of this shell say nothing about another root.
    """
    if given:
        return given, "the given path"
    own = host.environ.get("NVIDIA_CTK_CONFIG_FILE_PATH") if host.live else None
    if own:
        return own, "NVIDIA_CTK_CONFIG_FILE_PATH"
    home = host.environ.get("XDG_CONFIG_HOME") if host.live else None
    if home:
        return f"{home.rstrip('/')}/nvidia-container-runtime/config.toml", "XDG_CONFIG_HOME"
    return DEFAULT_PATH, "the default path"


def keys_for(host: Host) -> tuple[Key, ...]:
    """`KEYS` with the defaults that depend on the distribution, as the toolkit derives them."""
    release = host.read_text("/etc/os-release") or host.read_text("/usr/lib/os-release") or ""
    own: dict[str, str] = {}
    if host.exists("/sbin/ldconfig.real"):
        own[f"{_CLI}.ldconfig"] = "@/sbin/ldconfig.real"  # Ubuntu's /sbin/ldconfig is a wrapper script
    if re.search(r'^(ID|ID_LIKE)=["\']?.*\bsuse\b', release, re.MULTILINE):
        own[f"{_CLI}.user"] = "root:video"
    return tuple(
        Key(key.name, key.kind, own.get(key.name, key.default), key.allowed, key.problem) for key in KEYS
    )


def find_key(keys: tuple[Key, ...], name: str) -> Key:
    """The key `name`; `UsageError` names the nearest one there is."""
    found = next((key for key in keys if key.name == name), None)
    if found is not None:
        return found
    near = nearest(name, tuple(key.name for key in keys))
    raise UsageError(
        f"the toolkit's configuration has no key {name!r}",
        hint=f"did you mean {near}?" if near else "list them: gpunode toolkit config get",
    )


def nearest(name: str, known: tuple[str, ...]) -> str:
    """The known name most like this one, by its whole or by its last part; empty if none is near."""
    from difflib import get_close_matches

    whole = get_close_matches(name, known, 1)
    if whole:
        return whole[0]
    last = {one.rpartition(".")[2]: one for one in reversed(known)}
    part = get_close_matches(name.rpartition(".")[2], tuple(last), 1)
    return last[part[0]] if part else ""


def parsed(key: Key, text: str) -> Any:
    """The value that `text` means for this key: true or false, a string, or a comma separated list."""
    if key.kind == "bool":
        if text not in ("true", "false"):
            raise UsageError(f"{key.name} is true or false, not {text!r}", hint=f"{key.name}=true")
        return text == "true"
    if key.kind == "list":
        return [part.strip() for part in text.split(",") if part.strip()]
    return text


def wrong(key: Key, value: Any, tree: Mapping[str, Any]) -> str:
    """What is wrong with a value beside the rest of `tree`, the file that it is or will be in; else empty."""
    if not _is_kind(key, value):
        return f"it must be a {key.kind}, not {_shown_type(value)}"
    elements = value if isinstance(value, list) else [value]
    unknown = next((one for one in elements if key.allowed and one not in key.allowed), None)
    if unknown is not None:
        return f"it knows {', '.join(key.allowed)}, not {unknown!r}"
    if key.name.endswith(".ldconfig") and not value.startswith("@"):
        from gpunode.facts.containerd import dig  # whoever configures Docker needs no more of it

        if dig(tree, *_FROM_CONTAINER.split(".")) is True:
            return key.problem(value)
        return f"it must begin with @ (the host's ldconfig), unless {_FROM_CONTAINER} is true"
    return key.problem(value)


def _is_kind(key: Key, value: Any) -> bool:
    if key.kind == "list":
        return isinstance(value, list) and all(isinstance(one, str) for one in value)
    return isinstance(value, bool if key.kind == "bool" else str)


def _shown_type(value: Any) -> str:
    names = {bool: "true or false", str: "a string", int: "a number", float: "a number", dict: "a table"}
    return names.get(type(value), "a list" if isinstance(value, list) else "a date")


def names_in(tree: Mapping[str, Any], above: str = "") -> tuple[str, ...]:
    """Dotted names of every value in a file."""
    found: list[str] = []
    for key, value in tree.items():
        inner = isinstance(value, dict)
        found += names_in(value, f"{above}{key}.") if inner else [f"{above}{key}"]
    return tuple(found)
