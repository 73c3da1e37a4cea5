"""Docker: its file can be read, it runs, and it runs with the nvidia runtime."""

from __future__ import annotations

from typing import Any

from gpunode.checks import fixes
from gpunode.checks.model import ENGINE_NODES, NO_ENGINE, Check, Verdict, fail, ok, seen, skip, warn
from gpunode.errors import ConfigError, DaemonError
from gpunode.facts.daemons import systemd_runs
from gpunode.facts.docker_flags import flag_conflicts
from gpunode.facts.docker_runtimes import nvidia_programs, programs
from gpunode.facts.engines import docker_role
from gpunode.facts.node import Node
from gpunode.facts.system import TEGRA, WSL2
from gpunode.result import Evidence, Fix

_UNPARSABLE = "Docker's file can't be parsed: see docker-config-invalid-json"


def docker_config_invalid_json(node: Node) -> Verdict:
    if node.docker is None:
        return skip(docker_role(node).reason)
    path = node.docker.config_path
    try:
        config = node.docker_config
    except ConfigError as error:
        judge = fail if docker_role(node).used else warn
        where = _position(error.message, path)
        fix = Fix(f"${{EDITOR:-vi}} {f'+{where.line} ' if where.line else ''}{path}")
        return judge(f"{path} can't be parsed", where, fix=fix)
    return ok(f"{path} can be parsed" if config else f"{path} is absent or empty, which is fine")


def _readable(node: Node) -> dict[str, Any] | None:
    """daemon.json; None if it can't be parsed, which is docker-config-invalid-json's to tell."""
    try:
        return node.docker_config
    except ConfigError:
        return None


def _position(message: str, path: str) -> Evidence:
    """``path:line:column: reason`` taken apart; a message without a position stays whole."""
    rest = message.removeprefix(path).lstrip(":")
    line, _, more = rest.partition(":")
    if line.isdigit():
        column, _, reason = more.partition(":")
        return seen(path, f"column {column}:{reason}", int(line))
    return seen(path, rest.strip())


def docker_flag_file_conflict(node: Node) -> Verdict:
    if node.docker is None:
        return skip(docker_role(node).reason)
    config = _readable(node)
    if config is None:
        return skip(_UNPARSABLE)
    keys = flag_conflicts(node.docker.argv, config)
    if not keys:
        return ok("no setting is given both as a flag and in the file")
    flags = seen(node.docker.unit or "dockerd's arguments", " ".join(node.docker.argv))
    path = node.docker.config_path
    text = node.host.read_text(path) or ""
    evidence = (seen(path, f'"{key}" is also a flag', line_of(text, f'"{key}"')) for key in keys)
    judge = fail if docker_role(node).used else warn
    line = line_of(text, f'"{keys[0]}"')
    fix = Fix(
        f"${{EDITOR:-vi}} {f'+{line} ' if line else ''}{path} && {fixes.restart_docker(path)}",
        True,
        "restart",
    )
    return judge(f"{', '.join(keys)}: given both as a flag and in {path}", *evidence, flags, fix=fix)


def line_of(text: str, needle: str) -> int | None:
    """The first line, 1-based, that holds `needle`."""
    lines = enumerate(text.splitlines(), start=1)
    return next((number for number, line in lines if needle in line), None)


def docker_not_running(node: Node) -> Verdict:
    role = docker_role(node)
    if node.docker is None or not role.used:
        return skip(role.reason)
    socket = node.docker.socket
    if node.docker.process is None and _activated_by_systemd(node, socket):
        return skip("Docker is started by its first user (docker.socket listens); not started for this check")
    state = node.host.socket_state(socket)
    if state == "listening":
        return _hanging(node) or ok("Docker runs", seen(socket, "listening"))
    if state == "denied":
        return skip(f"needs root, or the group docker, to talk to {socket}")
    return fail("Docker isn't running", seen(socket, state), fix=_restart(node))


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
    command = fixes.restart_docker(node.docker.config_path if node.docker else "")
    if node.kind == WSL2 and not systemd_runs(node.host):
        command = command.replace("systemctl restart docker", "service docker restart")
    return Fix(command, True, "restart")


def _reload(node: Node) -> Fix:
    """runtimes and default-runtime are read again on SIGHUP; no container is stopped for them."""
    restart = _restart(node)
    reload = restart.command.replace("systemctl restart", "systemctl reload")
    return Fix(reload, True, "none") if reload != restart.command else restart


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
    config = _readable(node)
    if config is None:
        return skip(_UNPARSABLE)
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
            return fail(f'the program of the runtime "{name}" is missing', seen(told, f"{name}: {path}"))
    return ok(f"Docker runs with the runtime {', '.join(nvidia)}", seen(told, ", ".join(sorted(active))))


def _not_registered(node: Node, info: dict[str, Any], evidence: Evidence) -> Verdict:
    """``--gpus`` needs no runtime: from 19.03 Docker calls the toolkit's hook, later it injects by CDI."""
    kubelet = node.kubelet
    if kubelet is not None and kubelet.engine == "docker":
        return fail("the nvidia runtime isn't registered, and the kubelet's pods need it", evidence)
    if info.get("CDISpecDirs") and node.cdi_specs:
        return ok("Docker injects GPUs by CDI; the nvidia runtime isn't registered", evidence)
    # on a Jetson --gpus alone isn't enough: the files that a container needs come with the runtime
    if "nvidia-container-runtime-hook" in node.toolkit.programs and node.kind != TEGRA:
        return warn("the nvidia runtime isn't registered: --gpus works, --runtime=nvidia doesn't", evidence)
    return fail("the nvidia runtime isn't registered", evidence)


def _table(tree: dict[str, Any], key: str) -> dict[str, Any]:
    value = tree.get(key)
    return value if isinstance(value, dict) else {}


CHECKS = (
    Check(
        id="docker-config-invalid-json",
        title="Docker's file can be parsed",
        layer="docker",
        severity="error",
        looks_at=(
            "the file that dockerd reads (--config-file, else /etc/docker/daemon.json), as strict JSON. "
            "Where the kubelet uses another engine this is a warning."
        ),
        why=(
            "A running Docker lives on with what it read before; at its next start it refuses the file and "
            "every container on this node stays down."
        ),
        remedy=fixes.EDIT_DAEMON_JSON,
        run=docker_config_invalid_json,
        classes=ENGINE_NODES,
        unless=NO_ENGINE,
        blocked_by=("pci-no-gpu",),
        preflight=("docker",),
    ),
    Check(
        id="docker-flag-file-conflict",
        title="Docker's flags and file agree",
        layer="docker",
        severity="error",
        looks_at=(
            "the arguments of the running dockerd, else those in its unit and drop-ins, against the keys of "
            "daemon.json. Only runtimes may stand in both."
        ),
        why=(
            "dockerd refuses to start when a setting is given both as a flag and in the file, even with "
            "equal values: delete one of the two. A common pair is -H fd:// in the unit and hosts in the "
            "file."
        ),
        remedy=fixes.EDIT_DAEMON_JSON,
        run=docker_flag_file_conflict,
        classes=ENGINE_NODES,
        unless=NO_ENGINE,
        blocked_by=("pci-no-gpu", "docker-config-invalid-json"),
        preflight=("docker",),
        refs=("https://docs.docker.com/engine/daemon/troubleshoot/",),
    ),
    Check(
        id="docker-not-running",
        title="Docker runs",
        layer="docker",
        severity="error",
        looks_at=(
            "Docker's socket and whether the daemon answers within 3 seconds, where Docker is this node's "
            "engine. A stopped Docker beside a kubelet that uses another engine is fine; a docker.socket "
            "of systemd is left asleep."
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
