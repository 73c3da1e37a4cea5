"""Follows the vector-add pod until it has ended, or waiting longer makes no sense."""

from __future__ import annotations

from gpunode.dataclass import dataclass
from gpunode.host import Host
from gpunode.kubernetes import follow
from gpunode.kubernetes.api import Cluster, ClusterError, Forbidden, Json, NotFound, Unavailable, Unreachable
from gpunode.kubernetes.follow import Phase, State
from gpunode.kubernetes.manifests.vector_add import CONTAINER
from gpunode.kubernetes.reasons import DOCTOR, Aim, Reason
from gpunode.result import Progress

_PAUSES = (0.1, 0.2, 0.5, 1.0)  # seconds between looks; the last one goes on
_SILENCE = 30.0  # for so long the API server may be away
_LINES = 200  # of the log


@dataclass(frozen=True)
class Outcome:
    """`reason` None: it passed. `via` says how the GPU came; `seconds` from the pod's creation on."""

    name: str
    phase: str
    reason: Reason | None
    log: str
    via: str
    seconds: float


class Follower:
    """Looks again and again, and tells every new reason for which the pod doesn't get further."""

    def __init__(self, host: Host, cluster: Cluster, aim: Aim, progress: Progress) -> None:
        self._host, self._cluster, self._aim, self._progress = host, cluster, aim, progress
        self._since: dict[str, float] = {}
        self._reason: Reason | None = None
        self._silent: float | None = None
        self._blind = False  # events may not be read

    def follow(self, namespace: str, created: Json, timeout: float) -> Outcome:
        """`ClusterError` where the API server says no, or stays away. At most `timeout` seconds."""
        began = self._host.monotonic()
        name, pod, found, looks = str(created["metadata"]["name"]), created, State(Phase.PENDING), 0
        while True:
            pod = self._look(namespace, name, pod, began + timeout)
            found = follow.state(pod, self._events(namespace, pod), self._aim)
            waited = self._host.monotonic() - began
            known = found.ended or self._silent is not None  # of a silent server nothing new: its own limit
            given_up = None if known else self._out_of_patience(found, waited, timeout)
            if found.ended or given_up is not None:
                break
            self._host.sleep(_PAUSES[min(looks, len(_PAUSES) - 1)])
            looks += 1
        log = self._log(namespace, name) if found.phase is not Phase.PENDING else ""
        reason = given_up or follow.verdict(found, log, self._aim)
        return Outcome(name, found.phase, reason, log, follow.allocation(pod), waited)

    def _look(self, namespace: str, name: str, before: Json, until: float) -> Json:
        """The pod as it is now; as it was while the server is away, for a while, and not past `until`."""
        try:
            pod = self._cluster.get_pod(namespace, name)
        except NotFound:
            gone = {"metadata": {**before["metadata"], "deletionTimestamp": "now"}}
            return {**before, **gone}
        except (Unavailable, Unreachable) as error:
            now = self._host.monotonic()
            if self._silent is None:
                self._silent = now
                self._progress.note(f"{error.message}; the pod is looked at again when it is back")
            if now - self._silent >= _SILENCE or now >= until or getattr(error, "lasting", False):
                raise
            return before
        self._silent = None
        return pod

    def _events(self, namespace: str, pod: Json) -> tuple[Json, ...]:
        """Warnings say more than a pod's status; but it goes without them."""
        phase = (pod.get("status") or {}).get("phase", "Pending")
        uid = pod["metadata"].get("uid")
        if self._blind or phase != "Pending" or not uid or self._silent is not None:
            return ()
        try:
            return self._cluster.events(namespace, {"involvedObject.uid": str(uid)})
        except Forbidden:
            self._blind = True
            self._progress.note("this account may not list events: why a pod waits is told less exactly")
        except (Unavailable, Unreachable):
            return ()
        return ()

    def _out_of_patience(self, found: State, waited: float, timeout: float) -> Reason | None:
        """The reason that has lasted too long, or the end of all patience."""
        reason, now = found.reason, self._host.monotonic()
        if reason is None:
            self._since.clear()
        else:
            if reason != self._reason:
                self._progress.note(f"{found.phase}: {reason.message}")
            if now - self._since.setdefault(reason.code, now) >= reason.patience:
                return reason
        self._reason = reason
        if waited < timeout:
            return None
        if reason is not None:
            return reason
        if found.phase is Phase.RUNNING:
            said = f"the pod still runs after {timeout:g} s"
            return Reason("pod-hangs", said, f"a GPU may hang: {DOCTOR}; or a longer --timeout")
        said = f"the pod hadn't started after {timeout:g} s, and nothing says why"
        return Reason(
            "pod-slow", said, "a large image takes its time: a longer --timeout; kubectl describe pod"
        )

    def _log(self, namespace: str, name: str) -> str:
        """What the program said, as far as it can be had: for a proof it must be there."""
        try:
            return self._cluster.pod_log(namespace, name, container=CONTAINER, lines=_LINES)
        except ClusterError as error:
            self._progress.note(error.message)
            return ""
