"""A node with only a driver: its libraries and device files in their own root.

The libraries are stubs, the device files have NVIDIA's major number and no driver behind them: engines and
runc only create nodes of those numbers, and the stubs open none.
"""

from __future__ import annotations

import os
import platform
import shutil
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path

import yaml

from fixtures.scenario import Scenario, mixed_layout
from fixtures.stubs import SCENARIO_IN_CONTAINER, StubNode, stub_node
from tests.cli import clean_environment, command
from tests.waiting import PATIENCE

_MAJOR, _CAPS_MAJOR = 195, 240
# the table of MIG's capabilities is the kernel's, so the directory above it is replaced
_WITH_CAPABILITIES = 'mount --bind "$1" /proc/driver && shift && exec "$@"'


@dataclass(frozen=True)
class CdiNode:
    """`root` holds the driver's libraries and dev/; `specs` is a directory of CDI specifications."""

    root: Path
    specs: Path
    stubs: StubNode
    scenario: Scenario

    @property
    def file(self) -> Path:
        return self.specs / "nvidia.yaml"

    @property
    def libcuda(self) -> Path:
        machine = f"{platform.machine()}-linux-gnu"
        return self.root / f"usr/lib/{machine}/libcuda.so.{self.scenario.driver}"

    def generate(self) -> CdiNode:
        """Have gpunode write the specification; the scenario that the stubs read is added to its mounts."""
        options = ("--hooks", "none", "--driver-root", str(self.root), "--output", str(self.file))
        argv = ["unshare", "--mount", "sh", "-c", _WITH_CAPABILITIES, "sh", str(self.root / "driver")]
        argv += command("cdi", "generate", *options)
        environ = clean_environment(self.stubs.env)
        done = subprocess.run(
            argv, env=environ, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        assert done.returncode == 0, done.stderr
        tree = yaml.safe_load(self.file.read_text())
        assert "hooks" not in tree["containerEdits"]
        scenario = {"hostPath": str(self.stubs.scenario_path), "containerPath": SCENARIO_IN_CONTAINER}
        tree["containerEdits"]["mounts"].append({**scenario, "options": ["ro", "rbind"]})
        self.write(tree)
        return self

    def tree(self) -> dict[str, object]:
        """The specification as data."""
        loaded = yaml.safe_load(self.file.read_text())
        assert isinstance(loaded, dict)
        return loaded

    def write(self, tree: dict[str, object]) -> None:
        """Replace the specification, as every writer must: by a rename in the directory."""
        new = self.specs / ".new"
        new.write_text(yaml.safe_dump(tree))
        new.rename(self.file)


def cdi_node(directory: Path, scenario: Scenario) -> CdiNode:
    """The driver's files for `scenario`, whose MIG GPUs have `mixed_layout`; no specification yet."""
    stubs = stub_node(directory, scenario)
    root, specs = directory / "root", directory / "cdi"
    specs.mkdir()
    libraries = root / f"usr/lib/{platform.machine()}-linux-gnu"
    libraries.mkdir(parents=True)
    for library in ("libcuda.so", "libnvidia-ml.so"):
        shutil.copy(stubs.libraries / f"{library}.1", libraries / f"{library}.{scenario.driver}")
        (libraries / f"{library}.1").symlink_to(f"{library}.{scenario.driver}")
    (root / "dev/nvidia-caps").mkdir(parents=True)
    for name, minor in (("nvidiactl", 255), ("nvidia-uvm", 254)):
        _device(root / "dev" / name, _MAJOR, minor)
    for gpu in scenario.gpus:
        _device(root / f"dev/nvidia{gpu.minor}", _MAJOR, gpu.minor)
    _capabilities(root, scenario)
    return CdiNode(root, specs, stubs, scenario)


def _capabilities(root: Path, scenario: Scenario) -> None:
    paths = []
    for gpu in (one for one in scenario.gpus if one.mig_enabled):
        for mig in mixed_layout(gpu.index):
            instance = f"gpu{gpu.minor}/gi{mig.gi}"
            paths += [f"{instance}/access", f"{instance}/ci{mig.ci}/access"]
    table = root / "driver/nvidia-caps/mig-minors"
    table.parent.mkdir(parents=True)
    table.write_text("".join(f"{path} {number}\n" for number, path in enumerate(paths, 1)))
    for number in range(1, len(paths) + 1):
        _device(root / f"dev/nvidia-caps/nvidia-cap{number}", _CAPS_MAJOR, number)


def _device(path: Path, major: int, minor: int) -> None:
    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(major, minor))
