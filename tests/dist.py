"""gpunode's packages, built once for all test processes in a fresh checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.newer_engines import alone
from gpunode import __version__
from tests.cli import REPOSITORY

NEXT = f"{__version__}+upgrade"
BUNDLE = f"gpunode-{__version__}-linux-x86_64"


def fresh_checkout(place: Path) -> Path:
    """A copy of this checkout's files without anything that was built in it."""
    listed = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    done = subprocess.run(listed, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    for name in filter(None, done.stdout.split("\0")):
        if (REPOSITORY / name).exists():  # else it is deleted and not committed
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, place / name, follow_symlinks=False)
    return place


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, the deb and, where rpmbuild is installed, the rpm in two versions, and the bundle.

    The first test process that needs them builds them for all.
    """
    process = tmp_path_factory.getbasetemp()
    run = process.parent if "PYTEST_XDIST_WORKER" in os.environ else process
    output = run / "dist"
    kinds = ("python", "deb", "bundle", *(["rpm"] if shutil.which("rpmbuild") else []))
    with alone("dist"):
        if not output.exists():
            checkout = fresh_checkout(run / "dist-checkout")
            options = (
                "--output",
                str(run / "dist.new"),
                "--version",
                __version__,
                "--version",
                NEXT,
                "--fast",
            )
            argv = (sys.executable, str(checkout / "scripts/build_packages.py"), *options, *kinds)
            done = subprocess.run(argv, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
            (run / "dist.new").rename(output)
    return output
