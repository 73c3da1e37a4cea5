"""Client of the API server: a few verbs on a few kinds of object, sent by lightkube.

Objects are plain JSON (lightkube's generic resources): its models know the fields of one Kubernetes release,
and a newer node must not lose fields. lightkube sends through `Transport`, because its own requests have no
limit on the time and size of a whole response, no tls-server-name, no impersonation, and no second attempt
with a renewed certificate.
"""

from __future__ import annotations

import re
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import cache
from itertools import islice
from typing import Any

import httpcore2
import httpx2
import lightkube
from lightkube.config.client_adapter import verify_cluster
from lightkube.config.kubeconfig import KubeConfig
from lightkube.config.models import User
from lightkube.generic_resource import create_global_resource, create_namespaced_resource
from lightkube.types import PatchType

from gpunode.facts.packages import utc
from gpunode.host import Host
from gpunode.kubernetes.api import (
    FIELD_MANAGER,
    ClusterError,
    Conflict,
    Forbidden,
    Invalid,
    Json,
    NoAccess,
    NotFound,
    Patch,
    Unauthorized,
    Unavailable,
    Unreachable,
    is_object,
    named,
    one_line,
)
from gpunode.kubernetes.kubeconfig import (
    PROXY_HINT,
    Connection,
    checked_token,
    client_certificate,
    shown_url,
    token_expiry,
)

MAX_BYTES = 64 << 20  # 2000 nodes with their lists of images come to some 40 MiB
_WHOLE = 3  # a whole response may take this multiple of the limit for one piece of it
_PAGE = 500  # objects in one response
_PART = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")  # of a URL's path: lightkube quotes nothing
_RBAC = "rbac.authorization.k8s.io"
_KINDS = {  # group, version, plural
    "Node": ("", "v1", "nodes"),
    "Namespace": ("", "v1", "namespaces"),
    "Pod": ("", "v1", "pods"),
    "Event": ("", "v1", "events"),
    "ServiceAccount": ("", "v1", "serviceaccounts"),
    "ConfigMap": ("", "v1", "configmaps"),
    "DaemonSet": ("apps", "v1", "daemonsets"),
    "RuntimeClass": ("node.k8s.io", "v1", "runtimeclasses"),
    "NodeFeature": ("nfd.k8s-sigs.io", "v1alpha1", "nodefeatures"),
    "ClusterRole": (_RBAC, "v1", "clusterroles"),
    "ClusterRoleBinding": (_RBAC, "v1", "clusterrolebindings"),
    "Role": (_RBAC, "v1", "roles"),
    "RoleBinding": (_RBAC, "v1", "rolebindings"),
}
_GLOBAL = {"Node", "Namespace", "RuntimeClass", "ClusterRole", "ClusterRoleBinding"}


@cache
def _resource(kind: str) -> Any:
    create = create_global_resource if kind in _GLOBAL else create_namespaced_resource
    group, version, plural = _KINDS[kind]
    return create(group, version, kind, plural)


class Cluster:
    """One API server and gpunode's user on it. Nothing is sent before the first call.

    Every call ends or raises a `ClusterError`: the next piece of a response comes within `timeout` seconds,
    the whole within three times that and `MAX_BYTES`. `NoAccess` for certificates, tokens and proxies that
    can't be used.
    """

    def __init__(self, host: Host, connection: Connection, timeout: float) -> None:
        self.server = connection.cluster.server
        self.source = connection.source
        self.options = connection.options
        self.namespace = connection.namespace
        self.node = connection.node
        self._proxy = shown_url(connection.proxy)
        self._host, self._connection = host, connection
        # TLS, tokens and certificates are the transport's
        user = User(username=connection.user.username, password=connection.user.password)
        place = type(connection.cluster)(server=self.server, insecure=True)
        self._client: Any = lightkube.Client(  # its overloads fit no kind that is chosen at run time
            KubeConfig.from_one(cluster=place, user=user, namespace=self.namespace),
            timeout=httpx2.Timeout(timeout),
            field_manager=FIELD_MANAGER,
            trust_env=False,
            transport=Transport(host, connection),
        )

    def close(self) -> None:
        """Close the connections that are kept for later requests."""
        self._client.close()

    def get(self, kind: str, name: str, namespace: str = "") -> Json:
        with self._errors(f"read {_object_text(kind, namespace, name)}"):
            response = self._client.get(_resource(kind), _part(name), **_place(namespace))
            return _object(response, kind, name)

    def list(
        self,
        kind: str,
        namespace: str = "",
        *,
        labels: Mapping[str, str] | None = None,
        fields: Mapping[str, str] | None = None,
        most: int | None = None,
    ) -> tuple[Json, ...]:
        """The objects with these labels and fields, at most `most`."""
        with self._errors(f"list {_object_text(kind, namespace)}"):
            pages = self._client.list(
                _resource(kind),
                chunk_size=_PAGE,
                labels=dict(labels or {}),
                fields=dict(fields or {}),
                **_place(namespace),
            )
            return tuple(_object(item, kind) for item in islice(pages, most))

    def create(self, body: Json) -> Json:
        """The object as it was created; `Conflict` with the code kubernetes-exists if it exists."""
        with self._errors(f"create {named(body)}", changes=True):
            namespace = body["metadata"].get("namespace", "")
            response = self._client.create(_resource(body["kind"])(body), **_place(namespace))
            return _object(response, body["kind"], body["metadata"].get("name", ""))

    def replace(self, body: Json) -> Json:
        """`Conflict` if the object is no longer of the resourceVersion in `body`."""
        metadata = body["metadata"]
        with self._errors(f"replace {named(body)}", changes=True):
            resource, place = _resource(body["kind"]), _place(metadata.get("namespace", ""))
            response = self._client.replace(resource(body), _part(metadata["name"]), **place)
            return _object(response, body["kind"], metadata["name"])

    def patch(self, kind: str, name: str, patch: Patch, *, status: bool = False) -> Json:
        """Patch an object, or with `status` its subresource of that name, where capacity and conditions are.

        A patch is one request: the server carries out all of it or nothing.
        """
        of_status = "the status of " if status else ""
        with self._errors(f"change {of_status}{_object_text(kind, '', name)}", changes=True):
            resource = _resource(kind).Status if status else _resource(kind)
            body = [dict(step) for step in patch]
            response = self._client.patch(resource, _part(name), body, patch_type=PatchType.JSON)
            return _object(response, kind, name)

    def delete(self, kind: str, name: str, namespace: str = "") -> None:
        """`NotFound` if it doesn't exist."""
        with self._errors(f"delete {_object_text(kind, namespace, name)}", changes=True):
            self._client.delete(_resource(kind), _part(name), **_place(namespace))

    def log(self, namespace: str, pod: str, *, container: str = "", lines: int = 0) -> str:
        """A container's output, the last `lines` if not 0. `ClusterError` if it hasn't started."""
        with self._errors(f"read the log of {_object_text('Pod', namespace, pod)}"):
            output = self._client.log(
                _part(pod),
                namespace=_part(namespace),
                container=container or None,
                tail_lines=lines or None,
            )
            return "".join(output)

    @contextmanager
    def _errors(self, what: str, *, changes: bool = False) -> Iterator[None]:
        """The libraries' exceptions as `ClusterError`s."""
        try:
            yield
        except Exception as error:
            explained = self._explained(error, what, changes)
            if explained is None:
                raise
            raise explained from error

    def _explained(self, error: Exception, what: str, changes: bool) -> ClusterError | None:
        """None for an exception that is neither a response nor a failed connection: then it is a bug."""
        if isinstance(error, ClusterError):
            return error
        if isinstance(error, httpx2.HTTPStatusError):
            return self._status_error(error, what, changes)
        if isinstance(error, _OF_CONNECTION):
            return self._connection_error(error, what, changes)
        if isinstance(error, httpx2.HTTPError | httpx2.InvalidURL | httpx2.StreamError):
            return ClusterError(f"can't {what}: {one_line(str(error))}", hint=self._look())
        # lightkube's errors for what is not the JSON of an object, or too deeply nested
        if isinstance(error, ValueError | TypeError | KeyError | RecursionError):
            why = f": it is {error}" if isinstance(error, Unbounded) else ""
            explained = Unreachable(
                f"can't {what}: what {self.server} answers is not a response of an API server{why}",
                hint=self._look(),
                code="kubernetes-no-api-server",
            )
            explained.sent, explained.lasting = changes, True
            return explained
        return None

    def _status_error(self, error: httpx2.HTTPStatusError, what: str, changes: bool) -> ClusterError:
        code, reply = error.response.status_code, getattr(error, "status", None)
        reason = one_line(str(getattr(reply, "message", "") or "")) or f"HTTP {code} without a message"
        message = f"can't {what}: {reason}"
        if code == 401:
            unknown = f"can't {what}: {self.server} doesn't know who we are (401)"
            hint = _unauthorized(self._host, self._connection)
            return Unauthorized(unknown, hint=hint, status=401)
        if code == 403:
            return Forbidden(message, hint=_missing_right(reason, self.source), status=403)
        if code == 404:
            return NotFound(message, status=404)
        if code == 409:
            exists = "kubernetes-exists" if getattr(reply, "reason", "") == "AlreadyExists" else ""
            return Conflict(message, hint="run this again", code=exists, status=409)
        if code == 429 or code >= 500:
            busy = Unavailable(message, hint="wait until it is healthy, then run this again", status=code)
            busy.sent = code >= 500 and code != 503 and changes
            seconds = error.response.headers.get("Retry-After", "")
            if seconds.isascii() and seconds.isdigit() and len(seconds) < 5:
                busy.retry_after = float(seconds)
            return busy
        if 400 <= code < 500:
            return Invalid(message, hint="see it with --dry-run", status=code)
        return ClusterError(message, hint=self._look(), code="kubernetes-no-api-server", status=code)

    def _connection_error(self, error: Exception, what: str, changes: bool) -> Unreachable:
        sent = not isinstance(error, _BEFORE_SENDING)
        reason = one_line(str(error))
        if isinstance(error, httpcore2.TimeoutException):
            reason = "no answer in time" if sent else "no connection in time"
        elif isinstance(error, httpcore2.RemoteProtocolError | httpcore2.ReadError) and not reason:
            reason = "the connection was cut"
        distrust = _distrust(error)
        distrusted = distrust is not None or "CERTIFICATE_VERIFY_FAILED" in reason
        hint, through = self._look(), f" through the proxy {self._proxy}" if self._proxy else ""
        if self._proxy and not sent:
            hint = f"set proxy-url in {self.source} or HTTPS_PROXY; NO_PROXY lists servers without a proxy"
        if distrusted:
            hint = _DISTRUST.get(distrust or 0, _UNSIGNED).format(source=self.source)
            hint = _NO_PROXY if self.source == "--server" else hint
        after = " before its answer was whole" if sent and changes else ""
        explained = Unreachable(f"can't {what}: {self.server}{through}{after}: {reason}", hint=hint)
        explained.sent, explained.lasting = sent and changes, distrusted
        return explained

    def _look(self) -> str:
        return f"is this the API server? see: curl -k {self.server}/version"


def _object_text(kind: str, namespace: str, name: str = "") -> str:
    """Such as ``Pod default/p``, and for a list ``the pods of default``."""
    if name:
        return named({"kind": kind, "metadata": {"namespace": namespace, "name": name}})
    return f"the {_KINDS[kind][2]}" + (f" of {namespace}" if namespace else "")


def _place(namespace: str) -> dict[str, str]:
    return {"namespace": _part(namespace)} if namespace else {}


def _part(name: str) -> str:
    """A name as one part of a URL's path. `Invalid` for a name that would select another path."""
    if _PART.fullmatch(name) is None or ".." in name:
        raise Invalid(f"{name!r} can't be the name of an object in Kubernetes")
    return name


def _object(response: Any, kind: str, name: str = "") -> Json:
    """The object in a response; a name or kind that wasn't requested is an error, not data."""
    body: Json = {"kind": kind, **response}
    if not is_object(body) or body["kind"] != kind or (name and body["metadata"]["name"] != name):
        raise ValueError("the response has a different object than the requested one")
    return body


_OF_CONNECTION = (
    httpcore2.TimeoutException,
    httpcore2.NetworkError,
    httpcore2.ProtocolError,
    httpcore2.UnsupportedProtocol,
    httpcore2.ProxyError,
    OSError,
)
_BEFORE_SENDING = (
    httpcore2.ConnectError,
    httpcore2.ConnectTimeout,
    httpcore2.PoolTimeout,
    httpcore2.ProxyError,
)
_DISTRUST = {  # by OpenSSL's number of the reason, X509_V_ERR_...
    9: "its certificate isn't valid yet: is this machine's clock right? see: timedatectl",
    10: "the server's certificate has expired (there: kubeadm certs renew all), or the clock here is wrong",
    62: "its certificate is for other names: tls-server-name in {source} says which one is meant",
    64: "its certificate isn't for this address: tls-server-name in {source} names one that it is for",
}
_UNSIGNED = "its certificate isn't signed by the authority that {source} names, or not for this name"
_NO_PROXY = (
    "--server is for a kubectl proxy, http://127.0.0.1:8001; an API server itself wants a --kubeconfig"
)


def _distrust(error: BaseException | None) -> int | None:
    """OpenSSL's number of the reason why a certificate isn't trusted; None for any other error."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return int(error.verify_code or 0)
        error = error.__cause__ or error.__context__
    return None


def _unauthorized(host: Host, connection: Connection) -> str:
    """The hint for a 401; names a token or a certificate that has expired."""
    token = connection.user.token or ""
    if connection.user.token_file:
        token = (host.read_text(connection.user.token_file) or "").strip()
    own, now = client_certificate(host, connection.user), host.now()
    if 0 < (ends := token_expiry(token)) < now:
        return f"the token expired at {utc(ends)}; get a new one where {connection.source} has it from"
    if own is not None and own.ends < now:
        fix = "make a new one"
        if "admin" in own.name or "kubeadm" in own.name:
            fix = "as root: kubeadm certs renew all"
        elif own.node:
            fix = "does the kubelet still exchange it? journalctl -u kubelet"
        return f"the certificate of {own.name} in {connection.source} expired at {utc(own.ends)}; {fix}"
    if connection.options[:1] == ("--server",):
        return "kubectl proxy adds the credentials: is it still running, with a context that works?"
    return f"sign in again, or make a new token or certificate; used: {connection.source}"


def _missing_right(reason: str, source: str) -> str:
    """The hint for a 403: by RBAC, by NodeRestriction (a kubelet's account), or without credentials."""
    if "system:anonymous" in reason and source == "--server":
        return _NO_PROXY
    if "system:anonymous" in reason:
        return f"{source} sends no credentials: add a user to it, or name another with --kubeconfig"
    if "is not allowed to modify" in reason:
        return (
            "a kubelet's account may label its own node, such as with nvidia.com/NAME, but not with names of"
            " kubernetes.io, and may set no taints (NodeRestriction): use an administrator's --kubeconfig"
        )
    return f"request that permission, or use another account; used: {source}"


# --- transport ------------------------------------------------------------------------------------------


class Transport(httpx2.BaseTransport):
    """Sends requests with the credentials of a connection; after a 401 once more if there are new ones."""

    def __init__(self, host: Host, connection: Connection) -> None:
        self._host = host
        self._connection = connection
        self._user = connection.user
        self._limits = _Limits()
        self._token, self._certificate = self._credentials()
        self._pool = self._open()

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        more = [(name.encode(), value.encode()) for name, value in self._connection.headers]
        request.headers = httpx2.Headers([*request.headers.raw, *more])
        request.headers["Accept-Encoding"] = "identity"  # a small response can't unfold to gigabytes
        if "continue" not in request.url.params:  # all pages of a list are one response
            self._limits.restart(request.extensions.get("timeout", {}).get("read"))
        # else the server drops unknown fields and reports success
        if request.method in ("PATCH", "POST", "PUT"):
            request.url = request.url.copy_merge_params({"fieldValidation": "Strict"})
        response = self._send(request)
        return self._send(request) if response.status_code == 401 and self._renew() else response

    def close(self) -> None:
        self._pool.close()

    def _send(self, request: httpx2.Request) -> httpx2.Response:
        if self._token:
            request.headers["Authorization"] = f"Bearer {self._token}"
        if self._connection.tls_name:
            request.extensions["sni_hostname"] = self._connection.tls_name
        url = request.url
        with closing(
            self._pool.handle_request(
                httpcore2.Request(
                    method=request.method,
                    url=httpcore2.URL(
                        scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
                    ),
                    headers=request.headers.raw,
                    content=request.read(),
                    extensions=request.extensions,
                )
            )
        ) as response:
            body = response.read()
        answer = httpx2.Response(response.status, headers=response.headers)
        if answer.headers.get("Content-Encoding", "identity") != "identity":
            raise Unbounded("compressed, although no compression was requested")
        return httpx2.Response(response.status, headers=response.headers, content=body)

    def _renew(self) -> bool:
        """Whether there are credentials other than the refused ones: a kubelet renews its certificate and a
        pod's token on disk, a program prints a new one."""
        before = self._token, self._certificate
        if self._connection.renew is not None:
            self._user = self._connection.renew()
        self._token, self._certificate = self._credentials()
        if self._certificate != before[1]:
            self._pool.close()
            self._pool = self._open()
        return (self._token, self._certificate) != before

    def _credentials(self) -> tuple[str, str]:
        """The token, and the certificate as text."""
        user, source, read = self._user, self._connection.source, self._host.read_text
        if not user.token_file:
            certificate = user.client_cert_data or (user.client_cert and read(user.client_cert)) or ""
            return checked_token(user.token or "", source), certificate
        token = (read(user.token_file) or "").strip()
        if not token:
            raise NoAccess(f"{user.token_file}, which {source} names, holds no token")
        return checked_token(token, source), ""

    def _open(self) -> httpcore2.ConnectionPool:
        connection, proxy, context = self._connection, None, None
        try:
            if connection.cluster.server.startswith("https:"):
                context = verify_cluster(connection.cluster, self._user, lambda path: path)
                # Python 3.13 wants extensions of a certificate that many clusters' authorities lack; kubectl
                # doesn't
                context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        except (OSError, ValueError) as error:  # files that aren't certificates or keys
            raise NoAccess(
                f"the certificates or keys of {connection.source} can't be used: {error}",
                hint="see: kubectl config view --raw",
            ) from error
        try:
            if connection.proxy:
                parsed = httpx2.Proxy(connection.proxy)
                if parsed.url.scheme not in ("http", "https"):
                    raise ValueError("gpunode speaks to http and https proxies")
                proxy = httpcore2.Proxy(str(parsed.url), auth=parsed.raw_auth)
        except (ValueError, httpx2.InvalidURL) as error:
            why = "" if "@" in connection.proxy else f": {error}"  # it may contain a password
            raise NoAccess(
                f"the proxy {shown_url(connection.proxy)} can't be used{why}".splitlines()[0], hint=PROXY_HINT
            ) from None
        return httpcore2.ConnectionPool(
            context, proxy, keepalive_expiry=5.0, network_backend=_LimitedBackend(self._limits)
        )


class Unbounded(ValueError):
    """Larger than any response of an API server, or in a form that hides its size."""


class _Limits:
    """The remaining time and size of one response. httpx limits only the time for each piece, so gpunode
    would otherwise wait forever for a server that sends a byte now and then."""

    def __init__(self) -> None:
        self.restart(None)

    def restart(self, seconds: float | None) -> None:
        self._bytes = MAX_BYTES
        self._deadline = time.monotonic() + seconds * _WHOLE if seconds else float("inf")

    def seconds(self, timeout: float | None) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise httpcore2.ReadTimeout("the answer took too long")
        return left if timeout is None else min(left, timeout)

    def count(self, data: bytes) -> bytes:
        self._bytes -= len(data)
        if self._bytes < 0:
            raise Unbounded(f"larger than {MAX_BYTES >> 20} MiB")
        return data


class _LimitedBackend(httpcore2.SyncBackend):
    def __init__(self, limits: _Limits) -> None:
        self._limits = limits

    def connect_tcp(self, *arguments: Any, **options: Any) -> httpcore2.NetworkStream:
        return _LimitedStream(super().connect_tcp(*arguments, **options), self._limits)


class _LimitedStream(httpcore2.NetworkStream):
    def __init__(self, stream: httpcore2.NetworkStream, limits: _Limits) -> None:
        self._stream, self._limits = stream, limits

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._limits.count(self._stream.read(max_bytes, self._limits.seconds(timeout)))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, timeout)

    def close(self) -> None:
        self._stream.close()

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)

    def start_tls(self, *arguments: Any, **options: Any) -> httpcore2.NetworkStream:
        return _LimitedStream(self._stream.start_tls(*arguments, **options), self._limits)
