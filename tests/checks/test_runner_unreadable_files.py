"""Files that this user may not read are skipped and reported, and never count as missing."""

import errno
import os
from dataclasses import dataclass, field

import pytest

from fixtures.machines import recorded_host
from gpunode.checks.finding import FindingStatus
from gpunode.checks.runner import run_checks
from gpunode.facts.node import Node
from gpunode.host import Host


@dataclass(frozen=True)
class Guarded(Host):
    """A host whose kernel refuses some paths. The tests run as root, which real permissions don't stop."""

    closed: tuple[str, ...] = field(default=())

    def path(self, path, *, follow=True):
        if str(path).startswith(self.closed):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return super().path(path, follow=follow)


CASES = {
    "/var/lib/kubelet/device-plugins": "plugin-socket-dead",
    "/etc/docker": "docker-config-invalid-json",
    "/etc/containerd": "containerd-config-version",
    "/etc/cdi": "cdi-spec-stale",
    "/var/lib/kubelet/config.yaml": "kubelet-not-running",
    "/lib/modules": "dkms-not-built",
    "/sys/bus/pci/devices": "pci-no-gpu",
}


@pytest.mark.parametrize("path", CASES)
def test_unreadable_path_is_skipped_with_a_hint_to_use_root(path, tmp_path):
    open_host = recorded_host("healthy-h100", tmp_path)
    host = Guarded(open_host.root, environ={}, closed=(path,))
    findings = {one.id: one for one in run_checks(Node(host))}
    assert {one.status for one in findings.values()} <= {FindingStatus.PASS, FindingStatus.SKIP}
    assert findings[CASES[path]].status is FindingStatus.SKIP
    assert "needs root" in findings[CASES[path]].summary


def test_socket_without_access_is_skipped(tmp_path):
    from fixtures.machines import machine
    from gpunode.commands.demo import build_machine

    spec = machine("healthy-docker-rocky9")
    spec["recording"]["sockets"]["/run/docker.sock"] = "denied"
    del spec["recording"]["daemons"]["/run/docker.sock"]
    findings = {one.id: one for one in run_checks(Node(Host(build_machine(spec, tmp_path), environ={})))}
    assert findings["docker-not-running"].status is FindingStatus.SKIP
    assert "needs root or membership in the group docker" in findings["docker-not-running"].summary
    assert findings["docker-runtime-missing"].status is FindingStatus.SKIP
