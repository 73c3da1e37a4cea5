"""`gpunode setup`: every step from the driver to a proof, in a container or, with --kubernetes, in a pod.

Each step is one of gpunode's own commands; setup_steps.py defines steps and runs them.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from gpunode import __version__
from gpunode.checks import fixes
from gpunode.checks.finding import Finding, FindingStatus
from gpunode.commands import (
    configure_runtime,
    doctor,
    manifests,
    toolkit,
    verify,
    verify_kubernetes,
)
from gpunode.commands import node as node_object
from gpunode.commands.configure_runtime import RuntimeChoice
from gpunode.commands.options import (
    KUBERNETES,
    CdiOption,
    ConfigOption,
    ContextOption,
    DefaultOption,
    DryRunOption,
    NodeOption,
    PodKubeconfigOption,
    RestartCommandOption,
    RuntimeOption,
    ServerOption,
    SocketOption,
    YesOption,
    changed,
    wait_option,
)
from gpunode.commands.session import Session, verb
from gpunode.commands.setup_steps import (
    NodeStep,
    Show,
    StepReport,
    StepResults,
    StepState,
    daemon_set_step,
    make_objects,
    not_shown,
    overview,
    refuse_others,
    service_step,
    serving,
    walk,
)
from gpunode.errors import PreconditionError, UsageError
from gpunode.facts.kubelet import find_kubelet, root_directory
from gpunode.facts.processes import running
from gpunode.facts.registry import DISTRIBUTIONS, ENGINES
from gpunode.facts.toolkit import find_toolkit
from gpunode.host import Host
from gpunode.kubernetes.access import Access, connect, kubectl, node_name
from gpunode.kubernetes.api import ExtraMissing, Json, NoAccess
from gpunode.kubernetes.changes import label_patch, labels_of
from gpunode.kubernetes.changes import look as look_at
from gpunode.kubernetes.manifests import PluginSet, daemon_set, present, runtime_class
from gpunode.output.result import Block, ErrorInfo, ExitCode, Progress, Result, Style, Text
from gpunode.runtime import find
from gpunode.runtime.engine import Request
from gpunode.runtime.verify.container import ContainerRequest

if TYPE_CHECKING:
    from gpunode.kubernetes.client import Cluster

WAIT_SECONDS = 60.0
setup_app = typer.Typer(rich_markup_mode=None)


@dataclass(frozen=True)
class KubernetesOptions:
    """The options that go with --kubernetes. An empty `node` is looked up."""

    plugin: Annotated[
        Literal["systemd", "daemonset"],
        typer.Option(
            "--plugin",
            help="Run the device plugin as a systemd unit, or as a DaemonSet on all GPU nodes.",
            rich_help_panel=KUBERNETES,
        ),
    ] = "systemd"
    image: Annotated[
        str,
        typer.Option(
            "--image",
            metavar="REF",
            help="Image of the DaemonSet in your registry (docs/manifests.md).",
            show_default=f"gpunode:{__version__}, which each node must have",
            rich_help_panel=KUBERNETES,
        ),
    ] = ""
    test_image: manifests.TestImageOption = ""
    kubeconfig: PodKubeconfigOption = ""
    kube_context: ContextOption = ""
    server: ServerOption = ""
    node: NodeOption = ""
    wait: Annotated[float, wait_option(least=1, default=WAIT_SECONDS)] = WAIT_SECONDS

    @property
    def words(self) -> dict[str, str]:
        """The options that differ from their defaults, by flag."""
        return {
            flag: f"{value:g}s" if flag == "--wait" else str(value) for flag, value in changed(self).items()
        }


@verb(setup_app, "setup", "SetupReport")
def setup(
    session: Session,
    runtime: RuntimeOption = "auto",
    set_as_default: DefaultOption = False,
    config: ConfigOption = "",
    socket: SocketOption = "",
    restart_command: RestartCommandOption = "",
    cdi: CdiOption = False,
    kubernetes: Annotated[
        bool,
        typer.Option(
            "--kubernetes",
            help="Also set up Kubernetes: RuntimeClass, device plugin and a test pod (5 minutes at most).",
            rich_help_panel=KUBERNETES,
        ),
    ] = False,
    cluster: KubernetesOptions = KubernetesOptions(),
    dry_run: DryRunOption = False,
    yes: YesOption = False,
) -> Result:
    """Diagnose, configure and verify this node in one run. It ends at the first failure. The engine is
    restarted or reloaded; running containers are stopped only after you confirm it, or with --yes. Needs root
    (not with --dry-run) and the driver. NVIDIA's container toolkit, which --cdi does without, is installed
    from NVIDIA's repository if it is missing; from a mirror or offline, run toolkit install first.

    sudo gpunode setup --runtime containerd

    sudo gpunode setup --runtime podman --cdi

    gpunode setup --kubernetes --kubeconfig ~/.kube/config --dry-run
    """
    find.check_names((runtime,))
    request = Request(
        runtimes=(runtime,),
        config=config,
        socket=socket,
        restart_command=restart_command,
        restart_hint="pass the command with --restart-command 'COMMAND'",
        yes=yes,
        confirm=session.confirm,
        dry_run=dry_run,
        configures=True,
    )
    choice = RuntimeChoice(set_as_default=set_as_default, cdi=cdi)
    if kubernetes:
        goal = KubernetesGoal(request, cluster, choice)
        return set_up_kubernetes(session.host, goal, session.progress, session.show)
    if cluster.words:
        flag = next(iter(cluster.words))
        raise UsageError(f"{flag} goes with --kubernetes", hint="add --kubernetes, or leave it out")
    return set_up_containers(session.host, request, choice, session.progress, session.show)


# What the doctor's findings mean for setup.

# Layers that a node gets after its containers: setup reports them, but a node without Kubernetes is fine.
_LATER_LAYERS = frozenset({"kubelet"})
# with CDI, containers get their GPUs without NVIDIA's toolkit
_WITHOUT_CDI = frozenset({"toolkit"})
_FIXED_HERE = fixes.CONFIGURE
_DESCRIBED_HERE = fixes.REFRESH_CDI.command
# configure-runtime restarts or reloads a daemon that hasn't read its file, or started before the toolkit was
# installed
_RESTARTED_HERE = frozenset({"docker-not-restarted", "containerd-not-restarted", "k3s-nvidia-not-detected"})
# both also cover files that CRI-O can't read, which no restart fixes
_CRIO_RESTARTED_HERE = ("crio-not-running", "crio-runtime-missing")
_RESTART = "systemctl restart "
_FIXED_BY_STEP = {
    "plugin-not-registered": "the step plugin",
    "plugin-socket-dead": "the step plugin",
    "runtimeclass-missing": "the step runtime-class",
}


def doctor_before(host: Host, progress: Progress, engine: str, cdi: bool, *, pods: bool = False) -> Result:
    """The doctor's findings, in which those with an excuse don't stop setup. For pods, those that do are
    also one error."""
    result = doctor.run(host, progress)
    failed = [finding for finding in result.data.findings if finding.status is FindingStatus.FAIL]
    excuses = {finding.id: excuse(finding, engine, cdi, pods=pods) for finding in failed}
    bad = [finding for finding in failed if not excuses[finding.id]]
    if bad and pods:
        summaries = "; ".join(f"{finding.id}: {finding.summary}" for finding in bad)
        error = ErrorInfo("doctor-failed", summaries, f"find out more: gpunode explain {bad[0].id}")
        return replace(result, errors=(error,))
    if bad:
        return result
    blocks: list[Block] = [result.blocks[0]] if not failed else []
    for finding in failed:
        blocks.append(Text(f"  {finding.id}: {finding.summary} ({excuses[finding.id]})", Style.WARN))
    return Result(result.kind, result.data, blocks=tuple(blocks))


def fixed_on_the_node(finding: Finding, cdi: bool) -> str:
    """The step of both kinds of setup that fixes it, or why it needs no fix; empty for neither."""
    command = finding.fixes[0].command if finding.fixes else ""
    restarted = finding.id in _CRIO_RESTARTED_HERE and command.startswith(_RESTART)
    if restarted or finding.id in _RESTARTED_HERE or command.startswith(_FIXED_HERE):
        return _FIXED_HERE
    if cdi and command.startswith(_DESCRIBED_HERE):
        return f"{_FIXED_HERE} --cdi"
    if cdi and finding.layer in _WITHOUT_CDI:
        return "not needed with --cdi"
    return "the step toolkit" if finding.id == "toolkit-missing" else ""


def excuse(finding: Finding, engine: str, cdi: bool, *, pods: bool) -> str:
    """Why a failed check doesn't stop setting up `engine` for pods or for containers; empty if it does."""
    fixed_by = fixed_on_the_node(finding, cdi) or (_FIXED_BY_STEP.get(finding.id, "") if pods else "")
    if fixed_by:
        return fixed_by
    if finding.severity != "error" or (not pods and finding.layer in _LATER_LAYERS):
        return "pods run all the same" if pods else "not needed for containers"
    # which engine is set up may not be known yet
    own = "containerd" if engine in DISTRIBUTIONS else engine
    belongs_to_another = own not in find.AUTO and finding.layer in ENGINES and finding.layer != own
    return f"not needed for {engine}" if belongs_to_another else ""


# Steps that both kinds of setup have.


def each_time(name: str, command: str, act: Callable[[], Result]) -> NodeStep:
    """A step that always runs, whatever the node's state."""

    def run(dry_run: bool) -> Result:
        if dry_run:
            return Result("Verification", None, blocks=(Text(f"would run: {command}", Style.COMMAND),))
        return act()

    return NodeStep(name, command, lambda: StepState("runs each time"), run)


def node_proofs(host: Host, request: Request, progress: Progress, cdi: bool) -> tuple[NodeStep, ...]:
    """Without a cluster: verify on the host and, on a live node, in a container of the engine."""
    (engine,) = request.runtimes
    first = each_time("verify-host", "gpunode verify", lambda: verify.run(host, progress))
    if not host.live:
        return (first,)  # nothing can be started under --root
    container = ContainerRequest(engine, config=request.config, socket=request.socket, cdi=cdi)
    command = f"gpunode verify --on {engine}{' --cdi' if cdi else ''}"
    run = verify.run_in_container
    return first, each_time("verify-container", command, lambda: run(host, container, progress))


def toolkit_step(host: Host, request: Request, progress: Progress, words: str = "") -> NodeStep:
    """NVIDIA's container toolkit from NVIDIA's repository, if it is missing; `words` end its command."""

    def look() -> StepState:
        installation = find_toolkit(host)
        path = installation.programs.get("nvidia-container-runtime")
        if path is None:
            return StepState("nvidia-container-runtime is not installed")
        version = ".".join(map(str, installation.version))
        return StepState(f"{path} is installed{f', toolkit {version}' if version else ''}", right=True)

    def install(_dry_run: bool) -> Result:
        find.engines(host, request)  # no package is installed for an engine that can't be configured
        return toolkit.install(host, progress, dry_run=request.dry_run)

    return NodeStep("toolkit", f"gpunode toolkit install{words}", look, install)


def configured_engine(host: Host, request: Request, progress: Progress, choice: RuntimeChoice) -> Result:
    """`configure-runtime`; its dry run doesn't fail for the toolkit, which the previous step installs."""
    result = configure_runtime.run(host, request, progress, choice)
    others = tuple(error for error in result.errors if error.code != "toolkit-missing")
    if not request.dry_run or others == result.errors:
        return result
    if others:
        return replace(result, errors=others)
    return replace(result, status="ok", exit_code=ExitCode.OK, errors=())


# `gpunode setup`: doctor, toolkit, configure-runtime, verify in one report.


class Stage(NamedTuple):
    """One step of setup for programs; `result` is that command's own data."""

    name: str
    command: str
    status: str
    seconds: float
    result: object


class SetupReport(NamedTuple):
    """`data` of the envelope: the stages that ran, in order, and the engine that was set up."""

    engine: str
    stages: tuple[Stage, ...]


def set_up_containers(
    host: Host,
    request: Request,
    choice: RuntimeChoice,
    progress: Progress,
    show: Show = not_shown,
) -> Result:
    """Run the steps and show each when it is done; kind SetupReport. The exit code is that of the step that
    stopped it, 0 if none did."""
    (engine,) = request.runtimes
    cdi = choice.cdi

    def configured() -> Result:
        nonlocal engine
        result = configured_engine(host, request, progress, choice)
        if result.exit_code == ExitCode.OK:
            engine = getattr(result.data, "engine", engine)
        return result

    def steps() -> Iterator[NodeStep]:
        yield each_time("doctor", "gpunode doctor", lambda: doctor_before(host, progress, engine, cdi))
        dry_run = " --dry-run" if request.dry_run else ""
        if not cdi:
            yield toolkit_step(host, request, progress, dry_run)
        words = f"{' --cdi' if cdi else ''}{dry_run}"
        yield each_time(
            "configure-runtime", f"gpunode configure-runtime --runtime {engine}{words}", configured
        )
        if not request.dry_run:
            # auto is resolved by now
            yield from node_proofs(host, replace(request, runtimes=(engine,)), progress, cdi)

    results = walk(host, steps(), show, dry_run=False, problems=False)
    stages = tuple(
        Stage(step.name, step.command, "ok" if step.state == "done" else "fail", step.seconds, step.result)
        for step in results.steps
        if step.state in ("done", "failed")
    )
    data = SetupReport(engine, stages)
    if results.failure is not None and results.stopped_at is not None:
        command, hint = results.stopped_at.command, "fix the errors above, then run gpunode setup again"
        stopped = Result("SetupReport", data, blocks=(Text(f"Stopped at: {command}", Style.BAD),))
        return _failed(stopped, results.failure, "stage-failed", command, hint)
    check = f"gpunode verify --on {engine}{' --cdi' if cdi else ''}"
    if request.dry_run:
        end = [Text(f"Then: gpunode verify, and {check}; nothing was changed", Style.DIM)]
    elif host.live:
        end = [Text(f"This node is set up: a {engine} container computed on its GPUs.", Style.GOOD)]
        end += [Text(f"To check this again: {check}", Style.COMMAND)]
    else:
        not_verified = f"{engine} is configured, but not verified: gpunode starts nothing under --root."
        end = [Text(not_verified, Style.WARN)]
    return Result("SetupReport", data, blocks=tuple(end))


def _failed(result: Result, failure: Result, code: str, command: str, hint: str) -> Result:
    """The result of a setup that this failure stopped: with its errors, else with one that names the
    command."""
    return replace(
        result,
        status="error" if failure.exit_code == ExitCode.INTERRUPTED else "fail",
        exit_code=failure.exit_code,
        errors=failure.errors or (ErrorInfo(code, f"{command} failed", hint),),
    )


# `gpunode setup --kubernetes`: every step from the driver to a pod that runs CUDA.


class KubernetesSetup(NamedTuple):
    """`data` of the envelope. `go_on` is the command line that continues with the remaining steps, empty if
    none remain."""

    engine: str
    plugin: str
    steps: tuple[StepReport, ...]
    go_on: str
    dry_run: bool


class KubernetesGoal(NamedTuple):
    """What `setup --kubernetes` sets up. `request` and `choice` are for the engine."""

    request: Request
    options: KubernetesOptions
    choice: RuntimeChoice

    @property
    def cdi(self) -> bool:
        return self.choice.cdi

    @property
    def access(self) -> Access:
        return Access(self.options.kubeconfig, self.options.kube_context, self.options.server, pods=True)

    @property
    def command_line(self) -> str:
        """The equivalent command line, which continues with the remaining steps."""
        request = self.request
        words = {
            "--runtime": request.runtimes[0] if request.runtimes[0] != "auto" else "",
            "--config": request.config,
            "--socket": request.socket,
            "--restart-command": request.restart_command,
            **self.options.words,
        }
        flags = {"--cdi": self.cdi, "--set-as-default": self.choice.set_as_default, "--yes": request.yes}
        line = ["gpunode", "setup", "--kubernetes"]
        line += [part for flag, value in words.items() if value for part in (flag, value)]
        return shlex.join([*line, *(flag for flag, on in flags.items() if on)])


class ClusterNode(NamedTuple):
    """The node that every step works on; `engine` is its kubelet's. `cluster` is None if no API server is
    reachable; `offline` says why."""

    host: Host
    progress: Progress
    goal: KubernetesGoal
    engine: str
    cluster: Cluster | None
    offline: str = ""

    @property
    def request(self) -> Request:
        """The request for the kubelet's engine."""
        return replace(self.goal.request, runtimes=(self.engine,))

    @property
    def handler(self) -> str:
        """The runtime handler of pods; empty where the GPUs come by CDI and the engine has no handler."""
        installed = self.host.which("nvidia-container-runtime") is not None
        return "nvidia" if installed or not self.goal.cdi else ""

    @property
    def words(self) -> tuple[str, ...]:
        """The options by which another command finds the same node of the same cluster."""
        node = ("--node", self.goal.options.node) if self.goal.options.node else ()
        return (*node, *(self.cluster.options if self.cluster is not None else ()))


def set_up_kubernetes(host: Host, goal: KubernetesGoal, progress: Progress, show: Show = not_shown) -> Result:
    """Run the steps and show each when it is done; kind KubernetesSetup. The exit code is that of the step
    that stopped it, 0 if none did. Errors as in `prepare`."""
    at = prepare(host, goal, progress)
    dry_run = goal.request.dry_run
    try:
        needed = () if goal.cdi else (toolkit_step(host, at.request, progress),)
        steps = (_doctor(at), *needed, _runtime(at), _runtime_class(at), *_plugin(at), *_verify(at))
        results = walk(host, steps, show, dry_run=dry_run)
    finally:
        if at.cluster is not None:
            at.cluster.close()
    return _report(at, results, goal.command_line if results.stopped_at or dry_run or results.left else "")


def prepare(host: Host, goal: KubernetesGoal, progress: Progress) -> ClusterNode:
    """`UsageError`; `PreconditionError` for a node without kubelet or engine, or a user who isn't root."""
    request = goal.request
    if goal.options.image and goal.options.plugin != "daemonset":
        raise UsageError("--image is the DaemonSet's", hint="add --plugin daemonset")
    if host.live and not host.is_root and not request.dry_run:
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
    daemon = find.engine(host, request.runtimes[0], request.config, socket=request.socket).daemon
    if kubelet.engine != daemon.name:
        raise UsageError(
            f"the kubelet's engine is {kubelet.engine} ({kubelet.endpoint_source}), not {daemon.name}",
            hint="leave out --runtime",
        )
    return ClusterNode(host, progress, goal, find.name_of_daemon(daemon), *_connect(host, goal.access))


def _connect(host: Host, access: Access) -> tuple[Cluster | None, str]:
    """The cluster, or why there is none; a requested one that isn't available is an error."""
    if not host.live:
        return None, "gpunode contacts no API server under --root"
    try:
        return connect(host, access), ""
    except (NoAccess, ExtraMissing) as error:
        if access.kubeconfig or access.context or access.server:
            raise
        return None, f"{error.message}; {error.hint}"


def _report(at: ClusterNode, results: StepResults, go_on: str) -> Result:
    data = KubernetesSetup(at.engine, at.goal.options.plugin, results.steps, go_on, at.request.dry_run)
    blocks = (overview(results.steps), *_closing_lines(at, results, go_on))
    status = "warn" if results.left else "ok"
    result = Result("KubernetesSetup", data, status, messages=results.messages, blocks=blocks)
    if results.failure is None:
        return result
    command = results.stopped_at.command if results.stopped_at else "a step"
    return _failed(result, results.failure, "step-failed", command, "fix the errors above, then continue")


def _closing_lines(at: ClusterNode, results: StepResults, go_on: str) -> list[Block]:
    stopped = results.stopped_at
    if stopped is not None:
        done = ", ".join(step.name for step in results.steps if step.state in ("right", "done")) or "nothing"
        rest = ", ".join(step.name for step in results.steps if step.state == "waiting")
        first = "Would stop at" if at.request.dry_run else "Stopped at"
        blocks: list[Block] = [Text(f"{first} {stopped.name}: {stopped.why}", Style.BAD)]
        if not at.request.dry_run:
            blocks.append(Text(f"Done: {done}. Not done: {stopped.name}{f', {rest}' if rest else ''}"))
        return [*blocks, Text(f"Then continue with: {go_on}", Style.COMMAND)]
    if at.request.dry_run:
        return [Text(f"Nothing was changed. To apply: {go_on}", Style.COMMAND)]
    manual = [Text(f"To be done manually: {step.name}: {step.why}", Style.WARN) for step in results.left]
    manual += [Text(f"  {at.offline}", Style.DIM)] if manual and at.offline else []
    if not at.host.live:
        last = Text(
            "This node is configured, but not verified: gpunode starts nothing under --root.", Style.WARN
        )
    elif at.cluster is None:
        last = Text(f"This node is set up: a {at.engine} container computed on its GPUs.", Style.GOOD)
    else:
        last = Text("This node is set up: a pod computed on its GPU.", Style.GOOD)
    return [*manual, last, *(_next_steps(at) if at.host.live else ())]


def _next_steps(at: ClusterNode) -> Iterator[Block]:
    """The resources that pods can request here, an example pod, and how to see which pod has which GPU."""
    counts = [f"{count} {name}" for name, count in serving(at.host).counts if count]
    if not counts:
        return
    resource, options = _resource(at.host), at.cluster.options if at.cluster is not None else ()
    words: tuple[str, ...] = ("--resource", resource) if resource != "nvidia.com/gpu" else ()
    words += () if at.handler else ("--runtime-class", "")
    example = shlex.join(("gpunode", "manifests", "vector-add", *words))
    yield Text(f"Pods can request: {', '.join(counts)}", Style.GOOD)
    apply = kubectl(at.host, options, "apply", "-f", "-")
    yield Text(f"To try it with an example pod: {example} | {apply}", Style.COMMAND)
    yield Text("To see which pod has which GPU: gpunode plugin status", Style.COMMAND)


def _doctor(at: ClusterNode) -> NodeStep:
    """Checks of the node: setup stops where GPUs can't work; findings that a later step fixes don't count."""

    def examine(_dry_run: bool) -> Result:
        return doctor_before(at.host, at.progress, at.engine, at.goal.cdi, pods=True)

    return NodeStep("doctor", "gpunode doctor", lambda: StepState("no error that setup can't fix"), examine)


def _runtime(at: ClusterNode) -> NodeStep:
    def look() -> StepState:
        data = configured(dry_run=True).data
        changes = [change.path for change in data.changes if change.action != "unchanged"]
        if changes:
            return StepState(f"{', '.join(changes)} must be changed")
        if data.restart.verb != "none":
            return StepState(f"{at.engine} has not loaded {data.config}")
        handlers = f": {', '.join(data.active.handler)}" if data.active else ""
        return StepState(f"{at.engine} is configured{handlers}", right=True)

    def configured(dry_run: bool) -> Result:
        request = replace(at.request, dry_run=dry_run)
        return configured_engine(at.host, request, at.progress, at.goal.choice)

    by_cdi = " --cdi" if at.goal.cdi else ""
    command = f"gpunode configure-runtime --runtime {at.engine}{by_cdi}"
    return NodeStep("runtime", command, look, configured)


def _runtime_class(at: ClusterNode) -> NodeStep:
    command = "gpunode manifests runtime-class"
    desired = (runtime_class("nvidia"),)

    def look() -> StepState:
        if not at.handler:
            return StepState("pods get their GPUs through CDI and need no RuntimeClass", right=True)
        if at.cluster is None:
            return StepState(
                f"no access to the API server; run where kubectl works: {command} | kubectl apply -f -",
                left=True,
            )
        objects = look_at(at.host, at.cluster, desired, at.progress)
        refuse_others(objects, command)
        if objects[0].existing is not None:
            return StepState("RuntimeClass nvidia is in the cluster", right=True)
        return StepState("RuntimeClass nvidia isn't in the cluster")

    def make(dry_run: bool) -> Result:
        assert at.cluster is not None  # `look` has skipped the step
        return make_objects(at.host, at.cluster, desired, at.progress, dry_run=dry_run)

    return NodeStep("runtime-class", f"{command} | kubectl apply -f -", look, make)


def _gpu_label(at: ClusterNode) -> NodeStep:
    """Label of the nodes with GPUs, where the DaemonSet runs: by NFD, or this one."""
    key = present("nvidia")
    if at.cluster is not None:
        name, _ = node_name(at.host, at.goal.options.node, at.cluster.node)
        words = at.cluster.options
    else:
        name, words = at.goal.options.node or at.host.environ.get("NODE_NAME") or "NAME", ()
    command = kubectl(at.host, words, "label", "node", name, f"{key}=true")

    def look() -> StepState:
        if at.cluster is None:
            return StepState(f"where kubectl works: {command}", left=True)
        labels = gpu_labels(at.cluster.get("Node", name))
        return (
            StepState(f"{name} has {labels[0]}", right=True)
            if labels
            else StepState(f"{name} has no label that the DaemonSet selects")
        )

    def label(dry_run: bool) -> Result:
        assert at.cluster is not None  # `look` has skipped the step
        place = node_object.place_in(at.cluster, at.host, at.goal.options.node, dry_run)
        return set_label(at.host, place, key, "true", at.progress)

    return NodeStep("node-label", command, look, label)


def gpu_labels(node: Json) -> tuple[str, ...]:
    """The labels of a Node that the plugin's DaemonSet selects."""
    pod = daemon_set(PluginSet("any"))["spec"]["template"]["spec"]
    terms = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    keys = [term["matchExpressions"][0]["key"] for term in terms["nodeSelectorTerms"]]
    labels = labels_of(node)
    return tuple(key for key in keys if labels.get(key) == "true")


def set_label(host: Host, at: node_object.NodeLocation, key: str, value: str, progress: Progress) -> Result:
    """Set one label of the node; kind NodeChange. `ClusterError`."""
    done = node_object.carry_out(host, progress, at, lambda node: label_patch(node, {key: value}))
    before = labels_of(done.before).get(key)
    undo_arguments = (f"{key}-",) if before is None else ("--overwrite", f"{key}={before}")
    undo = kubectl(host, at.cluster.options, "label", "node", at.node, *undo_arguments)
    return node_object.changed_node(at, done, [node_object.KeyChange(key, before, value)], undo)


def _plugin(at: ClusterNode) -> tuple[NodeStep, ...]:
    host, goal, progress, dry_run = at.host, at.goal, at.progress, at.request.dry_run
    if goal.options.plugin == "systemd":
        return (service_step(host, goal.cdi, goal.options.wait, progress, dry_run=dry_run),)

    def desired_plugin() -> PluginSet:
        kubelet = find_kubelet(host, running(host))
        options = manifests.PluginOptions(
            image=goal.options.image,
            runtime_class=at.handler,
            cdi=goal.cdi,
            kubelet_root=root_directory(kubelet),
        )
        return manifests.plugin_set(host, options)

    step = daemon_set_step(
        host, at.cluster, desired_plugin, goal.options.image, goal.options.wait, progress, dry_run=dry_run
    )
    return _gpu_label(at), step


def _verify(at: ClusterNode) -> tuple[NodeStep, ...]:
    """The verification: in a pod if the API server is reachable, else on the host and the kubelet's
    engine."""
    if at.cluster is None:
        return node_proofs(at.host, at.request, at.progress, at.goal.cdi)

    def prove() -> Result:
        request = verify_kubernetes.PodRequest(
            image=at.goal.options.test_image,
            node=at.goal.options.node,
            resource=_resource(at.host),
            runtime_class=verify_kubernetes.AUTO if at.handler else "",
            access=at.goal.access,
        )
        return verify_kubernetes.run(at.host, request, at.progress)

    command = shlex.join(("gpunode", "verify", "--on", "kubernetes", *at.words))
    return (each_time("verify", command, prove),)


def _resource(host: Host) -> str:
    """The resource by which the kubelet counts whole GPUs, else the first of NVIDIA's that is allocatable."""
    offered = [name for name, count in serving(host).counts if count]
    return "nvidia.com/gpu" if "nvidia.com/gpu" in offered or not offered else offered[0]
