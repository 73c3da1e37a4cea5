"""Names and paths of a resource; validity of single values."""

from __future__ import annotations

import pytest

from gpunode.plugin.config.settings import Settings, resource_name_problem
from tests.plugin.config.test_values import value_problem


def test_socket_is_named_after_the_resource_beside_the_kubelets() -> None:
    settings = Settings(kubelet_socket="/k0s/kubelet/device-plugins/kubelet.sock")
    assert settings.socket("nvidia.com/gpu") == "/k0s/kubelet/device-plugins/nvidia-gpu.sock"
    assert settings.endpoint("amd.com/gpu.shared") == "amd-gpu.shared.sock"


def test_sockets_of_resources_are_unique_and_short_enough() -> None:
    settings = Settings()
    long = "averyverylongcompanyname.example"
    names = [
        *("nvidia.com/gpu", "nvidia.org/gpu", "example.com/gpu", "example.org/gpu", "example.com/gpu.shared"),
        *(f"{long}.{end}/{'n' * 60}{number}" for end in ("com", "org") for number in range(3)),
        f"nvidia.com/{'n' * 63}",
    ]
    sockets = {settings.endpoint(name) for name in names}
    assert len(sockets) == len(names)
    assert all(len(f"/var/lib/kubelet/plugins_registry/{name}") <= 107 for name in sockets)


@pytest.mark.parametrize("name", ["nvidia.com/gpu", "a/b", "nvidia.com/mig-1g.10gb", "x.y.z/" + "n" * 57])
def test_valid_resource_names(name: str) -> None:
    assert resource_name_problem(name) == value_problem("resource_name", name) == ""


@pytest.mark.parametrize(
    "name",
    [
        *("gpu", "", "/gpu", "nvidia.com/", "NVIDIA.com/gpu", "kubernetes.io/gpu", "a.kubernetes.io/gpu"),
        *("requests.nvidia.com/gpu", "nvidia.com/foo.com/bar", "nvidia.com/-gpu", "a/" + "n" * 64),
        "a..b/gpu",
    ],
)
def test_invalid_resource_names(name: str) -> None:
    assert resource_name_problem(name) != ""
    assert value_problem("resource_name", name) != ""


def test_relative_or_long_socket_and_invalid_interval_are_refused() -> None:
    assert "not an absolute path" in value_problem("kubelet_socket", "kubelet.sock")
    assert "107 bytes" in value_problem("kubelet_socket", "/" + "d" * 107)
    assert value_problem("kubelet_socket", "") == ""
    for seconds in ("0", "86401", "1e9"):
        assert "not between 0.01s and 24h" in value_problem("rediscover_seconds", seconds)
    for text in ("-1", "nan", "inf", "soon", ""):
        assert "not a duration such as 60s" in value_problem("rediscover_seconds", text)
    for seconds in ("0.5", "500ms", "2m"):
        assert value_problem("rediscover_seconds", seconds) == ""
