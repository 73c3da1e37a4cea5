"""Vector-add by CDI through newer containerds and dockerds: the specification is gpunode's own, hookless."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fixtures import images
from fixtures.engines import CONTAINERD_2_CONFIG, CONTAINERD_CONFIG, Engine, start_containerd, start_dockerd
from fixtures.newer_engines import SUITES
from fixtures.scenario import mig_uuid, mixed_layout, with_mig
from gpunode.daemons import cri_pods
from gpunode.daemons.cri import Cri
from gpunode.daemons.docker import DockerApi
from gpunode.facts.daemons import parse_version
from gpunode.host import Host
from tests.cli import Ran, checked, clean_environment, command, gpunode
from tests.integration.cdi_node import CdiNode, cdi_node
from tests.integration.conftest import path_of, require
from tests.integration.verify_support import GPUS, UUIDS, comes_to

pytestmark = [pytest.mark.full, pytest.mark.containers]
CUT = with_mig(GPUS, 1, mixed_layout(1))
EXPECTED = [UUIDS[0], *(mig_uuid(1, index) for index in range(4))]
OLD = '[plugins."io.containerd.grpc.v1.cri"]\n'


@pytest.fixture(params=SUITES)
def suite(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Its engines, shims and ctr come first on PATH."""
    require("runc", "gcc")
    monkeypatch.setenv("PATH", path_of(request.param))
    return str(request.param)


@pytest.fixture
def node(tmp_path: Path) -> CdiNode:
    return cdi_node(tmp_path, CUT)


def release(program: str) -> tuple[int, ...]:
    """Suites change, so the version is read from the program."""
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    return parse_version(done.stdout)


def containerd(node: CdiNode, *, cdi: bool = True) -> Engine:
    """One with the node's CDI directory; 1.7 must be configured to read it, 2.x not to."""
    switch = f'  enable_cdi = {str(cdi).lower()}\n  cdi_spec_dirs = ["{node.specs}"]\n'
    old = release("containerd") < (2,)
    config = CONTAINERD_CONFIG.replace(OLD, OLD + switch) if old else CONTAINERD_2_CONFIG + switch
    return start_containerd(config, path=os.environ["PATH"])


def dockerd(node: CdiNode, *, cdi: bool = True) -> Engine:
    return start_dockerd({"features": {"cdi": cdi}, "cdi-spec-dirs": [str(node.specs)]})


def arguments(engine: Engine, *options: str) -> tuple[str, ...]:
    place = ("--socket", engine.socket, "--config", str(engine.config))
    return ("verify", "--on", engine.kind, *place, "-o", "json", *options)


def verify(engine: Engine, node: CdiNode, *options: str) -> Ran:
    """Run the command line; the engine must hold nothing afterwards."""
    ran = gpunode(*arguments(engine, *options), env=node.stubs.env)
    comes_to(lambda: held(engine), (0, 0))
    return ran


def held(engine: Engine) -> tuple[int, int]:
    """Number of containers or pods, and of images."""
    if engine.kind == "docker":
        info = DockerApi(Host(), engine.socket).info()
        return info["Containers"], info["Images"]
    with Cri(Host(), engine.socket) as cri:
        return len(cri_pods.sandboxes(cri, {})), len(cri_pods.image_names(cri))


def assert_proven(ran: Ran) -> None:
    assert ran.code == 0, ran.err + ran.out
    data = ran.document["data"]
    assert data["via"] == "cdi nvidia.com/gpu=all"
    assert [one["uuid"] for one in data["devices"]] == EXPECTED
    assert {(one["status"], one["maxError"]) for one in data["devices"]} == {("ok", 0.0)}


def error(ran: Ran) -> Mapping[str, Any]:
    found: Mapping[str, Any] = ran.document["errors"][0]
    return found


def assert_faults_are_reported(engine: Engine, node: CdiNode, version: tuple[int, ...]) -> None:
    """One engine, several broken specifications: a restart for each would take minutes."""
    good: Any = node.tree()
    node.write({**good, "cdiVersion": "9.9.0"})
    assert (
        f"written for CDI 9.9.0, and {engine.kind} {'.'.join(map(str, version))} reads"
        in error(verify(engine, node))["message"]
    )
    node.write(good)
    node.libcuda.rename(node.libcuda.with_name("elsewhere"))
    stale = verify(engine, node)
    assert (stale.code, error(stale)["code"]) == (1, "cdi-stale"), stale.out
    assert f"{node.file} names {node.libcuda}" in error(stale)["message"]


@pytest.mark.containerd
def test_pod_of_containerd_computes_with_cdi(suite: str, node: CdiNode) -> None:
    node.generate()
    with containerd(node) as engine:
        assert_proven(verify(engine, node))
        assert_faults_are_reported(engine, node, release("containerd"))


@pytest.mark.docker
def test_container_of_docker_computes_with_cdi(suite: str, node: CdiNode) -> None:
    node.generate()
    with dockerd(node) as engine:
        assert_proven(verify(engine, node))
        assert_faults_are_reported(engine, node, release("dockerd"))


@pytest.mark.containerd
def test_disabled_cdi_in_containerd_has_a_hint_to_enable_it(suite: str, node: CdiNode) -> None:
    node.generate()
    with containerd(node, cdi=False) as engine:
        ran = verify(engine, node, "--cdi")
    assert (ran.code, error(ran)["code"]) == (3, "cdi-disabled")
    assert error(ran)["hint"] == "gpunode configure-runtime --runtime containerd --cdi"


@pytest.mark.containerd
def test_crio_is_used_through_the_same_cri_calls(node: CdiNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """CRI-O isn't packaged here: containerd serves the CRI in its place, and an image of the caller runs.

    CRI-O's own parts, its configuration over HTTP and its image storage, are not part of this test; gpunode
    then uses its default directories of specifications, which a mount namespace makes the node's.
    """
    monkeypatch.setenv("PATH", path_of("forky"))
    own = 'mount -t tmpfs -o mode=755 tmpfs /run && mkdir /run/cdi && mount --bind $0 /run/cdi && exec "$@"'
    with containerd(node) as engine:
        images.load_pause(engine)
        images.load(engine, "gpunode.test/own:1", ("/bin/echo", "Test PASSED"))
        options = ("--socket", engine.socket, "--image", "gpunode.test/own:1", "--cdi", "-o", "json")
        argv = command("verify", "--on", "crio", *options)
        none = subprocess.run(argv, env=clean_environment(), capture_output=True, text=True, check=False)
        assert (none.returncode, json.loads(none.stdout)["errors"][0]["code"]) == (3, "cdi-no-specification")
        node.generate()
        space = ["unshare", "--mount", "sh", "-c", own, str(node.specs)]
        done = subprocess.run(
            [*space, *argv], env=clean_environment(), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr + done.stdout
        data = checked(done.stdout)["data"]
        assert (data["on"], data["via"]) == ("crio", "cdi nvidia.com/gpu=all")
        comes_to(lambda: held(engine), (0, 2))


@pytest.mark.docker
def test_disabled_cdi_in_docker_has_a_hint_to_enable_it(suite: str, node: CdiNode) -> None:
    node.generate()
    with dockerd(node, cdi=False) as engine:
        ran = verify(engine, node, "--cdi")
        auto = verify(engine, node)
    assert (ran.code, error(ran)["code"]) == (3, "cdi-disabled")
    assert error(ran)["hint"] == "gpunode configure-runtime --runtime docker --cdi"
    assert (auto.code, error(auto)["code"]) == (1, "handler-missing")
    assert "gpunode configure-runtime --runtime docker --cdi" in error(auto)["hint"]
