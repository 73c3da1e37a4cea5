"""Which engines are meant, and their daemons on this node."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping

from gpunode.errors import PreconditionError, Unreadable, UsageError
from gpunode.facts.containerd import find_containerd, owner
from gpunode.facts.crio import find_crio
from gpunode.facts.daemons import Daemon
from gpunode.facts.docker import find_docker
from gpunode.facts.kubelet import find_kubelet
from gpunode.facts.podman import find_podman
from gpunode.facts.processes import running
from gpunode.host import Host
from gpunode.runtime.containerd import ContainerdEngine
from gpunode.runtime.docker import DockerEngine
from gpunode.runtime.docker_user import refuse_another_users
from gpunode.runtime.engine import Engine
from gpunode.runtime.request import Request

Finder = Callable[[Host, str | None], Daemon | None]
AUTO = ("", "auto")
FINDERS: Mapping[str, Finder] = {
    "docker": find_docker,
    "containerd": find_containerd,
    "crio": find_crio,
    "podman": find_podman,
}
_HAVE_DROP_INS = ("containerd", "crio")


def check_names(names: Iterable[str]) -> None:
    """`UsageError` for an engine that nobody here knows, or one named twice; needs no look at the node."""
    seen: set[str] = set()
    for name in names:
        if name not in FINDERS and name not in AUTO:
            raise UsageError(f"unknown runtime {name!r}", hint=f"known: {', '.join(FINDERS)}, auto")
        if name in seen:
            raise UsageError(f"--runtime {name} is given twice", hint="name each engine once")
        seen.add(name)


def engines(host: Host, request: Request) -> tuple[Engine, ...]:
    """The engines of a request, in the order in which it names them. Errors as for `engine`."""
    names = request.runtimes or ("auto",)
    files = {"--config": request.config, "--drop-in-config": request.drop_in_config}
    files |= {"--socket": request.socket, "--restart-command": request.restart_command}
    given = next((option for option, value in files.items() if value), "")
    if len(names) > 1 and given:
        raise UsageError(
            f"{given} belongs to one engine, and {', '.join(names)} are named",
            hint="configure them one by one",
        )
    found = tuple(
        engine(host, name, request.config, request.drop_in_config, request.socket) for name in names
    )
    paths = [one.daemon.config_path for one in found]
    if len(set(paths)) < len(paths):
        raise UsageError(f"{' and '.join(names)} are one engine on this node", hint="name it once")
    return found


def engine(host: Host, name: str, config: str = "", drop_in: str = "", socket: str = "") -> Engine:
    """The engine `name` of this node, or the one that is meant by ``auto``.

    `UsageError` for an unknown name, an ambiguous ``auto`` and contradicting options; `PreconditionError` if
    the engine isn't here.
    """
    check_names((name,))
    chosen = _auto(host, config) if name in AUTO else name
    for option, path in (("--config", config), ("--drop-in-config", drop_in)):
        if path and not path.startswith("/"):
            raise UsageError(f"{option} must be an absolute path, not {path!r}", hint=f"{option} /PATH")
    if drop_in and chosen not in _HAVE_DROP_INS:
        raise UsageError(f"{chosen} has no drop-in to choose", hint="leave out --drop-in-config")
    daemon = FINDERS[chosen](host, config or None)
    if chosen == "docker":
        refuse_another_users(host, daemon, config)
    if daemon is None:
        raise PreconditionError(
            f"{chosen} is not installed on this node", hint="install it first, or name another: --runtime"
        )
    if socket:
        daemon = dataclasses.replace(daemon, socket=socket)
    return of_daemon(host, daemon, drop_in)


def of_daemon(host: Host, daemon: Daemon, drop_in: str = "") -> Engine:
    """The engine of a daemon, whoever may change it. Loads only the one: every module costs its part."""
    if daemon.name == "docker":
        return DockerEngine(host, daemon)
    if daemon.name == "crio":
        from gpunode.runtime.crio import CrioEngine

        return CrioEngine(host, daemon, drop_in)
    if daemon.name == "podman":
        from gpunode.runtime.podman import PodmanEngine

        return PodmanEngine(host, daemon)
    return ContainerdEngine(host, daemon, drop_in)


def name_of(manifest: Mapping[str, object]) -> str:
    """The name by which ``--runtime`` means the engine of a journal entry."""
    manager = str(manifest.get("manager") or "")
    return manager if manager in FINDERS else str(manifest.get("engine", ""))


def _auto(host: Host, config: str) -> str:
    """The engine whose file was named, the kubelet's, or the only one; podman only where it is alone."""
    if config.endswith(".toml"):
        return "containerd"
    if config.endswith(".json"):
        return "docker"
    if config.endswith("crio.conf"):
        return "crio"
    kubelets = _kubelet_engine(host)
    if kubelets:
        return kubelets
    daemons = [name for name, find in FINDERS.items() if name != "podman" and _is_own(find(host, None))]
    found = daemons or (["podman"] if find_podman(host) else [])
    if len(found) == 1:
        return found[0]
    if not found:
        raise PreconditionError(
            "there is no container engine on this node",
            hint=f"install one of them first: {', '.join(FINDERS)}",
        )
    raise UsageError(
        f"there are several engines on this node: {', '.join(found)}",
        hint=f"say which: --runtime {' or --runtime '.join(found)}; or name all that you want configured",
    )


def _is_own(daemon: Daemon | None) -> bool:
    return daemon is not None and not owner(daemon.config_path)


def _kubelet_engine(host: Host) -> str:
    """The engine that this node's kubelet talks to, if it is one of ours; empty without a kubelet."""
    try:
        kubelet = find_kubelet(host, running(host))
    except Unreadable:
        return ""
    return kubelet.engine if kubelet is not None and kubelet.joined and kubelet.engine in FINDERS else ""
