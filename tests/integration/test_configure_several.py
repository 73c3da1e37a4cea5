"""Several engines in one run: all of them, or none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures.engines import CONTAINERD_CONFIG, start_containerd, start_dockerd
from tests.cli import checked
from tests.integration.systemd_stand_in import Node, require_namespace

# the CRI is disabled, and can't start once it is enabled: containerd reads the file without an error
BROKEN_CRI = """\
version = 2
disabled_plugins = ["io.containerd.grpc.v1.cri"]

[plugins."io.containerd.grpc.v1.cri".registry]
  config_path = "/etc/containerd/certs.d"
  [plugins."io.containerd.grpc.v1.cri".registry.mirrors."docker.io"]
    endpoint = ["https://mirror.test"]
"""

pytestmark = [pytest.mark.full, pytest.mark.containerd, pytest.mark.docker]


@pytest.fixture
def node(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Node]:
    """Docker, then containerd; the parameter is containerd's configuration."""
    require_namespace()
    with start_dockerd({"debug": True}) as docker, start_containerd(request.param) as containerd:
        node = Node(docker, tmp_path, (containerd,))
        node.prepare()
        yield node


@pytest.mark.parametrize("node", [CONTAINERD_CONFIG], indirect=True)
def test_both_engines_are_configured_and_each_can_be_rolled_back(node: Node) -> None:
    before = [engine.config.read_bytes() for engine in node.engines]
    shown = node.gpunode("configure-runtime", "--dry-run", "--exit-code", "-o", "json")
    assert shown.returncode == 1
    assert [engine.config.read_bytes() for engine in node.engines] == before
    done = node.gpunode("configure-runtime", "-o", "json")
    assert done.returncode == 0, done.stderr
    answer = checked(done.stdout)
    assert answer["kind"] == "RuntimeConfigurations"
    docker, containerd = answer["data"]["engines"]
    assert (docker["engine"], containerd["engine"]) == ("docker", "containerd")
    assert "nvidia" in docker["active"]["handler"] and "nvidia" in containerd["active"]["handler"]
    assert docker["journal"] != containerd["journal"]
    foreseen = json.loads(shown.stdout)["data"]["engines"]
    assert [one["changes"] for one in foreseen] == [docker["changes"], containerd["changes"]]
    again = json.loads(node.gpunode("configure-runtime", "-o", "json").stdout)["data"]["engines"]
    assert {change["action"] for one in again for change in one["changes"]} == {"unchanged"}
    assert node.gpunode("unconfigure-runtime").returncode == 0
    assert [engine.config.read_bytes() for engine in node.engines] == before


@pytest.mark.parametrize("node", [BROKEN_CRI], indirect=True)
def test_failure_of_the_second_engine_rolls_the_first_back(node: Node) -> None:
    before = [engine.config.read_bytes() for engine in node.engines]
    done = node.gpunode("configure-runtime")
    assert done.returncode == 4, done.stderr
    assert "docker was rolled back as well" in done.stderr
    assert [engine.config.read_bytes() for engine in node.engines] == before
    assert all(engine.running for engine in node.engines)
    assert node.calls()[0] == "systemctl reload docker.service"
    assert node.calls()[-1] == "systemctl reload docker.service"
    empty = node.gpunode("rollback")
    assert empty.returncode == 2 and "nothing to roll back" in empty.stderr


@pytest.mark.parametrize("node", [CONTAINERD_CONFIG], indirect=True)
def test_refusal_by_one_engine_leaves_the_other_unchanged(node: Node) -> None:
    node.others[0].config.write_text("version = 2\n[plugins\n")
    before = node.engine.config.read_bytes()
    done = node.gpunode("configure-runtime")
    assert done.returncode == 1 and f"{node.others[0].config}:2:" in done.stderr
    assert node.engine.config.read_bytes() == before and node.calls() == []


@pytest.mark.parametrize("node", [CONTAINERD_CONFIG], indirect=True)
def test_options_of_one_engine_are_refused_for_several(node: Node) -> None:
    for option, value in (("--config", "/etc/x"), ("--socket", "/run/x"), ("--restart-command", "true")):
        done = node.gpunode("configure-runtime", option, value)
        assert done.returncode == 2 and option in done.stderr
    twice = node.gpunode("configure-runtime", "--runtime", "docker")
    assert twice.returncode == 2 and "twice" in twice.stderr


def signal_at_restart(node: Node, unit: str, name: str) -> None:
    """Let systemctl send gpunode a signal, once, instead of restarting the unit. It must not do that later
    either: another gpunode may be running by then."""
    systemctl, once = node.directory / "bin/systemctl", node.directory / "once"
    trap = (
        f'[ "$*" = "restart {unit}" ] && mkdir {once} 2>/dev/null && kill -{name} $PPID && sleep 5 && exit 1'
    )
    systemctl.write_text(systemctl.read_text().replace("case", f"{trap}\ncase", 1))


@pytest.mark.parametrize("node", [CONTAINERD_CONFIG], indirect=True)
def test_interrupt_at_the_second_engine_rolls_both_back(node: Node) -> None:
    before = [engine.config.read_bytes() for engine in node.engines]
    signal_at_restart(node, "containerd.service", "INT")
    done = node.gpunode("configure-runtime")
    assert done.returncode == 130, done.stderr
    assert [engine.config.read_bytes() for engine in node.engines] == before
    assert all(engine.running for engine in node.engines)
    assert "nothing to roll back" in node.gpunode("rollback").stderr


@pytest.mark.parametrize("node", [CONTAINERD_CONFIG], indirect=True)
def test_run_killed_at_the_second_engine_is_finished_by_the_next_one(node: Node) -> None:
    before = [engine.config.read_bytes() for engine in node.engines]
    signal_at_restart(node, "containerd.service", "KILL")
    assert node.gpunode("configure-runtime").returncode != 0
    foreseen = node.gpunode("configure-runtime", "--dry-run")
    assert "was killed half-way" in foreseen.stderr
    done = node.gpunode("configure-runtime", "-o", "json")
    assert done.returncode == 0, done.stderr
    answer = checked(done.stdout)
    docker, containerd = answer["data"]["engines"]
    assert [change["action"] for change in docker["changes"]] == ["unchanged"]
    assert [change["action"] for change in containerd["changes"]] == ["updated"]
    assert any("were rolled back" in message for message in answer["messages"])
    assert node.gpunode("unconfigure-runtime").returncode == 0
    assert [engine.config.read_bytes() for engine in node.engines] == before
