"""Path of the control program."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpunode.host import Host
from gpunode.plugin.config.settings import Settings
from gpunode.plugin.mps.daemon import PROGRAM, find_program


@pytest.mark.parametrize(
    "settings",
    [
        Settings(driver_root="/run/nvidia/driver"),  # on the node itself
        Settings(container_driver_root="/run/nvidia/driver"),  # as it is mounted in the plugin's container
    ],
)
def test_program_is_found_below_the_driver_root(tmp_path: Path, settings: Settings) -> None:
    program = tmp_path / "run/nvidia/driver/usr/bin" / PROGRAM
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert find_program(Host(tmp_path, {}), settings) == f"/run/nvidia/driver/usr/bin/{PROGRAM}"
