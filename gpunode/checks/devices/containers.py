"""GPU containers that run now: whether they may still open their device files."""

from __future__ import annotations

from gpunode.checks.devices import remedies
from gpunode.checks.model import Check, Verdict, fail, ok, seen, skip
from gpunode.facts.devices import expected_major
from gpunode.facts.node import Node
from gpunode.facts.workloads import Container, last_reload, v1_allows
from gpunode.result import Evidence, Fix

_SLACK_SECONDS = 5.0  # a container's start and a reload are told by different clocks
_SHOWN = 8
# the engine, by what its containers' control groups are called
_STARTED_BY = {
    "libpod": "podman restart",
    "docker": "docker restart",
    "kubepods": "crictl stop",
    "cri-containerd": "crictl stop",
    "crio": "crictl stop",
}


def cgroup_device_revoked(node: Node) -> Verdict:
    containers = node.gpu_containers
    if not containers:
        return skip("no container with GPU device files runs now")
    judged = [(one, _lost(node, one)) for one in containers]
    lost = [(one, what) for one, what in judged if what is not None]
    if not lost:
        return ok(f"{_count(len(containers))} with GPUs: nothing shows that one of them lost its devices")
    evidence = [
        seen(what.source, f"{_name(node, one)}: {what.value}", what.line) for one, what in lost[:_SHOWN]
    ]
    summary = f"{_count(len(lost))} lost GPUs while running: {', '.join(_name(node, one) for one, _ in lost)}"
    return fail(summary, *evidence, fix=_recreate([one for one, _ in lost]))


def _lost(node: Node, container: Container) -> Evidence | None:
    """What shows that this container can't open a device file any more; None if nothing does. One with the
    host's whole /dev sees files that nobody meant to give it."""
    if node.host.device(f"/proc/{container.pid}/root/dev/mem") is not None:
        return None
    majors = node.majors
    for file in container.nodes:
        usual = f"/dev/{file.path.rpartition('/')[2]}"
        now = expected_major(usual, majors)
        if now is not None and now != file.major:
            return seen(file.path, f"{usual} has major number {file.major}, the driver's is {now} since")
    allowed = v1_allows(node.host, container)
    if allowed is not None:
        for file in container.nodes:
            if not any(major in (-1, file.major) and minor in (-1, file.minor) for major, minor in allowed):
                path = f"/sys/fs/cgroup/devices{container.devices_group}/devices.list"
                return seen(path, f"lacks {file.major}:{file.minor} ({file.path.rpartition('/')[2]})")
        return None
    return _taken_by_systemd(node, container)


def _taken_by_systemd(node: Node, container: Container) -> Evidence | None:
    """systemd enforces its own list for a scope from its next reload on, whatever the runtime had allowed."""
    if not container.scope or last_reload(node.host) <= container.started + _SLACK_SECONDS:
        return None
    rule = node.device_rules.get(container.scope)
    for file in container.nodes if rule is not None else ():
        if rule is not None and not rule.allows(file.major, file.minor, node.majors):
            name = file.path.rpartition("/")[2]
            return seen(
                f"systemctl show --property=DeviceAllow {container.scope}",
                f"lacks {file.major}:{file.minor} ({name}), and systemd was reloaded since it started",
            )
    return None


def _name(node: Node, container: Container) -> str:
    """As people know it: by pod and container, by Docker's name, else by the beginning of its id."""
    for one in node.cri_containers:
        if one.id == container.id:
            return f"pod {one.namespace}/{one.pod}, container {one.name}"
    for identifier, name, _ in node.docker_containers:
        if identifier == container.id:
            return f"Docker container {name}"
    return f"container {container.id[:12]}"


def _recreate(lost: list[Container]) -> Fix | None:
    """Starting a container again gives it its devices; a pod's is started anew by the kubelet."""
    commands: dict[str, list[str]] = {}
    for one in lost:
        place = f"{one.group} {one.devices_group}"
        command = next((words for mark, words in _STARTED_BY.items() if mark in place), None)
        if command is not None:
            commands.setdefault(command, []).append(one.id[:12])
    told = " && ".join(f"{command} {' '.join(ids)}" for command, ids in commands.items())
    return Fix(told, True, "restart") if told else None


def _count(number: int) -> str:
    return "1 container" if number == 1 else f"{number} containers"


CHECKS = (
    Check(
        id="cgroup-device-revoked",
        title="Running containers still have their GPUs",
        layer="devices",
        severity="error",
        looks_at=(
            "every running container with NVIDIA's device files (/proc/PID/cgroup, /proc/PID/root/dev): the "
            "numbers of its files against /proc/devices, what its control group lets it open (devices.list "
            "of cgroup v1), and in cgroup v2, whose own filter no file shows, systemd's list for its scope "
            "where systemd was reloaded after the container had started. Nothing is run in a container."
        ),
        why=(
            "When systemd is reloaded it enforces its own list of devices, and GPUs that the toolkit's hook "
            "added aren't on it: 'Failed to initialize NVML: Unknown Error' in a container that worked "
            "before. Only starting the container again gives them back."
        ),
        remedy=remedies.RESTART_CONTAINERS,
        run=cgroup_device_revoked,
        blocked_by=("pci-no-gpu", "module-not-loaded"),
        refs=(
            "https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/troubleshooting.html",
            "https://github.com/NVIDIA/nvidia-container-toolkit/issues/48",
        ),
    ),
)
