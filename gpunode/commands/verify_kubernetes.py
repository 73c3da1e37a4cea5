"""`gpunode verify --on kubernetes`: the vector-add pod on this node, from its creation to its removal."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from gpunode.commands.manifests import vector_add_pod
from gpunode.errors import GpunodeError, PreconditionError
from gpunode.gpu.vectoradd import DeviceResult
from gpunode.host import Host
from gpunode.kubernetes import access, pods
from gpunode.kubernetes.access import Access, connect, node_name
from gpunode.kubernetes.api import (
    ClusterError,
    Forbidden,
    Invalid,
    Json,
    NotFound,
    Unavailable,
    Unreachable,
    one_line,
)
from gpunode.kubernetes.changes import patiently
from gpunode.kubernetes.manifests import CONTAINER, HOSTNAME, RUN, VectorAdd, ours, vector_add
from gpunode.kubernetes.pods import DOCTOR, Aim, Phase, PodState, Reason
from gpunode.output.result import Block, Cell, ErrorInfo, ExitCode, Progress, Result, Style, Table, Text
from gpunode.plugin.config.settings import Settings
from gpunode.plugin.observe.status_file import read_own_status
from gpunode.runtime.verify import container
from gpunode.runtime.verify.container import PodRun, Verification

if TYPE_CHECKING:
    from gpunode.kubernetes.client import Cluster

# Waits until the vector-add pod has ended, or further waiting is pointless.

_PAUSES = (0.1, 0.2, 0.5, 1.0)  # seconds between checks; the last one repeats
_SILENCE = 30.0  # how long the API server may be unreachable
_LINES = 200  # of the log


class PodResult(NamedTuple):
    """`reason` None: it passed. `via` says how the pod got the GPU; `seconds` from the pod's creation on."""

    name: str
    phase: str
    reason: Reason | None
    log: str
    via: str
    seconds: float


class PodFollower:
    """Polls the pod, and reports every new reason why it makes no progress."""

    def __init__(self, host: Host, cluster: Cluster, aim: Aim, progress: Progress) -> None:
        self._host, self._cluster, self._aim, self._progress = host, cluster, aim, progress
        self._since: dict[str, float] = {}
        self._reason: Reason | None = None
        self._silent: float | None = None
        self._blind = False  # events may not be listed

    def follow(self, namespace: str, created: Json, timeout: float) -> PodResult:
        """`ClusterError` if the API server refuses or stays unreachable. At most `timeout` seconds."""
        began = self._host.monotonic()
        name, pod, state, looks = str(created["metadata"]["name"]), created, PodState(Phase.PENDING), 0
        while True:
            pod = self._look(namespace, name, pod, began + timeout)
            state = pods.state(pod, self._events(namespace, pod), self._aim)
            waited = self._host.monotonic() - began
            exempt = state.ended or self._silent is not None  # an unreachable server has its own limit
            given_up = None if exempt else self._out_of_patience(state, waited, timeout)
            if state.ended or given_up is not None:
                break
            self._host.sleep(_PAUSES[min(looks, len(_PAUSES) - 1)])
            looks += 1
        log = self._log(namespace, name) if state.phase is not Phase.PENDING else ""
        reason = given_up or pods.verdict(state, log, self._aim)
        return PodResult(name, state.phase, reason, log, pods.allocation(pod), waited)

    def _look(self, namespace: str, name: str, before: Json, until: float) -> Json:
        """The pod as it is now; its last state while the server is briefly unreachable, and not past
        `until`."""
        try:
            pod = self._cluster.get("Pod", name, namespace)
        except NotFound:
            deleted = {"metadata": {**before["metadata"], "deletionTimestamp": "now"}}
            return {**before, **deleted}
        except (Unavailable, Unreachable) as error:
            now = self._host.monotonic()
            if self._silent is None:
                self._silent = now
                self._progress.note(f"{error.message}; the pod is looked at again when it is back")
            if now - self._silent >= _SILENCE or now >= until or error.lasting:
                raise
            return before
        self._silent = None
        return pod

    def _events(self, namespace: str, pod: Json) -> tuple[Json, ...]:
        """Warning events say more than a pod's status, but aren't required."""
        phase = (pod.get("status") or {}).get("phase", "Pending")
        uid = pod["metadata"].get("uid")
        if self._blind or phase != "Pending" or not uid or self._silent is not None:
            return ()
        try:
            fields = {"involvedObject.uid": str(uid)}
            return tuple(sorted(self._cluster.list("Event", namespace, fields=fields), key=pods.event_time))
        except Forbidden:
            self._blind = True
            self._progress.note("this account may not list events: the reason why a pod waits is less exact")
        except (Unavailable, Unreachable):
            return ()
        return ()

    def _out_of_patience(self, state: PodState, waited: float, timeout: float) -> Reason | None:
        """The reason that has lasted too long, or the timeout."""
        reason, now = state.reason, self._host.monotonic()
        if reason is None:
            self._since.clear()
        else:
            if reason != self._reason:
                self._progress.info(f"{state.phase}: {reason.message}")
            if now - self._since.setdefault(reason.code, now) >= reason.patience:
                return reason
        self._reason = reason
        if waited < timeout:
            return None
        if reason is not None:
            return reason
        if state.phase is Phase.RUNNING:
            message = f"the pod still runs after {timeout:g} s"
            return Reason("pod-hangs", message, f"a GPU may hang: {DOCTOR}; or a longer --timeout")
        message = f"the pod had not started after {timeout:g} s, for an unknown reason"
        return Reason(
            "pod-slow", message, "a large image takes its time: a longer --timeout; kubectl describe pod"
        )

    def _log(self, namespace: str, name: str) -> str:
        """The program's output, as far as it can be read: a pass requires it."""
        try:
            return self._cluster.log(namespace, name, container=CONTAINER, lines=_LINES)
        except ClusterError as error:
            self._progress.note(error.message)
            return ""


# Test pods that a killed run of `gpunode verify --on kubernetes` left on this node.

_MAKER = "gpunode/maker"


def sweep(host: Host, cluster: Cluster, namespace: str, hostname: str) -> None:
    """Remove test pods on this node that belong to a run which has certainly ended."""
    try:
        for pod in cluster.list("Pod", namespace, labels=ours()):
            if _is_for(pod, hostname) and (_maker_is_dead(host, pod) or _is_old(host, pod)):
                cluster.delete("Pod", str(pod["metadata"]["name"]), namespace)
    except ClusterError:
        return  # the cleanup is optional; a real fault shows at the next request


def _machine(host: Host) -> str:
    return (host.read_text("/etc/machine-id") or "").strip()


def _is_for(pod: Json, hostname: str) -> bool:
    labels, spec = (pod.get("metadata") or {}).get("labels") or {}, pod.get("spec") or {}
    return RUN in labels and (spec.get("nodeSelector") or {}).get(HOSTNAME) == hostname


def _maker_is_dead(host: Host, pod: Json) -> bool:
    label = str(((pod.get("metadata") or {}).get("annotations") or {}).get(_MAKER) or "")
    machine, _, maker = label.rpartition(".")
    return bool(machine) and machine == _machine(host) and container.is_dead(host, maker)


def _is_old(host: Host, pod: Json) -> bool:
    """Long past its own deadline, with a margin for different clocks."""
    try:
        created = str(pod["metadata"].get("creationTimestamp"))
        created_at = datetime.strptime(created, "%Y-%m-%dT%H:%M:%S%z").timestamp()
        allowed = float((pod.get("spec") or {}).get("activeDeadlineSeconds") or 0)
    except (OverflowError, TypeError, ValueError):
        return False
    return host.now() - created_at > 2 * allowed + 600


AUTO = "auto"
_STATE_DIR = Settings.state_dir
SECONDS = 300.0  # the sample's image is some hundred megabytes
_GRACE = 30  # time after our timeout that the pod may live if no process is left to remove it


class PodRequest(NamedTuple):
    """What to run and where; an empty `image` is NVIDIA's sample, an empty `node` this machine's.

    `runtime_class` is its name, empty for none, or auto: `runtime_name` where the cluster has a RuntimeClass
    of that name. `timeout`: seconds in total, including the image's pull.
    """

    image: str = ""
    namespace: str = ""
    node: str = ""
    resource: str = "nvidia.com/gpu"
    runtime_class: str = AUTO
    runtime_name: str = "nvidia"
    timeout: float = SECONDS
    access: Access = Access()


class _Case(NamedTuple):
    """All that is known before the pod is created, which has its namespace."""

    host: Host
    progress: Progress
    cluster: Cluster
    pod: VectorAdd
    aim: Aim


def run(host: Host, request: PodRequest, progress: Progress) -> Result:
    """Exit 1 with the reason if the pod doesn't start or pass; `ClusterError` if the API server fails. The
    pod is always removed, also after Ctrl-C; if that fails, the command for it is printed.
    """
    # invalid values are refused before anything is queried
    node_name(host, request.node)
    pod = vector_add_pod(request.image, request.resource, request.namespace)
    cluster = connect(host, request.access)
    case = _case(host, cluster, pod, request, progress)
    sweep(host, cluster, case.pod.namespace, case.pod.hostname)
    traces: list[str] = []
    step = progress.step(f"vector-add pod on {case.aim.node}")
    with _removed_after(case, traces) as names, step:
        created = _create(case)
        names.append(str(created["metadata"]["name"]))
        follower = PodFollower(host, cluster, case.aim, progress)
        outcome = follower.follow(case.pod.namespace, created, request.timeout)
    return _report(case, outcome, tuple(traces))


# --- before ---------------------------------------------------------------------------------------------


def _case(host: Host, cluster: Cluster, pod: VectorAdd, request: PodRequest, progress: Progress) -> _Case:
    """`pod` with the cluster's data: the node and its labels, the namespace, the RuntimeClass."""
    name, source = node_name(host, request.node, cluster.node)
    try:
        node = patiently(host, progress, lambda: cluster.get("Node", name))
    except NotFound as error:
        error.hint = access.hint(host, cluster, source)
        raise
    labels = node.get("metadata", {}).get("labels") or {}
    full_pod = pod._replace(
        namespace=pod.namespace or cluster.namespace,
        hostname=str(labels.get(HOSTNAME) or name),
        seconds=math.ceil(request.timeout) + _GRACE,
        runtime_class=_runtime_class(host, cluster, request, progress),
        run=secrets.token_hex(8),
    )
    return _Case(host, progress, cluster, full_pod, _aim(host, name, node, pod))


def _aim(host: Host, name: str, node: Json, pod: VectorAdd) -> Aim:
    status = node.get("status") or {}
    return Aim(
        *(name, pod.resource, pod.image),
        status.get("allocatable") or {},
        status.get("capacity") or {},
        _unhealthy(host, pod.resource) if access.is_this_machine(host, node) else (),
        tuple(_untolerated(node, pod.resource)),
    )


def _untolerated(node: Json, resource: str) -> Iterator[str]:
    """The node's taints that keep the test pod away, as kubectl spells them."""
    for taint in (node.get("spec") or {}).get("taints") or ():
        key, value, effect = (str(taint.get(name) or "") for name in ("key", "value", "effect"))
        if effect != "PreferNoSchedule" and (key, effect) != (resource, "NoSchedule"):
            yield one_line(f"{key}={value}:{effect}" if value else f"{key}:{effect}")


def _unhealthy(host: Host, resource: str) -> tuple[str, ...]:
    """Devices that gpunode's own plugin on this machine reports as unhealthy, and why."""
    try:
        own = read_own_status(host, _STATE_DIR)
    except GpunodeError:  # the file belongs to root
        return ()
    return tuple(
        one_line(f"GPU {unit.index} {unit.id}: {unit.problem.reason}")
        for resource_status in (own.resources if own else ())
        if resource_status.name == resource
        for unit in resource_status.units
        if unit.problem
    )


def _runtime_class(host: Host, cluster: Cluster, request: PodRequest, progress: Progress) -> str:
    auto = request.runtime_class == AUTO
    name = request.runtime_name if auto else request.runtime_class
    if not name:
        return ""
    try:
        patiently(host, progress, lambda: cluster.get("RuntimeClass", name))
    except Forbidden:
        return "" if auto else name
    except NotFound as error:
        if auto:
            return ""  # then nvidia is the engine's default runtime, or the plugin gives CDI devices
        raise PreconditionError(
            f"the cluster has no RuntimeClass {name!r}",
            hint=pods.missing_class(name),
            code="pending-runtime-class",
        ) from error
    return name


def _create(case: _Case) -> Json:
    desired = vector_add(case.pod)
    # a later run on this machine knows by it whether the run that made the pod is still active
    maker = f"{_machine(case.host)}.{container.maker(case.host)}"
    desired["metadata"]["annotations"] = {_MAKER: maker}
    try:
        return case.cluster.create(desired)
    except (Forbidden, Invalid, NotFound, Unavailable) as error:
        code, hint = pods.refused(error.message, case.pod.namespace, case.pod.runtime_class)
        if not code:
            raise
        raised = type(error)(error.message, hint=hint, code=code, status=error.status)
        raised.sent = error.sent
        raise raised from error


# --- after ----------------------------------------------------------------------------------------------


@contextmanager
def _removed_after(case: _Case, traces: list[str]) -> Iterator[list[str]]:
    """Collects the pod's name; the pod is removed however the body ends. What can't be removed is added to
    `traces`, and reported at once, because a raised error reports something else.
    """
    names: list[str] = []
    try:
        yield names
    except ClusterError as error:
        if names or isinstance(error, Unavailable) or (isinstance(error, Unreachable) and error.sent):
            _remove(case, names, traces)
        raise  # else it was never created
    except BaseException:
        _remove(case, names, traces)
        raise
    _remove(case, names, traces)


def _remove(case: _Case, names: list[str], traces: list[str]) -> None:
    """By its name; by its run's label if the response to its creation never arrived."""
    try:
        for name in names or _of_this_run(case):
            _delete(case, name)
    except ClusterError as error:
        target = f"pod {names[0]}" if names else f"pods --selector {RUN}={case.pod.run}"
        namespace = case.pod.namespace
        words = f"kubectl --namespace {namespace} delete {target}"
        traces.append(f"the pod may be left in {namespace} ({error.message}); remove it: {words}")
        case.progress.note(traces[-1])


def _of_this_run(case: _Case) -> list[str]:
    def listed() -> Sequence[Json]:
        return case.cluster.list("Pod", case.pod.namespace, labels={RUN: case.pod.run})

    return [str(pod["metadata"]["name"]) for pod in patiently(case.host, case.progress, listed)]


def _delete(case: _Case, name: str) -> None:
    # for NotFound another client was faster, or the answer to a first attempt was lost
    with suppress(NotFound):
        patiently(case.host, case.progress, lambda: case.cluster.delete("Pod", name, case.pod.namespace))


# --- output ---------------------------------------------------------------------------------------------


def _report(case: _Case, outcome: PodResult, traces: tuple[str, ...]) -> Result:
    reason = outcome.reason
    pod = PodRun(
        server=case.cluster.server,
        namespace=case.pod.namespace,
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
    device = DeviceResult(
        *(0, "", case.pod.image),
        status="fail" if reason else "ok",
        milliseconds=outcome.seconds * 1000,
        message=reason.message if reason else pods.PASSED,
    )
    data = Verification("kubernetes", (device,), case.pod.image, outcome.via, pod)
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
    verdict = f"{pod.phase}: {pod.reason}" if reason else f"{pod.phase}: {pods.PASSED}"
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
    headline = "The pod computed on a GPU of" if not reason else "No pod computed on a GPU of"
    return table, *((Text("Its log:"), *log) if log else ()), Text(f"{headline} {pod.node}", style)
