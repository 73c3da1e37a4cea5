"""Access to the API server: the server and user that the options, environment and files of this machine
select, and the node's name.

In this order: `--server` (a `kubectl proxy`, which has the credentials), `--kubeconfig`, KUBECONFIG, the
account of the pod that gpunode runs in, ~/.kube/config. Nothing else is used automatically: root's files
under /etc/kubernetes may allow far more than intended, so the hint names them for --kubeconfig.
"""

from __future__ import annotations

import os.path
import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from gpunode.errors import PreconditionError, UsageError, install_command
from gpunode.host import Host
from gpunode.kubernetes.api import ClusterError, ExtraMissing, Json, NoAccess

if TYPE_CHECKING:
    from gpunode.kubernetes.client import Cluster
    from gpunode.kubernetes.kubeconfig import Connection

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
KUBELET = "kubelet"
"""As `--kubeconfig`: the kubelet's own, wherever this distribution has it."""
KUBELETS_OWN = (
    "/etc/kubernetes/kubelet.conf",
    "/var/lib/rancher/k3s/agent/kubelet.kubeconfig",
    "/var/lib/rancher/rke2/agent/kubelet.kubeconfig",
    "/var/lib/k0s/kubelet.conf",
    "/var/snap/microk8s/current/credentials/kubelet.config",
    "/var/lib/kubelet/kubeconfig",  # EKS, GKE, AKS, OpenShift
    "/etc/kubernetes/kubeconfig-kubelet",  # Talos
)
_ADMINS = (
    "/etc/kubernetes/admin.conf",
    "/etc/rancher/k3s/k3s.yaml",
    "/etc/rancher/rke2/rke2.yaml",
    "/var/lib/k0s/pki/admin.conf",
    "/var/snap/microk8s/current/credentials/client.config",
)
_SECONDS = 10.0  # for one piece of a response
_NODE = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")  # RFC 1123 subdomain, as the server accepts it


class Access(NamedTuple):
    """The options that name an API server.

    `pods`: the command creates pods. A kubelet's account may create only mirrors of its static pods
    (Kubernetes, NodeRestriction), so no hint offers it.
    """

    kubeconfig: str = ""
    context: str = ""
    server: str = ""
    pods: bool = False


def kubectl(host: Host, options: tuple[str, ...], *command: str) -> str:
    """A kubectl command line for the cluster that `Cluster.options` select."""
    values = dict(zip(options[::2], options[1::2], strict=True))
    files = values.get("--kubeconfig", "")
    if files == KUBELET:
        values["--kubeconfig"] = _of_kubelet(host)
    prefix = ""
    if ":" in files and not host.exists(files):  # --kubeconfig of kubectl accepts one file
        del values["--kubeconfig"]
        prefix = f"KUBECONFIG={shlex.quote(files)} "
    argv = ("kubectl", *(word for option in values.items() for word in option), *command)
    return f"{prefix}{shlex.join(argv)}"


def connect(host: Host, access: Access) -> Cluster:
    """The cluster that the options, the environment or the files select; no request is sent yet.

    `ExtraMissing`, `NoAccess`, `UsageError` for options that contradict each other, `PreconditionError` under
    another root.
    """
    if not host.live:
        raise PreconditionError(
            f"gpunode contacts no API server under --root {host.root}",
            hint="leave out --root",
            code="not-live",
        )
    try:
        from gpunode.kubernetes.client import Cluster
        from gpunode.kubernetes.kubeconfig import client_certificate
    except ImportError as error:
        raise ExtraMissing(
            f"requests to an API server need the Python package lightkube ({error})",
            hint=install_command("kubernetes", "lightkube"),
        ) from error
    connection = find(host, access)
    own = client_certificate(host, connection.user)
    proxy = connection.proxy or proxy_for(connection.cluster.server, host.environ)
    connection = replace(connection, proxy=proxy, node=own.node if own is not None else "")
    return Cluster(host, connection, _SECONDS)


def find(host: Host, access: Access) -> Connection:
    """The server to connect to, and the user. Errors as in `connect`."""
    from gpunode.kubernetes.kubeconfig import to_server

    if access.server:
        if access.kubeconfig or access.context:
            raise UsageError(
                "--server speaks to a kubectl proxy, which has credentials of its own",
                hint="leave out --kubeconfig and --context, or --server",
            )
        try:
            return to_server(access.server, "--server", options=("--server", access.server))
        except NoAccess as error:
            raise UsageError(error.message, hint=error.hint) from error
    if access.kubeconfig == KUBELET:
        return _of_files(host, (_of_kubelet(host),), access)
    if access.kubeconfig:
        whole, parts = _absolute(access.kubeconfig), _split(access.kubeconfig)
        return _of_files(host, (whole,) if host.exists(whole) or not parts else parts, access)
    if paths := _split(host.environ.get("KUBECONFIG", "")):
        return _of_files(host, paths, access)
    if host.environ.get("KUBERNETES_SERVICE_HOST") and host.exists(f"{ACCOUNT}/token") and not access.context:
        return _of_account(host)
    own = f"{host.environ.get('HOME', '')}/.kube/config"
    if own.startswith("/") and host.is_file(own):
        return _of_files(host, (own,), access)
    raise _nothing(host, access.pods)


def _split(paths: str) -> tuple[str, ...]:
    """The files in KUBECONFIG's form."""
    return tuple(_absolute(path) for path in paths.split(":") if path)


def _absolute(path: str) -> str:
    """The path with the home directory for ``~`` and ``~USER``, which stay unchanged for an unknown user."""
    return str(Path(os.path.expanduser(path)).absolute())  # noqa: PTH111 - pathlib's raises for an unknown user


def _of_files(host: Host, paths: tuple[str, ...], access: Access) -> Connection:
    """Its options always name files and context: the defaults may be others when a change is undone."""
    from gpunode.kubernetes.kubeconfig import from_files

    for path in filter(host.is_dir, paths):
        raise NoAccess(f"{path} is a directory", hint=f"name a file in it: --kubeconfig {path}/config")
    connection, existing, current = from_files(host, paths, access.context)
    files = KUBELET if access.kubeconfig == KUBELET else ":".join(existing)
    context = access.context or ("" if files == KUBELET else current)
    return replace(connection, options=("--kubeconfig", files, *(("--context", context) if context else ())))


def _of_kubelet(host: Host) -> str:
    path = next(filter(host.is_file, KUBELETS_OWN), "")
    if not path:
        raise NoAccess(
            "no kubelet's kubeconfig is on this node", hint=f"looked for: {', '.join(KUBELETS_OWN)}"
        )
    return path


def _of_account(host: Host) -> Connection:
    """The pod's own service account (Kubernetes: Accessing the API from a Pod)."""
    from gpunode.kubernetes.kubeconfig import to_server

    address = host.environ["KUBERNETES_SERVICE_HOST"]
    port = host.environ.get("KUBERNETES_SERVICE_PORT") or "443"
    bracketed = f"[{address}]" if ":" in address else address
    return to_server(
        f"https://{bracketed}:{port}",
        "this pod's service account",
        namespace=(host.read_text(f"{ACCOUNT}/namespace") or "default").strip(),
        authority=f"{ACCOUNT}/ca.crt",
        token_file=f"{ACCOUNT}/token",
    )


def _nothing(host: Host, pods: bool) -> NoAccess:
    user = host.environ.get("SUDO_USER")
    own = (_absolute(f"~{user}/.kube/config"),) if user else ()
    candidates = (*own, *_ADMINS, *(() if pods else KUBELETS_OWN))
    existing = [path for path in candidates if host.exists(path)]
    offer = f"here are {', '.join(existing)}; " if existing else ""
    path = existing[0] if existing else "PATH"
    kubelet = "" if pods else " --kubeconfig kubelet (this node's own),"
    return NoAccess(
        "no API server is configured: no KUBECONFIG, no ~/.kube/config, no service account of a pod",
        hint=f"{offer}--kubeconfig {path},{kubelet} or kubectl proxy and --server http://127.0.0.1:8001",
    )


# --- proxy ----------------------------------------------------------------------------------------------
# As kubectl reads it from the environment (Go's golang.org/x/net/http/httpproxy). httpx and urllib read
# ALL_PROXY, and accept no address ranges in NO_PROXY, which usually exclude a cluster's own network.


def proxy_for(server: str, environ: Mapping[str, str]) -> str:
    """The proxy's URL for a server's URL; empty for none."""

    def of(name: str) -> str:
        return (environ.get(name.upper()) or environ.get(name) or "").strip()

    parts = urlsplit(server)
    host, port = (parts.hostname or "").lower(), parts.port or {"http": 80, "https": 443}[parts.scheme]
    excepted = (entry.strip().lower() for entry in of("no_proxy").split(","))
    if _is_loopback(host) or any(_matches(entry, host, port) for entry in excepted):
        return ""
    proxy = of(f"{parts.scheme}_proxy")
    return proxy if not proxy or "://" in proxy else f"http://{proxy}"


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _matches(entry: str, host: str, port: int) -> bool:
    """Whether an entry of NO_PROXY matches the server: ``*``, an address, a range, a domain; each possibly
    with a port."""
    if entry in ("", "*"):
        return entry == "*"
    try:
        return ip_address(host) in ip_network(entry.strip("[]"), strict=False)
    except (ValueError, TypeError):
        pass  # one of the two is a name, or has a port
    name, colon, number = entry.rpartition(":")
    if colon and number.isdecimal() and (":" not in name or name.endswith("]")):
        return int(number) == port and _matches(name, host, port)
    name = entry.removeprefix("*")
    return host.endswith(name) if name.startswith(".") else host == name or host.endswith(f".{name}")


# --- node -----------------------------------------------------------------------------------------------


def node_name(host: Host, option: str, certificate: str = "") -> tuple[str, str]:
    """The node's name and its source: `--node`, NODE_NAME, the kubelet's certificate (`Cluster.node`, where
    gpunode uses the kubelet's account), or this machine's name.

    `UsageError` for an invalid node name.
    """
    own = (host.read_text("/proc/sys/kernel/hostname") or "").strip().lower()
    names = (
        (option, "--node"),
        (host.environ.get("NODE_NAME", ""), "NODE_NAME"),
        (certificate, "the kubelet's certificate"),
        (own, "this machine's name"),
    )
    name, source = next((name for name in names if name[0]), ("", ""))
    if not name:
        raise UsageError("can't tell which Node this is", hint="name it: --node NAME")
    if _NODE.fullmatch(name) is None or len(name) > 253 or ".." in name:
        raise UsageError(f"{name!r} can't be a node's name ({source})", hint="see: kubectl get nodes")
    return name, source


# A node's name needn't be its host's (kubelet's --hostname-override, cloud providers). The kubelet of every
# node reports the machine-id and the firmware's UUID (Kubernetes, NodeSystemInfo).

_MOST = 2000  # nodes that are searched for a hint
_FILES = {
    "machineID": ("/etc/machine-id", "/var/lib/dbus/machine-id"),
    "systemUUID": ("/sys/class/dmi/id/product_uuid",),
}


def hint(host: Host, cluster: Cluster, source: str) -> str:
    """The hint for a missing node; its name is from `source`. Cloned machines share these numbers, so the
    result is only a hint."""
    own = _own(host)
    try:
        nodes = cluster.list("Node", most=_MOST) if own else ()
    except ClusterError:
        nodes = ()  # this account may not list them
    names = [shlex.quote(node["metadata"]["name"]) for node in nodes if _is(node, own)]
    if len(names) == 1:
        return f"the name is from {source}; this machine is the node {names[0]}: add --node {names[0]}"
    return f"the name is from {source}; see: kubectl get nodes, then add --node NAME"


def is_this_machine(host: Host, node: Json) -> bool:
    """Whether the kubelet of this Node object reports this machine's numbers."""
    return _is(node, _own(host))


def _own(host: Host) -> dict[str, str]:
    numbers = {}
    for key, paths in _FILES.items():
        for path in paths:
            if text := host.text_or_empty(path).strip().lower():  # only root can read the firmware's
                numbers[key] = text
                break
    return numbers


def _is(node: Json, own: dict[str, str]) -> bool:
    status = node.get("status")
    info = status.get("nodeInfo") if isinstance(status, dict) else None
    if not isinstance(info, dict):
        return False
    return any(str(info.get(key) or "").lower() == value for key, value in own.items())
