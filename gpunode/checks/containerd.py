"""Checks of containerd: its CRI plugin is enabled, its file takes effect, and it has loaded the nvidia
handler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from gpunode.checks import fixes
from gpunode.checks.containerd_config import WHERE, edit, loaded, running_config
from gpunode.checks.finding import RESTARTS_CONTAINERD, RESTARTS_KUBERNETES, Evidence, Fix
from gpunode.checks.fixes import package_fix, upgrade
from gpunode.checks.model import (
    Verdict,
    check,
    engine_check,
    fail,
    if_used,
    note,
    ok,
    seen,
    seen_in,
    skip,
    warn,
)
from gpunode.checks.next_start import lost_at_restart
from gpunode.checks.units import ENDS_EVICTED, seen_unit, start, stays_stopped
from gpunode.errors import DaemonError
from gpunode.facts import tables
from gpunode.facts.cgroups import kubelets_own
from gpunode.facts.containerd import DEFAULT_CONFIG, ContainerdConfig
from gpunode.facts.daemons import Daemon
from gpunode.facts.device_plugins import nri_plugin
from gpunode.facts.gpu_use import possible_method
from gpunode.facts.gpudirect import INFINIBAND
from gpunode.facts.node import Node
from gpunode.facts.processes import locked_memory
from gpunode.facts.toml import as_key, dig, headers
from gpunode.output.typed import as_dict, as_strings

HANDLER = "nvidia"


@engine_check(
    "containerd-cri-disabled",
    title="containerd's CRI plugin is enabled",
    looks_at="disabled_plugins in containerd's configuration file and its imports." + WHERE,
    fix=fixes.CONFIGURE_CONTAINERD,
    blocked_by=("pci-no-gpu", "containerd-config-version"),
    refs=(
        "https://github.com/NVIDIA/nvidia-container-toolkit/issues/1430",
        "https://github.com/NVIDIA/k8s-device-plugin/issues/406",
    ),
    reboot=True,
)
@if_used("containerd")
def containerd_cri_disabled(node: Node, daemon: Daemon) -> Verdict:
    """Without the CRI plugin the kubelet can't use containerd: it fails with 'unknown service
    runtime.v1.RuntimeService'. Docker's package containerd.io, for example, installs a file that disables the
    plugin.
    """
    config = loaded(node)
    if not config.disabled:
        return ok("the CRI plugin is enabled")
    files = (path for path in config.files if "disabled_plugins" in (node.host.read_text(path) or ""))
    path = next(files, config.path)
    disabled = f"disabled_plugins: {', '.join(config.disabled)}"
    evidence = [seen_in(node.host, path, disabled, "disabled_plugins")]
    fix = configure(daemon) or fixes.CONFIGURE_CONTAINERD
    does = f"removes the CRI from disabled_plugins, registers the nvidia runtime, and {fix.disturbs}"
    fix = replace(fix, effect=does)
    what = "containerd's CRI plugin is disabled"
    older = reported_handlers(node) is not None  # the daemon started with an older file
    if older:
        what += " from containerd's next start on"
        text = "the running containerd still serves the CRI: it started before this setting"
        evidence.append(seen(daemon.socket, text))
    if node.kubelet is not None and node.kubelet.stopped:
        what = f"the kubelet is stopped, and {what}"
        evidence.append(seen("kubelet.service", "stopped"))
        fix = replace(fix, note=_START_KUBELET)
    return fail(what, *evidence, fix=fix, reboot=older)  # a daemon without the CRI has nothing to lose


_START_KUBELET = (
    f"Then start the kubelet, unless it was stopped on purpose; this {ENDS_EVICTED}:\nsystemctl start kubelet"
)


@engine_check(
    "containerd-not-restarted",
    title="The running containerd has loaded its configuration file",
    looks_at="containerd's socket, whether its CRI answers within 3 seconds, and the runtimes in its file "
    "against the handlers that the daemon reports (CRI Status). If only the running daemon has the nvidia "
    "handler, or has it as the default, that is a warning." + WHERE,
    fix=fixes.RESTART_CONTAINERD,
    blocked_by=(
        "pci-no-gpu",
        "containerd-config-version",
        "containerd-cri-disabled",
        "k3s-edited-generated",
        "containerd-imports-clobber",
    ),
    refs=("https://kubernetes.io/docs/setup/production-environment/container-runtimes/#containerd",),
)
@if_used("containerd")
def containerd_not_restarted(node: Node, daemon: Daemon) -> Verdict:
    """containerd reads its file only when it starts. Until it is restarted, the handler exists only on disk:
    no runtime for "nvidia" is configured. Running containers survive a restart.
    """
    config, socket = loaded(node), daemon.socket
    state = node.host.socket_state(socket)
    if state == "denied":
        return skip(f"needs root to connect to {socket}")
    if state != "listening" and daemon.manager and (node.kubelet is None or node.kubelet.process is None):
        return skip(f"{daemon.manager} starts this containerd and isn't running")
    if state != "listening":
        return _stopped(node, daemon, seen(socket, state))
    try:
        handlers = [name for name in node.cri.handlers if name]
    except DaemonError as error:
        return _silent(daemon, error)
    missing = sorted(set(map(str, config.runtimes)) - set(handlers))
    answer = seen_handlers(daemon, handlers)
    if not missing:
        own = [name for name in handlers if name.startswith(HANDLER)]
        restart = _managed(daemon) or fixes.RESTART_CONTAINERD
        lost = lost_at_restart(node, daemon, own, node.cri.default_handler, answer, restart)
        return lost or ok("the running containerd has loaded its configuration file")
    evidence = [
        _defined(node, config.files, config, f'runtime "{name}"', f"runtimes.{name}") for name in missing
    ]
    summary = f"containerd hasn't loaded the handler {', '.join(missing)} from {evidence[0].source} yet"
    return fail(summary, *evidence, answer, fix=_managed(daemon))


def _stopped(node: Node, daemon: Daemon, answer: Evidence) -> Verdict:
    unit = "" if daemon.manager else "containerd.service"
    evidence = [answer, *seen_unit(node, unit)]
    what, units = "containerd isn't running", ["containerd"]
    if node.kubelet is not None and node.kubelet.stopped:
        what = f"{what}, and the kubelet is stopped"
        evidence.append(seen("kubelet.service", "stopped"))
        units.append("kubelet")
    fix = _managed(daemon) or start(*units, kubelet="kubelet" in units)
    why = "Without containerd no pod or container can start. Those that run continue."
    return fail(what, *evidence, fix=fix, why=why, reboot=stays_stopped(node, unit))


def _managed(daemon: Daemon) -> Fix | None:
    """Restart a distribution's containerd through that distribution; None for the system's containerd."""
    return fixes.restart_managed(daemon.manager, daemon.unit) if daemon.manager else None


def configure(daemon: Daemon) -> Fix | None:
    """Configure a distribution's containerd by the distribution's name; None for the system's containerd."""
    return fixes.configure(daemon.manager) if daemon.manager else None


def _silent(daemon: Daemon, error: DaemonError) -> Verdict:
    """The daemon accepts connections but doesn't report its handlers: it hangs, or its CRI plugin isn't
    running."""
    answer = seen(daemon.socket, error.message)
    if error.code == "timeout":
        what, why = "containerd is running, but its CRI doesn't answer", "Until it answers, no pod can start."
        return fail(what, answer, fix=_managed(daemon), why=why)
    # before 1.6 the CRI served only v1alpha2, which looks the same to this client
    if error.code == "cri-disabled" and daemon.version >= (1, 6):
        return fail("the file enables the CRI plugin, but the running containerd doesn't serve it", answer)
    raise error


def _defined(node: Node, files: Iterable[str], config: ContainerdConfig, value: str, needle: str) -> Evidence:
    """The first of these files that holds `needle`, with its line; else containerd's main file."""
    places = (seen_in(node.host, path, value, needle) for path in files)
    return next((place for place in places if place.line), seen(config.path, value))


def seen_handlers(daemon: Daemon, handlers: Sequence[str]) -> Evidence:
    return seen(f"CRI Status at {daemon.socket}", f"handlers: {', '.join(handlers) or 'none'}")


def reported_handlers(node: Node) -> tuple[str, ...] | None:
    """Handlers of the running containerd; None if it doesn't report them."""
    try:
        return tuple(name for name in node.cri.handlers if name)
    except DaemonError:
        return None


# containerd's handlers: the nvidia handler and its binary exist, and all use one cgroup driver.

_PROGRAM = "nvidia-container-runtime"
# drop-in directory of the toolkit's releases; containerd reads it only if its file imports it
_DROP_INS = ("/etc/containerd/conf.d", "/etc/containerd/config.d")


@engine_check(
    "containerd-runtime-missing",
    title="containerd has the nvidia handler",
    looks_at="the handlers that the running daemon reports (CRI Status), and configuration files that it "
    "doesn't read. No handler is needed if CDI is enabled and a specification for GPUs exists." + WHERE,
    fix=fixes.CONFIGURE_CONTAINERD,
    blocked_by=(
        "pci-no-gpu",
        "toolkit-missing",
        "containerd-config-version",
        "containerd-cri-disabled",
        "containerd-not-restarted",
        "k0s-dropin",
        "k3s-edited-generated",
        "k3s-wrong-template",
        "k3s-nvidia-wrong-root",
        "k3s-nvidia-not-detected",
    ),
    refs=(
        "https://github.com/NVIDIA/gpu-operator/issues/413",
        "https://github.com/NVIDIA/k8s-device-plugin/issues/479",
    ),
)
@if_used("containerd")
def containerd_runtime_missing(node: Node, daemon: Daemon) -> Verdict:
    """A pod with runtimeClassName nvidia can't start ('no runtime for "nvidia" is configured'), and pods
    without it get no GPU.
    """
    handlers = reported_handlers(node)
    if handlers is None:
        return skip(f"containerd doesn't report its configuration at {daemon.socket}")
    answer = seen_handlers(daemon, handlers)
    own = [name for name in handlers if name.startswith(HANDLER)]
    if own:
        return ok(f"containerd has loaded the handler {', '.join(own)}", answer)
    # With CDI enabled, no handler is needed if all GPU requests use CDI. A drop-in that containerd doesn't
    # read shows that the administrator wants the handler; the system's files say nothing about a
    # distribution's containerd.
    unread = _unread(node)
    cdi = (not unread or bool(daemon.manager)) and running_config(node).get("enableCDI") is True
    way = possible_method(node, cdi=cdi)
    if way is not None:
        return ok(f"no nvidia handler: {way.summary}", answer, seen(way.source, way.value))
    return fail("containerd has no nvidia handler", answer, *unread, fix=configure(daemon))


def _unread(node: Node) -> list[Evidence]:
    """Files with the handler that this containerd doesn't read: not imported, or the system's."""
    config = loaded(node)
    beside = [path for place in _DROP_INS for path in node.host.glob(place, "*.toml")]
    unread = [path for path in (DEFAULT_CONFIG, *beside) if path not in (config.path, *config.files)]
    value = "defines the handler, but this containerd doesn't read the file"
    evidence = (seen_in(node.host, path, value, _PROGRAM) for path in unread)
    return [place for place in evidence if place.line]


@engine_check(
    "containerd-runtime-binary",
    title="The binaries of containerd's handlers exist",
    looks_at="BinaryName and runtime_type of the nvidia handlers and of the default one (from the running "
    "daemon, else from the file)." + WHERE,
    fix=fixes.CONFIGURE_CONTAINERD,
    blocked_by=(
        "pci-no-gpu",
        "toolkit-missing",
        "containerd-config-version",
        "containerd-cri-disabled",
        "containerd-not-restarted",
        "containerd-runtime-missing",
    ),
    refs=("https://github.com/NVIDIA/nvidia-container-toolkit/issues/1956",),
)
@if_used("containerd")
def containerd_runtime_binary(node: Node, daemon: Daemon) -> Verdict:
    """A handler without its binary, such as /usr/local/nvidia/toolkit after the GPU operator was removed,
    makes every pod that uses it fail with 'no such file or directory'. Without a runtime_type, pods fail with
    'container.Runtime.Name must be set'.
    """
    config, running = loaded(node), running_config(node)
    tables = {**config.runtimes, **as_dict(dig(running, "containerd", "runtimes"))}
    default = str(dig(running, "containerd", "defaultRuntimeName") or config.default_runtime)
    names = [name for name in tables if name.startswith(HANDLER) or name == default]
    for name in names:
        program = dig(tables, name, "options", "BinaryName")
        file = dig(config.runtimes, name, "options", "BinaryName")
        shown = f"{name}: BinaryName {program}"
        answer = seen(f"CRI Status at {daemon.socket}", shown)
        if isinstance(program, str) and program and not node.host.which(program):
            last_first = reversed(config.files)
            evidence = [_defined(node, last_first, config, shown, program)] if file == program else []
            suffix = "; it is the default, so no pod starts" if name == default else ""
            text = f'the binary of the handler "{name}" is missing{suffix}'
            why = "Each pod that uses this handler fails with 'no such file or directory'."
            return fail(text, *evidence, answer, fix=configure(daemon), why=why)
        if dig(running, "containerd", "runtimes", name, "runtimeType") == "":
            answer = seen(f"CRI Status at {daemon.socket}", f"{name}: no runtimeType")
            text = f'the handler "{name}" has no runtime_type'
            why = "Each pod that uses it fails with 'container.Runtime.Name must be set'."
            return fail(text, answer, fix=configure(daemon), why=why)
    return (
        ok("the binaries of containerd's handlers exist")
        if names
        else skip("containerd has no handler to check")
    )


@engine_check(
    "containerd-systemdcgroup",
    title="The kubelet and containerd's handlers use one cgroup driver",
    looks_at="SystemdCgroup of the handlers runc and nvidia (from the running daemon, else from the file) "
    "and the kubelet's cgroupDriver, unless the kubelet gets it from the engine (1.31 and later)." + WHERE,
    fix=fixes.CONFIGURE_CONTAINERD,
    blocked_by=(
        "pci-no-gpu",
        "containerd-runtime-missing",
        "containerd-not-restarted",
        "containerd-config-version",
        "containerd-cri-disabled",
        "containerd-imports-clobber",
    ),
    table=tables.TABLE,
    refs=("https://kubernetes.io/docs/setup/production-environment/container-runtimes/#containerd-systemd",),
)
@if_used("containerd")
def containerd_systemdcgroup(node: Node, daemon: Daemon) -> Verdict:
    """With two cgroup drivers on one node, systemd and the kubelet kill each other's containers: pods restart
    endlessly or fail with 'expected cgroupsPath to be of format slice:prefix:name'.
    """
    config, running = loaded(node), running_config(node)
    flags = {name: _systemd(running, config, name) for name in ("runc", HANDLER)}
    known = {name: flag for name, flag in flags.items() if flag is not None}
    if HANDLER not in known:
        return skip("SystemdCgroup of the nvidia handler is unknown")
    own = kubelets_own(node, "containerd", daemon.version, _driver(known[HANDLER]))
    if own is not None:
        known["kubelet"] = own == "systemd"
    evidence = [seen(_source(name, config), f"{name}: {_driver(flag)}") for name, flag in known.items()]
    if len(set(known.values())) > 1:
        summary = "containerd's handlers and the kubelet use different cgroup drivers"
        if "runc" in known and known.get("kubelet", known["runc"]) != known["runc"]:
            desired = "true" if known["kubelet"] else "false"
            fix = _follow_kubelet(node, daemon, config, desired)
            return fail(f"{summary}: runc needs SystemdCgroup = {desired}", *evidence, fix=fix)
        return fail(summary, *evidence)
    return ok(f"the kubelet and all handlers use the cgroup driver {_driver(known[HANDLER])}", *evidence)


def _follow_kubelet(node: Node, daemon: Daemon, config: ContainerdConfig, desired: str) -> Fix:
    """Edit that gives containerd's runtimes the kubelet's cgroup driver.

    `configure-runtime` copies runc's settings to the nvidia runtime, so it doesn't change runc itself.
    """
    present = f"SystemdCgroup = {'false' if desired == 'true' else 'true'}"
    files = [path for path in config.files if present in (node.host.read_text(path) or "")]
    change = f"sed -i 's/{present}/SystemdCgroup = {desired}/' {' '.join(files)}"
    fix = fixes.RESTART_CONTAINERD.after(change)
    if not files or daemon.manager:
        setting = f"set SystemdCgroup = {desired} in the options of each runtime"
        fix = edit(node, daemon, config.path, None, setting)
    return fixes.new_cgroup_driver(node, fix, "containerd")


def _systemd(running: dict[str, Any], config: ContainerdConfig, name: str) -> bool | None:
    """SystemdCgroup of a handler as the running daemon reports it, else from the file; unset means false."""
    for runtimes in (dig(running, "containerd", "runtimes"), config.runtimes):
        if isinstance(dig(runtimes, name), dict):
            return dig(runtimes, name, "options", "SystemdCgroup") is True
    return None


def _source(name: str, config: ContainerdConfig) -> str:
    return "KubeletConfiguration cgroupDriver" if name == "kubelet" else f"{config.path} runtimes.{name}"


def _driver(systemd: bool) -> str:
    return "systemd" if systemd else "cgroupfs"


# Fixes for containerd itself.

UPGRADE = package_fix(
    "upgrade",
    ("containerd.io", "containerd.io", "containerd"),
    "follow https://containerd.io/docs/getting-started/",
    disruptive="restart",
    disturbs=RESTARTS_CONTAINERD,
)
# a Kubernetes distribution's containerd is upgraded only with the distribution, so its users do without NRI
WITHOUT_NRI = Fix(
    "kubectl patch clusterpolicies.nvidia.com/cluster-policy --type merge "
    """--patch '{"spec": {"cdi": {"nriPluginEnabled": false}}}'"""
)


def newer(node: Node, daemon: Daemon) -> Fix:
    """Upgrade to a release with sufficient NRI support, or use the operator's alternative."""
    if daemon.manager:
        return WITHOUT_NRI
    fix = upgrade(node, ("containerd.io", "containerd"), RESTARTS_CONTAINERD)
    return fix or UPGRADE.for_family(node.distribution.family)


# Other needs of a GPU node: NRI, locked memory, and deprecated settings.

_NRI = "io.containerd.nri.v1.nri"
_NO_WARNINGS = "ContainerdHasNoDeprecationWarnings"
_ENOUGH_BYTES = 1 << 30  # NCCL's buffers for one adapter; systemd's limit is 8 MiB


@check(
    "containerd-nri",
    title="containerd's NRI is available for the toolkit's plugin",
    severity="warning",
    looks_at="the toolkit's container (nvidia-ctk-installer) with ENABLE_NRI_PLUGIN, against containerd's "
    "release and the disable setting of its NRI plugin.",
    fix=fixes.RESTART_CONTAINERD.after("${EDITOR:-vi} /etc/containerd/config.toml"),
    blocked_by=("pci-no-gpu", "containerd-config-version", "containerd-not-restarted"),
    refs=("https://github.com/containerd/containerd/blob/main/docs/NRI.md",),
    table=tables.TABLE,
)
@if_used("containerd")
def containerd_nri(node: Node, daemon: Daemon) -> Verdict:
    """The GPU operator's plugin adds GPUs to containers through NRI. Without NRI, pods that request GPUs
    start without them.
    """
    config = loaded(node)
    plugin = nri_plugin(node.host, node.processes)
    if plugin is None:
        return skip("no plugin on this node adds GPUs through NRI")
    plugin_evidence = seen(f"/proc/{plugin.pid}", f"{plugin.name} with its NRI plugin enabled")
    version, release = daemon.version, daemon.release
    if tables.can("containerd", "nri-plugin", version) is False:
        text = (
            f"the toolkit's NRI plugin needs containerd {tables.first('containerd', 'nri-plugin')} or newer"
        )
        evidence = seen(daemon.binary or "containerd", release)
        return warn(text, plugin_evidence, evidence, fix=newer(node, daemon))
    switch = dig(config.merged, "plugins", _NRI, "disable")
    disabled = _NRI in as_strings(config.merged.get("disabled_plugins"))
    if switch is True or disabled:
        change = f'delete "{_NRI}" from disabled_plugins' if disabled else _enable_nri(node, config.path)
        return warn(
            "containerd's NRI is disabled",
            plugin_evidence,
            seen(config.path, f"{_NRI}: disabled"),
            fix=edit(node, daemon, config.path, None, change),
        )
    if switch is None and tables.can("containerd", "nri-default", version) is False:
        return warn(
            f"containerd {release} disables NRI unless its file sets disable = false",
            plugin_evidence,
            seen(config.path, f"no disable setting in {_NRI}"),
            fix=edit(node, daemon, config.path, None, _enable_nri(node, config.path)),
        )
    return ok("containerd's NRI is enabled", plugin_evidence)


def _enable_nri(node: Node, path: str) -> str:
    """The change that enables NRI: lines to paste, or the table's line if the file has it."""
    table = ("plugins", _NRI)
    lines = (node.host.read_text(path) or "").splitlines()
    number = next((number for number, header in headers(lines) if header == table), None)
    if number is not None:
        return f"below line {number + 1}, [{as_key(table)}], set disable = false"
    return f"add these lines at the end\n[{as_key(table)}]\ndisable = false"


_BEFORE_UPGRADE = "Replace what it lists before the next upgrade of containerd"


@check(
    "containerd-deprecations",
    title="containerd reports no deprecated features in use",
    severity="info",
    looks_at=f"the condition {_NO_WARNINGS} of the running daemon (CRI Status).",
    fix=fixes.look("ctr deprecations list", _BEFORE_UPGRADE),
    blocked_by=("pci-no-gpu", "containerd-not-restarted"),
    refs=("https://github.com/containerd/containerd/blob/main/RELEASES.md#deprecated-features",),
)
@if_used("containerd")
def containerd_deprecations(node: Node, daemon: Daemon) -> Verdict:
    """A deprecated setting, image format or API client works now and stops working after an upgrade of
    containerd.
    """
    if node.cri.conditions.get(_NO_WARNINGS) is not False:
        return ok("containerd reports no deprecated features in use")
    evidence = seen(f"CRI Status at {daemon.socket}", f"{_NO_WARNINGS} = false")
    address = f"--address {daemon.socket} "
    return note(
        "containerd reports that this node uses deprecated features",
        evidence,
        fix=fixes.look(f"ctr {address}deprecations list", _BEFORE_UPGRADE),
    )


@check(
    "containerd-memlock",
    title="Containers can lock memory for RDMA",
    severity="info",
    looks_at="the limit of locked memory of the running containerd (/proc/PID/limits), which containers "
    "inherit, on nodes with RDMA adapters.",
    fix=Fix("systemctl edit containerd"),
    blocked_by=("pci-no-gpu", "containerd-not-restarted"),
    refs=("https://github.com/NVIDIA/nccl-tests/issues/206",),
)
@if_used("containerd")
def containerd_memlock(node: Node, daemon: Daemon) -> Verdict:
    """NCCL over InfiniBand or RoCE locks its buffers in memory; below the limit it fails with 'ibv_reg_mr:
    Cannot allocate memory'. Kubernetes has no setting for this limit. Pods with the capability IPC_LOCK don't
    need it.
    """
    adapters = node.host.listdir(INFINIBAND)
    if not adapters or daemon.process is None:
        return skip("this node has no RDMA adapter" if not adapters else "containerd isn't running")
    limit = locked_memory(node.host, daemon.process.pid)
    if limit is None:
        return skip("containerd's limit of locked memory is unknown")
    if limit < 0 or limit >= _ENOUGH_BYTES:
        return ok("containers can lock memory for RDMA")
    unit = daemon.unit or "containerd.service"
    drop = f"/etc/systemd/system/{unit}.d/10-memlock.conf"
    restart = fixes.restart(unit, RESTARTS_KUBERNETES if daemon.manager else RESTARTS_CONTAINERD)
    setting = f"printf '[Service]\\nLimitMEMLOCK=infinity\\n' > {drop}"
    return note(
        f"containers without the capability IPC_LOCK can lock only {limit >> 10} KiB of memory for RDMA",
        seen(f"/proc/{daemon.process.pid}/limits", f"Max locked memory {limit}"),
        seen("/sys/class/infiniband", ", ".join(adapters[:4])),
        fix=restart.after(f"mkdir -p {drop.rpartition('/')[0]} && {setting} && systemctl daemon-reload"),
    )
