"""gpunode's CDI specification in containerd 2.1's CRI, without any hook and without any nvidia runtime."""

import os
import platform
import subprocess

import pytest

from fixtures import images
from fixtures.driver_tree import driver_tree, make_nodes
from fixtures.engines import CONTAINERD_2_CONFIG, start_containerd
from fixtures.layouts import as_entries, make_root
from fixtures.newer_engines import Unavailable, search_path
from fixtures.scenario import machine
from gpunode.daemons import cri_pods
from gpunode.daemons.cri import Cri
from gpunode.errors import DaemonError
from gpunode.host import Host
from gpunode.runtime.verify.image import ImageConfig, archive, layer
from tests.cli import gpunode
from tests.integration.conftest import refuse_for, require
from tests.waiting import PATIENCE, eventually

pytestmark = [
    pytest.mark.xdist_group("cdi_containerd"),
    pytest.mark.full,
    pytest.mark.containerd,
    pytest.mark.containers,
]
LAYOUTS = ("debian", "rhel")
CDI = """\
  enable_cdi = true
  cdi_spec_dirs = ["{directory}/etc-cdi", "{directory}/run-cdi"]
"""


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    require("runc", "gcc")
    if platform.machine() != "x86_64":
        refuse_for(["an x86-64 machine, whose loader the layouts are made of"])
    return driver_tree(tmp_path_factory.mktemp("node"), machine(2))


@pytest.fixture(scope="module")
def engine(node, tmp_path_factory):
    try:
        path = search_path("forky")
    except Unavailable as reason:
        refuse_for([f"containerd 2.x: {reason}"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", path)
        with start_containerd(CONTAINERD_2_CONFIG + CDI, path=path) as engine:
            images.load_pause(engine)
            for layout in LAYOUTS:
                root = make_root(tmp_path_factory.mktemp(layout), layout)
                config = ImageConfig("amd64", ("/usr/bin/probe",))
                name = f"gpunode.test/{layout}:1"
                data = archive(name, layer(as_entries(root)), config)
                argv = ["ctr", "-a", engine.socket, "-n", "k8s.io", "images", "import", "-"]
                subprocess.run(argv, input=data, check=True, capture_output=True, timeout=PATIENCE)
                images.wait_for_cri(engine, name, known=True)
            yield engine


def generate(engine, node):
    """Write the standard file of this private containerd, as a refresh does."""
    path = engine.directory / "run-cdi/nvidia.yaml"
    ran = gpunode("cdi", "generate", *node.options, "--hooks", "none", "--output", str(path), env=node.env)
    assert ran.code == 0, ran.err
    return ran.out.splitlines()[0].rpartition(" ")[2]


def probe(engine, layout, device, *arguments):
    """Libraries and device files that a container with this device sees."""
    token = f"{layout}-{os.urandom(4).hex()}"
    logs = engine.directory / "logs" / token
    logs.mkdir(parents=True)
    image = f"gpunode.test/{layout}:1"
    pod = cri_pods.Pod(token, "", image, str(logs), tuple(arguments), devices=(f"nvidia.com/gpu={device}",))

    def printed():
        return cri_pods.read_log((logs / cri_pods.LOG_NAME).read_text())[0].splitlines()

    with Cri(Host(), engine.socket) as cri:
        try:
            container = cri_pods.start_pod(cri, pod)
            assert eventually(lambda: cri_pods.container_exit(cri, container) is not None)
            # a line for each argument; containerd may report the exit before it has written them
            assert eventually(lambda: len(printed()) == len(arguments)), printed()
        finally:
            for sandbox in cri_pods.sandboxes(cri, pod.label):
                cri_pods.remove_sandbox(cri, sandbox)
    return printed()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pod_gets_its_gpu_and_the_libraries_by_device_name(layout, engine, node):
    generate(engine, node)
    lines = probe(engine, layout, "1", "libcuda.so.1", "libnvidia-ml.so.1", "/dev/nvidia1", "/dev/nvidia0")
    assert lines == [
        "libcuda.so.1 loads",
        "libnvidia-ml.so.1 loads",
        "/dev/nvidia1 opens as 1:3",
        "/dev/nvidia0 absent",
    ]


def test_undefined_device_is_refused_by_name(engine, node):
    generate(engine, node)
    with pytest.raises(DaemonError, match=r"unresolvable CDI devices nvidia\.com/gpu=7"):
        probe(engine, "debian", "7", "/dev/nvidia7")


def test_changed_device_number_reaches_the_running_daemon(engine, node):
    """The daemon caches device numbers; a file that changes with them makes it read them again."""
    generate(engine, node)
    assert probe(engine, "debian", "0", "/dev/nvidia0") == ["/dev/nvidia0 opens as 1:3"]
    device = node.dev_root / "dev/nvidia0"
    device.unlink()
    try:
        make_nodes(node.dev_root, ["nvidia0"], os.makedev(1, 5))  # /dev/zero
        assert probe(engine, "debian", "0", "/dev/nvidia0") == ["/dev/nvidia0 opens as 1:3"]
        assert generate(engine, node) == "updated"
        assert probe(engine, "debian", "0", "/dev/nvidia0") == ["/dev/nvidia0 opens as 1:5"]
    finally:
        device.unlink()
        make_nodes(node.dev_root, ["nvidia0"])
        assert generate(engine, node) == "updated"
