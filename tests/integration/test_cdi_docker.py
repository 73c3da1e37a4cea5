"""gpunode's CDI specification in a real dockerd 28.5, without any hook and without any nvidia runtime."""

import os
import platform

import pytest

from fixtures.driver_tree import driver_tree
from fixtures.engines import start_dockerd
from fixtures.layouts import as_entries, make_root
from fixtures.newer_engines import Unavailable, search_path
from fixtures.scenario import machine
from gpunode.daemons.docker import DockerApi
from gpunode.host import Host
from gpunode.runtime.verify.image import ImageConfig, archive, layer
from tests.cli import gpunode
from tests.integration.conftest import refuse_for, require

pytestmark = [
    pytest.mark.xdist_group("cdi_docker"),
    pytest.mark.full,
    pytest.mark.docker,
    pytest.mark.containers,
]
LAYOUTS = ("debian", "rhel")


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    require("runc", "gcc")
    if platform.machine() != "x86_64":
        refuse_for(["an x86-64 machine, whose loader the layouts are made of"])
    node = driver_tree(tmp_path_factory.mktemp("node"), machine(2))
    only_for_a_group = node.dev_root / "dev/nvidia1"
    os.chown(only_for_a_group, 0, 44)
    only_for_a_group.chmod(0o660)
    specs = tmp_path_factory.mktemp("cdi")
    output = ("--output", str(specs / "nvidia.yaml"))
    ran = gpunode("cdi", "generate", *node.options, "--hooks", "none", *output, env=node.env)
    assert ran.code == 0, ran.err
    try:
        path = search_path("forky")
    except Unavailable as reason:
        refuse_for([f"dockerd 28.5: {reason}"])
    config = {"features": {"cdi": True}, "cdi-spec-dirs": [str(specs)]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", path)
        with start_dockerd(config) as engine:
            for layout in LAYOUTS:
                root = make_root(tmp_path_factory.mktemp(layout), layout)
                image = ImageConfig("amd64", ("/usr/bin/probe",))
                data = archive(f"gpunode.test/{layout}:1", layer(as_entries(root)), image)
                DockerApi(Host(), engine.socket).load_image(data)
            yield engine


@pytest.mark.parametrize("user", ["", "1000:1000"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_container_gets_its_gpu_and_the_libraries_by_device_name(layout, user, engine):
    """For every user: Docker ignores the groups that a specification adds to a container with a user."""
    api = DockerApi(Host(), engine.socket)
    probed = ["libcuda.so.1", "libnvidia-ml.so.1", "/dev/nvidia1", "/dev/nvidia-uvm", "/dev/nvidia0"]
    request = {"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=1"]}
    settings = {"DeviceRequests": [request], "NetworkMode": "none"}
    specification = {"Image": f"gpunode.test/{layout}:1", "Cmd": probed, "HostConfig": settings, "User": user}
    container = api.create_container(specification, f"probe-{os.urandom(4).hex()}")
    try:
        api.start_container(container, 30.0)
        assert api.wait_container(container, 30.0) == 0
        lines = api.logs(container)[0].splitlines()
    finally:
        api.remove_container(container)
    assert lines == [
        "libcuda.so.1 loads",
        "libnvidia-ml.so.1 loads",
        "/dev/nvidia1 opens as 1:3",
        "/dev/nvidia-uvm opens as 1:3",
        "/dev/nvidia0 absent",
    ]
