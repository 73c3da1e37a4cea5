"""Daemons that listen and never answer: a finding within seconds, however many checks ask."""

import socket
import time
from contextlib import contextmanager
from typing import Any

import pytest

from gpunode.checks.catalogue import BY_ID
from gpunode.facts import about
from gpunode.facts.containerd import ContainerdConfig
from gpunode.facts.daemons import Daemon
from gpunode.facts.node import Node
from gpunode.facts.processes import Process
from gpunode.host import Host
from gpunode.result import FindingStatus


@contextmanager
def silent_socket(path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(64)
        yield str(path)


def node_with(name, address, monkeypatch):
    """A live node whose only engine is behind `address`; everything else is left as not there."""
    monkeypatch.setattr(about, "DAEMON_SECONDS", 0.4)
    daemon = Daemon(name, None, (1, 7, 2), "/nonexistent", "", address, None, (), Process(1, (name,), 0.0))
    node = Node(Host())
    known: dict[str, Any] = {
        "docker": None,
        "containerd": None,
        "kubelet": None,
        "docker_config": {},
        "kind": "vm",
    }
    known["containerd_config"] = ContainerdConfig("/nonexistent", False, "", {}, {}, ())
    node.__dict__.update(known | {name: daemon})
    return node


@pytest.mark.parametrize(
    ("engine", "found_by", "others"),
    [
        ("docker", "docker-not-running", ("docker-not-restarted", "docker-runtime-missing")),
        (
            "containerd",
            "containerd-not-restarted",
            ("containerd-runtime-missing", "containerd-systemdcgroup"),
        ),
    ],
)
def test_a_daemon_that_never_answers_is_one_finding_and_is_waited_for_once(
    engine, found_by, others, tmp_path, monkeypatch
):
    with silent_socket(tmp_path / "s") as address:
        node = node_with(engine, address, monkeypatch)
        started = time.monotonic()
        verdict = BY_ID[found_by].run(node)
        for identifier in others:
            assert BY_ID[identifier].run(node).status is FindingStatus.SKIP
        assert time.monotonic() - started < 2.0
    assert verdict.status is FindingStatus.FAIL
    assert "doesn't answer" in verdict.summary
    assert verdict.evidence[0].source == address
