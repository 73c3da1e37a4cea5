"""configure-runtime --cdi on a node that has the driver and no NVIDIA Container Toolkit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures.engines import start_dockerd
from tests.cli import checked
from tests.integration.bare_node import BareNode, bare_node
from tests.integration.conftest import path_of, require
from tests.integration.verify_support import UUIDS

pytestmark = [pytest.mark.full, pytest.mark.docker, pytest.mark.containers]
SPECIFICATION = "/run/cdi/nvidia.yaml"
UNITS = {
    "/etc/systemd/system/gpunode-cdi-refresh.path",
    "/etc/systemd/system/gpunode-cdi-refresh.service",
    "/etc/udev/rules.d/90-gpunode-cdi.rules",
}


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BareNode]:
    monkeypatch.setenv("PATH", path_of("trixie"))
    with bare_node(start_dockerd({"debug": True}), tmp_path) as node:
        yield node


def test_container_needs_only_the_driver_docker_and_gpunode(node: BareNode) -> None:
    before = node.engine.config.read_text()
    shown = node.data("configure-runtime", "--runtime", "docker", "--cdi", "--dry-run")
    assert node.files() == set() and node.engine.config.read_text() == before
    done = node.gpunode("configure-runtime", "--runtime", "docker", "--cdi", "-o", "json")
    assert done.returncode == 0, done.stderr
    data = checked(done.stdout)["data"]
    assert data["changes"] == shown["changes"]
    assert any("no runtime is registered" in message for message in json.loads(done.stdout)["messages"])
    assert json.loads(node.engine.config.read_text()) == {"debug": True, "features": {"cdi": True}}
    assert node.files() == {SPECIFICATION, *UNITS}
    assert node.node.calls() == [
        "systemctl --version",
        "systemctl --version",
        "systemctl daemon-reload",
        "systemctl enable --now gpunode-cdi-refresh.path gpunode-cdi-refresh.service",
        "systemctl restart docker.service",
    ]
    again = node.data("configure-runtime", "--runtime", "docker", "--cdi")
    assert {change["action"] for change in again["changes"]} == {"unchanged"}
    assert again["restart"]["verb"] == "none"
    node.add_scenario_to_specification()
    proof = node.data("verify", "--on", "docker")
    assert proof["via"] == "cdi nvidia.com/gpu=all"
    assert [(one["uuid"], one["status"]) for one in proof["devices"]] == [(uuid, "ok") for uuid in UUIDS]
    # the specification is another one now, as after a driver's upgrade: it is removed nevertheless
    node.data("unconfigure-runtime", "--runtime", "docker")
    assert node.engine.config.read_text() == before and node.files() == set()
    assert "systemctl disable --now gpunode-cdi-refresh.path gpunode-cdi-refresh.service" in node.node.calls()


def test_failure_to_enable_the_units_rolls_everything_back(node: BareNode) -> None:
    systemctl = node.node.directory / "bin/systemctl"
    systemctl.write_text(systemctl.read_text().replace("case", '[ "$1" = enable ] && exit 1\ncase', 1))
    before = node.engine.config.read_text()
    done = node.gpunode("configure-runtime", "--runtime", "docker", "--cdi")
    assert done.returncode == 4, done.stderr
    assert "enable --now" in done.stderr
    assert node.engine.config.read_text() == before and node.files() == set()
    assert node.engine.running


def test_without_a_journal_cdi_is_removed_on_request(node: BareNode) -> None:
    node.data("configure-runtime", "--runtime", "docker", "--cdi")
    assert node.run("rm", "-r", str(node.node.state)).returncode == 0
    kept = node.gpunode("unconfigure-runtime", "--runtime", "docker")
    assert kept.returncode == 0 and "unconfigure-runtime --cdi" in kept.stderr
    assert node.files() == {SPECIFICATION, *UNITS}
    node.data("unconfigure-runtime", "--runtime", "docker", "--cdi")
    assert node.files() == set() and json.loads(node.engine.config.read_text()) == {"debug": True}


def test_specification_stays_while_another_engine_uses_it(node: BareNode) -> None:
    require("podman")
    before = node.engine.config.read_text()
    both = ("--runtime", "docker", "--runtime", "podman")
    node.data("configure-runtime", *both, "--cdi")
    kept = node.gpunode("unconfigure-runtime", "--runtime", "docker")
    assert kept.returncode == 0, kept.stderr
    assert f"{SPECIFICATION.replace('/run', '/var/run')} stays for podman" in kept.stderr
    assert node.engine.config.read_text() == before and node.files() == {SPECIFICATION, *UNITS}
    node.data("unconfigure-runtime", *both, "--cdi")
    entry = node.data("configure-runtime", *both, "--cdi")["engines"][0]["journal"]
    done = node.gpunode("rollback", entry)
    assert done.returncode == 0 and "needed by podman as well" in done.stderr
    assert node.engine.config.read_text() == before and node.files() == set()


def test_cdi_is_removed_on_request_whatever_created_its_parts(node: BareNode) -> None:
    node.engine.config.write_text('{"debug": true, "features": {"cdi": true}}')
    node.engine.restart()
    node.data("cdi", "refresh")
    node.data("configure-runtime", "--runtime", "docker", "--nvidia-runtime-path", "/bin/true")
    node.data("unconfigure-runtime", "--runtime", "docker", "--cdi")
    assert node.files() == set()
    assert json.loads(node.engine.config.read_text()) == {"debug": True}


def test_killed_removal_restores_the_running_units(node: BareNode) -> None:
    node.data("configure-runtime", "--runtime", "docker", "--cdi")
    systemctl = node.node.directory / "bin/systemctl"
    text = systemctl.read_text()
    systemctl.write_text(text.replace("case", '[ "$1" = restart ] && exec kill -9 $PPID\ncase', 1))
    killed = node.gpunode("unconfigure-runtime", "--runtime", "docker")
    assert killed.returncode == -9 and node.files() == set()
    systemctl.write_text(text)
    done = node.gpunode("rollback")
    assert done.returncode == 0, done.stderr
    assert node.files() == {SPECIFICATION, *UNITS}
    assert node.node.calls()[-1].startswith("systemctl enable --now")
    assert json.loads(node.engine.config.read_text())["features"] == {"cdi": True}


def test_dry_run_predicts_the_restart_from_the_daemon_state(node: BareNode) -> None:
    node.engine.config.write_text('{"features": {"cdi": true}}')  # dockerd has not read it
    argv = ("configure-runtime", "--runtime", "docker", "--cdi", "--nvidia-runtime-path", "/bin/true")
    shown, done = node.data(*argv, "--dry-run"), node.data(*argv)
    assert (shown["restart"]["verb"], shown["restart"]["reason"]) == (
        done["restart"]["verb"],
        done["restart"]["reason"],
    )
    assert shown["restart"]["verb"] == "restart" and shown["changes"] == done["changes"]
