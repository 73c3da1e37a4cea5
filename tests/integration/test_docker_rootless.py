"""configure-runtime as an ordinary user, against that user's real rootless dockerd."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from fixtures.images import busybox_archive
from fixtures.rootless import UID, Rootless, Unavailable, rootless_docker
from gpunode.daemons.docker import DockerApi
from gpunode.host import Host
from gpunode.output.typed import toml
from tests.cli import checked
from tests.integration.conftest import refuse_for, require
from tests.waiting import PATIENCE

# one at a time: each ends the processes of the same user
pytestmark = [pytest.mark.full, pytest.mark.docker, pytest.mark.xdist_group("docker_rootless")]
TOOLKIT = ".config/nvidia-container-runtime/config.toml"
RESTART = ["systemctl --user daemon-reload", "systemctl --user restart docker.service"]


@pytest.fixture
def docker() -> Iterator[Rootless]:
    require("dockerd", "containerd", "runc", "unshare", "dpkg")
    try:
        with rootless_docker() as started:
            yield started
    except Unavailable as reason:
        refuse_for([f"a rootless Docker ({reason})"])
        raise


def data(docker: Rootless, *arguments: str) -> Any:
    named = [] if arguments[0] == "rollback" else ["--runtime", "docker"]
    done = docker.gpunode(*arguments, *named, "-o", "json")
    assert done.returncode == 0, done.stderr + done.stdout
    return checked(done.stdout)["data"]


def files(docker: Rootless) -> set[str]:
    """Configuration files: neither dockerd's own data nor gpunode's journal."""
    found = (path for path in docker.home.rglob("*") if path.is_file())
    names = {str(path.relative_to(docker.home)) for path in found}
    return {name for name in names if not name.startswith(".local/") and not name.endswith("key.json")}


def test_rootless_docker_is_configured_and_rolled_back_by_its_user(docker: Rootless) -> None:
    before = files(docker)
    done = data(docker, "configure-runtime")
    assert done["config"] == f"{docker.home}/.config/docker/daemon.json"
    assert "nvidia" in done["active"]["handler"]
    assert done["restart"]["command"] == "systemctl --user restart docker.service"
    assert docker.calls() == RESTART
    toolkit = docker.home / TOOLKIT
    assert toml(toolkit.read_text())["nvidia-container-cli"]["no-cgroups"] is True
    assert {path.stat().st_uid for path in (toolkit, toolkit.parent)} == {UID}

    again = data(docker, "configure-runtime")
    assert {change["action"] for change in again["changes"]} == {"unchanged"}
    assert docker.calls() == RESTART

    gone = data(docker, "unconfigure-runtime")
    assert "nvidia" not in gone["active"]["handler"] and files(docker) == before
    assert (docker.home / ".local/state/gpunode/journal").is_dir()


def test_runtime_environment_points_to_the_users_toolkit_file(docker: Rootless) -> None:
    data(docker, "configure-runtime")
    DockerApi(Host(), docker.socket).load_image(busybox_archive("gpunode.test/box:1", ("/bin/echo",)))
    argv = ["docker", "-H", f"unix://{docker.socket}", "run", "--rm", "--network=none", "--runtime=nvidia"]
    subprocess.run([*argv, "gpunode.test/box:1"], capture_output=True, timeout=PATIENCE, check=False)
    # whether the container itself may start here doesn't matter: cgroups aren't delegated
    seen = (docker.directory / "run/runtime-environment").read_text().splitlines()
    assert f"XDG_CONFIG_HOME={docker.home}/.config" in seen


def test_toolkit_without_a_hook_needs_no_file_and_only_a_reload(docker: Rootless) -> None:
    docker.file(TOOLKIT, '[nvidia-container-runtime]\nmode = "cdi"\n')
    pid = daemon_pid(docker)
    done = data(docker, "configure-runtime")
    assert (done["restart"]["verb"], len(done["changes"])) == ("reload", 1)
    assert docker.calls() == [] and daemon_pid(docker) == pid


def test_existing_settings_in_the_users_file_are_kept(docker: Rootless) -> None:
    text = '# mine\n[nvidia-container-cli]\n#no-cgroups = false\ndebug = "/tmp/x.log"\n'
    toolkit = docker.file(TOOLKIT, text)
    data(docker, "configure-runtime")
    assert "# mine\n" in toolkit.read_text() and 'debug = "/tmp/x.log"' in toolkit.read_text()
    data(docker, "rollback")
    assert toolkit.read_text() == text


def test_root_gets_the_command_for_the_owner_of_a_rootless_docker(docker: Rootless) -> None:
    argv = [sys.executable, "-m", "gpunode", "configure-runtime", "--runtime", "docker", "--dry-run"]
    own = str(docker.home / ".config/docker/daemon.json")
    done = subprocess.run(
        [*argv, "--config", own], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode != 0 and "rootless Docker" in done.stderr
    assert f"XDG_RUNTIME_DIR=/run/user/{UID} gpunode configure-runtime --runtime docker" in done.stderr


def test_ordinary_user_may_not_change_the_system_docker(docker: Rootless) -> None:
    done = docker.gpunode("configure-runtime", "--runtime", "docker", "--config", "/etc/docker/daemon.json")
    assert done.returncode != 0 and "needs root" in done.stderr


def daemon_pid(docker: Rootless) -> int:
    said = docker.run("pgrep", "-u", str(UID), "-x", "dockerd")
    return int(said.stdout.split()[0])
