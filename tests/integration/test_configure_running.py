"""configure-runtime while containers run: a restart of Docker would stop them, so it prompts first."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fixtures.engines import start_dockerd
from fixtures.images import load
from gpunode.daemons.docker import DockerApi
from gpunode.facts.docker import HOOK
from gpunode.host import Host
from tests.integration.configuring import Cli, configuring
from tests.waiting import PATIENCE

pytestmark = [pytest.mark.full, pytest.mark.docker, pytest.mark.containers]
IMAGE = "gpunode.test/sleeper:1"


@contextmanager
def busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]) -> Iterator[Cli]:
    """A dockerd with one running container, and a toolkit that was installed after it started."""
    with configuring(start_dockerd(config), tmp_path) as cli:
        load(cli.engine, IMAGE, ("/bin/sleep", "1000"))
        argv = ["docker", "-H", f"unix://{cli.engine.socket}", "run", "-d"]
        argv += ["--network=none", "--stop-signal=KILL", IMAGE]  # sleep as process 1 ignores SIGTERM
        subprocess.run(argv, check=True, capture_output=True, timeout=PATIENCE)
        hook = tmp_path / "toolkit" / HOOK
        hook.parent.mkdir()
        hook.write_text("#!/bin/sh\n")
        hook.chmod(0o755)
        monkeypatch.setenv("PATH", f"{hook.parent}:{os.environ['PATH']}")
        yield cli


def running(cli: Cli) -> int:
    found = DockerApi(Host(), cli.engine.socket).info()["ContainersRunning"]
    assert isinstance(found, int)
    return found


def test_restart_that_stops_containers_needs_yes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with busy(tmp_path, monkeypatch, {}) as cli:
        pid, before = cli.engine.pid, cli.engine.config.read_bytes()
        done = cli.run("configure-runtime")
        assert done.returncode == 3, done.stderr
        assert "stops its 1 running container" in done.stderr and "--yes" in done.stderr
        assert cli.engine.config.read_bytes() == before and cli.engine.pid == pid
        assert running(cli) == 1 and not (cli.state / "journal").exists()
        data = cli.data("configure-runtime", "--yes")
        assert data["restart"]["verb"] == "restart" and "nvidia" in data["active"]["handler"]
        assert cli.engine.pid != pid


def test_dry_run_reports_that_the_run_would_be_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with busy(tmp_path, monkeypatch, {}) as cli:
        done = cli.run("configure-runtime", "--dry-run", "-o", "json")
        assert done.returncode == 3, done.stderr
        assert "stops its 1 running container" in json.loads(done.stdout)["errors"][0]["message"]
        assert not cli.state.exists()


def test_with_live_restore_the_restart_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with busy(tmp_path, monkeypatch, {"live-restore": True}) as cli:
        data = cli.data("configure-runtime")
        assert data["restart"]["verb"] == "restart" and "nvidia" in data["active"]["handler"]
        assert running(cli) == 1
