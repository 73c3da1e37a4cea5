"""The NVIDIA Container Toolkit: its installed programs, version and configuration."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from gpunode.errors import ConfigError, GpunodeError, UsageError
from gpunode.facts.daemons import parse_version
from gpunode.facts.tables import gate
from gpunode.facts.toml import dig, leaves, line_of_key, parse_toml
from gpunode.host import Host

PROGRAMS = (
    "nvidia-container-runtime",
    "nvidia-container-runtime-hook",
    "nvidia-ctk",
    "nvidia-cdi-hook",
    "nvidia-container-cli",
)
# the GPU operator and the toolkit's own container install here, outside PATH
_OTHER_PLACES = ("/usr/local/nvidia/toolkit", "/run/nvidia/toolkit")
_TIMEOUT_SECONDS = 5.0


class Toolkit(NamedTuple):
    """`programs` maps each installed program to its path. `version` is () if unknown."""

    programs: dict[str, str]
    version: tuple[int, ...]
    version_source: str


def find_toolkit(host: Host) -> Toolkit:
    """Find the toolkit's programs and query the version of the first one that reports it."""
    result: dict[str, str] = {}
    for name in PROGRAMS:
        path = host.which(name) or _elsewhere(host, name)
        if path:
            result[name] = path
    version, source = _version(host, result)
    return Toolkit(result, version, source)


def hook_program(host: Host, name: str) -> str | None:
    """Path of one of the toolkit's programs, the same from a shell and from a systemd unit: the system's
    directories come before those of PATH.
    """
    return replace(host, environ={}).which(name) or host.which(name) or _elsewhere(host, name)


def _elsewhere(host: Host, name: str) -> str | None:
    return next((f"{place}/{name}" for place in _OTHER_PLACES if host.executable(f"{place}/{name}")), None)


def _version(host: Host, programs: dict[str, str]) -> tuple[tuple[int, ...], str]:
    """Version of the toolkit. nvidia-ctk exists from 1.9; before it the CLI had the toolkit's number.

    The runtime is queried last and only accepted for 1.x: as a separate package it had numbers up to 3.14.
    """
    for name in ("nvidia-ctk", "nvidia-container-cli", "nvidia-container-runtime"):
        if name not in programs:
            continue
        answer = host.run([programs[name], "--version"], timeout=_TIMEOUT_SECONDS)
        version = parse_version(answer.stdout) if answer.ok else ()
        if version and (name != "nvidia-container-runtime" or version[0] == 1):
            return version, f"{programs[name]} --version"
    return (), ""


# The NVIDIA Container Toolkit's config.toml: its path, keys and allowed values. Keys, types and defaults are
# those of toolkit 1.20; older releases read a part of them and ignore the rest. The runtime, its hook and
# nvidia-ctk each read the file when they start, so a change needs no restart.

DEFAULT_PATH = "/etc/nvidia-container-runtime/config.toml"
CAPABILITIES = ("compat32", "compute", "display", "graphics", "ngx", "utility", "video")
LEVELS = ("panic", "fatal", "error", "warning", "warn", "info", "debug", "trace")  # logrus
MODES = ("auto", "cdi", "csv", "jit-cdi", "legacy")
_FROM_CONTAINER = "features.allow-ldconfig-from-container"


class Key(NamedTuple):
    """One setting. `kind` is bool, string or list; `default` is None for a key that only has an effect once
    it is set.

    `allowed` are the values (of each element, for a list) that the toolkit accepts, empty if any is valid.
    `problem` says why a value of the right type is invalid, empty if it is valid.
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
    return "" if value.removeprefix("@").startswith("/") else "it must be @ and an absolute path"


def _kind(value: str) -> str:
    fits = re.fullmatch(r"[A-Za-z][\w.-]*/[A-Za-z][\w.-]*", value)
    return "" if fits else "it must be VENDOR/CLASS, such as nvidia.com/gpu"


def _capabilities(value: str) -> str:
    if value in ("", "all"):
        return ""
    wrong = [part for part in value.split(",") if part not in CAPABILITIES]
    return f"allowed values are {', '.join(CAPABILITIES)}, not {wrong[0]!r}" if wrong else ""


def _environment(value: list[str]) -> str:
    return next((f"{element!r} is not NAME=VALUE" for element in value if "=" not in element[1:]), "")


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


def locate(host: Host, path: str = "") -> tuple[str, str]:
    """The path of the file and the reason for it, for people: as the toolkit's programs search for it.

    They use ``$NVIDIA_CTK_CONFIG_FILE_PATH``, else the one below ``$XDG_CONFIG_HOME``, else the one in /etc.
    Variables of this shell don't apply to another root.
    """
    if path:
        return path, "the specified path"
    own = host.environ.get("NVIDIA_CTK_CONFIG_FILE_PATH") if host.live else None
    if own:
        return own, "NVIDIA_CTK_CONFIG_FILE_PATH"
    home = host.environ.get("XDG_CONFIG_HOME") if host.live else None
    if home:
        return f"{home.rstrip('/')}/nvidia-container-runtime/config.toml", "XDG_CONFIG_HOME"
    return DEFAULT_PATH, "the default path"


def keys_for(host: Host) -> tuple[Key, ...]:
    """`KEYS` with the defaults that depend on the distribution, as the toolkit derives them."""
    release = ""
    with suppress(ConfigError):  # an unreadable file is no error of the toolkit's settings
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
    """The key `name`; `UsageError` names the most similar one."""
    match = next((key for key in keys if key.name == name), None)
    if match is not None:
        return match
    near = nearest(name, tuple(key.name for key in keys))
    raise UsageError(
        f"the toolkit's configuration has no key {name!r}",
        hint=f"did you mean {near}?" if near else "list all keys: gpunode toolkit config get",
    )


def nearest(name: str, known: tuple[str, ...]) -> str:
    """The known name most like this one, by its whole or by its last part; empty if none is similar."""
    from difflib import get_close_matches

    whole = get_close_matches(name, known, 1)
    if whole:
        return whole[0]
    last = {key.rpartition(".")[2]: key for key in reversed(known)}
    part = get_close_matches(name.rpartition(".")[2], tuple(last), 1)
    return last[part[0]] if part else ""


def parsed(key: Key, text: str) -> Any:
    """The value that `text` means for this key: true or false, a string, or a comma separated list."""
    if key.kind == "bool":
        if text not in ("true", "false"):
            raise UsageError(f"{key.name} must be true or false, not {text!r}", hint=f"{key.name}=true")
        return text == "true"
    if key.kind == "list":
        return [part.strip() for part in text.split(",") if part.strip()]
    return text


_TYPES = {bool: "true or false", str: "a string", int: "a number", float: "a number", dict: "a table"}
_TYPES |= {list: "a list"}


def wrong(key: Key, value: Any, tree: Mapping[str, Any]) -> str:
    """Why a value is invalid, given the rest of `tree`, the file that it is or will be in; empty if it is
    valid."""
    elements = value if isinstance(value, list) else [value]
    right = isinstance(value, {"bool": bool, "string": str, "list": list}[key.kind])
    if not right or (key.kind == "list" and not all(isinstance(element, str) for element in elements)):
        return f"it must be a {key.kind}, not {_TYPES.get(type(value), 'a date')}"
    unknown = next((element for element in elements if key.allowed and element not in key.allowed), None)
    if unknown is not None:
        return f"allowed values are {', '.join(key.allowed)}, not {unknown!r}"
    if key.name.endswith(".ldconfig") and not value.startswith("@"):
        if dig(tree, *_FROM_CONTAINER.split(".")) is True:
            return key.problem(value)
        return f"it must start with @ (the host's ldconfig), unless {_FROM_CONTAINER} is true"
    return key.problem(value)


def names_in(tree: Mapping[str, Any]) -> tuple[str, ...]:
    """Dotted names of every value in a file."""
    return tuple(".".join(path) for path, _ in leaves(tree))


# The toolkit's config.toml as its programs read it: a key of the file, else its default.

# the toolkit's own container sets XDG_CONFIG_HOME to this for the programs that it installs
_BESIDE = "/.config/nvidia-container-runtime/config.toml"
MODE = "nvidia-container-runtime.mode"
NO_CGROUPS = "nvidia-container-cli.no-cgroups"
LDCONFIG = "nvidia-container-cli.ldconfig"
RUNTIMES = "nvidia-container-runtime.runtimes"
DEFAULT_KIND = "nvidia-container-runtime.modes.cdi.default-kind"
SPEC_DIRS = "nvidia-container-runtime.modes.cdi.spec-dirs"
BY_ENVVAR = "accept-nvidia-visible-devices-envvar-when-unprivileged"
BY_MOUNTS = "accept-nvidia-visible-devices-as-volume-mounts"


class ToolkitSettings(NamedTuple):
    """`exists` is False if there is no file and all defaults apply; `tree` is the file's contents."""

    path: str
    exists: bool
    text: str
    tree: dict[str, Any]
    keys: tuple[Key, ...]

    def value(self, name: str) -> Any:
        """The effective value of this key; the default if the file has none, or one of a wrong type."""
        key = next(key for key in self.keys if key.name == name)
        value = dig(self.tree, *key.path)
        return key.default if value is None or wrong(key, value, self.tree) else value

    def line(self, name: str) -> int | None:
        """Line of the key in the file, None if it isn't in the file."""
        path = tuple(name.split("."))
        return line_of_key(self.text, path) or None if dig(self.tree, *path) is not None else None

    def problems(self) -> tuple[tuple[str, str], ...]:
        """Keys with values that the toolkit doesn't accept, each with a sentence that says why."""
        values = ((key, dig(self.tree, *key.path)) for key in self.keys)
        checked = ((key.name, wrong(key, value, self.tree)) for key, value in values if value is not None)
        return tuple((name, problem) for name, problem in checked if problem)


def read_settings(host: Host, toolkit: Toolkit) -> ToolkitSettings:
    """Settings of the toolkit that the engines here run; `ConfigError` names the line of a syntax error."""
    path = DEFAULT_PATH
    runtime = toolkit.programs.get("nvidia-container-runtime", "")
    beside = runtime.rpartition("/")[0] + _BESIDE
    if not runtime.startswith(("/usr/bin/", "/usr/sbin/")) and host.is_file(beside):
        path = beside
    text = host.read_text(path)
    return ToolkitSettings(path, text is not None, text or "", parse_toml(text or "", path), keys_for(host))


def runtime_mode(settings: ToolkitSettings, version: tuple[int, ...]) -> str:
    """How nvidia-container-runtime adds GPUs to containers: legacy, cdi, csv, jit-cdi; empty if unknown.

    ``auto`` means csv on Tegra (`facts/system.py`); elsewhere its meaning depends on the release.
    """
    mode = str(settings.value(MODE))
    if mode != "auto":
        return mode
    if not version:
        return ""
    return "jit-cdi" if version >= gate("toolkit", "jit-cdi") else "legacy"


# OCI hooks that NVIDIA's old packages, and ``nvidia-ctk runtime configure`` in its hook mode, installed.
#
# Podman and CRI-O run every hook of their hooks directories that matches a container (oci-hooks(5)). NVIDIA's
# injects GPUs wherever NVIDIA_VISIBLE_DEVICES is set; beside CDI or the nvidia runtime it injects them twice.

SYSTEM_DIRECTORIES = ("/usr/share/containers/oci/hooks.d", "/etc/containers/oci/hooks.d")
# its name until toolkit 1.9, and since then
_PROGRAMS = ("nvidia-container-toolkit", "nvidia-container-runtime-hook")


class OciHook(NamedTuple):
    """One hook file and the program that it runs."""

    path: str
    program: str


def nvidia_hooks(host: Host, directories: Iterable[str]) -> tuple[OciHook, ...]:
    """NVIDIA's hooks in these directories, without files that can't be read or are not JSON."""
    hooks = []
    for directory in dict.fromkeys(directories):
        with suppress(GpunodeError):
            for path in host.glob(directory, "*.json"):
                program = _program(host, path)
                if program.rpartition("/")[2] in _PROGRAMS:
                    hooks.append(OciHook(path, program))
    return tuple(hooks)


def _program(host: Host, path: str) -> str:
    """``hook.path`` of the 1.0.0 format, ``hook`` itself of 0.1.0; empty if there is neither."""
    try:
        tree: Any = json.loads(host.read_text(path) or "")
    except (GpunodeError, ValueError, RecursionError):
        return ""
    hook = tree.get("hook") if isinstance(tree, dict) else None
    program = hook.get("path") if isinstance(hook, dict) else hook
    return program if isinstance(program, str) else ""
