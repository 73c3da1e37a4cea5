"""`gpunode manifests daemon-set` and `all`: the device plugin, and everything that goes with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpunode import __version__
from gpunode.commands.manifests import (
    Objects,
    PodOptions,
    checked_image,
    checked_name,
    checked_subdomain,
    printed,
    wanted_pod,
)
from gpunode.dataclass import dataclass, replace
from gpunode.errors import UsageError
from gpunode.host import Host
from gpunode.kubernetes.manifests import cluster
from gpunode.kubernetes.manifests.daemon_set import PluginSet, config_map, daemon_set, pull_policy
from gpunode.result import Result

if TYPE_CHECKING:
    from gpunode.plugin.settings import Settings

OWN_NAMESPACE = "kube-system"  # is there in every cluster, and lets pods mount the node's directories
_NVIDIA_ONLY = ("mig", "mps", "cdi", "driver_root")


@dataclass(frozen=True)
class Options:
    """What the command line says. `mps` is the number of replicas, 0 for none; `config_file` is read here,
    on this machine; an empty `image` is one of our version that the nodes have already."""

    image: str = ""
    vendor: str = "nvidia"
    namespace: str = OWN_NAMESPACE
    runtime_class: str = "nvidia"
    mig: str = ""
    mps: int = 0
    cdi: bool = False
    config_file: str = ""
    driver_root: str = ""
    kubelet_root: str = "/var/lib/kubelet"
    metrics_port: int = 0
    pull_secret: str = ""
    labels: tuple[str, ...] = ()


def run(host: Host, options: Options) -> Result:
    """The DaemonSet, behind the ConfigMap that it reads."""
    wanted = _plugin(host, options)
    messages = _messages(wanted)
    if rights := uses(wanted)[1:]:
        command = " ".join(("gpunode manifests rbac", *(f"--for {one}" for one in rights)))
        messages += (f"keeping labels takes rights of its account: {command}",)
    return printed(_plugin_objects(wanted), messages)


def everything(host: Host, options: Options, node: str, taint: bool, image: str, resource: str) -> Result:
    """All objects in an order in which a cluster takes them: a Node only where it is named."""
    from gpunode.kubernetes.manifests.rbac import rbac
    from gpunode.kubernetes.manifests.vector_add import vector_add

    wanted = _plugin(host, options)
    pod = PodOptions(image, resource or cluster.resource(wanted.vendor), "", node, wanted.runtime_class)
    found: Objects = ()
    if taint and not node:
        raise UsageError("--taint needs a node", hint="--node NAME")
    if wanted.namespace != OWN_NAMESPACE:
        found += (cluster.namespace(wanted.namespace),)
    if wanted.runtime_class:
        found += (cluster.runtime_class(wanted.runtime_class),)
    found += rbac(wanted.namespace, uses(wanted))
    if node:
        name = checked_subdomain(node, "a node's name")
        found += (cluster.gpu_node(name, wanted.vendor, taint=taint),)
    found += _plugin_objects(wanted)
    messages = _messages(wanted)
    if wanted.vendor == "nvidia" or image:
        found += (vector_add(wanted_pod(pod)),)
    else:
        messages += ("without a pod: there is no vector-add sample of AMD's; name one with --test-image",)
    return printed(found, messages)


def uses(wanted: PluginSet) -> tuple[str, ...]:
    """What it asks the API server for, as `manifests rbac --for` calls it."""
    by_sink = {"node": "labels", "node-feature": "node-feature"}
    return ("plugin", *(by_sink[one] for one in wanted.labels if one in by_sink))


def _plugin_objects(wanted: PluginSet) -> Objects:
    return (*((config_map(wanted),) if wanted.config else ()), daemon_set(wanted))


def _messages(wanted: PluginSet) -> tuple[str, ...]:
    if pull_policy(wanted.image) != "Never":
        return ()
    return (
        f"no registry has gpunode's image: build {wanted.image} on the nodes, or name yours with --image"
        " (docs/kubernetes.md)",
    )


def _plugin(host: Host, options: Options) -> PluginSet:
    _refuse_contradictions(options)
    amd = options.vendor == "amd"
    wanted = PluginSet(
        image=checked_image(options.image or f"gpunode:{__version__}"),
        vendor=options.vendor,
        namespace=checked_name(options.namespace, "a namespace"),
        runtime_class=""
        if amd or not options.runtime_class
        else checked_subdomain(options.runtime_class, "a RuntimeClass"),
        arguments=_arguments(options),
        mig=options.mig in ("single", "mixed"),
        cdi=options.cdi,
        mps=options.mps > 0,
        config=_mps_config(options.mps) if options.mps else "",
        driver_root=_checked_path(options.driver_root or "/", "--driver-root"),
        kubelet_root=_checked_path(options.kubelet_root, "--kubelet-root"),
        metrics_port=options.metrics_port,
        labels=options.labels,
        pull_secret=options.pull_secret and checked_subdomain(options.pull_secret, "a secret's name"),
    )
    return _with_file(host, options, wanted) if options.config_file else wanted


def _refuse_contradictions(options: Options) -> None:
    given = next((name for name in _NVIDIA_ONLY if getattr(options, name)), "")
    if options.vendor == "amd" and given:
        flag = f"--{given.replace('_', '-')}"
        raise UsageError(f"{flag} is for NVIDIA's GPUs; the vendor is amd", hint=f"leave out {flag}")
    if options.mps and options.config_file:
        raise UsageError(
            "--mps writes a config file, and --config-file names one",
            hint="leave out --mps; let the file say sharing.mps and flags.gpunode.mps: true",
        )
    if options.mps and options.mig == "mixed":
        raise UsageError("MPS can't serve the MIG devices that --mig mixed advertises", hint="--mig single")


def _arguments(options: Options) -> tuple[str, ...]:
    """Those of `plugin serve` that the command line asks for; what a config file says stands in it alone, or
    an edit of it would have no effect."""
    return (
        *((f"--mig-strategy={options.mig}",) if options.mig else ()),
        *(("--device-list-strategy=cdi-cri",) if options.cdi else ()),
        *((f"--driver-root={options.driver_root}",) if options.driver_root else ()),
        *(("--mps",) if options.mps else ()),
        *(f"--labels={one}" for one in options.labels),
    )


def _mps_config(replicas: int) -> str:
    return (
        "version: v1\nsharing:\n  mps:\n    resources:\n"
        f"    - name: {cluster.resource('nvidia')}\n      replicas: {replicas}\n"
    )


def _checked_path(path: str, flag: str) -> str:
    plain = path == "/" or not path.endswith("/")
    if not path.startswith("/") or not plain or ".." in path.split("/") or not path.isprintable():
        raise UsageError(f"{flag}: {path!r} is no absolute path", hint=f"as the nodes have it: {flag} /PATH")
    return path


# --- a config file --------------------------------------------------------------------------------------


def _with_file(host: Host, options: Options, wanted: PluginSet) -> PluginSet:
    """With the file's text, and the rights that what it says takes. `InvalidConfig` for a wrong file."""
    from gpunode.commands.plugin_options import sources

    given = {"config_file": options.config_file, "vendor": options.vendor}
    asked = {"mig_strategy": options.mig, "driver_root": options.driver_root, "labels_to": options.labels}
    source = sources(replace(host, environ={}), given | {key: value for key, value in asked.items() if value})
    resolved = source.resolve()
    settings = resolved.wanted()
    shared = settings.sharing is not None and settings.sharing.strategy == "mps"
    return replace(
        wanted,
        config=resolved.content.decode("utf-8-sig"),
        cdi=wanted.cdi or _cdi(settings),
        mps=settings.mps and shared,
        mps_elsewhere=shared and not settings.mps,
        mig=settings.mig_strategy != "none",
        device_specs=settings.pass_device_specs,
        labels=settings.labels.to,
        driver_root=_checked_path(settings.driver_root, "driver root"),
        mps_root=_checked_path(settings.mps_root or wanted.mps_root, "MPS root"),
    )


def _cdi(settings: Settings) -> bool:
    return any(strategy.startswith("cdi-") for strategy in settings.device_list_strategy)
