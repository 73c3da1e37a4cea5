"""Daemons that listen and never respond: a finding within seconds, however many checks query them."""

import inspect
import socket
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from fixtures.machines import recorded_host
from gpunode.checks import patience
from gpunode.checks.catalogue import BY_ID
from gpunode.checks.finding import FindingStatus
from gpunode.checks.runner import run_checks
from gpunode.facts import kubelet
from gpunode.facts import node as about
from gpunode.facts.containerd import ContainerdConfig
from gpunode.facts.daemons import Daemon
from gpunode.facts.kubelet import Kubelet
from gpunode.facts.node import Node
from gpunode.facts.processes import Process
from gpunode.facts.topic import Stuck
from gpunode.host import Host
from tests.checks.stalls import Stall, stalling


@dataclass(frozen=True)
class Contacted(Host):
    """A machine that lists the sockets to which a connection is requested.

    A connection itself may come later: gRPC connects in a thread of its own, on a busy machine after the
    caller's time limit.
    """

    contacts: list[str] = field(default_factory=list)

    def socket_path(self, path):
        self.contacts.append(path)
        return super().socket_path(path)


def contacts(node, address):
    """How often a connection was requested since the last call."""
    count = node.host.contacts.count(address)
    node.host.contacts.clear()
    return count


@contextmanager
def silent_socket(path):
    """The address of a socket that takes connections and answers none."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(64)
        yield listener.getsockname()


def node_with(name, address, monkeypatch):
    """A live node whose only engine is at `address`; everything else is absent."""
    monkeypatch.setattr(about, "DAEMON_SECONDS", 0.1)
    daemon = Daemon(name, None, (1, 7, 2), "/nonexistent", "", address, None, (), Process(1, (name,), 0.0))
    node = Node(Contacted())
    known: dict[str, Any] = {
        "docker": None,
        "containerd": None,
        "kubelet": None,
        "crio": None,
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
def test_unresponsive_daemon_is_one_finding_and_waited_for_once(
    engine, found_by, others, tmp_path, monkeypatch
):
    with silent_socket(tmp_path / "s") as silent:
        node = node_with(engine, silent, monkeypatch)
        verdict = BY_ID[found_by].run(node)
        assert contacts(node, silent) > 0
        for identifier in others:
            assert BY_ID[identifier].run(node).status is FindingStatus.SKIP
        assert contacts(node, silent) == 0
    assert verdict.status is FindingStatus.FAIL
    assert "doesn't answer" in verdict.summary
    assert verdict.evidence[0].source == silent


def test_unresponsive_crio_is_one_finding(tmp_path, monkeypatch):
    with silent_socket(tmp_path / "s") as silent:
        node = node_with("crio", silent, monkeypatch)
        verdict = BY_ID["crio-not-running"].run(node)
        assert contacts(node, silent) > 0
        assert BY_ID["crio-cgroup-manager"].run(node).status is FindingStatus.SKIP
        assert contacts(node, silent) == 0
    assert (verdict.status, verdict.summary) == (FindingStatus.FAIL, "CRI-O is running, but doesn't answer")
    assert verdict.evidence[0].source == silent


def test_unresponsive_kubelet_is_a_finding_and_its_checkpoint_is_read(tmp_path, monkeypatch):
    (tmp_path / "pod-resources").mkdir()
    with silent_socket(tmp_path / "pod-resources" / "kubelet.sock") as silent:
        node = node_with("containerd", "/nonexistent", monkeypatch)
        monkeypatch.setattr(kubelet, "DEVICE_PLUGINS", str(tmp_path / "device-plugins"))
        process = Process(1, ("kubelet", f"--root-dir={tmp_path}"), 0.0)
        found = Kubelet(process, "kubelet.service", True, "/run/containerd/containerd.sock", "", None)
        node.__dict__["kubelet"] = found
        verdict = BY_ID["kubelet-not-running"].run(node)
        assert contacts(node, silent) > 0
        assert node.allocatable is None
        assert contacts(node, silent) == 0
    assert verdict.status is FindingStatus.WARN and "doesn't answer" in verdict.summary


def without_response(*_args, **_named):
    raise Stuck("systemd gave no answer within 3 s: systemctl show", first=True)


def test_hanging_systemd_is_one_finding_and_other_checks_run(tmp_path, monkeypatch):
    """Its D-Bus: every unit's state comes over it."""
    monkeypatch.setattr(about, "read_unit_states", without_response)
    findings = run_checks(Node(recorded_host("healthy-h100-nvswitch", tmp_path)))
    broken = [one for one in findings if one.status is FindingStatus.ERROR]
    assert [one.summary for one in broken] == ["systemd gave no answer within 3 s: systemctl show"]
    assert any(one.skipped == "hangs" for one in findings)
    assert not [one for one in findings if one.status in (FindingStatus.FAIL, FindingStatus.WARN)]


def test_hanging_nvml_is_the_only_finding(tmp_path):
    findings = {one.id: one for one in run_checks(Node(recorded_host("nvml-hang", tmp_path)))}
    bad = [one.id for one in findings.values() if one.status in (FindingStatus.FAIL, FindingStatus.ERROR)]
    assert bad == ["nvml-hang"] and "does not answer" in findings["nvml-hang"].summary
    assert findings["persistence-off"].blocked_by == "nvml-hang"


class StuckMount(Host):
    """A machine on which a foreign file system doesn't respond, as a dead NFS server's."""

    stall: Stall

    def file_system(self, path):
        self.path(path)  # where Host records it
        self.stall.wait()
        return super().file_system(path)


def test_stuck_file_system_is_one_finding_with_its_name(tmp_path, monkeypatch):
    host = StuckMount(recorded_host("healthy-h100", tmp_path).root, environ={})
    with stalling(monkeypatch) as StuckMount.stall:
        findings = {one.id: one for one in run_checks(Node(host))}
    broken = [one for one in findings.values() if one.status is FindingStatus.ERROR]
    assert [one.id for one in broken] == ["disk-pressure"]
    assert "reading /" in broken[0].summary


# the longest wait of each client, as the node configures it: the sum stays below the limit of one check
CLIENTS = ("docker_info", "cri", "crio_config", "_live_allocatable", "gpu_holdings")


def test_every_daemon_timeout_is_shorter_than_a_checks() -> None:
    assert about.DAEMON_SECONDS * 2 < patience.CHECK_SECONDS
    for name in CLIENTS:
        source = inspect.getsource(vars(next(one for one in Node.__mro__ if name in vars(one)))[name]._read)
        assert "DAEMON_SECONDS" in source, name
