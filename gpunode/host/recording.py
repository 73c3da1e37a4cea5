"""Values of a recorded machine that can't be files, validated when they are read."""

from __future__ import annotations

import json
import re
from typing import Any

from gpunode.errors import ConfigError

RECORDING = ".gpunode/recording.json"
KERNEL_LOG = ".gpunode/kernel.log"
_MODE = re.compile(r"[0-7]{1,4}")

# The types of recorded values: a type, [type] for a list, a mapping for an object ("*": every key; "!":
# required), a tuple for alternatives, a pattern for a string that it matches, object for anything.
_COUNT, _TEXT, _FLAG = (int, None), (str, None), (bool, None)
_TEXTS, _NUMBERS = [str], {"*": int}
_PLACE = {"start!": int, "size!": int}
_SIZE: dict[str, Any] = {
    "gpuSlices!": int,
    "computeSlices!": int,
    **dict.fromkeys(("multiprocessors", "copyEngines"), _COUNT),
}
_SIZE |= dict.fromkeys(("decoders", "encoders", "jpeg", "ofa"), _COUNT)
_MIG_DEVICE: dict[str, Any] = {
    "index!": int,
    "uuid!": str,
    "profile!": str,
    "gi!": int,
    "ci!": int,
    "memoryBytes": int,
}
_GPU: dict[str, Any] = {
    "index!": int,
    "uuid!": str,
    "name!": str,
    "pci!": str,
    "minor": _COUNT,
    "memoryBytes": int,
}
_GPU |= {"computeCapability": str, "numa": _COUNT, "migEnabled": bool, "migCapable": bool, "error": str}
_GPU |= {"errorCode": _COUNT, "clique": str, "mig": [_MIG_DEVICE | {"size": (_SIZE, None)}]}
_READING: dict[str, Any] = dict.fromkeys(("remapPending", "remapFailed", "retiredPending"), _FLAG)
_READING |= dict.fromkeys(
    ("eccVolatile", "eccAggregate", "busyPercent", "memoryUsedBytes", "errorCode"), _COUNT
)
_READING |= dict.fromkeys(("error", "recoveryAction", "fabricState", "fabricError", "generation"), _TEXT)
_FABRIC = {"state": _TEXT, "status": _COUNT, "cluster": _TEXT, "clique": _COUNT, "health": _COUNT}
_LICENCE = {"supported": _FLAG, "licensed": _FLAG, "products": (_TEXTS, None)}
_PROCESS = {"pid!": int, "graphics": bool, "memoryBytes": _COUNT}
_CONDITION: dict[str, Any] = dict.fromkeys(("error", "computeMode", "virtualization"), _TEXT)
_CONDITION |= dict.fromkeys(
    (
        *("sramThresholdExceeded", "channelRepairPending", "tpcRepairPending", "inforomValid", "persistence"),
        *("eccMode", "eccModeNext", "migMode", "migModeNext", "displayActive", "ccEnabled", "ccReady"),
    ),
    _FLAG,
)
_CONDITION |= dict.fromkeys(
    (
        *("errorCode", "remapped", "retired", "retiredPages", "temperature", "temperatureSlowdown"),
        *("powerLimit", "powerLimitDefault", "memoryUsed", "memoryReserved"),
    ),
    _COUNT,
)
_CONDITION |= {"reading": _READING, "fabric": _FABRIC, "licence": _LICENCE, "slowdowns": (_TEXTS, None)}
_CONDITION |= {"nvlinks": ([bool], None), "processes": ([_PROCESS], None)}
_COMPUTE: dict[str, Any] = {"id!": int, "slices!": int, "placement": (_PLACE, None)}
_COMPUTE |= {"uuid": str, "profile": str}
_INSTANCE: dict[str, Any] = {"id!": int, "profile!": int, "profileId!": int, "name!": str, "slices!": int}
_INSTANCE |= {"placement!": _PLACE, "compute": [_COMPUTE], "aliases": _TEXTS}
_COMPUTE_PROFILE = {"slices!": int, "maxCount!": int, "placements": [_PLACE]}
_PROFILE: dict[str, Any] = {
    "index!": int,
    "id!": int,
    "name!": str,
    "slices!": int,
    "memoryMib!": int,
    "maxCount!": int,
}
_PROFILE |= {"sms": int, "placements": [_PLACE], "aliases": _TEXTS, "compute": [_COMPUTE_PROFILE]}
_PROFILE |= {"free": _COUNT}
_LAYOUT: dict[str, Any] = {
    "uuid!": str,
    "index!": int,
    "name!": str,
    "pci!": str,
    "minor": _COUNT,
    "error": str,
}
_LAYOUT |= dict.fromkeys(("deviceId", "subsystemId", "memoryBytes", "architecture", "virtualization"), int)
_LAYOUT |= {"slots": int, "capable": bool, "current": bool, "pending": bool, "untold": str}
_LAYOUT |= {"instances": [_INSTANCE], "profiles": [_PROFILE]}
_PAIR = {"first!": str, "second!": str, "level": _COUNT, "nvlinks": int}
_NVML: dict[str, Any] = {
    "inventory": (
        {"driverVersion!": str, "cudaVersion": str, "gpus": [_GPU], "simulated": bool},
        None,
    ),
    "conditions": {"*": _CONDITION},
    "topology": {"pairs": [_PAIR], "switchLinks": _NUMBERS},
    "mig": ({"driverVersion": str, "gpus!": [_LAYOUT]}, None),
    "cuda": dict,
    "error": ({"code!": int, "message": str}, None),
    "timeout": bool,
    "problem": str,
}
_CONTAINER: dict[str, Any] = {
    **dict.fromkeys(("id", "name", "pod", "namespace", "image", "handler", "Id", "Image"), str)
}
_CONTAINER |= {"Names": _TEXTS}
_HOLDING = {"namespace": str, "pod": str, "container": str, "resource": str, "ids": _TEXTS}
_DAEMON: dict[str, Any] = {
    "info": dict,
    "version": (dict, list),
    "status": {"config": dict, "handlers": _TEXTS, "defaultHandler": str, "conditions": {"*": bool}},
    "config": (str, dict),
    "images": {"*": ({"Env": (_TEXTS, None)}, None)},
    "containers": [_CONTAINER],
    "allocatable": {"*": _TEXTS},
    "pods": [_HOLDING],
    "options": object,
    "problem": {"code": str, "message": str},
}
_SECTIONS: dict[str, dict[str, Any]] = {
    "commands": {"*": {"code": int, "stdout": str, "stderr": str}},
    "devices": {"*": {"major!": int, "minor!": int, "mode!": _MODE, "gid": int}},
    "sockets": {"*": str},
    "daemons": {"*": _DAEMON},
    "nvml": _NVML,
    "filesystems": {"*": {"*": int}},
    "modes": {"*": _MODE},
    "unreadable": {"*": str},
}
_HINT = "correct that key, or record the machine again; the format is in docs/recorded-machines.md"
_INDEX = re.compile(r"[0-9]{1,5}")
_NAMES: dict[Any, str] = {
    **{int: "an integer", str: "a string", bool: "true or false", dict: "an object", list: "a list"},
    _MODE: 'a mode such as "0644"',
}


def parse_recording(text: str) -> dict[str, Any]:
    """The recording's sections; `ConfigError` names the invalid entry."""
    try:
        loaded = json.loads(text)
    except RecursionError as error:
        raise ConfigError(f"{RECORDING} is nested too deeply") from error
    except ValueError as error:
        raise ConfigError(f"{RECORDING} is not JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{RECORDING} doesn't contain a JSON object")
    for section, shape in _SECTIONS.items():
        if problem := mismatch(loaded.setdefault(section, {}), shape, section):
            raise ConfigError(f"{RECORDING}: {problem}", hint=_HINT)
    return loaded


def mismatch(value: Any, shape: Any, where: str) -> str:
    """The first key below `where` whose value has another type than `shape` says; empty if none has."""
    if isinstance(shape, tuple):
        problems = [mismatch(value, option, where) for option in shape]
        return "" if "" in problems else problems[0]
    if shape is None:
        return "" if value is None else f"{where} must be null"
    if isinstance(shape, re.Pattern):
        fits = isinstance(value, str) and shape.fullmatch(value) is not None
        return "" if fits else f"{where} must be {_NAMES[shape]}"
    if isinstance(shape, type):
        fits = shape is object or type(value) is shape
        return "" if fits else f"{where} must be {_NAMES[shape]}"
    if not isinstance(value, type(shape)):
        return f"{where} must be {_NAMES[type(shape)]}"
    if isinstance(shape, list):
        problems = [mismatch(item, shape[0], f"{where}[{index}]") for index, item in enumerate(value)]
        return next(filter(None, problems), "")
    missing = [key for key in shape if key.endswith("!") and key[:-1] not in value]
    if missing:
        return f"{where}.{missing[0][:-1]} is missing"
    if where == "nvml.conditions" and (wrong := [key for key in value if not _INDEX.fullmatch(key)]):
        return f"{where}.{wrong[0]}: the key must be the index of a GPU"
    for key, item in value.items():
        expected = shape.get(key, shape.get(f"{key}!", shape.get("*", object)))
        if problem := mismatch(item, expected, f"{where}.{key}"):
            return problem
    return ""
