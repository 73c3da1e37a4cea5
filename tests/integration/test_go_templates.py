"""Go's own template engine as the judge of the condition that gpunode writes into k3s's template.

No Go is installed here, but docker formats dockerd's info with text/template, and its runtimes are a map of
structs like k3s's ``.ExtraRuntimes``.
"""

from __future__ import annotations

import subprocess

import pytest

from fixtures.engines import start_dockerd
from gpunode.runtime.k3s import guarded
from tests.integration.conftest import require

pytestmark = pytest.mark.full


@pytest.mark.docker
def test_condition_holds_only_if_the_runtime_is_not_in_the_map() -> None:
    require("dockerd", "docker", "containerd", "runc")
    with start_dockerd() as engine:
        for name, rendered in (("nvidia", ["# ", "[x]", "# "]), ("runc", ["# "])):
            text = (
                guarded("[x]\n", name).replace(".ExtraRuntimes", ".Runtimes").replace(".BinaryName", ".Path")
            )
            done = subprocess.run(
                ["docker", "-H", f"unix://{engine.socket}", "info", "--format", text.strip()],
                capture_output=True,
                text=True,
                timeout=30,
                check=True,
            )
            assert done.stdout.splitlines() == rendered
