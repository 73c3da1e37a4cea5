"""k3s and rke2: they write containerd's file anew whenever they start."""

from __future__ import annotations

from collections.abc import Mapping

from gpunode.checks import fixes
from gpunode.checks.fixes import everywhere
from gpunode.checks.model import Check, Verdict, fail, ok, seen, skip, warn
from gpunode.errors import ConfigError, DaemonError
from gpunode.facts.daemons import Daemon
from gpunode.facts.gpu_ways import taken_way
from gpunode.facts.node import Node
from gpunode.result import Fix

_RUNTIME = "nvidia-container-runtime"
# where both look for it, in this order (k3s pkg/agent/containerd/runtimes.go)
_SEARCHED = ("/usr/local/nvidia/toolkit", "/usr/bin")
_OLD, _NEW = "config.toml.tmpl", "config-v3.toml.tmpl"
_MARK = "DO NOT EDIT"
_BASE = 'template "base"'
_SYSTEM = "/etc/containerd"
_OTHER_WAY = "GPUs take another way than the nvidia runtime here"
_OTHERS = "this node's containerd isn't k3s' or rke2's"


def _daemon(node: Node) -> Daemon | None:
    found = node.containerd
    return found if found is not None and found.manager in ("k3s", "rke2") else None


def _handlers(node: Node) -> tuple[str, ...] | None:
    """Of the running containerd; None if it doesn't tell."""
    try:
        return tuple(name for name in node.cri.handlers if name)
    except DaemonError:
        return None


def _blind(node: Node, handlers: tuple[str, ...] | None) -> bool:
    """Whether GPUs need a handler here and there is none."""
    if handlers is None or any(name.startswith("nvidia") for name in handlers):
        return False
    return taken_way(node, cdi=node.cri.config.get("enableCDI") is True) is None


def _templates(node: Node, daemon: Daemon) -> Mapping[str, str]:
    """Text by name, of those that are there."""
    directory = daemon.config_path.rpartition("/")[0]
    texts = {name: node.host.read_text(f"{directory}/{name}") for name in (_NEW, _OLD)}
    return {name: text for name, text in texts.items() if text is not None}


def _restart(daemon: Daemon) -> Fix:
    return Fix(fixes.restart_managed(daemon.manager, daemon.unit), True, "restart")


def k3s_nvidia_not_detected(node: Node) -> Verdict:
    daemon = _daemon(node)
    if daemon is None or daemon.process is None:
        return skip(_OTHERS)
    handlers = _handlers(node)
    if handlers is None:
        return skip("the running containerd doesn't tell its handlers")
    if any(name.startswith("nvidia") for name in handlers):
        return ok(f"{daemon.manager} has found the nvidia runtime")
    if not _blind(node, handlers):
        return skip(_OTHER_WAY)
    places = (f"{place}/{_RUNTIME}" for place in _SEARCHED)
    path = next((one for one in places if node.host.executable(one)), None)
    if path is None or any(_BASE not in text for text in _templates(node, daemon).values()):
        return skip("nothing that it looks for by itself is here")
    # when it came here: a package keeps the time at which its file was built as the other one
    found = node.host.stat(path)
    if found is None or (node.host.live and found.st_ctime < daemon.process.started):
        return skip(f"{path} was there before {daemon.manager} started")
    return fail(
        f"{daemon.manager} was started before the nvidia runtime was installed",
        seen(f"CRI Status at {daemon.socket}", f"handlers {', '.join(handlers) or 'none'}"),
        seen(path, f"came after {daemon.manager} was started" if node.host.live else "is there now"),
        fix=_restart(daemon),
    )


def k3s_wrong_template(node: Node) -> Verdict:
    daemon = _daemon(node)
    if daemon is None:
        return skip(_OTHERS)
    templates = _templates(node, daemon)
    directory = daemon.config_path.rpartition("/")[0]
    if not templates or not daemon.version:
        return ok(f"{daemon.manager} uses its own template")
    used = _NEW if daemon.version >= (2,) and _NEW in templates else _OLD
    version = ".".join(map(str, daemon.version))
    if used not in templates:
        return _unread(node, f"{directory}/{_NEW}", f"containerd {version}", daemon)
    text = templates[used]
    handlers = _handlers(node)
    blind = _blind(node, handlers)
    if blind and _BASE not in text and "nvidia" not in text:
        return fail(
            f"{daemon.manager}'s template leaves out the nvidia runtime",
            seen(f"{directory}/{used}", f"neither includes {{{{ {_BASE} . }}}} nor has a runtime nvidia"),
            seen(f"CRI Status at {daemon.socket}", f"handlers {', '.join(handlers or ())}"),
            fix=Fix(f"${{EDITOR:-vi}} {directory}/{used} && {_restart(daemon).command}", True, "restart"),
        )
    unread = templates.get(_OLD, "") if used == _NEW else ""
    if "nvidia" in unread and "nvidia" not in text and _BASE not in text:
        return _unread(node, f"{directory}/{_OLD}", f"containerd {version}, beside {_NEW}", daemon)
    return ok(f"{daemon.manager} renders {used}")


def _unread(node: Node, path: str, why: str, daemon: Daemon) -> Verdict:
    handlers = _handlers(node)
    judge = fail if _blind(node, handlers) and "nvidia" in (node.host.read_text(path) or "") else warn
    summary = f"{daemon.manager} doesn't read the template that is here"
    fix = _configure(daemon) if judge is fail else Fix(f"mv {path} {path}.old")
    return judge(summary, seen(path, f"unread with {why}"), fix=fix)


def _configure(daemon: Daemon) -> Fix:
    return Fix(f"gpunode configure-runtime --runtime {daemon.manager}", True, "restart")


def k3s_edited_generated(node: Node) -> Verdict:
    daemon = _daemon(node)
    if daemon is None or daemon.process is None:
        return skip(_OTHERS)
    text = node.host.read_text(daemon.config_path) or ""
    if _MARK not in text.partition("version")[0]:
        return ok(f"{daemon.config_path} isn't marked as generated")
    handlers = _handlers(node)
    try:
        config = node.containerd_config
    except ConfigError:
        config = None
    if handlers is None or config is None:
        return skip("what runs and what is in the file can't be compared")
    # what was rendered at the start runs; only runtimes that stand in this very file are judged
    added = [name for name in sorted(config.runtimes) if name not in handlers and f".{name}" in text]
    if not added:
        return ok(f"{daemon.config_path} is as {daemon.manager} wrote it")
    return fail(
        f"{daemon.config_path} was edited, and {daemon.manager} rewrites it at each start",
        seen(daemon.config_path, f"runtime {', '.join(added)}, which {daemon.manager} doesn't run with"),
        seen(f"CRI Status at {daemon.socket}", f"handlers {', '.join(handlers) or 'none'}"),
        fix=_configure(daemon),
    )


def k3s_nvidia_wrong_root(node: Node) -> Verdict:
    from gpunode.facts.distributions import manager

    daemon = _daemon(node)
    if daemon is None:
        return skip(_OTHERS)
    handlers = _handlers(node)
    if handlers is None:
        return skip("the running containerd doesn't tell its handlers")
    if any(name.startswith("nvidia") for name in handlers):
        return ok(f"{daemon.manager} has the nvidia runtime")
    if not _blind(node, handlers):
        return skip(_OTHER_WAY)
    if any(one.name == "containerd" and not manager(node.host, one) for one in node.processes):
        return ok(f"another containerd reads {_SYSTEM}")
    paths = [f"{_SYSTEM}/config.toml", *node.host.glob(f"{_SYSTEM}/conf.d", "*.toml")]
    for path in paths:
        lines = (node.host.read_text(path) or "").splitlines()
        for number, line in enumerate(lines, 1):
            if f"/{_RUNTIME}" in line and not line.lstrip().startswith("#"):
                return fail(
                    f"the nvidia runtime was set up for another containerd than {daemon.manager}'s",
                    seen(path, line.strip(), number),
                    seen(f"CRI Status at {daemon.socket}", f"handlers {', '.join(handlers) or 'none'}"),
                    fix=_configure(daemon),
                )
    return ok(f"nothing is set up for a containerd other than {daemon.manager}'s")


_BELOW = ("pci-no-gpu", "containerd-config-version")
_DOCS = "https://docs.k3s.io/advanced"
CHECKS = (
    Check(
        id="k3s-edited-generated",
        title="The file that k3s or rke2 generates is as they wrote it",
        layer="kubelet",
        severity="error",
        looks_at=(
            "runtimes in the generated config.toml that the running containerd doesn't have: k3s and rke2 "
            "write the file before they start containerd, so somebody added them since."
        ),
        why=(
            "k3s and rke2 rewrite this file at each start. Whatever was added is gone then, before "
            "containerd has read it once. A template beside it stays."
        ),
        remedy=everywhere("gpunode configure-runtime --runtime k3s", "restart"),
        run=k3s_edited_generated,
        blocked_by=_BELOW,
        needs=("kubelet", "containerd"),
        refs=(f"{_DOCS}#configuring-containerd",),
    ),
    Check(
        id="k3s-wrong-template",
        title="k3s or rke2 reads the template that is here",
        layer="kubelet",
        severity="error",
        looks_at=(
            f"{_OLD} and {_NEW} beside the generated file: containerd 1.x only has the first, 2.x takes the "
            "second before the first. One that is read must include the base or have the runtime itself."
        ),
        why=(
            "A template that isn't read does nothing, without a word. One copied from an old release "
            "keeps what k3s finds by itself, the nvidia runtime too, out of containerd's file."
        ),
        remedy=everywhere("gpunode configure-runtime --runtime k3s", "restart"),
        run=k3s_wrong_template,
        blocked_by=_BELOW,
        needs=("kubelet", "containerd"),
        refs=(f"{_DOCS}#configuring-containerd",),
    ),
    Check(
        id="k3s-nvidia-wrong-root",
        title="The nvidia runtime was set up for the containerd that k3s or rke2 runs",
        layer="kubelet",
        severity="error",
        looks_at=(
            "/etc/containerd/config.toml and conf.d on a node whose kubelet uses k3s' or rke2's containerd, "
            "where that one has no nvidia handler (CRI Status) and no other containerd runs."
        ),
        why=(
            "k3s and rke2 never read /etc/containerd. The GPU operator and nvidia-ctk write there unless "
            "they are told CONTAINERD_CONFIG and CONTAINERD_SOCKET."
        ),
        remedy=everywhere("gpunode configure-runtime --runtime k3s", "restart"),
        run=k3s_nvidia_wrong_root,
        blocked_by=(*_BELOW, "k3s-edited-generated", "k3s-wrong-template"),
        needs=("kubelet", "containerd"),
        refs=(
            "https://docs.nvidia.com/datacenter/cloud-native/gpu-operator/latest/getting-started.html",
            "https://docs.rke2.io/advanced",
        ),
    ),
    Check(
        id="k3s-nvidia-not-detected",
        title="k3s or rke2 has found the nvidia runtime",
        layer="kubelet",
        severity="error",
        looks_at=(
            f"{_RUNTIME} in {' and '.join(_SEARCHED)}, when it came there and when containerd was started, "
            "and the handlers that containerd names (CRI Status). A template of one's own is left alone."
        ),
        why=(
            "k3s and rke2 look for the runtime once, when they start. Installed later it is unknown: 'no "
            'runtime for "nvidia" is configured\'.'
        ),
        remedy=everywhere("systemctl restart k3s", "restart"),
        run=k3s_nvidia_not_detected,
        blocked_by=(*_BELOW, "k3s-edited-generated", "k3s-wrong-template", "k3s-nvidia-wrong-root"),
        needs=("kubelet", "containerd"),
        refs=(f"{_DOCS}#nvidia-container-runtime",),
    ),
)
