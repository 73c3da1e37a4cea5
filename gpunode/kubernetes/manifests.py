"""Manifests: the device plugin with its rights, RuntimeClass, Namespace, GPU node labels, the test pod."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from gpunode.host import PLUGIN_STATE

Json = dict[str, Any]

MANAGER = "gpunode"
MANAGED_BY = "app.kubernetes.io/managed-by"
NAME = "app.kubernetes.io/name"
COMPONENT = "app.kubernetes.io/component"
PLUGIN = "gpunode-device-plugin"
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


def labels(component: str) -> dict[str, str]:
    """The labels of gpunode's objects (Kubernetes: Recommended Labels)."""
    return {NAME: f"{MANAGER}-{component}", COMPONENT: component, MANAGED_BY: MANAGER}


def made(api: str, kind: str, name: str, component: str, namespace: str = "", **fields: Any) -> Json:
    """An object with its metadata; a cluster-wide one has no `namespace`."""
    metadata: Json = {"name": name}
    if namespace:
        metadata["namespace"] = namespace
    metadata["labels"] = labels(component)
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **fields}


def filled(**fields: Any) -> Json:
    """The fields that aren't empty."""
    return {name: value for name, value in fields.items() if value not in ("", None, {}, [])}


def documents(objects: Iterable[Mapping[str, Any]]) -> str:
    """The objects as one YAML stream, as ``kubectl apply -f -`` reads it; longer texts as blocks."""
    import yaml

    class Plain(yaml.SafeDumper):
        """Writes a repeated value out each time; YAML would use an alias."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
        style = "|" if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Plain.add_representer(str, text)
    texts = (
        yaml.dump(dict(document), Dumper=Plain, sort_keys=False, width=4096, allow_unicode=True)
        for document in objects
    )
    return "---\n".join(texts).rstrip("\n")


DOMAINS = {"nvidia": "nvidia.com", "amd": "amd.com"}
PCI_VENDORS = {"nvidia": "10de", "amd": "1002"}
TAINT_VALUE = "present"  # the one that NFD's worker in NVIDIA's chart tolerates, too


def runtime_class(name: str) -> Json:
    """A RuntimeClass with its handler's name (node.k8s.io/v1)."""
    return {
        "apiVersion": "node.k8s.io/v1",
        "kind": "RuntimeClass",
        "metadata": {"name": name},
        "handler": name,
    }


def namespace(name: str, level: str = "privileged") -> Json:
    """A namespace of this level of the Pod Security Standards. The plugin, which mounts directories of the
    node, needs ``privileged``."""
    result = made("v1", "Namespace", name, "device-plugin")
    for mode in ("enforce", "audit", "warn"):  # a cluster's defaults may audit and warn at another level
        result["metadata"]["labels"][f"pod-security.kubernetes.io/{mode}"] = level
    return result


def resource(vendor: str) -> str:
    """The resource name of whole GPUs."""
    return f"{DOMAINS[vendor]}/gpu"


def present(vendor: str) -> str:
    """The label of a node with GPUs where NFD doesn't run; NVIDIA's plugin uses it as well."""
    return f"{DOMAINS[vendor]}/gpu.present"


def gpu_node(name: str, vendor: str, *, taint: bool) -> Json:
    """A Node with the label and taint of one with GPUs, to be applied to an existing node.

    A node's taints are one value to the API server: applying this replaces its other taints.
    """
    node: Json = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {present(vendor): "true"}},
    }
    if taint:
        node_taint = {"key": resource(vendor), "value": TAINT_VALUE, "effect": "NoSchedule"}
        node["spec"] = {"taints": [node_taint]}
    return node


# Volumes: the parts of the node that the plugin's container sees.

# fixed in the kubelet, whatever its --root-dir is; pod-resources follows that
DEVICE_PLUGINS = "/var/lib/kubelet/device-plugins"
POD_RESOURCES = "/var/lib/kubelet/pod-resources"
CONFIG_FILE = "/etc/gpunode/plugin/config.yaml"
_FEATURES = "/etc/kubernetes/node-feature-discovery/features.d"  # NFD's directory for feature files
_CDI = "/var/run/cdi"
_DRIVER_ROOT = "/driver-root"


class Volume(NamedTuple):
    """One of the pod's volumes, and its mounts in the container."""

    volume: Json
    mounts: tuple[Json, ...]


def plugin_volumes(desired: PluginSet) -> tuple[Volume, ...]:
    """Only the volumes that the plugin uses."""
    volumes = [
        _of_node("device-plugins", DEVICE_PLUGINS, "Directory"),
        _of_node("state", PLUGIN_STATE, "DirectoryOrCreate"),
        Volume({"name": "tmp", "emptyDir": {"sizeLimit": "16Mi"}}, (_mount("tmp", "/tmp"),)),  # noqa: S108
    ]
    if desired.metrics_port:  # the metrics name the pod of each GPU
        pods = f"{desired.kubelet_root.rstrip('/')}/pod-resources"
        volumes.append(_of_node("pod-resources", pods, "Directory", POD_RESOURCES, read_only=True))
    if desired.config:
        config = str(PurePosixPath(CONFIG_FILE).parent)
        volume = {"name": "config", "configMap": {"name": PLUGIN}}
        volumes.append(Volume(volume, (_mount("config", config, read_only=True),)))
    if "file" in desired.labels:
        volumes.append(_of_node("features", _FEATURES, "DirectoryOrCreate"))
    if desired.cdi:
        volumes.append(_of_node("cdi", _CDI, "DirectoryOrCreate"))
        root = _of_node("driver-root", desired.driver_root, "Directory", _DRIVER_ROOT, read_only=True)
        root.mounts[0]["mountPropagation"] = "HostToContainer"  # a driver container is mounted later
        volumes.append(root)
    if desired.mps or desired.mps_elsewhere:
        volumes.append(_of_node("mps", desired.mps_root, "DirectoryOrCreate"))
    if desired.mps:
        shm = f"{desired.mps_root}/shm"
        both = _mount("mps-shm", shm), _mount("mps-shm", "/dev/shm")  # noqa: S108
        volumes.append(Volume(_of_node("mps-shm", shm, "DirectoryOrCreate").volume, both))
    return tuple(volumes)


def _of_node(name: str, path: str, kind: str, inside: str = "", *, read_only: bool = False) -> Volume:
    volume = {"name": name, "hostPath": {"path": path, "type": kind}}
    return Volume(volume, (_mount(name, inside or path, read_only=read_only),))


def _mount(name: str, path: str, *, read_only: bool = False) -> Json:
    return {"name": name, "mountPath": path, **({"readOnly": True} if read_only else {})}


# The device plugin as a DaemonSet, with no more rights than its options need.
#
# The reason for each right (the chart in NVIDIA/k8s-device-plugin, deployments/helm, has the same, or more):
#
# - the kubelet's device plugin directory, and its PodResources socket: always
# - SYS_ADMIN with MIG: without it the runtime refuses NVIDIA_MIG_MONITOR_DEVICES
# - the driver's root, read only, and /var/run/cdi with CDI: specifications name the driver's files
# - the node's processes and a few capabilities with MPS: daemons serve clients of other users and containers
# - privileged with pass-device-specs: the container must see the node's device files
# - the account's token with labels onto the Node or a NodeFeature; NFD's directory with labels in a file

MONITORED = "NVIDIA_MIG_MONITOR_DEVICES"
# PCI classes of GPUs: stock NFD has them in its labels, NVIDIA's chart configures NFD to omit them
_CLASSES = {"nvidia": ("0300", "0302"), "amd": ("0300", "0302", "0380", "1200")}
# for the MPS daemons: compute modes, clients' credentials and memory, other users' processes
_MPS_CAPABILITIES = (
    *("CHOWN", "DAC_OVERRIDE", "FOWNER", "IPC_LOCK", "KILL", "SETGID", "SETUID"),
    *("SYS_ADMIN", "SYS_NICE", "SYS_PTRACE", "SYS_RESOURCE"),
)


class PluginSet(NamedTuple):
    """Options of the DaemonSet. `arguments` are those of `plugin serve`; `config` is a config file's text.

    `mig`, `cdi`, `mps` and `device_specs` add the rights that they need, and `mps_elsewhere` access to MPS
    daemons outside the pod; the arguments or the file switch them on. Paths are the node's. `metrics_port` 0
    is no port, and no probes; `labels` are the sinks of the node's labels.
    """

    image: str
    vendor: str = "nvidia"
    namespace: str = "kube-system"
    runtime_class: str = "nvidia"
    arguments: tuple[str, ...] = ()
    mig: bool = False
    cdi: bool = False
    mps: bool = False
    mps_elsewhere: bool = False
    device_specs: bool = False
    config: str = ""
    driver_root: str = "/"
    kubelet_root: str = "/var/lib/kubelet"
    mps_root: str = "/run/nvidia/mps"
    metrics_port: int = 0
    labels: tuple[str, ...] = ()
    pull_secret: str = ""


def config_map(desired: PluginSet) -> Json:
    """The ConfigMap with the plugin's config file; the plugin detects edits of it."""
    data = {PurePosixPath(CONFIG_FILE).name: desired.config}
    return made("v1", "ConfigMap", PLUGIN, "device-plugin", desired.namespace, data=data)


def daemon_set(desired: PluginSet) -> Json:
    """The DaemonSet (apps/v1)."""
    selector = {NAME: PLUGIN}
    spec = {
        "selector": {"matchLabels": selector},
        "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}},
        "template": {"metadata": {"labels": labels("device-plugin")}, "spec": _pod(desired)},
    }
    return made("apps/v1", "DaemonSet", PLUGIN, "device-plugin", desired.namespace, spec=spec)


def _pod(desired: PluginSet) -> Json:
    volumes = plugin_volumes(desired)
    key = resource(desired.vendor)
    return {
        "serviceAccountName": PLUGIN,
        "automountServiceAccountToken": needs_api_server(desired),
        "enableServiceLinks": False,
        "priorityClassName": "system-node-critical",
        **filled(runtimeClassName=desired.runtime_class),
        **filled(imagePullSecrets=[{"name": desired.pull_secret}] if desired.pull_secret else []),
        **({"hostPID": True} if desired.mps else {}),
        "affinity": _affinity(desired.vendor),
        "tolerations": [{"key": key, "operator": "Exists"}],
        "containers": [_container(desired, volumes)],
        "volumes": [volume.volume for volume in volumes],
    }


def _affinity(vendor: str) -> Json:
    """Nodes with such a GPU by NFD's labels, in any of its settings, or by the label that an admin sets."""
    pci = PCI_VENDORS[vendor]
    names = (pci, *(f"{device_class}_{pci}" for device_class in _CLASSES[vendor]))
    keys = (*(f"feature.node.kubernetes.io/pci-{name}.present" for name in names), present(vendor))
    terms = [{"matchExpressions": [{"key": key, "operator": "In", "values": ["true"]}]} for key in keys]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}


def _container(desired: PluginSet, volumes: tuple[Volume, ...]) -> Json:
    return {
        "name": "device-plugin",
        "image": desired.image,
        "imagePullPolicy": pull_policy(desired.image),
        "command": ["gpunode"],
        "args": list(_arguments(desired)),
        **filled(env=_environment(desired)),
        **_served(desired.metrics_port),
        "resources": _resources(desired),
        "securityContext": _security(desired),
        "volumeMounts": [mount for volume in volumes for mount in volume.mounts],
    }


def pull_policy(image: str) -> str:
    """A bare name is an image on the node: pulling it could fetch another publisher's image of that name."""
    return "IfNotPresent" if "/" in image else "Never"


def _arguments(desired: PluginSet) -> tuple[str, ...]:
    return (
        *("plugin", "serve"),
        *((f"--vendor={desired.vendor}",) if desired.vendor != "nvidia" else ()),
        *((f"--config-file={CONFIG_FILE}",) if desired.config else ()),
        *desired.arguments,
        *((f"--listen=:{desired.metrics_port}",) if desired.metrics_port else ()),
    )


def needs_api_server(desired: PluginSet) -> bool:
    """Whether the plugin uses the API server."""
    return not {"node", "node-feature"}.isdisjoint(desired.labels)


def _environment(desired: PluginSet) -> list[Json]:
    variables = [{"name": name, "value": value} for name, value in _of_runtime(desired).items()]
    fields = {"NODE_NAME": "spec.nodeName", "POD_NAME": "metadata.name"} if needs_api_server(desired) else {}
    return variables + [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()
    ]


def _of_runtime(desired: PluginSet) -> dict[str, str]:
    """Variables by which NVIDIA's runtime adds NVML's library, with MPS its programs, and every GPU."""
    if desired.vendor != "nvidia":
        return {}
    monitored = {MONITORED: "all"} if desired.mig else {}
    parts = "compute,utility" if desired.mps else "utility"
    return {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": parts, **monitored}


def _served(port: int) -> Json:
    if not port:
        return {}
    return {
        "ports": [{"name": "metrics", "containerPort": port}],
        # the plugin waits for driver and kubelet by itself: only one that hangs is restarted
        "livenessProbe": {
            "httpGet": {"path": "/healthz", "port": "metrics"},
            "initialDelaySeconds": 10,
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 6,
        },
        "readinessProbe": {
            "httpGet": {"path": "/readyz", "port": "metrics"},
            "periodSeconds": 10,
            "timeoutSeconds": 5,
        },
    }


def _resources(desired: PluginSet) -> Json:
    """As in the systemd unit. No limit with MPS: its servers use as much memory as their clients need."""
    requests = {"cpu": "10m", "memory": "64Mi"}
    return {"requests": requests} if desired.mps else {"requests": requests, "limits": {"memory": "256Mi"}}


def _security(desired: PluginSet) -> Json:
    if desired.device_specs:
        return {"privileged": True, "readOnlyRootFilesystem": True, "runAsUser": 0}
    added = _MPS_CAPABILITIES if desired.mps else ("SYS_ADMIN",) if desired.mig else ()
    capabilities: Json = {"drop": ["ALL"], **filled(add=list(added))}
    return RESTRICTED | {"capabilities": capabilities, "runAsUser": 0}  # the sockets are root's


# Rights: a service account, and for each use of the API server exactly the verbs that it needs.

_API = "rbac.authorization.k8s.io"


class Use(NamedTuple):
    """Rules for the whole cluster (nodes are in no namespace) and for one namespace; `why` describes it."""

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
    """One rule for each resource, with all verbs of these rules."""
    verbs: dict[tuple[str, str], dict[str, None]] = {}
    for rule in rules:
        for resource in rule["resources"]:
            verbs.setdefault((rule["apiGroups"][0], resource), {}).update(dict.fromkeys(rule["verbs"]))
    return [
        _rule(group, resource, " ".join(resource_verbs))
        for (group, resource), resource_verbs in verbs.items()
    ]


def _bound(
    kind: str, name: str, rules: list[Json], binding: str, account: Json, namespace: str
) -> list[Json]:
    """A role and its binding to the account; `binding` distinguishes it from bindings to other accounts."""
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


# The test pod: NVIDIA's vector-add sample on one GPU of one node.

CONTAINER = "vector-add"
RUN = "gpunode/run"
"""Label with a unique value for each run: it finds a pod when the response with its name was lost."""
HOSTNAME = "kubernetes.io/hostname"
_USER = 65532  # any user other than root: the device files are accessible to all


class VectorAdd(NamedTuple):
    """`seconds`: how long the pod may be active. `hostname`: the node's label of that name; empty: any node.

    `resource` is in the limits alone: Kubernetes sets the request from it.
    """

    image: str
    resource: str = "nvidia.com/gpu"
    namespace: str = ""
    hostname: str = ""
    runtime_class: str = ""
    seconds: int = 300
    run: str = ""


def vector_add(desired: VectorAdd) -> Json:
    """A Pod that ends by itself and is allowed in a namespace of the level restricted.

    With `run` the server chooses the name. It tolerates the resource's own taint, and selects the node by
    label, because nodeName would bypass the scheduler.
    """
    metadata: Json = (
        {"generateName": "gpunode-vector-add-"} if desired.run else {"name": "gpunode-vector-add"}
    )
    marks = labels("vector-add") | ({RUN: desired.run} if desired.run else {})
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata | filled(namespace=desired.namespace) | {"labels": marks},
        "spec": {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": desired.seconds,
            **filled(runtimeClassName=desired.runtime_class),
            **filled(nodeSelector={HOSTNAME: desired.hostname} if desired.hostname else {}),
            "tolerations": [{"key": desired.resource, "operator": "Exists", "effect": "NoSchedule"}],
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": 5,
            "securityContext": {"runAsNonRoot": True, "runAsUser": _USER, "runAsGroup": _USER},
            "containers": [
                {
                    "name": CONTAINER,
                    "image": desired.image,
                    "resources": {"limits": {desired.resource: "1"}},
                    "securityContext": RESTRICTED,
                }
            ],
        },
    }


def ours() -> dict[str, str]:
    """The labels of such pods of any run."""
    return {key: value for key, value in labels("vector-add").items() if key != COMPONENT}
