"""What every step of `setup --kubernetes` works with: the options, the engine, the way to the API server."""

from __future__ import annotations

import shlex

from gpunode.commands import setup
from gpunode.dataclass import dataclass, field
from gpunode.errors import PreconditionError, UsageError
from gpunode.facts.kubelet import find_kubelet
from gpunode.facts.processes import running
from gpunode.host import Host
from gpunode.kubernetes.access import Access
from gpunode.kubernetes.api import Cluster, ExtraMissing, NoAccess
from gpunode.result import Progress

__all__ = ["Access", "Options", "Way", "command_line", "prepare"]

WAYS = ("systemd", "daemonset")


@dataclass(frozen=True)
class Options:
    """The command line's options. `engine` are those that `setup` takes for containers, too; `plugin` is one
    of `WAYS`; `image` is the DaemonSet's, `test_image` that of the pod which proves it; `wait`: seconds for
    the kubelet to take the GPUs."""

    engine: setup.Options = field(default_factory=setup.Options)
    plugin: str = "systemd"
    image: str = ""
    test_image: str = ""
    access: Access = field(default_factory=Access)
    node: str = ""
    wait: float = 60.0


@dataclass(frozen=True)
class Way:
    """`cluster` is None where there is no way to an API server; `offline` says why."""

    host: Host
    options: Options
    progress: Progress
    engine: str
    cluster: Cluster | None
    offline: str = ""

    @property
    def handler(self) -> str:
        """The runtime handler of pods; empty where the GPUs come by CDI and the engine gets none."""
        there = self.host.which("nvidia-container-runtime") is not None
        return "nvidia" if there or not self.options.engine.cdi else ""

    @property
    def words(self) -> tuple[str, ...]:
        """The options by which another command finds the same node of the same cluster."""
        node = ("--node", self.options.node) if self.options.node else ()
        return (*node, *(self.cluster.words if self.cluster is not None else ()))

    def close(self) -> None:
        """No step comes any more."""
        if self.cluster is not None:
            self.cluster.close()


def prepare(host: Host, options: Options, progress: Progress) -> Way:
    """`UsageError`; `PreconditionError` for a node without kubelet or engine, or a user who isn't root."""
    from gpunode.runtime import find

    if options.plugin not in WAYS:
        raise UsageError(f"--plugin {options.plugin!r}", hint=f"one of {', '.join(WAYS)}")
    if options.image and options.plugin != "daemonset":
        raise UsageError("--image is the DaemonSet's", hint="add --plugin daemonset")
    if host.live and not host.is_root and not options.engine.dry_run:
        raise PreconditionError("setting a node up needs root", hint="run it again with sudo, or --dry-run")
    kubelet = find_kubelet(host, running(host))
    if kubelet is None:
        raise PreconditionError(
            "there is no kubelet on this node",
            hint="install it and join the cluster first; for containers alone: gpunode setup",
            code="no-kubelet",
        )
    if not kubelet.joined:
        raise PreconditionError(
            "this node's kubelet has joined no cluster yet",
            hint="join it first, as with kubeadm join; for containers alone: gpunode setup",
            code="kubelet-not-joined",
        )
    daemon = find.engine(
        host, options.engine.runtime, options.engine.config, socket=options.engine.socket
    ).daemon
    if kubelet.engine != daemon.name:
        raise UsageError(
            f"the kubelet's engine is {kubelet.engine} ({kubelet.endpoint_source}), not {daemon.name}",
            hint="leave out --runtime",
        )
    cluster, offline = _connect(host, options.access)
    return Way(host, options, progress, find.name_of_daemon(daemon), cluster, offline)


def _connect(host: Host, access: Access) -> tuple[Cluster | None, str]:
    """The cluster, or why there is none; one that was asked for and can't be had is an error."""
    from gpunode.kubernetes.access import connect

    if not host.live:
        return None, "no API server is asked under --root"
    try:
        return connect(host, access), ""
    except (NoAccess, ExtraMissing) as error:
        if access.kubeconfig or access.context or access.server:
            raise
        return None, f"{error.message}; {error.hint}"


def command_line(options: Options) -> str:
    """The command line that means the same, and would go on from here."""
    access = options.access
    given = (
        ("--runtime", options.engine.runtime if options.engine.runtime != "auto" else ""),
        ("--config", options.engine.config),
        ("--socket", options.engine.socket),
        ("--restart-command", options.engine.restart_command),
        ("--plugin", options.plugin if options.plugin != "systemd" else ""),
        ("--image", options.image),
        ("--test-image", options.test_image),
        ("--kubeconfig", access.kubeconfig),
        ("--context", access.context),
        ("--server", access.server),
        ("--node", options.node),
        ("--wait", f"{options.wait:g}" if options.wait != Options.wait else ""),
    )
    switches = (
        ("--cdi", options.engine.cdi),
        ("--set-as-default", options.engine.set_as_default),
        ("--yes", options.engine.yes),
    )
    words = [word for name, value in given if value for word in (name, value)]
    return shlex.join(["gpunode", "setup", "--kubernetes", *words, *(name for name, on in switches if on)])
