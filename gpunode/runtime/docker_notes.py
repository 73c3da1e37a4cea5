"""What a person should know about Docker on this node that no file tells: pods, containers, the snap."""

from __future__ import annotations

import re

from gpunode.errors import DaemonError, GpunodeError, PreconditionError
from gpunode.facts.daemons import Daemon, parse_version
from gpunode.facts.docker_snap import PROGRAMS
from gpunode.facts.kubelet import KUBELETS, find_kubelet
from gpunode.facts.processes import running
from gpunode.facts.toolkit_config import DEFAULT_PATH
from gpunode.host import Host
from gpunode.runtime.docker_user import beside_another_users
from gpunode.runtime.engine import Active, Wanted

_MOST_CONTAINERS = 200  # each takes one more question to dockerd
_NAMED = 5
_TAKES_RUNTIME_CLASSES = (0, 4)  # cri-dockerd; older ones refuse a pod that names any


def notes(host: Host, daemon: Daemon, wanted: Wanted, active: Active | None) -> tuple[str, ...]:
    """Notes on a configuration that is wanted."""
    found = [
        _pods(host, wanted, active),
        _global_no_cgroups(host, daemon),
        beside_another_users(host, daemon),
    ]
    if daemon.manager == "snap":
        found.append(
            "the docker snap registers the runtime by itself at every start: snap set docker"
            " nvidia-support.disabled=true ends that"
        )
    if daemon.manager == "snap" and wanted.cdi:
        found.append(
            "the docker snap keeps a CDI specification of its own in /var/snap/docker/current/etc/cdi, for"
            " its runtime; its confinement may hide the node's"
        )
    return tuple(filter(None, found))


def survivors(active: Active | None, verb: str) -> tuple[str, ...]:
    """Says of a restart that containers go on, where they do."""
    if verb != "restart" or active is None or not active.live_restore or not active.running_containers:
        return ()
    return (f"{active.running_containers} running container(s) go on during the restart (live-restore)",)


def _pods(host: Host, wanted: Wanted, active: Active | None) -> str:
    """Pods on Docker run with its default runtime: the kubelet talks to cri-dockerd, and that to Docker."""
    if not wanted.handlers or wanted.default or (active is not None and active.default in wanted.names):
        return ""
    try:
        processes = running(host, *KUBELETS, "cri-dockerd")
        kubelet = find_kubelet(host, processes)
    except GpunodeError:
        return ""
    if kubelet is None or not kubelet.joined or kubelet.engine != "docker":
        return ""
    main = wanted.names[0]
    if "dockershim" not in kubelet.endpoint:
        shim = next((one for one in processes if one.name == "cri-dockerd"), None)
        answer = host.run([shim.argv[0] if shim else "cri-dockerd", "--version"], timeout=5.0)
        version = parse_version(answer.stdout) if answer.ok else ()
        if version >= _TAKES_RUNTIME_CLASSES or not version:
            return (
                f"the kubelet uses Docker through cri-dockerd: a pod gets {main} only by a RuntimeClass with"
                f" handler {main} (cri-dockerd 0.4 and later; gpunode manifests runtime-class), or by running"
                " this with --set-as-default"
            )
    return (
        "the kubelet uses Docker through a shim that knows no RuntimeClass: pods get Docker's default"
        " runtime, so run this with --set-as-default"
    )


def _global_no_cgroups(host: Host, daemon: Daemon) -> str:
    if daemon.user:
        return ""
    try:
        text = host.read_text(DEFAULT_PATH) or ""
    except GpunodeError:
        return ""
    found = re.search(r"^[ \t]*no-cgroups[ \t]*=[ \t]*true", text, re.MULTILINE)
    if found is None:
        return ""
    line = text.count("\n", 0, found.start()) + 1
    return (
        f"{DEFAULT_PATH}:{line} sets no-cgroups for the whole node, a setting for rootless engines: in mode"
        ' legacy containers fail with "NVML: Unknown Error"; to end that: gpunode toolkit config set'
        " nvidia-container-cli.no-cgroups=false"
    )


def require_snap_program(host: Host, daemon: Daemon, wanted: Wanted) -> None:
    """`PreconditionError` for a program of the host: the snap's dockerd sees only those in the snap."""
    if daemon.manager != "snap":
        return
    for handler in wanted.handlers:
        if not handler.path.startswith("/snap/docker/") or host.which(handler.path) is None:
            raise PreconditionError(
                f"the docker snap can't start {handler.path}: it sees only the programs in {PROGRAMS}",
                hint="snap refresh docker brings NVIDIA's; or use Docker's own packages instead of the snap",
                code="toolkit-missing",
            )


def still_used(host: Host, daemon: Daemon, names: tuple[str, ...]) -> tuple[str, str]:
    """Containers that were made with one of these runtimes: a note about them, and what speaks against it.

    Without its runtime a container can't be started again, neither by hand nor by its restart policy. Both
    are empty if there is none, or dockerd doesn't answer. Of more than 200 containers only the newest count.
    """
    if not host.live:
        return "", ""
    from gpunode.daemons.docker_api import DockerApi

    try:
        users = DockerApi(host, daemon.socket).containers_of(names, _MOST_CONTAINERS)
    except DaemonError:
        return "", ""
    if not users:
        return "", ""
    up = [name for name, is_running in users if is_running]
    listed = _listed([name for name, _ in users])
    note = f"made with this runtime, can't be started again without it: {listed}"
    if not up:
        return note, ""
    return note, f"{len(up)} running container(s) can't be restarted without this runtime: {_listed(up)}"


def _listed(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
