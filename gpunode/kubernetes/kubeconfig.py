"""kubeconfig files: several are merged as kubectl merges them, one context of them becomes a `Connection`.

Format: Kubernetes' client-go, tools/clientcmd/api/v1. The first file that names a cluster, user or context
has it; relative paths are relative to the file they stand in. The library's own reader takes one file, and of
the programs that print a token only those of an older version; so it isn't used.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote

from gpunode.host import Host
from gpunode.kubernetes.api import NoAccess
from gpunode.kubernetes.connection import PROXY_HINT, Connection, Identity, checked_server, expiry
from gpunode.kubernetes.exec_plugin import identity_from_program
from gpunode.kubernetes.plain_yaml import NotPlain, load

_EXEC_EXTENSION = "client.authentication.k8s.io/exec"
_SUCCESSORS = {
    "gcp": "gcloud container clusters get-credentials CLUSTER writes it anew, for gke-gcloud-auth-plugin",
    "azure": "kubelogin convert-kubeconfig writes it anew",
}


@dataclass(frozen=True)
class Entry:
    """One named part: its file's path, and what stands there."""

    file: str
    value: Mapping[str, Any]

    def text(self, key: str) -> str:
        """A string of it, empty if it isn't there. `NoAccess` for any other kind of value."""
        found = self.value.get(key)
        if found is None:
            return ""
        if not isinstance(found, str):
            raise NoAccess(f"{self.file}: {key} must be a string", hint="see: kubectl config view")
        return found

    def path(self, host: Host, key: str) -> str:
        """A file that it names, made absolute. `NoAccess` if it isn't there."""
        named = self.text(key)
        if not named:
            return ""
        path = str(PurePosixPath(self.file).parent / named)
        if not host.is_file(path):
            raise NoAccess(
                f"{self.file} names {path} ({key}), which is not there",
                hint="write a kubeconfig that holds its certificates: kubectl config view --flatten --raw",
            )
        return path


@dataclass(frozen=True)
class Merged:
    """Several files as one: each map is name to `Entry`."""

    files: tuple[str, ...]
    current: str
    contexts: Mapping[str, Entry]
    clusters: Mapping[str, Entry]
    users: Mapping[str, Entry]


def read(host: Host, paths: Sequence[str]) -> Merged:
    """Merge the files that are there. `NoAccess` if none is, or one isn't a kubeconfig; `Unreadable`."""
    current, found = "", []
    maps: tuple[dict[str, Entry], ...] = ({}, {}, {})
    for path in paths:
        text = host.read_text(path)
        if text is None:
            continue
        tree = _parsed(path, text)
        found.append(path)
        current = current or Entry(path, tree).text("current-context")
        for into, (plural, single) in zip(
            maps, (("contexts", "context"), ("clusters", "cluster"), ("users", "user")), strict=True
        ):
            for name, value in _named(path, tree, plural, single):
                into.setdefault(name, Entry(path, value))
    if not found:
        raise NoAccess(
            f"no kubeconfig at {', '.join(paths)}", hint="name one that is there: --kubeconfig PATH"
        )
    return Merged(tuple(found), current, *maps)


def _parsed(path: str, text: str) -> Mapping[str, Any]:
    hint = "see: kubectl config view --kubeconfig FILE"
    try:
        tree = load(text)
    except NotPlain as error:
        raise NoAccess(f"{path} can't be parsed: {error}", hint=hint) from None
    if not isinstance(tree, Mapping):
        raise NoAccess(f"{path} is no kubeconfig", hint=hint)
    return tree


def _named(
    path: str, tree: Mapping[str, Any], plural: str, single: str
) -> list[tuple[str, Mapping[str, Any]]]:
    entries = tree.get(plural) or []
    wrong = NoAccess(f"{path}: {plural} must be a list of name and {single}", hint="see: kubectl config view")
    if not isinstance(entries, list):
        raise wrong
    named = []
    for one in entries:
        if not isinstance(one, Mapping) or not isinstance(one.get("name"), str):
            raise wrong
        value = one.get(single) or {}
        if not isinstance(value, Mapping):
            raise wrong
        named.append((one["name"], value))
    return named


def connection(host: Host, merged: Merged, context: str) -> Connection:
    """What a context (the current one by default) leads to. `NoAccess` says what is missing in which file."""
    files = ":".join(merged.files)
    name = context or merged.current
    if not name:
        raise NoAccess(f"{files} has no current context", hint=f"choose one: {_choice(merged)}")
    chosen = merged.contexts.get(name)
    if chosen is None:
        raise NoAccess(f"{files} has no context {name!r}", hint=f"choose one: {_choice(merged)}")
    cluster = _referred(merged.clusters, chosen, "cluster", name)
    user = _referred(merged.users, chosen, "user", name) if chosen.text("user") else None
    ca_data = cluster.text("certificate-authority-data")
    ca_file = "" if ca_data else cluster.path(host, "certificate-authority")
    server = checked_server(cluster.value.get("server"), cluster.file)
    program = user.value.get("exec") if user is not None else None

    def renew() -> Identity:
        assert user is not None
        return identity_from_program(
            host, program, user.file, partial(_told_to_programs, host, cluster, ca_file)
        )

    return Connection(
        server=server,
        source=f"{chosen.file}, context {name}",
        namespace=chosen.text("namespace") or "default",
        identity=renew() if program is not None else _identity(host, user) if user else Identity(),
        ca_file=ca_file,
        ca_data=ca_data,
        insecure=cluster.value.get("insecure-skip-tls-verify") is True,
        proxy=cluster.text("proxy-url"),
        tls_name=cluster.text("tls-server-name"),
        headers=_on_behalf(user) if user else (),
        renew=renew if program is not None else None,
    )


def _told_to_programs(host: Host, cluster: Entry, ca_file: str) -> dict[str, Any]:
    """What a program gets to know of the cluster (client.authentication.k8s.io/v1, Cluster)."""
    kept = (
        "server",
        "tls-server-name",
        "insecure-skip-tls-verify",
        "certificate-authority-data",
        "proxy-url",
    )
    told: dict[str, Any] = {key: cluster.value[key] for key in kept if cluster.value.get(key)}
    if ca_file:
        pem = (host.read_text(ca_file) or "").encode()
        told["certificate-authority-data"] = base64.b64encode(pem).decode()
    for one in cluster.value.get("extensions") or ():
        if isinstance(one, Mapping) and one.get("name") == _EXEC_EXTENSION:
            told["config"] = one.get("extension")
    return told


def _on_behalf(user: Entry) -> tuple[tuple[str, str], ...]:
    """The headers of impersonation: without them we'd be somebody who may do more than is meant."""
    groups, extra = user.value.get("as-groups") or [], user.value.get("as-user-extra") or {}
    found = [("Impersonate-User", user.text("as")), ("Impersonate-Uid", user.text("as-uid"))]
    try:
        found += [("Impersonate-Group", str(one)) for one in groups]
        found += [
            (f"Impersonate-Extra-{quote(str(key), safe='')}", str(one)) for key in extra for one in extra[key]
        ]
    except TypeError as error:
        hint = "see: kubectl config view"
        raise NoAccess(
            f"{user.file}: as-groups and as-user-extra must be lists of names", hint=hint
        ) from error
    if not all(value.isprintable() for _, value in found):
        raise NoAccess(
            f"{user.file}: as, as-uid, as-groups and as-user-extra hold a line break or the like",
            hint="see: kubectl config view",
        )
    return tuple((name, value) for name, value in found if value)


def _choice(merged: Merged) -> str:
    return ", ".join(f"--context {name}" for name in sorted(merged.contexts)) or "there is none"


def _referred(entries: Mapping[str, Entry], context: Entry, kind: str, name: str) -> Entry:
    wanted = context.text(kind)
    if wanted not in entries:
        raise NoAccess(
            f"{context.file}: context {name} names the {kind} {wanted!r}, which isn't there",
            hint="see: kubectl config view",
        )
    return entries[wanted]


def _identity(host: Host, user: Entry) -> Identity:
    if user.value.get("auth-provider"):
        return _of_provider(host, user)
    cert_data, key_data = user.text("client-certificate-data"), user.text("client-key-data")
    return Identity(
        token="" if user.text("tokenFile") else user.text("token"),
        token_file=user.path(host, "tokenFile"),
        cert_data=cert_data,
        cert_file="" if cert_data else user.path(host, "client-certificate"),
        key_data=key_data,
        key_file="" if key_data else user.path(host, "client-key"),
        username=user.text("username"),
        password=user.text("password"),
    )


def _of_provider(host: Host, user: Entry) -> Identity:
    """The token that kubectl keeps for OIDC, while it lasts. Other providers ended with Kubernetes 1.26."""
    provider = user.value["auth-provider"]
    name = provider.get("name") if isinstance(provider, Mapping) else None
    if name != "oidc":
        raise NoAccess(
            f"{user.file}: auth-provider {name!r} is no longer a way to sign in",
            hint=_SUCCESSORS.get(str(name), PROXY_HINT),
        )
    kept = provider.get("config")
    token = kept.get("id-token") if isinstance(kept, Mapping) else None
    if not isinstance(token, str) or not token or 0 < expiry(token) < host.now():
        raise NoAccess(
            f"{user.file}: the token of auth-provider oidc has expired",
            hint="kubectl gets a new one and keeps it there: kubectl get nodes; then run this again",
        )
    return Identity(token=token)
