"""Settings in an engine's files, in one form for every engine: files, handlers, default, CDI. Read-only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from gpunode.errors import GpunodeError, Unreadable
from gpunode.facts.cdi import DIRECTORIES
from gpunode.facts.containerd import load_config, version_in_force
from gpunode.facts.crio import CrioFile, compiled_default, drop_in_directory, load_crio
from gpunode.facts.daemons import Daemon, as_daemon_user
from gpunode.facts.docker import flag_features, parse_daemon_json, programs
from gpunode.facts.podman import PodmanFile, load_podman
from gpunode.facts.processes import option_value, option_values
from gpunode.facts.registry import ENGINES
from gpunode.facts.toml import dig
from gpunode.facts.writers import GeneratedCopy, generated_copy
from gpunode.host import Host
from gpunode.output.typed import as_strings, as_text

COMMAND_LINE = "its command line"  # where a handler comes from a flag
_CONTAINERD_CDI_ON, _DOCKER_CDI_ON = (2, 0), (28, 2)  # on from this release, unless switched off
# what an engine has without any file: its own low-level runtimes, and dockerd's names for their shims
_OWN = ("runc", "crun", "crun-vm", "crun-wasm", "io.containerd.")
VARIANTS = {"nvidia-cdi": "cdi", "nvidia-legacy": "legacy"}  # options of configure-runtime --also


class ConfigFile(NamedTuple):
    """One file that an engine reads.

    `text` is None if it doesn't exist; `role` is main or drop-in. `copy` is what NVIDIA's tools copied into
    it, None if it is no such copy.
    """

    path: str
    role: str
    text: str | None
    tree: Mapping[str, Any] = MappingProxyType({})
    copy: GeneratedCopy | None = None


class ConfiguredHandler(NamedTuple):
    """A handler from the files, or from the daemon's command line: `file` is `COMMAND_LINE` then.

    `path` is empty if the engine itself finds the program.
    """

    name: str
    path: str
    file: str


class EngineSettings(NamedTuple):
    """`default` is empty if no file sets one.

    `cdi` is None if this release has none, or it is unknown. `problem` says why the files can't be parsed;
    their settings are unknown then. `readable` is False if only permission is missing. `complete` is False
    if the daemon may take handlers from tables that aren't read here.
    """

    files: tuple[ConfigFile, ...]
    handlers: tuple[ConfiguredHandler, ...] = ()
    default: str = ""
    cdi: bool | None = None
    cdi_directories: tuple[str, ...] = DIRECTORIES
    problem: str = ""
    readable: bool = True
    complete: bool = True

    @property
    def paths(self) -> dict[str, str]:
        """Programs by handler."""
        return {handler.name: handler.path for handler in self.handlers}

    def lacks(self, active: Iterable[str]) -> tuple[str, ...]:
        """Those of a running daemon's handlers that its next start loses: neither a file nor a flag has them,
        and they aren't the engine's own. Empty if that isn't certain."""
        if not self.complete:
            return ()
        known = self.paths
        return tuple(name for name in active if name and name not in known and not name.startswith(_OWN))


def engine_settings(host: Host, daemon: Daemon) -> EngineSettings:
    """The settings in this daemon's files; never raises for their contents."""
    try:
        settings = _READERS[daemon.name](as_daemon_user(host, daemon), daemon)
        return settings if _since(daemon, ENGINES[daemon.name].cdi) else settings._replace(cdi=None)
    except GpunodeError as error:
        main = ConfigFile(daemon.config_path, "main", "")
        return EngineSettings((main,), problem=error.message, readable=not isinstance(error, Unreadable))


def own_default(daemon: Daemon) -> str:
    """The engine's default handler without a setting; empty where it depends on installed programs."""
    if daemon.name == "crio":
        return compiled_default(daemon.version)
    return ENGINES[daemon.name].default_handler


def configure_options(handlers: Sequence[str], default: str) -> tuple[str, ...]:
    """What follows ``gpunode configure-runtime --runtime ENGINE`` to write NVIDIA's `handlers` of a running
    daemon to its file. `default` is the one of them that is its default, or empty."""
    names = [name for name in ((default,) if default else ()) + tuple(handlers) if name not in VARIANTS]
    name = "nvidia" if "nvidia" in names or not names else names[0]
    also = [option for variant, option in VARIANTS.items() if variant in handlers]
    return (
        *(("--nvidia-runtime-name", name) if name != "nvidia" else ()),
        *(("--also", ",".join(also)) if also else ()),
        *(("--set-as-default",) if default and default not in VARIANTS else ()),
    )


def _containerd(host: Host, daemon: Daemon) -> EngineSettings:
    config = load_config(host, daemon.config_path, daemon.version)
    files = [ConfigFile(config.path, "main", config.main_text if config.exists else None, config.main)]
    for path, tree in config.trees.items():
        if path != config.path:
            copy = generated_copy(tree, config.main, config.plugin)
            files.append(ConfigFile(path, "drop-in", host.read_text(path), tree, copy))
    handlers = []
    for name, table in config.runtimes.items():
        keys = ("plugins", config.plugin, "containerd", "runtimes", name)
        where = [path for path, tree in config.trees.items() if dig(tree, *keys) is not None]
        program = dig(table, "options", "BinaryName")
        handlers.append(ConfiguredHandler(name, as_text(program), where[-1] if where else config.path))
    switch = config.cri.get("enable_cdi")
    cdi = switch if isinstance(switch, bool) else _since(daemon, _CONTAINERD_CDI_ON)
    return EngineSettings(
        tuple(files),
        tuple(handlers),
        config.named_default,
        cdi,
        _directories(config.cri.get("cdi_spec_dirs")),
        # with several versions containerd may read a drop-in's table where `config.runtimes` doesn't
        complete=version_in_force(config) == config.version,
    )


def _docker(host: Host, daemon: Daemon) -> EngineSettings:
    path = daemon.config_path
    text = host.read_text(path)
    tree = parse_daemon_json(text or "", path)
    handlers = tuple(ConfiguredHandler(name, program, path) for name, program in programs(tree).items())
    switch = flag_features(daemon.argv).get("cdi", dig(tree, "features", "cdi"))
    cdi = switch if isinstance(switch, bool) else _since(daemon, _DOCKER_CDI_ON)
    return EngineSettings(
        (ConfigFile(path, "main", text, tree),),
        (*handlers, *_flag_handlers(option_values(daemon.argv, "--add-runtime"), "=")),
        option_value(daemon.argv, "--default-runtime") or as_text(tree.get("default-runtime")),
        cdi,
        tuple(option_values(daemon.argv, "--cdi-spec-dir")) or _directories(tree.get("cdi-spec-dirs")),
    )


def _crio(host: Host, daemon: Daemon) -> EngineSettings:
    config = load_crio(host, daemon.config_path, drop_in_directory(daemon))
    handlers = tuple(
        ConfiguredHandler(name, as_text(dig(table, "runtime_path")), config.defines(name)[-1].path)
        for name, table in config.handlers.items()
    )
    runtimes = (part for value in option_values(daemon.argv, "--runtimes") for part in value.split(","))
    return EngineSettings(
        _files(config.path, config.files),
        (*handlers, *_flag_handlers(runtimes, ":")),
        option_value(daemon.argv, "--default-runtime") or config.named_default,
        True,
        _directories(config.setting("runtime", "cdi_spec_dirs")),
    )


def _podman(host: Host, daemon: Daemon) -> EngineSettings:
    config = load_podman(host)
    runtimes = {name: (file.path, paths) for file in config.files for name, paths in file.runtimes.items()}
    handlers = tuple(
        ConfiguredHandler(name, next((path for path in paths if host.executable(path)), paths[0]), file)
        for name, (file, paths) in runtimes.items()
        if paths
    )
    return EngineSettings(
        _files(daemon.config_path, config.files),
        handlers,
        as_text(config.setting("runtime")),
        True,
        _directories(config.setting("cdi_spec_dirs")),
    )


_READERS: Mapping[str, Callable[[Host, Daemon], EngineSettings]] = {
    "containerd": _containerd,
    "docker": _docker,
    "crio": _crio,
    "podman": _podman,
}


def _flag_handlers(values: Iterable[str], mark: str) -> Iterable[ConfiguredHandler]:
    """Handlers from flags of the daemon: the name, `mark`, the program, and what may follow."""
    for value in values:
        name, *rest = value.split(mark)
        yield ConfiguredHandler(name, rest[0] if rest else "", COMMAND_LINE)


def _files(main: str, entries: Iterable[CrioFile | PodmanFile]) -> tuple[ConfigFile, ...]:
    """The existing files; the main file is listed even if it doesn't exist."""
    files = [
        ConfigFile(file.path, "main" if file.path == main else "drop-in", file.text, file.tree)
        for file in entries
    ]
    absent = () if any(file.path == main for file in files) else (ConfigFile(main, "main", None),)
    return (*absent, *files)


def _since(daemon: Daemon, version: tuple[int, ...]) -> bool:
    return bool(daemon.version) and daemon.version >= version


def _directories(value: Any) -> tuple[str, ...]:
    return as_strings(value) or DIRECTORIES
