"""Another user's processes with the engines' names don't hide root's stopped engines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.security.stage import Stage, stage

pytestmark = pytest.mark.xdist_group("stopped_engine")  # one stage
_DOCKER = ("configure-runtime", "--runtime", "docker", "--nvidia-runtime-path", "/usr/bin/true")
_FILE = "/etc/docker/daemon.json"


@pytest.fixture(scope="module")
def node() -> Iterator[Stage]:
    with stage("stopped") as made:
        yield made


@pytest.mark.parametrize("named", [(), ("--config", _FILE)])
def test_root_configures_the_system_docker(node: Stage, named: tuple[str, ...]) -> None:
    node.cli.program("rm", "-f", _FILE, env={})
    ran = node.as_root(*_DOCKER, *named, "--no-restart", "--yes", "-o", "json")
    assert ran.code == 0, ran.err
    data = ran.document["data"]
    assert (data["config"], data["changes"][0]["action"]) == (_FILE, "created")
    assert "/usr/bin/true" in node.cli.program("cat", _FILE, env={}).out


def test_root_gets_a_note_on_the_users_docker(node: Stage) -> None:
    ran = node.as_root(*_DOCKER, "--no-restart", "--dry-run", "-o", "json")
    assert ran.code == 0, ran.err
    notes = " ".join(ran.document["messages"])
    assert "mallory's rootless Docker" in notes
    assert "sudo -Hu mallory XDG_RUNTIME_DIR=/run/user/61001 gpunode configure-runtime" in notes


def test_file_of_the_user_is_left_to_the_user(node: Stage) -> None:
    own = f"{node.directory}/home/mallory/.config/docker/daemon.json"
    ran = node.as_root(*_DOCKER, "--config", own, "--dry-run")
    assert ran.code == 3 and f"{own} belongs to mallory's rootless Docker" in ran.err
