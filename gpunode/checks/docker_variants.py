"""Which Docker this is: the snap, Docker Desktop, a user's rootless one, or one that is too old for GPUs."""

from __future__ import annotations

from gpunode.checks import docker
from gpunode.checks.model import ENGINE_NODES, NO_ENGINE, Verdict, check, fail, note, ok, seen, skip, warn
from gpunode.errors import ConfigError, DaemonError
from gpunode.facts import tables
from gpunode.facts.daemons import Daemon
from gpunode.facts.docker import account, as_user, hook_injects, no_cgroups, nvidia_programs
from gpunode.facts.docker_desktop import CONTEXT
from gpunode.facts.effective import configured
from gpunode.facts.engines import docker_role
from gpunode.facts.node import Node
from gpunode.facts.writers import is_nvidia_program
from gpunode.output.result import Fix


@check(
    "docker-snap",
    "docker",
    title="Docker isn't confined in a snap",
    looks_at=(
        "whether the dockerd that runs is the docker snap's, which runtimes it has, and whether another "
        "Docker runs beside it. Not judged where the kubelet uses another engine."
    ),
    remedy=docker.REPLACE_SNAP,
    blocked_by=("pci-no-gpu", "driver-not-installed", "module-not-loaded"),
    preflight=("docker",),
    refs=("https://github.com/canonical/docker-snap",),
    table=tables.TABLE,
)
def docker_snap(node: Node) -> Verdict:
    """The snap sees no program of the node: it has an NVIDIA runtime of its own, which it registers only
    where it finds the driver, and a toolkit that is installed beside it has no effect or breaks it ('could
    not select device driver', 'libnvidia-ml.so.1').
    """
    snap = node.docker_snap
    if snap is None:
        return ok("Docker isn't the snap") if node.docker else skip(docker_role(node).reason)
    where = seen(snap.unit or "snap", f"Docker {_dotted(snap)} as a snap")
    if node.docker is None or node.docker.manager != "snap":
        if node.docker and node.docker.process and snap.process:
            system = seen(node.docker.config_source, f"Docker {_dotted(node.docker)} as a package")
            text = "two Dockers run here, a package's and a snap's: it is chance which one docker talks to"
            return warn(text, where, system)
        return ok("the docker snap is here, but isn't the Docker that runs")
    role = docker_role(node)
    if not role.used:
        return skip(role.reason)
    try:
        own = nvidia_programs(node.docker_info, "Runtimes") | nvidia_programs(node.docker_config)
    except (ConfigError, DaemonError):
        return skip("the docker snap doesn't say which runtimes it has")
    if not own:
        text = "Docker is a snap without its NVIDIA runtime, and the node's toolkit doesn't reach into it"
        return fail(text, where, seen(f"{snap.socket} /info", "no nvidia runtime"))
    host_toolkit = node.toolkit.programs.get("nvidia-container-runtime-hook")
    if host_toolkit and tables.can("docker", "gpus-by-cdi", snap.version):
        text = "Docker is a snap, and the toolkit of the node stands in the way of its own"
        return warn(text, where, seen("PATH", host_toolkit))
    return note("Docker is a snap: containers get GPUs with --runtime=nvidia, not with --gpus", where)


@check(
    "docker-desktop",
    "docker",
    title="The docker command doesn't talk to Docker Desktop",
    looks_at=(
        "users whose Docker Desktop runs, and the context in their ~/.docker/config.json. Not judged where "
        "the kubelet uses another engine."
    ),
    remedy=docker.INSTALL,
    blocked_by=("pci-no-gpu",),
    preflight=("docker",),
    refs=("https://docs.docker.com/desktop/features/gpu/",),
)
def docker_desktop(node: Node) -> Verdict:
    """Docker Desktop for Linux runs containers in a virtual machine that has none of the node's GPUs: --gpus
    fails there whatever is installed on the node.
    """
    kubelet = node.kubelet
    if kubelet is not None and kubelet.joined and kubelet.engine != "docker":
        return skip(f"the kubelet uses {kubelet.engine}, not Docker")
    if not node.docker_desktop:
        return ok("no Docker Desktop runs here")
    for desktop in node.docker_desktop:
        if desktop.context != CONTEXT:
            continue
        return fail(
            f"the docker command of {desktop.user} talks to Docker Desktop, whose virtual machine has no GPU",
            seen(desktop.config, f"currentContext {desktop.context}"),
            seen("com.docker.backend", f"process {desktop.pid}"),
            fix=docker.beside_desktop(node, desktop.user),
        )
    return ok("Docker Desktop runs, and nobody's docker command talks to it")


@check(
    "docker-rootless",
    "docker",
    title="Rootless Docker can give GPUs",
    severity="warning",
    looks_at=(
        "every dockerd that an ordinary user runs: its own daemon.json, and the toolkit's configuration that "
        "counts for it. One without GPUs is only a finding where no other engine runs."
    ),
    remedy=docker.INSTALL,
    blocked_by=("pci-no-gpu", "driver-not-installed", "toolkit-missing"),
    refs=("https://docs.docker.com/engine/security/rootless/",),
    table=tables.TABLE,
)
def docker_rootless(node: Node) -> Verdict:
    """A rootless Docker reads another daemon.json than the system's, and the toolkit's hook fails in it
    unless no-cgroups is set for that user alone, or GPUs come by CDI.
    """
    if not node.docker_rootless:
        return skip("nobody runs a rootless Docker here")
    for daemon in node.docker_rootless:
        verdict = _hook_without_cgroups(node, daemon) or _unprepared(node, daemon)
        if verdict is not None:
            return verdict
    return ok("rootless Docker gives no GPUs, or gives them in a way that it may")


def _hook_without_cgroups(node: Node, daemon: Daemon) -> Verdict | None:
    state = configured(node.host, daemon)
    programs = {name: path for name, path in state.paths.items() if _nvidia(name, path)}
    if not programs or no_cgroups(node.host, daemon):
        return None
    if not hook_injects(node.host, daemon, tuple(programs.values())):
        return None
    return warn(
        f"the NVIDIA hook in {daemon.user}'s rootless Docker writes device cgroups, which it may not",
        seen(daemon.config_path, f"runtime {', '.join(programs)}"),
        seen("nvidia-container-cli.no-cgroups", "not true for this user"),
        fix=_prepare(node, daemon),
    )


def _unprepared(node: Node, daemon: Daemon) -> Verdict | None:
    """A rootless Docker without GPUs is a fault only where it is the engine of this node."""
    kubelet = node.kubelet
    if kubelet is not None and kubelet.joined:
        return None
    if node.docker is not None and node.docker.process is not None and not node.docker.user:
        return None
    state = configured(node.host, daemon)
    by_cdi = state.cdi is True and any(spec.serves_gpus for spec in node.cdi_specs)
    if by_cdi or state.problem or any(_nvidia(name, path) for name, path in state.paths.items()):
        return None
    return warn(
        f"{daemon.user}'s rootless Docker knows no nvidia runtime and gets no GPUs by CDI",
        seen(daemon.config_path, f"runtimes {', '.join(state.paths) or 'none'}"),
        fix=_prepare(node, daemon),
    )


def _nvidia(name: str, path: str) -> bool:
    return name == "nvidia" or is_nvidia_program(path)


def _prepare(node: Node, daemon: Daemon) -> Fix:
    uid = daemon.process.uid if daemon.process else node.host.uid
    return Fix(as_user(account(node.host, uid)), True, "restart")


@check(
    "docker-version-old",
    "docker",
    title="Docker is new enough for GPUs",
    looks_at="the running dockerd's version, where Docker is this node's engine; 19.03 is the least.",
    remedy=docker.UPGRADE,
    classes=ENGINE_NODES,
    unless=NO_ENGINE,
    blocked_by=("pci-no-gpu",),
    preflight=("docker",),
    refs=("https://docs.docker.com/engine/release-notes/19.03/",),
    table=tables.TABLE,
)
def docker_version_old(node: Node) -> Verdict:
    """An older Docker refuses --gpus as an unknown flag and calls no toolkit for it."""
    role = docker_role(node)
    if node.docker is None or not role.used:
        return skip(role.reason)
    version = node.docker.version
    if not version or not version[0]:
        return skip("Docker's version can't be told")
    if tables.can("docker", "gpus", version):
        return ok(f"Docker {_dotted(node.docker)} knows --gpus")
    return fail(
        f"Docker {_dotted(node.docker)} doesn't know --gpus, which came with 19.03",
        seen(node.docker.binary or "dockerd", _dotted(node.docker)),
        fix=docker.newer(node),
    )


def _dotted(daemon: Daemon) -> str:
    return ".".join(map(str, daemon.version)) or "(unknown)"


CHECKS = (
    docker_snap,
    docker_desktop,
    docker_rootless,
    docker_version_old,
)
