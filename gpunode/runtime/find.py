"""Selection of the engines, and their daemons on this node."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from importlib import import_module

from gpunode.errors import PreconditionError, Unreadable, UsageError
from gpunode.facts.daemons import Daemon, find_daemon, owner
from gpunode.facts.distributions import distribution_at, find_distribution
from gpunode.facts.kubelet import find_kubelet
from gpunode.facts.processes import running
from gpunode.facts.registry import DISTRIBUTIONS, ENGINES
from gpunode.host import Host
from gpunode.host.journal import Entry
from gpunode.runtime.engine import Engine, Request

Finder = Callable[[Host, str | None], Daemon | None]
AUTO = ("", "auto")
# the last parts of their files' paths in a custom data directory
_IN_DATA = ("/agent/etc/containerd/", "/args/containerd")


def _distribution(name: str, host: Host, config: str | None) -> Daemon | None:
    daemon = find_distribution(host, name)
    if daemon and config and not _beside(host, config, daemon):
        raise UsageError(
            f"{config} is not read by {name}'s containerd, which reads {daemon.config_path}",
            hint="leave out --config",
        )
    return daemon


FINDERS: Mapping[str, Finder] = {
    **{name: functools.partial(find_daemon, name) for name in ENGINES},
    **{name: functools.partial(_distribution, name) for name in DISTRIBUTIONS},
}


def program_of(name: str) -> str:
    """The program of an engine's daemon, or of a distribution, which has its name."""
    return ENGINES[name].program if name in ENGINES else name


def check_names(names: Iterable[str]) -> None:
    """`UsageError` for an unknown engine, or one named twice; doesn't read the node."""
    seen: set[str] = set()
    for name in names:
        if name not in FINDERS and name not in AUTO:
            raise UsageError(f"unknown runtime {name!r}", hint=_runtime_hint(name))
        if name in seen:
            raise UsageError(f"--runtime {name} is given twice", hint="name each engine once")
        seen.add(name)


def _runtime_hint(name: str) -> str:
    near = get_close_matches(name.lower(), FINDERS, 1)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(FINDERS)}, auto"


def engines(host: Host, request: Request) -> tuple[Engine, ...]:
    """The engines of a request, in the order in which it names them. Errors as for `engine`."""
    names = request.runtimes
    files = {"--config": request.config, "--drop-in-config": request.drop_in_config}
    files |= {"--socket": request.socket, "--restart-command": request.restart_command}
    option = next((option for option, value in files.items() if value), "")
    if len(names) > 1 and option:
        raise UsageError(
            f"{option} belongs to one engine, and {', '.join(names)} are named",
            hint="configure them one by one",
        )
    result = tuple(
        engine(host, name, request.config, request.drop_in_config, request.socket) for name in names
    )
    paths = [selected.daemon.config_path for selected in result]
    if len(set(paths)) < len(paths):
        raise UsageError(f"{' and '.join(names)} are one engine on this node", hint="name it once")
    return result


def engine(host: Host, name: str, config: str = "", drop_in: str = "", socket: str = "") -> Engine:
    """The engine `name` of this node, or the one that ``auto`` selects.

    `UsageError` for an unknown name, an ambiguous ``auto`` and contradicting options; `PreconditionError` if
    the engine isn't installed.
    """
    check_names((name,))
    selected = _distribution_of(host, config) if name in (*AUTO, "containerd") else ""
    selected = selected or (_auto(host, config) if name in AUTO else name)
    for option, path in (("--config", config), ("--drop-in-config", drop_in)):
        if path and not path.startswith("/"):
            raise UsageError(f"{option} must be an absolute path, not {path!r}", hint=f"{option} /PATH")
    if drop_in and not (selected in ENGINES and ENGINES[selected].drop_ins):
        raise UsageError(f"{selected} has no drop-in to choose", hint="leave out --drop-in-config")
    daemon = FINDERS[selected](host, config or None)
    if selected == "docker":
        from gpunode.runtime.docker_rootless import refuse_another_users

        refuse_another_users(host, daemon, config)
    if daemon is None:
        host.refuse_unsafe(program_of(selected))
        raise PreconditionError(f"{selected} is not installed on this node", hint=_instead(host))
    if socket:
        daemon = daemon._replace(socket=socket)
    return of_daemon(host, daemon, drop_in)


def _instead(host: Host) -> str:
    here = [name for name, find in FINDERS.items() if _is_meant(name, find(host, None))]
    if not here:
        return f"install it first; no other engine is installed ({', '.join(FINDERS)})"
    return f"install it first, or name an installed engine: --runtime {' or --runtime '.join(here)}"


def _distribution_of(host: Host, config: str) -> str:
    """The distribution that owns this rendered file or template; empty if none does."""
    if not owner(config) and not any(part in config for part in _IN_DATA):
        return ""  # finding all of them takes time
    processes = running(host)
    distributions = ((name, find_distribution(host, name, processes)) for name in DISTRIBUTIONS)
    return next((name for name, daemon in distributions if daemon and _beside(host, config, daemon)), "")


def _beside(host: Host, config: str, daemon: Daemon) -> bool:
    """Whether the path is a file in the daemon's own directory, which also has templates."""
    left, right = (path.rpartition("/")[0] for path in (config, daemon.config_path))
    return left == right or host.realpath(left) == host.realpath(right)


def of_daemon(host: Host, daemon: Daemon, drop_in: str = "") -> Engine:
    """The engine of a daemon: `DockerEngine` of runtime/docker.py and so on; loads only that module."""
    name = name_of_daemon(daemon)
    if name not in FINDERS:
        raise ValueError(f"no engine for the daemon {daemon.name!r}")
    name = "k3s" if name == "rke2" else name  # which embeds the same code
    engine_class = getattr(import_module(f"gpunode.runtime.{name}"), f"{name.capitalize()}Engine")
    result: Engine = engine_class(host, daemon, drop_in)
    return result


def name_of(entry: Entry) -> str:
    """The name by which ``--runtime`` selects the engine of a journal entry."""
    return _name(entry.manager, entry.engine)


def name_of_daemon(daemon: Daemon) -> str:
    """The name by which ``--runtime`` selects this daemon's engine."""
    return _name(daemon.manager, daemon.name)


def _name(manager: str, engine: str) -> str:
    return manager if manager in DISTRIBUTIONS else engine  # Docker manages a containerd, too


def _auto(host: Host, config: str) -> str:
    """The engine of the named file, the kubelet's, or the only one; podman only if there is no other."""
    by_file = (name for name, row in ENGINES.items() if row.config and config.endswith(row.config))
    selected = next(by_file, "") or _kubelet_engine(host)
    if selected:
        return selected
    daemons = [
        name for name, find in FINDERS.items() if name != "podman" and _is_meant(name, find(host, None))
    ]
    names = daemons or (["podman"] if FINDERS["podman"](host, None) else [])
    if len(names) == 1:
        return names[0]
    if not names:
        host.refuse_unsafe(*map(program_of, FINDERS))
        raise PreconditionError(
            "no container engine is installed on this node",
            hint=f"install one of them first: {', '.join(FINDERS)}",
        )
    raise UsageError(
        f"several engines are installed on this node: {', '.join(names)}",
        hint=f"choose one: --runtime {' or --runtime '.join(names)};"
        f" configure-runtime and unconfigure-runtime accept several: --runtime {','.join(names)}",
    )


def _is_meant(name: str, daemon: Daemon | None) -> bool:
    """Whether a name selects this daemon: a distribution's containerd has a name of its own."""
    return daemon is not None and not (daemon.name == name == "containerd" and daemon.manager)


def _kubelet_engine(host: Host) -> str:
    """The engine of this node's kubelet, if gpunode supports it; empty without a kubelet."""
    try:
        kubelet = find_kubelet(host, running(host))
    except Unreadable:
        return ""
    if kubelet is None or not kubelet.joined or kubelet.engine not in FINDERS:
        return ""
    return _containerd_at(host, kubelet.endpoint) if kubelet.engine == "containerd" else kubelet.engine


def _containerd_at(host: Host, endpoint: str) -> str:
    """The name of the containerd at a socket: a distribution's, or the system's."""
    from gpunode.facts.containerd import DEFAULT_SOCKET

    daemon = None if endpoint == DEFAULT_SOCKET else distribution_at(host, endpoint)
    return daemon.manager if daemon else "containerd"
