"""Checks objects against the API server's schema, by lightkube's models, which are generated from it."""

from __future__ import annotations

from typing import Any

import pytest

MODELS = {
    ("v1", "Pod"): "core_v1",
    ("v1", "Node"): "core_v1",
    ("v1", "Namespace"): "core_v1",
    ("v1", "ConfigMap"): "core_v1",
    ("v1", "ServiceAccount"): "core_v1",
    ("apps/v1", "DaemonSet"): "apps_v1",
    ("node.k8s.io/v1", "RuntimeClass"): "node_v1",
    **{
        ("rbac.authorization.k8s.io/v1", kind): "rbac_v1"
        for kind in ("ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")
    },
}


def checked(tree: dict[str, Any]) -> Any:
    """The typed object. Fails for a wrong type, a missing required field and one that the schema lacks."""
    import importlib

    pytest.importorskip("lightkube")
    place = MODELS[tree["apiVersion"], tree["kind"]]
    model = getattr(importlib.import_module(f"lightkube.models.{place}"), tree["kind"])
    typed = model.from_dict(tree)
    assert typed.to_dict() == tree, "fields that the schema lacks"
    return typed
