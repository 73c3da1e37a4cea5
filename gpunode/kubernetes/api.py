"""What gpunode asks of an API server, and what can go wrong with it.

Objects are plain JSON, as the server gives them, for a node that is newer than a client's model must not lose
its fields on the way. `client.py` has the one implementation; `access.connect` makes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from gpunode.errors import GpunodeError
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
