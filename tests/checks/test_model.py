"""Decorators of checks: an engine that this node doesn't use, or that doesn't answer, is a skip."""

from typing import Any, cast

import pytest

from gpunode.checks.finding import FindingStatus, Fix
from gpunode.checks.model import Verdict, check, if_installed, if_reported, if_used, ok
from gpunode.errors import ConfigError, DaemonError
from gpunode.facts.daemons import Daemon
from gpunode.facts.engines import ROLES, Role
from gpunode.facts.node import Node

DOCKER = Daemon("docker", None, (), "/etc/docker/daemon.json", "", "/run/docker.sock", None)


class FakeNode:
    """A node of which only Docker is known."""

    def __init__(self, docker: Daemon | None) -> None:
        self.docker = docker


def verdict(
    monkeypatch: pytest.MonkeyPatch,
    decorator: Any,
    docker: Daemon | None,
    used: bool,
    error: Exception | None,
) -> Verdict:
    monkeypatch.setitem(cast(dict[str, Any], ROLES), "docker", lambda _: Role(used, "why"))

    def run(node: Node, daemon: Daemon) -> Verdict:
        if error:
            raise error
        return ok(daemon.config_path)

    result: Verdict = decorator("docker")(run)(FakeNode(docker))
    return result


@pytest.mark.parametrize(
    ("decorator", "docker", "used", "summary"),
    [
        (if_used, DOCKER, True, DOCKER.config_path),
        (if_used, DOCKER, False, "why"),
        (if_used, None, False, "why"),
        (if_installed, DOCKER, False, DOCKER.config_path),
        (if_installed, None, False, "why"),
    ],
)
def test_check_of_an_engine_runs_only_if_the_engine_matters(
    decorator: Any, docker: Daemon | None, used: bool, summary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = verdict(monkeypatch, decorator, docker, used, None)
    assert result.summary == summary
    assert (result.status is FindingStatus.SKIP) == (summary == "why")


@pytest.mark.parametrize("decorator", [if_used, if_installed])
def test_daemon_that_reports_nothing_is_a_skip_but_a_broken_file_is_not(
    decorator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = verdict(monkeypatch, decorator, DOCKER, True, DaemonError("no answer"))
    assert (result.status, result.summary) == (
        FindingStatus.SKIP,
        "Docker doesn't report its configuration: no answer",
    )
    with pytest.raises(ConfigError):
        verdict(monkeypatch, decorator, DOCKER, True, ConfigError("/etc/docker/daemon.json: broken"))


def test_decorated_function_keeps_what_the_catalogue_reads() -> None:
    @check("some-check", title="t", looks_at="l", fix=Fix("true"))
    @if_reported("docker")
    def some_check(node: Node) -> Verdict:
        """Why it matters."""
        return ok("fine")

    assert (some_check.why, some_check.run.__module__) == ("Why it matters.", __name__)
    assert some_check.fix_for("debian") == some_check.fix_for("other") == Fix("true")
