"""A program that isn't run because others can write it is named with the reason, not called missing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from gpunode.checks.toolkit import toolkit_missing
from gpunode.errors import DaemonError, PreconditionError
from gpunode.facts.engines import crio_role
from gpunode.facts.fabric import missing_requirements
from gpunode.facts.node import Node
from gpunode.host import Host
from gpunode.packages.find import find_manager
from gpunode.plugin.config.settings import Settings
from gpunode.plugin.mps.daemon import find_program
from tests.cli import fresh_gpunode, gpunode

RUNTIME = "nvidia-container-runtime"


def program(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("#!/bin/sh\nexit 1\n")
    path.chmod(0o755)


@pytest.fixture
def shared(place: Path) -> Path:
    """A directory of PATH that a group may write, as old Debian releases made /usr/local/bin."""
    for name in ("crio", RUNTIME, "ibstat", "nvidia-cuda-mps-control"):
        if Host().which(name):
            pytest.skip(f"{name} is installed here")
        program(place / "shared" / name)
    (place / "shared").chmod(0o2775)
    return place / "shared"


@pytest.mark.parametrize("command", [("configure-runtime", "--runtime", "crio"), ("verify", "--on", "crio")])
def test_untrusted_engine_is_not_reported_as_missing(shared: Path, command: tuple[str, ...]) -> None:
    path = f"{shared}:{os.environ['PATH']}"
    ran = gpunode(*command, env={"PATH": path, "GPUNODE_STATE_DIR": f"{shared.parent}/state"})
    assert ran.code == 3, ran
    assert f"crio is at {shared}/crio, but it was not run: {shared} can be written by other users" in ran.err
    assert f"namei -l {shared}/crio" in ran.err and "chmod go-w" in ran.err


def test_list_of_engines_names_the_untrusted_one(shared: Path) -> None:
    path = {"PATH": f"{shared}:{os.environ['PATH']}"}
    ran = gpunode("status", "runtime", "-o", "json", env=path)
    reason = f"at {shared}/crio, but it was not run: {shared} can be written by other users"
    assert f"crio is {reason}" in ran.document["messages"]
    assert crio_role(Node(Host(environ=path))).reason == f"CRI-O is {reason}"


def test_untrusted_toolkit_runtime_is_not_reported_as_missing(place: Path, shared: Path) -> None:
    program(place / "safe/dockerd")
    path = f"{shared}:{place}/safe:{os.environ['PATH']}"
    words = ("configure-runtime", "--runtime", "docker", "--config", f"{place}/daemon.json", "--dry-run")
    refused = f"{shared}/{RUNTIME}"
    ran = gpunode(*words, "--no-restart", env={"PATH": path})
    assert ran.code == 3 and f"{RUNTIME} is at {refused}, but it was not run" in ran.err, ran
    verdict = toolkit_missing.run(Node(Host(environ={"PATH": path})))
    assert verdict.status.value == "fail" and "isn't installed" not in verdict.summary
    (evidence,) = [one for one in verdict.evidence if one.source == refused]
    assert evidence.value == f"it was not run: {shared} can be written by other users"


def test_untrusted_driver_programs_are_not_reported_as_missing(shared: Path) -> None:
    host = Host(environ={"PATH": str(shared)})
    assert any(
        missing.path == f"{shared}/ibstat" and "not run" in missing.state
        for missing in missing_requirements(host)
    )
    with pytest.raises(DaemonError, match=f"is at {shared}/nvidia-cuda-mps-control, but it was not run"):
        find_program(host, Settings())


def test_untrusted_package_manager_is_not_reported_as_missing(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(shared / "zypper")
    monkeypatch.setattr("gpunode.host.reading._SYSTEM_PATH", ())
    with pytest.raises(PreconditionError, match=f"zypper is at {shared}/zypper, but it was not run"):
        find_manager(Host(environ={"PATH": str(shared)}))


def test_owner_outside_the_user_namespace_is_reported_as_unmapped(place: Path) -> None:
    if Host().which("crio"):
        pytest.skip("crio is installed here")
    unshare = ("unshare", "--user", "--map-root-user")
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], check=False).returncode != 0:
        pytest.skip("no user namespace can be made here")
    program(place / "theirs/crio")
    os.chown(place / "theirs/crio", 61001, 61001)
    words = ("configure-runtime", "--runtime", "crio")
    path = {"PATH": f"{place}/theirs:{os.environ['PATH']}", "GPUNODE_STATE_DIR": f"{place}/state"}
    ran = fresh_gpunode(*words, env=path, prefix=unshare)
    assert ran.code == 3, ran
    assert f"the owner of {place}/theirs/crio is not mapped in this user namespace" in ran.err
    assert "run gpunode on the node itself" in ran.err and "chown" not in ran.err
    os.chown(place / "theirs/crio", 65534, 65534)
    ran = fresh_gpunode(*words, env=path)
    assert f"{place}/theirs/crio belongs to user 65534" in ran.err and "chown" in ran.err
