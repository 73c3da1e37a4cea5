"""Checks of the kind of Docker: the snap, Docker Desktop, a user's rootless one, or a release too old for
GPUs."""

from __future__ import annotations

from gpunode.checks import docker
from gpunode.checks.finding import LOADS_OTHER_DOCKER, RESTARTS_DOCKER, Fix
from gpunode.checks.fixes import upgrade
from gpunode.checks.model import (
    Verdict,
    check,
    engine_check,
    fail,
    if_used,
    note,
    ok,
    seen,
    skip,
    warn,
)
from gpunode.errors import ConfigError, DaemonError
from gpunode.facts import tables
from gpunode.facts.daemons import Daemon
from gpunode.facts.docker import DESKTOP_CONTEXT, as_user, hook_injects, no_cgroups, nvidia_programs
from gpunode.facts.effective import engine_settings
from gpunode.facts.engines import docker_role
from gpunode.facts.node import Node
from gpunode.facts.users import account
from gpunode.facts.writers import is_nvidia_program


@check(
    "docker-snap",
    title="Docker isn't installed as a snap",
    looks_at="whether the running dockerd belongs to the docker snap, its runtimes, and whether another "
    "Docker runs beside it. Skipped if the kubelet uses another engine.",
    fix=docker.REPLACE_SNAP,
    blocked_by=("pci-no-gpu", "driver-not-installed", "module-not-loaded"),
    preflight=("docker",),
    refs=("https://github.com/canonical/docker-snap",),
    table=tables.TABLE,
)
def docker_snap(node: Node) -> Verdict:
    """The snap can't access the node's programs. It includes its own NVIDIA runtime and registers it only if
    it finds the driver. A toolkit that is installed on the node has no effect on it or breaks it ('could not
    select device driver', 'libnvidia-ml.so.1').
    """
    snap = node.docker_snap
    if snap is None:
        return ok("Docker isn't a snap") if node.docker else skip(docker_role(node).reason)
    where = seen(snap.unit or "snap", f"Docker {snap.release or '(unknown)'} as a snap")
    if node.docker is None or node.docker.manager != "snap":
        if node.docker and node.docker.process and snap.process:
            system = seen(
                node.docker.config_source, f"Docker {node.docker.release or '(unknown)'} as a package"
            )
            text = (
                "two Dockers run on this node, one from a package and one from a snap: either may answer the "
                "docker command"
            )
            return warn(text, where, system)
        return ok("the docker snap is installed, but another Docker is running")
    role = docker_role(node)
    if not role.used:
        return skip(role.reason)
    try:
        own = nvidia_programs(node.docker_info, "Runtimes") | nvidia_programs(node.docker_config)
    except (ConfigError, DaemonError):
        return skip("the docker snap doesn't report its runtimes")
    if not own:
        text = "Docker is a snap without its NVIDIA runtime, and can't access the node's toolkit"
        return fail(text, where, seen(f"{snap.socket} /info", "no nvidia runtime"))
    host_toolkit = node.toolkit.programs.get("nvidia-container-runtime-hook")
    if host_toolkit and tables.can("docker", "gpus-by-cdi", snap.version):
        text = "Docker is a snap, and the node's toolkit interferes with the snap's own toolkit"
        return warn(text, where, seen("PATH", host_toolkit))
    return note("Docker is a snap: containers get GPUs with --runtime=nvidia, not with --gpus", where)


@check(
    "docker-desktop",
    title="The docker command doesn't use Docker Desktop",
    looks_at="users who run Docker Desktop, and the context in their ~/.docker/config.json. Skipped if the "
    "kubelet uses another engine.",
    fix=docker.INSTALL,
    preflight=("docker",),
    refs=("https://docs.docker.com/desktop/features/gpu/",),
)
def docker_desktop(node: Node) -> Verdict:
    """Docker Desktop for Linux runs containers in a virtual machine without access to the node's GPUs: --gpus
    fails there, whatever is installed on the node.
    """
    kubelet = node.kubelet
    if kubelet is not None and kubelet.joined and kubelet.engine != "docker":
        return skip(f"the kubelet uses {kubelet.engine}, not Docker")
    if not node.docker_desktop:
        return ok("Docker Desktop isn't running on this node")
    for desktop in node.docker_desktop:
        if desktop.context != DESKTOP_CONTEXT:
            continue
        return fail(
            f"the docker command of {desktop.user} uses Docker Desktop, which runs in a virtual machine "
            "without GPUs",
            seen(desktop.config, f"currentContext {desktop.context}"),
            seen("com.docker.backend", f"process {desktop.pid}"),
            fix=docker.beside_desktop(node, desktop.user),
        )
    return ok("Docker Desktop is running, but no user's docker command uses it")


@check(
    "docker-rootless",
    title="Rootless Docker can give GPUs to containers",
    severity="warning",
    looks_at="every dockerd that an ordinary user runs: its own daemon.json and the toolkit configuration "
    "that applies to it. A rootless Docker without GPUs is a finding only if no other engine runs.",
    fix=docker.INSTALL,
    blocked_by=("pci-no-gpu", "driver-not-installed", "toolkit-missing"),
    refs=("https://docs.docker.com/engine/security/rootless/",),
    table=tables.TABLE,
)
def docker_rootless(node: Node) -> Verdict:
    """A rootless Docker reads another daemon.json than the system's. The toolkit's hook fails in it unless
    no-cgroups is set for that user, or containers get GPUs through CDI.
    """
    if not node.docker_rootless:
        return skip("no rootless Docker runs on this node")
    for daemon in node.docker_rootless:
        verdict = _hook_without_cgroups(node, daemon) or _unprepared(node, daemon)
        if verdict is not None:
            return verdict
    return ok("rootless Docker gives containers no GPUs, or uses a permitted method")


def _hook_without_cgroups(node: Node, daemon: Daemon) -> Verdict | None:
    state = engine_settings(node.host, daemon)
    programs = {name: path for name, path in state.paths.items() if _nvidia(name, path)}
    if not programs or no_cgroups(node.host, daemon):
        return None
    if not hook_injects(node.host, daemon, tuple(programs.values())):
        return None
    return warn(
        f"the NVIDIA hook in the rootless Docker of user {daemon.user} tries to write device cgroups without "
        "permission",
        seen(daemon.config_path, f"runtime {', '.join(programs)}"),
        seen("nvidia-container-cli.no-cgroups", "not true for this user"),
        fix=_prepare(node, daemon),
    )


def _unprepared(node: Node, daemon: Daemon) -> Verdict | None:
    """A rootless Docker without GPUs is a fault only if it is this node's engine."""
    kubelet = node.kubelet
    if kubelet is not None and kubelet.joined:
        return None
    if node.docker is not None and node.docker.process is not None and not node.docker.user:
        return None
    state = engine_settings(node.host, daemon)
    by_cdi = state.cdi is True and bool(node.gpu_specs)
    if by_cdi or state.problem or any(_nvidia(name, path) for name, path in state.paths.items()):
        return None
    return warn(
        f"the rootless Docker of user {daemon.user} has no nvidia runtime and doesn't use CDI for GPUs",
        seen(daemon.config_path, f"runtimes: {', '.join(state.paths) or 'none'}"),
        fix=_prepare(node, daemon),
    )


def _nvidia(name: str, path: str) -> bool:
    return name == "nvidia" or is_nvidia_program(path)


def _prepare(node: Node, daemon: Daemon) -> Fix:
    uid = daemon.process.uid if daemon.process else node.host.uid
    return Fix(as_user(account(node.host, uid)), disruptive="restart", disturbs=LOADS_OTHER_DOCKER)


@engine_check(
    "docker-version-old",
    title="Docker is new enough for GPUs",
    looks_at="the running dockerd's version, if Docker is this node's engine. The minimum is 19.03.",
    fix=docker.UPGRADE,
    preflight=("docker",),
    refs=("https://docs.docker.com/engine/release-notes/19.03/",),
    table=tables.TABLE,
)
@if_used("docker")
def docker_version_old(node: Node, daemon: Daemon) -> Verdict:
    """An older Docker rejects --gpus as an unknown flag and doesn't call the toolkit."""
    if not daemon.version or not daemon.version[0]:
        return skip("Docker's version is unknown")
    if tables.can("docker", "gpus", daemon.version):
        return ok(f"Docker {daemon.release} supports --gpus")
    return fail(
        f"Docker {daemon.release} doesn't support --gpus, which was added in 19.03",
        seen(daemon.binary or "dockerd", daemon.release),
        fix=upgrade(node, docker.PACKAGES, RESTARTS_DOCKER),
    )
