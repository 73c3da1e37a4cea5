"""`gpunode manifests runtime-class`: the Kubernetes objects by which pods choose a runtime handler."""

from __future__ import annotations

import re
from typing import Any

from gpunode.dataclass import dataclass
from gpunode.errors import UsageError
from gpunode.host import Host
from gpunode.result import Progress, Result, Style, Text

VARIANTS = ("cdi", "legacy")  # as `configure-runtime --also` names them
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")  # RFC 1123, as Kubernetes takes it
_MAX = 63  # a RuntimeClass's handler is a DNS label


@dataclass(frozen=True)
class Options:
    """`runtime_name` is the handler's name in the engine; `also` are variants that get a class as well."""

    runtime_name: str = "nvidia"
    also: str = ""


@dataclass(frozen=True)
class Manifests:
    """`data` of the envelope: the objects themselves, in the order in which they are printed."""

    objects: tuple[dict[str, Any], ...]


def run(host: Host, options: Options, progress: Progress) -> Result:
    """Print RuntimeClass objects; kind Manifests. Nothing is contacted and nothing is written."""
    objects = tuple(runtime_class(name) for name in names(options))
    # a terminal wraps other text, and a copied manifest must stay what it is
    lines = tuple(Text(line, Style.COMMAND) for line in documents(objects).splitlines())
    return Result("Manifests", Manifests(objects), blocks=lines)


def names(options: Options) -> tuple[str, ...]:
    """The handlers meant. `UsageError` for a name or variant that can't be one."""
    name = options.runtime_name
    variants = tuple(filter(None, (part.strip() for part in options.also.split(","))))
    unknown = [one for one in variants if one not in VARIANTS]
    if unknown:
        raise UsageError(f"unknown variant {unknown[0]!r}", hint=f"known: {', '.join(VARIANTS)}")
    if _LABEL.fullmatch(name) is None or len(name) > _MAX:
        raise UsageError(
            f"{name!r} can't be a RuntimeClass's handler",
            hint=f"use at most {_MAX} lower case letters, digits and '-', no '-' first or last",
        )
    return tuple(dict.fromkeys((name, *(f"nvidia-{one}" for one in variants))))


def runtime_class(name: str) -> dict[str, Any]:
    """A RuntimeClass that bears its handler's name (node.k8s.io/v1)."""
    return {
        "apiVersion": "node.k8s.io/v1",
        "kind": "RuntimeClass",
        "metadata": {"name": name},
        "handler": name,
    }


def documents(objects: tuple[dict[str, Any], ...]) -> str:
    """The objects as one YAML stream, as ``kubectl apply -f -`` reads it."""
    import yaml

    return "---\n".join(yaml.safe_dump(one, sort_keys=False) for one in objects).rstrip("\n")
