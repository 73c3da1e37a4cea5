"""gpunode's container image, made by `make image` in a fresh checkout and run as the DaemonSet's container.

dockerd is real, the base is made here, and there is no network. The kubelet, the libraries of the driver and
the runtime of NVIDIA are stand-ins of gpunode.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from fixtures.debian_base import image_base
from fixtures.engines import Engine, start_dockerd
from fixtures.machines import recorded_host
from fixtures.mps_control import mps_stub
from fixtures.newer_engines import Unavailable
from gpunode import __version__
from gpunode.host import Host
from tests.cli import REPOSITORY, gpunode
from tests.dist import BUNDLE, dist, fresh_checkout
from tests.integration.conftest import refuse_for, require
from tests.integration.verify_support import UUIDS, GpuNode, gpu_node
from tests.plugin.kubelet_stub import KubeletStub
from tests.waiting import PATIENCE, eventually

__all__ = ["dist"]
pytestmark = [
    pytest.mark.xdist_group("image"),
    pytest.mark.full,
    pytest.mark.docker,
    pytest.mark.containers,
]
BASE, IMAGE = "gpunode.test/python:1", f"gpunode:{__version__}"
LIMIT = 120_000_000
"""Bytes of all layers, the base's included, not compressed."""
SECONDS = 600.0
PYTHON = "/opt/gpunode/bin/python3"
DEVICE_PLUGINS = "/var/lib/kubelet/device-plugins"


@dataclass(frozen=True)
class Docker:
    """The command line of docker, for one daemon."""

    engine: Engine
    home: Path

    @property
    def program(self) -> tuple[str, ...]:
        return ("docker", "--host", f"unix://{self.engine.socket}")

    @property
    def env(self) -> dict[str, str]:
        """For the classic builder, the only one without a further download."""
        return {"PATH": os.environ["PATH"], "DOCKER_BUILDKIT": "0", "DOCKER_CONFIG": str(self.home)}

    def __call__(self, *argv: str, code: int = 0) -> str:
        """Output of a command that exits with `code`: stdout, else stderr; of one that fails both."""
        done = subprocess.run(
            [*self.program, *argv],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        both = done.stdout + done.stderr
        assert done.returncode == code, both
        return both if code else done.stdout or done.stderr

    def run(self, *argv: str, options: tuple[str, ...] = (), code: int = 0) -> str:
        """The image with these arguments, without a network, on a root that can't be written to."""
        return self("run", "--rm", "--network=none", "--read-only", *options, IMAGE, *argv, code=code)

    def layers(self) -> list[str]:
        found: list[str] = json.loads(self("image", "inspect", IMAGE))[0]["RootFS"]["Layers"]
        return found


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> GpuNode:
    require("dockerd", "docker", "containerd", "runc", "gcc", "mmdebstrap", "make", "git")
    return gpu_node(tmp_path_factory.mktemp("gpus"))


@pytest.fixture(scope="module")
def daemon(node: GpuNode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Docker]:
    """A daemon with the base of the image."""
    try:
        base = image_base()
    except Unavailable as reason:
        refuse_for([f"the base of an image ({reason})"])
    with start_dockerd({"runtimes": {"nvidia": {"path": str(node.nvidia)}}}) as engine:
        docker = Docker(engine, tmp_path_factory.mktemp("docker"))
        docker("import", str(base), BASE)
        yield docker


@pytest.fixture(scope="module")
def checkout(daemon: Docker, dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `make image` has made the image, from a bundle that exists."""
    place = fresh_checkout(tmp_path_factory.mktemp("checkout"))
    (place / "dist").mkdir()
    shutil.copy(dist / f"{BUNDLE}.tar.gz", place / "dist")
    variables = {
        "DOCKER": " ".join(daemon.program),
        "BUILD": f"--network=none --build-arg BASE={BASE}",
    }
    ours = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        ["make", "--old-file=bundle", "image", *(f"{name}={value}" for name, value in variables.items())],
        cwd=place,
        env={**ours, **daemon.env},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return place


@pytest.fixture(scope="module")
def docker(daemon: Docker, checkout: Path) -> Docker:
    """The daemon, which has the image."""
    assert (checkout / "dist").is_dir()
    return daemon


def build_image(docker: Docker, context: Path) -> None:
    options = ("--no-cache", "--network=none", "--build-arg", f"BASE={BASE}", "--tag", IMAGE)
    docker("build", *options, str(context))


def test_make_image_leaves_the_bundle_and_nothing_else(checkout: Path) -> None:
    assert [path.name for path in (checkout / "dist").iterdir()] == [f"{BUNDLE}.tar.gz"]


@pytest.fixture
def context(checkout: Path, tmp_path: Path) -> Path:
    """The offline bundle, unpacked by a user with a tight umask."""
    before = os.umask(0o077)
    try:
        with tarfile.open(checkout / f"dist/{BUNDLE}.tar.gz") as tar:
            tar.extractall(tmp_path, filter="data")
    finally:
        os.umask(before)
    return tmp_path / BUNDLE


def test_the_image_is_small_and_each_build_gives_the_same_layers(docker: Docker, context: Path) -> None:
    (image,) = json.loads(docker("image", "inspect", IMAGE))
    base = json.loads(docker("image", "inspect", BASE))[0]["Size"]
    print(f"{IMAGE}: {image['Size'] / 1e6:.1f} MB in all layers, {base / 1e6:.1f} MB of them the base")
    assert base < image["Size"] < LIMIT
    config = image["Config"]
    assert (config["User"], config["Entrypoint"], config["Cmd"]) == ("65532:65532", ["gpunode"], None)
    prefix = "org.opencontainers.image."
    labels = {name.removeprefix(prefix): value for name, value in config["Labels"].items()}
    assert (labels["title"], labels["version"], labels["licenses"]) == ("gpunode", __version__, "Apache-2.0")
    build_image(docker, context)
    (again,) = json.loads(docker("image", "inspect", IMAGE))
    assert again["RootFS"]["Layers"] == image["RootFS"]["Layers"]


def test_a_base_without_a_supported_python_is_refused(tmp_path: Path) -> None:
    (tmp_path / "opt/gpunode/lib/python3.2").mkdir(parents=True)
    program = [sys.executable, "-I", str(REPOSITORY / "packaging/image_root.py")]
    done = subprocess.run(
        [*program, str(tmp_path), str(tmp_path / "root")], capture_output=True, text=True, check=False
    )
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    assert done.returncode == 1
    assert done.stderr == f"error: the base image has {version}; gpunode needs one of python3.2\n"
    assert not (tmp_path / "root").exists()


def test_any_user_runs_what_asks_nothing_of_the_node(docker: Docker) -> None:
    assert docker.run("version") == f"gpunode {__version__}\n"
    assert docker.run("manifests", "all", "-o", "json") == gpunode("manifests", "all", "-o", "json").out
    assert docker.run("explain", "nouveau-loaded") == gpunode("explain", "nouveau-loaded").out
    refused = docker.run("configure-runtime", "--runtime", "docker", code=3)
    assert "error: " in refused and "Traceback" not in refused


def test_doctor_reads_a_mounted_node(docker: Docker, tmp_path: Path) -> None:
    root = tmp_path / "node"
    recorded_host("driver-lib-mismatch", root)
    mount = ("--user=0", f"--volume={root}:/host:ro")
    (inside,), (outside,) = (
        [json.loads(text)["data"]["findings"]]
        for text in (
            docker.run("doctor", "--root", "/host", "-o", "json", options=mount, code=1),
            gpunode("doctor", "--root", str(root), "-o", "json").out,
        )
    )
    assert [(one["id"], one["status"]) for one in inside] == [(one["id"], one["status"]) for one in outside]


INSPECT = """\
import json, sys
from importlib.util import find_spec
from pathlib import Path
import grpc, lightkube, prometheus_client, yaml
import gpunode.commands.plugin, gpunode.plugin.serve
cached = [getattr(module, "__cached__", None) for module in sys.modules.values()]
prefix = Path("/opt/gpunode")
found = {"not compiled": [name for name in cached if name and not Path(name).exists()]}
found["pip"] = find_spec("pip") is not None
found["shell"] = Path("/bin/sh").exists()
found["left"] = [name for name in ("/bundle", "/image") if Path(name).exists()]
files = [path for path in prefix.rglob("*") if not path.is_symlink()]
found["writable"] = [str(path) for path in files if path.stat().st_mode & 0o022]
libraries = list(prefix.glob("lib/**/*.dist-info"))
found["libraries"] = sorted(path.name for path in libraries)
licensed = [path for path in libraries if "License" in (path / "METADATA").read_text()]
found["with licence"] = sorted(path.name for path in licensed)
found["licence"] = Path("/usr/share/doc/gpunode/copyright").read_text()
print(json.dumps(found))
"""


def test_image_contains_only_the_expected_files(docker: Docker) -> None:
    options = ("run", "--rm", "--network=none", "--read-only", f"--entrypoint={PYTHON}", IMAGE)
    found = json.loads(docker(*options, "-c", INSPECT))
    assert found.pop("with licence") == found["libraries"] and len(found.pop("libraries")) > 20
    assert found.pop("licence") == (REPOSITORY / "LICENSE").read_text()
    assert found == {"not compiled": [], "pip": False, "shell": False, "writable": [], "left": []}


# --- as the DaemonSet -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pod:
    """The DaemonSet's pod on a node with its directories in `root`; `files` are those of its ConfigMap."""

    root: Path
    spec: Mapping[str, Any]
    files: Mapping[str, str]

    def options(self) -> Iterator[str]:
        """What ``docker run`` needs to give the container what a kubelet would. Fails for a field that isn't
        translated here; those that concern the cluster are left out by name."""
        rest = dict(self.spec)
        for name in ("serviceAccountName", "automountServiceAccountToken", "enableServiceLinks"):
            rest.pop(name)
        for name in ("priorityClassName", "affinity", "tolerations"):
            rest.pop(name)
        yield f"--runtime={rest.pop('runtimeClassName')}"
        yield from ("--pid=host",) if rest.pop("hostPID", False) else ()
        (container,) = rest.pop("containers")
        volumes = {one["name"]: one for one in rest.pop("volumes")}
        assert not rest, rest
        yield from self._container(dict(container), volumes)

    def _container(self, rest: dict[str, Any], volumes: Mapping[str, Any]) -> Iterator[str]:
        for name in ("name", "image", "args", "ports", "livenessProbe", "readinessProbe"):
            rest.pop(name, None)
        assert rest.pop("imagePullPolicy") == "Never"
        yield "--pull=never"
        (program,) = rest.pop("command")
        yield f"--entrypoint={program}"
        yield from (f"--env={one['name']}={one['value']}" for one in rest.pop("env"))
        yield "--env=KUBERNETES_SERVICE_HOST=10.96.0.1"  # as every pod has it
        limits = rest.pop("resources").get("limits", {})
        yield from (f"--{name}={value.removesuffix('i')}" for name, value in limits.items())
        yield from self._rights(rest.pop("securityContext"))
        for mount in rest.pop("volumeMounts"):
            yield self._mount(volumes[mount["name"]], **mount)
        assert not rest, rest

    def _rights(self, rest: dict[str, Any]) -> Iterator[str]:
        assert rest.pop("seccompProfile") == {"type": "RuntimeDefault"}  # Docker's default, too
        for name, option in (
            ("allowPrivilegeEscalation", "--security-opt=no-new-privileges"),
            ("readOnlyRootFilesystem", "--read-only"),
        ):
            yield option if rest.pop(name) is (option == "--read-only") else f"{name} isn't translated"
        yield f"--user={rest.pop('runAsUser')}"
        for how, names in rest.pop("capabilities").items():
            # build machines are often containers that lack it; only an MPS server needs it, and none starts
            yield from (f"--cap-{how}={name}" for name in names if name != "SYS_RESOURCE")
        assert not rest, rest

    def _mount(self, volume: Mapping[str, Any], name: str, mountPath: str, readOnly: bool = False) -> str:
        if "emptyDir" in volume:
            size = volume["emptyDir"]["sizeLimit"].removesuffix("i")
            return f"--tmpfs={mountPath}:rw,mode=1777,size={size}"
        if "configMap" in volume:
            path = self.root / "config"
            path.mkdir()
            for file, text in self.files.items():
                (path / file).write_text(text)
        else:
            path = self.root / volume["hostPath"]["path"].lstrip("/")
            if volume["hostPath"]["type"] == "DirectoryOrCreate":
                path.mkdir(parents=True, exist_ok=True)
            assert path.is_dir(), f"the pod would not start without {path}"
        return f"--volume={path}:{mountPath}:{'ro' if readOnly else 'rw'}"


@pytest.fixture
def kubelet() -> Iterator[tuple[KubeletStub, Path]]:
    """A kubelet's stand-in, and the root of its node; short, because sockets have short paths."""
    with tempfile.TemporaryDirectory(prefix="gp-", dir="/tmp") as name:
        with KubeletStub(Host(), f"{name}{DEVICE_PLUGINS}") as stub:
            yield stub, Path(name)


@contextmanager
def running(docker: Docker, root: Path, *options: str, more: tuple[str, ...] = ()) -> Iterator[str]:
    """The container of what ``gpunode manifests daemon-set`` prints, with `more` options of ``docker run``;
    afterwards SIGTERM has ended it."""
    *before, daemon_set = yaml.safe_load_all(docker.run("manifests", "daemon-set", *options))
    spec = daemon_set["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    flags = (*Pod(root, spec, before[0]["data"] if before else {}).options(), *more)
    name = docker("run", "--detach", "--network=none", *flags, container["image"], *container["args"]).strip()
    try:
        yield name
        docker("stop", "--time=30", name)
        (ended,) = json.loads(docker("inspect", name))
        assert (ended["State"]["ExitCode"], ended["State"]["OOMKilled"]) == (0, False), log(docker, name)
    finally:
        docker("rm", "--force", name)


def log(docker: Docker, name: str) -> str:
    return docker("logs", name)


def test_as_the_daemon_sets_container(docker: Docker, kubelet: tuple[KubeletStub, Path]) -> None:
    stub, root = kubelet
    with running(docker, root) as name:
        assert stub.wait_allocatable("nvidia.com/gpu", 2, PATIENCE), log(docker, name)
        allocated = stub.allocate("nvidia.com/gpu", 1)
        assert allocated.envs["NVIDIA_VISIBLE_DEVICES"] in UUIDS
        said = log(docker, name)
        assert "level=error" not in said and "level=warning" not in said, said
        stub.restart()
        assert stub.wait_allocatable("nvidia.com/gpu", 2, PATIENCE), log(docker, name)
    assert eventually(lambda: stub.allocatable("nvidia.com/gpu") == 0)
    left = {path.name for path in (root / DEVICE_PLUGINS.lstrip("/")).iterdir()}
    assert not [path for path in left if path.endswith(".sock") and path != "kubelet.sock"]


PROBE = f"""\
import sys, time, urllib.error, urllib.request
def status(path):
    try:
        return urllib.request.urlopen("http://127.0.0.1:9400" + path, timeout={PATIENCE}).status
    except urllib.error.HTTPError as error:
        return error.code
deadline = time.monotonic() + {PATIENCE}
for path in sys.argv[1:]:
    # the kubelet has the GPUs before the plugin has seen that
    while status(path) == 503 and time.monotonic() < deadline:
        time.sleep(0.1)
    print(path, status(path))
"""


def test_the_probes_of_the_manifest_succeed(docker: Docker, kubelet: tuple[KubeletStub, Path]) -> None:
    stub, root = kubelet
    with running(docker, root, "--metrics-port", "9400") as name:
        assert stub.wait_allocatable("nvidia.com/gpu", 2, PATIENCE), log(docker, name)
        said = docker("exec", name, PYTHON, "-c", PROBE, "/healthz", "/readyz", "/metrics")
        assert said == "/healthz 200\n/readyz 200\n/metrics 200\n"


def test_mps_clients_of_every_user_share_memory(docker: Docker, kubelet: tuple[KubeletStub, Path]) -> None:
    stub, root = kubelet
    shared = root / "run/nvidia/mps/shm"
    program = mps_stub(root / "mps", PYTHON).program
    # where NVIDIA's runtime brings it
    driver = (f"--volume={program}:/usr/bin/{program.name}:ro",)
    with running(docker, root, "--mps", "2", more=driver) as name:
        assert eventually(lambda: stub.capacity("nvidia.com/gpu") == 4), log(docker, name)
        assert eventually(lambda: stat.S_IMODE(shared.stat().st_mode) == 0o1777), log(docker, name)
