"""The .deb and the offline bundle on machines that have no gpunode: install, upgrade, remove, purge."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from fixtures.debian_base import PYTHONS, base
from fixtures.stubs import SCENARIO_IN_CONTAINER
from gpunode import __version__
from scripts.build_packages import deb, rpm, system_tree, write
from tests.dist import NEXT
from tests.machine.booted import PACKAGES, Machine, apt
from tests.machine.test_kubernetes import UNIT, becomes, changes, node_with_kubelet


@pytest.mark.skipif(shutil.which("rpmbuild") is None, reason="rpmbuild is not installed")
def test_rpm_has_the_files_of_the_deb(tmp_path: Path) -> None:
    root = tmp_path / "root"
    write(root / "opt/gpunode/lib/shared/gpunode/__init__.py", "")
    system_tree(root)
    package = rpm(root, tmp_path, __version__)
    listed = subprocess.run(["rpm", "-qlp", package], capture_output=True, text=True, check=True)
    dpkg = ["dpkg-deb", "--contents", str(deb(root, tmp_path, __version__))]
    contents = subprocess.run(dpkg, capture_output=True, text=True, check=True).stdout.splitlines()
    packed = {line.split()[5].removeprefix(".") for line in contents if not line.startswith("d")}
    directories = {f"/{path.relative_to(root)}" for path in root.rglob("*") if path.is_dir()}
    assert packed and set(listed.stdout.splitlines()) - directories == packed
    config = subprocess.run(["rpm", "-qcp", package], capture_output=True, text=True, check=True)
    assert config.stdout == "/etc/gpunode/env\n"


# rpm in a Debian root, in which no rpm database names python3: hence --nodeps
_RPM_ROOT = """\
set -e
mount -t tmpfs tmpfs $2
mkdir $2/upper $2/work $2/root
mount -t overlay -o lowerdir=$1,upperdir=$2/upper,workdir=$2/work overlay $2/root
cd $2/root
rpm() { command rpm --root "$PWD" --dbpath /var/lib/rpm "$@"; }
rpm -i --nodeps "$3"
chroot . /usr/bin/gpunode --version
chroot . readlink -f /opt/gpunode/bin/python3
chroot . gpunode manifests all > /dev/null
rpm -V --nodeps gpunode
rm -r opt/gpunode/lib/shared/gpunode opt/gpunode/pyvenv.cfg # half of an installation
rpm -U --nodeps --replacepkgs "$3"
chroot . /usr/bin/gpunode --version
echo GPUNODE_PLUGIN_SERVE_LOG_LEVEL=info >> etc/gpunode/env
rpm -U --nodeps "$4"
chroot . /usr/bin/gpunode --version
tail -n 1 etc/gpunode/env
mkdir -p var/lib/gpunode/journal
rpm -e gpunode
find . -xdev -name '*gpunode*'
"""


@pytest.mark.skipif(shutil.which("rpmbuild") is None, reason="rpmbuild is not installed")
def test_rpm_installs_is_repaired_upgrades_and_goes(suite: str, dist: Path, tmp_path: Path) -> None:
    packages = [dist / f"gpunode-{version}-1.x86_64.rpm" for version in (__version__, NEXT)]
    unshare = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", _RPM_ROOT, "sh")
    argv = [*unshare, *map(str, (base(suite), tmp_path, *packages))]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    version = f"gpunode {__version__}"
    printed, left = done.stdout.splitlines()[:5], done.stdout.splitlines()[5:]
    settings = "GPUNODE_PLUGIN_SERVE_LOG_LEVEL=info"
    assert printed == [version, f"/usr/bin/python{PYTHONS[suite]}", version, version, settings]
    assert sorted(left) == ["./etc/gpunode", "./var/lib/gpunode"]


def deb_of(version: str) -> str:
    """The package's path in the machine."""
    return f"{PACKAGES}/gpunode_{version}_amd64.deb"


@pytest.fixture
def bare(bare: Machine) -> Machine:
    """The machine that the tests of this module share, without what an earlier one installed."""
    bare.sh("dpkg --purge gpunode; rm -rf /opt/gpunode /tmp/gpunode-*")
    if bare.show("kubelet.service")["LoadState"] == "loaded":  # the stub runs with the Python of gpunode
        bare.sh("systemctl disable --now kubelet; rm -r /etc/systemd/system/kubelet.service /var/lib/kubelet")
        bare.sh("systemctl daemon-reload && systemctl reset-failed")
    return bare


@pytest.fixture
def node(bare: Machine) -> Machine:
    """The machine with the package of this version."""
    apt(bare, "install", deb_of(__version__))
    return bare


def test_deb_installs_and_runs(node: Machine) -> None:
    assert node.sh("readlink -f /opt/gpunode/bin/python3") == f"/usr/bin/python{PYTHONS[node.suite]}\n"
    assert node.gpunode("--version").out == f"gpunode {__version__}\n"
    doctor = node.gpunode("doctor", user="ada")
    assert doctor.code == 0 and doctor.out.startswith("This node is ready"), doctor.out + doctor.err
    assert node.sh("dpkg --verify gpunode") == ""
    assert node.sh("systemd-analyze verify gpunode-device-plugin.service 2>&1") == ""
    assert node.gpunode("manifests", "all").code == 0
    assert "complete -" in node.sh("cat /usr/share/bash-completion/completions/gpunode")


def test_damaged_or_half_installed_deb_is_repaired(node: Machine) -> None:
    package = deb_of(__version__)
    node.sh("rm -r /opt/gpunode/lib/shared/gpunode /opt/gpunode/pyvenv.cfg")
    assert node.gpunode("--version").code != 0
    apt(node, "install", "--reinstall", package)
    assert node.gpunode("--version").out == f"gpunode {__version__}\n"
    node.sh(f"dpkg --unpack {package}")  # as far as an interrupted installation came
    assert "gpunode" in node.sh("dpkg --audit")
    node.sh("dpkg --configure -a")
    assert node.sh("dpkg --verify gpunode && dpkg --audit") == ""


def gap(machine: Machine, seen: int) -> tuple[float, float]:
    """When the kubelet lost the GPUs and when it had them again, once each since its first `seen` changes."""
    machine.wait(lambda: len(changes(machine)) >= seen + 2, lambda: machine.journal(UNIT))
    (lost, none), (back, all_of_them) = changes(machine)[seen:]
    assert (none, all_of_them) == (0, 2)
    return lost, back


def processor_seconds(machine: Machine, unit: str) -> float:
    """CPU time that the unit's main process and its children have used: unlike the time that passes, it does
    not depend on what else this machine does."""
    process = machine.show(unit)["MainPID"]
    stats = machine.sh(
        f"for pid in {process} $(pgrep -P {process}); do cat /proc/$pid/stat; done"
    ).splitlines()
    # utime and stime, see proc(5); the second field is a name in parentheses
    ticks = sum(int(field) for line in stats for field in line.rpartition(")")[2].split()[11:13])
    return ticks / os.sysconf("SC_CLK_TCK")


def test_upgrade_restarts_the_plugin_once_and_keeps_the_settings(node: Machine) -> None:
    """The plugin serves until the new version is unpacked and has its Python and bytecode, and restarts once.

    The GPUs are gone for less than 2 s where a processor is free: most of it is the new plugin's CPU time.
    """
    node_with_kubelet(node)
    node.sh(f"echo GPUNODE_PLUGIN_SERVE_LOG_LEVEL=info >> /etc/gpunode/env; systemctl enable --now {UNIT}")
    becomes(node, "2")
    before, seen = node.show(UNIT)["MainPID"], len(changes(node))
    apt(node, "install", deb_of(NEXT))
    lost, back = gap(node, seen)
    used = processor_seconds(node, UNIT)
    assert float(node.sh("stat -c %.Y /opt/gpunode/pyvenv.cfg")) < lost
    compiled_later = f"find /opt/gpunode/lib/shared/gpunode -name '*.pyc' -newermt @{lost:.3f}"
    assert node.sh(compiled_later) == ""
    assert node.show(UNIT)["MainPID"] not in (before, "0") and node.show(UNIT)["NRestarts"] == "0"
    assert node.sh("tail -n 1 /etc/gpunode/env") == "GPUNODE_PLUGIN_SERVE_LOG_LEVEL=info\n"
    print(f"upgrade: without GPUs for {back - lost:.2f} s, {used:.2f} s of CPU time of the new plugin")
    assert used < 1.0, node.journal(UNIT)
    seen = len(changes(node))
    node.sh(f"systemctl restart {UNIT}")
    lost, back = gap(node, seen)
    used = processor_seconds(node, UNIT)
    print(f"restart: without GPUs for {back - lost:.2f} s, {used:.2f} s of CPU time of the new plugin")
    assert used < 1.0, node.journal(UNIT)


def test_purge_removes_only_files_of_gpunode(node: Machine) -> None:
    done = node.gpunode("configure-runtime", "--runtime", "containerd")
    assert done.code == 0, done.err
    configured = node.sh("cat /etc/containerd/config.toml")
    assert "warning: gpunode's changes to this node stay\n" in apt(node, "remove", "gpunode", "2>&1")
    assert node.run("test", "-e", "/opt/gpunode").code == 1
    node.sh("test -e /var/lib/gpunode/journal && test -e /etc/gpunode/env")
    assert node.show(UNIT)["LoadState"] == "not-found"
    apt(node, "purge", "gpunode")
    for path in ("/var/lib/gpunode", "/etc/gpunode", "/usr/bin/gpunode"):
        assert node.run("test", "-e", path).code == 1, path
    assert node.sh("cat /etc/containerd/config.toml") == configured
    of_the_test = ("/srv/*", "/run/*", f"{SCENARIO_IN_CONTAINER}*")
    others = " ".join(f"-not -path '{path}'" for path in of_the_test)
    assert node.sh(f"find / -xdev -name '*gpunode*' {others}") == ""


def test_bundle_installs_offline_and_is_removed(bare: Machine) -> None:
    name = f"gpunode-{__version__}-linux-x86_64"
    # as README says: a user unpacks it, and owns the files
    bare.sh(f"install -m 644 {PACKAGES}/{name}.tar.gz /tmp")
    bare.sh(f"umask 0002 && tar -C /tmp -xzf /tmp/{name}.tar.gz", user="ada")
    bare.sh(f"echo 'raise SystemExit(7)' > /tmp/compileall.py; cd /tmp && umask 077 && ./{name}/install.sh")
    writable = "find /opt/gpunode ! -type l '(' ! -user root -o -perm /022 ')'"
    assert bare.sh(writable) == ""
    assert bare.gpunode("--version", user="ada").code == 0
    assert bare.gpunode("--version").out == f"gpunode {__version__}\n"
    assert bare.sh("systemd-analyze verify gpunode-device-plugin.service 2>&1") == ""
    bare.sh(f"/tmp/{name}/install.sh")  # again, over itself
    assert bare.gpunode("gpus").code == 0
    package = deb_of(__version__)
    both = bare.run("apt-get", "-y", "-q", "install", package)
    assert both.code != 0 and "does not belong to this package" in both.out + both.err
    bare.sh(f"/tmp/{name}/install.sh --remove")
    assert bare.run("test", "-e", "/opt/gpunode").code == 1
    bare.sh("echo mine > /usr/local/bin/gpunode")
    bare.sh(f"/tmp/{name}/install.sh --remove")
    assert bare.sh("cat /usr/local/bin/gpunode && rm /usr/local/bin/gpunode") == "mine\n"
    assert bare.run("sh", f"/tmp/{name}/install.sh", "--help").code == 2
    bare.sh("mkdir -p /opt/gpunode && touch /opt/gpunode/mine")
    for options in ((), ("--remove",)):
        kept = bare.run(f"/tmp/{name}/install.sh", *options)
        assert kept.code == 3 and bare.run("test", "-e", "/opt/gpunode/mine").code == 0, kept
    refused = bare.run("sh", f"/tmp/{name}/install.sh", user="ada")
    assert refused.code == 3 and "hint: sudo" in refused.err
