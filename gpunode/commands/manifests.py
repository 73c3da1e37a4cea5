"""`gpunode manifests ...`: print the Kubernetes objects that GPU nodes and their pods need."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple

import typer

from gpunode import __version__
from gpunode.commands.help_page import command_group
from gpunode.commands.options import (
    DEVICE,
    KUBERNETES,
    DriverRootOption,
    PodNamespaceOption,
    Strings,
    one_of,
    pod_resource_option,
    refuse_unknown,
)
from gpunode.commands.plugin_options import plugin_option, refuse_empty, sources
from gpunode.commands.session import Session, verb
from gpunode.errors import UsageError
from gpunode.facts.images import vector_add_image
from gpunode.host import Host
from gpunode.kubernetes import manifests
from gpunode.kubernetes.manifests import (
    MANAGER,
    OF_PLUGIN,
    PLUGIN,
    USES,
    PluginSet,
    VectorAdd,
    config_map,
    daemon_set,
    documents,
    pull_policy,
    runtime_class,
)
from gpunode.output.result import Result, Style, Text
from gpunode.plugin.config.settings import resource_name_problem
from gpunode.plugin.config.values import nearest

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


class Manifests(NamedTuple):
    """`data` of the envelope: the objects themselves, in the order in which they are printed."""

    objects: Objects


def checked_words(flag: str, words: Sequence[str], allowed: Collection[str], command: str) -> tuple[str, ...]:
    """The words of an option. `UsageError` for one that is not allowed."""
    unknown = [word for word in words if word not in allowed]
    if unknown:
        near = nearest(unknown[0], allowed)
        raise UsageError(
            f"{flag}: {unknown[0]!r} is not one of {', '.join(allowed)}",
            hint=f"did you mean {near}?" if near else f"see {command} --help",
        )
    return tuple(words)


def vector_add_pod(
    image: str, resource: str, namespace: str = "", node: str = "", runtime_class: str = ""
) -> VectorAdd:
    """The vector-add pod; an empty `image` is NVIDIA's newest sample, an empty `node` any node.

    `UsageError` for values that the API server would refuse.
    """
    image = checked_image(image or vector_add_image())
    if problem := resource_name_problem(resource):
        hint = "such as nvidia.com/gpu or nvidia.com/mig-1g.10gb"
        raise UsageError(f"{resource!r}: {problem}", hint=hint)
    return VectorAdd(
        image=image,
        resource=resource,
        namespace=checked_name(namespace, "a namespace") if namespace else "",
        hostname=checked_subdomain(node, "a node's name") if node else "",
        runtime_class=runtime_class and checked_subdomain(runtime_class, "a RuntimeClass"),
    )


def printed(objects: Objects, messages: tuple[str, ...] = (), comments: tuple[str, ...] = ()) -> Result:
    """Objects as a YAML stream, the same for people and programs, after the `comments`."""
    text = (*(f"# {comment}" for comment in comments), *documents(objects).splitlines())
    lines = tuple(Text(line, Style.DOCUMENT) for line in text)
    return Result("Manifests", Manifests(objects), messages=messages, blocks=lines)


# --- what the API server would refuse -------------------------------------------------------------------


def checked_name(name: str, kind: str) -> str:
    """A DNS label (RFC 1123)."""
    if _LABEL.fullmatch(name) is None or len(name) > _MAX:
        raise UsageError(
            f"{name!r} can't be {kind}",
            hint=f"use at most {_MAX} lower case letters, digits and '-', no '-' first or last",
        )
    return name


def checked_subdomain(name: str, kind: str) -> str:
    """DNS labels with dots between them (RFC 1123)."""
    if _SUBDOMAIN.fullmatch(name) is None or len(name) > 253:
        raise UsageError(
            f"{name!r} can't be {kind}",
            hint="use at most 253 lower case letters, digits, '-' and '.', no '-' first or last in a part",
        )
    return name


def checked_image(image: str) -> str:
    if len(image) > 1024 or _IMAGE.fullmatch(image) is None:
        raise UsageError(
            f"{image!r} can't be an image's name", hint="such as registry.example.com/gpunode:1.0"
        )
    return image


# `gpunode manifests daemon-set` and `all`: the device plugin, and every object that it needs.

IMAGE_HINT = (
    "build it (make image, or from the offline bundle), push it to a registry, and name yours with --image"
    f" REGISTRY/gpunode:{__version__} (docs/manifests.md)"
)
OWN_NAMESPACE = "kube-system"  # exists in every cluster, and lets pods mount the node's directories


def uses(desired: PluginSet) -> tuple[str, ...]:
    """What it requests from the API server, as `manifests rbac --for` names it."""
    by_sink = {"node": "labels", "node-feature": "node-feature"}
    return ("plugin", *(by_sink[sink] for sink in desired.labels if sink in by_sink))


def plugin_objects(desired: PluginSet) -> Objects:
    """The DaemonSet, preceded by the ConfigMap that it reads."""
    return (*((config_map(desired),) if desired.config else ()), daemon_set(desired))


def missing_image(image: str) -> tuple[str, ...]:
    """What to do where the image is in no registry; empty if its name has one."""
    if pull_policy(image) != "Never":
        return ()
    return (
        f"no registry has the image {image}: the plugin starts only on nodes that have it already",
        IMAGE_HINT,
    )


def plugin_set(host: Host, options: PluginOptions, command: str = "") -> PluginSet:
    """The plugin to deploy; `command` is the one that has the options. A config file is read here, on this
    machine; without an image it is our version's, which the nodes must already have."""
    vendor, mig, mps = options.vendor, options.mig or "", options.mps or 0
    cdi, config_file, driver_root = options.cdi, options.config_file, options.driver_root
    labels = checked_words("--labels", options.labels or (), LABEL_SINKS, command)
    nvidia_only = {"--mig-strategy": mig, "--mps": mps, "--cdi": cdi, "--driver-root": driver_root}
    flag = next((name for name, value in nvidia_only.items() if value), "")
    if vendor == "amd" and flag:
        raise UsageError(f"{flag} is for NVIDIA's GPUs; the vendor is amd", hint=f"leave out {flag}")
    _refuse_mps_with(mps, config_file, mig)
    runtime_class, pull_secret = options.runtime_class, options.image_pull_secret
    desired = PluginSet(
        image=checked_image(options.image or f"gpunode:{__version__}"),
        vendor=vendor,
        namespace=checked_name(options.namespace, "a namespace"),
        runtime_class=""
        if vendor == "amd" or not runtime_class
        else checked_subdomain(runtime_class, "a RuntimeClass"),
        arguments=_arguments(mig, cdi, driver_root, mps, labels),
        mig=mig in ("single", "mixed"),
        cdi=cdi,
        mps=mps > 0,
        config=_mps_config(mps) if mps else "",
        driver_root=_checked_path(driver_root or "/", "--driver-root"),
        kubelet_root=_checked_path(options.kubelet_root, "--kubelet-root"),
        metrics_port=options.metrics_port,
        labels=labels,
        pull_secret=pull_secret and checked_subdomain(pull_secret, "a secret's name"),
    )
    if not config_file:
        return desired
    settings = {"config_file": config_file, "vendor": vendor}
    overrides = {"mig_strategy": mig, "driver_root": driver_root, "labels_to": labels}
    return _with_file(host, settings | {key: value for key, value in overrides.items() if value}, desired)


def _refuse_mps_with(mps: int, config_file: str, mig: str) -> None:
    if mps and config_file:
        raise UsageError(
            "--mps writes a config file, and --config-file names one",
            hint="leave out --mps; let the file say sharing.mps and flags.gpunode.mps: true",
        )
    if mps and mig == "mixed":
        raise UsageError(
            "MPS can't serve the MIG devices that --mig-strategy mixed advertises",
            hint="use --mig-strategy single",
        )


def _arguments(mig: str, cdi: bool, driver_root: str, mps: int, labels: Sequence[str]) -> tuple[str, ...]:
    """Options of `plugin serve` for the command line; values of a config file stay only in the file, or an
    edit of it would have no effect.
    """
    return (
        *((f"--mig-strategy={mig}",) if mig else ()),
        *(("--device-list-strategy=cdi-cri",) if cdi else ()),
        *((f"--driver-root={driver_root}",) if driver_root else ()),
        *(("--mps",) if mps else ()),
        *(f"--labels={label}" for label in labels),
    )


def _mps_config(replicas: int) -> str:
    return (
        "version: v1\nsharing:\n  mps:\n    resources:\n"
        f"    - name: {manifests.resource('nvidia')}\n      replicas: {replicas}\n"
    )


def _checked_path(path: str, flag: str) -> str:
    plain = path == "/" or not path.endswith("/")
    if not path.startswith("/") or not plain or ".." in path.split("/") or not path.isprintable():
        raise UsageError(
            f"{flag}: {path!r} is not an absolute path", hint=f"as the nodes have it: {flag} /PATH"
        )
    return path


# --- a config file --------------------------------------------------------------------------------------


def _with_file(host: Host, options: Mapping[str, Any], desired: PluginSet) -> PluginSet:
    """The options with the file's text, and the rights that its settings need. `InvalidConfig` for a wrong
    file."""
    source = sources(replace(host, environ={}), options)
    resolved = source.resolve()
    settings = resolved.valid_settings()
    refuse_empty(source, resolved)
    shared = settings.sharing is not None and settings.sharing.strategy == "mps"
    return desired._replace(
        config=resolved.content.decode("utf-8-sig"),
        cdi=desired.cdi or any(name.startswith("cdi-") for name in settings.device_list_strategy),
        mps=settings.mps and shared,
        mps_elsewhere=shared and not settings.mps,
        mig=settings.mig_strategy != "none",
        device_specs=settings.pass_device_specs,
        labels=settings.labels.to,
        driver_root=_checked_path(settings.driver_root, "driver root"),
        mps_root=_checked_path(settings.mps_root or desired.mps_root, "MPS root"),
    )


# `gpunode manifests`.

manifests_app = command_group("Print Kubernetes manifests.")


ClassOption = Annotated[
    str,
    typer.Option(
        "--runtime-class",
        metavar="NAME",
        help="RuntimeClass of the pods; empty: none, for nodes with CDI instead of NVIDIA's toolkit.",
        rich_help_panel=KUBERNETES,
    ),
]
TestImageOption = Annotated[
    str,
    typer.Option(
        "--test-image",
        metavar="REF",
        help="Image of the test pod.",
        show_default=vector_add_image(),
        rich_help_panel=KUBERNETES,
    ),
]
LABEL_SINKS = ("node", "node-feature", "file")


@dataclass(frozen=True)
class PluginOptions:
    """The options of the commands that deploy the plugin."""

    image: Annotated[
        str,
        typer.Option(
            "--image",
            metavar="REF",
            help="Image of gpunode in your registry (see docs/manifests.md).",
            show_default=f"gpunode:{__version__}, which each node must have",
        ),
    ] = ""
    vendor: Annotated[Literal["nvidia", "amd"], plugin_option("vendor")] = "nvidia"
    namespace: Annotated[
        str,
        typer.Option(
            "--namespace", metavar="NAME", help="Namespace of the plugin.", rich_help_panel=KUBERNETES
        ),
    ] = OWN_NAMESPACE
    runtime_class: ClassOption = "nvidia"
    mig: Annotated[Literal["none", "single", "mixed"] | None, plugin_option("mig_strategy", "--mig")] = None
    mps: Annotated[
        int | None,
        typer.Option(
            "--mps",
            metavar="N",
            min=1,
            max=48,
            help="Share each GPU with N clients (at most 48) by MPS.",
            rich_help_panel=DEVICE,
        ),
    ] = None
    cdi: Annotated[bool, typer.Option("--cdi", help="Pass GPUs to containers through CDI.")] = False
    config_file: Annotated[
        str,
        typer.Option(
            "--config-file", metavar="FILE", help="Configuration file of the plugin; it becomes a ConfigMap."
        ),
    ] = ""
    driver_root: DriverRootOption = ""
    kubelet_root: Annotated[
        str, typer.Option("--kubelet-root", metavar="PATH", help="Value of the kubelet's --root-dir.")
    ] = "/var/lib/kubelet"
    metrics_port: Annotated[
        int,
        typer.Option(
            "--metrics-port",
            metavar="PORT",
            min=0,
            max=65535,
            help="Port for metrics and probes; 0, the default: neither.",
        ),
    ] = 0
    image_pull_secret: Annotated[
        str, typer.Option("--image-pull-secret", metavar="NAME", help="Image pull secret of the registry.")
    ] = ""
    labels: Annotated[
        Strings,
        plugin_option(
            "labels_to",
            metavar=f"{'|'.join(LABEL_SINKS)},...",
            autocompletion=one_of(*LABEL_SINKS, comma=True),
        ),
    ] = None


@verb(manifests_app, "all", "Manifests")
def manifests_all(
    session: Session,
    plugin: PluginOptions,
    node: Annotated[
        str,
        typer.Option(
            "--node",
            metavar="NAME",
            help="Also label this Node, and run the test pod on it, else on any; kubectl delete would delete"
            " the Node.",
            rich_help_panel=KUBERNETES,
        ),
    ] = "",
    taint: Annotated[
        bool,
        typer.Option(
            "--taint",
            help=f"With --node, replace its taints by {manifests.resource('nvidia')}={manifests.TAINT_VALUE}"
            ":NoSchedule; to keep them, use kubectl taint.",
        ),
    ] = False,
    test_image: TestImageOption = "",
    resource: Annotated[str, pod_resource_option("nvidia.com/gpu or amd.com/gpu")] = "",
) -> Result:
    """Print RuntimeClass, ServiceAccount, DaemonSet and test pod.

    The plugin runs on nodes that Node Feature Discovery or nvidia.com/gpu.present=true marks as GPU nodes.
    Each needs the driver, the toolkit and gpunode configure-runtime first.

    gpunode manifests all --image example.com/gpunode:0.1.0 | kubectl apply -f -
    """
    desired = plugin_set(session.host, plugin, "gpunode manifests all")
    if taint and not node:
        raise UsageError("--taint needs a node", hint="--node NAME")
    # in an order that a cluster accepts
    objects: Objects = ()
    if desired.namespace != OWN_NAMESPACE:
        objects += (manifests.namespace(desired.namespace),)
    if desired.runtime_class:
        objects += (manifests.runtime_class(desired.runtime_class),)
    objects += manifests.rbac(desired.namespace, uses(desired))
    if node:
        name = checked_subdomain(node, "a node's name")
        objects += (manifests.gpu_node(name, desired.vendor, taint=taint),)
    objects += plugin_objects(desired)
    comments = missing_image(desired.image)
    if node:
        comments += (f"kubectl delete of this output deletes Node {node} too: leave out --node for that",)
    messages = comments
    if desired.vendor == "nvidia" or test_image:
        resource = resource or manifests.resource(desired.vendor)
        pod = vector_add_pod(test_image, resource, "", node, desired.runtime_class)
        objects += (manifests.vector_add(pod),)
    else:
        messages += ("without a pod: there is no vector-add sample of AMD's; name one with --test-image",)
    return printed(objects, messages, comments)


@verb(manifests_app, "runtime-class", "Manifests")
def manifests_runtime_class(
    session: Session,
    nvidia_runtime_name: Annotated[
        str,
        typer.Option(
            *("--nvidia-runtime-name", "--runtime-class"),
            metavar="NAME",
            help="Name of the runtime in the engine and of the RuntimeClass.",
        ),
    ] = "nvidia",
    also: Annotated[
        Strings,
        typer.Option(
            "--also",
            metavar=f"{'|'.join(VARIANTS)},...",
            help="Also print nvidia-cdi or nvidia-legacy.",
            autocompletion=one_of(*VARIANTS, comma=True),
        ),
    ] = None,
) -> Result:
    """Print RuntimeClass objects. Pods use them to select the nvidia runtime.

    gpunode manifests runtime-class --also cdi | kubectl apply -f -
    """
    refuse_unknown("variant", also or (), VARIANTS)
    checked_name(nvidia_runtime_name, "a RuntimeClass's handler")
    names = dict.fromkeys((nvidia_runtime_name, *(f"nvidia-{variant}" for variant in also or ())))
    return printed(tuple(map(runtime_class, names)))


@verb(manifests_app, "daemon-set", "Manifests")
def manifests_daemon_set(
    session: Session,
    plugin: PluginOptions,
) -> Result:
    """Print the device plugin's DaemonSet. It has the least rights that the options need.

    Apply its service account, too: gpunode manifests rbac.

    gpunode manifests daemon-set --image example.com/gpunode:0.1.0
    """
    desired = plugin_set(session.host, plugin, "gpunode manifests daemon-set")
    messages = missing_image(desired.image)
    if rights := uses(desired)[1:]:
        command = " ".join(("gpunode manifests rbac", *(f"--for {right}" for right in rights)))
        messages += (f"keeping labels takes rights of its account: {command}",)
    return printed(plugin_objects(desired), messages, missing_image(desired.image))


@verb(manifests_app, "rbac", "Manifests")
def manifests_rbac(
    session: Session,
    namespace: Annotated[
        str,
        typer.Option(
            "--namespace",
            metavar="NAME",
            help="Namespace of the account.",
            show_default="kube-system, with verify gpunode-verify",
        ),
    ] = "",
    uses: Annotated[
        Strings,
        typer.Option(
            "--for",
            metavar="USE,...",
            help="What uses the account: plugin, labels, node-feature, mig, advertise or verify.",
            show_default="plugin",
            autocompletion=one_of(*USES, comma=True),
        ),
    ] = None,
    name: Annotated[
        str,
        typer.Option(
            "--name",
            metavar="NAME",
            help="Name of the account.",
            show_default="gpunode-USE or gpunode-USE-USE, for the plugin gpunode-device-plugin",
        ),
    ] = "",
) -> Result:
    """Print a service account and its rights. The plugin needs no rights unless it publishes labels.

    An account for verify works in its own namespace only: gpunode verify --on kubernetes --namespace
    gpunode-verify.

    gpunode manifests rbac --for verify,advertise
    """
    checked = checked_words("--for", uses or ("plugin",), USES, "gpunode manifests rbac")
    by_use = "-".join((MANAGER, *sorted(set(checked))))
    name = name or (PLUGIN if OF_PLUGIN.issuperset(checked) else by_use)
    # an account that may create pods gets a namespace of its own, because its pods could use any other
    # account of kube-system
    own = not namespace and "verify" in checked
    namespace = VERIFY_NAMESPACE if own else checked_name(namespace or OWN_NAMESPACE, "a namespace")
    objects = manifests.rbac(namespace, checked, checked_subdomain(name, "a service account"))
    if own:
        objects = (manifests.namespace(namespace, "restricted"), *objects)
    messages = (
        ["no component here uses the API server, so the account has no role"] if len(objects) == 1 else []
    )
    if "verify" in checked:
        messages.append(f"verify with it: gpunode verify --on kubernetes --namespace {namespace}")
    return printed(objects, tuple(messages))


@verb(manifests_app, "vector-add", "Manifests")
def manifests_vector_add(
    session: Session,
    image: Annotated[
        str,
        typer.Option("--image", metavar="REF", help="Image of the pod.", show_default=vector_add_image()),
    ] = "",
    resource: Annotated[str, pod_resource_option()] = "nvidia.com/gpu",
    namespace: PodNamespaceOption = "",
    node: Annotated[
        str, typer.Option("--node", metavar="NAME", help="Run the pod on this Node.", show_default="any")
    ] = "",
    runtime_class: ClassOption = "nvidia",
) -> Result:
    """Print the vector-add pod. gpunode verify --on kubernetes runs it and reports the result.

    gpunode manifests vector-add --node gpu-1 | kubectl apply -f -
    """
    return printed((manifests.vector_add(vector_add_pod(image, resource, namespace, node, runtime_class)),))
