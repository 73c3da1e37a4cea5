"""Checks of containerd's configuration files: they are valid and take effect, imported ones don't remove
settings, and containerd reads the one that defines the handler."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gpunode.checks import fixes
from gpunode.checks.finding import Fix
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
    unparsable,
    warn,
)
from gpunode.errors import ConfigError, DaemonError
from gpunode.facts import tables
from gpunode.facts.containerd import (
    DEFAULT_CONFIG,
    ContainerdConfig,
    Lost,
    is_lost,
    lost_settings,
    passed_over,
    version_in_force,
    version_of,
)
from gpunode.facts.daemons import Daemon, manager
from gpunode.facts.distributions import K0S_DROP_INS, k0s_manages, sources
from gpunode.facts.engines import containerd_role
from gpunode.facts.node import Node
from gpunode.facts.registry import DISTRIBUTIONS
from gpunode.facts.toml import KeyPath, as_key, as_value, headers, parse_toml
from gpunode.host.redact import without_secrets

# containerd's docs: the newest configuration version that each release reads
_NEWEST = (((2, 3), 4), ((2, 0), 3), ((1, 3), 2), ((1, 0), 1))
# from the first of these releases until before the second (containerd pull requests 12891 and 13939)
_REFUSES_HIGHER = ((2, 3), (2, 3, 5))
WHERE = (
    " Checked if the kubelet uses this containerd, or if it is the node's only engine. Beside "
    "Docker without a kubelet, the CRI isn't needed."
)


@engine_check(
    "containerd-config-version",
    title="containerd's configuration is valid and takes effect",
    looks_at="the file that containerd reads and its imports: valid TOML, a supported version, an existing "
    "file for each import, no import of a higher version than the main file, and runtimes and "
    "registries in a table that the effective version reads." + WHERE,
    fix=fixes.EDIT_CONTAINERD,
    preflight=("containerd", "kubernetes"),
    reboot=True,
    refs=("https://github.com/containerd/containerd/blob/main/docs/man/containerd-config.toml.5.md",),
)
@if_used("containerd")
def containerd_config_version(node: Node, daemon: Daemon) -> Verdict:
    """containerd doesn't start with a file that it can't parse, or of a version that it doesn't support. Up
    to 2.2, the last file that sets a version determines it for all files: containerd silently ignores tables
    of another version.
    """
    try:
        config = loaded(node)
    except ConfigError as error:
        return _unparsable(node, daemon, error)
    if not config.exists:
        return ok(f"{config.path} doesn't exist: containerd uses its defaults")
    return (
        _refused_drop_in(node, daemon, config)
        or _missing_import(node, daemon, config)
        or _too_new(node, daemon, config)
        or _passed_over(node, daemon, config)
        or ok(f"configuration version {config.version} is supported by containerd {_release(daemon)}")
    )


def _refused_drop_in(node: Node, daemon: Daemon, config: ContainerdConfig) -> Verdict | None:
    """Imported files of a higher version (containerd 2.3.0 to 2.3.4) or a different version (k0s) are
    refused."""
    since, until = _REFUSES_HIGHER
    k0s = daemon.manager == "k0s"
    if daemon.version < since or (daemon.version >= until and not k0s):
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
        seen_in(node.host, wrong, f"version = {imported[wrong]}", "version"),
        seen_in(node.host, config.path, f"version = {own}", "version"),
    )
    subject = "k0s" if k0s else f"containerd {_release(daemon)}"
    kind = "of a different version than" if k0s else "of a higher version than"
    fix = edit(node, daemon, wrong, evidence[0].line, _to_version(text, imported[wrong], own))
    if "nvidia-container-runtime" in text:  # gpunode writes the handler again, in the main file's version
        runtime = daemon.manager or "containerd"
        # k0s doesn't start with such a file, and configure-runtime reloads only what runs
        again = fixes.configure(runtime)
        if k0s:
            again = again.after(fixes.restart_managed(runtime, daemon.unit).command)
        fix = again.after(f"mv {wrong} {wrong}.disabled")
    what = f"{subject} refuses to load an imported file {kind} {config.path}"
    return fail(what, *evidence, fix=fix, why="containerd doesn't start until it accepts each imported file.")


def _unparsable(node: Node, daemon: Daemon, error: ConfigError) -> Verdict:
    """The file of `error` is containerd's own or one that it imports."""
    where, change = unparsable(node.host, error)
    _, _, reason = where.value.partition(": ")  # after the column
    if reason.endswith(" twice"):
        change = f"{reason}: delete one of the two, or move its settings into the other"
    process = daemon.process
    running = "still running, with the configuration that it loaded earlier" if process else "not running"
    state = seen(f"/proc/{process.pid}" if process else "/proc", f"containerd is {running}")
    why = "containerd doesn't start with a file that it can't parse."
    fix = fixes.restart_later(edit(node, daemon, where.source, where.line, change))
    return fail("containerd's configuration can't be parsed", where, state, fix=fix, why=why)


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


def _missing_import(node: Node, daemon: Daemon, config: ContainerdConfig) -> Verdict | None:
    """A missing imported file keeps containerd from starting; a pattern without matches does not."""
    if not config.missing_imports:
        return None
    missing = config.missing_imports[0]
    evidence = seen_in(node.host, missing.importer, f"imports {missing.pattern}", missing.pattern)
    fix = edit(node, daemon, missing.importer, evidence.line, f'delete "{missing.pattern}" from imports')
    what = f"containerd imports {missing.path}, which doesn't exist"
    return fail(what, evidence, fix=fix, why="containerd doesn't start without this file.")


def _too_new(node: Node, daemon: Daemon, config: ContainerdConfig) -> Verdict | None:
    newest = next((number for release, number in _NEWEST if daemon.version >= release), None)
    over = [path for path, number in config.versions.items() if newest is not None and number > newest]
    if newest is None or not over:
        return None
    path, version = over[0], config.versions[over[0]]
    evidence = seen_in(node.host, path, f"version = {version}", "version")
    change = _to_version(node.host.read_text(path) or "", version, newest)
    return fail(
        f"{path} has version {version}, but containerd {_release(daemon)} accepts at most {newest}",
        evidence,
        fix=edit(node, daemon, path, evidence.line, change),
        why="containerd doesn't start with a file of a version that it doesn't support.",
    )


def _to_version(text: str, present: int, desired: int) -> str:
    """How to bring a file to a version of containerd's configuration, with its names of the CRI plugin."""
    change = f"change version = {present} to version = {desired}"
    if desired == 2 and "io.containerd.cri.v1." in text:
        change += "; rename the io.containerd.cri.v1 plugins to io.containerd.grpc.v1.cri"
    return change


def _passed_over(node: Node, daemon: Daemon, config: ContainerdConfig) -> Verdict | None:
    """Handlers or registries in a table that the effective version doesn't read: containerd ignores them
    silently."""
    tables = passed_over(config)
    if not tables:
        return None
    table = tables[0]
    evidence = [seen_in(node.host, table.path, f"{table.plugin}: {', '.join(table.what)}", table.plugin)]
    line = evidence[0].line
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
    fix = edit(node, daemon, table.path, line, change)
    if node.kubelet is not None and any("SystemdCgroup" in setting for setting in table.what):
        fix = fixes.new_cgroup_driver(node, fix, "containerd")
    return judge(summary, *evidence, fix=fix, why=why, reboot=False)  # it starts as before


def edit(node: Node, daemon: Daemon, path: str, line: int | None, change: str) -> Fix:
    """Edit a file, and restart containerd if it can then be parsed. If a distribution renders the file, edit
    its template instead."""
    if daemon.manager:
        restart = fixes.restart_managed(daemon.manager, daemon.unit)
        if path == daemon.config_path:
            path, line = next(iter(sources(node.host, daemon)), ""), None
    else:
        restart = fixes.RESTART_CONTAINERD
        if node.host.which("containerd"):
            option = f" --config {daemon.config_path}" if daemon.config_path != DEFAULT_CONFIG else ""
            restart = restart.after(f"containerd{option} config dump > /dev/null")
    return fixes.edit_file(path, line, change, restart) if path else restart


def _release(daemon: Daemon) -> str:
    return daemon.release or "(unknown)"


def loaded(node: Node) -> ContainerdConfig:
    """The configuration of a node with containerd; `ConfigError` if it can't be parsed."""
    assert node.containerd_config is not None
    return node.containerd_config


def if_parsable(node: Node) -> ContainerdConfig | None:
    """containerd's configuration; None without one, or if it can't be parsed, which
    containerd-config-version reports."""
    try:
        return node.containerd_config
    except ConfigError:
        return None


def another_containerd(node: Node) -> bool:
    """Whether the system's containerd runs beside that of a Kubernetes distribution."""
    return any(process.name == "containerd" and not manager(node.host, process) for process in node.processes)


def running_config(node: Node) -> dict[str, Any]:
    try:
        return dict(node.cri.config)
    except DaemonError:
        return {}


# Imported files: settings that they replace.

_PROGRAM = "nvidia-container-runtime"
# without these, pods without GPUs fail
_VITAL = (
    "sandbox_image",
    "SystemdCgroup",
    "snapshotter",
    "config_path",
    "bin_dir",
    "conf_dir",
    "mirrors",
    "runtimes",
)
_MOST = 8


@engine_check(
    "containerd-imports-clobber",
    title="Imported files don't remove settings",
    looks_at="settings of containerd's file that an imported one removes because it replaces the whole "
    "table, against what the running daemon has loaded (CRI Status). From 2.0 on, files are merged "
    "key by key." + WHERE,
    fix=fixes.CONFIGURE_CONTAINERD,
    blocked_by=("pci-no-gpu", "containerd-config-version", "containerd-cri-disabled"),
    refs=("https://github.com/containerd/containerd/issues/5837",),
    table=tables.TABLE,
)
@if_used("containerd")
def containerd_imports_clobber(node: Node, daemon: Daemon) -> Verdict:
    """containerd before 2.0 uses only the last file's version of a plugin's table. A file that only adds the
    nvidia handler removes the pause image, the registries and the cgroup driver: other pods fail.
    """
    config = loaded(node)
    lost = lost_settings(config)
    if not lost:
        return ok("no imported file removes settings")
    running = running_config(node)
    if not running:
        without = _without_cri(node, daemon, config, lost)
        return without or skip("containerd doesn't report its configuration")
    removed = sorted(
        (setting for setting in lost if is_lost(running, setting)), key=lambda setting: not _vital(setting)
    )
    if not removed:
        return ok("imported files replace tables, but no setting is lost")
    names = ", ".join(setting.name for setting in removed[:3]) + (" and more" if len(removed) > 3 else "")
    judge = fail if _vital(removed[0]) else warn
    files = {setting.by for setting in removed}
    what = f"{removed[0].by} removes" if len(files) == 1 else "imported files remove"
    return _clobbered(node, daemon, config, judge, f"{what} settings of containerd: {names}", removed)


def _vital(lost: Lost) -> bool:
    return any(key in lost.keys for key in _VITAL)


def _without_cri(
    node: Node, daemon: Daemon, config: ContainerdConfig, lost: Sequence[Lost]
) -> Verdict | None:
    """containerd 1.x doesn't load its CRI plugin without its default handler."""
    try:
        node.cri  # noqa: B018 - read for its failure
    except DaemonError as error:
        name = config.default_runtime
        removed = [setting for setting in lost if setting.keys[:3] == ("containerd", "runtimes", name)]
        if error.code == "cri-disabled" and removed and name not in config.runtimes:
            text = (
                f"an imported file removes the default handler {name}, and the CRI plugin "
                "doesn't load without it"
            )
            return _clobbered(node, daemon, config, fail, text, removed)
    return None


def _clobbered(
    node: Node,
    daemon: Daemon,
    config: ContainerdConfig,
    judge: Callable[..., Verdict],
    summary: str,
    removed: Sequence[Lost],
) -> Verdict:
    plugin, file = config.plugin, removed[0].by
    places = (seen_in(node.host, lost.file, str(lost), lost.keys[-1]) for lost in removed[:_MOST])
    change = (
        "add these settings in this order, so that the line numbers below remain right. To give up, leave "
        "vi with :cq"
    )
    here = [lost for lost in removed if lost.by == file]
    fix = edit(node, daemon, file, None, "\n".join((change, *_pasted(node, plugin, here))))
    if node.kubelet is not None and any(lost.keys[-1] == "SystemdCgroup" for lost in here):
        fix = fixes.new_cgroup_driver(node, fix, "containerd")
    lacks = f'a table "{plugin}" without these settings: the running containerd lacks them'
    return judge(summary, *places, seen_in(node.host, file, lacks, plugin), fix=fix)


def _pasted(node: Node, plugin: str, removed: Sequence[Lost]) -> Iterator[str]:
    """Settings of one file as TOML, by table, from its end to its start: an added line moves those below it.
    A table that the file has is named by its line, because a second header of the same table is a syntax
    error. A possible password is not shown."""
    numbers = {
        table: number for number, table in headers((node.host.read_text(removed[0].by) or "").splitlines())
    }
    tables: dict[KeyPath, list[Lost]] = {}
    for setting in removed:
        tables.setdefault(("plugins", plugin, *setting.keys[:-1]), []).append(setting)
    for table, settings in sorted(tables.items(), key=lambda item: -numbers.get(item[0], sys.maxsize)):
        header = f"[{as_key(table)}]"
        if table in numbers:
            yield f"# below line {numbers[table] + 1}, {header}:"
        else:
            yield from ("# at the end:", header)
        for setting in settings:
            key = as_key(setting.keys[-1:])
            setting_line = without_secrets(f"{key} = {as_value(setting.value)}")
            yield f"# {key}: copy it from {setting.file}" if setting.secret else setting_line


@check(
    "containerd-config-drift",
    title="containerd reads the file that defines the nvidia handler",
    severity="info",
    looks_at=f"{DEFAULT_CONFIG}, on nodes where k3s, rke2, k0s or microk8s provides the kubelet's "
    "containerd and no other containerd runs.",
    fix=fixes.CONFIGURE_CONTAINERD,
    blocked_by=("pci-no-gpu", "containerd-runtime-missing"),
    refs=("https://github.com/NVIDIA/nvidia-container-toolkit/issues/982",),
)
def containerd_config_drift(node: Node) -> Verdict:
    """The containerd of a Kubernetes distribution reads its own configuration file. Changes to the system's
    file have no effect on it.
    """
    daemon = node.containerd
    if daemon is None or daemon.manager not in DISTRIBUTIONS or not containerd_role(node).used:
        return skip("the kubelet's containerd doesn't come from a Kubernetes distribution")
    text = node.host.read_text(DEFAULT_CONFIG) or ""
    if _PROGRAM not in text:
        return ok(f"{DEFAULT_CONFIG}, which {daemon.manager} doesn't read, has no NVIDIA settings")
    if another_containerd(node):
        return ok(f"another containerd reads {DEFAULT_CONFIG}")
    return note(
        f"{DEFAULT_CONFIG} defines the nvidia handler, but {daemon.manager} reads its own file",
        seen_in(node.host, DEFAULT_CONFIG, _PROGRAM, _PROGRAM),
        seen(daemon.config_path, daemon.config_source),
        fix=fixes.configure(daemon.manager),
    )
