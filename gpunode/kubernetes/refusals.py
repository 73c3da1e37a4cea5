"""The client library's exceptions in gpunode's words: who said no, to what, and what helps."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass

import httpx2

from gpunode.kubernetes.api import (
    ClusterError,
    Conflict,
    Forbidden,
    Invalid,
    NotFound,
    Unauthorized,
    Unavailable,
    Unreachable,
)
from gpunode.kubernetes.bounded import Endless

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
