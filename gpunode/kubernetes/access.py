"""How gpunode comes to an API server, and which node it means.

In this order: `--server` (a `kubectl proxy`, which has the credentials), `--kubeconfig`, KUBECONFIG, the
account of the pod that gpunode runs in, ~/.kube/config. Nothing else is tried by itself: what root finds
under /etc/kubernetes may do far more than is meant, so it is named in the hint and taken when asked for.
"""

from __future__ import annotations

import base64
import re
import shlex
from dataclasses import dataclass, replace
from functools import partial

from gpunode.errors import GpunodeError, PreconditionError, UsageError
from gpunode.host import Host
from gpunode.kubernetes import kubeconfig
from gpunode.kubernetes.api import Cluster, ClusterError, Json, NoAccess
from gpunode.kubernetes.certificate import Certificate, first_in
from gpunode.kubernetes.connection import Connection, Identity, checked_server, expiry
from gpunode.kubernetes.proxies import proxy_for

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
_NODE = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")  # RFC 1123 subdomain, as the server takes it


@dataclass(frozen=True)
class Access:
    """The options by which a command is told its API server. `timeout`: seconds for one answer."""

    kubeconfig: str = ""
    context: str = ""
    server: str = ""
    timeout: float = 10.0


def kubectl(host: Host, words: tuple[str, ...], *command: str) -> str:
    """A kubectl command line for the cluster that `Cluster.words` lead to."""
    options = dict(zip(words[::2], words[1::2], strict=True))
    files = options.get("--kubeconfig", "")
    if files == KUBELET:
        options["--kubeconfig"] = _kubelets(host)[0]
    prefix = ""
    if ":" in files and not host.exists(files):  # --kubeconfig of kubectl takes one file
        del options["--kubeconfig"]
        prefix = f"KUBECONFIG={shlex.quote(files)} "
    argv = ("kubectl", *(word for option in options.items() for word in option), *command)
    return f"{prefix}{shlex.join(argv)}"


def connect(host: Host, access: Access) -> Cluster:
    """The cluster that the options, the environment or the files lead to; nothing is asked of it yet.

    `ExtraMissing`, `NoAccess`, `UsageError` for options that contradict each other, `PreconditionError` under
    another root.
    """
    if not host.live:
        raise PreconditionError(
            f"no API server is asked under --root {host.root}", hint="leave out --root", code="not-live"
        )
    found = find(host, access)
    own = _certificate(host, found.identity)
    proxy = found.proxy or proxy_for(found.server, host.environ)
    found = replace(found, proxy=proxy, node=own.node if own is not None else "")
    from gpunode.kubernetes.client import open_client

    return open_client(found, access.timeout, partial(refused, host, found), host.read_text)


def find(host: Host, access: Access) -> Connection:
    """Where to connect to, and as whom. Errors as `connect` has them."""
    if access.server:
        if access.kubeconfig or access.context:
            raise UsageError(
                "--server speaks to a kubectl proxy, which has credentials of its own",
                hint="leave out --kubeconfig and --context, or --server",
            )
        return Connection(checked_server(access.server, "--server"), "--server", ("--server", access.server))
    if access.kubeconfig:
        paths = _kubelets(host) if access.kubeconfig == KUBELET else _listed(host, access.kubeconfig)
        return _of_files(host, paths, access)
    named = tuple(filter(None, host.environ.get("KUBECONFIG", "").split(":")))
    if named:
        return _of_files(host, tuple(map(_absolute, named)), access)
    if host.environ.get("KUBERNETES_SERVICE_HOST") and host.exists(f"{ACCOUNT}/token") and not access.context:
        return _of_account(host)
    own = f"{host.environ.get('HOME', '')}/.kube/config"
    if own.startswith("/") and host.is_file(own):
        return _of_files(host, (own,), access)
    raise _nothing(host)


def _absolute(path: str) -> str:
    """With the home directory for ``~`` and ``~USER``, which stay as they are for an unknown user."""
    from os.path import expanduser
    from pathlib import Path

    return str(Path(expanduser(path)).absolute())  # noqa: PTH111 - pathlib's raises for an unknown user


def _listed(host: Host, named: str) -> tuple[str, ...]:
    """One file; or several as KUBECONFIG has them, where no file is of that very name."""
    several = tuple(filter(None, named.split(":")))
    return tuple(map(_absolute, (named,) if host.exists(_absolute(named)) or not several else several))


def _of_files(host: Host, paths: tuple[str, ...], access: Access) -> Connection:
    """Its words name files and context even if nobody did: both may be others when a change is undone."""
    for path in filter(host.is_dir, paths):
        raise NoAccess(f"{path} is a directory", hint=f"name a file in it: --kubeconfig {path}/config")
    merged = kubeconfig.read(host, paths)
    found = kubeconfig.connection(host, merged, access.context)
    files = KUBELET if access.kubeconfig == KUBELET else ":".join(merged.files)
    named = access.context or ("" if files == KUBELET else merged.current)
    return replace(found, words=("--kubeconfig", files, *(("--context", named) if named else ())))


def _kubelets(host: Host) -> tuple[str, ...]:
    found = tuple(path for path in KUBELETS_OWN if host.is_file(path))[:1]
    if not found:
        raise NoAccess(
            "no kubelet's kubeconfig is on this node", hint=f"looked for: {', '.join(KUBELETS_OWN)}"
        )
    return found


def _of_account(host: Host) -> Connection:
    """The pod's own service account (Kubernetes: Accessing the API from a Pod)."""
    address = host.environ["KUBERNETES_SERVICE_HOST"]
    port = host.environ.get("KUBERNETES_SERVICE_PORT") or "443"
    shown = f"[{address}]" if ":" in address else address
    return Connection(
        server=checked_server(f"https://{shown}:{port}", "KUBERNETES_SERVICE_HOST"),
        source="this pod's service account",
        namespace=(host.read_text(f"{ACCOUNT}/namespace") or "default").strip(),
        identity=Identity(token_file=f"{ACCOUNT}/token"),
        ca_file=f"{ACCOUNT}/ca.crt",
    )


def _nothing(host: Host) -> NoAccess:
    theirs = (
        (_absolute(f"~{host.environ['SUDO_USER']}/.kube/config"),) if host.environ.get("SUDO_USER") else ()
    )
    there = [path for path in (*theirs, *_ADMINS, *KUBELETS_OWN) if host.exists(path)]
    offer = f"here are {', '.join(there)}; " if there else ""
    return NoAccess(
        "no way to an API server: no KUBECONFIG, no ~/.kube/config, and this is no pod with an account",
        hint=f"{offer}--kubeconfig PATH, --kubeconfig kubelet (this node's own),"
        " or kubectl proxy and --server http://127.0.0.1:8001",
    )


def refused(host: Host, found: Connection) -> str:
    """What to do when the server doesn't know who we are; tells of a token that has run out."""
    token = found.identity.token
    if found.identity.token_file:
        token = (host.read_text(found.identity.token_file) or "").strip()
    own, now = _certificate(host, found.identity), host.now()
    if 0 < (ends := expiry(token)) < now:
        return f"the token expired at {_date(ends)}; get a new one where {found.source} has it from"
    if own is not None and own.ends < now:
        mend = (
            "as root: kubeadm certs renew all"
            if "admin" in own.name or "kubeadm" in own.name
            else (
                "does the kubelet still exchange it? journalctl -u kubelet" if own.node else "make a new one"
            )
        )
        return f"the certificate of {own.name} in {found.source} expired at {_date(own.ends)}; {mend}"
    if found.words[:1] == ("--server",):
        return "kubectl proxy adds the credentials: is it still running, with a context that works?"
    return f"sign in again, or make a new token or certificate; used was: {found.source}"


def _certificate(host: Host, who: Identity) -> Certificate | None:
    """The client certificate by which we are known, if it is one."""
    if who.cert_file:
        return first_in(host.read_text(who.cert_file) or "")
    try:
        return first_in(base64.b64decode(who.cert_data).decode(errors="replace"))
    except ValueError:
        return None  # whoever uses it says so


def _date(seconds: float) -> str:
    import time

    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def node_name(host: Host, given: str, kubelets: str = "") -> tuple[str, str]:
    """The node that is meant, and where its name comes from: `--node`, NODE_NAME, the kubelet's certificate
    (`Cluster.node`, if it is by the kubelet's account that we ask), or this machine's name.

    `UsageError` for what can't be a node's name.
    """
    own = (host.read_text("/proc/sys/kernel/hostname") or "").strip().lower()
    named = (
        (given, "--node"),
        (host.environ.get("NODE_NAME", ""), "NODE_NAME"),
        (kubelets, "the kubelet's certificate"),
        (own, "this machine's name"),
    )
    name, source = next((one for one in named if one[0]), ("", ""))
    if not name:
        raise UsageError("neither option nor machine says which node it is", hint="name it: --node NAME")
    if _NODE.fullmatch(name) is None or len(name) > 253 or ".." in name:
        raise UsageError(f"{name!r} can't be a node's name ({source})", hint="see: kubectl get nodes")
    return name, source


# Which Node object this machine is, where the cluster has none of the name that was thought of.
#
# A node's name needn't be its host's (kubelet's --hostname-override, cloud providers); what the kubelet
# reports of the machine is the same everywhere: machine-id and the firmware's UUID (Kubernetes,
# NodeSystemInfo).

_MOST = 2000  # nodes that are looked at for a hint
_FILES = {
    "machineID": ("/etc/machine-id", "/var/lib/dbus/machine-id"),
    "systemUUID": ("/sys/class/dmi/id/product_uuid",),
}


def hint(host: Host, cluster: Cluster, source: str) -> str:
    """What to do about a node that isn't there, whose name is from `source`.

    No more than a hint: machines that were cloned share these numbers.
    """
    own = _own(host)
    try:
        nodes = cluster.list_nodes(_MOST) if own else ()
    except ClusterError:
        nodes = ()  # this account may not list them; it was a courtesy
    found = [shlex.quote(one["metadata"]["name"]) for one in nodes if _is(one, own)]
    if len(found) == 1:
        return f"the name is from {source}; this machine is the node {found[0]}: add --node {found[0]}"
    return f"the name is from {source}; see: kubectl get nodes, then add --node NAME"


def is_this_machine(host: Host, node: Json) -> bool:
    """Whether the kubelet of this Node object reports this machine's numbers."""
    return _is(node, _own(host))


def _own(host: Host) -> dict[str, str]:
    found = {}
    for key, paths in _FILES.items():
        for path in paths:
            try:
                text = (host.read_text(path) or "").strip().lower()
            except GpunodeError:
                continue  # the firmware's is for root alone
            if text:
                found[key] = text
                break
    return found


def _is(node: Json, own: dict[str, str]) -> bool:
    status = node.get("status")
    told = status.get("nodeInfo") if isinstance(status, dict) else None
    if not isinstance(told, dict):
        return False
    return any(str(told.get(key) or "").lower() == value for key, value in own.items())
