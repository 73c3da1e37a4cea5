"""The plugin's DaemonSet with exactly the rights of its manifest: its container, started by runc.

Capabilities, mounts, the read-only root and the flag against new privileges are the manifest's. The image is
this machine under an overlay, the kubelet gpunode's stub, and the files of NVIDIA's runtime are the stub's.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from fixtures.scenario import mig_machine, mixed_layout, with_mig
from fixtures.stubs import SCENARIO_VARIABLE, build, have_compiler
from gpunode.host import Host
from tests.cli import REPOSITORY, gpunode
from tests.integration.conftest import refuse_for, require
from tests.plugin.kubelet_stub import KubeletStub
from tests.waiting import PATIENCE, eventually

pytestmark = [pytest.mark.containers, pytest.mark.full]
DEVICE_PLUGINS = "/var/lib/kubelet/device-plugins"
_PROGRAM, _SOURCE = "/mnt/venv", "/mnt/source"  # the pod's own /tmp would hide a checkout below it
_RUN = """\
set -e
mount -t tmpfs tmpfs "$1/over" && mkdir "$1/over/upper" "$1/over/work"
mount -t overlay -o "lowerdir=/,upperdir=$1/over/upper,workdir=$1/over/work" overlay "$1/bundle/rootfs"
exec runc --root "$1/runc" run --bundle "$1/bundle" "$2"
"""


class PluginPod:
    """The manifest's container on a node whose files are below `place`."""

    def __init__(self, place: Path, *options: str) -> None:
        ran = gpunode("manifests", "daemon-set", "--image", "registry.test/gpunode:1", *options)
        assert ran.code == 0, ran.err
        self.place = place
        self.pod: dict[str, Any] = list(yaml.safe_load_all(ran.out))[-1]["spec"]["template"]["spec"]
        (self.container,) = self.pod["containers"]
        self.node = place / "node"
        (self.node / DEVICE_PLUGINS.lstrip("/")).mkdir(parents=True)
        self.stub = KubeletStub(Host(), str(self.node / DEVICE_PLUGINS.lstrip("/")))
        scenario = mig_machine("h100", "h100")
        scenario = with_mig(scenario, 0, mixed_layout(0)) if "--mig" in options else scenario
        (place / "stub").mkdir()
        scenario.write(place / "stub/scenario")

    def _mounts(self) -> Iterator[dict[str, Any]]:
        yield {"destination": "/proc", "type": "proc", "source": "proc"}
        yield {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["mode=755"]}
        volumes = {one["name"]: one for one in self.pod["volumes"]}
        for mount in self.container["volumeMounts"]:
            source = self._source(volumes[mount["name"]])
            yield _bind(source, mount["mountPath"], "ro" if mount.get("readOnly") else "rw")
        yield _bind(Path(sys.prefix), _PROGRAM, "ro")
        yield _bind(REPOSITORY / "gpunode", f"{_SOURCE}/gpunode", "ro")
        # as NVIDIA's runtime does; gpunode's own part is tested
        library = f"/usr/lib/{platform.machine()}-linux-gnu/libnvidia-ml.so.1"
        yield _bind(build() / "all/libnvidia-ml.so.1", library, "ro")
        yield _bind(self.place / "stub", "/run/stub", "rw")

    def _source(self, volume: Mapping[str, Any]) -> Path:
        """The kubelet creates the permitted directories, and refuses to start a pod without the rest."""
        if "emptyDir" in volume:
            empty: Path = self.place / "empty" / volume["name"]
            empty.mkdir(parents=True)
            return empty
        path: Path = self.node / volume["hostPath"]["path"].lstrip("/")
        if volume["hostPath"]["type"] == "DirectoryOrCreate":
            path.mkdir(parents=True, exist_ok=True)
        assert path.is_dir(), f"the pod would not start without {path}"
        return path

    def _spec(self) -> dict[str, Any]:
        rights = self.container["securityContext"]
        assert rights["capabilities"]["drop"] == ["ALL"]
        added = [f"CAP_{one}" for one in rights["capabilities"].get("add", ())]
        environ = {one["name"]: one["value"] for one in self.container["env"] if "value" in one}
        environ |= {"PATH": os.environ["PATH"], "PYTHONPATH": _SOURCE, "PYTHONDONTWRITEBYTECODE": "1"}
        environ |= {SCENARIO_VARIABLE: "/run/stub/scenario"}
        return {
            "ociVersion": "1.0.2",
            "root": {"path": "rootfs", "readonly": rights["readOnlyRootFilesystem"]},
            "process": {
                "args": [f"{_PROGRAM}/bin/python", "-m", "gpunode", *self.container["args"]],
                "cwd": "/",
                "env": [f"{name}={value}" for name, value in environ.items()],
                "user": {"uid": rights["runAsUser"], "gid": 0},
                "noNewPrivileges": not rights["allowPrivilegeEscalation"],
                "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), added),
            },
            "mounts": list(self._mounts()),
            "linux": {"namespaces": [{"type": one} for one in ("pid", "mount", "ipc", "uts", "network")]},
        }

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        """Afterwards it is ended as a pod is: by SIGTERM, with exit code 0."""
        self.stub.start()
        for part in ("over", "runc", "bundle/rootfs"):
            (self.place / part).mkdir(parents=True)
        (self.place / "bundle/config.json").write_text(json.dumps(self._spec()))
        name = f"gpunode-test-{os.getpid()}-{self.place.name}"
        argv = ("unshare", "--mount", "sh", "-c", _RUN, "sh", str(self.place), name)
        with (
            (self.place / "log").open("wb") as log,
            subprocess.Popen(argv, stdout=log, stderr=log) as process,
        ):
            try:
                yield process
                process.send_signal(signal.SIGTERM)  # runc passes it on
                assert process.wait(PATIENCE) == 0, self.log()
            finally:
                process.kill()
                delete = ("runc", "--root", str(self.place / "runc"), "delete", "--force", name)
                subprocess.run(delete, check=False, capture_output=True)
                self.stub.stop()

    def log(self) -> str:
        return (self.place / "log").read_text()


def _bind(source: Path, target: str, how: str) -> dict[str, Any]:
    return {"destination": target, "type": "bind", "source": str(source), "options": ["rbind", how]}


@pytest.fixture
def place() -> Iterator[Path]:
    """Short, because sockets have short paths."""
    with tempfile.TemporaryDirectory(prefix="gp-") as name:
        yield Path(name)


@pytest.mark.parametrize(
    ("options", "resources"),
    [
        (("--metrics-port", "9400", "--labels", "file"), {"nvidia.com/gpu": 2}),
        (("--mig", "mixed"), {"nvidia.com/gpu": 1, "nvidia.com/mig-3g.40gb": 1}),
    ],
    ids=" ".join,
)
def test_rbac_rules_of_the_manifest_are_sufficient(
    place: Path, options: tuple[str, ...], resources: dict[str, int]
) -> None:
    require("runc", "unshare")
    refuse_for([] if have_compiler() else ["gcc"])
    plugin = PluginPod(place, *options)
    with plugin.running():
        for name, count in resources.items():
            assert plugin.stub.wait_allocatable(name, count, PATIENCE), plugin.log()
        assert plugin.stub.allocate(next(iter(resources)), 1).ids
        features = plugin.node / "etc/kubernetes/node-feature-discovery/features.d/gfd"
        if "file" in options:
            assert eventually(features.exists), plugin.log()
            assert "nvidia.com/gpu.count=2" in features.read_text()
    assert "level=error" not in plugin.log() and "level=warning" not in plugin.log(), plugin.log()
