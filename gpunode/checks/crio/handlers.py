"""CRI-O's handlers: nvidia's is in the running daemon, its programs are there, one cgroup driver for all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpunode.checks.crio import remedies
from gpunode.checks.model import CLUSTER_NODES, Check, Verdict, fail, ok, seen, skip
from gpunode.checks.units import seen_unit
from gpunode.errors import ConfigError, DaemonError
from gpunode.facts import gates
from gpunode.facts.cgroup_drivers import kubelets_own
from gpunode.facts.containerd import dig
from gpunode.facts.daemons import Daemon
from gpunode.facts.engines import crio_role
from gpunode.facts.gpu_ways import other_way
from gpunode.facts.node import Node
from gpunode.facts.oci_hooks import SYSTEM_DIRECTORIES, nvidia_hooks
from gpunode.result import Evidence, Fix

if TYPE_CHECKING:
    from gpunode.facts.crio import CrioFile

# releases of the toolkit wrote here, where CRI-O never looks
_UNREAD = "/etc/crio/conf.d"
_READ = "/etc/crio/crio.conf.d"
_PACKAGED_HOOKS = SYSTEM_DIRECTORIES[:1]  # CRI-O's default for hooks_dir


def running_runtime(node: Node) -> dict[str, Any]:
    """``crio.runtime`` as the daemon holds it; `DaemonError` if it doesn't say."""
    found = dig(node.crio_config, "crio", "runtime")
    return found if isinstance(found, dict) else {}


def _handlers(runtime: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found = runtime.get("runtimes")
    tables = found.items() if isinstance(found, dict) else ()
    return {name: table for name, table in tables if isinstance(table, dict)}


def nvidia_handlers(runtime: dict[str, Any]) -> list[str]:
    """Names of the handlers that are NVIDIA's, by name or program."""
    from gpunode.facts.crio_programs import is_nvidias

    return [name for name, table in _handlers(runtime).items() if is_nvidias(name, table)]


def hook_directories(runtime: dict[str, Any]) -> tuple[str, ...]:
    """Where the running CRI-O looks for OCI hooks."""
    found = runtime.get("hooks_dir")
    listed = tuple(one for one in found if isinstance(one, str)) if isinstance(found, list) else ()
    return listed or _PACKAGED_HOOKS


def crio_runtime_missing(node: Node) -> Verdict:
    role = crio_role(node)
    if node.crio is None or not role.used:
        return skip(role.reason)
    try:
        runtime = running_runtime(node)
    except DaemonError as error:
        return skip(f"CRI-O doesn't say what it runs with: {error.message}")
    handlers = _handlers(runtime)
    ours = nvidia_handlers(runtime)
    told = seen(f"{node.crio.socket} /config", f"handlers {', '.join(sorted(handlers)) or 'none'}")
    if ours:
        return ok(f"CRI-O runs with the handler {', '.join(ours)}", told)
    return (
        _not_restarted(node, node.crio, told)
        or _in_another_directory(node, node.crio, told)
        or _without_handler(node, runtime, told)
    )


def crio_not_running(node: Node) -> Verdict:
    role = crio_role(node)
    if node.crio is None or not role.used:
        return skip(role.reason)
    state = node.host.socket_state(node.crio.socket)
    if state == "denied":
        return skip(f"needs root to talk to {node.crio.socket}")
    restart = remedies.restart(node.crio.unit)
    if state != "listening":
        return _stopped(node, seen(node.crio.socket, state), restart)
    try:
        running_runtime(node)
    except DaemonError as error:
        if error.code == "timeout":
            return fail("CRI-O runs, but doesn't answer", seen(node.crio.socket, error.message), fix=restart)
    return ok("CRI-O runs", seen(node.crio.socket, state))


def _stopped(node: Node, silence: Evidence, restart: Fix) -> Verdict:
    """Why CRI-O doesn't start, as far as its files tell: it refuses one without its monitor (conmon)."""
    try:
        files = node.crio_files
    except ConfigError as error:
        place, edit = unreadable(error)
        return fail("CRI-O isn't running: it can't read its file", place, silence, fix=edit)
    for file in files.files if files is not None else ():
        for name, table in _handlers(file.runtime).items():
            monitor = table.get("monitor_path")
            if isinstance(monitor, str) and monitor.startswith("/") and not node.host.executable(monitor):
                text = f"{name}: monitor_path {monitor}"
                line = file.line_of("monitor_path")
                fix = remedies.install_monitor(node.distribution.family, monitor)
                missing = f"CRI-O isn't running: its monitor {monitor} doesn't exist"
                return fail(missing, seen(file.path, text, line), silence, fix=fix)
    return fail("CRI-O isn't running", silence, *seen_unit(node, "crio.service"), fix=restart)


def unreadable(error: ConfigError) -> tuple[Evidence, Fix]:
    """Where a file can't be read (``path:line:column: reason``), and how to get there."""
    path, _, rest = error.message.partition(":")
    number, _, reason = rest.partition(":")
    if not number.strip().isdecimal():
        path = path.partition(" ")[0]
        return seen(path, error.message.removeprefix(path).strip()), remedies.edit(path, None)
    line = int(number)
    return seen(path, reason.strip(), line), remedies.edit(path, line)


def _not_restarted(node: Node, crio: Daemon, told: Evidence) -> Verdict | None:
    try:
        files = node.crio_files
    except ConfigError as error:
        place, edit = unreadable(error)
        return fail("CRI-O has no nvidia handler and can't read its file", place, told, fix=edit)
    found = [] if files is None else [_nvidia_in(file) for file in files.files if _nvidia_in(file)]
    evidence = [one for one in found if one is not None]
    if not evidence:
        return None
    summary = "in the file, not in the running daemon: CRI-O wasn't restarted"
    return fail(summary, *evidence, told, fix=remedies.restart(crio.unit))


def _nvidia_in(file: CrioFile | None) -> Evidence | None:
    names = nvidia_handlers(file.runtime) if file else []
    return seen(file.path, f'handler "{names[0]}"', file.line_of(names[0])) if file and names else None


def _in_another_directory(node: Node, crio: Daemon, told: Evidence) -> Verdict | None:
    from gpunode.facts.crio import drop_in_directory, load_file

    place = drop_in_directory(crio)
    if place == _UNREAD:
        return None
    stray = []
    for name in node.host.listdir(_UNREAD):
        try:
            found = _nvidia_in(load_file(node.host, f"{_UNREAD}/{name}"))
        except ConfigError:
            continue
        stray += [found] if found is not None else []
    if not stray:
        return None
    fix = remedies.move(tuple(one.source for one in stray), place)
    return fail(f"the nvidia handler is in {_UNREAD}, which CRI-O doesn't read", *stray, told, fix=fix)


def _without_handler(node: Node, runtime: dict[str, Any], told: Evidence) -> Verdict:
    """It needs none where GPUs come by a hook, by NRI or by CDI, which CRI-O always reads."""
    hooks = nvidia_hooks(node.host, hook_directories(runtime))
    if hooks:
        return ok("no nvidia handler: GPUs come by an OCI hook", told, seen(hooks[0].path, hooks[0].program))
    way = other_way(node, cdi=True)
    if way is not None:
        return ok(f"no nvidia handler: {way.summary}", told, seen(way.source, way.value))
    return fail("CRI-O has no nvidia handler", told)


def crio_runtime_path(node: Node) -> Verdict:
    role = crio_role(node)
    if node.crio is None or not role.used:
        return skip(role.reason)
    try:
        runtime = running_runtime(node)
    except DaemonError as error:
        return skip(f"CRI-O doesn't say what it runs with: {error.message}")
    default = str(runtime.get("default_runtime") or "")
    told, ours = f"{node.crio.socket} /config", nvidia_handlers(runtime)
    judged = {name: table for name, table in _handlers(runtime).items() if name == default or name in ours}
    for name, table in judged.items():
        for key in ("runtime_path", "monitor_path"):
            program = table.get(key)
            if isinstance(program, str) and program and not node.host.which(program):
                suffix = ", and it is the default: no pod starts" if name == default else ""
                text = f'{key} of the handler "{name}" leads nowhere{suffix}'
                return fail(text, *_line_of(node, name, key), seen(told, f"{name}: {key} {program}"))
    return ok("the programs of CRI-O's handlers are there") if judged else skip("no handler to judge")


def _line_of(node: Node, name: str, key: str) -> tuple[Evidence, ...]:
    """Where the last file has it; nothing if the files can't be read any more."""
    try:
        files = node.crio_files.defines(name) if node.crio_files else ()
    except ConfigError:
        return ()
    return tuple(seen(file.path, f"{name}: {key}", file.line_of(key)) for file in files[-1:])


def crio_cgroup_manager(node: Node) -> Verdict:
    role = crio_role(node)
    if node.crio is None or not role.used:
        return skip(role.reason)
    try:
        manager = running_runtime(node).get("cgroup_manager")
    except DaemonError as error:
        return skip(f"CRI-O doesn't say what it runs with: {error.message}")
    own = kubelets_own(node, "crio", node.crio.version, str(manager))
    if own is None or manager not in ("systemd", "cgroupfs"):
        return skip("the kubelet goes by what CRI-O tells it, or one of the two can't be told")
    told = seen(f"{node.crio.socket} /config", f"cgroup_manager {manager}")
    if manager == own:
        return ok(f"CRI-O and the kubelet use the cgroup driver {own}", told)
    setting = seen("KubeletConfiguration cgroupDriver", own)
    from gpunode.facts.crio import drop_in_directory

    path = f"{drop_in_directory(node.crio)}/99-cgroup.conf"
    command = f'printf \'[crio.runtime]\\ncgroup_manager = "{own}"\\nconmon_cgroup = "pod"\\n\' > {path}'
    restart = remedies.restart(node.crio.unit)
    fix = Fix(f"{command} && {restart.command}", disruptive="restart")
    return fail("CRI-O and the kubelet don't use the same cgroup driver", told, setting, fix=fix)


CHECKS = (
    Check(
        id="crio-not-running",
        title="CRI-O runs",
        layer="crio",
        severity="error",
        looks_at=(
            "CRI-O's socket and whether the daemon answers within 3 seconds; where it doesn't run, whether "
            "its files can be read and the monitor (conmon) that they name exists."
        ),
        why="No pod starts without it, and a kubelet that uses CRI-O ends at once.",
        remedy=remedies.RESTART,
        run=crio_not_running,
        blocked_by=("pci-no-gpu",),
        classes=CLUSTER_NODES,
        preflight=("crio", "kubernetes"),
        refs=("https://github.com/cri-o/cri-o/blob/main/docs/crio.conf.5.md",),
    ),
    Check(
        id="crio-runtime-missing",
        title="CRI-O has the nvidia handler",
        layer="crio",
        severity="error",
        looks_at=(
            "the handlers of the running daemon (/config), its files, and "
            f"{_UNREAD}, which it never reads. It needs none where GPUs come by CDI, a hook or NRI."
        ),
        why=(
            "A pod with runtimeClassName nvidia can't start: 'failed to find runtime handler nvidia from "
            f"runtime list'. Only {_READ} counts, and only when CRI-O starts."
        ),
        remedy=remedies.CONFIGURE,
        classes=CLUSTER_NODES,
        run=crio_runtime_missing,
        blocked_by=("pci-no-gpu", "crio-not-running", "toolkit-missing", "crio-hooks-mode"),
        refs=("https://github.com/NVIDIA/gpu-operator/issues/2236",),
    ),
    Check(
        id="crio-runtime-path",
        title="The programs of CRI-O's handlers are there",
        layer="crio",
        severity="error",
        looks_at="runtime_path and monitor_path of the nvidia handlers and of the default one (/config).",
        why=(
            "A handler whose program is gone, such as /usr/local/nvidia/toolkit after the GPU operator was "
            "removed, fails each of its pods."
        ),
        remedy=remedies.CONFIGURE,
        classes=CLUSTER_NODES,
        run=crio_runtime_path,
        blocked_by=("pci-no-gpu", "crio-not-running", "toolkit-missing", "crio-runtime-missing"),
        refs=("https://github.com/cri-o/cri-o/blob/main/docs/crio.conf.5.md",),
    ),
    Check(
        id="crio-cgroup-manager",
        title="CRI-O and the kubelet use one cgroup driver",
        layer="crio",
        severity="error",
        looks_at=(
            "cgroup_manager of the running CRI-O (/config) and the kubelet's cgroupDriver, unless the "
            "kubelet asks CRI-O for it (1.31 and later with CRI-O 1.28)."
        ),
        why=(
            "With two cgroup drivers on one node pods fail with 'cri-o configured with systemd cgroup "
            "manager, but did not receive slice as parent'."
        ),
        remedy=remedies.EDIT,
        classes=CLUSTER_NODES,
        run=crio_cgroup_manager,
        blocked_by=("pci-no-gpu", "crio-not-running", "crio-runtime-missing"),
        refs=("https://kubernetes.io/docs/setup/production-environment/container-runtimes/#cgroup-drivers",),
        table=gates.TABLE,
    ),
)
