"""Objects of the API server as plain JSON, and the errors of requests. It loads no client library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpunode.errors import GpunodeError
from gpunode.output.result import ExitCode

FIELD_MANAGER = "gpunode"
"""Who owns the fields that we write, in an object's managedFields."""

Json = dict[str, Any]
"""One object of the API: apiVersion, kind, metadata, ..."""
Patch = Sequence[Mapping[str, Any]]
"""RFC 6902: operations with `op` (test, add, replace, remove), `path` (RFC 6901) and `value`."""


def named(item: Mapping[str, Any]) -> str:
    """An object's display name: ``DaemonSet kube-system/gpunode-device-plugin``."""
    metadata = item["metadata"]
    place = f"{metadata['namespace']}/" if metadata.get("namespace") else ""
    return f"{item['kind']} {place}{metadata.get('name') or metadata['generateName']}"


def one_line(text: Any) -> str:
    """A server's or a node's text on one line, without control characters and of a bounded length."""
    line = " ".join("".join(c if c.isprintable() else " " for c in str(text or "")).split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."


_LONGEST = 400  # characters of a server's message
_MAPS = (("metadata", "labels"), ("metadata", "annotations"), ("spec", "nodeSelector"))
_LISTS = (("metadata", "ownerReferences"), ("metadata", "managedFields"))


def is_object(item: Any) -> bool:
    """Whether an answer is an object with a name, and the parts that gpunode reads have their types."""
    parts = (
        {key: item.get(key) or {} for key in ("metadata", "spec", "status")} if isinstance(item, dict) else {}
    )
    if not parts or not all(isinstance(part, dict) for part in parts.values()):
        return False
    lists = [parts[part].get(key) or [] for part, key in _LISTS]
    return (
        bool(parts["metadata"].get("name"))
        and isinstance(parts["metadata"]["name"], str)
        and all(isinstance(parts[part].get(key) or {}, dict) for part, key in _MAPS)
        and all(isinstance(entries, list) and all(isinstance(x, dict) for x in entries) for entries in lists)
    )


class ClusterError(GpunodeError):
    """The API server refused or did not answer; `status` is that of HTTP, 0 without an answer.

    `sent`: the server may have made the change nevertheless. `lasting`: waiting doesn't help, as when TLS
    doesn't trust the certificate. `retry_after`: seconds until the next attempt, if the server sent that.
    """

    default_code = "kubernetes"
    sent: bool = False
    lasting: bool = False
    retry_after: float = 0.0

    def __init__(self, message: str, *, hint: str = "", code: str = "", status: int = 0) -> None:
        super().__init__(message, hint=hint, code=code)
        self.status = status


class ExtraMissing(ClusterError):
    """The client library isn't installed: the extra ``gpunode[kubernetes]``."""

    default_code = "kubernetes-extra-missing"
    default_exit_code = ExitCode.PRECONDITION


class NoAccess(ClusterError):
    """No kubeconfig, no account, or an unusable one."""

    default_code = "kubernetes-no-access"
    default_exit_code = ExitCode.PRECONDITION


class Unauthorized(ClusterError):
    """401: the token or certificate has expired, or is another server's."""

    default_code = "kubernetes-unauthorized"
    default_exit_code = ExitCode.PRECONDITION


class Forbidden(ClusterError):
    """403: this account lacks the right."""

    default_code = "kubernetes-forbidden"
    default_exit_code = ExitCode.PRECONDITION


class NotFound(ClusterError):
    """404: no such object, or no such kind of object."""

    default_code = "kubernetes-not-found"
    default_exit_code = ExitCode.PRECONDITION


class Conflict(ClusterError):
    """409: another client has changed it, or it exists already (`code` is kubernetes-exists then)."""

    default_code = "kubernetes-conflict"


class Invalid(ClusterError):
    """400, 415 or 422: the server rejects the content, or a `test` of the patch no longer holds."""

    default_code = "kubernetes-invalid"


class Unavailable(ClusterError):
    """429 or 5xx: the server is overloaded.

    It is `sent` if it is a 5xx other than 503 for a change: a load balancer may send it though the server
    made the change.
    """

    default_code = "kubernetes-unavailable"


class Unreachable(ClusterError):
    """No connection, an untrusted certificate, or a connection that broke before the response."""

    default_code = "kubernetes-unreachable"
