"""Checks of Kubernetes distributions: microk8s, k0s, k3s, rke2, cri-dockerd and kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from gpunode.checks import fixes
from gpunode.checks.containerd import reported_handlers, seen_handlers
from gpunode.checks.containerd_config import another_containerd, if_parsable
from gpunode.checks.finding import RESTARTS_KUBERNETES, Fix
from gpunode.checks.model import Verdict, check, fail, if_reported, line_in, note, ok, seen, skip, warn
from gpunode.facts.daemons import Daemon
from gpunode.facts.distributions import K0S_DROP_INS, k0s_manages
from gpunode.facts.gpu_use import used_method
from gpunode.facts.kubelet import DEVICE_PLUGINS, ROOT, SNAP_ROOT
from gpunode.facts.node import Node
from gpunode.facts.toolkit import BY_MOUNTS
from gpunode.output.result import many

containerd_check = partial(check, needs=("kubelet", "containerd"))


@check(
    "microk8s-paths",
    title="Device plugins find the microk8s kubelet",
    looks_at=f"the directory where the microk8s kubelet accepts device plugins, and whether {ROOT} leads to "
    "it.",
    fix=Fix(f"mv {ROOT} {ROOT}.old && ln -s {SNAP_ROOT} {ROOT}"),
    preflight=("kubernetes",),
    blocked_by=("pci-no-gpu", "kubelet-not-running"),
    needs=("kubelet",),
    refs=("https://microk8s.io/docs/addon-gpu",),
)
def microk8s_paths(node: Node) -> Verdict:
    """Device plugins mount /var/lib/kubelet/device-plugins. microk8s links this path to its own directory
    only if it doesn't exist at installation; an earlier kubelet may have left it.
    """
    kubelet = node.kubelet
    if kubelet is None or kubelet.process is None or kubelet.process.name != "kubelite":
        return skip("this node's kubelet isn't the microk8s kubelet")
    listens = f"{SNAP_ROOT}/device-plugins/kubelet.sock"
    if node.host.socket_state(listens) != "listening":
        return ok("the microk8s kubelet has its sockets in the usual directory")
    if node.host.realpath(ROOT) == node.host.realpath(SNAP_ROOT):
        return ok(f"{ROOT} leads to the microk8s directory")
    state = node.host.socket_state(f"{DEVICE_PLUGINS}/kubelet.sock")
    if state in ("listening", "denied"):
        return ok(f"a kubelet listens in {DEVICE_PLUGINS}")
    there = "another directory" if node.host.is_dir(ROOT) else "doesn't exist"
    aside = f"mv {ROOT} {ROOT}.old && " if node.host.is_dir(ROOT) else ""
    return fail(
        f"{ROOT} doesn't lead to the directory of the microk8s kubelet",
        seen(listens, "the kubelet listens here"),
        seen(ROOT, there),
        fix=Fix(
            f"{aside}ln -s {SNAP_ROOT} {ROOT}",
            note="Running pods continue; a device plugin must restart to use the new directory",
        ),
    )


@containerd_check(
    "k0s-dropin",
    title="k0s reads its drop-in files",
    looks_at=f"files for GPUs in {K0S_DROP_INS}, and whether k0s generated /etc/k0s/containerd.toml.",
    fix=Fix(
        "mv /etc/k0s/containerd.toml /etc/k0s/containerd.toml.old && k0s stop && k0s start",
        disruptive="restart",
        disturbs=RESTARTS_KUBERNETES,
    ),
    blocked_by=("pci-no-gpu", "containerd-not-restarted"),
    refs=("https://docs.k0sproject.io/stable/runtime/",),
)
def k0s_dropin(node: Node) -> Verdict:
    """k0s imports the drop-in files only into a containerd.toml that it generated itself, which a comment in
    the first line marks. With any other containerd.toml, containerd doesn't read them.
    """
    daemon = node.containerd
    if daemon is None or daemon.manager != "k0s":
        return skip("this node's containerd isn't the k0s one")
    files = node.host.glob(K0S_DROP_INS, "*.toml")
    dropins = [path for path in files if line_in(node.host, path, "nvidia")]
    if not dropins:
        return ok(f"{K0S_DROP_INS} has no files for GPUs")
    config = if_parsable(node)
    if config is None:
        return skip(f"{daemon.config_path} can't be parsed")
    unread = [path for path in dropins if path not in config.files]
    if not unread or k0s_manages(node.host, daemon.config_path):
        return ok(f"k0s reads {', '.join(dropins)}")
    return fail(
        f"k0s doesn't read {K0S_DROP_INS}",
        seen(daemon.config_path, "its first line isn't # k0s_managed=true, and it imports no such file", 1),
        *(seen(path, "unread") for path in unread),
    )


@check(
    "cri-dockerd",
    title="Pods under cri-dockerd get the nvidia runtime",
    severity="warning",
    looks_at="Docker's default runtime (/info), if the kubelet's endpoint is cri-dockerd, no device plugin "
    "has registered GPUs and no container with GPUs runs.",
    fix=fixes.configure("docker", "--set-as-default"),
    blocked_by=("pci-no-gpu", "kubelet-not-running", "docker-not-running", "docker-runtime-missing"),
    needs=("kubelet",),
    refs=("https://github.com/Mirantis/cri-dockerd",),
)
@if_reported("docker")
def cri_dockerd(node: Node) -> Verdict:
    """cri-dockerd starts pods under Docker's default runtime unless they name another one. Under runc they
    can't access GPUs, even if the device plugin allocated them.
    """
    kubelet = node.kubelet
    if node.docker is None or kubelet is None or kubelet.engine != "docker":
        return skip("no kubelet uses Docker on this node")
    default = node.docker_info.get("DefaultRuntime")
    if not isinstance(default, str) or default.startswith("nvidia"):
        return ok(f"Docker's default runtime is {default}")
    if (node.allocatable and node.allocatable.nvidia) or node.gpu_containers:
        return ok("pods use GPUs on this node without it")
    return warn(
        f"the kubelet uses Docker, and its default runtime is {default}",
        seen(f"{kubelet.endpoint_source}", kubelet.endpoint),
        seen(f"{node.docker.socket} /info", f"DefaultRuntime {default}"),
    )


@check(
    "kind-nested",
    title="Nodes of a kind cluster can use GPUs",
    severity="info",
    looks_at="running containers of kindest/node (Docker) with a device plugin, whether they have GPUs, and "
    f"{BY_MOUNTS} of the toolkit's config.toml.",
    fix=Fix(f"gpunode toolkit config set {BY_MOUNTS}=true"),
    blocked_by=("pci-no-gpu", "docker-not-running", "toolkit-missing", "toolkit-config-invalid"),
    needs=("docker",),
    refs=("https://kind.sigs.k8s.io/",),
)
def kind_nested(node: Node) -> Verdict:
    """A kind node is a container and gets GPUs only through a mount that names them. The toolkit must be
    configured to accept such mounts.
    """
    if node.docker is None:
        return skip("Docker isn't installed on this node")
    nodes = [
        (identifier, name)
        for identifier, name, image in node.docker_containers
        if image.startswith("kindest/node")
    ]
    if not nodes:
        return ok("no node of a kind cluster runs on this node")
    if not node.plugin_processes:
        return ok("no device plugin runs in the kind cluster")
    seeing = {container.id for container in node.gpu_containers}
    blind = [name for identifier, name in nodes if identifier not in seeing]
    settings = node.toolkit_settings
    if len(blind) < len(nodes) or settings.value(BY_MOUNTS) is True:
        return ok("nodes of a kind cluster on this node can use GPUs")
    return note(
        f"{many(len(blind), 'node')} of a kind cluster on this machine without GPUs",
        seen(f"{node.docker.socket} /containers", ", ".join(blind[:8])),
        seen(settings.path, f"{BY_MOUNTS} isn't true"),
    )


# k3s and rke2: they write containerd's file again at each start.

_RUNTIME = "nvidia-container-runtime"
# where both look for it, in this order (k3s pkg/agent/containerd/runtimes.go)
_SEARCHED = ("/usr/local/nvidia/toolkit", "/usr/bin")
_OLD, _NEW = "config.toml.tmpl", "config-v3.toml.tmpl"
_MARK = "DO NOT EDIT"
_BASE = 'template "base"'
_SYSTEM = "/etc/containerd"
_OTHER_WAY = "containers on this node get GPUs without the nvidia runtime"
_OTHERS = "this node's containerd isn't the k3s or rke2 one"


def _daemon(node: Node) -> Daemon | None:
    daemon = node.containerd
    return daemon if daemon is not None and daemon.manager in ("k3s", "rke2") else None


def _blind(node: Node, handlers: tuple[str, ...] | None) -> bool:
    """Whether GPUs need a handler on this node and none exists."""
    if handlers is None or any(name.startswith("nvidia") for name in handlers):
        return False
    return used_method(node, cdi=node.cri.config.get("enableCDI") is True) is None


def _without_nvidia(node: Node, daemon: Daemon, passed: str) -> tuple[str, ...] | Verdict:
    """The handlers of a containerd that lacks one for nvidia although GPUs need it; else a verdict."""
    handlers = reported_handlers(node)
    if handlers is None:
        return skip("the running containerd doesn't report its handlers")
    if any(name.startswith("nvidia") for name in handlers):
        return ok(f"{daemon.manager} {passed}")
    return handlers if _blind(node, handlers) else skip(_OTHER_WAY)


def _templates(node: Node, daemon: Daemon) -> Mapping[str, str]:
    """Text of the existing templates, by name."""
    directory = daemon.config_path.rpartition("/")[0]
    texts = {name: node.host.read_text(f"{directory}/{name}") for name in (_NEW, _OLD)}
    return {name: text for name, text in texts.items() if text is not None}


_BELOW = ("pci-no-gpu", "containerd-config-version")

_DOCS = "https://docs.k3s.io/advanced"


@containerd_check(
    "k3s-nvidia-not-detected",
    title="k3s or rke2 has detected the nvidia runtime",
    looks_at=f"{_RUNTIME} in {' and '.join(_SEARCHED)}, when it was installed and when containerd started, "
    "and the handlers that containerd reports (CRI Status). A custom template is not checked.",
    fix=fixes.restart("k3s", RESTARTS_KUBERNETES),
    blocked_by=(*_BELOW, "k3s-edited-generated", "k3s-wrong-template", "k3s-nvidia-wrong-root"),
    refs=(f"{_DOCS}#nvidia-container-runtime",),
)
def k3s_nvidia_not_detected(node: Node) -> Verdict:
    """k3s and rke2 look for the runtime only when they start. They don't detect a runtime that is installed
    later: 'no runtime for "nvidia" is configured'.
    """
    daemon = _daemon(node)
    if daemon is None or daemon.process is None:
        return skip(_OTHERS)
    handlers = _without_nvidia(node, daemon, "has detected the nvidia runtime")
    if isinstance(handlers, Verdict):
        return handlers
    places = (f"{place}/{_RUNTIME}" for place in _SEARCHED)
    path = next((place for place in places if node.host.executable(place)), None)
    if path is None or any(_BASE not in text for text in _templates(node, daemon).values()):
        return skip("no runtime that it detects is installed")
    # when it was installed: packages keep the build time of a file as its modification time
    status = node.host.stat(path)
    if status is None or (node.host.live and status.st_ctime < daemon.process.started):
        return skip(f"{path} existed before {daemon.manager} started")
    return fail(
        f"{daemon.manager} started before the nvidia runtime was installed",
        seen_handlers(daemon, handlers),
        seen(path, f"installed after {daemon.manager} started" if node.host.live else "exists now"),
        fix=fixes.restart_managed(daemon.manager, daemon.unit),
    )


_KEEPS_TEMPLATE = (
    "This keeps the template. It adds the runtime at its end, or in a file that it imports: see --dry-run"
)
_CONFIGURE_K3S = fixes.configure("k3s")


@containerd_check(
    "k3s-wrong-template",
    title="k3s or rke2 reads the existing template",
    looks_at=f"{_OLD} and {_NEW} beside the generated file: containerd 1.x reads only the first, 2.x "
    "prefers the second. The effective template must include the base or define the runtime itself.",
    fix=_CONFIGURE_K3S,
    blocked_by=_BELOW,
    refs=(f"{_DOCS}#configuring-containerd",),
)
def k3s_wrong_template(node: Node) -> Verdict:
    """k3s and rke2 silently ignore a template for the other containerd version. A template that was copied
    from an old release leaves out what k3s detects, including the nvidia runtime.
    """
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
    handlers = reported_handlers(node)
    blind = _blind(node, handlers)
    if blind and _BASE not in text and "nvidia" not in text:
        return fail(
            f"{daemon.manager}'s template doesn't include the nvidia runtime",
            seen(f"{directory}/{used}", f"neither includes {{{{ {_BASE} . }}}} nor has a runtime nvidia"),
            seen_handlers(daemon, handlers or ()),
            fix=replace(fixes.configure(daemon.manager), note=_KEEPS_TEMPLATE),
        )
    unread = templates.get(_OLD, "") if used == _NEW else ""
    if "nvidia" in unread and "nvidia" not in text and _BASE not in text:
        return _unread(node, f"{directory}/{_OLD}", f"containerd {version}, beside {_NEW}", daemon)
    return ok(f"{daemon.manager} uses {used}")


def _unread(node: Node, path: str, why: str, daemon: Daemon) -> Verdict:
    handlers = reported_handlers(node)
    judge = fail if _blind(node, handlers) and "nvidia" in (node.host.read_text(path) or "") else warn
    summary = f"{daemon.manager} doesn't read the existing template"
    fix = fixes.configure(daemon.manager) if judge is fail else Fix(f"mv {path} {path}.old")
    return judge(summary, seen(path, f"not read by {why}"), fix=fix)


@containerd_check(
    "k3s-edited-generated",
    title="The generated file of k3s or rke2 was not edited",
    looks_at="runtimes in the generated config.toml that the running containerd doesn't have: k3s and rke2 "
    "write the file before they start containerd, so these were added later.",
    fix=_CONFIGURE_K3S,
    blocked_by=_BELOW,
    refs=(f"{_DOCS}#configuring-containerd",),
)
def k3s_edited_generated(node: Node) -> Verdict:
    """k3s and rke2 rewrite this file at each start, before containerd reads it, so edits never take effect.
    Use a template beside it instead.
    """
    daemon = _daemon(node)
    if daemon is None or daemon.process is None:
        return skip(_OTHERS)
    text = node.host.read_text(daemon.config_path) or ""
    if _MARK not in text.partition("version")[0]:
        return ok(f"{daemon.config_path} isn't marked as generated")
    handlers, config = reported_handlers(node), if_parsable(node)
    if handlers is None or config is None:
        return skip("the running configuration and the file can't be compared")
    # what was rendered at the start is running; only runtimes in this file are compared
    added = [name for name in sorted(config.runtimes) if name not in handlers and f".{name}" in text]
    if not added:
        return ok(f"{daemon.config_path} is unchanged since {daemon.manager} wrote it")
    return fail(
        f"{daemon.config_path} was edited, but {daemon.manager} rewrites it at each start",
        seen(daemon.config_path, f"runtime {', '.join(added)}, which {daemon.manager} has not loaded"),
        seen_handlers(daemon, handlers),
        fix=fixes.configure(daemon.manager),
    )


@containerd_check(
    "k3s-nvidia-wrong-root",
    title="The nvidia runtime is configured for the containerd that k3s or rke2 runs",
    looks_at="/etc/containerd/config.toml and conf.d on a node with a kubelet that uses the containerd of "
    "k3s or rke2, if that containerd has no nvidia handler (CRI Status) and no other containerd "
    "runs.",
    fix=_CONFIGURE_K3S,
    blocked_by=(*_BELOW, "k3s-edited-generated", "k3s-wrong-template"),
    refs=(
        "https://docs.nvidia.com/datacenter/cloud-native/gpu-operator/latest/getting-started.html",
        "https://docs.rke2.io/advanced",
    ),
)
def k3s_nvidia_wrong_root(node: Node) -> Verdict:
    """k3s and rke2 never read /etc/containerd. The GPU operator and nvidia-ctk write there unless
    CONTAINERD_CONFIG and CONTAINERD_SOCKET are set.
    """
    daemon = _daemon(node)
    if daemon is None:
        return skip(_OTHERS)
    handlers = _without_nvidia(node, daemon, "has the nvidia runtime")
    if isinstance(handlers, Verdict):
        return handlers
    if another_containerd(node):
        return ok(f"another containerd reads {_SYSTEM}")
    paths = [f"{_SYSTEM}/config.toml", *node.host.glob(f"{_SYSTEM}/conf.d", "*.toml")]
    for path in paths:
        lines = (node.host.read_text(path) or "").splitlines()
        for number, line in enumerate(lines, 1):
            if f"/{_RUNTIME}" in line and not line.lstrip().startswith("#"):
                return fail(
                    f"the nvidia runtime is configured for another containerd than {daemon.manager}'s",
                    seen(path, line.strip(), number),
                    seen_handlers(daemon, handlers),
                    fix=fixes.configure(daemon.manager),
                )
    return ok(f"no other containerd than {daemon.manager}'s is configured")
