"""Checks of containerd: its CRI plugin is enabled, its file takes effect, and it has loaded the nvidia
handler."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from gpunode.checks import fixes
from gpunode.checks.docker import line_of
from gpunode.checks.finding import RESTARTS_CONTAINERD, RESTARTS_KUBERNETES, Evidence, Fix
from gpunode.checks.fixes import per_family, restart_later, upgrade
from gpunode.checks.model import ENGINE_NODES, NO_ENGINE, Verdict, check, fail, note, ok, seen, skip, warn
from gpunode.checks.units import ENDS_EVICTED, seen_unit, start, stays_stopped
from gpunode.errors import ConfigError, DaemonError
from gpunode.facts import tables
from gpunode.facts.cgroups import kubelets_own
from gpunode.facts.containerd import (
    DEFAULT_CONFIG,
    ContainerdConfig,
    passed_over,
    version_in_force,
    version_of,
)
from gpunode.facts.daemons import Daemon
from gpunode.facts.device_plugins import nri_plugin
from gpunode.facts.distributions import K0S_DROP_INS, k0s_manages, sources
from gpunode.facts.engines import containerd_role
from gpunode.facts.fabric import locked_memory, rdma_adapters
from gpunode.facts.gpu_use import other_way
from gpunode.facts.node import Node
from gpunode.facts.toml import as_key, dig, headers, parse_toml
from gpunode.output.typed import as_dict

# containerd's docs: the newest configuration version that each release reads
_NEWEST = (((2, 3), 4), ((2, 0), 3), ((1, 3), 2), ((1, 0), 1))
# from the first of these releases until before the second (containerd pull requests 12891 and 13939)
_REFUSES_HIGHER = ((2, 3), (2, 3, 5))
HANDLER = "nvidia"
WHERE = (
    " Checked if the kubelet uses this containerd, or if it is the node's only engine. Beside "
    "Docker without a kubelet, the CRI isn't needed."
)
_POSITION = re.compile(r"(/[^:]*):(\d+):(\d+): (.*)")


@check(
    "containerd-config-version",
    "containerd",
    title="containerd's configuration is valid and takes effect",
    looks_at="the file that containerd reads and its imports: valid TOML, a supported version, an existing "
    "file for each import, no import of a higher version than the main file, and runtimes and "
    "registries in a table that the effective version reads." + WHERE,
    fix=fixes.EDIT_CONTAINERD,
    classes=ENGINE_NODES,
    unless=NO_ENGINE,
    blocked_by=("pci-no-gpu",),
    preflight=("containerd", "kubernetes"),
    reboot=True,
    refs=("https://github.com/containerd/containerd/blob/main/docs/man/containerd-config.toml.5.md",),
)
def containerd_config_version(node: Node) -> Verdict:
    """containerd doesn't start with a file that it can't parse, or of a version that it doesn't support. Up
    to 2.2, the last file that sets a version determines it for all files: containerd silently ignores tables
    of another version.
    """
    role = containerd_role(node)
    if node.containerd is None or not role.used:
        return skip(role.reason)
    path = node.containerd.config_path
    try:
        config = node.containerd_config
    except ConfigError as error:
        return _unreadable(node, path, error.message)
    if config is None or not config.exists:
        return ok(f"{path} doesn't exist: containerd uses its defaults")
    return (
        _refused_drop_in(node, config)
        or _missing_import(node, config)
        or _too_new(node, config)
        or _passed_over(node, config)
        or ok(f"configuration version {config.version} is supported by containerd {_dotted(node)}")
    )


def _refused_drop_in(node: Node, config: ContainerdConfig) -> Verdict | None:
    """Imported files of a higher version (containerd 2.3.0 to 2.3.4) or a different version (k0s) are
    refused."""
    daemon = node.containerd
    since, until = _REFUSES_HIGHER
    if daemon is None or daemon.version < since:
        return None
    k0s = daemon.manager == "k0s"
    if daemon.version >= until and not k0s:
        return None
    imported = {path: number for path, number in config.versions.items() if path != config.path}
    if k0s and k0s_manages(node.host, config.path):
        imported |= _k0s_drop_ins(node)
    own = config.version
    wrong = next((path for path, number in imported.items() if number > own or (k0s and number != own)), None)
    if wrong is None or config.main.get("version") is None:
        return None
    text = node.host.read_text(wrong) or ""
    evidence = (
        seen(wrong, f"version = {imported[wrong]}", line_of(text, "version")),
        seen(config.path, f"version = {own}", line_of(config.main_text, "version")),
    )
    subject = "k0s" if k0s else f"containerd {_dotted(node)}"
    kind = "of a different version than" if k0s else "of a higher version than"
    fix = edit(node, wrong, line_of(text, "version"), _to_version(text, imported[wrong], own))
    if "nvidia-container-runtime" in text:  # gpunode writes the handler again, in the main file's version
        runtime = daemon.manager or "containerd"
        # k0s doesn't start with such a file, and configure-runtime reloads only what runs
        again = fixes.configure(runtime)
        if k0s:
            again = again.after(fixes.restart_managed(runtime, daemon.unit).command)
        fix = again.after(f"mv {wrong} {wrong}.disabled")
    what = f"{subject} refuses to load an imported file {kind} {config.path}"
    return fail(what, *evidence, fix=fix, why="containerd doesn't start until it accepts each imported file.")


def _unreadable(node: Node, path: str, message: str) -> Verdict:
    """`message` is ``path:line:column: reason``, of the file or of one that it imports."""
    position = _POSITION.match(message)
    if position is None:
        line, where = None, seen(path, message)
    else:
        path, line = position[1], int(position[2])
        where = seen(path, f"column {position[3]}: {position[4]}", line)
    change = fixes.syntax(node.host.read_text(path) if line else None, line)
    if position is not None and position[4].endswith(" twice"):
        change = f"{position[4]}: delete one of the two, or move its settings into the other"
    process = node.containerd.process if node.containerd else None
    running = "still running, with the configuration that it loaded earlier" if process else "not running"
    state = seen(f"/proc/{process.pid}" if process else "/proc", f"containerd is {running}")
    why = "containerd doesn't start with a file that it can't parse."
    what, fix = "containerd's configuration can't be parsed", restart_later(edit(node, path, line, change))
    return fail(what, where, state, fix=fix, why=why)


def _k0s_drop_ins(node: Node) -> dict[str, int]:
    """Versions of the files that k0s itself imports once it accepts them."""
    result = {}
    for path in node.host.glob(K0S_DROP_INS, "*.toml"):
        text = node.host.read_text(path) or ""
        try:
            result[path] = version_of(parse_toml(text, path), path, text)
        except ConfigError:
            continue
    return result


def _missing_import(node: Node, config: ContainerdConfig) -> Verdict | None:
    """A missing imported file keeps containerd from starting; a pattern without matches does not."""
    if not config.missing_imports:
        return None
    missing = config.missing_imports[0]
    line = line_of(node.host.read_text(missing.importer) or "", missing.pattern)
    evidence = seen(missing.importer, f"imports {missing.pattern}", line)
    fix = edit(node, missing.importer, line, f'delete "{missing.pattern}" from imports')
    what = f"containerd imports {missing.path}, which doesn't exist"
    return fail(what, evidence, fix=fix, why="containerd doesn't start without this file.")


def _too_new(node: Node, config: ContainerdConfig) -> Verdict | None:
    version = node.containerd.version if node.containerd else ()
    newest = next((number for release, number in _NEWEST if version >= release), None)
    over = [path for path, number in config.versions.items() if newest is not None and number > newest]
    if newest is None or not over:
        return None
    text = node.host.read_text(over[0]) or ""
    line = line_of(text, "version")
    return fail(
        f"{over[0]} has version {config.versions[over[0]]}, "
        f"but containerd {_dotted(node)} accepts at most {newest}",
        seen(over[0], f"version = {config.versions[over[0]]}", line),
        fix=edit(node, over[0], line, _to_version(text, config.versions[over[0]], newest)),
        why="containerd doesn't start with a file of a version that it doesn't support.",
    )


def _to_version(text: str, present: int, desired: int) -> str:
    """How to bring a file to a version of containerd's configuration, with its names of the CRI plugin."""
    change = f"change version = {present} to version = {desired}"
    if desired == 2 and "io.containerd.cri.v1." in text:
        change += "; rename the io.containerd.cri.v1 plugins to io.containerd.grpc.v1.cri"
    return change


def _passed_over(node: Node, config: ContainerdConfig) -> Verdict | None:
    """Handlers or registries in a table that the effective version doesn't read: containerd ignores them
    silently."""
    tables = passed_over(config)
    if not tables:
        return None
    table = tables[0]
    line = line_of(node.host.read_text(table.path) or "", f"{table.plugin}")
    evidence = [seen(table.path, f"{table.plugin}: {', '.join(table.what)}", line)]
    number = version_in_force(config)
    versioned = [path for path, tree in config.trees.items() if tree.get("version") == number][-1:]
    evidence += [seen(path, f"version = {number}") for path in versioned if path != table.path]
    summary = f'containerd uses version {number}, so it ignores "{table.plugin}"'
    # without registry settings, images come from their public registry, which may be good enough
    judge = warn if table.what == ("registry",) else fail
    change = f"rename this table to the plugin name of version {number}"
    if not versioned:
        missing = f"version = {2 if 'grpc' in table.plugin else 3}"
        line, change = 1, f"add {missing} above all other settings"
        summary = f'containerd ignores "{table.plugin}" in {table.path}: the line {missing} is missing'
    why = "The version decides under which names containerd looks for its plugins' tables; it ignores others."
    fix = edit(node, table.path, line, change)
    if node.kubelet is not None and any("SystemdCgroup" in setting for setting in table.what):
        fix = fixes.new_cgroup_driver(node, fix, "containerd")
    return replace(judge(summary, *evidence, fix=fix, why=why), reboot=False)  # it starts as before


def edit(node: Node, path: str, line: int | None, change: str) -> Fix:
    """Edit a file, and restart containerd if it can then be parsed. If a distribution renders the file, edit
    its template instead."""
    daemon = node.containerd
    restart = fixes.RESTART_CONTAINERD
    if daemon is not None and not daemon.manager and node.host.which("containerd"):
        option = f" --config {daemon.config_path}" if daemon.config_path != DEFAULT_CONFIG else ""
        restart = restart.after(f"containerd{option} config dump > /dev/null")
    if daemon is not None and daemon.manager:
        restart = fixes.restart_managed(daemon.manager, daemon.unit)
        if path == daemon.config_path:
            path, line = next(iter(sources(node.host, daemon)), ""), None
    return fixes.edit_file(path, line, change, restart) if path else restart


def _dotted(node: Node) -> str:
    return ".".join(map(str, node.containerd.version if node.containerd else ())) or "(unknown)"


def judged(node: Node) -> ContainerdConfig | None:
    """The configuration, if this containerd's CRI is in use; otherwise it isn't even read."""
    return node.containerd_config if containerd_role(node).used else None


@check(
    "containerd-cri-disabled",
    "containerd",
    title="containerd's CRI plugin is enabled",
    looks_at="disabled_plugins in containerd's configuration file and its imports." + WHERE,
    fix=fixes.CONFIGURE_CONTAINERD,
    classes=ENGINE_NODES,
    unless=NO_ENGINE,
    blocked_by=("pci-no-gpu", "containerd-config-version"),
    refs=(
        "https://github.com/NVIDIA/nvidia-container-toolkit/issues/1430",
        "https://github.com/NVIDIA/k8s-device-plugin/issues/406",
    ),
    reboot=True,
)
def containerd_cri_disabled(node: Node) -> Verdict:
    """Without the CRI plugin the kubelet can't use containerd: it fails with 'unknown service
    runtime.v1.RuntimeService'. Docker's package containerd.io, for example, installs a file that disables the
    plugin.
    """
    config = judged(node)
    if node.containerd is None or config is None:
        return skip(containerd_role(node).reason)
    if not config.disabled:
        return ok("the CRI plugin is enabled")
    where = next(
        (path for path in config.files if "disabled_plugins" in (node.host.read_text(path) or "")), ""
    )
    path = where or config.path
    line = line_of(node.host.read_text(path) or "", "disabled_plugins")
    evidence = [seen(path, f"disabled_plugins: {', '.join(config.disabled)}", line)]
    fix = configure(node) or fixes.CONFIGURE_CONTAINERD
    does = f"removes the CRI from disabled_plugins, registers the nvidia runtime, and {fix.disturbs}"
    fix = replace(fix, effect=does)
    what = "containerd's CRI plugin is disabled"
    older = reported_handlers(node) is not None  # the daemon started with an older file
    if older:
        what += " from containerd's next start on"
        text = "the running containerd still serves the CRI: it started before this setting"
        evidence.append(seen(node.containerd.socket, text))
    if node.kubelet is not None and node.kubelet.stopped:
        what = f"the kubelet is stopped, and {what}"
        evidence.append(seen("kubelet.service", "stopped"))
        fix = replace(fix, note=_START_KUBELET)
    disabled = fail(what, *evidence, fix=fix)
    return replace(disabled, reboot=older)  # a daemon that already lacks the CRI loses nothing


_START_KUBELET = (
    f"Then start the kubelet, unless it was stopped on purpose; this {ENDS_EVICTED}:\nsystemctl start kubelet"
)


@check(
    "containerd-not-restarted",
    "containerd",
    title="The running containerd has loaded its configuration file",
    looks_at="containerd's socket, whether its CRI answers within 3 seconds, and the runtimes in its file "
    "against the handlers that the daemon reports (CRI Status)." + WHERE,
    fix=fixes.RESTART_CONTAINERD,
    classes=ENGINE_NODES,
    unless=NO_ENGINE,
    blocked_by=(
        "pci-no-gpu",
        "containerd-config-version",
        "containerd-cri-disabled",
        "k3s-edited-generated",
        "containerd-imports-clobber",
    ),
    refs=("https://kubernetes.io/docs/setup/production-environment/container-runtimes/#containerd",),
)
def containerd_not_restarted(node: Node) -> Verdict:
    """containerd reads its file only when it starts. Until it is restarted, the handler exists only on disk:
    no runtime for "nvidia" is configured. Running containers survive a restart.
    """
    config = judged(node)
    if node.containerd is None or config is None:
        return skip(containerd_role(node).reason)
    socket = node.containerd.socket
    state = node.host.socket_state(socket)
    if state == "denied":
        return skip(f"needs root to connect to {socket}")
    if state != "listening" and node.containerd.manager and not _kubelet_runs(node):
        return skip(f"{node.containerd.manager} starts this containerd and isn't running")
    if state != "listening":
        return _stopped(node, node.containerd, seen(socket, state))
    handlers = reported_handlers(node)
    if handlers is None:
        return _silent(node, socket)
    missing = sorted(set(map(str, config.runtimes)) - set(handlers))
    if not missing:
        return ok("the running containerd has loaded its configuration file")
    evidence = [_in_file(node, config, name) for name in missing]
    answer = seen(f"CRI Status at {socket}", f"handlers: {', '.join(handlers) or 'none'}")
    summary = f"containerd hasn't loaded the handler {', '.join(missing)} from {evidence[0].source} yet"
    return fail(summary, *evidence, answer, fix=_managed(node))


def _stopped(node: Node, daemon: Daemon, answer: Evidence) -> Verdict:
    unit = "" if daemon.manager else "containerd.service"
    evidence = [answer, *seen_unit(node, unit)]
    what, units = "containerd isn't running", ["containerd"]
    if node.kubelet is not None and node.kubelet.stopped:
        what = f"{what}, and the kubelet is stopped"
        evidence.append(seen("kubelet.service", "stopped"))
        units.append("kubelet")
    fix = _managed(node) or start(*units, kubelet="kubelet" in units)
    why = "Without containerd no pod or container can start. Those that run continue."
    return replace(fail(what, *evidence, fix=fix, why=why), reboot=stays_stopped(node, unit))


def _kubelet_runs(node: Node) -> bool:
    return node.kubelet is not None and node.kubelet.process is not None


def _managed(node: Node) -> Fix | None:
    """Restart a distribution's containerd through that distribution; None for the system's containerd."""
    daemon = node.containerd
    if daemon is None or not daemon.manager:
        return None
    return fixes.restart_managed(daemon.manager, daemon.unit)


def configure(node: Node) -> Fix | None:
    """Configure a distribution's containerd by the distribution's name; None for the system's containerd."""
    manager = node.containerd.manager if node.containerd else ""
    return fixes.configure(manager) if manager else None


def _silent(node: Node, socket: str) -> Verdict:
    """The daemon accepts connections but doesn't report its handlers: it hangs, or its CRI plugin isn't
    running."""
    try:
        node.cri  # noqa: B018 - read for its failure
    except DaemonError as error:
        if error.code == "timeout":
            what, answer = "containerd is running, but its CRI doesn't answer", seen(socket, error.message)
            return fail(what, answer, fix=_managed(node), why="Until it answers, no pod can start.")
        # before 1.6 the CRI served only v1alpha2, which looks the same to this client
        if error.code == "cri-disabled" and node.containerd and node.containerd.version >= (1, 6):
            return fail(
                "the file enables the CRI plugin, but the running containerd doesn't serve it",
                seen(socket, error.message),
            )
        return skip(f"containerd doesn't report its configuration: {error.message}")
    return skip(f"containerd doesn't report its configuration at {socket}")


def _in_file(node: Node, config: ContainerdConfig, name: str) -> Evidence:
    for path in config.files:
        line = line_of(node.host.read_text(path) or "", f"runtimes.{name}")
        if line:
            return seen(path, f'runtime "{name}"', line)
    return seen(config.path, f'runtime "{name}"')


def reported_handlers(node: Node) -> tuple[str, ...] | None:
    """Handlers of the running containerd; None if it doesn't report them."""
    try:
        return tuple(name for name in node.cri.handlers if name)
    except DaemonError:
        return None


def running_config(node: Node) -> dict[str, Any]:
    try:
        return dict(node.cri.config)
    except DaemonError:
        return {}


# containerd's handlers: the nvidia handler and its binary exist, and all use one cgroup driver.

_PROGRAM = "nvidia-container-runtime"
# drop-in directory of the toolkit's releases; containerd reads it only if its file imports it
_DROP_INS = ("/etc/containerd/conf.d", "/etc/containerd/config.d")


@check(
    "containerd-runtime-missing",
    "containerd",
    title="containerd has the nvidia handler",
    looks_at="the handlers that the running daemon reports (CRI Status), and configuration files that it "
    "doesn't read. No handler is needed if CDI is enabled and a specification for GPUs exists." + WHERE,
    fix=fixes.CONFIGURE_CONTAINERD,
    classes=ENGINE_NODES,
    unless=NO_ENGINE,
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
def containerd_runtime_missing(node: Node) -> Verdict:
    """A pod with runtimeClassName nvidia can't start ('no runtime for "nvidia" is configured'), and pods
    without it get no GPU.
    """
    role = containerd_role(node)
    if node.containerd is None or not role.used:
        return skip(role.reason)
    handlers = reported_handlers(node)
    if handlers is None:
        return skip(f"containerd doesn't report its configuration at {node.containerd.socket}")
    answer = seen(f"CRI Status at {node.containerd.socket}", f"handlers: {', '.join(handlers) or 'none'}")
    own = [name for name in handlers if name.startswith(HANDLER)]
    if own:
        return ok(f"containerd has loaded the handler {', '.join(own)}", answer)
    return _without_handler(node, answer)


def _without_handler(node: Node, answer: Evidence) -> Verdict:
    """A containerd with CDI enabled needs no handler if all GPU requests use CDI. A drop-in that it doesn't
    read shows that the administrator wants the handler; the system's files say nothing about a distribution's
    containerd.
    """
    unread = _unread(node)
    configured_in_file = bool(unread) and node.containerd is not None and not node.containerd.manager
    way = other_way(node, cdi=not configured_in_file and running_config(node).get("enableCDI") is True)
    if way is not None:
        return ok(f"no nvidia handler: {way.summary}", answer, seen(way.source, way.value))
    return fail("containerd has no nvidia handler", answer, *unread, fix=configure(node))


def _unread(node: Node) -> list[Evidence]:
    """Files with the handler that this containerd doesn't read: not imported, or the system's."""
    config = node.containerd_config
    if config is None:
        return []
    beside = [path for place in _DROP_INS for path in node.host.glob(place, "*.toml")]
    candidates = (*(() if config.path == DEFAULT_CONFIG else (DEFAULT_CONFIG,)), *beside)
    return [
        seen(path, "defines the handler, but this containerd doesn't read the file", line_of(text, _PROGRAM))
        for path in candidates
        if path not in config.files and _PROGRAM in (text := node.host.read_text(path) or "")
    ]


@check(
    "containerd-runtime-binary",
    "containerd",
    title="The binaries of containerd's handlers exist",
    looks_at="BinaryName and runtime_type of the nvidia handlers and of the default one (from the running "
    "daemon, else from the file)." + WHERE,
    fix=fixes.CONFIGURE_CONTAINERD,
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
)
def containerd_runtime_binary(node: Node) -> Verdict:
    """A handler without its binary, such as /usr/local/nvidia/toolkit after the GPU operator was removed,
    makes every pod that uses it fail with 'no such file or directory'. Without a runtime_type, pods fail with
    'container.Runtime.Name must be set'.
    """
    config = judged(node)
    if node.containerd is None or config is None:
        return skip(containerd_role(node).reason)
    running = running_config(node)
    tables = {**config.runtimes, **as_dict(dig(running, "containerd", "runtimes"))}
    default = str(dig(running, "containerd", "defaultRuntimeName") or config.default_runtime)
    names = [name for name in tables if name.startswith(HANDLER) or name == default]
    for name in names:
        program = dig(tables, name, "options", "BinaryName")
        file = dig(config.runtimes, name, "options", "BinaryName")
        answer = seen(f"CRI Status at {node.containerd.socket}", f"{name}: BinaryName {program}")
        if isinstance(program, str) and program and not node.host.which(program):
            evidence = [_handlers_in_file(node, config, name, program)] if file == program else []
            suffix = "; it is the default, so no pod starts" if name == default else ""
            text = f'the binary of the handler "{name}" is missing{suffix}'
            why = "Each pod that uses this handler fails with 'no such file or directory'."
            return fail(text, *evidence, answer, fix=configure(node), why=why)
        if dig(running, "containerd", "runtimes", name, "runtimeType") == "":
            answer = seen(f"CRI Status at {node.containerd.socket}", f"{name}: no runtimeType")
            text = f'the handler "{name}" has no runtime_type'
            why = "Each pod that uses it fails with 'container.Runtime.Name must be set'."
            return fail(text, answer, fix=configure(node), why=why)
    return (
        ok("the binaries of containerd's handlers exist")
        if names
        else skip("containerd has no handler to check")
    )


def _handlers_in_file(node: Node, config: ContainerdConfig, name: str, program: str) -> Evidence:
    """Line of the last file that defines the handler."""
    for path in reversed(config.files):
        line = line_of(node.host.read_text(path) or "", program)
        if line:
            return seen(path, f"{name}: BinaryName {program}", line)
    return seen(config.path, f"{name}: BinaryName {program}")


@check(
    "containerd-systemdcgroup",
    "containerd",
    title="The kubelet and containerd's handlers use one cgroup driver",
    looks_at="SystemdCgroup of the handlers runc and nvidia (from the running daemon, else from the file) "
    "and the kubelet's cgroupDriver, unless the kubelet gets it from the engine (1.31 and later)." + WHERE,
    fix=fixes.CONFIGURE_CONTAINERD,
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
    table=tables.TABLE,
    refs=("https://kubernetes.io/docs/setup/production-environment/container-runtimes/#containerd-systemd",),
)
def containerd_systemdcgroup(node: Node) -> Verdict:
    """With two cgroup drivers on one node, systemd and the kubelet kill each other's containers: pods restart
    endlessly or fail with 'expected cgroupsPath to be of format slice:prefix:name'.
    """
    config = judged(node)
    if node.containerd is None or config is None:
        return skip(containerd_role(node).reason)
    running = running_config(node)
    flags = {name: _systemd(running, config, name) for name in ("runc", HANDLER)}
    known = {name: flag for name, flag in flags.items() if flag is not None}
    if HANDLER not in known:
        return skip("SystemdCgroup of the nvidia handler is unknown")
    own = kubelets_own(node, "containerd", node.containerd.version, _driver(known[HANDLER]))
    if own is not None:
        known["kubelet"] = own == "systemd"
    evidence = [seen(_source(name, config), f"{name}: {_driver(flag)}") for name, flag in known.items()]
    if len(set(known.values())) > 1:
        summary = "containerd's handlers and the kubelet use different cgroup drivers"
        if "runc" in known and known.get("kubelet", known["runc"]) != known["runc"]:
            desired = "true" if known["kubelet"] else "false"
            fix = _follow_kubelet(node, config, desired)
            return fail(f"{summary}: runc needs SystemdCgroup = {desired}", *evidence, fix=fix)
        return fail(summary, *evidence)
    return ok(f"the kubelet and all handlers use the cgroup driver {_driver(known[HANDLER])}", *evidence)


def _follow_kubelet(node: Node, config: ContainerdConfig, desired: str) -> Fix:
    """Edit that gives containerd's runtimes the kubelet's cgroup driver.

    `configure-runtime` copies runc's settings to the nvidia runtime, so it doesn't change runc itself.
    """
    present = f"SystemdCgroup = {'false' if desired == 'true' else 'true'}"
    files = [path for path in config.files if present in (node.host.read_text(path) or "")]
    change = f"sed -i 's/{present}/SystemdCgroup = {desired}/' {' '.join(files)}"
    fix = fixes.RESTART_CONTAINERD.after(change)
    if not files or (node.containerd and node.containerd.manager):
        fix = edit(node, config.path, None, f"set SystemdCgroup = {desired} in the options of each runtime")
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

UPGRADE = per_family(
    "apt update && apt install --only-upgrade containerd.io",
    "dnf upgrade containerd.io",
    "zypper update containerd",
    "follow https://containerd.io/docs/getting-started/",
    disruptive="restart",
    disturbs=RESTARTS_CONTAINERD,
)
_PACKAGES = ("containerd.io", "containerd")
# a Kubernetes distribution's containerd is upgraded only with the distribution, so its users do without NRI
WITHOUT_NRI = Fix(
    "kubectl patch clusterpolicies.nvidia.com/cluster-policy --type merge "
    """--patch '{"spec": {"cdi": {"nriPluginEnabled": false}}}'"""
)


def newer(node: Node) -> Fix:
    """Upgrade to a release with sufficient NRI support, or use the operator's alternative."""
    if node.containerd is not None and node.containerd.manager:
        return WITHOUT_NRI
    family = node.distribution.family
    names = [name for name in _PACKAGES if name in node.packages.installed]
    return upgrade(family, names, RESTARTS_CONTAINERD) or UPGRADE.for_family(family)


# Other needs of a GPU node: NRI, locked memory, and deprecated settings.

_NRI = "io.containerd.nri.v1.nri"
_NO_WARNINGS = "ContainerdHasNoDeprecationWarnings"
_ENOUGH_BYTES = 1 << 30  # NCCL's buffers for one adapter; systemd's limit is 8 MiB


@check(
    "containerd-nri",
    "containerd",
    title="containerd's NRI is available for the toolkit's plugin",
    severity="warning",
    looks_at=(
        "the toolkit's container (nvidia-ctk-installer) with ENABLE_NRI_PLUGIN, against containerd's "
        "release and the disable setting of its NRI plugin."
    ),
    fix=fixes.RESTART_CONTAINERD.after("${EDITOR:-vi} /etc/containerd/config.toml"),
    blocked_by=("pci-no-gpu", "containerd-config-version", "containerd-not-restarted"),
    refs=("https://github.com/containerd/containerd/blob/main/docs/NRI.md",),
    table=tables.TABLE,
)
def containerd_nri(node: Node) -> Verdict:
    """The GPU operator's plugin adds GPUs to containers through NRI. Without NRI, pods that request GPUs
    start without them.
    """
    config = judged(node)
    if node.containerd is None or config is None:
        return skip(containerd_role(node).reason)
    plugin = nri_plugin(node.host, node.processes)
    if plugin is None:
        return skip("no plugin on this node adds GPUs through NRI")
    plugin_evidence = seen(f"/proc/{plugin.pid}", f"{plugin.name} with its NRI plugin enabled")
    version = node.containerd.version
    release = ".".join(map(str, version))
    if tables.can("containerd", "nri-plugin", version) is False:
        text = (
            f"the toolkit's NRI plugin needs containerd {tables.first('containerd', 'nri-plugin')} or newer"
        )
        evidence = seen(node.containerd.binary or "containerd", release)
        return warn(text, plugin_evidence, evidence, fix=newer(node))
    switch = dig(config.merged, "plugins", _NRI, "disable")
    listed = config.merged.get("disabled_plugins")
    if switch is True or (isinstance(listed, list) and _NRI in listed):
        change = _enable_nri(node, config.path)
        if isinstance(listed, list) and _NRI in listed:
            change = f'delete "{_NRI}" from disabled_plugins'
        fix = edit(node, config.path, None, change)
        return warn(
            "containerd's NRI is disabled", plugin_evidence, seen(config.path, f"{_NRI}: disabled"), fix=fix
        )
    if switch is None and tables.can("containerd", "nri-default", version) is False:
        return warn(
            f"containerd {release} disables NRI unless its file sets disable = false",
            plugin_evidence,
            seen(config.path, f"no disable setting in {_NRI}"),
            fix=edit(node, config.path, None, _enable_nri(node, config.path)),
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
    "containerd",
    title="containerd reports no deprecated features in use",
    severity="info",
    looks_at=f"the condition {_NO_WARNINGS} of the running daemon (CRI Status).",
    fix=fixes.look("ctr deprecations list", _BEFORE_UPGRADE),
    blocked_by=("pci-no-gpu", "containerd-not-restarted"),
    refs=("https://github.com/containerd/containerd/blob/main/RELEASES.md#deprecated-features",),
)
def containerd_deprecations(node: Node) -> Verdict:
    """A deprecated setting, image format or API client works now and stops working after an upgrade of
    containerd.
    """
    role = containerd_role(node)
    if node.containerd is None or not role.used:
        return skip(role.reason)
    try:
        answer = node.cri.conditions.get(_NO_WARNINGS)
    except DaemonError as error:
        return skip(f"containerd doesn't report its configuration: {error.message}")
    if answer is not False:
        return ok("containerd reports no deprecated features in use")
    evidence = seen(f"CRI Status at {node.containerd.socket}", f"{_NO_WARNINGS} = false")
    address = f"--address {node.containerd.socket} "
    return note(
        "containerd reports that this node uses deprecated features",
        evidence,
        fix=fixes.look(f"ctr {address}deprecations list", _BEFORE_UPGRADE),
    )


@check(
    "containerd-memlock",
    "containerd",
    title="Containers can lock memory for RDMA",
    severity="info",
    looks_at=(
        "the limit of locked memory of the running containerd (/proc/PID/limits), which containers "
        "inherit, on nodes with RDMA adapters."
    ),
    fix=Fix("systemctl edit containerd"),
    blocked_by=("pci-no-gpu", "containerd-not-restarted"),
    refs=("https://github.com/NVIDIA/nccl-tests/issues/206",),
)
def containerd_memlock(node: Node) -> Verdict:
    """NCCL over InfiniBand or RoCE locks its buffers in memory; below the limit it fails with 'ibv_reg_mr:
    Cannot allocate memory'. Kubernetes has no setting for this limit. Pods with the capability IPC_LOCK don't
    need it.
    """
    daemon = node.containerd
    if daemon is None or not containerd_role(node).used:
        return skip(containerd_role(node).reason)
    adapters = rdma_adapters(node.host)
    if not adapters or daemon.process is None:
        return skip("this node has no RDMA adapter" if not adapters else "containerd isn't running")
    limit = locked_memory(node.host, daemon.process.pid)
    if limit is None or limit < 0 or limit >= _ENOUGH_BYTES:
        return (
            ok("containers can lock memory for RDMA")
            if limit is not None
            else skip("containerd's limit of locked memory is unknown")
        )
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
