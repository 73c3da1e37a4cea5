"""The engines' checks against real daemons, with file and daemon in agreement or not.

Only the node around the daemon is set by hand: that it is this node's engine, and which file it reads.
"""

import json

import pytest

from fixtures.engines import CONTAINERD_CONFIG, EngineFailed, start_containerd, start_dockerd
from gpunode.checks.catalogue import BY_ID
from gpunode.checks.finding import FindingStatus
from gpunode.facts.containerd import find_containerd
from gpunode.facts.docker import find_docker
from gpunode.facts.node import Node
from gpunode.facts.toolkit import Toolkit
from gpunode.host import Host

RUNTIME = """
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia.options]
      BinaryName = "/bin/true"
"""


def node_with(**topics):
    node = Node(Host())
    node.__dict__.update({"kubelet": None, "docker": None, "containerd": None, **topics})
    return node


def verdict(identifier, node):
    return BY_ID[identifier].run(node)


def containerd_node(engine):
    daemon = find_containerd(Host(), str(engine.config))
    assert daemon is not None and daemon.socket == engine.socket
    return node_with(containerd=daemon)


@pytest.mark.containerd
def test_containerd_runtime_in_the_file_and_later_in_the_daemon():
    with start_containerd() as engine:
        assert verdict("containerd-runtime-missing", containerd_node(engine)).status is FindingStatus.FAIL
        engine.config.write_text(engine.config.read_text() + RUNTIME)
        stale = verdict("containerd-not-restarted", containerd_node(engine))
        assert stale.status is FindingStatus.FAIL
        line = engine.config.read_text().splitlines()[stale.evidence[0].line - 1]
        assert stale.evidence[0].source == str(engine.config) and "runtimes.nvidia]" in line
        engine.restart()
        node = containerd_node(engine)
        for identifier in (
            "containerd-not-restarted",
            "containerd-runtime-missing",
            "containerd-systemdcgroup",
        ):
            found = verdict(identifier, node)
            assert found.status is FindingStatus.PASS, found


@pytest.mark.containerd
def test_containerd_handlers_with_different_cgroup_drivers_fail():
    with start_containerd(CONTAINERD_CONFIG + RUNTIME + "      SystemdCgroup = true\n") as engine:
        found = verdict("containerd-systemdcgroup", containerd_node(engine))
        assert found.status is FindingStatus.FAIL
        assert {"runc: cgroupfs", "nvidia: systemd"} == {evidence.value for evidence in found.evidence}


IMPORTS = 'version = 2\nimports = ["{directory}/conf.d/*.toml"]\n'


@pytest.mark.containerd
def test_drop_in_that_removes_settings_of_the_main_file():
    """Before 2.0 only the last file's table counts; a whole copy of it keeps the main file's settings."""
    main = IMPORTS + CONTAINERD_CONFIG.removeprefix("version = 2\n")
    engine = start_containerd(main)
    drop_in = engine.directory / "conf.d" / "99-nvidia.toml"
    drop_in.parent.mkdir()
    drop_in.write_text("version = 2\n" + RUNTIME)
    with engine:
        node = containerd_node(engine)
        assert node.containerd.version < (2,), "needs an older containerd"
        found = verdict("containerd-imports-clobber", node)
        assert found.status is FindingStatus.FAIL and "the default handler runc" in found.summary
        drop_in.write_text(drop_in.read_text() + RUNTIME.replace("nvidia", "runc"))
        engine.restart()
        node = containerd_node(engine)
        found = verdict("containerd-imports-clobber", node)
        assert found.status is FindingStatus.FAIL and "sandbox_image" in found.summary
        assert found.evidence[0].value == 'sandbox_image = "gpunode.test/pause:1"'
        assert verdict("containerd-runtime-binary", node).status is FindingStatus.PASS
        table = CONTAINERD_CONFIG.partition('[plugins."io.containerd.grpc.v1.cri"]')
        drop_in.write_text("version = 2\n" + "".join(table[1:]) + RUNTIME.replace("/bin/true", "/no/such"))
        engine.restart()
        node = containerd_node(engine)
        assert verdict("containerd-imports-clobber", node).status is FindingStatus.PASS
        gone = verdict("containerd-runtime-binary", node)
        assert gone.status is FindingStatus.FAIL and gone.evidence[0].source == str(drop_in)


@pytest.mark.containerd
def test_containerd_with_a_missing_import_does_not_start():
    main = IMPORTS.replace("/conf.d/*.toml", "/gone.toml") + CONTAINERD_CONFIG.removeprefix("version = 2\n")
    with start_containerd() as engine:
        engine.config.write_text(main.replace("{directory}", str(engine.directory)))
        found = verdict("containerd-config-version", containerd_node(engine))
        assert found.status is FindingStatus.FAIL and found.evidence[0].line == 2
        with pytest.raises(EngineFailed):
            engine.restart()


@pytest.mark.containerd
def test_stopped_containerd_is_reported():
    with start_containerd() as engine:
        node = containerd_node(engine)
        assert verdict("containerd-not-restarted", node).status is FindingStatus.PASS
    found = verdict("containerd-not-restarted", node_with(containerd=node.containerd))
    assert (found.status, found.summary) == (FindingStatus.FAIL, "containerd isn't running")


@pytest.mark.docker
def test_docker_runtime_in_the_file_and_later_in_the_daemon():
    def docker_node():
        daemon = find_docker(Host(), str(engine.config))
        assert daemon is not None
        return node_with(docker=daemon, cdi_specs=(), toolkit=Toolkit({}, (), ""))

    with start_dockerd() as engine:
        assert verdict("docker-not-running", docker_node()).status is FindingStatus.PASS
        assert verdict("docker-runtime-missing", docker_node()).status is FindingStatus.FAIL
        config = json.loads(engine.config.read_text() or "{}")
        engine.config.write_text(
            json.dumps({**config, "runtimes": {"nvidia": {"path": "/bin/true"}}}, indent=2)
        )
        stale = verdict("docker-not-restarted", docker_node())
        assert stale.status is FindingStatus.FAIL
        assert "hasn't loaded the" in stale.summary
        engine.restart()
        for identifier in ("docker-not-restarted", "docker-runtime-missing", "docker-flag-file-conflict"):
            found = verdict(identifier, docker_node())
            assert found.status is FindingStatus.PASS, found
        engine.config.write_text("{,}")
        broken = verdict("docker-config-invalid-json", docker_node())
        assert (broken.status, broken.evidence[0].line) == (FindingStatus.FAIL, 1)
