"""Real podman in a mount namespace of its own: its files, its store and its hooks are private."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cli import checked
from tests.integration.conftest import require
from tests.waiting import PATIENCE

# podman's paths are built in, so the directories themselves are replaced
_NAMESPACE = """\
mount --bind "$1/etc" /etc/containers && mount --bind "$1/share" /usr/share/containers &&
mount -t tmpfs -o mode=755 tmpfs /var/lib/containers &&
mount -t tmpfs -o mode=755 tmpfs /run || exit 99
shift && exec "$@"
"""


@dataclass(frozen=True)
class PodmanNode:
    """The private directory; `etc` is /etc/containers to podman, `share` is /usr/share/containers."""

    directory: Path

    @property
    def etc(self) -> Path:
        return self.directory / "etc"

    @property
    def drop_in(self) -> Path:
        return self.etc / "containers.conf.d/99-nvidia.conf"

    @property
    def program(self) -> Path:
        """A low-level runtime with the name of NVIDIA's."""
        return self.directory / "nvidia-container-runtime"

    def prepare(self) -> PodmanNode:
        """Skip without podman, else make the directory ready."""
        require("podman", "runc")
        Path("/var/lib/containers").mkdir(exist_ok=True)  # podman creates it anyway, and a mount needs it
        self.etc.mkdir()
        for name in ("policy.json", "registries.conf"):
            if Path("/etc/containers", name).exists():
                shutil.copy(f"/etc/containers/{name}", self.etc)
        shutil.copytree("/usr/share/containers", self.directory / "share")
        self.program.write_text(f'#!/bin/sh\nexec {shutil.which("runc")} "$@"\n')
        self.program.chmod(0o755)
        return self

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """Any command, in the namespace."""
        space = ["unshare", "--mount", "sh", "-c", _NAMESPACE, "sh", str(self.directory)]
        environ = {**os.environ, "GPUNODE_STATE_DIR": str(self.directory / "state"), "NO_COLOR": "1"}
        return subprocess.run(
            [*space, *argv], env=environ, capture_output=True, text=True, timeout=PATIENCE, check=False
        )

    def gpunode(self, verb: str, *options: str) -> subprocess.CompletedProcess[str]:
        """The command line on podman."""
        argv = [sys.executable, "-m", "gpunode", verb, *options]
        if verb != "rollback":
            argv += ["--runtime", "podman"]
        return self.run(*argv)

    def configure(self, *options: str) -> Any:
        """`data` of a configuration that must succeed."""
        path = ("--nvidia-runtime-path", str(self.program))
        done = self.gpunode("configure-runtime", *path, *options, "-o", "json")
        assert done.returncode == 0, done.stderr + done.stdout
        return checked(done.stdout)["data"]

    def runtime(self, *flags: str) -> str:
        """Name of the OCI runtime that podman would use; its error if it has none."""
        done = self.run("podman", *flags, "info", "--format", "json")
        return (
            str(json.loads(done.stdout)["host"]["ociRuntime"]["name"]) if not done.returncode else done.stderr
        )
