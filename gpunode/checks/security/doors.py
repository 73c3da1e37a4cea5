"""Doors that are open, on purpose or not: mostly notes, since who may do what is the owner's to say."""

from __future__ import annotations

from collections.abc import Iterator

from gpunode.checks.fixes import everywhere, tell_plugin
from gpunode.checks.model import Check, Verdict, note, ok, seen, skip, warn
from gpunode.errors import DaemonError
from gpunode.facts.containerd import dig
from gpunode.facts.driver import PARAMETERS, parameters
from gpunode.facts.engines import containerd_role, crio_role
from gpunode.facts.node import Node
from gpunode.facts.toolkit_settings import BY_ENVVAR, BY_MOUNTS
from gpunode.result import Evidence, Fix

_PROFILING = "RmProfilingAdminOnly"
_VISIBLE = "NVIDIA_VISIBLE_DEVICES"
_SYS_ADMIN = 1 << 21  # capabilities(7); the toolkit takes whoever has it for privileged
_SHOWN = 8
# exporters, validators and plugins look at GPUs that nobody gave them, which is what they are for
_INFRASTRUCTURE = ("kube-system", "gpu-operator", "nvidia")
_LOCAL = (":", "127.", "localhost:", "[::1]:")  # an address without a host is localhost (moby opts/hosts.go)


def accept_envvar_unprivileged(node: Node) -> Verdict:
    settings = node.toolkit_settings
    if settings.value(BY_ENVVAR) is not True:
        return ok(f"{BY_ENVVAR} is false: pods get the GPUs that they asked for")
    default = _default_handler(node)
    if not default.startswith("nvidia"):
        return ok("pods that ask for no GPU don't run under the nvidia runtime")
    evidence = seen(settings.path, f"{BY_ENVVAR}: true", settings.line(BY_ENVVAR))
    handler = seen("default runtime", default)
    taken = list(_uninvited(node))
    if taken:
        count = f"{len(taken)} container{'s' if len(taken) > 1 else ''}"
        return warn(f"{count} took GPUs that no pod asked for", *taken[:_SHOWN], evidence, handler)
    return note("a pod's image can take every GPU without asking for one", evidence, handler)


def _default_handler(node: Node) -> str:
    """The runtime of pods that name none; empty where the engine doesn't tell."""
    try:
        if containerd_role(node).used:
            return node.cri.default_handler
        if crio_role(node).used:
            return str(dig(node.crio_config, "crio", "runtime", "default_runtime") or "")
    except DaemonError:
        pass
    return ""


def _uninvited(node: Node) -> Iterator[Evidence]:
    """Unprivileged containers of pods that hold no device and have GPUs all the same, by the variable."""
    from gpunode.facts.processes import environment

    try:
        held = {(one.namespace, one.pod) for one in node.gpu_holdings}
    except DaemonError:
        return
    if any(not pod for _, pod in held):
        return
    running = {one.id: one for one in node.gpu_containers}
    for one in node.cri_containers if running else ():
        container = running.get(one.id)
        if container is None or (one.namespace, one.pod) in held or _infrastructure(one.namespace):
            continue
        wanted = environment(node.host, container.pid).get(_VISIBLE, "")
        if wanted not in ("", "void", "none") and not _privileged(node, container.pid):
            source = f"/proc/{container.pid}/environ"
            yield seen(source, f"pod {one.namespace}/{one.pod}, container {one.name}: {_VISIBLE}={wanted}")


def _infrastructure(namespace: str) -> bool:
    return namespace.startswith(_INFRASTRUCTURE)


def _privileged(node: Node, pid: int) -> bool:
    """By its bounding set, as the toolkit judges; also where that can't be read."""
    status = node.host.read_text(f"/proc/{pid}/status") or ""
    line = next((one for one in status.splitlines() if one.startswith("CapBnd:")), "")
    try:
        return bool(int(line.removeprefix("CapBnd:"), 16) & _SYS_ADMIN)
    except ValueError:
        return True


def daemon_tcp(node: Node) -> Verdict:
    from gpunode.facts.docker_file import addresses, verifies_clients

    docker = node.docker
    if docker is None or docker.process is None:
        return skip("no Docker of the system's runs here")
    argv = docker.process.argv
    listens = [one for one in addresses(node.host, argv, docker.config_path) if one.startswith("tcp://")]
    reachable = [one for one in listens if not f"{one.removeprefix('tcp://')}:".startswith(_LOCAL)]
    if not reachable:
        return ok("Docker doesn't listen on the network")
    if verifies_clients(node.host, argv, docker.config_path):
        return ok(
            "Docker lets those in from the network who have a certificate", seen("dockerd", reachable[0])
        )
    source = f"/proc/{docker.process.pid}/cmdline"
    return note(
        "Docker listens on the network without asking who it is: whoever reaches it is root here",
        seen(f"{source}, {docker.config_path}", ", ".join(reachable)),
    )


def docker_group(node: Node) -> Verdict:
    from gpunode.facts.file_modes import mode_of
    from gpunode.facts.groups import members, without_administrators

    docker = node.docker
    if docker is None or docker.process is None:
        return skip("no Docker of the system's runs here")
    mode = mode_of(node.host, docker.socket)
    if mode is not None and mode & 0o002:
        fix = Fix(f"chmod o-rw {docker.socket}")
        summary = "every user of this node may command Docker, which is as good as being root"
        return note(summary, seen(docker.socket, f"mode {mode:04o}"), fix=fix)
    users = without_administrators(node.host, members(node.host, "docker"))
    if not users:
        return ok("nobody but administrators may command Docker")
    shown = ", ".join(users[:_SHOWN]) + (f" and {len(users) - _SHOWN} more" if len(users) > _SHOWN else "")
    return note(
        "users in the group docker are as good as root",
        seen("/etc/group", f"docker: {shown}"),
    )


def cap_profiling(node: Node) -> Verdict:
    value = parameters(node.host).get(_PROFILING)
    if value is None:
        return skip(f"{PARAMETERS} doesn't tell")
    if value != "0":
        return ok("only administrators read the GPUs' performance counters")
    return note(
        "every user and container may read the GPUs' performance counters",
        seen(PARAMETERS, f"{_PROFILING}: 0"),
    )


CHECKS = (
    Check(
        id="accept-envvar-unprivileged",
        title="Pods get the GPUs that they asked for",
        layer="security",
        severity="warning",
        looks_at=(
            f"{BY_ENVVAR} in the toolkit's config.toml where the engine's default runtime is NVIDIA's, and "
            "running containers that have GPUs and hold none (PodResources)."
        ),
        why=(
            f"Under the nvidia runtime an image with {_VISIBLE}=all gets every GPU, whatever the scheduler "
            "gave its pod: two pods then share a GPU unknowingly. For tenants who trust each other that is "
            "no matter. The device plugin must hand out GPUs by volume mounts or CDI before the setting is "
            "turned off."
        ),
        remedy=everywhere(
            f"gpunode toolkit config set {BY_MOUNTS}=true && "
            f"{tell_plugin('DEVICE_LIST_STRATEGY=volume-mounts')} && "
            f"gpunode toolkit config set {BY_ENVVAR}=false",
            "restart",
        ),
        run=accept_envvar_unprivileged,
        blocked_by=("module-not-loaded", "toolkit-missing", "toolkit-config-invalid", "kubelet-not-running"),
        needs=("kubelet",),
        refs=(
            "https://github.com/NVIDIA/k8s-device-plugin/issues/61",
            "https://github.com/NVIDIA/gpu-operator/issues/421",
        ),
    ),
    Check(
        id="daemon-tcp",
        title="Docker's API isn't open to the network",
        layer="security",
        severity="info",
        looks_at="-H, hosts, tlsverify of the running dockerd and its daemon.json; loopback doesn't count.",
        why="Who commands Docker mounts the host's / into a container. GPUs attract those who look for that.",
        remedy=everywhere("${EDITOR:-vi} /etc/docker/daemon.json"),
        run=daemon_tcp,
        blocked_by=("pci-no-gpu", "docker-config-invalid-json"),
        refs=("https://docs.docker.com/engine/security/protect-access/",),
    ),
    Check(
        id="docker-group",
        title="Docker takes commands from administrators",
        layer="security",
        severity="info",
        looks_at="the group docker in /etc/group beside root, sudo, wheel and admin, and the socket's mode.",
        why="Who commands Docker mounts the host's / into a container, and is root in it.",
        remedy=everywhere("getent group docker", needs_root=False),
        run=docker_group,
        blocked_by=("pci-no-gpu",),
        refs=("https://docs.docker.com/engine/security/#docker-daemon-attack-surface",),
    ),
    Check(
        id="cap-profiling",
        title="The GPUs' performance counters are kept from users",
        layer="security",
        severity="info",
        looks_at=f"{_PROFILING} in {PARAMETERS}, which NVreg_RestrictProfilingToAdminUsers sets.",
        why=(
            "The counters tell one user what another's work does on the same GPU. Developers who profile "
            "want it so; where users don't trust each other the default, 1, is right."
        ),
        remedy=everywhere("modprobe --showconfig | grep NVreg_RestrictProfilingToAdminUsers"),
        run=cap_profiling,
        blocked_by=("module-not-loaded",),
        refs=(
            "https://developer.nvidia.com/nvidia-development-tools-solutions-err_nvgpuctrperm-permission-issue-performance-counters",
        ),
    ),
)
