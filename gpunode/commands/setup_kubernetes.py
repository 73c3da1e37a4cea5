"""`gpunode setup --kubernetes`: from the driver to a pod that computes. `steps` is the whole way.

Each is one of gpunode's own commands; setup_steps.py says what a step is, `setup.Way` what all of them share.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gpunode.commands import node
from gpunode.commands.setup_containers import (
    KubernetesOptions,
    Way,
    command_line,
    doctor_before,
    mended_by_configuring,
    prepare,
)
from gpunode.commands.setup_steps import Show, State, Step, StepReport, Walked, not_shown, overview, walk
from gpunode.facts.distributions import DISTRIBUTIONS
from gpunode.facts.kubelet import find_kubelet, root_directory
from gpunode.facts.processes import running
from gpunode.host import Host
from gpunode.kubernetes.access import Access
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
    from gpunode.commands import configure_runtime, manifests
    from gpunode.kubernetes.api import Json


# What `setup --kubernetes` makes of the doctor's findings, and its proofs at the end.

_ENGINE_LAYERS = {"docker", "containerd", "crio", "podman"}
_MENDED_BY = {
    "toolkit-missing": "the step toolkit",
    "plugin-not-registered": "the step plugin",
    "plugin-socket-dead": "the step plugin",
    "runtimeclass-missing": "the step runtime-class",
}
_RUN = "the proof, each time"


def excuse_for(finding: Finding, engine: str, cdi: bool) -> str:
    """Why a failed check doesn't stop the set-up; empty if it does."""
    mended = mended_by_configuring(finding, cdi) or _MENDED_BY.get(finding.id, "")
    if mended:
        return mended
    if finding.severity != "error":
        return "pods run all the same"
    own = "containerd" if engine in DISTRIBUTIONS else engine
    if finding.layer in _ENGINE_LAYERS - {own}:
        return f"not needed for {engine}"
    return ""


def with_reason(result: Result, excuse: Callable[[Finding], str]) -> Result:
    """The doctor's result with the faults that stopped it as one error."""
    if result.exit_code is ExitCode.OK:
        return result
    findings: tuple[Finding, ...] = result.data["findings"]
    bad = [one for one in findings if one.status is FindingStatus.FAIL and not excuse(one)]
    if not bad:
        return result
    told = "; ".join(f"{one.id}: {one.summary}" for one in bad)
    error = ErrorInfo("doctor-failed", told, f"find out more: gpunode explain {bad[0].id}")
    return replace(result, errors=(error,))


def gpu_labels(node: Json) -> tuple[str, ...]:
    """The labels of a Node by which the plugin's DaemonSet comes to it."""
    from gpunode.kubernetes.changes import labels_of
    from gpunode.kubernetes.manifests import PluginSet, daemon_set

    pod = daemon_set(PluginSet("any"))["spec"]["template"]["spec"]
    terms = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    keys = [one["matchExpressions"][0]["key"] for one in terms["nodeSelectorTerms"]]
    there = labels_of(node)
    return tuple(key for key in keys if there.get(key) == "true")


def node_steps(way: Way) -> tuple[Step, ...]:
    """Without a cluster: the host and, on a live node, a container of the kubelet's engine."""
    from gpunode.commands import verify_node

    options, host = way.options, way.host
    in_engine = verify_node.Options(
        on=way.engine, config=options.engine.config, socket=options.engine.socket, cdi=options.engine.cdi
    )
    by_cdi = " --cdi" if options.engine.cdi else ""
    first = _proof(
        "verify-host", "gpunode verify", lambda: verify_node.run(host, verify_node.Options(), way.progress)
    )
    if not host.live:
        return (first,)  # nothing can be started under --root
    command = f"gpunode verify --on {way.engine}{by_cdi}"
    return (
        first,
        _proof("verify-container", command, lambda: verify_node.run(host, in_engine, way.progress)),
    )


def pod_step(way: Way) -> Step:
    """A pod on this node, through the API server."""
    from gpunode.commands import verify_kubernetes

    options = way.options

    def prove() -> Result:
        wanted = verify_kubernetes.Options(
            image=options.test_image,
            node=options.node,
            resource=_resource(way.host),
            runtime_class=verify_kubernetes.AUTO if way.handler else "",
            access=options.access,
        )
        return verify_kubernetes.run(way.host, wanted, way.progress)

    return _proof("verify", shlex.join(("gpunode", "verify", "--on", "kubernetes", *way.words)), prove)


def _resource(host: Host) -> str:
    """What the kubelet counts whole GPUs by, else the first of NVIDIA's resources that it can hand out."""
    from gpunode.commands.setup_plugin import serving

    offered = [name for name, count in serving(host).counts if count]
    return "nvidia.com/gpu" if "nvidia.com/gpu" in offered or not offered else offered[0]


def _proof(name: str, command: str, prove: Callable[[], Result]) -> Step:
    def planned() -> Result:
        return Result("Verification", None, blocks=(Text(f"would run: {command}", Style.COMMAND),))

    return Step(name, command, lambda: State(_RUN), planned, prove)


__all__ = ["Access", "KubernetesOptions", "KubernetesSetup", "run"]


@dataclass(frozen=True)
class KubernetesSetup:
    """`data` of the envelope. `go_on` is the command line that takes the rest up, if there is any."""

    engine: str
    plugin: str
    steps: tuple[StepReport, ...]
    go_on: str
    dry_run: bool


def run(host: Host, options: KubernetesOptions, progress: Progress, show: Show = not_shown) -> Result:
    """Go the way and show each step when it is done; kind KubernetesSetup. The exit code is that of the step
    that stopped it, 0 if none did.

    Errors as `prepare` has them.
    """
    way = prepare(host, options, progress)
    try:
        walked = walk(host, steps(way), show, dry_run=options.engine.dry_run)
    finally:
        way.close()
    stopped = walked.stopped_at
    go_on = command_line(options) if (stopped or options.engine.dry_run or walked.left) else ""
    data = KubernetesSetup(way.engine, options.plugin, walked.steps, go_on, options.engine.dry_run)
    blocks = (overview(walked.steps), *_last_words(way, walked, go_on))
    failure = walked.failure
    if failure is None:
        status = "warn" if walked.left else "ok"
        return Result("KubernetesSetup", data, status, messages=walked.messages, blocks=blocks)
    return Result(
        "KubernetesSetup",
        data,
        "error" if failure.exit_code is ExitCode.INTERRUPTED else "fail",
        failure.exit_code,
        walked.messages,
        failure.errors or (_unexplained(stopped),),
        blocks,
    )


def steps(way: Way) -> tuple[Step, ...]:
    """The whole way."""
    from gpunode.commands.setup_plugin import daemon_set_step, service_step

    host, options, progress = way.host, way.options, way.progress
    dry_run = options.engine.dry_run
    found = [_doctor(way)]
    if not options.engine.cdi:  # by CDI, containers get their GPUs without it
        found.append(_toolkit(way))
    found += [_runtime(way), _runtime_class(way)]
    if options.plugin == "daemonset":
        found.append(_gpu_label(way))
        found.append(
            daemon_set_step(host, way.cluster, _manifest(way), options.wait, progress, dry_run=dry_run)
        )
    else:
        found.append(service_step(host, options.engine.cdi, options.wait, progress, dry_run=dry_run))
    return (*found, *_verify(way))


# --- the steps, but for the plugin's --------------------------------------------------------------------


def _doctor(way: Way) -> Step:
    """Nothing is set up on a node whose GPUs can't work; what a later step mends doesn't count."""

    def excuse(finding: Finding) -> str:
        return excuse_for(finding, way.engine, way.options.engine.cdi)

    def examine() -> Result:
        return with_reason(doctor_before(way.host, excuse, way.progress), excuse)

    return Step("doctor", "gpunode doctor", lambda: State("no fault that this can't mend"), examine, examine)


def _toolkit(way: Way) -> Step:
    from gpunode.commands import toolkit

    def look() -> State:
        from gpunode.facts.toolkit import find_toolkit

        found = find_toolkit(way.host)
        path = found.programs.get("nvidia-container-runtime")
        if path is None:
            return State("nvidia-container-runtime is not there")
        version = ".".join(map(str, found.version))
        return State(f"{path} is there{f', toolkit {version}' if version else ''}", right=True)

    def install(dry_run: bool) -> Result:
        return toolkit.install(way.host, toolkit.InstallOptions(dry_run=dry_run), way.progress)

    return Step("toolkit", "gpunode toolkit install", look, lambda: install(True), lambda: install(False))


def _runtime(way: Way) -> Step:
    from gpunode.commands import configure_runtime

    def look() -> State:
        data = configure_runtime.run(way.host, _configuring(way, True), way.progress).data
        changes = [one.path for one in data.changes if one.action != "unchanged"]
        if changes:
            return State(f"{', '.join(changes)} must say so")
        if data.restart.verb != "none":
            return State(f"{way.engine} hasn't read {data.config}")
        handlers = f": {', '.join(data.active.handler)}" if data.active else ""
        return State(f"{way.engine} has it{handlers}", right=True)

    def configure(dry_run: bool) -> Result:
        return configure_runtime.run(way.host, _configuring(way, dry_run), way.progress)

    def plan() -> Result:
        result = configure(True)
        if all(error.code == "toolkit-missing" for error in result.errors):  # the step before installs it
            return replace(result, status="ok", exit_code=ExitCode.OK, errors=())
        return result

    by_cdi = " --cdi" if way.options.engine.cdi else ""
    command = f"gpunode configure-runtime --runtime {way.engine}{by_cdi}"
    return Step("runtime", command, look, plan, lambda: configure(False))


def _configuring(way: Way, dry_run: bool) -> configure_runtime.Options:
    from gpunode.commands import configure_runtime

    options = way.options
    request = configure_runtime.Request(
        runtimes=(way.engine,),
        config=options.engine.config,
        socket=options.engine.socket,
        restart_command=options.engine.restart_command,
        dry_run=dry_run,
        yes=options.engine.yes,
        configures=True,
    )
    return configure_runtime.Options(
        request, set_as_default=options.engine.set_as_default, cdi=options.engine.cdi
    )


def _runtime_class(way: Way) -> Step:
    from gpunode.commands import setup_steps
    from gpunode.kubernetes.manifests import runtime_class

    command = "gpunode manifests runtime-class"
    wanted = (runtime_class("nvidia"),)

    def look() -> State:
        if not way.handler:
            return State("pods get their GPUs by CDI and name no runtime", right=True)
        if way.cluster is None:
            return State(
                f"no API server from here; where kubectl works: {command} | kubectl apply -f -", left=True
            )
        held = setup_steps.look(way.host, way.cluster, wanted, way.progress)
        setup_steps.refuse_others(held, command)
        if held[0].existing is not None:
            return State("RuntimeClass nvidia is in the cluster", right=True)
        return State("RuntimeClass nvidia isn't in the cluster")

    def make(dry_run: bool) -> Result:
        assert way.cluster is not None  # `look` has left it
        return setup_steps.make(way.host, way.cluster, wanted, way.progress, dry_run=dry_run)

    return Step(
        "runtime-class",
        f"{command} | kubectl apply -f -",
        look,
        lambda: make(True),
        lambda: make(False),
    )


def _gpu_label(way: Way) -> Step:
    """The DaemonSet comes to nodes that are known to have GPUs: by NFD's labels, or by this one."""
    from gpunode.kubernetes.access import kubectl, node_name
    from gpunode.kubernetes.manifests import present

    options, key = way.options, present("nvidia")
    if way.cluster is not None:
        name, _ = node_name(way.host, options.node, way.cluster.node)
        words = way.cluster.options
    else:
        name, words = options.node or way.host.environ.get("NODE_NAME") or "NAME", ()
    command = kubectl(way.host, words, "label", "node", name, f"{key}=true")

    def look() -> State:
        if way.cluster is None:
            return State(f"where kubectl works: {command}", left=True)
        found = gpu_labels(way.cluster.get("Node", name))
        return State(f"{name} has {found[0]}", right=True) if found else State(f"{name} isn't marked as one")

    def label(dry_run: bool) -> Result:
        assert way.cluster is not None  # `look` has left it
        at = node.place_in(way.cluster, way.host, options.node, dry_run)
        return set_label(way.host, at, key, "true", way.progress)

    return Step("node-label", command, look, lambda: label(True), lambda: label(False))


def set_label(host: Host, at: node.Place, key: str, value: str, progress: Progress) -> Result:
    """Set one label of the node; kind NodeChange. `ClusterError`."""
    from gpunode.kubernetes.access import kubectl
    from gpunode.kubernetes.changes import label_patch, labels_of

    done = node.carry_out(host, progress, at, lambda node: label_patch(node, {key: value}))
    before = labels_of(done.before).get(key)
    back = (f"{key}-",) if before is None else ("--overwrite", f"{key}={before}")
    undo = kubectl(host, at.cluster.options, "label", "node", at.node, *back)
    data = node.told(at, done, [node.KeyChange(key, before, value)], undo)
    return Result(node.KIND, data, blocks=node.blocks(data))


def _manifest(way: Way) -> manifests.PluginOptions:
    from gpunode.commands import manifests

    kubelet = find_kubelet(way.host, running(way.host))
    return manifests.PluginOptions(
        image=way.options.image,
        runtime_class=way.handler,
        cdi=way.options.engine.cdi,
        kubelet_root=root_directory(kubelet),
    )


def _verify(way: Way) -> tuple[Step, ...]:
    """The proof: a pod where there is a way to the API server, else the host and the kubelet's engine."""
    if way.cluster is not None:
        return (pod_step(way),)
    return node_steps(way)


# --- what is said at the end ----------------------------------------------------------------------------


def _last_words(way: Way, walked: Walked, go_on: str) -> list[Block]:
    stopped = walked.stopped_at
    if stopped is not None:
        done = ", ".join(one.name for one in walked.steps if one.state in ("right", "done")) or "nothing"
        rest = ", ".join(one.name for one in walked.steps if one.state == "waiting")
        first = "Would stop at" if way.options.engine.dry_run else "Stopped at"
        blocks: list[Block] = [Text(f"{first} {stopped.name}: {stopped.why}", Style.BAD)]
        if not way.options.engine.dry_run:
            blocks.append(
                Text(f"Right or done: {done}. Not done: {stopped.name}{f', {rest}' if rest else ''}")
            )
        return [*blocks, Text(f"Then go on with: {go_on}", Style.COMMAND)]
    if way.options.engine.dry_run:
        return [Text(f"Nothing was changed. Do it with: {go_on}", Style.COMMAND)]
    left = [Text(f"Left to you: {one.name}: {one.why}", Style.WARN) for one in walked.left]
    left += [Text(f"  {way.offline}", Style.DIM)] if left and way.offline else []
    if not way.host.live:
        told = Text("Nothing was started under --root: this node is configured, not proven.", Style.WARN)
    elif way.cluster is None:
        told = Text(f"This node runs GPU containers with {way.engine}: it just did.", Style.GOOD)
    else:
        told = Text("This node runs GPU pods: it just did.", Style.GOOD)
    return [*left, told]


def _unexplained(stopped: StepReport | None) -> ErrorInfo:
    command = stopped.command if stopped else "a step"
    return ErrorInfo("step-failed", f"{command} failed", "mend what it says above, then go on")
