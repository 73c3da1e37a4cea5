"""Checks of access rights and known vulnerabilities; mostly notes, because access is the owner's decision."""

from __future__ import annotations

from collections.abc import Iterator

from gpunode.checks import driver_packages, fixes
from gpunode.checks.finding import RESTARTS_PLUGINS, Evidence, Fix
from gpunode.checks.fixes import MOUNTS_EVERYWHERE, set_plugin_variable
from gpunode.checks.model import HOST, Verdict, check, note, ok, seen, skip, warn
from gpunode.checks.toolkit import OPERATOR_UPGRADE, upgrade
from gpunode.errors import DaemonError
from gpunode.facts.bulletins import DRIVER, TOOLKIT, driver_bulletins, end_of_life, title, toolkit_bulletins
from gpunode.facts.docker import addresses, verifies_clients
from gpunode.facts.driver import PARAMETERS, branch, module_loaded, parameters, version_numbers
from gpunode.facts.engines import default_handler
from gpunode.facts.node import Node
from gpunode.facts.processes import environment
from gpunode.facts.system import WSL2, members, mode_of, without_administrators
from gpunode.facts.tables import table
from gpunode.facts.toolkit import BY_ENVVAR, BY_MOUNTS
from gpunode.facts.traits import TRAITS
from gpunode.output.result import many

_PROFILING = "RmProfilingAdminOnly"
_VISIBLE = "NVIDIA_VISIBLE_DEVICES"
_SYS_ADMIN = 1 << 21  # capabilities(7); the toolkit treats a process with it as privileged
_SHOWN = 8
# exporters, validators and plugins use GPUs that were not allocated to them by design
_INFRASTRUCTURE = ("kube-system", "gpu-operator", "nvidia")
_LOCAL = (":", "127.", "localhost:", "[::1]:")  # an address without a host is localhost (moby opts/hosts.go)


@check(
    "accept-envvar-unprivileged",
    title="Pods get only the GPUs that they requested",
    severity="warning",
    looks_at=f"{BY_ENVVAR} in the toolkit's config.toml, if the engine's default runtime is NVIDIA's, and "
    "running containers that use GPUs without an allocation (PodResources).",
    fix=Fix(
        f"gpunode toolkit config set {BY_MOUNTS}=true && "
        f"{set_plugin_variable('DEVICE_LIST_STRATEGY=volume-mounts').command} && "
        f"gpunode toolkit config set {BY_ENVVAR}=false",
        disruptive="restart",
        disturbs=RESTARTS_PLUGINS,
        before=MOUNTS_EVERYWHERE,
    ),
    blocked_by=("module-not-loaded", "toolkit-missing", "toolkit-config-invalid", "kubelet-not-running"),
    needs=("kubelet",),
    refs=(
        "https://github.com/NVIDIA/k8s-device-plugin/issues/61",
        "https://github.com/NVIDIA/gpu-operator/issues/421",
    ),
)
def accept_envvar_unprivileged(node: Node) -> Verdict:
    """Under the nvidia runtime, an image with NVIDIA_VISIBLE_DEVICES=all gets every GPU, whatever Kubernetes
    allocated to its pod: two pods may then share a GPU unknowingly. If all tenants trust each other, this is
    acceptable. Configure the device plugin to use volume mounts or CDI before you turn the setting off.
    """
    settings = node.toolkit_settings
    if settings.value(BY_ENVVAR) is not True:
        return ok(f"{BY_ENVVAR} is false: pods get only the GPUs that they requested")
    default = default_handler(node)
    if not default.startswith("nvidia"):
        return ok("pods that request no GPU don't run under the nvidia runtime")
    evidence = seen(settings.path, f"{BY_ENVVAR}: true", settings.line(BY_ENVVAR))
    handler = seen("default runtime", default)
    evidence_list = list(_used_without_request(node))
    if evidence_list:
        count = many(len(evidence_list), "container")
        return warn(f"{count} used GPUs that no pod requested", *evidence_list[:_SHOWN], evidence, handler)
    return note("a pod's image can get every GPU without requesting one", evidence, handler)


def _used_without_request(node: Node) -> Iterator[Evidence]:
    """Unprivileged containers of pods without an allocation that got GPUs through the variable."""
    try:
        allocated = {(holding.namespace, holding.pod) for holding in node.gpu_holdings}
    except DaemonError:
        return
    if any(not pod for _, pod in allocated):
        return
    running = {container.id: container for container in node.gpu_containers}
    for entry in node.cri_containers if running else ():
        container = running.get(entry.id)
        if container is None or (entry.namespace, entry.pod) in allocated:
            continue
        if entry.namespace.startswith(_INFRASTRUCTURE):
            continue
        requested = environment(node.host, container.pid).get(_VISIBLE, "")
        if requested not in ("", "void", "none") and not _privileged(node, container.pid):
            source = f"/proc/{container.pid}/environ"
            yield seen(
                source, f"pod {entry.namespace}/{entry.pod}, container {entry.name}: {_VISIBLE}={requested}"
            )


def _privileged(node: Node, pid: int) -> bool:
    """By its bounding set, as the toolkit decides; also if that can't be read."""
    status = node.host.read_text(f"/proc/{pid}/status") or ""
    line = next((line for line in status.splitlines() if line.startswith("CapBnd:")), "")
    try:
        return bool(int(line.removeprefix("CapBnd:"), 16) & _SYS_ADMIN)
    except ValueError:
        return True


@check(
    "daemon-tcp",
    title="Docker's API isn't reachable from the network",
    severity="info",
    looks_at="-H, hosts and tlsverify of the running dockerd and its daemon.json. Loopback addresses don't "
    "count.",
    fix=fixes.EDIT_DAEMON_JSON,
    blocked_by=("pci-no-gpu", "docker-config-invalid-json"),
    refs=("https://docs.docker.com/engine/security/protect-access/",),
)
def daemon_tcp(node: Node) -> Verdict:
    """A client of Docker's API can mount the host's / into a container. GPU servers attract attackers who
    scan for open Docker APIs.
    """
    docker = node.docker
    if docker is None or docker.process is None:
        return skip("the system's Docker isn't running on this node")
    argv = docker.process.argv
    listens = [
        address for address in addresses(node.host, argv, docker.config_path) if address.startswith("tcp://")
    ]
    reachable = [listen for listen in listens if not f"{listen.removeprefix('tcp://')}:".startswith(_LOCAL)]
    if not reachable:
        return ok("Docker doesn't listen on the network")
    if verifies_clients(node.host, argv, docker.config_path):
        return ok("Docker accepts network clients that have a certificate", seen("dockerd", reachable[0]))
    source = f"/proc/{docker.process.pid}/cmdline"
    return note(
        "Docker listens on the network without authentication: every client that reaches it has root "
        "rights on this node",
        seen(f"{source}, {docker.config_path}", ", ".join(reachable)),
    )


@check(
    "docker-group",
    title="Only administrators can control Docker",
    severity="info",
    looks_at="the group docker in /etc/group against root, sudo, wheel and admin, and the socket's mode.",
    fix=fixes.look("getent group docker", "To remove a user: gpasswd --delete USER docker", needs_root=False),
    refs=("https://docs.docker.com/engine/security/#docker-daemon-attack-surface",),
)
def docker_group(node: Node) -> Verdict:
    """A user who controls Docker can mount the host's / into a container and is root in it."""
    docker = node.docker
    if docker is None or docker.process is None:
        return skip("the system's Docker isn't running on this node")
    mode = mode_of(node.host, docker.socket)
    if mode is not None and mode & 0o002:
        fix = Fix(f"chmod o-rw {docker.socket}")
        summary = "every user of this node can control Docker, which is equivalent to root"
        return note(summary, seen(docker.socket, f"mode {mode:04o}"), fix=fix)
    users = without_administrators(node.host, members(node.host, "docker"))
    if not users:
        return ok("only administrators can control Docker")
    users_text = ", ".join(users[:_SHOWN]) + (
        f" and {len(users) - _SHOWN} more" if len(users) > _SHOWN else ""
    )
    return note(
        "users in the group docker have rights equivalent to root",
        seen("/etc/group", f"docker: {users_text}"),
    )


@check(
    "cap-profiling",
    title="Only administrators can read the GPUs' performance counters",
    severity="info",
    looks_at=f"{_PROFILING} in {PARAMETERS}, which NVreg_RestrictProfilingToAdminUsers sets.",
    fix=fixes.look(
        "grep -rn NVreg_RestrictProfilingToAdminUsers /etc/modprobe.d",
        "To restrict it again, delete the line, rebuild the initramfs and reboot",
        needs_root=False,
    ),
    blocked_by=("module-not-loaded",),
    refs=(
        "https://developer.nvidia.com/nvidia-development-tools-solutions-err_nvgpuctrperm-permission-issue-performance-counters",
    ),
)
def cap_profiling(node: Node) -> Verdict:
    """The counters show one user what another user's work does on the same GPU. Developers who profile their
    programs need access; if users don't trust each other, keep the default, 1.
    """
    value = parameters(node.host).get(_PROFILING)
    if value is None:
        return skip(f"{PARAMETERS} doesn't report it")
    if value != "0":
        return ok("only administrators can read the GPUs' performance counters")
    return note(
        "every user and container can read the GPUs' performance counters",
        seen(PARAMETERS, f"{_PROFILING}: 0"),
    )


# Fixes for a vulnerable driver on this node: a fixed release from the same source.


def driver_upgrade(node: Node, fixed_in: str) -> Fix:
    """Upgrade to release `fixed_in` or later; the plan keeps the current branch while it gets fixes."""
    if TRAITS["operator-driver"].holds(node):
        return OPERATOR_UPGRADE
    if version_numbers(node.next_version) >= version_numbers(fixed_in):
        return fixes.REBOOT
    return driver_packages.install_driver(node)


# Known vulnerabilities of the toolkit and the driver, from NVIDIA's bulletins. Nothing is queried over the
# network.

_VGPU_MANAGER = "nvidia_vgpu_vfio"


@check(
    "toolkit-cve",
    title="The container toolkit has no known vulnerability",
    severity="warning",
    looks_at="the toolkit's version against a table of NVIDIA's security bulletins with its date. A "
    "vulnerability doesn't count if the mode, the low-level runtime or a setting in config.toml "
    "prevents it.",
    fix=fixes.UPGRADE_TOOLKIT,
    blocked_by=("toolkit-missing", "toolkit-too-old", "toolkit-config-invalid"),
    classes=(*HOST, WSL2),
    table="toolkit_cves",
    refs=(
        "https://github.com/NVIDIA/product-security",
        "https://nvidia.custhelp.com/app/answers/detail/a_id/5659",
    ),
)
def toolkit_cve(node: Node) -> Verdict:
    """The worst of these vulnerabilities let a malicious container image take over the host. If only trusted
    images run, updating in the next maintenance window is early enough.
    """
    version = node.toolkit.version
    if not version:
        return skip("the toolkit's version is unknown")
    text = ".".join(map(str, version))
    bulletins = toolkit_bulletins(node.host, version, node.toolkit_settings)
    if not bulletins:
        return ok(f"no vulnerability of toolkit {text} is known as of {table(TOOLKIT).date}")
    evidence = [
        seen(
            title(bulletin),
            f"{', '.join(bulletin['cves'])} (CVSS {bulletin['score']}), fixed in {bulletin['fixed']}",
        )
        for bulletin in bulletins
    ]
    summary = f"toolkit {text} has known vulnerabilities; {bulletins[0]['fixed']} fixes them"
    return warn(summary, seen(node.toolkit.version_source, text), *evidence, fix=upgrade(node))


@check(
    "driver-cve",
    title="The driver has no known vulnerability",
    severity="warning",
    looks_at="the loaded module's version against a table of NVIDIA's security bulletins with its date: the "
    "release of its own branch that fixes each vulnerability.",
    fix=driver_packages.UPGRADE_DRIVER,
    blocked_by=("module-not-loaded", "driver-too-old", "driver-lib-mismatch"),
    unless=("vgpu-guest",),
    table="driver_cves",
    refs=("https://github.com/NVIDIA/product-security",),
)
def driver_cve(node: Node) -> Verdict:
    """Most of these vulnerabilities let a local user, or a program in a container, crash the driver or gain
    privileges. If only trusted programs run, updating in the next maintenance window is early enough.
    """
    version = node.module.version if node.module else ""
    number = branch(version)
    if not number:
        return skip("the module's version is unknown")
    if module_loaded(node.host, _VGPU_MANAGER):
        return skip("the vGPU manager has its own releases")
    if end_of_life(number) is not None:
        return skip(f"branch {number} gets no more fixes: see driver-eol")
    bulletins = driver_bulletins(version)
    if not bulletins:
        return ok(f"no vulnerability of driver {version} is known as of {table(DRIVER).date}")
    evidence = [seen(title(bulletin), f"fixed in {fixed}") for bulletin, fixed in bulletins]
    summary = f"driver {version} has known vulnerabilities; {bulletins[0][1]} fixes them"
    return warn(
        summary,
        seen("/sys/module/nvidia/version", version),
        *evidence,
        fix=driver_upgrade(node, bulletins[0][1]),
    )
