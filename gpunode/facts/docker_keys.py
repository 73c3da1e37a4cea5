"""What dockerd takes in its file: 20.10 can't check a file without starting, later releases are asked.

The names and types are those of moby v20.10.24, cmd/dockerd and daemon/config: a key must be one of its
flags, or the plural under which a repeatable flag stands in the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpunode.facts.daemons import Daemon
from gpunode.facts.docker_flags import WHOLE, file_settings
from gpunode.host import Host
from gpunode.tables import table

TABLE = "docker_keys"
_UNKNOWN = "don't match any configuration option: "  # dockerd's own words, with the keys behind them
_LISTED, _VALIDATES = (20, 10), (23,)
_SECONDS = 5.0

_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "bool": ((bool,), "true or false"),
    "number": ((int,), "a number"),
    "string": ((str,), "a string"),
    "list": ((list,), "a list"),
    "object": ((dict,), "an object"),
    "any": ((object,), ""),
}
_KEYS = {
    "bool": "cri-containerd debug experimental icc init ip-forward ip-masq ip6tables iptables ipv6"
    " live-restore no-new-privileges raw-logs rootless selinux-enabled tls tlsverify userland-proxy restart",
    "number": "cpu-rt-period cpu-rt-runtime max-concurrent-downloads max-concurrent-uploads"
    " max-download-attempts mtu network-control-plane-mtu network-diagnostic-port oom-score-adjust"
    " shutdown-timeout",
    "string": "api-cors-header bip bridge cgroup-parent cluster-advertise cluster-store containerd"
    " containerd-namespace containerd-plugins-namespace data-root default-cgroupns-mode default-gateway"
    " default-gateway-v6 default-ipc-mode default-runtime exec-root fixed-cidr fixed-cidr-v6 graph group"
    " host-gateway-ip init-path ip log-driver log-level metrics-addr pidfile seccomp-profile storage-driver"
    " swarm-default-advertise-addr tlscacert tlscert tlskey userland-proxy-path userns-remap",
    "list": "allow-nondistributable-artifacts authorization-plugins default-address-pools dns dns-opts"
    " dns-search exec-opts hosts insecure-registries labels node-generic-resources registry-mirrors"
    " storage-opts",
    "object": "builder cluster-store-opts default-ulimits features log-opts runtimes",
    # the size takes a number and a string; the others are flags that mean nothing in the file
    "any": "default-shm-size add-runtime allow-nondistributable-artifact authorization-plugin"
    " cluster-store-opt config-file default-address-pool default-ulimit deprecated-key-path dns-opt exec-opt"
    " help host insecure-registry label log-opt node-generic-resource registry-mirror storage-opt version",
}
_KIND_OF = {name: kind for kind, names in _KEYS.items() for name in names.split()}


def unknown_keys(host: Host, daemon: Daemon, tree: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Settings in a file that this dockerd doesn't know; None if that can't be told.

    What is in no list is put to dockerd itself (``--validate``, 23.0 and up), which then only reads the file.
    """
    strange = tuple(
        key for key in file_settings(tree) if key not in _KIND_OF and key not in table(TABLE).rows
    )
    if daemon.version and _LISTED <= daemon.version < _VALIDATES:
        return tuple(key for key in file_settings(tree) if key not in _KIND_OF)
    if not strange:
        return ()
    if daemon.version < _VALIDATES or daemon.binary is None:
        return None
    answer = host.run([daemon.binary, "--validate", f"--config-file={daemon.config_path}"], timeout=_SECONDS)
    _, found, keys = (answer.stderr + answer.stdout).partition(_UNKNOWN)
    if answer.ok:
        return ()
    named = tuple(key.strip() for key in keys.split("\n")[0].split(","))
    return tuple(key for key in strange if key in named) or None if found else None


def refused_by_20(tree: Mapping[str, Any]) -> tuple[tuple[str, ...], str]:
    """The keys that lead to what dockerd 20.10 refuses and the reason; both empty if it takes the file."""
    for key, value in tree.items():
        if isinstance(value, dict) and key not in WHOLE:
            for inner, deeper in value.items():
                reason = _refused(inner, deeper)
                if reason:
                    return (key, inner), reason
        elif reason := _refused(key, value):
            return (key,), reason
    for name, value in (tree.get("features") or {}).items():
        if value is not None and not isinstance(value, bool):
            return ("features", name), f"the feature {name} must be true or false"
    for name, value in (tree.get("log-opts") or {}).items():
        if value is not None and not isinstance(value, str):
            return ("log-opts", name), f"the log option {name} must be a string"
    return (), ""


def _refused(key: str, value: Any) -> str:
    kind = _KIND_OF.get(key)
    if kind is None:
        return f"dockerd 20.10 doesn't know {key}"
    types, name = _KINDS[kind]
    fits = isinstance(value, types) and (kind == "bool" or not isinstance(value, bool) or kind == "any")
    if value is None or fits:
        return ""
    return f"{key} must be {name}"
