"""`gpunode setup`: doctor, configure-runtime, verify in one report; stops at the first failure."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpunode.commands.setup_steps import Show, interruption, journal_ids, not_shown
from gpunode.errors import GpunodeError, PreconditionError, UsageError
from gpunode.facts.distributions import DISTRIBUTIONS
from gpunode.facts.kubelet import find_kubelet
from gpunode.facts.processes import running
from gpunode.host import Host
from gpunode.kubernetes.access import Access
from gpunode.kubernetes.api import NoAccess
from gpunode.output.result import (
    Block,
    ErrorInfo,
    ExitCode,
    Finding,
    FindingStatus,
    Progress,
    Result,
    Style,
    Text,
)

if TYPE_CHECKING:
    from gpunode.kubernetes.client import Cluster

# What comes after the containers in a node's life: setup reports it, but a node without Kubernetes is fine.
_LATER_LAYERS = frozenset({"kubelet"})
_ENGINE_LAYERS = frozenset({"docker", "containerd"})
# by CDI, containers get their GPUs without NVIDIA's toolkit
_WITHOUT_CDI = frozenset({"toolkit"})
_MENDED_HERE = "gpunode configure-runtime"
_DESCRIBED_HERE = "gpunode cdi refresh"
# configure-runtime restarts or reloads a daemon that hasn't read its file, or started before the toolkit came
_RESTARTED_HERE = frozenset({"docker-not-restarted", "containerd-not-restarted", "k3s-nvidia-not-detected"})
# both are also for files that CRI-O can't read, which no restart fixes
_CRIO_RESTARTED_HERE = ("crio-not-running", "crio-runtime-missing")
_RESTART = "systemctl restart "


@dataclass(frozen=True)
class Options:
    """The options of configure-runtime that make sense for a whole set-up."""

    runtime: str = "auto"
    set_as_default: bool = False
    config: str = ""
    socket: str = ""
    restart_command: str = ""
    yes: bool = False
    cdi: bool = False
    dry_run: bool = False


@dataclass(frozen=True)
class Stage:
    """One step of the set-up as programs read it; `result` is that command's own data."""

    name: str
    command: str
    status: str
    seconds: float
    result: object


@dataclass(frozen=True)
class SetupReport:
    """`data` of the envelope: the stages that ran, in order, and the engine that was set up."""

    engine: str
    stages: tuple[Stage, ...]


def run(host: Host, options: Options, progress: Progress, show: Show = not_shown) -> Result:
    """Run the stages in order and show each when it is done. The exit code is that of the stage that stopped
    it, 0 if none did."""
    before = journal_ids(host)
    stages: list[Stage] = []
    engine, shown = options.runtime, "gpunode setup"
    try:
        for name, command, stage in _stages(host, options, progress):
            started, shown = host.monotonic(), command.replace("ENGINE", engine)
            show(Text(f"$ {shown}", Style.COMMAND))
            result = _guarded(stage, engine)
            status = "ok" if result.exit_code == ExitCode.OK else "fail"
            stages.append(Stage(name, shown, status, round(host.monotonic() - started, 2), result.data))
            show(*result.blocks, Text(""))
            if result.exit_code != ExitCode.OK:
                return _stopped(engine, stages, result, shown)
            if name == "configure-runtime":
                engine = getattr(result.data, "engine", engine)
    except KeyboardInterrupt:
        error = interruption(host, shown, before)
        result = Result("Error", status="error", exit_code=ExitCode.INTERRUPTED, errors=(error,))
        return _stopped(engine, stages, result, shown)
    if options.dry_run:
        end = Text(f"Then: gpunode verify, and gpunode verify --on {engine}; nothing was changed", Style.DIM)
    elif host.live:
        end = Text(f"This node runs GPU containers with {engine}: it just did.", Style.GOOD)
    else:
        end = Text(f"Nothing was started under --root: {engine} is configured, not proven.", Style.WARN)
    return Result("SetupReport", SetupReport(engine, tuple(stages)), blocks=(end,))


def refuse_without_kubernetes(given: Mapping[str, str]) -> None:
    """`UsageError` for an option, by its field's name, that only means something with --kubernetes."""
    meant = [f"--{name.replace('_', '-')}" for name, value in given.items() if value]
    if meant:
        raise UsageError(f"{meant[0]} goes with --kubernetes", hint="add --kubernetes, or leave it out")


Step = tuple[str, str, Callable[[str], Result]]


def _stages(host: Host, options: Options, progress: Progress) -> tuple[Step, ...]:
    from gpunode.commands import configure_runtime, verify_node
    from gpunode.runtime.engine import Request

    def configure(engine: str) -> Result:
        request = Request(
            runtimes=(engine,),
            config=options.config,
            socket=options.socket,
            restart_command=options.restart_command,
            yes=options.yes,
            dry_run=options.dry_run,
            configures=True,
        )
        wanted = configure_runtime.Options(request, set_as_default=options.set_as_default, cdi=options.cdi)
        return configure_runtime.run(host, wanted, progress)

    def verify_host(_engine: str) -> Result:
        return verify_node.run(host, verify_node.Options(), progress)

    def verify_container(engine: str) -> Result:
        wanted = verify_node.Options(on=engine, config=options.config, socket=options.socket, cdi=options.cdi)
        return verify_node.run(host, wanted, progress)

    by_cdi = " --cdi" if options.cdi else ""
    dry = " --dry-run" if options.dry_run else ""
    first: tuple[Step, ...] = (
        ("doctor", "gpunode doctor", lambda engine: _doctor(host, engine, options.cdi, progress)),
        ("configure-runtime", f"gpunode configure-runtime --runtime ENGINE{by_cdi}{dry}", configure),
        ("verify-host", "gpunode verify", verify_host),
    )
    if options.dry_run:
        return first[:2]
    if not host.live:
        return first  # nothing can be started under --root
    return (*first, ("verify-container", f"gpunode verify --on ENGINE{by_cdi}", verify_container))


def _doctor(host: Host, engine: str, cdi: bool, progress: Progress) -> Result:
    return doctor_before(host, lambda finding: _excuse(finding, engine, cdi), progress)


def doctor_before(host: Host, excuse: Callable[[Finding], str], progress: Progress) -> Result:
    """The doctor's findings, where those don't stop the set-up for which `excuse` has a word."""
    from gpunode.commands import doctor

    result = doctor.run(host, doctor.Options(), progress)
    failed = [finding for finding in result.data["findings"] if finding.status is FindingStatus.FAIL]
    excuses = {finding.id: excuse(finding) for finding in failed}
    if not all(excuses.values()):
        return result
    blocks: list[Block] = [result.blocks[0]] if not failed else []
    for finding in failed:
        blocks.append(Text(f"  {finding.id}: {finding.summary} ({excuses[finding.id]})", Style.WARN))
    return Result(result.kind, result.data, blocks=tuple(blocks))


def _excuse(finding: Finding, engine: str, cdi: bool) -> str:
    """Why a failed check doesn't stop the set-up of `engine`; empty if it does."""
    mended = mended_by_configuring(finding, cdi)
    if mended:
        return mended
    if finding.layer in _LATER_LAYERS or finding.severity != "error":
        return "not needed for containers"
    if finding.layer in _ENGINE_LAYERS and _is_another(engine, finding.layer):
        return f"not needed for {engine}"
    return ""


def mended_by_configuring(finding: Finding, cdi: bool) -> str:
    """The command that mends it on the way, or why it need not be mended; empty for none of these."""
    mends = " && ".join(fix.command for fix in finding.fix)
    restarted = finding.id in _CRIO_RESTARTED_HERE and mends.startswith(_RESTART)
    if restarted or finding.id in _RESTARTED_HERE or mends.startswith(_MENDED_HERE):
        return _MENDED_HERE
    if cdi and mends.startswith(_DESCRIBED_HERE):
        return f"{_MENDED_HERE} --cdi"
    if cdi and finding.layer in _WITHOUT_CDI:
        return "not needed with --cdi"
    return ""


def _is_another(engine: str, layer: str) -> bool:
    """Whether the engine that is set up surely isn't that of this layer."""
    brought = layer == "containerd" and engine in DISTRIBUTIONS
    return engine not in ("", "auto", layer) and not brought


def _guarded(stage: Callable[[str], Result], engine: str) -> Result:
    """An expected failure becomes that stage's result, so that the report still tells what went before."""
    try:
        return stage(engine)
    except GpunodeError as error:
        return Result("Error", status="error", exit_code=error.exit_code, errors=(error.info(),))


def _stopped(engine: str, stages: list[Stage], result: Result, command: str) -> Result:
    errors = result.errors or (
        ErrorInfo(
            "stage-failed", f"{command} failed", "mend what it says above, then run gpunode setup again"
        ),
    )
    return Result(
        "SetupReport",
        SetupReport(engine, tuple(stages)),
        status="error" if result.exit_code == ExitCode.INTERRUPTED else "fail",
        exit_code=result.exit_code,
        errors=errors,
        blocks=(Text(f"Stopped at: {command}", Style.BAD),),
    )


# What every step of `setup --kubernetes` works with: the options, the engine, the way to the API server.

__all__ = ["Access", "KubernetesOptions", "Way", "command_line", "prepare"]

WAYS = ("systemd", "daemonset")


@dataclass(frozen=True)
class KubernetesOptions:
    """The command line's options. `engine` are those that `setup` takes for containers, too; `plugin` is one
    of `WAYS`; `image` is the DaemonSet's, `test_image` that of the pod which proves it; `wait`: seconds for
    the kubelet to take the GPUs."""

    engine: Options = field(default_factory=Options)
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
    options: KubernetesOptions
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
        return (*node, *(self.cluster.options if self.cluster is not None else ()))

    def close(self) -> None:
        """No step comes any more."""
        if self.cluster is not None:
            self.cluster.close()


def prepare(host: Host, options: KubernetesOptions, progress: Progress) -> Way:
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
    except NoAccess as error:
        if access.kubeconfig or access.context or access.server:
            raise
        return None, f"{error.message}; {error.hint}"


def command_line(options: KubernetesOptions) -> str:
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
        ("--wait", f"{options.wait:g}" if options.wait != KubernetesOptions.wait else ""),
    )
    switches = (
        ("--cdi", options.engine.cdi),
        ("--set-as-default", options.engine.set_as_default),
        ("--yes", options.engine.yes),
    )
    words = [word for name, value in given if value for word in (name, value)]
    return shlex.join(["gpunode", "setup", "--kubernetes", *words, *(name for name, on in switches if on)])
