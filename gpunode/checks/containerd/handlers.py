"""containerd's handlers: nvidia's is there, its program too, and all use one cgroup driver."""

from __future__ import annotations

from typing import Any

from gpunode.checks import fixes
from gpunode.checks.containerd.daemon import (
    HANDLER,
    WHERE,
    configure,
    edit,
    judged,
    running_config,
    told_handlers,
)
from gpunode.checks.docker.file import line_of
from gpunode.checks.model import ENGINE_NODES, NO_ENGINE, Check, Verdict, fail, ok, seen, skip
from gpunode.facts import gates
from gpunode.facts.cgroup_drivers import kubelets_own
from gpunode.facts.containerd import DEFAULT_CONFIG, ContainerdConfig, dig
from gpunode.facts.engines import containerd_role
from gpunode.facts.gpu_ways import other_way
from gpunode.facts.node import Node
from gpunode.result import Evidence, Fix

_PROGRAM = "nvidia-container-runtime"
# where the toolkit's releases put drop-ins; only an import makes containerd read them
_DROP_INS = ("/etc/containerd/conf.d", "/etc/containerd/config.d")


def containerd_runtime_missing(node: Node) -> Verdict:
    role = containerd_role(node)
    if node.containerd is None or not role.used:
        return skip(role.reason)
    handlers = told_handlers(node)
    if handlers is None:
        return skip(f"containerd doesn't say what it runs with at {node.containerd.socket}")
    told = seen(f"CRI Status at {node.containerd.socket}", f"handlers {', '.join(handlers) or 'none'}")
    ours = [name for name in handlers if name.startswith(HANDLER)]
    if ours:
        return ok(f"containerd runs with the handler {', '.join(ours)}", told)
    return _without_handler(node, told)


def _without_handler(node: Node, told: Evidence) -> Verdict:
    """A containerd whose CDI is on needs none, as long as whoever asks for GPUs asks by CDI.

    A drop-in that it doesn't read shows that somebody wants the handler; the system's files tell nothing of
    what is wanted from a Kubernetes distribution's containerd.
    """
    unread = _unread(node)
    wanted = bool(unread) and node.containerd is not None and not node.containerd.manager
    way = other_way(node, cdi=not wanted and running_config(node).get("enableCDI") is True)
    if way is not None:
        return ok(f"no nvidia handler: {way.summary}", told, seen(way.source, way.value))
    return fail("containerd has no nvidia handler", told, *unread, fix=configure(node))


def _unread(node: Node) -> list[Evidence]:
    """Files with the handler that this containerd doesn't read: beside its imports, or the system's."""
    config = node.containerd_config
    if config is None:
        return []
    beside = [path for place in _DROP_INS for path in node.host.glob(place, "*.toml")]
    candidates = (*(() if config.path == DEFAULT_CONFIG else (DEFAULT_CONFIG,)), *beside)
    return [
        seen(path, "has the handler, but this containerd doesn't read it", line_of(text, _PROGRAM))
        for path in candidates
        if path not in config.files and _PROGRAM in (text := node.host.read_text(path) or "")
    ]


def containerd_runtime_binary(node: Node) -> Verdict:
    config = judged(node)
    if node.containerd is None or config is None:
        return skip(containerd_role(node).reason)
    running = running_config(node)
    tables = {**config.runtimes, **(_dict(dig(running, "containerd", "runtimes")))}
    default = str(dig(running, "containerd", "defaultRuntimeName") or config.default_runtime)
    names = [name for name in tables if name.startswith(HANDLER) or name == default]
    for name in names:
        program = dig(tables, name, "options", "BinaryName")
        file = dig(config.runtimes, name, "options", "BinaryName")
        told = seen(f"CRI Status at {node.containerd.socket}", f"{name}: BinaryName {program}")
        if isinstance(program, str) and program and not node.host.which(program):
            evidence = [_in_file(node, config, name, program)] if file == program else []
            suffix = ", and it is the default: no pod starts" if name == default else ""
            text = f'the program of the handler "{name}" is missing{suffix}'
            return fail(text, *evidence, told, fix=configure(node))
        if dig(running, "containerd", "runtimes", name, "runtimeType") == "":
            told = seen(f"CRI Status at {node.containerd.socket}", f"{name}: no runtimeType")
            text = f'the handler "{name}" has no runtime_type'
            return fail(text, told, fix=configure(node))
    return ok("the programs of containerd's handlers are there") if names else skip("no handler to judge")


def _in_file(node: Node, config: ContainerdConfig, name: str, program: str) -> Evidence:
    """The line of the last file that has it."""
    for path in reversed(config.files):
        line = line_of(node.host.read_text(path) or "", program)
        if line:
            return seen(path, f"{name}: BinaryName {program}", line)
    return seen(config.path, f"{name}: BinaryName {program}")


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def containerd_systemdcgroup(node: Node) -> Verdict:
    config = judged(node)
    if node.containerd is None or config is None:
        return skip(containerd_role(node).reason)
    running = running_config(node)
    flags = {name: _systemd(running, config, name) for name in ("runc", HANDLER)}
    known = {name: flag for name, flag in flags.items() if flag is not None}
    if HANDLER not in known:
        return skip("the nvidia handler's SystemdCgroup can't be told")
    own = kubelets_own(node, "containerd", node.containerd.version, _driver(known[HANDLER]))
    if own is not None:
        known["kubelet"] = own == "systemd"
    evidence = [seen(_source(name, config), f"{name}: {_driver(flag)}") for name, flag in known.items()]
    if len(set(known.values())) > 1:
        summary = "containerd's handlers and the kubelet don't use the same cgroup driver"
        if "runc" in known and known.get("kubelet", known["runc"]) != known["runc"]:
            desired = "true" if known["kubelet"] else "false"
            fix = _follow_kubelet(node, config, desired)
            return fail(f"{summary}: runc needs SystemdCgroup = {desired}", *evidence, fix=fix)
        return fail(summary, *evidence)
    return ok(f"all use the cgroup driver {_driver(known[HANDLER])}", *evidence)


def _follow_kubelet(node: Node, config: ContainerdConfig, desired: str) -> Fix:
    """The edit that gives containerd's runtimes the kubelet's cgroup driver.

    `configure-runtime` gives the nvidia runtime what runc has, so it changes nothing about runc itself.
    """
    present = f"SystemdCgroup = {'false' if desired == 'true' else 'true'}"
    files = [path for path in config.files if present in (node.host.read_text(path) or "")]
    if not files or (node.containerd and node.containerd.manager):
        return edit(node, config.path, None)
    change = f"sed -i 's/{present}/SystemdCgroup = {desired}/' {' '.join(files)}"
    return Fix(f"{change} && systemctl restart containerd", True, "restart")


def _systemd(running: dict[str, Any], config: ContainerdConfig, name: str) -> bool | None:
    """SystemdCgroup of a handler: the running daemon's word, else the file's; unset is false."""
    for runtimes in (dig(running, "containerd", "runtimes"), config.runtimes):
        if isinstance(dig(runtimes, name), dict):
            return dig(runtimes, name, "options", "SystemdCgroup") is True
    return None


def _source(name: str, config: ContainerdConfig) -> str:
    return "KubeletConfiguration cgroupDriver" if name == "kubelet" else f"{config.path} runtimes.{name}"


def _driver(systemd: bool) -> str:
    return "systemd" if systemd else "cgroupfs"


CHECKS = (
    Check(
        id="containerd-runtime-missing",
        title="containerd has the nvidia handler",
        layer="containerd",
        severity="error",
        looks_at="the handlers that the running daemon names (CRI Status), and files beside the ones it "
        "reads. It needs none where its CDI is on and there is a specification for GPUs." + WHERE,
        why=(
            "A pod with runtimeClassName nvidia can't start ('no runtime for \"nvidia\" is configured'), and "
            "without it pods see no GPU."
        ),
        remedy=fixes.CONFIGURE_CONTAINERD,
        run=containerd_runtime_missing,
        classes=ENGINE_NODES,
        unless=NO_ENGINE,
        blocked_by=(
            "pci-no-gpu",
            "toolkit-missing",
            "containerd-config-version",
            "containerd-cri-disabled",
            "containerd-not-restarted",
            *("k0s-dropin", "k3s-edited-generated", "k3s-wrong-template", "k3s-nvidia-wrong-root"),
            "k3s-nvidia-not-detected",
        ),
        refs=(
            "https://github.com/NVIDIA/gpu-operator/issues/413",
            "https://github.com/NVIDIA/k8s-device-plugin/issues/479",
        ),
    ),
    Check(
        id="containerd-runtime-binary",
        title="The programs of containerd's handlers are there",
        layer="containerd",
        severity="error",
        looks_at="BinaryName and runtime_type of the nvidia handlers and of the default one (the running "
        "daemon's, else the file's)." + WHERE,
        why=(
            "A handler whose program is gone, such as /usr/local/nvidia/toolkit after the GPU operator was "
            "removed, fails each pod with 'no such file or directory'; without a type it fails with "
            "'container.Runtime.Name must be set'."
        ),
        remedy=fixes.CONFIGURE_CONTAINERD,
        run=containerd_runtime_binary,
        classes=ENGINE_NODES,
        unless=NO_ENGINE,
        blocked_by=(
            "pci-no-gpu",
            "toolkit-missing",
            "containerd-config-version",
            "containerd-cri-disabled",
            "containerd-not-restarted",
            "containerd-runtime-missing",
        ),
        refs=("https://github.com/NVIDIA/nvidia-container-toolkit/issues/1956",),
    ),
    Check(
        id="containerd-systemdcgroup",
        title="Everyone uses one cgroup driver",
        layer="containerd",
        severity="error",
        looks_at="SystemdCgroup of the handlers runc and nvidia (the running daemon's, else the file's) and "
        "the kubelet's cgroupDriver, unless the kubelet asks its engine for it (1.31 and later)." + WHERE,
        why=(
            "With two cgroup drivers on one node, systemd and the kubelet kill each other's containers: "
            "pods restart without end or fail with 'expected cgroupsPath to be of format "
            "slice:prefix:name'."
        ),
        remedy=fixes.CONFIGURE_CONTAINERD,
        run=containerd_systemdcgroup,
        classes=ENGINE_NODES,
        unless=NO_ENGINE,
        blocked_by=(
            "pci-no-gpu",
            "containerd-runtime-missing",
            "containerd-not-restarted",
            "containerd-config-version",
            "containerd-cri-disabled",
            "containerd-imports-clobber",
        ),
        table=gates.TABLE,
        refs=(
            "https://kubernetes.io/docs/setup/production-environment/container-runtimes/#containerd-systemd",
        ),
    ),
)
