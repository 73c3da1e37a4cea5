"""CRI-O on this node: its process, and its merged configuration, from its files or from the daemon.

How CRI-O reads it (pkg/config/config.go, the same from 1.20 to 1.37): the main file, then *every* file below
the drop-in directory, in lexical order, whatever its name, including hidden ones, ``*.bak`` and
subdirectories. A key in a later file overrides an earlier one; a handler under ``crio.runtime.runtimes`` is
replaced as a whole. Flags on the command line come last; an environment variable counts as its flag. A
drop-in that can't be read, including a dangling link, keeps CRI-O from starting.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from gpunode.daemons.crio import ANSWER_SECONDS, running_config
from gpunode.errors import ConfigError, GpunodeError
from gpunode.facts.daemons import Daemon, KnownDaemon, cri_version, locate, socket_path
from gpunode.facts.processes import environment, option_value, running
from gpunode.facts.registry import ENGINES
from gpunode.facts.systemd import read_unit
from gpunode.facts.toml import KeyPath, dig, line_of_key, parse_toml
from gpunode.facts.toolkit import DEFAULT_PATH
from gpunode.facts.writers import is_nvidia_program
from gpunode.host import Host
from gpunode.output.typed import as_dict, as_strings, as_text

DEFAULT_CONFIG = "/etc/crio/crio.conf"
DEFAULT_DIRECTORY = "/etc/crio/crio.conf.d"
DEFAULT_SOCKET = "/var/run/crio/crio.sock"
_CONFIG_FLAGS = ("--config", "-c")
_DIRECTORY_FLAGS = ("--config-dir", "-d")
# internal/criocli/criocli.go, the relevant flags
_VARIABLES = {
    "CONTAINER_CONFIG": _CONFIG_FLAGS,
    "CONTAINER_CONFIG_DIR": _DIRECTORY_FLAGS,
    "CONTAINER_CONMON": ("--conmon",),
    "CONTAINER_DEFAULT_RUNTIME": ("--default-runtime",),
    "CONTAINER_LISTEN": ("--listen",),
    "CONTAINER_RUNTIMES": ("--runtimes",),
}
# the unit's name upstream, and the alias that older packages installed as the unit itself
_KNOWN = tuple(KnownDaemon("crio", unit, DEFAULT_CONFIG, _CONFIG_FLAGS) for unit in ENGINES["crio"].units)
_CRUN_SINCE = (1, 31)  # before that, the built-in handler was runc
_HOOK_DIRECTORIES = ("/usr/share/containers/oci/hooks.d",)  # CRI-O's own default


def find_crio(host: Host, config: str | None = None) -> Daemon | None:
    """The CRI-O that reads `config`, else the system's; None if there is none on this node."""
    known = next((known for known in _KNOWN if read_unit(host, known.unit) is not None), _KNOWN[0])
    # only root may read the environment; otherwise only the flags count
    processes = [
        process._replace(argv=_with_variables(process.argv, environment(host, process.pid)))
        for process in running(host, "crio")
    ]
    daemon = locate(host, known, processes, config)
    if daemon is None:
        return None
    unit = read_unit(host, daemon.unit) if daemon.process is None and daemon.unit else None
    if unit is not None:
        argv = _with_variables(daemon.argv, unit.environment)
        path = option_value(argv[1:], *_CONFIG_FLAGS) or daemon.config_path
        daemon = daemon._replace(argv=argv, config_path=path)
    daemon = daemon._replace(socket=_socket(host, daemon))
    return daemon._replace(version=cri_version(host, daemon))


def _with_variables(argv: tuple[str, ...], variables: Mapping[str, str]) -> tuple[str, ...]:
    """The command line with a flag for each variable that no flag overrides."""
    flags = [
        (flags[0], variables[name])
        for name, flags in _VARIABLES.items()
        if variables.get(name) and option_value(argv[1:], *flags) is None
    ]
    return (*argv, *(part for pair in flags for part in pair))


def drop_in_directory(daemon: Daemon) -> str:
    """The drop-in directory that this CRI-O reads."""
    return (option_value(daemon.argv[1:], *_DIRECTORY_FLAGS) or DEFAULT_DIRECTORY).rstrip("/") or "/"


def _socket(host: Host, daemon: Daemon) -> str:
    value = option_value(daemon.argv[1:], "--listen")
    if value:
        return socket_path(value) or value
    try:
        listen = load_crio(host, daemon.config_path, drop_in_directory(daemon)).setting("api", "listen")
    except GpunodeError:
        return DEFAULT_SOCKET  # the command that edits the file reports what is wrong with it
    return socket_path(listen) or DEFAULT_SOCKET if isinstance(listen, str) else DEFAULT_SOCKET


class CrioFile(NamedTuple):
    """One file that CRI-O reads, or the running daemon's answer, which has no text."""

    path: str
    text: str
    tree: dict[str, Any]

    @property
    def runtime(self) -> dict[str, Any]:
        """Its ``crio.runtime`` table."""
        return as_dict(dig(self.tree, "crio", "runtime"))

    @property
    def handlers(self) -> dict[str, dict[str, Any]]:
        """The handlers in this file; only the tables, because a daemon's answer has unknown types."""
        tables = as_dict(self.runtime.get("runtimes"))
        return {name: table for name, table in tables.items() if isinstance(table, dict)}

    def line_of(self, *path: str) -> int:
        """The line (from 1) of a key or table, or of the table that contains it; 1 if there is none."""
        return line_of_key(self.text, path) or 1

    def line_of_handler(self, *path: str) -> int:
        """The line (from 1) of a handler by its name, or of one of its keys."""
        return self.line_of("crio", "runtime", "runtimes", *path)


@dataclass(frozen=True)
class CrioConfig:
    """CRI-O's files in the order in which it reads them, and the merged result."""

    path: str
    directory: str
    files: tuple[CrioFile, ...]

    @cached_property
    def handlers(self) -> dict[str, dict[str, Any]]:
        """Handlers by name; the built-in one is included only if a file or the daemon's answer defines it."""
        merged: dict[str, dict[str, Any]] = {}
        for file in self.files:
            merged |= file.handlers
        return merged

    @property
    def named_default(self) -> str:
        """The default handler that a file sets; empty if none does."""
        return as_text(self.setting("runtime", "default_runtime"))

    @property
    def hook_directories(self) -> tuple[str, ...]:
        """The directories where CRI-O looks for OCI hooks."""
        return as_strings(self.setting("runtime", "hooks_dir")) or _HOOK_DIRECTORIES

    def defines(self, name: str) -> tuple[CrioFile, ...]:
        """The files that define a handler; the last one takes effect."""
        return tuple(file for file in self.files if name in file.handlers)

    def setting(self, *keys: str) -> Any:
        """The value of these keys below ``crio``, from the last file that sets it, None if none does."""
        values = (dig(file.tree, "crio", *keys) for file in self.files)
        return next((value for value in reversed(tuple(values)) if value is not None), None)


def compiled_default(version: tuple[int, ...]) -> str:
    """The handler that CRI-O includes and uses as default without any file."""
    return "runc" if version and version < _CRUN_SINCE else "crun"


def load_crio(host: Host, main: str, directory: str) -> CrioConfig:
    """Read the files. `ConfigError` names file, line and column of an error that stops CRI-O too."""
    files = (load_file(host, path) for path in (main, *_walk(host, directory)))
    return CrioConfig(main, directory, tuple(file for file in files if file is not None))


def running_crio(host: Host, socket: str, timeout: float = ANSWER_SECONDS) -> CrioConfig:
    """The running daemon's configuration; `DaemonError` if the daemon doesn't report it."""
    answer = CrioFile("/config", "", running_config(host, socket, timeout))
    return CrioConfig(answer.path, "", (answer,))


def load_file(host: Host, path: str) -> CrioFile | None:
    """Read one file, None if it doesn't exist. Errors as for `load_crio`."""
    text = host.read_text(path)
    if text is None:
        return None
    file = CrioFile(path, text, parse_toml(text, path))
    _refuse_wrong_types(file)
    return file


def _walk(host: Host, directory: str) -> Iterator[str]:
    """Every file below, in the order of Go's filepath.Walk; a link to a directory counts as a file.

    `ConfigError` for a dangling link.
    """
    for name in host.listdir(directory):
        path = f"{directory}/{name}"
        link = host.readlink(path)
        if link is None and host.is_dir(path):
            yield from _walk(host, path)
        elif link is not None and not host.exists(path):
            raise ConfigError(
                f"{path} is a link to {link}, which doesn't exist, so CRI-O can't start",
                hint=f"remove the link or restore its target: ls -l {path}",
            )
        else:
            yield path


def _refuse_wrong_types(file: CrioFile) -> None:
    here: Any = file.tree
    tables = ("crio", "runtime", "runtimes")
    for depth, key in enumerate(tables, start=1):
        if key not in here:
            break
        here = here[key]
        if not isinstance(here, dict):
            raise _wrong(file, tables[:depth], "a table")
    default = dig(file.tree, "crio", "runtime", "default_runtime")
    if default is not None and not isinstance(default, str):
        raise _wrong(file, ("crio", "runtime", "default_runtime"), "a string")
    for name, handler in as_dict(file.runtime.get("runtimes")).items():
        if not isinstance(handler, dict):
            raise _wrong(file, (*tables, name), "a table")
        for key in ("runtime_path", "runtime_type", "runtime_root", "monitor_path"):
            if not isinstance(handler.get(key, ""), str):
                raise _wrong(file, (*tables, name, key), "a string")


def _wrong(file: CrioFile, path: KeyPath, kind: str) -> ConfigError:
    line = file.line_of(*path)
    return ConfigError(
        f"{file.path}:{line}: {path[-1]} is not {kind}, so CRI-O can't start",
        hint=f"correct that line: ${{EDITOR:-vi}} +{line} {file.path}",
    )


# The programs behind CRI-O's handlers, and which of them NVIDIA's runtime finds. CRI-O's packages install
# crun and runc in /usr/libexec/crio. nvidia-container-runtime uses the first of
# ``nvidia-container-runtime.runtimes`` that it finds, by default the bare names; without one every pod fails.

NVIDIA_NAMES = ("nvidia", "nvidia-cdi", "nvidia-legacy")
RUNTIMES_KEY = ("nvidia-container-runtime", "runtimes")
_TOOLKIT_DEFAULT = ("runc", "crun")
_PACKAGED = ("/usr/libexec/crio/crun", "/usr/libexec/crio/runc")
_LOW_LEVEL = re.compile(r"crun|runc|youki")


def is_low_level(name: str, table: Mapping[str, Any]) -> bool:
    """Whether a handler starts ordinary containers through crun or runc."""
    program = str(table.get("runtime_path") or name).rpartition("/")[2]
    return table.get("runtime_type", "") in ("", "oci") and _LOW_LEVEL.fullmatch(program) is not None


def is_nvidias(name: str, table: Any) -> bool:
    """Whether a handler is NVIDIA's, by its name or its program."""
    program = table.get("runtime_path") if isinstance(table, dict) else None
    return name in NVIDIA_NAMES or (isinstance(program, str) and is_nvidia_program(program))


def low_level_paths(host: Host, config: CrioConfig, version: tuple[int, ...]) -> tuple[str, ...]:
    """Paths of crun and runc: the default's first, then other handlers', then the packages' directory."""
    default = config.named_default or compiled_default(version)
    tables = sorted(config.handlers.items(), key=lambda pair: pair[0] != default)
    paths = [str(table.get("runtime_path", "")) for name, table in tables if is_low_level(name, table)]
    absolute = [path for path in (*paths, *_PACKAGED) if path.startswith("/")]
    return tuple(path for path in dict.fromkeys(absolute) if host.executable(path))


def toolkit_runtimes(text: str) -> tuple[str, ...]:
    """The runtimes that NVIDIA's runtime looks for, in order, from the toolkit's configuration."""
    listed = dig(parse_toml(text, DEFAULT_PATH), *RUNTIMES_KEY)
    if not isinstance(listed, list):
        return _TOOLKIT_DEFAULT
    return tuple(entry for entry in listed if isinstance(entry, str))
