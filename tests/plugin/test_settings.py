"""Names and paths of a resource."""

from __future__ import annotations

import pytest

from gpunode.errors import UsageError
from gpunode.plugin.settings import Settings, resource_name_problem


def test_the_socket_is_named_after_the_resource_and_lies_beside_the_kubelets() -> None:
    settings = Settings(kubelet_socket="/k0s/kubelet/device-plugins/kubelet.sock")
    assert settings.socket == "/k0s/kubelet/device-plugins/nvidia-gpu.sock"
    assert Settings(resource_name="example.com/gpu.shared").endpoint == "example-gpu.shared.sock"


@pytest.mark.parametrize("name", ["nvidia.com/gpu", "a/b", "nvidia.com/mig-1g.10gb", "x.y.z/" + "n" * 63])
def test_names_that_kubernetes_takes(name: str) -> None:
    assert resource_name_problem(name) == ""


@pytest.mark.parametrize(
    "name",
    [
        *("gpu", "", "/gpu", "nvidia.com/", "NVIDIA.com/gpu", "kubernetes.io/gpu", "a.kubernetes.io/gpu"),
        *(
            "requests.nvidia.com/gpu",
            "nvidia.com/foo.com/bar",
            "nvidia.com/-gpu",
            "a/" + "n" * 64,
            "a..b/gpu",
        ),
    ],
)
def test_names_that_kubernetes_refuses(name: str) -> None:
    assert resource_name_problem(name) != ""
    with pytest.raises(UsageError):
        Settings(resource_name=name)


def test_a_relative_socket_and_a_senseless_interval_are_usage_errors() -> None:
    with pytest.raises(UsageError):
        Settings(kubelet_socket="kubelet.sock")
    with pytest.raises(UsageError):
        Settings(rediscover_seconds=0)
