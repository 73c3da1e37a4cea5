import pytest

from gpunode.facts.docker import addresses, verifies_clients
from gpunode.facts.system import members, without_administrators
from gpunode.host import Host

GROUPS = "root:x:0:\nwheel:x:10:anna\ndocker:x:998:anna,bert\nempty:x:5:\nodd\ndocker2:x:9:eve\n"


@pytest.fixture
def host(tmp_path):
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/group").write_text(GROUPS)
    return Host(tmp_path, environ={})


def test_group_members_that_are_no_administrators_are_listed(host):
    assert members(host, "docker") == ("anna", "bert")
    assert members(host, "empty") == members(host, "nobody") == members(host, "odd") == ()
    assert without_administrators(host, ("anna", "bert", "root")) == ("bert",)


def test_node_without_the_file_has_no_members(tmp_path):
    assert members(Host(tmp_path, environ={}), "docker") == ()


@pytest.mark.parametrize(
    ("argv", "config", "found", "verified"),
    [
        (("dockerd",), "", (), False),
        (("dockerd", "-H", "fd://"), "", ("fd://",), False),
        (("dockerd", "--host=tcp://0.0.0.0:2376", "--tlsverify"), "", ("tcp://0.0.0.0:2376",), True),
        (("dockerd", "--tlsverify=false"), '{"tlsverify": true}', (), False),
        (("dockerd",), '{"hosts": ["tcp://10.0.0.1:2375"]}', ("tcp://10.0.0.1:2375",), False),
        (("dockerd",), '{"hosts": ["tcp://:2376"], "tlsverify": true}', ("tcp://:2376",), True),
        (("dockerd",), "{", (), False),
    ],
)
def test_docker_addresses_and_client_verification_are_read(host, argv, config, found, verified):
    host.path("/etc/docker").mkdir()
    host.path("/etc/docker/daemon.json").write_text(config)
    assert addresses(host, argv, "/etc/docker/daemon.json") == found
    assert verifies_clients(host, argv, "/etc/docker/daemon.json") is verified
