"""scripts/make-venv on a machine without a Python that is new enough."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.cli import REPOSITORY

_OLD = """#!/bin/sh
[ "$1" != -V ] || echo Python 3.8.10
exit 1
"""


def test_machine_with_an_old_python_gets_an_install_hint(tmp_path: Path) -> None:
    """Ubuntu 20.04: `apt-get install python3` would install 3.8 again."""
    for name in ("bash", "cat", "cut", "dirname", "env", "sha256sum"):
        (tmp_path / name).symlink_to(shutil.which(name) or "/bin/false")
    (tmp_path / "python3").write_text(_OLD)
    (tmp_path / "python3").chmod(0o755)
    done = subprocess.run(
        [REPOSITORY / "scripts/make-venv"],
        env={"PATH": str(tmp_path), "VENV": str(tmp_path / "venv")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "needs Python 3.10 or newer; python3 is Python 3.8.10" in done.stderr
    assert "uv python install 3.12" in done.stderr and "python3.12-venv" in done.stderr
    assert "apt-get install python3)" not in done.stderr
