"""Real engines for the tests; a missing one is a visible skip, and with CI=true a failure."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest

from fixtures.engines import Engine, start_containerd, start_dockerd


def require(*programs: str) -> None:
    """Skip the test, naming what is missing; fail it where CI promises the engines."""
    missing = [program for program in programs if shutil.which(program) is None]
    if os.geteuid() != 0:
        missing.append("root")
    if not missing:
        return
    message = f"needs {', '.join(missing)}"
    if os.environ.get("CI") == "true":
        pytest.fail(f"{message}, and CI=true says that it is here")
    pytest.skip(message)


PROGRAMS = {"containerd": ("containerd", "ctr", "runc"), "docker": ("dockerd", "containerd", "runc")}


@pytest.fixture(autouse=True)
def engines_are_here(request: pytest.FixtureRequest) -> None:
    """Whatever starts an engine by itself is skipped as what takes one from here: by its mark."""
    for engine, programs in PROGRAMS.items():
        if request.node.get_closest_marker(engine) is not None:
            require(*programs)


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
