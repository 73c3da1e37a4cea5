"""Checks of CRI-O: stray files in its directory, hooks, and a CRI-O that is not in use."""

from __future__ import annotations

from dataclasses import replace

from gpunode.checks.finding import RESTARTS_CRIO, Evidence, Fix
from gpunode.checks.fixes import configure, edit_file, new_cgroup_driver, packages, restart
from gpunode.checks.model import (
    Verdict,
    check,
    cluster_check,
    fail,
    if_used,
    note,
    ok,
    seen,
    skip,
    unparsable,
    warn,
)
from gpunode.checks.next_start import lost_at_restart
from gpunode.checks.units import if_stopped_again, seen_unit, stays_stopped
from gpunode.errors import ConfigError, DaemonError
from gpunode.facts import tables
from gpunode.facts.cgroups import kubelets_own
from gpunode.facts.crio import CrioConfig, CrioFile, drop_in_directory, is_nvidias, load_file
from gpunode.facts.daemons import Daemon
from gpunode.facts.engines import crio_role
from gpunode.facts.gpu_use import possible_method, used_method
from gpunode.facts.node import Node
from gpunode.facts.toolkit import SYSTEM_DIRECTORIES, nvidia_hooks
from gpunode.host import Host
from gpunode.host.redact import shown_arguments

# Fixes for CRI-O.

RESTART = restart("crio", RESTARTS_CRIO)
CONFIGURE = configure("crio")
EDIT = RESTART.after("${EDITOR:-vi} /etc/crio/crio.conf.d/99-nvidia.conf")


def restart_crio(unit: str | None) -> Fix:
    """Running containers survive a restart of CRI-O."""
    return restart((unit or "crio").removesuffix(".service"), RESTARTS_CRIO)


def move(paths: tuple[str, ...], place: str) -> Fix:
    """Move files to another directory and restart CRI-O."""
    return RESTART.after(f"mkdir -p {place} && mv {' '.join(paths)} {place}/")


def install_monitor(family: str, path: str) -> Fix:
    """Install the package of a missing monitor: CRI-O's own package if the path is below its directory, else
    conmon."""
    own = path.startswith("/usr/libexec/crio/")
    command = packages(family, "reinstall", ["cri-o"]) if own else packages(family, "install", ["conmon"])
    if not command:
        return Fix("follow https://github.com/cri-o/packaging", needs_root=False)
    return RESTART.after(command)


# CRI-O's handlers: the nvidia handler is loaded, its programs exist, and all use one cgroup driver.

# some releases of the toolkit wrote here, where CRI-O never reads
_UNREAD = "/etc/crio/conf.d"


def nvidia_handlers(config: CrioConfig | CrioFile) -> list[str]:
    """Names of NVIDIA's handlers, found by name or program."""
    return [name for name, table in config.handlers.items() if is_nvidias(name, table)]


@cluster_check(
    "crio-runtime-missing",
    title="CRI-O has the nvidia handler",
    looks_at=f"the handlers of the running daemon (/config), its configuration files, and {_UNREAD}, which "
    "it never reads. No handler is needed if containers get GPUs through CDI, a hook or NRI. If only the "
    "running daemon has the handler, or has it as the default, that is a warning.",
    fix=CONFIGURE,
    blocked_by=("pci-no-gpu", "crio-not-running", "toolkit-missing", "crio-hooks-mode"),
    refs=("https://github.com/NVIDIA/gpu-operator/issues/2236",),
)
@if_used("crio")
def crio_runtime_missing(node: Node, daemon: Daemon) -> Verdict:
    """A pod with runtimeClassName nvidia can't start: 'failed to find runtime handler nvidia from runtime
    list'. CRI-O reads /etc/crio/crio.conf and
    /etc/crio/crio.conf.d only when it starts.
    """
    config = node.crio_config
    own = nvidia_handlers(config)
    answer = seen(f"{daemon.socket} /config", f"handlers: {', '.join(sorted(config.handlers)) or 'none'}")
    if own:
        restart = restart_crio(daemon.unit)
        lost = lost_at_restart(node, daemon, own, config.named_default, answer, restart)
        return lost or ok(f"CRI-O has loaded the handler {', '.join(own)}", answer)
    return (
        _not_restarted(node, daemon, answer)
        or _in_another_directory(node, daemon, answer)
        or _without_handler(node, config, answer)
    )


@cluster_check(
    "crio-not-running",
    title="CRI-O is running",
    looks_at="CRI-O's socket and whether the daemon answers within 3 seconds. If it isn't running: whether "
    "its configuration files are valid and the monitor (conmon) that they name exists.",
    fix=RESTART,
    preflight=("crio", "kubernetes"),
    refs=("https://github.com/cri-o/cri-o/blob/main/docs/crio.conf.5.md",),
)
@if_used("crio")
def crio_not_running(node: Node, daemon: Daemon) -> Verdict:
    """Pods can't start without CRI-O, and a kubelet that uses CRI-O exits at once."""
    state = node.host.socket_state(daemon.socket)
    if state == "denied":
        return skip(f"needs root to connect to {daemon.socket}")
    restart = restart_crio(daemon.unit)
    if state != "listening":
        return _stopped(node, seen(daemon.socket, state), restart)
    try:
        _ = node.crio_config
    except DaemonError as error:
        if error.code == "timeout":
            return fail(
                "CRI-O is running, but doesn't answer", seen(daemon.socket, error.message), fix=restart
            )
    return ok("CRI-O is running", seen(daemon.socket, state))


def _stopped(node: Node, silence: Evidence, restart: Fix) -> Verdict:
    """Why CRI-O doesn't start, as far as its files show: it refuses one without its monitor (conmon). A
    reboot would end the running pods, and none could start."""
    try:
        files = node.crio_files
    except ConfigError as error:
        place, edit = _correction(node.host, error)
        unparsed = "CRI-O isn't running: it can't parse its configuration file"
        return fail(unparsed, place, silence, fix=replace(edit, effect=_STARTS), reboot=True)
    for file in files.files:
        for name, table in file.handlers.items():
            monitor = table.get("monitor_path")
            if isinstance(monitor, str) and monitor.startswith("/") and not node.host.executable(monitor):
                place = seen(
                    file.path, f"{name}: monitor_path {monitor}", file.line_of_handler(name, "monitor_path")
                )
                fix = replace(install_monitor(node.distribution.family, monitor), effect=_STARTS)
                missing = f"CRI-O isn't running: its monitor {monitor} doesn't exist"
                return fail(missing, place, silence, fix=fix, reboot=True)
    fix = replace(restart, note=if_stopped_again("crio"), effect=_STARTS)
    unit = seen_unit(node, "crio.service")
    reboot = stays_stopped(node, "crio.service")
    return fail("CRI-O isn't running", silence, *unit, fix=fix, reboot=reboot)


_STARTS = "starts CRI-O"


def _correction(host: Host, error: ConfigError) -> tuple[Evidence, Fix]:
    """Position of a syntax error, and the command that opens it; then CRI-O restarts."""
    place, change = unparsable(host, error)
    return place, edit_file(place.source, place.line, change, RESTART)


def _not_restarted(node: Node, crio: Daemon, answer: Evidence) -> Verdict | None:
    try:
        files = node.crio_files
    except ConfigError as error:
        place, edit = _correction(node.host, error)
        return fail(
            "CRI-O has no nvidia handler and can't read its configuration file", place, answer, fix=edit
        )
    evidence = [handler for file in files.files if (handler := _nvidia_in(file))]
    if not evidence:
        return None
    summary = f"CRI-O hasn't loaded the {evidence[0].value} from {evidence[0].source} yet"
    return fail(summary, *evidence, answer, fix=restart_crio(crio.unit))


def _nvidia_in(file: CrioFile) -> Evidence | None:
    names = nvidia_handlers(file)
    return seen(file.path, f'handler "{names[0]}"', file.line_of_handler(names[0])) if names else None


def _in_another_directory(node: Node, crio: Daemon, answer: Evidence) -> Verdict | None:
    place = drop_in_directory(crio)
    if place == _UNREAD:
        return None
    stray = []
    for name in node.host.listdir(_UNREAD):
        try:
            file = load_file(node.host, f"{_UNREAD}/{name}")
        except ConfigError:
            continue
        if file and (evidence := _nvidia_in(file)):
            stray.append(evidence)
    if not stray:
        return None
    fix = move(tuple(entry.source for entry in stray), place)
    return fail(f"the nvidia handler is in {_UNREAD}, which CRI-O doesn't read", *stray, answer, fix=fix)


def _without_handler(node: Node, config: CrioConfig, answer: Evidence) -> Verdict:
    """CRI-O needs no handler if GPUs come through a hook, NRI or CDI, which CRI-O always supports."""
    hooks = nvidia_hooks(node.host, config.hook_directories)
    if hooks:
        return ok(
            "no nvidia handler: an OCI hook adds GPUs to containers",
            answer,
            seen(hooks[0].path, hooks[0].program),
        )
    way = possible_method(node, cdi=True)
    if way is not None:
        return ok(f"no nvidia handler: {way.summary}", answer, seen(way.source, way.value))
    return fail("CRI-O has no nvidia handler", answer)


@cluster_check(
    "crio-runtime-path",
    title="The binaries of CRI-O's handlers exist",
    looks_at="runtime_path and monitor_path of the nvidia handlers and of the default one (/config).",
    fix=CONFIGURE,
    blocked_by=("pci-no-gpu", "crio-not-running", "toolkit-missing", "crio-runtime-missing"),
    refs=("https://github.com/cri-o/cri-o/blob/main/docs/crio.conf.5.md",),
)
@if_used("crio")
def crio_runtime_path(node: Node, daemon: Daemon) -> Verdict:
    """A handler without its binary, such as /usr/local/nvidia/toolkit after the GPU operator was removed,
    makes every pod that uses it fail.
    """
    config = node.crio_config
    default = config.named_default
    answer, own = f"{daemon.socket} /config", nvidia_handlers(config)
    checked = {name: table for name, table in config.handlers.items() if name == default or name in own}
    for name, table in checked.items():
        for key in ("runtime_path", "monitor_path"):
            program = table.get(key)
            if isinstance(program, str) and program and not node.host.which(program):
                suffix = "; it is the default, so no pod starts" if name == default else ""
                text = f'{key} of the handler "{name}" doesn\'t exist{suffix}'
                return fail(text, *_line_of(node, name, key), seen(answer, f"{name}: {key} {program}"))
    return ok("the binaries of CRI-O's handlers exist") if checked else skip("CRI-O has no handler to check")


def _line_of(node: Node, name: str, key: str) -> tuple[Evidence, ...]:
    """Position in the last file that has it; empty if the files are no longer readable."""
    try:
        files = node.crio_files.defines(name)
    except ConfigError:
        return ()
    return tuple(seen(file.path, f"{name}: {key}", file.line_of_handler(name, key)) for file in files[-1:])


@cluster_check(
    "crio-cgroup-manager",
    title="CRI-O and the kubelet use one cgroup driver",
    looks_at="cgroup_manager of the running CRI-O (/config) and the kubelet's cgroupDriver, unless the "
    "kubelet gets it from CRI-O (1.31 and later with CRI-O 1.28).",
    fix=EDIT,
    blocked_by=("pci-no-gpu", "crio-not-running", "crio-runtime-missing"),
    refs=("https://kubernetes.io/docs/setup/production-environment/container-runtimes/#cgroup-drivers",),
    table=tables.TABLE,
)
@if_used("crio")
def crio_cgroup_manager(node: Node, daemon: Daemon) -> Verdict:
    """With two cgroup drivers on one node, pods fail with 'cri-o configured with systemd cgroup manager, but
    did not receive slice as parent'.
    """
    manager = node.crio_config.setting("runtime", "cgroup_manager")
    own = kubelets_own(node, "crio", daemon.version, str(manager))
    if own is None or manager not in ("systemd", "cgroupfs"):
        return skip("the kubelet uses the cgroup driver that CRI-O reports, or one of the two is unknown")
    answer = seen(f"{daemon.socket} /config", f"cgroup_manager {manager}")
    if manager == own:
        return ok(f"CRI-O and the kubelet use the cgroup driver {own}", answer)
    setting = seen("KubeletConfiguration cgroupDriver", own)
    path = f"{drop_in_directory(daemon)}/99-cgroup.conf"
    command = f'printf \'[crio.runtime]\\ncgroup_manager = "{own}"\\nconmon_cgroup = "pod"\\n\' > {path}'
    fix = new_cgroup_driver(node, restart_crio(daemon.unit).after(command), "CRI-O")
    return fail("CRI-O and the kubelet use different cgroup drivers", answer, setting, fix=fix)


# names of copies that editors, package managers and users make; OpenShift's own files have no suffix
_COPIES = (
    ".bak",
    ".backup",
    ".orig",
    ".old",
    ".save",
    ".disabled",
    ".swp",
    ".rpmsave",
    ".rpmnew",
    ".rpmorig",
    "~",
)
_IN_THE_MIDDLE = (".conf.", ".toml.", ".dpkg-")


@check(
    "crio-stray-dropin",
    title="CRI-O's configuration directory contains no stray files",
    severity="warning",
    looks_at="every file below CRI-O's drop-in directory: backup copies (*.bak, *.rpmsave, *~), files that "
    "can't be parsed, and several files that define the nvidia handler differently.",
    fix=EDIT,
    blocked_by=("pci-no-gpu", "crio-runtime-missing"),
    preflight=("crio",),
    refs=("https://github.com/cri-o/cri-o/blob/main/docs/crio.conf.d.5.md",),
)
@if_used("crio")
def crio_stray_dropin(node: Node, daemon: Daemon) -> Verdict:
    """CRI-O reads every file in this directory, including 99-nvidia.toml.bak and *.rpmsave, and a later file
    overrides the handler of an earlier one. CRI-O doesn't start if it can't parse one of them.
    """
    try:
        files = node.crio_files
    except ConfigError as error:
        place, edit = _correction(node.host, error)
        return warn("CRI-O can't parse its configuration files and won't start again", place, fix=edit)
    return _stray(files) or _twice(files) or ok(f"CRI-O reads {len(files.files)} files, none of them stray")


def _stray(files: CrioConfig) -> Verdict | None:
    """CRI-O reads a file in the directory whatever its name; a file without settings is harmless."""
    stray = [
        file
        for file in files.files
        if file.path != files.path and _copy(file.path.rpartition("/")[2]) and file.tree.get("crio")
    ]
    if not stray:
        return None
    evidence = (seen(file.path, _settings(file)) for file in stray)
    fix = move(tuple(file.path for file in stray), f"{files.directory}.unused")
    names = ", ".join(file.path.rpartition("/")[2] for file in stray)
    return warn(
        f"CRI-O reads {names}: it loads every file in its directory, whatever its name", *evidence, fix=fix
    )


def _copy(name: str) -> bool:
    if name.startswith((".", "#")) or name.endswith(_COPIES):
        return True
    return any(part in name for part in _IN_THE_MIDDLE)


def _settings(file: CrioFile) -> str:
    handlers = ", ".join(file.handlers)
    others = ", ".join(key for key in file.runtime if key != "runtimes")
    return f"handlers: {handlers}" if handlers else f"sets {others or 'settings outside crio.runtime'}"


def _twice(files: CrioConfig) -> Verdict | None:
    for name, table in files.handlers.items():
        defining = files.defines(name)
        differ = any(file.handlers[name] != table for file in defining)
        if is_nvidias(name, table) and len(defining) > 1 and differ:
            evidence = (seen(file.path, f'handler "{name}"', file.line_of_handler(name)) for file in defining)
            older = tuple(file.path for file in defining[:-1] if file.path != files.path)
            fix = move(older, f"{files.directory}.unused") if older else None
            return warn(
                f'{len(defining)} files define "{name}" differently; the last one takes effect',
                *evidence,
                fix=fix,
            )
    return None


@check(
    "crio-hooks-mode",
    title="CRI-O doesn't need an OCI hook for GPUs",
    looks_at=f"NVIDIA's hooks in {', '.join(SYSTEM_DIRECTORIES)} and hooks_dir of the running CRI-O, if "
    "containers don't get GPUs through CDI.",
    fix=CONFIGURE,
    blocked_by=("pci-no-gpu", "toolkit-missing"),
    refs=("https://github.com/NVIDIA/nvidia-container-toolkit/blob/main/CHANGELOG.md",),
)
@if_used("crio")
def crio_hooks_mode(node: Node, daemon: Daemon) -> Verdict:
    """The hook is the toolkit's oldest method and is deprecated. It works only in a directory that CRI-O's
    hooks_dir names.
    """
    hooks = nvidia_hooks(node.host, SYSTEM_DIRECTORIES)
    if not hooks:
        return ok("no OCI hook of NVIDIA is installed")
    directories = node.crio_config.hook_directories
    evidence = [seen(hook.path, f"runs {hook.program}") for hook in hooks]
    if node.gpu_specs:
        return ok("containers get GPUs through CDI; see hook-conflict for hooks that interfere", *evidence)
    if any(hook.path.rpartition("/")[0] in directories for hook in hooks):
        text = "an OCI hook adds GPUs to containers, which the toolkit deprecates in favour of CDI"
        return note(text, *evidence, fix=CONFIGURE)
    if nvidia_handlers(node.crio_config):
        return ok("CRI-O has the nvidia handler and doesn't read the directory of NVIDIA's hook", *evidence)
    way = used_method(node, cdi=True)
    if way is not None:
        return ok(f"no hook is needed: {way.summary}", seen(way.source, way.value), *evidence)
    answer = seen(f"{daemon.socket} /config", f"hooks_dir {', '.join(directories)}")
    return fail("CRI-O doesn't read the directory of NVIDIA's hook", *evidence, answer)


@check(
    "crio-not-selected",
    title="The kubelet uses the CRI-O that is running",
    severity="info",
    looks_at="the running CRI-O and the kubelet's engine. A CRI-O that is installed but not running is fine.",
    fix=RESTART,
    refs=("https://kubernetes.io/docs/setup/production-environment/container-runtimes/",),
)
def crio_not_selected(node: Node) -> Verdict:
    """With two engines on one node it is easy to configure the wrong one: pods get GPUs only from the engine
    that the kubelet uses.
    """
    crio = node.crio
    if crio is None or crio.process is None:
        return skip("CRI-O isn't running on this node")
    role = crio_role(node)
    if role.used or node.kubelet is None or not node.kubelet.joined:
        return ok(role.reason)
    return note(
        f"CRI-O is running, but {role.reason}: settings in CRI-O affect no pod",
        seen(f"/proc/{crio.process.pid}", " ".join(shown_arguments(crio.process.argv))),
        seen(node.kubelet.endpoint_source, node.kubelet.endpoint),
        fix=Fix("systemctl disable --now crio", disruptive="restart", disturbs="stops CRI-O"),
    )
