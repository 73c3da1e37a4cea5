"""Who may do what: a service account, and for each use of the API server exactly the verbs that it takes."""

from __future__ import annotations

from collections.abc import Iterable

from gpunode.dataclass import dataclass
from gpunode.kubernetes.manifests.common import MANAGER, PLUGIN, Json, made

_API = "rbac.authorization.k8s.io"


@dataclass(frozen=True)
class Use:
    """Rules for the whole cluster (nodes are in no namespace) and for one namespace; `why` is for people."""

    why: str
    cluster: tuple[Json, ...] = ()
    inside: tuple[Json, ...] = ()


def _rule(group: str, resources: str, verbs: str) -> Json:
    return {"apiGroups": [group], "resources": resources.split(), "verbs": verbs.split()}


USES = {
    "plugin": Use("the device plugin: it speaks to the kubelet alone"),
    "labels": Use("labels onto the Node", (_rule("", "nodes", "get patch"),)),
    "node-feature": Use(
        "labels as a NodeFeature, which goes with the pod's DaemonSet",
        (),
        (_rule("nfd.k8s-sigs.io", "nodefeatures", "get create update"), _rule("", "pods", "get")),
    ),
    "mig": Use("the state of MIG onto the Node", (_rule("", "nodes", "get patch"),)),
    "advertise": Use(
        "gpunode node advertise", (_rule("", "nodes", "get"), _rule("", "nodes/status", "patch"))
    ),
    "node": Use("gpunode node label, gpunode node taint", (_rule("", "nodes", "get patch"),)),
    "verify": Use(
        "gpunode verify --on kubernetes",
        (_rule("", "nodes", "get"), _rule("node.k8s.io", "runtimeclasses", "get")),
        (
            _rule("", "pods", "create get list delete"),
            _rule("", "pods/log", "get"),
            _rule("", "events", "list"),
        ),
    ),
}
OF_PLUGIN = frozenset({"plugin", "labels", "node-feature", "mig"})


def rbac(namespace: str, uses: Iterable[str], name: str = PLUGIN) -> tuple[Json, ...]:
    """A ServiceAccount, and a role with its binding for the cluster and for `namespace`, where needed.

    Roles are named after their uses and bindings after the account as well, so that the rights of one account
    never replace those of another one.
    """
    names = sorted(set(uses))
    account = made("v1", "ServiceAccount", name, "device-plugin", namespace)
    everywhere = _merged(rule for use in names for rule in USES[use].cluster)
    inside = _merged(rule for use in names for rule in USES[use].inside)
    account["automountServiceAccountToken"] = bool(everywhere or inside)
    objects = [account]
    if everywhere:
        role = _role_name(use for use in names if USES[use].cluster)
        objects += _bound("ClusterRole", role, everywhere, f"{namespace}:{name}", account, "")
    if inside:
        role = _role_name(use for use in names if USES[use].inside)
        objects += _bound("Role", role, inside, name, account, namespace)
    return tuple(objects)


def _role_name(uses: Iterable[str]) -> str:
    """Such as ``gpunode:node-verify``."""
    return f"{MANAGER}:{'-'.join(uses)}"


def _merged(rules: Iterable[Json]) -> list[Json]:
    """One rule for each resource, with every verb that somebody needs."""
    verbs: dict[tuple[str, str], dict[str, None]] = {}
    for rule in rules:
        for resource in rule["resources"]:
            verbs.setdefault((rule["apiGroups"][0], resource), {}).update(dict.fromkeys(rule["verbs"]))
    return [_rule(group, resource, " ".join(named)) for (group, resource), named in verbs.items()]


def _bound(
    kind: str, name: str, rules: list[Json], binding: str, account: Json, namespace: str
) -> list[Json]:
    """A role and its binding to the account; `binding` tells it from bindings to other accounts."""
    api = f"{_API}/v1"
    subject = {key: account["metadata"][key] for key in ("name", "namespace")}
    return [
        made(api, kind, name, "device-plugin", namespace, rules=rules),
        made(
            *(api, f"{kind}Binding", f"{name}:{binding}", "device-plugin", namespace),
            roleRef={"apiGroup": _API, "kind": kind, "name": name},
            subjects=[{"kind": "ServiceAccount", **subject}],
        ),
    ]
