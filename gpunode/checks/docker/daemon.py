"""Docker: it runs, and it runs with the nvidia runtime."""

from __future__ import annotations

import re
from typing import Any

from gpunode.checks import fixes
from gpunode.checks.docker import remedies
from gpunode.checks.docker.file import UNPARSABLE, line_of, readable
from gpunode.checks.model import ENGINE_NODES, NO_ENGINE, Check, Verdict, fail, ok, seen, skip, warn
from gpunode.checks.units import seen_unit
from gpunode.errors import DaemonError
from gpunode.facts.daemons import Daemon, systemd_runs
from gpunode.facts.docker_file import listens_there
from gpunode.facts.docker_runtimes import nvidia_programs, programs
from gpunode.facts.engines import docker_role
from gpunode.facts.node import Node
from gpunode.facts.system import TEGRA, WSL2
from gpunode.result import Evidence, Fix
from gpunode.support.redact import shown_arguments


def docker_not_running(node: Node) -> Verdict:
    role = docker_role(node)
    if node.docker is None or not role.used:
        return skip(role.reason)
    socket = node.docker.socket
    if node.docker.process is not None and not listens_there(
        node.host, node.docker.argv, node.docker.config_path
    ):
        return ok(
            "Docker runs, and listens on TCP alone",
            seen("dockerd", " ".join(shown_arguments(node.docker.argv))),
        )
    if node.docker.process is None and _activated_by_systemd(node, socket):
        return skip("Docker is started by its first user (docker.socket listens); not started for this check")
    state = node.host.socket_state(socket)
    if state == "listening":
        return _hanging(node) or ok("Docker runs", seen(socket, "listening"))
    if state == "denied":
        return skip(f"needs root, or the group docker, to talk to {socket}")
    return _stopped(node, node.docker, seen(socket, state))


def _stopped(node: Node, docker: Daemon, evidence: Evidence) -> Verdict:
    unit = None if docker.manager or docker.user else node.units.get("docker.service")
    if unit is not None and unit.load == "masked":
        return skip("Docker is switched off on purpose: docker.service is masked")
    if unit is None or not unit.installed:
        return fail("Docker isn't running", evidence, fix=_restart(node))
    # the next boot wouldn't start it either
    fix = Fix("systemctl enable --now docker", True, "restart") if unit.file == "disabled" else _restart(node)
    return fail("Docker isn't running", evidence, *seen_unit(node, unit.name), fix=fix)


def _hanging(node: Node) -> Verdict | None:
    """A daemon that takes connections and answers none of them."""
    try:
        node.docker_info  # noqa: B018 - read for its failure
    except DaemonError as error:
        if error.code == "timeout":
            return fail(
                "Docker runs, but doesn't answer", seen(_socket(node), error.message), fix=_restart(node)
            )
    return None


def _restart(node: Node) -> Fix:
    user = node.docker is not None and bool(node.docker.user)
    return Fix(_by_init(node, remedies.restart(node.docker)), not user, "restart")


def _by_init(node: Node, command: str) -> str:
    """WSL may go without systemd."""
    if node.kind == WSL2 and not systemd_runs(node.host):
        return re.sub(r"^systemctl (\w+) docker$", r"service docker \1", command)
    return command


def _reload(node: Node) -> Fix:
    """runtimes and default-runtime are read again on SIGHUP; no container is stopped for them."""
    command, restart = _by_init(node, remedies.restart(node.docker, "reload")), _restart(node)
    return Fix(command, restart.needs_root, "none") if command != restart.command else restart


def _socket(node: Node) -> str:
    return node.docker.socket if node.docker else ""


def _activated_by_systemd(node: Node, socket: str) -> bool:
    """Whether somebody listens for a dockerd that isn't there: connecting would start it."""
    table = (node.host.read_text("/proc/net/unix") or "").splitlines()
    names = {socket, socket.replace("/var/run/", "/run/")}
    return any(line.split()[-1] in names for line in table if line.split())


def docker_not_restarted(node: Node) -> Verdict:
    if node.docker is None or (node.docker.process is None and not docker_role(node).used):
        return skip(docker_role(node).reason)
    config = readable(node)
    if config is None:
        return skip(UNPARSABLE)
    wanted = programs(config)
    try:
        info = node.docker_info
    except DaemonError as error:
        return skip(f"Docker doesn't say what it runs with: {error.message}")
    path = node.docker.config_path
    text = node.host.read_text(path) or ""
    missing = sorted(set(wanted) - set(_table(info, "Runtimes")))
    default = config.get("default-runtime")
    evidence = [seen(path, f'runtime "{name}"', line_of(text, f'"{name}"')) for name in missing]
    if isinstance(default, str) and default and default != info.get("DefaultRuntime"):
        evidence.append(seen(path, f'default-runtime "{default}"', line_of(text, '"default-runtime"')))
    if not evidence:
        return ok("the running Docker has what its file says")
    active = ", ".join(sorted(_table(info, "Runtimes"))) or "none"
    told = seen(f"{node.docker.socket} /info", f"runtimes {active}; default {info.get('DefaultRuntime')}")
    judge = fail if docker_role(node).used else warn
    summary = "in the file, not in the running daemon: Docker wasn't restarted"
    return judge(summary, *evidence, told, fix=_reload(node))


def docker_runtime_missing(node: Node) -> Verdict:
    role = docker_role(node)
    if node.docker is None or not role.used:
        return skip(role.reason)
    try:
        info = node.docker_info
    except DaemonError as error:
        return skip(f"Docker doesn't say what it runs with: {error.message}")
    active = programs(info, "Runtimes")
    told = f"{node.docker.socket} /info"
    nvidia = nvidia_programs(info, "Runtimes")
    if not nvidia:
        return _not_registered(node, info, seen(told, f"runtimes {', '.join(sorted(active)) or 'none'}"))
    for name, path in nvidia.items():
        if path and not node.host.which(path):
            return _left_behind(node, node.docker, info, seen(told, f"{name}: {path}"))
    return ok(f"Docker runs with the runtime {', '.join(nvidia)}", seen(told, ", ".join(sorted(active))))


def _left_behind(node: Node, docker: Daemon, info: dict[str, Any], evidence: Evidence) -> Verdict:
    """A runtime without its program: where the toolkit went and CDI came, it only has to be forgotten."""
    by_cdi = _by_cdi(node, info)
    text = node.host.read_text(docker.config_path) or ""
    fix = remedies.edit(docker, line_of(text, '"nvidia-container-runtime"')) if by_cdi else None
    name = evidence.value.partition(":")[0]
    return (warn if by_cdi else fail)(f'the program of the runtime "{name}" is missing', evidence, fix=fix)


def _by_cdi(node: Node, info: dict[str, Any]) -> bool:
    """Whether this Docker can give containers GPUs by CDI."""
    return bool(info.get("CDISpecDirs")) and any(spec.serves_gpus for spec in node.cdi_specs)


def _not_registered(node: Node, info: dict[str, Any], evidence: Evidence) -> Verdict:
    """``--gpus`` needs no runtime: from 19.03 Docker calls the toolkit's hook, later it injects by CDI."""
    kubelet = node.kubelet
    if kubelet is not None and kubelet.engine == "docker":
        return fail("the nvidia runtime isn't registered, and the kubelet's pods need it", evidence)
    if _by_cdi(node, info):
        return ok("Docker injects GPUs by CDI; the nvidia runtime isn't registered", evidence)
    # on a Jetson --gpus alone isn't enough: the files that a container needs come with the runtime
    hook = node.toolkit.programs.get("nvidia-container-runtime-hook")
    if hook and node.kind != TEGRA:
        late = _started_before(node, hook)
        if late is not None:
            what = "Docker started before the toolkit was installed: --gpus doesn't work until it restarts"
            return fail(what, *late, evidence, fix=_restart(node))
        return warn("the nvidia runtime isn't registered: --gpus works, --runtime=nvidia doesn't", evidence)
    return fail("the nvidia runtime isn't registered", evidence)


def _started_before(node: Node, hook: str) -> tuple[Evidence, ...] | None:
    """Docker looks for the toolkit's hook only when it starts (moby, daemon/nvidia_linux.go)."""
    from gpunode.facts.package_history import toolkit_installed, utc

    process = node.docker.process if node.docker else None
    came = toolkit_installed(node.host, node.packages, hook) if process else None
    if process is None or came is None or came[0] <= process.started:
        return None
    source, _, value = came[1].partition(": ")
    return (
        seen(source, value or "installed"),
        seen(f"/proc/{process.pid}", f"dockerd, started {utc(process.started)}"),
    )


def _table(tree: dict[str, Any], key: str) -> dict[str, Any]:
    value = tree.get(key)
    return value if isinstance(value, dict) else {}


CHECKS = (
    Check(
        id="docker-not-running",
        title="Docker runs",
        layer="docker",
        severity="error",
        looks_at=(
            "Docker's socket and whether the daemon answers within 3 seconds, where Docker is this node's "
            "engine. A stopped Docker beside a kubelet that uses another engine is fine, and one whose unit "
            "is masked; a docker.socket of systemd is left asleep."
        ),
        why="Containers can't start while the daemon is down or hangs.",
        remedy=fixes.START_DOCKER,
        run=docker_not_running,
        classes=ENGINE_NODES,
        unless=NO_ENGINE,
        blocked_by=(
            "pci-no-gpu",
            "docker-config-invalid-json",
            "docker-unknown-key",
            "docker-flag-file-conflict",
        ),
        preflight=("docker",),
        refs=("https://docs.docker.com/engine/daemon/troubleshoot/",),
    ),
    Check(
        id="docker-not-restarted",
        title="The running Docker has what its file says",
        layer="docker",
        severity="error",
        looks_at=(
            "runtimes and default-runtime of daemon.json against what the running daemon says (/info). "
            "Where the kubelet uses another engine this is a warning."
        ),
        why=(
            "Docker reads its file when it starts or is told to reload. Until then the nvidia runtime "
            "exists only on disk: unknown or invalid runtime name."
        ),
        remedy=fixes.RELOAD_DOCKER,
        run=docker_not_restarted,
        classes=ENGINE_NODES,
        unless=NO_ENGINE,
        blocked_by=(
            "pci-no-gpu",
            "docker-snap",
            "docker-config-invalid-json",
            "docker-unknown-key",
            "docker-flag-file-conflict",
            "docker-not-running",
        ),
        refs=(
            "https://docs.docker.com/reference/cli/dockerd/#configuration-reload-behavior",
            "https://github.com/NVIDIA/nvidia-docker/issues/1034",
        ),
    ),
    Check(
        id="docker-runtime-missing",
        title="Docker has the nvidia runtime",
        layer="docker",
        severity="error",
        looks_at=(
            "the runtimes of the running daemon (/info), and whether their program exists. Judged where "
            "Docker is this node's engine; a warning where only --runtime=nvidia is affected, because "
            "docker run --gpus uses the toolkit's hook, and no fault where Docker injects GPUs by CDI."
        ),
        why=(
            "Without the runtime, --runtime=nvidia and compose files that name it fail with 'unknown or "
            "invalid runtime name', and pods that the kubelet starts through Docker see no GPU."
        ),
        remedy=fixes.CONFIGURE_DOCKER,
        run=docker_runtime_missing,
        classes=ENGINE_NODES,
        unless=NO_ENGINE,
        blocked_by=(
            "pci-no-gpu",
            "toolkit-missing",
            "docker-snap",
            "docker-not-running",
            "docker-not-restarted",
            "docker-default-runtime",
            "docker-config-invalid-json",
            "cdi-disabled",
        ),
        refs=("https://docs.docker.com/engine/containers/resource_constraints/#gpu",),
    ),
)
