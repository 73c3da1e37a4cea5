"""Docker's file: it can be parsed, and nothing in it is given as a flag as well."""

from __future__ import annotations

from typing import Any

from gpunode.checks import fixes
from gpunode.checks.docker import remedies
from gpunode.checks.model import ENGINE_NODES, NO_ENGINE, Check, Verdict, fail, ok, seen, skip, warn
from gpunode.errors import ConfigError
from gpunode.facts import gates
from gpunode.facts.daemons import Daemon
from gpunode.facts.docker_file import parse_daemon_json
from gpunode.facts.docker_flags import flag_conflicts
from gpunode.facts.engines import docker_role
from gpunode.facts.node import Node
from gpunode.result import Evidence, Fix
from gpunode.support.redact import shown_arguments

UNPARSABLE = "Docker's file can't be parsed: see docker-config-invalid-json"


def docker_config_invalid_json(node: Node) -> Verdict:
    if node.docker is None:
        return skip(docker_role(node).reason)
    path = node.docker.config_path
    try:
        config = node.docker_config
    except ConfigError as error:
        judge = fail if docker_role(node).used else warn
        where = _position(error.message, path)
        return judge(f"{path} can't be parsed", where, fix=_look(path, where))
    return _odd(node, node.docker) or ok(
        f"{path} can be parsed" if config else f"{path} is absent or empty, which is fine"
    )


def _look(path: str, where: Evidence) -> Fix:
    return Fix(f"${{EDITOR:-vi}} {f'+{where.line} ' if where.line else ''}{path}")


def _odd(node: Node, docker: Daemon) -> Verdict | None:
    """What some dockerds refuse that others take, and what dockerd takes otherwise than people mean it."""
    path, text = docker.config_path, node.host.read_text(docker.config_path)
    if text is None:
        return None
    judge = fail if docker_role(node).used else warn
    if gates.can("docker", "empty-file", docker.version) is False:
        release = ".".join(map(str, docker.version))
        if not text.strip():
            fix = Fix(f"echo '{{}}' > {path}")
            return judge(f"Docker {release} refuses an empty file", seen(path, "empty"), fix=fix)
        if text.startswith("\ufeff"):
            fix = Fix(f"sed -i '1s/^\\xef\\xbb\\xbf//' {path}")
            told = seen(path, "begins with a byte order mark", 1)
            return judge(f"Docker {release} can't read a byte order mark", told, fix=fix)
    try:
        parse_daemon_json(text, path)
    except ConfigError as error:
        where = _position(error.message, path)
        return warn(f"{path} has a key twice: what stands last counts", where, fix=_look(path, where))
    return None


def readable(node: Node) -> dict[str, Any] | None:
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
    config = readable(node)
    if config is None:
        return skip(UNPARSABLE)
    keys = flag_conflicts(node.docker.argv, config)
    if not keys:
        return ok("no setting is given both as a flag and in the file")
    flags = seen(node.docker.unit or "dockerd's arguments", " ".join(shown_arguments(node.docker.argv)))
    path = node.docker.config_path
    text = node.host.read_text(path) or ""
    evidence = (seen(path, f'"{key}" is also a flag', line_of(text, f'"{key}"')) for key in keys)
    judge = fail if docker_role(node).used else warn
    fix = remedies.edit(node.docker, line_of(text, f'"{keys[0]}"'))
    return judge(f"{', '.join(keys)}: given both as a flag and in {path}", *evidence, flags, fix=fix)


def line_of(text: str, needle: str) -> int | None:
    """The first line, 1-based, that holds `needle`."""
    lines = enumerate(text.splitlines(), start=1)
    return next((number for number, line in lines if needle in line), None)


CHECKS = (
    Check(
        id="docker-config-invalid-json",
        title="Docker's file can be parsed",
        layer="docker",
        severity="error",
        looks_at=(
            "the file that dockerd reads (--config-file, else /etc/docker/daemon.json), as strict JSON. A "
            "key that stands twice is a warning, an empty file or a byte order mark an error before Docker "
            "23. Where the kubelet uses another engine this is a warning."
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
        reboot=True,  # a running Docker lives on with what it read before
        refs=(
            "https://docs.docker.com/engine/daemon/troubleshoot/",
            "https://github.com/NVIDIA/nvidia-docker/issues/542",
        ),
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
        reboot=True,  # a running Docker lives on with what it read before
        refs=("https://docs.docker.com/engine/daemon/troubleshoot/",),
    ),
)
