"""`gpunode verify --on kubernetes`: the vector-add pod on this node, from its creation to its removal."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from gpunode.commands import leftover_pods, verify
from gpunode.commands.manifests import PodOptions, wanted_pod
from gpunode.commands.verify import Verification
from gpunode.commands.verify_following import Follower, Outcome
from gpunode.dataclass import dataclass, field
from gpunode.errors import GpunodeError, PreconditionError, UsageError
from gpunode.gpu.vectors import DeviceResult
from gpunode.host import Host
from gpunode.kubernetes import follow, reasons, which_node
from gpunode.kubernetes.access import Access, connect, node_name
from gpunode.kubernetes.api import (
    Cluster,
    ClusterError,
    Forbidden,
    Invalid,
    Json,
    NotFound,
    Unavailable,
    Unreachable,
)
from gpunode.kubernetes.change import patiently
from gpunode.kubernetes.manifests.vector_add import HOSTNAME, RUN, VectorAdd, vector_add
from gpunode.kubernetes.reasons import Aim, Reason
from gpunode.plugin.observe.own_status import read_own_status
from gpunode.plugin.settings import Settings
from gpunode.result import Block, Cell, ErrorInfo, ExitCode, Progress, Result, Style, Table, Text

AUTO = "auto"
_STATE_DIR = Settings.state_dir
DEFAULT_SECONDS = 300.0  # the sample's image is some hundred megabytes
_GRACE = 30  # beyond our own patience the pod may live, should nobody be left to remove it


@dataclass(frozen=True)
class Options:
    """`timeout`: seconds for the whole, an image's pull included. `runtime_class` is its name, empty for
    none, or auto: `runtime_name` where the cluster has a RuntimeClass of that name."""

    image: str = ""
    namespace: str = ""
    node: str = ""
    resource: str = "nvidia.com/gpu"
    runtime_class: str = AUTO
    runtime_name: str = "nvidia"
    timeout: float = DEFAULT_SECONDS
    access: Access = field(default_factory=Access)


@dataclass(frozen=True)
class PodRun:
    """What became of the pod. `code` and `reason` are empty if it passed; `log` is its last lines; `seconds`
    from its creation to its end; `removed` whether it is gone from the cluster."""

    server: str
    namespace: str
    name: str
    node: str
    resource: str
    runtime_class: str
    phase: str
    code: str
    reason: str
    seconds: float
    log: tuple[str, ...]
    removed: bool


@dataclass(frozen=True)
class _Case:
    """All that is known before the pod is made."""

    cluster: Cluster
    namespace: str
    pod: VectorAdd
    aim: Aim
    timeout: float


def asked(options: verify.Options) -> Options:
    """The options of `verify` as this command has them."""
    pod = options.pod
    return Options(
        image=options.image,
        namespace=pod.namespace,
        node=pod.node,
        resource=pod.resource or Options.resource,
        runtime_class=pod.runtime_class,
        runtime_name=options.runtime_name,
        timeout=pod.timeout or DEFAULT_SECONDS,
        access=Access(pod.kubeconfig, pod.context, pod.server),
    )


def run(host: Host, options: Options, progress: Progress) -> Result:
    """Exit 1 with the reason where the pod doesn't start or pass; `ClusterError` where the API server fails.
    Whatever happens, Ctrl-C included, the pod is removed; where it can't be, the command for it is told."""
    if not options.timeout >= 1:
        raise UsageError("--timeout is at least 1 second")
    case = _case(host, options, progress)
    leftover_pods.sweep(host, case.cluster, case.namespace, case.pod.hostname)
    traces: list[str] = []
    step = progress.step(f"vector-add pod on {case.aim.node}")
    with _removed_after(host, case, progress, traces) as names, step:
        created = _create(host, case)
        names.append(str(created["metadata"]["name"]))
        follower = Follower(host, case.cluster, case.aim, progress)
        outcome = follower.follow(case.namespace, created, case.timeout)
    return _report(case, outcome, tuple(traces))


# --- before ---------------------------------------------------------------------------------------------


def _case(host: Host, options: Options, progress: Progress) -> _Case:
    node_name(host, options.node)
    wanted = PodOptions(options.image, options.resource, options.namespace, "", "")
    pod = wanted_pod(wanted)  # what can't be meant is refused before anybody is asked
    cluster = connect(host, options.access)
    name, source = node_name(host, options.node, cluster.node)
    try:
        node = patiently(host, progress, lambda: cluster.get_node(name))
    except NotFound as error:
        error.hint = which_node.hint(host, cluster, source)
        raise
    labels = node.get("metadata", {}).get("labels") or {}
    namespace = options.namespace or cluster.namespace
    made = VectorAdd(
        image=pod.image,
        resource=pod.resource,
        namespace=namespace,
        hostname=str(labels.get(HOSTNAME) or name),
        runtime_class=_runtime_class(host, cluster, options, progress),
        seconds=math.ceil(options.timeout) + _GRACE,
        run=secrets.token_hex(8),
    )
    return _Case(cluster, namespace, made, _aim(host, name, node, pod), options.timeout)


def _aim(host: Host, name: str, node: Json, pod: VectorAdd) -> Aim:
    status = node.get("status") or {}
    return Aim(
        *(name, pod.resource, pod.image),
        status.get("allocatable") or {},
        status.get("capacity") or {},
        _unhealthy(host, pod.resource) if which_node.is_this_machine(host, node) else (),
        tuple(_untolerated(node, pod.resource)),
    )


def _untolerated(node: Json, resource: str) -> Iterator[str]:
    """The node's taints that keep the test pod away, as kubectl spells them."""
    for taint in (node.get("spec") or {}).get("taints") or ():
        key, value, effect = (str(taint.get(name) or "") for name in ("key", "value", "effect"))
        if effect != "PreferNoSchedule" and (key, effect) != (resource, "NoSchedule"):
            yield reasons.short(f"{key}={value}:{effect}" if value else f"{key}:{effect}")


def _unhealthy(host: Host, resource: str) -> tuple[str, ...]:
    """Which devices gpunode's own plugin on this machine calls unhealthy, and why."""
    try:
        own = read_own_status(host, _STATE_DIR)
    except GpunodeError:  # the file belongs to root
        return ()
    units = [unit for one in own.resources if one.name == resource for unit in one.units] if own else []
    return tuple(
        reasons.short(f"GPU {unit.index} {unit.id}: {unit.problem.reason}") for unit in units if unit.problem
    )


def _runtime_class(host: Host, cluster: Cluster, options: Options, progress: Progress) -> str:
    asked = options.runtime_class
    name = options.runtime_name if asked == AUTO else asked
    if not name:
        return ""
    try:
        patiently(host, progress, lambda: cluster.get_runtime_class(name))
    except Forbidden:
        return "" if asked == AUTO else name
    except NotFound as error:
        if asked == AUTO:
            return ""  # then nvidia is the engine's default runtime, or the plugin gives CDI devices
        raise PreconditionError(
            f"the cluster has no RuntimeClass {name!r}",
            hint=reasons.missing_class(name),
            code="pending-runtime-class",
        ) from error
    return name


def _create(host: Host, case: _Case) -> Json:
    wanted = vector_add(case.pod)
    wanted["metadata"]["annotations"] = leftover_pods.made_by(host)
    try:
        return case.cluster.create_pod(case.namespace, wanted)
    except (Forbidden, Invalid, NotFound, Unavailable) as error:
        code, hint = reasons.refused(error.message, case.namespace, case.pod.runtime_class)
        if not code:
            raise
        told = type(error)(error.message, hint=hint, code=code, status=error.status)
        if isinstance(told, Unavailable) and isinstance(error, Unavailable):
            told.sent = error.sent
        raise told from error


# --- after ----------------------------------------------------------------------------------------------


@contextmanager
def _removed_after(host: Host, case: _Case, progress: Progress, traces: list[str]) -> Iterator[list[str]]:
    """Collects the pod's name; whatever ends the body, the pod is removed. What stays goes into `traces`, and
    is told at once, as an error on its way out says something else."""
    names: list[str] = []
    try:
        yield names
    except ClusterError as error:
        if names or isinstance(error, Unavailable) or (isinstance(error, Unreachable) and error.sent):
            _remove(host, case, progress, names, traces)
        raise  # else it never was
    except BaseException:
        _remove(host, case, progress, names, traces)
        raise
    _remove(host, case, progress, names, traces)


def _remove(host: Host, case: _Case, progress: Progress, names: list[str], traces: list[str]) -> None:
    """By its name; by its run's label where the answer to its creation never came."""
    try:
        for name in names or _of_this_run(host, case, progress):
            _delete(host, case, progress, name)
    except ClusterError as error:
        which = f"pod {names[0]}" if names else f"pods --selector {RUN}={case.pod.run}"
        words = f"kubectl --namespace {case.namespace} delete {which}"
        traces.append(f"the pod may be left in {case.namespace} ({error.message}); remove it: {words}")
        progress.note(traces[-1])


def _of_this_run(host: Host, case: _Case, progress: Progress) -> list[str]:
    mark = {RUN: case.pod.run}
    found = patiently(host, progress, lambda: case.cluster.list_pods(case.namespace, mark))
    return [str(one["metadata"]["name"]) for one in found]


def _delete(host: Host, case: _Case, progress: Progress, name: str) -> None:
    def ask() -> None:
        try:
            case.cluster.delete_pod(case.namespace, name)
        except NotFound:
            return  # somebody was faster, or the answer to a first try was lost

    patiently(host, progress, ask)


# --- telling it -----------------------------------------------------------------------------------------


def _report(case: _Case, outcome: Outcome, traces: tuple[str, ...]) -> Result:
    reason = outcome.reason
    pod = PodRun(
        server=case.cluster.server,
        namespace=case.namespace,
        name=outcome.name,
        node=case.aim.node,
        resource=case.pod.resource,
        runtime_class=case.pod.runtime_class,
        phase=outcome.phase,
        code=reason.code if reason else "",
        reason=reason.message if reason else "",
        seconds=round(outcome.seconds, 2),
        log=tuple(outcome.log.splitlines()),
        removed=not traces,
    )
    shown = DeviceResult(
        *(0, "", case.pod.image),
        status="fail" if reason else "ok",
        milliseconds=outcome.seconds * 1000,
        message=reason.message if reason else follow.PASSED,
    )
    data = Verification("kubernetes", (shown,), case.pod.image, outcome.via, pod)
    errors = (ErrorInfo(reason.code, f"{case.aim.node}: {reason.message}", reason.hint),) if reason else ()
    return Result(
        "Verification",
        data,
        "fail" if reason else "warn" if traces else "ok",
        ExitCode.FAILED if reason else ExitCode.OK,
        traces,
        errors,
        _blocks(pod, outcome.via, reason),
    )


def _blocks(pod: PodRun, via: str, reason: Reason | None) -> tuple[Block, ...]:
    style = Style.BAD if reason else Style.GOOD
    verdict = f"{pod.phase}: {pod.reason}" if reason else f"{pod.phase}: {follow.PASSED}"
    row = (
        pod.node,
        f"{pod.namespace}/{pod.name}",
        pod.resource,
        via,
        f"{pod.seconds:.1f} s",
        Cell(verdict, style),
    )
    table = Table(("NODE", "POD", "RESOURCE", "VIA", "TIME", "RESULT"), (row,))
    log = tuple(Text(f"  {line}", Style.DIM) for line in pod.log)
    told = "The pod computed on a GPU of" if not reason else "No pod computed on a GPU of"
    return table, *((Text("Its log:"), *log) if log else ()), Text(f"{told} {pod.node}", style)
