"""Translation of the configuration of GKE's device plugin into a config file of gpunode."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gpunode.errors import ConfigError
from gpunode.host import Host
from gpunode.host.documents import EMPTY, DocumentError, Item, Notes, read_all
from gpunode.plugin.config.resolve import OptionSources
from gpunode.plugin.config.values import ConfigProblem

_NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,17})")


@dataclass(frozen=True)
class Left:
    """A setting without an exact counterpart in our file. `key`: as in the other file."""

    key: str
    why: str
    hint: str = ""

    @property
    def text(self) -> str:
        return f"{self.key}: {self.why}" + (f" ({self.hint})" if self.hint else "")


@dataclass(frozen=True)
class Translation:
    """`config` is our file as a tree; with `problems`, the errors in the other file, there is none."""

    config: dict[str, Any] = field(default_factory=dict)
    left: tuple[Left, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class PluginConfigTranslation:
    """`data` of the envelope: our config file as a tree and as text, and the settings that it can't
    express."""

    source: str
    file: str
    config: dict[str, Any]
    text: str
    left: tuple[Left, ...]


def documents(data: bytes) -> tuple[Item, ...]:
    """The file's documents. `ConfigError` for text that isn't YAML or JSON."""
    notes: Notes = []
    try:
        read = read_all(data, notes)
    except DocumentError as error:
        raise ConfigError(f"line {error.line}: {error.message}" if error.line else error.message) from error
    if not read:
        raise ConfigError("the file is empty")
    return read


def value_at(item: Item, *path: str, fold: bool = False) -> Item:
    """The value below these keys, `EMPTY` if it is missing; with `fold` keys match in any case, as in Go."""
    for key in path:
        exact = [value for name, _, value in item.pairs if name == key]
        folded = [value for name, _, value in item.pairs if fold and name.lower() == key.lower()]
        item = (exact or folded or [EMPTY])[-1]
    return item


def key_names(item: Item) -> tuple[str, ...]:
    return tuple(name for name, _, _ in item.pairs)


# GKE's gpu_config.json as our config file.
#
# Its format is that of GKE's device plugin (container-engine-accelerators, pkg/gpu/nvidia/manager.go): JSON
# with keys that Go reads in any case. GKE's plugin ignores an invalid file as a whole and logs a line. The
# ConfigMap xid-config may exist as well; the plugin gets it as a variable, which overrides the file.

RESOURCE = "nvidia.com/gpu"  # GKE's plugin supports no other name
ALWAYS_CRITICAL = 48
_KEYS = (
    *("GPUPartitionSize", "MaxTimeSharedClientsPerGPU", "GPUSharingConfig", "HealthCriticalXid"),
    "GPUFractionDivisor",
)
_SHARING_KEYS = ("GPUSharingStrategy", "MaxSharedClientsPerGPU")
_PROFILE = re.compile(r"[1-9][0-9]*g\.[1-9][0-9]*gb(\+[a-z]+)?")
_PASSED_OVER = "GKE's plugin passes over the whole file then"


def translate(parts: Sequence[Item]) -> Translation:
    """`ConfigError` for a configuration that GKE's plugin would refuse too."""
    tree, from_map = _parts(parts)
    left = [
        *_unknown(tree, _KEYS, ""),
        *_unknown(_get(tree, "GPUSharingConfig"), _SHARING_KEYS, "GPUSharingConfig."),
    ]
    config: dict[str, Any] = {}
    size = _text(tree, "GPUPartitionSize")
    if size:
        config["flags"] = {"migStrategy": "single"}
        left.append(_partition(size))
    strategy, clients = _sharing(tree, left)
    if strategy == "mps":
        config.setdefault("flags", {})["gpunode"] = {"mps": True}
        left += _mps(size)
    if strategy and (clients > 1 or strategy == "mps"):
        section = "mps" if strategy == "mps" else "timeSlicing"
        shared = {"name": RESOURCE, "replicas": clients}
        config["sharing"] = {section: {"failRequestsGreaterThanOne": True, "resources": [shared]}}
    elif strategy:
        left.append(Left("GPUSharingConfig", "one client for each GPU is not sharing"))
    if "GPUFractionDivisor" in {_known(key) for key in key_names(tree)}:
        why = "GKE's plugin takes it from /etc/nvidia/gpu-fraction-divisor.txt alone"
        left.append(Left("GPUFractionDivisor", why))
    if xids := from_map or _xids(tree):
        config["health"] = {"disable": ["all"], "enable": sorted({ALWAYS_CRITICAL, *xids})}
        why = "GKE's plugin never takes a device back before its restart; ours does once the cause is gone"
        left.append(Left("HealthCriticalXid", why, "health.holdDown: infinite does as GKE's"))
    return Translation({"version": "v1", **config}, tuple(left))


def _parts(parts: Sequence[Item]) -> tuple[Item, list[int]]:
    """(the file's object, the XIDs of the ConfigMap); either may be missing, not both."""
    maps = [part for part in parts if value_at(part, "kind").text == "ConfigMap"]
    files = [part for part in parts if part not in maps]
    if len(files) > 1 or any(file.kind != "map" for file in files):
        raise ConfigError(
            "this is not a gpu_config.json", hint="it is one JSON object, such as GPUPartitionSize"
        )
    texts = [value_at(part, "data", "HealthCriticalXid") for part in maps]
    if any(text.kind == "null" for text in texts):
        hint = "GKE's is xid-config in kube-system, with HealthCriticalXid"
        raise ConfigError("this ConfigMap isn't of GKE's device plugin", hint=hint)
    words = [word.strip() for item in texts for word in item.text.split(",")]
    if wrong := [word for word in words if not word.isdecimal() or not int(word)]:
        raise ConfigError(
            f"HealthCriticalXid: {wrong[0]!r} is not an XID", hint="GKE's plugin takes none of them then"
        )
    return files[0] if files else EMPTY, [int(word) for word in words]


def _known(key: str) -> str:
    return next((known for known in _KEYS if known.lower() == key.lower()), key)


def _get(tree: Item, key: str) -> Item:
    return value_at(tree, key, fold=True)


def _unknown(tree: Item, known: tuple[str, ...], above: str) -> list[Left]:
    folded = {key.lower() for key in known}
    return [
        Left(f"{above}{key}", "GKE's plugin has no such key, and passes it over")
        for key in key_names(tree)
        if key.lower() not in folded
    ]


def _partition(size: str) -> Left:
    if _PROFILE.fullmatch(size) is None:
        raise ConfigError(f"GPUPartitionSize: {size!r} is not a MIG profile such as 1g.5gb")
    return Left(
        "GPUPartitionSize",
        f"the plugin serves GPUs of {size}, but doesn't divide them",
        f"gpunode mig apply, with as many {size} on every GPU as fit",
    )


def _sharing(tree: Item, left: list[Left]) -> tuple[str, int]:
    """(time-sharing, mps or nothing, clients for each GPU), by the rules of AddDefaultsAndValidate."""
    older = _count(tree, "MaxTimeSharedClientsPerGPU", "")
    section = _get(tree, "GPUSharingConfig")
    strategy = _text(section, "GPUSharingStrategy", "GPUSharingConfig.")
    clients = _count(section, "MaxSharedClientsPerGPU", "GPUSharingConfig.")
    if older > 0:
        if strategy or clients > 0:
            left.append(Left("GPUSharingConfig", "MaxTimeSharedClientsPerGPU is given, and counts alone"))
        return "time-sharing", older
    if strategy not in ("", "time-sharing", "mps"):
        known = f"known: time-sharing, mps; {_PASSED_OVER}"
        raise ConfigError(f"GPUSharingConfig.GPUSharingStrategy: {strategy!r} is not a strategy", hint=known)
    if strategy and clients <= 0:
        raise ConfigError(
            f"GPUSharingConfig: {strategy} without a MaxSharedClientsPerGPU above 0", hint=_PASSED_OVER
        )
    if clients > 0 and not strategy:
        raise ConfigError(
            "GPUSharingConfig: MaxSharedClientsPerGPU without a GPUSharingStrategy", hint=_PASSED_OVER
        )
    return strategy, clients


def _mps(size: str) -> list[Left]:
    left = [
        Left(
            "GPUSharingConfig.GPUSharingStrategy",
            "GKE's nodes run the MPS daemon; here the plugin does (flags.gpunode.mps)",
        ),
        Left(
            "GPUSharingConfig",
            "GKE's plugin gives several shares to a container where the node has a single GPU",
            "failRequestsGreaterThanOne: false does so on any node",
        ),
    ]
    if size:
        left.append(Left("GPUSharingConfig", "MIG devices can't be shared with MPS: they will be left out"))
    return left


def _xids(tree: Item) -> list[int]:
    item = _get(tree, "HealthCriticalXid")
    numbers = [int(entry.text) for entry in item.items if _is_number(entry)]
    if item.kind not in ("list", "null") or len(numbers) != len(item.items) or min(numbers, default=1) < 1:
        raise ConfigError(f"HealthCriticalXid: {item.what} is not a list of XIDs", hint=_PASSED_OVER)
    return numbers


def _text(tree: Item, key: str, above: str = "") -> str:
    item = _get(tree, key)
    if item.kind not in ("scalar", "null"):
        raise ConfigError(f"{above}{key}: expected a string; found {item.what}", hint=_PASSED_OVER)
    return item.text


def _count(tree: Item, key: str, above: str) -> int:
    item = _get(tree, key)
    if item.kind != "null" and not _is_number(item):
        raise ConfigError(f"{above}{key}: expected a number; found {item.what}", hint=_PASSED_OVER)
    return int(item.text or 0)


def _is_number(item: Item) -> bool:
    """Whether it is a whole number, quoted or not."""
    return item.kind == "scalar" and _NUMBER.fullmatch(item.text) is not None


# A translated configuration as a file's text, checked with our own reader before it is returned.


def as_config_file(translation: Translation) -> tuple[Translation, str]:
    """The translation and its text; `problems` if our reader refuses it."""
    text = _written(translation.config)
    resolved = OptionSources(Host(environ={}), {}).resolve(text.encode())
    problems = tuple(map(_problem_text, resolved.problems))
    warnings = (
        Left(warning.key or "the whole", warning.message, warning.hint) for warning in resolved.warnings
    )
    return replace(translation, left=(*translation.left, *warnings), problems=problems), text


def _written(config: object) -> str:
    import yaml

    return str(yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=100))


def _problem_text(problem: ConfigProblem) -> str:
    return ": ".join(filter(None, (problem.key, problem.message)))
