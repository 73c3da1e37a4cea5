"""`gpunode manifests ...`: the Kubernetes objects that GPU nodes and their pods need, printed, no more."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from gpunode.dataclass import dataclass
from gpunode.errors import UsageError
from gpunode.host import Host
from gpunode.kubernetes.manifests import cluster
from gpunode.kubernetes.manifests.cluster import runtime_class
from gpunode.kubernetes.manifests.common import documents
from gpunode.result import Progress, Result, Style, Text

if TYPE_CHECKING:
    from gpunode.kubernetes.manifests.vector_add import VectorAdd

VARIANTS = ("cdi", "legacy")  # as `configure-runtime --also` names them
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")  # RFC 1123, as Kubernetes takes it
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
# [registry[:port]/]path[:tag][@digest], as container engines read it (distribution, reference/regexp.go)
_HOST = (
    r"([A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?(\.[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?)*|\[[0-9A-Fa-f:]+\])"
)
_PART = r"[a-z0-9]+(([._]|__|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    rf"({_HOST}(:[0-9]+)?/)?{_PART}(/{_PART})*(:[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}})?(@[A-Za-z0-9+._-]+:[0-9a-f]{{32,}})?"
)
VERIFY_NAMESPACE = "gpunode-verify"
_MAX = 63  # a RuntimeClass's handler is a DNS label
Objects = tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Options:
    """`runtime_name` is the handler's name in the engine; `also` are variants that get a class as well."""

    runtime_name: str = "nvidia"
    also: str = ""


@dataclass(frozen=True)
class PodOptions:
    """For the vector-add pod; an empty `image` is NVIDIA's newest sample, an empty `node` any node."""

    image: str = ""
    resource: str = "nvidia.com/gpu"
    namespace: str = ""
    node: str = ""
    runtime_class: str = "nvidia"


@dataclass(frozen=True)
class Manifests:
    """`data` of the envelope: the objects themselves, in the order in which they are printed."""

    objects: Objects


def run(host: Host, options: Options, progress: Progress) -> Result:
    """Print RuntimeClass objects; kind Manifests. Nothing is contacted and nothing is written."""
    return printed(tuple(runtime_class(name) for name in names(options)))


def rbac(namespace: str, uses: tuple[str, ...], name: str) -> Result:
    """A service account with exactly the rights of these uses of the API server.

    An empty `name` is the plugin's, if all uses are its own. An empty `namespace` is kube-system; but an
    account that may create pods gets a namespace of its own, since a pod there could take any other account.
    """
    from gpunode.kubernetes.manifests.common import MANAGER, PLUGIN
    from gpunode.kubernetes.manifests.rbac import OF_PLUGIN, USES
    from gpunode.kubernetes.manifests.rbac import rbac as objects

    unknown = [one for one in uses if one not in USES]
    if unknown:
        raise UsageError(f"unknown use {unknown[0]!r}", hint=f"known: {', '.join(USES)}")
    by_use = "-".join((MANAGER, *sorted(set(uses))))
    name = name or (PLUGIN if OF_PLUGIN.issuperset(uses) else by_use)
    own = not namespace and "verify" in uses
    namespace = VERIFY_NAMESPACE if own else checked_name(namespace or "kube-system", "a namespace")
    found = objects(namespace, uses, checked_subdomain(name, "a service account"))
    if own:
        found = (cluster.namespace(namespace, "restricted"), *found)
    messages = ["nothing here asks the API server, so the account has no role"] if len(found) == 1 else []
    if "verify" in uses:
        messages.append(f"verify with it: gpunode verify --on kubernetes --namespace {namespace}")
    return printed(found, tuple(messages))


def node(name: str, vendor: str, taint: bool) -> Result:
    """A GPU node's label and, if asked for, its taint."""
    marked = cluster.gpu_node(checked_subdomain(name, "a node's name"), vendor, taint=taint)
    replaces = (
        "kubectl apply puts this taint in the place of all that the node has; gpunode node taint adds one",
    )
    return printed((marked,), replaces if taint else ())


def vector_add(options: PodOptions) -> Result:
    """The pod that `verify --on kubernetes` runs, under a fixed name."""
    from gpunode.kubernetes.manifests.vector_add import vector_add as pod

    return printed((pod(wanted_pod(options)),))


def wanted_pod(options: PodOptions) -> VectorAdd:
    """The options as the pod's builder takes them. `UsageError` for what the API server would refuse."""
    from gpunode.facts.sample_images import vector_add_image
    from gpunode.kubernetes.manifests.vector_add import VectorAdd

    return VectorAdd(
        image=checked_image(options.image or vector_add_image()),
        resource=checked_resource(options.resource),
        namespace=checked_name(options.namespace, "a namespace") if options.namespace else "",
        hostname=checked_subdomain(options.node, "a node's name") if options.node else "",
        runtime_class=options.runtime_class and checked_subdomain(options.runtime_class, "a RuntimeClass"),
    )


def printed(objects: Objects, messages: tuple[str, ...] = ()) -> Result:
    """Objects as a YAML stream for people, as they are for programs."""
    # a terminal wraps other text, and a copied manifest must stay what it is
    lines = tuple(Text(line, Style.COMMAND) for line in documents(objects).splitlines())
    return Result("Manifests", Manifests(objects), messages=messages, blocks=lines)


# --- what the API server would refuse -------------------------------------------------------------------


def names(options: Options) -> tuple[str, ...]:
    """The handlers meant. `UsageError` for a name or variant that can't be one."""
    name = options.runtime_name
    variants = tuple(filter(None, (part.strip() for part in options.also.split(","))))
    unknown = [one for one in variants if one not in VARIANTS]
    if unknown:
        raise UsageError(f"unknown variant {unknown[0]!r}", hint=f"known: {', '.join(VARIANTS)}")
    checked_name(name, "a RuntimeClass's handler")
    return tuple(dict.fromkeys((name, *(f"nvidia-{one}" for one in variants))))


def checked_name(name: str, what: str) -> str:
    """A DNS label (RFC 1123)."""
    if _LABEL.fullmatch(name) is None or len(name) > _MAX:
        raise UsageError(
            f"{name!r} can't be {what}",
            hint=f"use at most {_MAX} lower case letters, digits and '-', no '-' first or last",
        )
    return name


def checked_subdomain(name: str, what: str) -> str:
    """DNS labels with dots between them (RFC 1123)."""
    if _SUBDOMAIN.fullmatch(name) is None or len(name) > 253:
        raise UsageError(
            f"{name!r} can't be {what}",
            hint="use at most 253 lower case letters, digits, '-' and '.', no '-' first or last in a part",
        )
    return name


def checked_image(image: str) -> str:
    if len(image) > 1024 or _IMAGE.fullmatch(image) is None:
        raise UsageError(
            f"{image!r} can't be an image's name", hint="such as registry.example.com/gpunode:1.0"
        )
    return image


def checked_resource(name: str) -> str:
    from gpunode.plugin.settings import resource_name_problem

    if problem := resource_name_problem(name):
        raise UsageError(f"{name!r}: {problem}", hint="such as nvidia.com/gpu or nvidia.com/mig-1g.10gb")
    return name
