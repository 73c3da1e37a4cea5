"""A test API server with one node, and gpunode on its command line against it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from fixtures.api_server import ApiServer, Listening, kubeconfig, make_certificates
from tests.cli import Ran, gpunode

NODE = "gpu-1"
ADVERTISE = ("node", "advertise", "--resource", "a.b/c", "--count", "1")
"""A change of the Node for tests of what leads to the API server."""
Gpunode = Callable[..., Ran]


def capacity(api: ApiServer) -> str | None:
    """Options and capacity of `ADVERTISE`."""
    amount: str | None = api.node(NODE)["status"]["capacity"].get("a.b/c")
    return amount


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def api(certificates: Path) -> Iterator[ApiServer]:
    """Listening, with the node gpu-1."""
    server = ApiServer()
    server.add_node(NODE, labels={"pool": "a"})
    with Listening(server, certificates):
        yield server


@pytest.fixture
def run(api: ApiServer, tmp_path: Path) -> Gpunode:
    """gpunode with a kubeconfig for `api`; HOME and KUBECONFIG are the test's, NODE_NAME is gpu-1.

    Its pauses take no time: a run that would wait an hour ends at once."""
    path = tmp_path / "kubeconfig"
    path.write_text(kubeconfig(api))
    # the kubelet of the machine that runs the tests may have a device plugin
    no_kubelet = {
        "gpunode.facts.kubelet:ROOT": str(tmp_path / "kubelet"),
        "gpunode.facts.kubelet:DEVICE_PLUGINS": str(tmp_path / "kubelet/device-plugins"),
    }

    def call(*argv: str, constants: Mapping[str, object] = {}, **env: str) -> Ran:
        own = {"HOME": str(tmp_path), "KUBECONFIG": str(path), "NODE_NAME": NODE, **env}
        return gpunode(*argv, env=own, constants={**no_kubelet, **constants}, sleepless=True)

    return call
