"""A ClusterPolicy's sections, or the chart's values, as keys of our config file and what isn't one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpunode.facts.located import EMPTY, Item
from gpunode.gpu.library_paths import DRIVER_ROOT
from gpunode.plugin.config.gke import Left, get, keys, plain
from gpunode.plugin.config.options import OPTIONS, Option

_TOOLKIT = "/usr/local/nvidia"  # DefaultToolkitInstallDir
_OBJECT = "gpunode manifests daemon-set prints ours"
_OF_OBJECT = ("repository", "image", "version", "imagePullPolicy", "imagePullSecrets", "resources")
_OF_RUNTIME = ("NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_MIG_MONITOR_DEVICES")
_HANDLED = ("enabled", "config", "env", "args", "mps")
_VMS = "virtual machines with GPUs are not gpunode's matter"

SECTIONS: Mapping[str, str] = {
    "devicePlugin": "",
    "mig": "",
    "cdi": "",
    "gds": "",
    "gdrcopy": "",
    "driver": "gpunode driver plan",
    "toolkit": "gpunode toolkit install; gpunode configure-runtime",
    "migManager": "gpunode mig apply",
    "gfd": "gpunode labels",
    "dcgm": "gpunode plugin serve --listen serves metrics",
    "dcgmExporter": "gpunode plugin serve --listen serves metrics",
    "validator": "gpunode verify",
    "nodeStatusExporter": "gpunode doctor -o prometheus",
    "operator": "gpunode manifests runtime-class",
    "daemonsets": _OBJECT,
    "hostPaths": "",
    "nfd": "NFD is left as it is",
    "psa": "gpunode manifests all prints a namespace with its level",
    "psp": "",
    "sandboxWorkloads": _VMS,
    "sandboxDevicePlugin": _VMS,
    "vfioManager": _VMS,
    "vgpuManager": _VMS,
    "vgpuDeviceManager": _VMS,
    "kataManager": _VMS,
    "kataSandboxDevicePlugin": _VMS,
    "ccManager": _VMS,
    "fabricManager": "gpunode driver plan",
}
"""The sections that are known, and what to do about one that isn't the device plugin's."""


@dataclass(frozen=True)
class Policy:
    """`values`: (key of our file, value, where it stands), in the order in which they beat each other."""

    values: tuple[tuple[str, Any, str], ...] = ()
    left: tuple[Left, ...] = ()
    config_map: str = ""
    default: str = ""


def read_policy(sections: Mapping[str, Item]) -> Policy:
    """What the operator would tell its device plugin; empty without sections."""
    plugin = sections.get("devicePlugin", EMPTY)
    left: list[Left] = []
    values = [*_of_sections(sections, left), *_environment(plugin, left), *_arguments(plugin, left)]
    if plain(get(plugin, "enabled")) is False:
        left.append(
            Left("devicePlugin.enabled", "false: the operator serves no GPUs, and so shouldn't gpunode")
        )
    for key in keys(plugin):
        if key not in _HANDLED:
            hint = _OBJECT if key in _OF_OBJECT else ""
            left.append(Left(f"devicePlugin.{key}", "it is of the operator's DaemonSet", hint))
    for name, item in sections.items():
        left += _other(name, item)
    config = get(plugin, "config")
    return Policy(tuple(values), tuple(left), get(config, "name").text, get(config, "default").text)


def _other(name: str, item: Item) -> Iterator[Left]:
    """A section that says something, and of which nothing is the plugin's."""
    off = plain(get(item, "enabled")) is False or not item.pairs
    if name in ("devicePlugin", "mig", "cdi", "gds", "gdrcopy", "hostPaths") or (off and name in SECTIONS):
        return
    if name not in SECTIONS:
        yield Left(name, "no such section of the operator is known here")
    else:
        yield Left(name, "it isn't the device plugin's", SECTIONS[name])


# --- what the operator makes of its own sections --------------------------------------------------------


def _of_sections(sections: Mapping[str, Item], left: list[Left]) -> Iterator[tuple[str, Any, str]]:
    strategy = get(sections.get("mig", EMPTY), "strategy")
    if strategy.text:
        yield "flags.migStrategy", strategy.text, "mig.strategy"
    if _on(sections, "gds"):
        yield "flags.gdsEnabled", True, "gds.enabled"
        yield "flags.mofedEnabled", True, "gds.enabled"
    if _on(sections, "gdrcopy"):
        yield "flags.gdrcopyEnabled", True, "gdrcopy.enabled"
    yield from _cdi(sections, left)
    if _on(sections, "driver"):
        root = get(sections.get("hostPaths", EMPTY), "driverInstallDir").text or DRIVER_ROOT
        yield "flags.nvidiaDriverRoot", root, "driver.enabled"
        left.append(
            Left(
                "driver.enabled",
                f"the driver is taken from {root}, where the operator's container has it",
                "flags.nvidiaDriverRoot: / once it is installed on the node: gpunode driver plan",
            )
        )
    kubelet = get(sections.get("hostPaths", EMPTY), "kubeletRootDir").text
    if kubelet not in ("", "/var/lib/kubelet"):
        hint = f"gpunode manifests daemon-set --kubelet-root {kubelet}"
        left.append(
            Left("hostPaths.kubeletRootDir", "it is where the PodResources socket is mounted from", hint)
        )
    root = get(sections.get("devicePlugin", EMPTY), "mps", "root").text
    if root:
        yield "flags.mpsRoot", root, "devicePlugin.mps.root"


def _cdi(sections: Mapping[str, Item], left: list[Left]) -> Iterator[tuple[str, Any, str]]:
    cdi = sections.get("cdi", EMPTY)
    if not _on(sections, "cdi"):
        return
    yield "flags.plugin.deviceListStrategy", ["cdi-annotations", "cdi-cri"], "cdi.enabled"
    yield "flags.plugin.cdiAnnotationPrefix", "cdi.k8s.io/", "cdi.enabled"
    if _on(sections, "toolkit"):
        directory = get(sections["toolkit"], "installDir").text or _TOOLKIT
        program = f"{directory.rstrip('/')}/toolkit/nvidia-cdi-hook"
        yield "flags.plugin.nvidiaCTKPath", program, "toolkit.enabled"
        why = f"specifications name {program}, which the operator's toolkit container installs"
        left.append(Left("toolkit.installDir", why, "/usr/bin/nvidia-cdi-hook is that of packages"))
    for key in keys(cdi):
        if key != "enabled" and plain(get(cdi, key)) is not False:
            left.append(Left(f"cdi.{key}", "it is the runtime's", "gpunode configure-runtime --cdi"))


def _on(sections: Mapping[str, Item], name: str) -> bool:
    return plain(get(sections.get(name, EMPTY), "enabled")) is True


# --- what stands in devicePlugin.env and .args ----------------------------------------------------------


def _environment(plugin: Item, left: list[Left]) -> Iterator[tuple[str, Any, str]]:
    by_variable = {name: option for option in OPTIONS for name in option.variables}
    for entry in get(plugin, "env").items:
        name, value = get(entry, "name").text, get(entry, "value")
        option, where = by_variable.get(name), f"devicePlugin.env {name}"
        if name in _OF_RUNTIME:
            left.append(Left(where, "NVIDIA's runtime reads it for the plugin's container", _OBJECT))
        elif option is None or not option.key:
            left.append(Left(where, "our config file has nothing of that name"))
        elif value.kind != "scalar":
            left.append(
                Left(where, "its value stands elsewhere in the cluster", f"write {option.key} yourself")
            )
        elif value.text:
            yield option.key, _value(option, value.text), where


def _arguments(plugin: Item, left: list[Left]) -> Iterator[tuple[str, Any, str]]:
    by_flag = {flag: option for option in OPTIONS for flag in option.flags}
    words = [one.text for one in get(plugin, "args").items if one.kind == "scalar"]
    while words:
        name, equals, text = words.pop(0).partition("=")
        flag = f"--{name.lstrip('-')}"
        option, where = by_flag.get(flag), f"devicePlugin.args {flag}"
        if option is None or not option.key or not name.startswith("-"):
            left.append(
                Left(
                    where if name.startswith("-") else f"devicePlugin.args {name}",
                    "our config file has nothing of that name",
                )
            )
            continue
        if not equals:
            text = "true" if option.kind == "boolean" else _next(words)
        yield option.key, _value(option, text), where


def _next(words: list[str]) -> str:
    return words.pop(0) if words else ""


def _value(option: Option, text: str) -> Any:
    """As a file has it; what can't be one is refused by the file's reader."""
    if option.takes_many:
        return [part for part in (one.strip() for one in text.split(",")) if part]
    if option.kind == "boolean":
        return {"1": True, "t": True, "true": True, "0": False, "f": False, "false": False}.get(
            text.lower(), text
        )
    return text
