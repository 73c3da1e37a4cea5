"""How one request reaches the API server: TLS, the proxy, who we are, and what every request has.

The library's own way has no tls-server-name, no impersonation and no second credential when the first has run
out; so it sends through this.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable

import httpx2
from lightkube.config.client_adapter import verify_cluster
from lightkube.config.models import Cluster, User

from gpunode.kubernetes.api import NoAccess
from gpunode.kubernetes.bounded import Allowance, Endless, bound
from gpunode.kubernetes.connection import PROXY_HINT, Connection, Identity, shown_url, sound_token

_CHANGES = {"PATCH", "POST", "PUT"}


class Wire(httpx2.BaseTransport):
    """Sends with the identity of `connection`; with a fresh one, once, when the server knows it no more.

    `read` gives a file's text, None where there is none. `NoAccess` for certificates and proxies that can't
    be used.
    """

    def __init__(self, connection: Connection, read: Callable[[str], str | None]) -> None:
        self._connection = connection
        self._read = read
        self._identity = connection.identity
        self._allowance = Allowance()
        self._token, self._certificate = self._credentials()
        self._inner = self._opened()

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        more = [(name.encode(), value.encode()) for name, value in self._connection.headers]
        request.headers = httpx2.Headers([*request.headers.raw, *more])
        request.headers["Accept-Encoding"] = "identity"  # a small answer can't unfold to gigabytes
        if "continue" not in request.url.params:  # all pages of a list are one answer
            self._allowance.begin(request.extensions.get("timeout", {}).get("read"))
        if request.method in _CHANGES:  # else a server drops what it doesn't know, and calls it done
            request.url = request.url.copy_merge_params({"fieldValidation": "Strict"})
        answer = self._send(request)
        if answer.status_code != 401 or not self._renewed():
            return answer
        answer.close()
        return self._send(request)

    def close(self) -> None:
        self._inner.close()

    def _send(self, request: httpx2.Request) -> httpx2.Response:
        if self._token:
            request.headers["Authorization"] = f"Bearer {self._token}"
        if self._connection.tls_name:
            request.extensions["sni_hostname"] = self._connection.tls_name
        answer = self._inner.handle_request(request)
        if answer.headers.get("Content-Encoding", "identity") != "identity":
            answer.close()
            raise Endless("packed, which nobody asked for")
        return answer

    def _renewed(self) -> bool:
        """Whether there is another credential than the one that was refused: a kubelet exchanges its
        certificate and a pod's token on disk, a program prints a new one."""
        before = self._token, self._certificate
        if self._connection.renew is not None:
            self._identity = self._connection.renew()
        self._token, self._certificate = self._credentials()
        if self._certificate != before[1]:
            self._inner.close()
            self._inner = self._opened()
        return (self._token, self._certificate) != before

    def _credentials(self) -> tuple[str, str]:
        """The token, and the certificate as text."""
        who = self._identity
        if not who.token_file:
            token = sound_token(who.token, self._connection.source)
            return token, who.cert_data or (self._read(who.cert_file) or "" if who.cert_file else "")
        token = (self._read(who.token_file) or "").strip()
        if not token:
            raise NoAccess(f"{who.token_file}, which {self._connection.source} names, holds no token")
        return sound_token(token, self._connection.source), ""

    def _opened(self) -> httpx2.HTTPTransport:
        connection = self._connection
        try:
            context = _context(connection, self._identity)
        except (OSError, ValueError) as error:  # certificates and keys that are none
            raise NoAccess(
                f"the certificates or keys of {connection.source} can't be used: {error}",
                hint="see: kubectl config view --raw",
            ) from error
        try:
            opened = httpx2.HTTPTransport(verify=context, trust_env=False, proxy=connection.proxy or None)
        except (ValueError, httpx2.InvalidURL, ImportError) as error:  # SOCKS takes another library
            why = "" if "@" in connection.proxy else f": {error}"  # it may hold a password
            raise NoAccess(
                f"the proxy {shown_url(connection.proxy)} can't be used{why}".splitlines()[0], hint=PROXY_HINT
            ) from None
        bound(opened, self._allowance)
        return opened


def _context(connection: Connection, who: Identity) -> ssl.SSLContext | bool:
    if connection.server.startswith("http:"):
        return False
    place = Cluster(
        server=connection.server,
        certificate_auth=connection.ca_file or None,
        certificate_auth_data=connection.ca_data or None,
        insecure=connection.insecure,
    )
    user = User(
        client_cert=who.cert_file or None,
        client_cert_data=who.cert_data or None,
        client_key=who.key_file or None,
        client_key_data=who.key_data or None,
    )
    context: ssl.SSLContext = verify_cluster(place, user, lambda path: path)
    # Python 3.13 wants extensions of a certificate that many clusters' authorities haven't; kubectl doesn't
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context
