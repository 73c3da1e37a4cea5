"""Input and output of labelling. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

TIMESTAMP = "nvidia.com/gfd.timestamp"
UNKNOWN_DRIVER = "unknown.unknown.unknown"
"""The driver's version, as GPU feature discovery reports it where there is no NVML."""
_LONGEST = 63
_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_DOMAIN = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_STRANGE = re.compile(r"[^A-Za-z0-9\-_. ]")
_EDGES = "-_."


@dataclass(frozen=True)
class Machine:
    """Facts of the machine, other than its GPUs, that become labels.

    `product` is the first content of the machine type file, "" if it can't be read. `classes` are PCI classes
    by address. `vgpu` is whether GPUs of this machine are virtual, None if that is unknown; `host_driver` has
    version and branch of the host's driver.
    """

    product: str = ""
    classes: Mapping[str, int] = field(default_factory=dict)
    vgpu: bool | None = None
    host_driver: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class Labels:
    """The labels of a node, sorted, and warnings."""

    values: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def sanitised(text: str) -> str:
    """As GPU feature discovery: characters other than letters, digits, ``-_.`` and blanks are removed, blanks
    become ``-``."""
    return "-".join(_STRANGE.sub("", " ".join(text.split())).split())


def boolean(true: bool) -> str:
    return "true" if true else "false"


def label_value(text: str) -> str:
    """The nearest valid label value: at most 63 characters, a letter or digit at both ends."""
    return sanitised(text).strip(_EDGES)[:_LONGEST].strip(_EDGES)


def valid_labels(values: Mapping[str, str], warnings: Iterable[str] = ()) -> Labels:
    """These labels, each with a value that Kubernetes accepts; invalid keys are reported and left out."""
    unique = list(dict.fromkeys(warnings))
    valid = {}
    for key, value in sorted(values.items()):
        if key_problem(key):
            unique.append(f"the label {key} is left out: {key_problem(key)}")
        else:
            valid[key] = label_value(value)
    return Labels(valid, tuple(unique))


def key_problem(key: str) -> str:
    """Why Kubernetes would refuse this as a label's key; empty if it wouldn't."""
    domain, slash, name = key.rpartition("/")
    if slash and (len(domain) > 253 or not _DOMAIN.fullmatch(domain)):
        return f"{domain!r} is not a domain"
    if len(name) > _LONGEST:
        return f"{name!r} is longer than {_LONGEST} characters"
    return "" if _NAME.fullmatch(name) else f"{name!r} is not a name of letters, digits, '-', '_' and '.'"


def with_kept_timestamp(now: Mapping[str, str], before: Mapping[str, str]) -> Mapping[str, str]:
    """`before` if `now` differs only in the timestamp, which is that of the last change."""
    alike = now.keys() == before.keys() and all(before[key] == now[key] for key in now if key != TIMESTAMP)
    return before if alike else now
