"""The whole on a booted Debian 12: the deb, docker and containerd, units, a reboot, and `gpunode reset`.

What /etc holds is compared byte for byte with what it held before.
"""

from __future__ import annotations

import itertools
import signal

import pytest

from fixtures.stubs import SCENARIO_IN_CONTAINER
from gpunode import __version__
from tests.machine.booted import PACKAGES, Machine, apt
from tests.machine.test_kubernetes import UNIT, becomes, node_with_kubelet

pytestmark = pytest.mark.parametrize("suite", ["bookworm"], indirect=True)

TIMER = "gpunode-doctor.timer"
DEB = f"{PACKAGES}/gpunode_{__version__}_amd64.deb"
METRICS = "/var/lib/prometheus/node-exporter"
ENGINES = ("docker", "containerd")
ACTIVE = (UNIT, TIMER, "gpunode-cdi-refresh.path", "docker.service", "containerd.service", "kubelet.service")
TOOLKIT_CONFIG = "/etc/nvidia-container-runtime/config.toml"
OF_THE_PACKAGE = {"./gpunode", "./gpunode/env"}
"""The conffile of the deb, which its purge removes."""
REWRITTEN = ("./ld.so.cache", f"./{SCENARIO_IN_CONTAINER.removeprefix('/etc/')}")
"""Not gpunode's: what ldconfig writes at each boot of this machine, and the files of the stub driver."""


def etc(machine: Machine) -> dict[str, str]:
    """Everything in /etc by path: type, mode, owner, link target, and the contents' digest."""
    listed = machine.sh("cd /etc && find . -printf '%p\\t%y %m %u:%g %l\\n'").splitlines()
    files = dict(line.partition("\t")[::2] for line in listed)
    for line in machine.sh("cd /etc && find . -type f -print0 | xargs -0 sha256sum").splitlines():
        digest, _, path = line.partition("  ")
        files[path] += digest
    return files


def differences(before: dict[str, str], after: dict[str, str]) -> dict[str, tuple[str, str]]:
    paths = sorted(before.keys() | after.keys())
    both = {path: (before.get(path, ""), after.get(path, "")) for path in paths}
    return {
        path: pair for path, pair in both.items() if pair[0] != pair[1] and not path.startswith(REWRITTEN)
    }


def set_up(machine: Machine) -> None:
    """Everything that gpunode sets up on a node, by its own commands and its package's units."""
    for engine in ENGINES:
        done = machine.gpunode("setup", "--runtime", engine, "--yes")
        assert done.code == 0, done.out + done.err
    config = ("toolkit", "config", "set", "--create", "nvidia-container-runtime.log-level=info")
    for command in (("cdi", "refresh", "--install"), config):
        done = machine.gpunode(*command)
        assert done.code == 0, done.out + done.err
    machine.sh(f"systemctl enable --now {UNIT} {TIMER}")
    machine.sh("systemctl start gpunode-doctor.service")


@pytest.fixture(scope="module")
def before(bare: Machine) -> dict[str, str]:
    """/etc with the deb and a kubelet; the deb itself has added nothing but its conffile."""
    machine_only = etc(bare)
    apt(bare, "install", DEB)
    assert set(differences(machine_only, etc(bare))) == OF_THE_PACKAGE
    node_with_kubelet(bare)
    bare.sh(f"install -d {METRICS}")
    return etc(bare)


@pytest.fixture
def node(bare: Machine, before: dict[str, str]) -> Machine:
    """The machine with the deb, set up by an earlier test or now."""
    apt(bare, "install", DEB)  # one of the tests purges it
    if not bare.is_active(UNIT):
        set_up(bare)
    becomes(bare, "2")
    return bare


def test_a_node_is_set_up_and_proven(node: Machine, before: dict[str, str]) -> None:
    assert node.sh(f"head -c 15 {METRICS}/gpunode.prom") == "# HELP gpunode_"
    assert TOOLKIT_CONFIG.replace("/etc", ".") in differences(before, etc(node))


def test_after_a_reboot_everything_runs(node: Machine) -> None:
    node.reboot()
    becomes(node, "2")
    for unit in ACTIVE:
        assert node.is_active(unit), unit
    for engine in ENGINES:
        proof = node.gpunode("verify", "--on", engine)
        assert proof.code == 0 and "2 of 2 devices right" in proof.out, proof.out + proof.err


def test_reset_leaves_etc_as_it_was(node: Machine, before: dict[str, str]) -> None:
    planned = etc(node)
    shown = node.gpunode("reset", "--dry-run")
    assert shown.code == 0, shown.out + shown.err
    assert f"would run: systemctl disable --now {UNIT}" in shown.out
    assert differences(planned, etc(node)) == {}

    done = node.gpunode("reset", "--yes", "-o", "json")
    assert done.code == 0, done.out + done.err
    states = {step["name"]: step["state"] for step in done.document["data"]["steps"]}
    assert {name for name, state in states.items() if state == "done"} == {
        *(
            "plugin",
            "doctor-timer",
            "doctor-metrics",
            "runtime-docker",
            "runtime-containerd",
            "cdi",
            "toolkit-config",
        ),
    }
    assert differences(before, etc(node)) == {}
    becomes(node, "0")
    for unit in (UNIT, TIMER):
        assert not node.is_active(unit) and node.show(unit)["UnitFileState"] == "disabled"
    for engine in ENGINES:
        assert node.is_active(f"{engine}.service")
    for path in (f"{METRICS}/gpunode.prom", "/var/run/cdi/nvidia.yaml"):
        assert node.run("test", "-e", path).code == 1, path
    assert node.sh("systemctl --failed --plain --no-legend") == ""

    again = node.gpunode("reset")
    assert again.code == 0 and again.out.startswith("nothing to reset\n"), again.out + again.err


def test_resets_that_are_killed_are_finished_by_the_next(node: Machine, before: dict[str, str]) -> None:
    """Each run is killed a few changes further on, and has to recover from the one before."""
    with node.forks() as gpunode:
        for number in itertools.count(2, 5):
            killed = gpunode.run("reset", "--yes", env={}, killed_before=number)
            if killed.code == 0:
                break
            assert killed.code == -signal.SIGKILL, killed
    assert number > 20, killed
    assert differences(before, etc(node)) == {}
    again = node.gpunode("reset")
    assert again.code == 0 and again.out.startswith("nothing to reset\n"), again.out + again.err


def test_the_package_leaves_nothing_either(bare: Machine, before: dict[str, str]) -> None:
    assert bare.gpunode("reset", "--yes").code == 0
    apt(bare, "purge", "gpunode")
    assert set(differences(before, etc(bare))) == OF_THE_PACKAGE
