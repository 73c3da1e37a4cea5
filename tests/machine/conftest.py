"""Booted machines for the tests: one per suite with gpunode installed, and one over it for each module."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures.debian_base import PYTHONS, base, missing_programs
from fixtures.newer_engines import Unavailable
from fixtures.stubs import have_compiler
from tests.dist import dist
from tests.integration.conftest import refuse_for
from tests.machine.booted import PACKAGES, SPACE, Machine
from tests.machine.readme import install_commands
from tests.memory import temporary

__all__ = ["dist"]
SUITES = os.environ.get("GPUNODE_TEST_SUITES", " ".join(PYTHONS)).split()


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that boot a machine are marked `full`. One process runs all tests of a suite's installed machine,
    and one each file of tests with machines of their own."""
    for item in items:
        if isinstance(item, pytest.Function) and item.path.parent == Path(__file__).parent:
            suite = item.callspec.params["suite"] if hasattr(item, "callspec") else "none"
            shared = "installed" if "installed" in item.fixturenames else item.path.stem
            item.add_marker("full")
            item.add_marker(pytest.mark.xdist_group(f"machine-{suite}-{shared}"))


@pytest.fixture(scope="session", params=SUITES)
def suite(request: pytest.FixtureRequest) -> str:
    missing = missing_programs()
    missing += [] if os.geteuid() == 0 else ["root"]
    missing += [] if have_compiler() else ["gcc"]
    missing += [] if shutil.which("runc") else ["runc"]
    refuse_for(missing)
    name: str = request.param
    try:
        base(name)
    except Unavailable as reason:
        refuse_for([f"Debian {name} ({reason})"])
    return name


@pytest.fixture(scope="module")
def bare(suite: str, dist: Path) -> Iterator[Machine]:
    """A booted machine with the driver and the engines, without gpunode."""
    with temporary("gpunode-bare-", SPACE) as place:
        machine = Machine(suite, (base(suite),), place, {PACKAGES: dist})
        machine.prepare()
        try:
            machine.boot()
            machine.sh("useradd --create-home ada")
            yield machine
        finally:
            machine.kill()


@pytest.fixture(scope="session")
def installed(suite: str) -> Iterator[Machine]:
    """A machine, powered off, on which gpunode was installed with README's commands."""
    with temporary("gpunode-installed-", SPACE) as place:
        machine = Machine(suite, (base(suite),), place)
        machine.prepare()
        try:
            machine.boot()
            machine.sh("useradd --create-home ada && useradd --create-home ben")
            for command in install_commands():
                machine.sh(f"cd /srv/gpunode && {command}")
            machine.power_off()
            yield machine
        finally:
            machine.kill()


@pytest.fixture(scope="module")
def machine(installed: Machine) -> Iterator[Machine]:
    """A booted machine with the driver, containerd, docker and gpunode; nothing is configured."""
    with temporary("gpunode-machine-", SPACE) as place:
        booted = Machine(installed.suite, (installed.upper, *installed.layers), place)
        try:
            booted.boot()
            yield booted
        finally:
            booted.kill()
