"""gpunode's CDI specification in a real podman, without any hook: devices open and libraries load.

Podman 4.3 reads /etc/cdi and /var/run/cdi only, so it runs in a mount namespace with its own /run,
which also contains all of podman's leftovers.
"""

import os
import platform
import shlex
import subprocess

import pytest

from fixtures.driver_tree import driver_tree
from fixtures.layouts import LAYOUTS, make_root
from fixtures.scenario import machine
from tests.cli import gpunode
from tests.integration.conftest import refuse_for, require
from tests.waiting import PATIENCE

pytestmark = [
    pytest.mark.xdist_group("cdi_podman"),
    pytest.mark.full,
    pytest.mark.podman,
    pytest.mark.containers,
]
LIBRARIES = ("libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1", "libcuda.so.535.104.05")
# no crun: it refuses this machine's hybrid cgroups; the limits need no CAP_SYS_RESOURCE
PODMAN = (
    "podman --root /run/p/root --runroot /run/p/run --tmpdir /run/p/tmp --storage-driver vfs --runtime runc"
    " --cgroup-manager cgroupfs --events-backend none run --rm --network none"
    " --ulimit nofile=1024:1024 --ulimit nproc=1024:1024"
)


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    require("podman", "runc", "gcc", "unshare")
    if platform.machine() != "x86_64":
        refuse_for(["an x86-64 machine, whose loader the layouts are made of"])
    return driver_tree(tmp_path_factory.mktemp("node"), machine(12))


@pytest.fixture(scope="module")
def roots(node, tmp_path_factory):
    directory = tmp_path_factory.mktemp("roots")
    return {layout: make_root(directory, layout) for layout in LAYOUTS}


@pytest.fixture(scope="module", params=["yaml", "json"])
def specification(request, node, tmp_path_factory):
    path = tmp_path_factory.mktemp("cdi") / f"nvidia.{request.param}"
    ran = gpunode("cdi", "generate", *node.options, "--hooks", "none", "--output", str(path), env=node.env)
    assert ran.code == 0, ran.err
    return path


def podman(specification, *arguments):
    """`podman run` with this file as the only specification of the node."""
    place = "mount -t tmpfs -o mode=755 tmpfs /run && mkdir -p /run/cdi /run/lock"
    script = f"{place} && cp {specification} /run/cdi/ && {PODMAN} {shlex.join(arguments)}"
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", script],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_libraries_load_and_the_device_opens_in_any_layout(layout, specification, roots):
    probed = ("/dev/nvidia10", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia2")
    device = ("--device", "nvidia.com/gpu=10", "--rootfs", str(roots[layout]))
    done = podman(specification, *device, "/usr/bin/probe", *LIBRARIES, *probed)
    expected = [f"{name} loads" for name in LIBRARIES]
    expected += [f"{path} opens as 1:3" for path in probed[:3]] + ["/dev/nvidia2 absent"]
    assert (done.returncode, done.stdout.splitlines(), done.stderr) == (0, expected, "")


def test_hooks_get_the_arguments_that_nvidia_cdi_hook_expects(node, roots, tmp_path):
    """The program is a stub that records its arguments: NVIDIA's own is in no distribution."""
    log, path = tmp_path / "log", tmp_path / "nvidia.yaml"
    program = tmp_path / "bin/nvidia-cdi-hook"
    program.parent.mkdir()
    names = "create-symlinks  x\n   update-ldcache  x\n   enable-cuda-compat  x"
    help_text = f"COMMANDS:\n   {names}\n\nGLOBAL OPTIONS:\n"
    program.write_text(
        f'#!/bin/sh\n[ "$1" = --help ] && {{ printf "%s" "{help_text}"; exit; }}\necho "$0 $*" >> {log}\n'
    )
    program.chmod(0o755)
    env = {**node.env, "PATH": f"{program.parent}:{os.environ['PATH']}"}
    ran = gpunode("cdi", "generate", *node.options, "--output", str(path), env=env)
    assert ran.code == 0, ran.err
    device = ("--device", "nvidia.com/gpu=0", "--rootfs", str(roots["debian"]))
    done = podman(path, *device, "/usr/bin/probe", "/dev/nvidia0")
    assert done.stdout == "/dev/nvidia0 opens as 1:3\n", done.stderr
    libraries = node.libraries
    assert [line.split()[1] for line in log.read_text().splitlines()] == [
        "create-symlinks", "enable-cuda-compat", "update-ldcache",
    ]  # fmt: skip
    assert f"--link libcuda.so.535.104.05::{libraries}/libcuda.so.1" in log.read_text()
    assert f"update-ldcache --folder {libraries}" in log.read_text()


@pytest.mark.parametrize("name", ["all", "GPU-0000000b-1111-4222-8333-444444444444"])
def test_device_is_found_under_every_kind_of_name(name, specification, roots):
    device = ("--device", f"nvidia.com/gpu={name}", "--rootfs", str(roots["debian"]))
    done = podman(specification, *device, "/usr/bin/probe", "/dev/nvidia11", "/dev/nvidia0")
    opened = "opens as 1:3" if name == "all" else "absent"
    assert done.stdout.splitlines() == ["/dev/nvidia11 opens as 1:3", f"/dev/nvidia0 {opened}"], done.stderr


def test_host_library_replaces_a_library_of_the_image(specification, roots):
    """An image with its own driver: a link to another version, over which the host's is mounted."""
    libraries = roots["debian"] / "usr/lib/x86_64-linux-gnu"
    (libraries / "libcuda.so.1").unlink(missing_ok=True)
    (libraries / "libcuda.so.470.1").write_text("not a library at all")
    os.symlink("libcuda.so.470.1", libraries / "libcuda.so.1")
    device = ("--device", "nvidia.com/gpu=0", "--rootfs", str(roots["debian"]))
    done = podman(specification, *device, "/usr/bin/probe", "libcuda.so.1")
    (libraries / "libcuda.so.1").unlink()
    assert done.stdout == "libcuda.so.1 loads\n", done.stderr
