"""What the objects have in common: names, labels, and the YAML stream."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

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
    """The labels by which our objects are known (Kubernetes: Recommended Labels)."""
    return {NAME: f"{MANAGER}-{component}", COMPONENT: component, MANAGED_BY: MANAGER}


def made(api: str, kind: str, name: str, component: str, namespace: str = "", **fields: Any) -> Json:
    """An object with its metadata; one of the whole cluster has no `namespace`."""
    metadata: Json = {"name": name}
    if namespace:
        metadata["namespace"] = namespace
    metadata["labels"] = labels(component)
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **fields}


def filled(**fields: Any) -> Json:
    """The fields that say something: none that is empty."""
    return {name: value for name, value in fields.items() if value not in ("", None, {}, [])}


def documents(objects: Iterable[Mapping[str, Any]]) -> str:
    """The objects as one YAML stream, as ``kubectl apply -f -`` reads it; longer texts as blocks."""
    import yaml

    class Plain(yaml.SafeDumper):
        """Writes the same value out each time, where YAML would refer to the first."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
        style = "|" if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Plain.add_representer(str, text)
    texts = (
        yaml.dump(dict(one), Dumper=Plain, sort_keys=False, width=4096, allow_unicode=True) for one in objects
    )
    return "---\n".join(texts).rstrip("\n")
