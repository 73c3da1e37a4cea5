"""What gpunode asks of an API server, and what can go wrong with it.

Objects are plain JSON, as the server gives them, for a node that is newer than a client's model must not lose
its fields on the way. `client.py` has the one implementation; `access.connect` makes it.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import httpx2

from gpunode.errors import GpunodeError
from gpunode.kubernetes.bounded import Endless
from gpunode.output.result import ExitCode

FIELD_MANAGER = "gpunode"
"""Who owns the fields that we write, in an object's managedFields."""

Json = dict[str, Any]
"""One object of the API: apiVersion, kind, metadata, ..."""
Patch = Sequence[Mapping[str, Any]]
"""RFC 6902: operations with `op` (test, add, replace, remove), `path` (RFC 6901) and `value`."""


def named(one: Mapping[str, Any]) -> str:
    """An object as people call it: ``DaemonSet kube-system/gpunode-device-plugin``."""
    metadata = one["metadata"]
    place = f"{metadata['namespace']}/" if metadata.get("namespace") else ""
    return f"{one['kind']} {place}{metadata['name']}"


_MAPS = (("metadata", "labels"), ("metadata", "annotations"), ("spec", "nodeSelector"))
_LISTS = (("metadata", "ownerReferences"), ("metadata", "managedFields"))


def is_object(one: Any) -> bool:
    """Whether an answer has the shape of an object with a name, as far as we lean on it; null is nothing."""
    parts = (
        {key: one.get(key) or {} for key in ("metadata", "spec", "status")} if isinstance(one, dict) else {}
    )
    if not parts or not all(isinstance(part, dict) for part in parts.values()):
        return False
    lists = [parts[part].get(key) or [] for part, key in _LISTS]
    return (
        bool(parts["metadata"].get("name"))
        and isinstance(parts["metadata"]["name"], str)
        and all(isinstance(parts[part].get(key) or {}, dict) for part, key in _MAPS)
        and all(isinstance(found, list) and all(isinstance(x, dict) for x in found) for found in lists)
    )


class Cluster(Protocol):
    """One API server, and who we are there. Every call ends or raises a `ClusterError`: the next piece of an
    answer comes within `timeout`, all of it within three times that and within bounded.MAX_BYTES.

    `source` says for people where the access comes from, `words` are the options that lead there again;
    `namespace` is its own, "default" if it names none; `node` is the one whose kubelet we are there, else "".
    A patch is one request: the server takes all of it or nothing.
    """

    @property
    def server(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def words(self) -> tuple[str, ...]: ...
    @property
    def namespace(self) -> str: ...
    @property
    def node(self) -> str: ...

    def close(self) -> None:
        """Give up its connections, which it keeps for the next question; a process's end does too."""

    def get_node(self, name: str) -> Json: ...
    def list_nodes(self, most: int) -> tuple[Json, ...]:
        """`most` of them at most."""

    def patch_node(self, name: str, patch: Patch) -> Json:
        """Labels, annotations, taints. Gives the node as it is afterwards."""

    def patch_node_status(self, name: str, patch: Patch) -> Json:
        """The subresource status, where capacity and conditions are."""

    def create_pod(self, namespace: str, pod: Json) -> Json:
        """Gives the pod with the name and uid that it got."""

    def get_pod(self, namespace: str, name: str) -> Json: ...
    def list_pods(self, namespace: str, labels: Mapping[str, str]) -> tuple[Json, ...]: ...
    def delete_pod(self, namespace: str, name: str, *, grace: int | None = None) -> None:
        """`grace`: seconds that it may take to end; the pod's own without. `NotFound` if it is gone."""

    def pod_log(self, namespace: str, name: str, *, container: str = "", lines: int = 0) -> str:
        """A container's output, its last `lines` if not 0. `ClusterError` while it hasn't started."""

    def events(self, namespace: str, fields: Mapping[str, str]) -> tuple[Json, ...]:
        """Events (v1) by field, as in ``{"involvedObject.uid": ...}``; oldest first."""

    def get_node_feature(self, namespace: str, name: str) -> Json:
        """nfd.k8s-sigs.io/v1alpha1. `NotFound` if there is none, or no such kind in the cluster."""

    def create_node_feature(self, namespace: str, feature: Json) -> Json: ...
    def update_node_feature(self, namespace: str, feature: Json) -> Json:
        """Replace it; with a resourceVersion in it `Conflict` if somebody else changed it since."""

    def get_runtime_class(self, name: str) -> Json: ...
    def get_object(self, like: Json) -> Json:
        """The object with the kind, namespace and name of `like`, whose kind is one that manifests have."""

    def create_object(self, wanted: Json) -> Json:
        """`Conflict` with the code kubernetes-exists if it is there."""

    def delete_object(self, made: Json) -> None:
        """One that `create_object` gave; `NotFound` if it is gone."""


class ClusterError(GpunodeError):
    """The API server said no, or nothing; `status` is HTTP's number, 0 without an answer."""

    default_code = "kubernetes"

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        code: str = "",
        status: int = 0,
        exit_code: ExitCode | None = None,
    ) -> None:
        super().__init__(message, hint=hint, code=code, exit_code=exit_code)
        self.status = status


class ExtraMissing(ClusterError):
    """The client library isn't installed: the extra ``gpunode[kubernetes]``."""

    default_code = "kubernetes-extra-missing"
    default_exit_code = ExitCode.PRECONDITION


class NoAccess(ClusterError):
    """No kubeconfig, no account, or one that can't be read or meant."""

    default_code = "kubernetes-no-access"
    default_exit_code = ExitCode.PRECONDITION


class Unauthorized(ClusterError):
    """401: the token or certificate has expired, or was never this server's."""

    default_code = "kubernetes-unauthorized"
    default_exit_code = ExitCode.PRECONDITION


class Forbidden(ClusterError):
    """403: who we are may not do this."""

    default_code = "kubernetes-forbidden"
    default_exit_code = ExitCode.PRECONDITION


class NotFound(ClusterError):
    """404: no such object, or no such kind of object."""

    default_code = "kubernetes-not-found"
    default_exit_code = ExitCode.PRECONDITION


class Conflict(ClusterError):
    """409: it was changed meanwhile, or it exists already (`code` is kubernetes-exists then)."""

    default_code = "kubernetes-conflict"


class Invalid(ClusterError):
    """400, 415 or 422: what was sent isn't taken. Also a patch whose `test` no longer holds."""

    default_code = "kubernetes-invalid"


class Unavailable(ClusterError):
    """429 or 5xx: the server is there and can't now. `retry_after` seconds, where it said so.

    `sent`: a 5xx other than 503 for a change, as whoever stands between gives it though the server took it.
    """

    default_code = "kubernetes-unavailable"
    retry_after: float = 0.0
    sent: bool = False


class Unreachable(ClusterError):
    """No connection, none that TLS trusts, or none that lasted until the answer.

    `sent`: a change may have reached the server, so whether it was carried out can't be told. `lasting`: no
    waiting mends it, as when TLS trusts no certificate.
    """

    default_code = "kubernetes-unreachable"
    sent: bool = False
    lasting: bool = False


# The client library's exceptions in gpunode's words: who said no, to what, and what helps.

_BEFORE_SENDING = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.ProxyError)
_DISTRUST = {
    9: "its certificate isn't valid yet: is this machine's clock right? see: timedatectl",
    10: "the server's certificate has expired (there: kubeadm certs renew all), or the clock here is wrong",
    62: "its certificate is for other names: tls-server-name in {source} says which one is meant",
    64: "its certificate isn't for this address: tls-server-name in {source} names one that it is for",
}
_PROXY = "--server is for a kubectl proxy, http://127.0.0.1:8001; an API server itself wants a --kubeconfig"
_LONGEST = 400  # characters of a server's message


@dataclass(frozen=True)
class Asked:
    """One request: `what` in words, whom, as whom (`source`), and what gives the hint for a 401."""

    what: str
    server: str
    source: str
    refused: Callable[[], str]
    changes: bool


def explained(error: Exception, asked: Asked) -> ClusterError | None:
    """None for what is no answer of a server and no failing connection: then it is a bug."""
    if isinstance(error, ClusterError):
        return error
    if isinstance(error, httpx2.HTTPStatusError):
        return _of_status(error, asked)
    if isinstance(error, httpx2.TransportError | OSError):
        return _of_connection(error, asked)
    if isinstance(error, httpx2.HTTPError | httpx2.InvalidURL | httpx2.StreamError):
        return ClusterError(f"can't {asked.what}: {_short(str(error))}", hint=_look(asked))
    # the library's way to say: no such JSON; nested too deeply
    if isinstance(error, ValueError | TypeError | KeyError | RecursionError):
        why = f": it is {error}" if isinstance(error, Endless) else ""
        told = Unreachable(
            f"can't {asked.what}: what {asked.server} answers is no API server's answer{why}",
            hint=_look(asked),
            code="kubernetes-no-api-server",
        )
        told.sent, told.lasting = asked.changes, True
        return told
    return None


def _of_status(error: httpx2.HTTPStatusError, asked: Asked) -> ClusterError:
    response = error.response
    status = getattr(error, "status", None)
    code = response.status_code if response is not None else int(getattr(status, "code", 0) or 0)
    reason = str(getattr(status, "reason", "") or "")
    said = str(getattr(status, "message", "") or "")
    said = _short(said) if said else f"HTTP {code} without a word why"
    message = f"can't {asked.what}: {said}"
    if code == 401:
        return Unauthorized(
            f"can't {asked.what}: {asked.server} doesn't know who we are (401)",
            hint=asked.refused(),
            status=401,
        )
    if code == 403:
        return Forbidden(message, hint=_right(said, asked.source), status=403)
    if code == 404:
        return NotFound(message, status=404)
    if code == 409:
        exists = "kubernetes-exists" if reason == "AlreadyExists" else ""
        return Conflict(message, hint="run this again", code=exists, status=409)
    if code == 429 or code >= 500:
        busy = Unavailable(message, hint="wait until it is well, then run this again", status=code)
        busy.sent = code >= 500 and code != 503 and asked.changes
        busy.retry_after = _seconds(response.headers.get("Retry-After", "") if response is not None else "")
        return busy
    if 400 <= code < 500:
        return Invalid(message, hint="see it with --dry-run", status=code)
    return ClusterError(message, hint=_look(asked), code="kubernetes-no-api-server", status=code)


def _of_connection(error: Exception, asked: Asked) -> Unreachable:
    sent = not isinstance(error, _BEFORE_SENDING)
    said = _short(str(error))
    if isinstance(error, httpx2.TimeoutException):
        said = "no answer in time" if sent else "no connection in time"
    elif isinstance(error, httpx2.RemoteProtocolError | httpx2.ReadError) and not said:
        said = "the connection was cut"
    hint = _look(asked)
    distrust = _distrust(error)
    distrusted = distrust is not None or "CERTIFICATE_VERIFY_FAILED" in said
    if distrusted:
        hint = _DISTRUST.get(
            distrust or 0,
            "its certificate isn't signed by the authority that {source} names, or not for this name",
        ).format(source=asked.source)
        hint = _PROXY if asked.source == "--server" else hint
    after = " before its answer was whole" if sent and asked.changes else ""
    told = Unreachable(f"can't {asked.what}: {asked.server}{after}: {said}", hint=hint)
    told.sent, told.lasting = sent and asked.changes, distrusted
    return told


def _distrust(error: BaseException | None) -> int | None:
    """OpenSSL's number (X509_V_ERR_...) for why a certificate isn't trusted; None if it is something else."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return int(error.verify_code or 0)
        error = error.__cause__ or error.__context__
    return None


def _right(said: str, source: str) -> str:
    """What helps against a 403: RBAC's, the node restriction's (a kubelet's account), or nobody's at all."""
    if "system:anonymous" in said and source == "--server":
        return _PROXY
    if "system:anonymous" in said:
        return f"{source} sends no credentials: add a user to it, or name another with --kubeconfig"
    if "is not allowed to modify" in said:
        return (
            "a kubelet's account may label its own node, such as with nvidia.com/NAME, but not with names of"
            " kubernetes.io, and may set no taints (NodeRestriction): use an administrator's --kubeconfig"
        )
    return f"ask for that right, or use another account; used was: {source}"


def _look(asked: Asked) -> str:
    return f"is this the API server? see: curl -k {asked.server}/version"


def _short(text: str) -> str:
    """On one line, without control characters: a server's words stand on a terminal."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."


def _seconds(text: str) -> float:
    return float(text) if text.isascii() and text.isdigit() and len(text) < 5 else 0.0
