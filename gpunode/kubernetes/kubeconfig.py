"""Connections: the server and the user that kubeconfig files, a pod's account or a URL define.

Files are merged as kubectl merges them (Kubernetes' client-go, tools/clientcmd/api/v1): the first file that
names a cluster, user or context has it, and relative paths are relative to their file. lightkube's models are
extended by what its own reader lacks: several files, a limit on size and nesting, errors that quote no
secret, proxy-url, tls-server-name, impersonation, and programs of the version v1 (it runs those of v1beta1
from anywhere on PATH, even one that another user can write).
"""

from __future__ import annotations

import base64
import re
import shlex
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import msgspec
from lightkube.config import models
from msgspec.structs import replace as changed

from gpunode.host import Host
from gpunode.host.documents import DocumentError, load
from gpunode.host.process import COMMAND_NOT_FOUND
from gpunode.kubernetes.api import NoAccess

PROXY_HINT = (
    "let kubectl speak to the server: kubectl proxy --port=8001, then add --server http://127.0.0.1:8001"
)
_VIEW = "see: kubectl config view"
_MAX_BYTES = 4 << 20  # kubeconfigs with many clusters have some hundred KiB
_LONGEST = 300  # characters of an address in a message


class NamedExtension(msgspec.Struct):
    name: str
    extension: Any = None


class KubeconfigCluster(models.Cluster):
    server: str = ""  # lightkube's default is http://localhost:8080
    proxy: str | None = msgspec.field(name="proxy-url", default=None)
    tls_name: str | None = msgspec.field(name="tls-server-name", default=None)
    extensions: list[NamedExtension] | None = None


class Program(models.UserExec):
    interactive: str | None = msgspec.field(name="interactiveMode", default=None)
    cluster_info: bool | None = msgspec.field(name="provideClusterInfo", default=None)


class User(models.User):
    exec: Program | None = None
    as_user: str | None = msgspec.field(name="as", default=None)
    as_uid: str | None = msgspec.field(name="as-uid", default=None)
    as_groups: list[str] | None = msgspec.field(name="as-groups", default=None)
    as_extra: dict[str, list[str]] | None = msgspec.field(name="as-user-extra", default=None)


class NamedContext(msgspec.Struct):
    name: str
    value: models.Context = msgspec.field(name="context")


class NamedCluster(msgspec.Struct):
    name: str
    value: KubeconfigCluster = msgspec.field(name="cluster")


class NamedUser(msgspec.Struct):
    name: str
    value: User | None = msgspec.field(name="user", default=None)


class Kubeconfig(msgspec.Struct):
    current: str | None = msgspec.field(name="current-context", default=None)
    contexts: list[NamedContext] | None = None
    clusters: list[NamedCluster] | None = None
    users: list[NamedUser] | None = None


@dataclass(frozen=True)
class Connection:
    """One server and one user.

    `source` describes for people where the access comes from, `options` select it again in a command that
    undoes. Paths in `cluster` and `user` are absolute. `tls_name` is the name in the server's certificate, if
    that isn't its address; `headers` are those of impersonation; `renew` returns new credentials where a
    program prints them. `node`: the node of the kubelet's certificate that gpunode authenticates with, else
    "".
    """

    source: str
    cluster: models.Cluster = field(repr=False)
    user: models.User = field(default_factory=models.User, repr=False)
    options: tuple[str, ...] = ()
    namespace: str = "default"
    proxy: str = field(default="", repr=False)
    tls_name: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    renew: Callable[[], models.User] | None = field(default=None, repr=False, compare=False)
    node: str = ""


def to_server(
    url: str, source: str, *, authority: str | None = None, token_file: str | None = None, **parts: Any
) -> Connection:
    """A connection without a kubeconfig; `authority`: the path of the certificate that signs the server's."""
    cluster = models.Cluster(server=checked_server(url, source), certificate_auth=authority)
    return Connection(source, cluster, models.User(token_file=token_file), **parts)


# --- files ----------------------------------------------------------------------------------------------


def from_files(host: Host, paths: Sequence[str], context: str) -> tuple[Connection, tuple[str, ...], str]:
    """What a context (by default the current one) selects, the existing files, and their current context.

    `NoAccess` says what is missing in which file; `Unreadable`.
    """
    files: dict[str, Kubeconfig] = {}
    for path in paths:
        if (text := host.read_text(path)) is not None:
            files[path] = _parse(path, text)
    if not files:
        raise NoAccess(f"no kubeconfig at {', '.join(paths)}", hint="name an existing one: --kubeconfig PATH")
    current = next((file.current for file in files.values() if file.current), "")
    joined, name = ":".join(files), context or current
    contexts = _first(files, "contexts")
    if not contexts:
        raise NoAccess(f"{joined} has no contexts", hint="name another file: --kubeconfig PATH")
    choice = ", ".join(f"--context {candidate}" for candidate in sorted(contexts))
    if not name:
        raise NoAccess(f"{joined} has no current context", hint=f"choose one: {choice}")
    if name not in contexts:
        raise NoAccess(f"{joined} has no context {name!r}", hint=f"choose one: {choice}")
    file, selected = contexts[name]

    def referred(kind: str, reference: str) -> tuple[str, Any]:
        entries = _first(files, f"{kind}s")
        if reference not in entries:
            raise NoAccess(
                f"{file}: context {name} names the {kind} {reference!r}, which does not exist", hint=_VIEW
            )
        return entries[reference]

    cluster = _checked_cluster(host, *referred("cluster", selected.cluster))
    user_file, user = referred("user", selected.user) if selected.user else (file, User())
    connection = Connection(
        source=f"{file}, context {name}",
        cluster=cluster,
        namespace=selected.namespace or "default",
        proxy=cluster.proxy or "",
        tls_name=cluster.tls_name or "",
        headers=_impersonation(user_file, user or User()),
    )
    connection = _with_user(host, connection, cluster, user_file, user or User())
    return connection, tuple(files), current


def _first(files: dict[str, Kubeconfig], plural: str) -> dict[str, tuple[str, Any]]:
    """The first entry of each name, and its file."""
    entries: dict[str, tuple[str, Any]] = {}
    for path, config in files.items():
        for entry in getattr(config, plural) or ():
            entries.setdefault(entry.name, (path, entry.value))
    return entries


def _parse(path: str, text: str) -> Kubeconfig:
    hint = f"see: {shlex.join(('kubectl', 'config', 'view', '--kubeconfig', path))}"
    if "\0" in text or not _encodes(text):
        raise NoAccess(f"{path} is not a kubeconfig: not text", hint=hint)
    try:
        tree = load(text, max_bytes=_MAX_BYTES, secret=True)
        return msgspec.convert({} if tree is None else tree, Kubeconfig)
    except DocumentError as error:
        problem = f"can't be parsed: {error}"
    except msgspec.ValidationError as error:  # reports the location and the types, never a value
        problem = f"is not a kubeconfig: {error}"
    raise NoAccess(f"{path} {problem}", hint=hint)


# --- cluster and user -----------------------------------------------------------------------------------


def _checked_cluster(host: Host, file: str, cluster: KubeconfigCluster) -> KubeconfigCluster:
    authority = None if cluster.certificate_auth_data else cluster.certificate_auth
    return changed(
        cluster,
        server=checked_server(cluster.server, file),
        certificate_auth=_existing(host, file, authority, "certificate-authority"),
    )


def _existing(host: Host, file: str, name: str | None, key: str) -> str | None:
    """The absolute path of a file that a kubeconfig names; `NoAccess` if it doesn't exist."""
    if not name:
        return None
    path = str(PurePosixPath(file).parent / name)
    if not host.is_file(path):
        raise NoAccess(
            f"{file} names {path} ({key}), which doesn't exist",
            hint="write a kubeconfig that holds its certificates: kubectl config view --flatten --raw",
        )
    return path


def _with_user(
    host: Host, connection: Connection, cluster: KubeconfigCluster, file: str, user: User
) -> Connection:
    program = user.exec
    if program is not None:

        def renew() -> models.User:
            return _from_program(host, program, file, cluster)

        return replace(connection, user=renew(), renew=renew)
    if user.auth_provider:
        return replace(connection, user=_from_provider(host, file, user.auth_provider))
    cert = None if user.client_cert_data else user.client_cert
    key = None if user.client_key_data else user.client_key
    user = changed(
        user,
        token=None if user.token_file else user.token,
        token_file=_existing(host, file, user.token_file, "tokenFile"),
        client_cert=_existing(host, file, cert, "client-certificate"),
        client_key=_existing(host, file, key, "client-key"),
    )
    return replace(connection, user=user)


def _impersonation(file: str, user: User) -> tuple[tuple[str, str], ...]:
    """The headers of impersonation: without them gpunode would act as a user with more rights than
    intended."""
    headers = [("Impersonate-User", user.as_user or ""), ("Impersonate-Uid", user.as_uid or "")]
    headers += [("Impersonate-Group", group) for group in user.as_groups or ()]
    for key, values in (user.as_extra or {}).items():
        headers += [(f"Impersonate-Extra-{quote(key, safe='')}", value) for value in values]
    if not all(value.isprintable() for _, value in headers):
        raise NoAccess(
            f"{file}: as, as-uid, as-groups and as-user-extra hold a line break or the like", hint=_VIEW
        )
    return tuple((name, value) for name, value in headers if value)


_SUCCESSORS = {
    "gcp": "gcloud container clusters get-credentials CLUSTER rewrites it, for gke-gcloud-auth-plugin",
    "azure": "kubelogin convert-kubeconfig rewrites it",
}


def _from_provider(host: Host, file: str, provider: dict[str, Any]) -> models.User:
    """The token that kubectl stores for OIDC, while it is valid. Other providers ended with Kubernetes
    1.26."""
    name, config = provider.get("name"), provider.get("config")
    if name != "oidc":
        raise NoAccess(
            f"{file}: auth-provider {name!r} is no longer a way to sign in",
            hint=_SUCCESSORS.get(str(name), PROXY_HINT),
        )
    token = config.get("id-token") if isinstance(config, dict) else None
    if not isinstance(token, str) or not token or 0 < token_expiry(token) < host.now():
        raise NoAccess(
            f"{file}: the token of auth-provider oidc has expired",
            hint="kubectl gets a new one and keeps it there: kubectl get nodes; then run this again",
        )
    return models.User(token=token)


# --- programs -------------------------------------------------------------------------------------------
# EKS', GKE's, OIDC's and others. Protocol: client.authentication.k8s.io/v1 and v1beta1, an ExecCredential on
# standard output. They run without a shell and without a terminal: only kubectl can ask a user to sign in.

_VERSIONS = ("client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1")
_EXTENSION = "client.authentication.k8s.io/exec"
_SECONDS = 60.0


class _Status(msgspec.Struct):
    token: str | None = None
    certificate: str | None = msgspec.field(name="clientCertificateData", default=None)
    key: str | None = msgspec.field(name="clientKeyData", default=None)


class _Credential(msgspec.Struct):
    status: _Status


def _from_program(host: Host, program: Program, file: str, cluster: KubeconfigCluster) -> models.User:
    """Run it. `NoAccess` says why it can't be run or what its error output is; its output is never shown."""
    argv, env = _command_line(program, file)
    spec: dict[str, Any] = {"interactive": False}
    if program.cluster_info:
        spec["cluster"] = _cluster_info(host, cluster)
    info = msgspec.json.encode({"apiVersion": program.apiVersion, "kind": "ExecCredential", "spec": spec})
    if host.trace is not None:
        host.trace(f"{argv[0]} ..." if argv[1:] else argv[0])
    quiet = replace(host, trace=None)  # its arguments may contain a secret
    done = quiet.run(argv, timeout=_SECONDS, env={**env, "KUBERNETES_EXEC_INFO": info.decode()})
    if done.code == COMMAND_NOT_FOUND and host.which(argv[0]) is None:
        hint = " ".join((program.installHint or "").split())
        raise NoAccess(
            f"{file} gets its token from {argv[0]}, which doesn't exist",
            hint=f"{hint[:300]}; or {PROXY_HINT}" if hint else PROXY_HINT,
        )
    if done.timed_out or done.code != 0:
        why = f"took longer than {_SECONDS:.0f} s" if done.timed_out else f"ended with {done.code}"
        output = " ".join(done.stderr.split())[-300:]
        raise NoAccess(f"{argv[0]}, which {file} gets its token from, {why}: {output}", hint=PROXY_HINT)
    try:
        status = msgspec.json.decode(done.stdout, type=_Credential).status
    except (ValueError, RecursionError) as error:
        raise NoAccess(f"{argv[0]} printed no ExecCredential ({file})", hint=PROXY_HINT) from error
    if not status.token and not (status.certificate and status.key):
        raise NoAccess(f"{argv[0]} printed neither a token nor a certificate ({file})", hint=PROXY_HINT)
    return models.User(
        token=status.token, client_cert_data=_base64(status.certificate), client_key_data=_base64(status.key)
    )


def _command_line(program: Program, file: str) -> tuple[list[str], dict[str, str]]:
    if program.interactive == "Always":
        raise NoAccess(f"{file}: {program.command} requires an interactive login", hint=PROXY_HINT)
    if program.apiVersion not in _VERSIONS:
        raise NoAccess(
            f"{file}: exec's apiVersion {program.apiVersion[:100]!r} isn't known;"
            f" known are {', '.join(_VERSIONS)}",
            hint=PROXY_HINT,
        )
    env = {variable.name: variable.value for variable in program.env or ()}
    texts = (program.command, *(program.args or ()), *env, *env.values())
    sound = all("\0" not in text and _encodes(text) for text in texts)
    if not program.command or not sound or any(not name or "=" in name for name in env):
        raise NoAccess(f"{file}: exec must have apiVersion, command, args and env", hint=PROXY_HINT)
    command = program.command
    if "/" in command:
        command = str(PurePosixPath(file).parent / command)
    return [command, *(program.args or ())], env


def _encodes(text: str) -> bool:
    """A lone surrogate can't be encoded."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _cluster_info(host: Host, cluster: KubeconfigCluster) -> dict[str, Any]:
    """The description of the cluster for a program (client.authentication.k8s.io/v1, Cluster)."""
    info = {
        "server": cluster.server,
        "tls-server-name": cluster.tls_name,
        "insecure-skip-tls-verify": cluster.insecure,
        "certificate-authority-data": cluster.certificate_auth_data,
        "proxy-url": cluster.proxy,
        "config": next(
            (extension.extension for extension in cluster.extensions or () if extension.name == _EXTENSION),
            None,
        ),
    }
    if cluster.certificate_auth:
        info["certificate-authority-data"] = _base64(host.read_text(cluster.certificate_auth))
    return {key: value for key, value in info.items() if value}


def _base64(text: str | None) -> str | None:
    return base64.b64encode(text.encode()).decode() if text else None


# --- parts ----------------------------------------------------------------------------------------------


def checked_server(url: str, source: str) -> str:
    """The URL without a trailing slash. `NoAccess` if it isn't an http or https URL."""
    if "@" in url:  # it would be shown in every message
        raise NoAccess(
            f"{source}: the API server's address {shown_url(url)[:_LONGEST]!r} has a name or password in it",
            hint="leave them out there: the kubeconfig's user has username and password",
        )
    try:
        parts = urlsplit(url)
        sound = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if not sound or not url.isprintable() or " " in url:
        hint = "it is such as https://10.0.0.1:6443"
        if source == "--server":
            hint = "name a kubectl proxy, such as http://127.0.0.1:8001; or use --kubeconfig without --server"
        raise NoAccess(f"{source}: {url[:_LONGEST]!r} is not the address of an API server", hint=hint)
    return url.rstrip("/")


def shown_url(url: str) -> str:
    """A URL for people, without a name and password in it."""
    return re.sub(r"//.*@", "//", url, flags=re.DOTALL)


def checked_token(token: str, source: str) -> str:
    """The token. `NoAccess`, which doesn't show it, for one that isn't valid in a header."""
    if not all("!" <= character <= "~" for character in token):
        raise NoAccess(
            f"the token of {source} holds a blank, a line break or the like",
            hint="a token is one word: get it again where it came from",
        )
    return token


class _Claims(msgspec.Struct):
    exp: float = 0.0


def token_expiry(token: str) -> float:
    """When a JSON web token expires (its claim `exp`, seconds since the epoch); 0 where it has none."""
    parts = token.split(".")
    try:
        claims = base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)) if len(parts) == 3 else b"{}"
        expiry = msgspec.json.decode(claims, type=_Claims).exp
    except (ValueError, RecursionError):
        return 0.0
    return expiry if 0 < expiry < 1e11 else 0.0


class Certificate(NamedTuple):
    """`name` is the user name in Kubernetes (the common name), `ends` in seconds since the epoch."""

    name: str
    ends: float

    @property
    def node(self) -> str:
        """The node of the kubelet that the certificate is for; empty for any other user."""
        return self.name.removeprefix("system:node:") if self.name.startswith("system:node:") else ""


_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


def client_certificate(host: Host, user: models.User) -> Certificate | None:
    """The certificate that gpunode authenticates with; None without one, or where openssl can't read it.

    Python's ssl reads certificates of servers and authorities only.
    """
    if user.client_cert_data:
        try:
            text = base64.b64decode(user.client_cert_data).decode(errors="replace")
        except ValueError:
            return None  # the transport reports it
    else:
        text = (host.read_text(user.client_cert) or "") if user.client_cert else ""
    pem = _PEM.search(text)  # the file may contain a key, too
    if pem is None:
        return None
    argv = ("openssl", "x509", "-noout", "-subject", "-enddate", "-nameopt", "RFC2253")
    done = host.run(argv, timeout=10.0, stdin=pem[0])
    lines = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    parts = re.findall(r"(?:\\.|[^,+\\])+", lines.get("subject", ""))  # a comma in a name has a backslash
    name = next((part[3:] for part in parts if part.startswith("CN=")), "")
    try:
        return Certificate(name, ssl.cert_time_to_seconds(lines.get("notAfter", "")))
    except ValueError:
        return None
