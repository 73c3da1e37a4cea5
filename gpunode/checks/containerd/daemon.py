"""containerd: the CRI is on, the file is one that it reads, and the running daemon has the nvidia handler."""

from __future__ import annotations

from typing import Any

from gpunode.checks import fixes
from gpunode.checks.docker.file import line_of
from gpunode.checks.model import ENGINE_NODES, NO_ENGINE, Check, Verdict, fail, ok, seen, skip, warn
from gpunode.checks.units import seen_unit
from gpunode.errors import ConfigError, DaemonError
from gpunode.facts.containerd import ContainerdConfig, parse_toml, version_of
from gpunode.facts.distributions import K0S_DROP_INS, k0s_manages, sources
from gpunode.facts.engines import containerd_role
from gpunode.facts.node import Node
from gpunode.result import Evidence, Fix

# containerd's docs: the newest configuration version that each release reads
_NEWEST = (((2, 3), 4), ((2, 0), 3), ((1, 3), 2), ((1, 0), 1))
# from the first of these releases until before the second (containerd pull requests 12891 and 13939)
_REFUSES_HIGHER = ((2, 3), (2, 3, 5))
HANDLER = "nvidia"


def containerd_config_version(node: Node) -> Verdict:
    role = containerd_role(node)
    if node.containerd is None or not role.used:
        return skip(role.reason)
    path = node.containerd.config_path
    try:
        config = node.containerd_config
    except ConfigError as error:
        return fail(
            "containerd's configuration can't be parsed",
            seen(path, error.message),
            fix=edit(node, path, None),
        )
    if config is None or not config.exists:
        return ok(f"{path} is absent: containerd runs with its defaults")
    return (
        _refused_drop_in(node, config)
        or _missing_import(node, config)
        or _too_new(node, config)
        or _passed_over(node, config)
        or ok(f"configuration version {config.version} suits containerd {_dotted(node)}")
    )


def _refused_drop_in(node: Node, config: ContainerdConfig) -> Verdict | None:
    """containerd 2.3.0 to 2.3.4 refuses an imported file of a higher version, k0s one of another version."""
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
    who = "k0s" if k0s else f"containerd {_dotted(node)}"
    kind = "of another version than" if k0s else "of a higher version than"
    fix = edit(node, wrong, line_of(text, "version"))
    if "nvidia-container-runtime" in text:  # gpunode writes the handler again, in the main file's version
        runtime = daemon.manager or "containerd"
        # k0s doesn't start with such a file, and configure-runtime reloads only what runs
        start = f"{fixes.restart_managed(runtime, daemon.unit)} && " if k0s else ""
        again = f"{start}gpunode configure-runtime --runtime {runtime}"
        fix = Fix(f"mv {wrong} {wrong}.disabled && {again}", True, "restart")
    return fail(f"{who} refuses an imported file {kind} {config.path}", *evidence, fix=fix)


def _k0s_drop_ins(node: Node) -> dict[str, int]:
    """Versions of the files that k0s imports itself, once it accepts them."""
    found = {}
    for path in node.host.glob(K0S_DROP_INS, "*.toml"):
        text = node.host.read_text(path) or ""
        try:
            found[path] = version_of(parse_toml(text, path), path, text)
        except ConfigError:
            continue
    return found


def _missing_import(node: Node, config: ContainerdConfig) -> Verdict | None:
    """A pattern may match nothing; without a file that is named containerd doesn't start."""
    if not config.missing_imports:
        return None
    one = config.missing_imports[0]
    line = line_of(node.host.read_text(one.importer) or "", one.pattern)
    evidence = seen(one.importer, f"imports {one.pattern}", line)
    return fail(
        f"containerd imports {one.path}, which isn't there", evidence, fix=edit(node, one.importer, line)
    )


def _too_new(node: Node, config: ContainerdConfig) -> Verdict | None:
    version = node.containerd.version if node.containerd else ()
    newest = next((number for release, number in _NEWEST if version >= release), None)
    over = [path for path, number in config.versions.items() if newest is not None and number > newest]
    if not over:
        return None
    line = line_of(node.host.read_text(over[0]) or "", "version")
    return fail(
        f"containerd {_dotted(node)} reads configuration versions up to {newest}",
        seen(over[0], f"version = {config.versions[over[0]]}", line),
        fix=edit(node, over[0], line),
    )


def _passed_over(node: Node, config: ContainerdConfig) -> Verdict | None:
    """Handlers or registries in a table that the version in force doesn't read: ignored without a word."""
    from gpunode.facts.containerd_versions import passed_over, version_in_force

    tables = passed_over(config)
    if not tables:
        return None
    one = tables[0]
    line = line_of(node.host.read_text(one.path) or "", f"{one.plugin}")
    evidence = [seen(one.path, f"{one.plugin}: {', '.join(one.what)}", line)]
    number = version_in_force(config)
    named = [path for path, tree in config.trees.items() if tree.get("version") == number][-1:]
    evidence += [seen(path, f"version = {number}") for path in named if path != one.path]
    goes_by = f"goes by version {number}" if named else f"finds no version, takes {number}"
    # without a registry of one's own images come from where they were made, which may be good enough
    judge = warn if one.what == ("registry",) else fail
    return judge(
        f'containerd {goes_by}, and passes over what is in "{one.plugin}"',
        *evidence,
        fix=edit(node, one.path, line),
    )


def edit(node: Node, path: str, line: int | None) -> Fix:
    """Correct a file and restart; never the one that a distribution renders, but what it is rendered from."""
    daemon = node.containerd
    restart = "systemctl restart containerd"
    if daemon is not None and daemon.manager:
        restart = fixes.restart_managed(daemon.manager, daemon.unit)
        if path == daemon.config_path:
            path, line = next(iter(sources(node.host, daemon)), ""), None
    edit = f"${{EDITOR:-vi}} {f'+{line} ' if line else ''}{path} && " if path else ""
    return Fix(f"{edit}{restart}", True, "restart")


def _dotted(node: Node) -> str:
    return ".".join(map(str, node.containerd.version if node.containerd else ())) or "(unknown)"


def judged(node: Node) -> ContainerdConfig | None:
    """The configuration, where anybody uses this containerd's CRI; one that nobody uses isn't even read."""
    return node.containerd_config if containerd_role(node).used else None


def containerd_cri_disabled(node: Node) -> Verdict:
    config = judged(node)
    if node.containerd is None or config is None:
        return skip(containerd_role(node).reason)
    if not config.disabled:
        return ok("the CRI is switched on")
    where = next(
        (path for path in config.files if "disabled_plugins" in (node.host.read_text(path) or "")), ""
    )
    path = where or config.path
    line = line_of(node.host.read_text(path) or "", "disabled_plugins")
    evidence = seen(path, f"disabled_plugins has {', '.join(config.disabled)}", line)
    return fail("containerd's CRI is switched off", evidence, fix=configure(node))


def containerd_not_restarted(node: Node) -> Verdict:
    config = judged(node)
    if node.containerd is None or config is None:
        return skip(containerd_role(node).reason)
    socket = node.containerd.socket
    state = node.host.socket_state(socket)
    if state == "denied":
        return skip(f"needs root to talk to {socket}")
    if state != "listening" and node.containerd.manager and not _kubelet_runs(node):
        return skip(f"{node.containerd.manager} starts this containerd, and isn't running itself")
    if state != "listening":
        unit = () if node.containerd.manager else seen_unit(node, "containerd.service")
        return fail("containerd isn't running", seen(socket, state), *unit, fix=_managed(node))
    handlers = told_handlers(node)
    if handlers is None:
        return _silent(node, socket)
    missing = sorted(set(map(str, config.runtimes)) - set(handlers))
    if not missing:
        return ok("the running containerd has what its file says")
    evidence = [_in_file(node, config, name) for name in missing]
    told = seen(f"CRI Status at {socket}", f"handlers {', '.join(handlers) or 'none'}")
    summary = "in the file, not in the running daemon: containerd wasn't restarted"
    return fail(summary, *evidence, told, fix=_managed(node))


def _kubelet_runs(node: Node) -> bool:
    return node.kubelet is not None and node.kubelet.process is not None


def _managed(node: Node) -> Fix | None:
    """A distribution's containerd is restarted by that distribution alone; None for the system's."""
    daemon = node.containerd
    if daemon is None or not daemon.manager:
        return None
    return Fix(fixes.restart_managed(daemon.manager, daemon.unit), True, "restart")


def configure(node: Node) -> Fix | None:
    """The same as for the system's, by the distribution's name; None for the system's."""
    manager = node.containerd.manager if node.containerd else ""
    command = f"gpunode configure-runtime --runtime {manager}"
    return Fix(command, True, "restart") if manager else None


def _silent(node: Node, socket: str) -> Verdict:
    """A daemon that listens and doesn't tell its handlers: it hangs, or its CRI isn't running."""
    try:
        node.cri  # noqa: B018 - read for its failure
    except DaemonError as error:
        if error.code == "timeout":
            return fail(
                "containerd runs, but its CRI doesn't answer", seen(socket, error.message), fix=_managed(node)
            )
        # before 1.6 the CRI only spoke v1alpha2, which looks the same from here
        if error.code == "cri-disabled" and node.containerd and node.containerd.version >= (1, 6):
            return fail(
                "the file has the CRI switched on, but the running containerd serves none",
                seen(socket, error.message),
            )
        return skip(f"containerd doesn't say what it runs with: {error.message}")
    return skip(f"containerd doesn't say what it runs with at {socket}")


def _in_file(node: Node, config: ContainerdConfig, name: str) -> Evidence:
    for path in config.files:
        line = line_of(node.host.read_text(path) or "", f"runtimes.{name}")
        if line:
            return seen(path, f'runtime "{name}"', line)
    return seen(config.path, f'runtime "{name}"')


def told_handlers(node: Node) -> tuple[str, ...] | None:
    try:
        return tuple(name for name in node.cri.handlers if name)
    except DaemonError:
        return None


def running_config(node: Node) -> dict[str, Any]:
    try:
        return dict(node.cri.config)
    except DaemonError:
        return {}


WHERE = (
    " Judged where the kubelet talks to this containerd, or where it is the node's only engine; beside "
    "Docker without a kubelet its CRI isn't needed."
)

CHECKS = (
    Check(
        id="containerd-config-version",
        title="containerd reads its file as it was meant",
        layer="containerd",
        severity="error",
        looks_at="the file that containerd reads and its imports: valid TOML, a version that it knows, "
        "files for all imports, of no higher version than the main file's, and runtimes and registries in a "
        "table that the version in force reads." + WHERE,
        why=(
            "containerd refuses a version newer than itself, and 2.3.0 to 2.3.4 refuse an imported file of a "
            "higher version than the main one. Up to 2.2, the last file that names a version decides for all "
            "of them: what another version's table has is ignored without a message."
        ),
        remedy=fixes.EDIT_CONTAINERD,
        run=containerd_config_version,
        classes=ENGINE_NODES,
        unless=NO_ENGINE,
        blocked_by=("pci-no-gpu",),
        preflight=("containerd", "kubernetes"),
        refs=("https://github.com/containerd/containerd/blob/main/docs/man/containerd-config.toml.5.md",),
    ),
    Check(
        id="containerd-cri-disabled",
        title="containerd's CRI is switched on",
        layer="containerd",
        severity="error",
        looks_at="disabled_plugins in containerd's file and its imports." + WHERE,
        why=(
            "Docker's containerd.io package switches the CRI off. The kubelet then fails with 'unknown "
            "service runtime.v1.RuntimeService', and a runtime added to the file is never read."
        ),
        remedy=fixes.CONFIGURE_CONTAINERD,
        run=containerd_cri_disabled,
        classes=ENGINE_NODES,
        unless=NO_ENGINE,
        blocked_by=("pci-no-gpu", "containerd-config-version"),
        refs=(
            "https://github.com/NVIDIA/nvidia-container-toolkit/issues/1430",
            "https://github.com/NVIDIA/k8s-device-plugin/issues/406",
        ),
    ),
    Check(
        id="containerd-not-restarted",
        title="containerd runs with what its file says",
        layer="containerd",
        severity="error",
        looks_at="containerd's socket, whether its CRI answers within 3 seconds, and the runtimes in its "
        "file against the handlers that the daemon names (CRI Status)." + WHERE,
        why=(
            "containerd reads its file only when it starts. Until then the handler exists on disk alone: no "
            'runtime for "nvidia" is configured. Running containers survive a restart.'
        ),
        remedy=fixes.RESTART_CONTAINERD,
        run=containerd_not_restarted,
        classes=ENGINE_NODES,
        unless=NO_ENGINE,
        blocked_by=(
            *("pci-no-gpu", "containerd-config-version", "containerd-cri-disabled", "k3s-edited-generated"),
            "containerd-imports-clobber",
        ),
        refs=("https://kubernetes.io/docs/setup/production-environment/container-runtimes/#containerd",),
    ),
)
