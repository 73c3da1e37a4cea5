"""`gpunode manifests runtime-class`: objects that a cluster accepts."""

from __future__ import annotations

import pytest
import yaml

from tests.cli import gpunode


def test_stream_has_one_class_per_handler() -> None:
    ran = gpunode("manifests", "runtime-class", "--also", "cdi,legacy")
    assert (ran.code, ran.err) == (0, "")
    objects = list(yaml.safe_load_all(ran.out))
    assert [one["metadata"]["name"] for one in objects] == ["nvidia", "nvidia-cdi", "nvidia-legacy"]
    assert all(one["handler"] == one["metadata"]["name"] for one in objects)
    assert {(one["apiVersion"], one["kind"]) for one in objects} == {("node.k8s.io/v1", "RuntimeClass")}


def test_json_holds_the_same_objects() -> None:
    ran = gpunode("manifests", "runtime-class", "--nvidia-runtime-name", "gpu", "-o", "json")
    assert ran.document["kind"] == "Manifests"
    text = gpunode("manifests", "runtime-class", "--nvidia-runtime-name", "gpu").out
    assert ran.document["data"]["objects"] == list(yaml.safe_load_all(text))
    assert gpunode("manifests", "runtime-class", "--runtime-class", "gpu").out == text, "as in its siblings"


@pytest.mark.parametrize("name", ["Nvidia", "nv_idia", "-nvidia", "nvidia-", "", "a" * 64, "nvidia.cdi", "é"])
def test_name_that_kubernetes_refuses_is_a_usage_error(name: str) -> None:
    ran = gpunode("manifests", "runtime-class", "--nvidia-runtime-name", name)
    assert (ran.code, ran.out) == (2, "")
    assert "can't be a RuntimeClass's handler" in ran.err


def test_unknown_variant_is_a_usage_error() -> None:
    ran = gpunode("manifests", "runtime-class", "--also", "cdi,csv")
    assert ran.code == 2 and "known: cdi, legacy" in ran.err


def test_duplicate_name_is_printed_once() -> None:
    ran = gpunode("manifests", "runtime-class", "--nvidia-runtime-name", "nvidia-cdi", "--also", "cdi")
    assert ran.out.count("kind: RuntimeClass") == 1
