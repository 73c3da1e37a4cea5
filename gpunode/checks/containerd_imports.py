"""Checks of containerd's imported files: settings that they replace, and a file that containerd doesn't
read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence

from gpunode.checks import fixes
from gpunode.checks.containerd import WHERE, edit, judged, running_config
from gpunode.checks.docker import line_of
from gpunode.checks.model import ENGINE_NODES, NO_ENGINE, Verdict, check, fail, note, ok, seen, skip, warn
from gpunode.errors import DaemonError
from gpunode.facts import tables
from gpunode.facts.containerd import DEFAULT_CONFIG, Lost, is_lost, lost_settings
from gpunode.facts.distributions import DISTRIBUTIONS, manager
from gpunode.facts.engines import containerd_role
from gpunode.facts.node import Node
from gpunode.facts.toml import KeyPath, as_key, as_value, headers
from gpunode.host.redact import without_secrets

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


@check(
    "containerd-imports-clobber",
    "containerd",
    title="Imported files don't remove settings",
    looks_at="settings of containerd's file that an imported one removes because it replaces the whole "
    "table, against what the running daemon has loaded (CRI Status). From 2.0 on, files are merged "
    "key by key." + WHERE,
    fix=fixes.CONFIGURE_CONTAINERD,
    classes=ENGINE_NODES,
    unless=NO_ENGINE,
    blocked_by=("pci-no-gpu", "containerd-config-version", "containerd-cri-disabled"),
    refs=("https://github.com/containerd/containerd/issues/5837",),
    table=tables.TABLE,
)
def containerd_imports_clobber(node: Node) -> Verdict:
    """containerd before 2.0 uses only the last file's version of a plugin's table. A file that only adds the
    nvidia handler removes the pause image, the registries and the cgroup driver: other pods fail.
    """
    config = judged(node)
    if node.containerd is None or config is None:
        return skip(containerd_role(node).reason)
    lost = lost_settings(config)
    if not lost:
        return ok("no imported file removes settings")
    running = running_config(node)
    if not running:
        return _without_cri(node, lost) or skip("containerd doesn't report its configuration")
    removed = tuple(
        sorted(
            (setting for setting in lost if is_lost(running, setting)),
            key=lambda setting: not _vital(setting),
        )
    )
    if not removed:
        return ok("imported files replace tables, but no setting is lost")
    names = ", ".join(setting.name for setting in removed[:3]) + (" and more" if len(removed) > 3 else "")
    judge = fail if _vital(removed[0]) else warn
    files = {setting.by for setting in removed}
    what = f"{removed[0].by} removes" if len(files) == 1 else "imported files remove"
    return _finding(node, judge, f"{what} settings of containerd: {names}", removed)


def _vital(lost: Lost) -> bool:
    return any(key in lost.keys for key in _VITAL)


def _without_cri(node: Node, lost: tuple[Lost, ...]) -> Verdict | None:
    """containerd 1.x doesn't load its CRI plugin without its default handler."""
    try:
        node.cri  # noqa: B018 - read for its failure
    except DaemonError as error:
        config = node.containerd_config
        name = config.default_runtime if config else ""
        removed = tuple(setting for setting in lost if setting.keys[:3] == ("containerd", "runtimes", name))
        if error.code == "cri-disabled" and config and removed and name not in config.runtimes:
            text = (
                f"an imported file removes the default handler {name}, and the CRI plugin "
                "doesn't load without it"
            )
            return _finding(node, fail, text, removed)
    return None


def _finding(node: Node, judge: Callable[..., Verdict], summary: str, removed: tuple[Lost, ...]) -> Verdict:
    plugin = node.containerd_config.plugin if node.containerd_config else ""
    line = line_of(node.host.read_text(removed[0].by) or "", plugin)
    places = (seen(setting.file, str(setting), _line(node, setting)) for setting in removed[:_MOST])
    change = (
        "add these settings in this order, so that the line numbers below remain right. To give up, leave "
    )
    change += "vi with :cq"
    here = [setting for setting in removed if setting.by == removed[0].by]
    fix = edit(node, removed[0].by, None, "\n".join((change, *_pasted(node, plugin, here))))
    if node.kubelet is not None and any(setting.keys[-1] == "SystemdCgroup" for setting in here):
        fix = fixes.new_cgroup_driver(node, fix, "containerd")
    table = seen(
        removed[0].by, f'a table "{plugin}" without these settings: the running containerd lacks them', line
    )
    return judge(summary, *places, table, fix=fix)


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


def _line(node: Node, lost: Lost) -> int | None:
    return line_of(node.host.read_text(lost.file) or "", lost.keys[-1])


@check(
    "containerd-config-drift",
    "containerd",
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
    if any(process.name == "containerd" and not manager(node.host, process) for process in node.processes):
        return ok(f"another containerd reads {DEFAULT_CONFIG}")
    return note(
        f"{DEFAULT_CONFIG} defines the nvidia handler, but {daemon.manager} reads its own file",
        seen(DEFAULT_CONFIG, _PROGRAM, line_of(text, _PROGRAM)),
        seen(daemon.config_path, daemon.config_source),
        fix=fixes.configure(daemon.manager),
    )
