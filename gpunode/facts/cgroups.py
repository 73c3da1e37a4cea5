"""The kubelet's cgroup driver, from its own setting or from its engine, and engines that use systemd's."""

from __future__ import annotations

from typing import NamedTuple

from gpunode.errors import GpunodeError
from gpunode.facts import tables
from gpunode.facts.daemons import parse_version
from gpunode.facts.engines import containerd_role, docker_role
from gpunode.facts.node import Node
from gpunode.facts.tables import gate
from gpunode.facts.toolkit import runtime_mode


def kubelets_own(node: Node, engine: str, release: tuple[int, ...], used: str) -> str | None:
    """The driver that its configuration sets; None if it sets none, or if the engine's setting takes
    precedence.

    `used` is the engine's. If the two differ, the kubelet's release matters: newer ones query the engine and
    ignore their own setting. An unknown release counts as newer.
    """
    kubelet = node.kubelet
    if kubelet is None or kubelet.cgroup_driver in (None, used):
        return kubelet.cgroup_driver if kubelet else None
    if not tables.can(engine, "cgroup-driver-told", release):
        return kubelet.cgroup_driver
    asks = tables.can("kubelet", "cgroup-driver-asked", node.kubelet_version)
    return kubelet.cgroup_driver if asks is False else None


# Engines whose containers' control groups systemd makes, and whether systemd knows of their GPUs.
#
# runc passes the devices of a container's specification to systemd (DeviceAllow). Devices that the toolkit's
# hook adds later aren't in it. From 1.1.3 on runc left out devices without a link in /dev/char, which
# NVIDIA's don't have; since 1.1.7 it doesn't, given systemd 240
# (https://github.com/opencontainers/runc/pull/3845).

_SECONDS = 3.0


class SystemdEngine(NamedTuple):
    """`forgets` says why systemd doesn't know of GPUs, as seen at `source`; empty if it does. `by_hook`: the
    toolkit's hook adds them; with `old_toolkit` there is no other method."""

    name: str
    source: str
    forgets: str = ""
    by_hook: bool = False
    old_toolkit: bool = False


def systemd_engines(node: Node) -> tuple[SystemdEngine, ...]:
    """Those of the engines in use; one that doesn't answer is left out."""
    return tuple(engine for engine in (_docker(node), _containerd(node)) if engine is not None)


def _docker(node: Node) -> SystemdEngine | None:
    try:
        if not docker_role(node).used or node.docker_info.get("CgroupDriver") != "systemd":
            return None
        version = parse_version(str(node.docker_info.get("ServerVersion", "")))
        mode = runtime_mode(node.toolkit_settings, node.toolkit.version)
    except GpunodeError:
        return None
    socket = node.docker.socket if node.docker else ""
    if mode == "legacy" and node.toolkit.programs and version and version < gate("docker", "gpus-by-cdi"):
        words = "CgroupDriver systemd; the toolkit's hook adds GPUs after runc has configured systemd"
        old = bool(node.toolkit.version) and node.toolkit.version < gate("toolkit", "jit-cdi")
        return SystemdEngine("Docker", f"{socket} /info", words, True, old)
    commit = node.docker_info.get("RuncCommit")
    runc_version = str(commit.get("ID", "")) if isinstance(commit, dict) else ""
    return SystemdEngine("Docker", f"{socket} /info", _forgetful(parse_version(runc_version) or _runc(node)))


def _containerd(node: Node) -> SystemdEngine | None:
    try:
        if not containerd_role(node).used:
            return None
        runtimes = node.cri.config.get("containerd", {}).get("runtimes", {})
    except (GpunodeError, AttributeError):
        return None
    for name in ("nvidia", "runc"):
        runtime = runtimes.get(name) if isinstance(runtimes, dict) else None
        options = runtime.get("options") if isinstance(runtime, dict) else None
        if isinstance(options, dict) and options.get("SystemdCgroup") is True:
            return SystemdEngine("containerd", "runc --version", _forgetful(_runc(node)))
    return None


def _runc(node: Node) -> tuple[int, ...]:
    """Version of the runc on PATH; () if there is none, or it doesn't report it."""
    path = node.host.which("runc")
    done = node.host.run([path, "--version"], timeout=_SECONDS) if path else None
    return parse_version(done.stdout) if done is not None and done.ok else ()


def _forgetful(version: tuple[int, ...]) -> str:
    if not version or not gate("runc", "devices-need-links") <= version < gate("runc", "devices-by-number"):
        return ""
    return (
        f"runc {'.'.join(map(str, version))} makes systemd allow a device only if /dev/char has a link to it"
    )
