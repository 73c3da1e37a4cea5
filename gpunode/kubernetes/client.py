"""The one place that speaks to an API server, through lightkube; see `api.Cluster`.

Objects go in and out as plain JSON: lightkube's generic resources, not its models, which know the fields of
one Kubernetes release.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

from gpunode.errors import install_command
from gpunode.kubernetes.api import (
    FIELD_MANAGER,
    Cluster,
    ExtraMissing,
    Invalid,
    Json,
    Patch,
    is_object,
    named,
)
from gpunode.kubernetes.connection import Connection

if TYPE_CHECKING:
    from lightkube import Client

_PART = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")  # of a URL's path: the library quotes nothing
_EVENTS, _NODES = 200, 500  # objects in one answer
_RBAC = "rbac.authorization.k8s.io"


def open_client(
    connection: Connection, timeout: float, refused: Callable[[], str], read: Callable[[str], str | None]
) -> Cluster:
    """A client; nothing is sent yet. `refused` gives the hint for a 401, `read` a file's text, None where it
    isn't there. `ExtraMissing`, `NoAccess`."""
    try:
        import httpx2
        import lightkube
        from lightkube.config.kubeconfig import KubeConfig
        from lightkube.config.models import Cluster as Place
        from lightkube.config.models import User

        from gpunode.kubernetes.wire import Wire
    except ImportError as error:
        raise ExtraMissing(
            f"speaking to an API server needs the Python package lightkube ({error})",
            hint=install_command("kubernetes", "lightkube"),
        ) from error
    who, wire = connection.identity, Wire(connection, read)
    # certificates and tokens are the wire's: with one of its own the client makes no use of its context
    place = Place(server=connection.server, insecure=True)
    user = User(username=who.username or None, password=who.password or None)
    client = lightkube.Client(
        KubeConfig.from_one(cluster=place, user=user, namespace=connection.namespace).get(),
        timeout=httpx2.Timeout(timeout),
        field_manager=FIELD_MANAGER,
        trust_env=False,
        transport=wire,
    )
    return _LightkubeCluster(client, connection, refused)


class _LightkubeCluster:
    """`Cluster` on lightkube's synchronous client."""

    def __init__(self, client: Client, connection: Connection, refused: Callable[[], str]) -> None:
        self._client = client
        self._connection = connection
        self._refused = refused
        self._kinds = _kinds()

    @property
    def server(self) -> str:
        return self._connection.server

    @property
    def source(self) -> str:
        return self._connection.source

    @property
    def words(self) -> tuple[str, ...]:
        return self._connection.words

    @property
    def namespace(self) -> str:
        return self._connection.namespace

    @property
    def node(self) -> str:
        return self._connection.node

    def close(self) -> None:
        self._client.close()

    def get_node(self, name: str) -> Json:
        return self._ask(
            f"read the node {name}", name, lambda: self._client.get(self._kinds["Node"], _part(name))
        )

    def list_nodes(self, most: int) -> tuple[Json, ...]:
        def ask() -> list[Any]:
            return list(islice(self._client.list(self._kinds["Node"], chunk_size=_NODES), most))

        return self._list("list the nodes", ask)

    def patch_node(self, name: str, patch: Patch) -> Json:
        return self._patch(f"change the node {name}", self._kinds["Node"], name, patch)

    def patch_node_status(self, name: str, patch: Patch) -> Json:
        return self._patch(f"change the status of the node {name}", self._kinds["NodeStatus"], name, patch)

    def _patch(self, what: str, kind: Any, name: str, patch: Patch) -> Json:
        from lightkube.types import PatchType

        body = [dict(one) for one in patch]
        return self._ask(
            what,
            name,
            lambda: self._client.patch(kind, _part(name), body, patch_type=PatchType.JSON),
            changes=True,
        )

    def create_pod(self, namespace: str, pod: Json) -> Json:
        return self._create("Pod", namespace, pod)

    def get_pod(self, namespace: str, name: str) -> Json:
        return self._get("Pod", namespace, name)

    def list_pods(self, namespace: str, labels: Mapping[str, str]) -> tuple[Json, ...]:
        def ask() -> list[Any]:
            return list(
                self._client.list(self._kinds["Pod"], namespace=_part(namespace), labels=dict(labels))
            )

        return self._list(f"list the pods of {namespace}", ask)

    def delete_pod(self, namespace: str, name: str, *, grace: int | None = None) -> None:
        with self._told(f"delete the pod {namespace}/{name}", changes=True):
            self._client.delete(
                self._kinds["Pod"], _part(name), namespace=_part(namespace), grace_period=grace
            )

    def pod_log(self, namespace: str, name: str, *, container: str = "", lines: int = 0) -> str:
        with self._told(f"read the log of the pod {namespace}/{name}"):
            found = self._client.log(
                _part(name),
                namespace=_part(namespace),
                container=container or None,
                tail_lines=lines or None,
            )
            return "".join(found)

    def events(self, namespace: str, fields: Mapping[str, str]) -> tuple[Json, ...]:
        def ask() -> list[Any]:
            found = self._client.list(
                self._kinds["Event"], namespace=_part(namespace), fields=dict(fields), chunk_size=_EVENTS
            )
            return list(found)

        return tuple(sorted(self._list(f"list the events of {namespace}", ask), key=_when))

    def get_node_feature(self, namespace: str, name: str) -> Json:
        return self._get("NodeFeature", namespace, name)

    def create_node_feature(self, namespace: str, feature: Json) -> Json:
        return self._create("NodeFeature", namespace, feature)

    def update_node_feature(self, namespace: str, feature: Json) -> Json:
        name = str(feature["metadata"]["name"])

        def ask() -> Any:
            body = self._kinds["NodeFeature"](feature)
            return self._client.replace(body, _part(name), namespace=_part(namespace))

        return self._ask(f"replace the NodeFeature {namespace}/{name}", name, ask, changes=True)

    def get_runtime_class(self, name: str) -> Json:
        kind = self._kinds["RuntimeClass"]
        return self._ask(f"read the RuntimeClass {name}", name, lambda: self._client.get(kind, _part(name)))

    def get_object(self, like: Json) -> Json:
        kind, place, name = self._meant(like)
        return self._ask(
            f"read the {named(like)}", name, lambda: self._client.get(kind, _part(name), **place)
        )

    def create_object(self, wanted: Json) -> Json:
        kind, place, name = self._meant(wanted)
        client: Any = self._client  # its overloads don't take what may have a namespace or none
        what = f"create the {named(wanted)}"
        return self._ask(what, name, lambda: client.create(kind(wanted), **place), changes=True)

    def delete_object(self, made: Json) -> None:
        kind, place, name = self._meant(made)
        client: Any = self._client
        with self._told(f"delete the {named(made)}", changes=True):
            client.delete(kind, _part(name), **place)

    def _meant(self, wanted: Json) -> tuple[Any, dict[str, str], str]:
        """The kind's class, the keyword that tells its namespace if it has one, and the object's name."""
        metadata = wanted["metadata"]
        namespace = str(metadata.get("namespace") or "")
        place = {"namespace": _part(namespace)} if namespace else {}
        return self._kinds[wanted["kind"]], place, str(metadata["name"])

    def _get(self, kind: str, namespace: str, name: str) -> Json:
        def ask() -> Any:
            return self._client.get(self._kinds[kind], _part(name), namespace=_part(namespace))

        return self._ask(f"read the {kind} {namespace}/{name}", name, ask)

    def _create(self, kind: str, namespace: str, body: Json) -> Json:
        def ask() -> Any:
            return self._client.create(self._kinds[kind](body), namespace=_part(namespace))

        return self._ask(f"create a {kind} in {namespace}", "", ask, changes=True)

    def _ask(self, what: str, name: str, ask: Callable[[], Any], *, changes: bool = False) -> Json:
        """One object. What is no object, or another one's answer, is an error, not data."""
        with self._told(what, changes=changes):
            found = dict(ask())
            if not is_object(found) or (name and found["metadata"]["name"] != name):
                raise ValueError("the answer is another object than the one asked for")
            return found

    def _list(self, what: str, ask: Callable[[], list[Any]]) -> tuple[Json, ...]:
        with self._told(what):
            found = tuple(dict(one) for one in ask())
            if not all(map(is_object, found)):
                raise ValueError("the answer lists what is no object")
            return found

    @contextmanager
    def _told(self, what: str, *, changes: bool = False) -> Iterator[None]:
        """The library's exceptions as `ClusterError`s."""
        from gpunode.kubernetes.refusals import Asked, explained

        asked = Asked(what, self._connection.server, self._connection.source, self._refused, changes)
        try:
            yield
        except Exception as error:
            told = explained(error, asked)
            if told is None:
                raise
            raise told from error


def _kinds() -> dict[str, Any]:
    """Classes for the kinds that `Cluster` has; dicts, so that nothing of an object is lost."""
    from lightkube.core.resource import ApiInfo, ResourceDef
    from lightkube.generic_resource import GenericGlobalResource, GenericNamespacedResource

    def made(base: Any, group: str, version: str, kind: str, plural: str, action: str = "") -> Any:
        resource = ResourceDef(group, version, kind)
        verbs = ["get", "patch"] if action else ["delete", "get", "list", "patch", "post", "put"]
        info = ApiInfo(resource, plural, verbs, resource if action else None, action or None)
        return type(kind, (base,), {"_api_info": info})

    return {
        "Node": made(GenericGlobalResource, "", "v1", "Node", "nodes"),
        "NodeStatus": made(GenericGlobalResource, "", "v1", "Node", "nodes", "status"),
        "Pod": made(GenericNamespacedResource, "", "v1", "Pod", "pods"),
        "Event": made(GenericNamespacedResource, "", "v1", "Event", "events"),
        "RuntimeClass": made(GenericGlobalResource, "node.k8s.io", "v1", "RuntimeClass", "runtimeclasses"),
        "NodeFeature": made(
            GenericNamespacedResource, "nfd.k8s-sigs.io", "v1alpha1", "NodeFeature", "nodefeatures"
        ),
        "Namespace": made(GenericGlobalResource, "", "v1", "Namespace", "namespaces"),
        "ServiceAccount": made(GenericNamespacedResource, "", "v1", "ServiceAccount", "serviceaccounts"),
        "ConfigMap": made(GenericNamespacedResource, "", "v1", "ConfigMap", "configmaps"),
        "DaemonSet": made(GenericNamespacedResource, "apps", "v1", "DaemonSet", "daemonsets"),
        "ClusterRole": made(GenericGlobalResource, _RBAC, "v1", "ClusterRole", "clusterroles"),
        "ClusterRoleBinding": made(
            GenericGlobalResource, _RBAC, "v1", "ClusterRoleBinding", "clusterrolebindings"
        ),
        "Role": made(GenericNamespacedResource, _RBAC, "v1", "Role", "roles"),
        "RoleBinding": made(GenericNamespacedResource, _RBAC, "v1", "RoleBinding", "rolebindings"),
    }


def _part(name: str) -> str:
    """A name as one part of a URL's path. `Invalid` for one that would lead elsewhere."""
    if _PART.fullmatch(name) is None or ".." in name:
        raise Invalid(f"{name!r} can't be the name of an object in Kubernetes")
    return name


def _when(event: Json) -> str:
    """RFC 3339 in UTC sorts as text; the newer API has eventTime, the older one lastTimestamp."""
    metadata = event.get("metadata")
    made = metadata.get("creationTimestamp") if isinstance(metadata, dict) else ""
    return str(event.get("lastTimestamp") or event.get("eventTime") or made or "")
