"""Real engines for the tests; a missing one is a visible skip, and a failure with CI=true."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from fixtures.engines import Engine, start_containerd, start_dockerd
from fixtures.newer_engines import Unavailable, search_path
from tests.waiting import PATIENCE


def require(*programs: str) -> None:
    """Skip the test, naming the missing program; fail it if CI promises the engines."""
    missing = [program for program in programs if shutil.which(program) is None]
    if os.geteuid() != 0:
        missing.append("root")
    elif not may_mount():
        missing.append("the right to mount (CAP_SYS_ADMIN)")
    refuse_for(missing)


def refuse_for(missing: list[str]) -> None:
    """Skip, or fail with CI=true, naming the missing programs; nothing if there are none."""
    if not missing:
        return
    message = f"needs {', '.join(missing)}"
    if os.environ.get("CI") == "true":
        pytest.fail(f"{message}, and CI=true says that it is here")
    pytest.skip(message)


def path_of(source: str) -> str:
    """A PATH on which the engines of a source (fixtures/newer_engines.py) come first; a skip without them."""
    try:
        return search_path(source)
    except Unavailable as reason:
        refuse_for([f"the engines of {source} ({reason})"])
        raise


@cache
def may_mount() -> bool:
    """False in an unprivileged container, where no engine works for any user.

    Propagation is left alone: changing it fails in a plain chroot, where engines do start.
    """
    argv = ["unshare", "--mount", "--propagation", "unchanged", "true"]
    return subprocess.run(argv, capture_output=True, check=False).returncode == 0


@cache
def container_problem() -> str:
    """Why runc can't start a container on this machine (a plain chroot is one reason); empty if it can.

    Tried twice before it is reported: whole test files depend on it.
    """
    return _container_problem() and _container_problem()


def _container_problem() -> str:
    with tempfile.TemporaryDirectory(prefix="gpn-probe-") as name:
        place = Path(name)
        (place / "rootfs/bin").mkdir(parents=True)
        shutil.copy(shutil.which("busybox") or "", place / "rootfs/bin/busybox")
        subprocess.run(["runc", "spec", "--bundle", name], check=True, capture_output=True)
        spec = json.loads((place / "config.json").read_text())
        spec["process"] |= {"terminal": False, "args": ["/bin/busybox", "true"]}
        (place / "config.json").write_text(json.dumps(spec))
        argv = ["runc", "--root", f"{name}/state", "run", "--bundle", name, place.name]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE, check=False)
        # a umask left behind by other code gives a tree that no other user can enter
        parts = (place, place / "rootfs", place / "rootfs/bin", place / "rootfs/bin/busybox")
        modes = ", ".join(f"{part.relative_to(place)} {part.stat().st_mode & 0o7777:04o}" for part in parts)
    said = (done.stderr.strip().splitlines() or ["runc failed"])[-1]
    return "" if done.returncode == 0 else f"{said}; modes: {modes}"


PROGRAMS = {"containerd": ("containerd", "ctr", "runc"), "docker": ("dockerd", "containerd", "runc")}


@pytest.fixture(autouse=True)
def engines_are_here(request: pytest.FixtureRequest) -> None:
    """Tests that start an engine themselves are skipped like those that use a fixture: by their mark."""
    for engine, programs in PROGRAMS.items():
        if request.node.get_closest_marker(engine) is not None:
            require(*programs)
    if request.node.get_closest_marker("containers") is not None:
        require("runc", "busybox")
        problem = container_problem()
        refuse_for([f"a machine that can start containers ({problem})"] if problem else [])


@pytest.fixture
def containerd() -> Iterator[Engine]:
    """A running private containerd with CRI and only the runc handler."""
    require(*PROGRAMS["containerd"])
    with start_containerd() as engine:
        yield engine


@pytest.fixture
def docker() -> Iterator[Engine]:
    """A running private dockerd with an empty daemon.json."""
    require(*PROGRAMS["docker"])
    with start_dockerd() as engine:
        yield engine
