"""From Allocate to a container: podman starts one with the CDI names of the plugin's response.

The plugin is a separate process in a mount namespace, so that its /var/run/cdi is private; the kubelet is
the stub; NVML is the C stub; device files have the numbers of /dev/null.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fixtures.driver_tree import CONTROL, make_nodes, put_libraries
from fixtures.layouts import make_root
from fixtures.scenario import machine, mig_uuid, mixed_layout, with_mig
from fixtures.stubs import stub_node
from gpunode.host import Host
from tests.integration.conftest import refuse_for, require
from tests.integration.test_cdi_podman import podman
from tests.plugin.kubelet_stub import KubeletStub
from tests.waiting import PATIENCE, eventually

pytestmark = [
    pytest.mark.xdist_group("plugin_cdi"),
    pytest.mark.full,
    pytest.mark.podman,
    pytest.mark.containers,
]
GPUS, CUT = 3, 2
# a /run of its own for the specifications, and the driver's table of MIG capabilities
NAMESPACE = 'mount -t tmpfs -o mode=755 tmpfs /run && mount --bind "$1" /proc/driver && shift && exec "$@"'
SPECIFICATION = "run/cdi/k8s.device-plugin.nvidia.com-gpu.json"


def driver_root(root):
    """Libraries and device files of three GPUs, the last of them in MIG mode."""
    scenario = with_mig(machine(GPUS), CUT, mixed_layout(CUT))
    put_libraries(root / f"usr/lib/{platform.machine()}-linux-gnu", scenario.driver)
    make_nodes(root, [*CONTROL, *(f"nvidia{index}" for index in range(GPUS))])
    places = [part for mig in mixed_layout(CUT) for part in (f"gi{mig.gi}", f"gi{mig.gi}/ci{mig.ci}")]
    make_nodes(root, (f"nvidia-caps/nvidia-cap{number}" for number, _ in enumerate(places, 1)))
    table = root / "driver/nvidia-caps/mig-minors"
    table.parent.mkdir(parents=True)
    table.write_text("".join(f"gpu{CUT}/{place}/access {n}\n" for n, place in enumerate(places, 1)))
    return scenario


class Plugin:
    """One `gpunode plugin serve`, with its output."""

    def __init__(self, directory: Path, root: Path, scenario, *options: str) -> None:
        self.log = directory / "log"
        sockets = directory / "dp"
        sockets.mkdir()
        self.kubelet = KubeletStub(Host(), str(sockets))
        self.kubelet.start()
        argv = ["unshare", "--mount", "sh", "-c", NAMESPACE, "sh", str(root / "driver")]
        argv += [sys.executable, "-m", "gpunode", "plugin", "serve", "--mig-strategy", "mixed"]
        argv += ["--kubelet-socket", str(sockets / "kubelet.sock"), "--state-dir", str(directory / "state")]
        argv += ["--driver-root", str(root), "--cdi-disable-hooks", "all", *options]
        argv += ["--rediscover-seconds", "0.5"]
        self.stubs = stub_node(directory, scenario, libraries="nvml")
        env = {**os.environ, **self.stubs.env}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(argv, env=env, stdout=log, stderr=log)

    @property
    def specification(self) -> Path:
        return Path(f"/proc/{self.process.pid}/root/{SPECIFICATION}")

    def names(self) -> list[str]:
        return [device["name"] for device in json.loads(self.specification.read_text())["devices"]]

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(PATIENCE)
        self.kubelet.stop()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    require("podman", "runc", "gcc", "unshare")
    if platform.machine() != "x86_64":
        refuse_for(["an x86-64 machine, whose loader the layouts are made of"])
    if not Path("/proc/driver").is_dir():
        refuse_for(["a kernel with /proc/driver"])
    made = tmp_path_factory.mktemp("driver")
    return made, driver_root(made)


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    return make_root(tmp_path_factory.mktemp("images"), "debian")


@pytest.fixture(scope="module")
def plugin(root):
    with tempfile.TemporaryDirectory(prefix="gp-") as name:
        made = Plugin(Path(name), *root, "--device-list-strategy", "cdi-cri,cdi-annotations")
        try:
            yield made
        finally:
            made.end()


def started(plugin, image, names, *arguments):
    """Devices that a container with these CDI names sees."""
    devices = [word for name in names for word in ("--device", name)]
    copied = plugin.log.parent / "gpu.json"
    copied.write_bytes(plugin.specification.read_bytes())
    done = podman(copied, *devices, "--rootfs", str(image), "/usr/bin/probe", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_container_gets_exactly_the_gpus_that_allocate_names(plugin, image):
    assert plugin.kubelet.wait_allocatable("nvidia.com/gpu", 2, PATIENCE), plugin.log.read_text()
    given = plugin.kubelet.allocate("nvidia.com/gpu", 1)
    assert not given.envs
    (name,) = given.cdi
    assert list(given.annotations.values()) == [name]
    index = int(name.rpartition("=GPU-")[2][:8], 16)
    probed = (f"/dev/nvidia{index}", f"/dev/nvidia{1 - index}", "/dev/nvidiactl", "libcuda.so.1")
    assert started(plugin, image, [name], *probed) == [
        f"/dev/nvidia{index} opens as 1:3",
        f"/dev/nvidia{1 - index} absent",
        "/dev/nvidiactl opens as 1:3",
        "libcuda.so.1 loads",
    ]


def test_container_gets_its_mig_device_with_its_two_capabilities(plugin, image):
    assert plugin.kubelet.wait_allocatable("nvidia.com/mig-2g.20gb", 1, PATIENCE), plugin.log.read_text()
    given = plugin.kubelet.allocate("nvidia.com/mig-2g.20gb", 1)
    (name,) = given.cdi
    probed = [f"/dev/nvidia-caps/nvidia-cap{number}" for number in range(1, 6)]
    lines = started(plugin, image, [name], f"/dev/nvidia{CUT}", "/dev/nvidia0", *probed)
    opened = {path for path, _, rest in (line.partition(" ") for line in lines) if rest == "opens as 1:3"}
    assert opened == {f"/dev/nvidia{CUT}", probed[2], probed[3]}


def test_changed_layout_is_in_the_specification_before_it_is_advertised(root):
    made, scenario = root
    first, second, *rest = (mig_uuid(CUT, index) for index in range(4))
    with tempfile.TemporaryDirectory(prefix="gp-") as name:
        plugin = Plugin(Path(name), made, scenario, "--device-list-strategy", "cdi-cri")
        try:
            assert plugin.kubelet.wait_allocatable("nvidia.com/mig-1g.10gb", 1, PATIENCE), (
                plugin.log.read_text()
            )
            assert {first, second, *rest} < set(plugin.names())
            plugin.stubs.write(with_mig(machine(GPUS), CUT, mixed_layout(CUT)[:2]))
            assert plugin.kubelet.wait_allocatable("nvidia.com/mig-1g.10gb", 0, PATIENCE), (
                plugin.log.read_text()
            )
            assert eventually(lambda: not set(rest) & set(plugin.names()))
            assert {first, second} < set(plugin.names())
        finally:
            plugin.end()


def test_gpus_without_a_specification_are_advertised_as_unhealthy(root):
    _, scenario = root
    with tempfile.TemporaryDirectory(prefix="gp-") as name:
        empty = Path(name) / "empty"
        (empty / "driver").mkdir(parents=True)
        plugin = Plugin(Path(name), empty, scenario, "--device-list-strategy", "cdi-cri")
        try:
            assert eventually(lambda: plugin.kubelet.capacity("nvidia.com/gpu") == 2)
            assert plugin.kubelet.allocatable("nvidia.com/gpu") == 0
            assert eventually(lambda: "libcuda.so.535.104.05" in plugin.log.read_text())
            assert eventually(lambda: "code=cdi" in plugin.log.read_text())
            put_libraries(empty / f"usr/lib/{platform.machine()}-linux-gnu", scenario.driver)
            make_nodes(empty, [*CONTROL, *(f"nvidia{index}" for index in range(GPUS))])
            assert plugin.kubelet.wait_allocatable("nvidia.com/gpu", 2, PATIENCE), plugin.log.read_text()
        finally:
            plugin.end()
