"""`driver install` with the real apt and dpkg, in a namespace that is thrown away (driver_node.py)."""

from __future__ import annotations

import json
import os
import re
import shutil
from functools import cache

import pytest

from tests.packages.apt_root import Repository
from tests.packages.driver_node import (
    DRIVER,
    KERNEL,
    MIRRORED,
    MODULE_PACKAGE,
    MODULES,
    OLDER,
    VERSION,
    DriverNode,
    make_mirror,
    make_packages,
)

pytestmark = pytest.mark.full

BLACKLIST = "/etc/modprobe.d/blacklist-nouveau.conf"
GOOD = f"echo kernel/nvidia-580srv-open/nvidia.ko: >> {MODULES}/modules.dep\n"
BUILT_NOTHING = "true\n"
BREAKS = "echo 'no space for the module' >&2; exit 1\n"


def _cannot() -> str:
    if os.geteuid() != 0:
        return "needs root"
    if not re.fullmatch(r"[a-z0-9.+-]+", KERNEL):
        return f"no package can be named after the kernel {KERNEL}"
    missing = [
        name for name in ("apt-get", "dpkg-deb", "gpg", "unshare", "nsenter") if not shutil.which(name)
    ]
    return f"needs {', '.join(missing)}" if missing else ""


@pytest.fixture(scope="module")
def archive(signer, tmp_path_factory):
    """The archive with the driver and the script of its module package; built once for each script."""

    @cache
    def made(module: str) -> Repository:
        repository = Repository(tmp_path_factory.mktemp("archive") / "archive", signer)
        make_packages(repository, module=module)
        return repository

    return made


@pytest.fixture
def make(archive, tmp_path):
    """A node that has only this archive."""
    if _cannot():
        pytest.skip(_cannot())
    nodes = []

    def made(module: str = GOOD) -> DriverNode:
        nodes.append(DriverNode(tmp_path, archive(module)))
        if not nodes[-1].ready:
            pytest.skip("needs overlayfs in a mount namespace")
        return nodes[-1]

    yield made
    for one in nodes:
        one.close()


def test_executed_steps_match_the_plan_and_a_second_run_does_nothing(make):
    node = make()
    planned = json.loads(node.gpunode("driver", "plan", "-o", "json").out)["data"]
    assert planned["version"] == "580.173.02" and planned["refusals"] == [] and planned["reboot"] == ""
    ran = node.gpunode("driver", "install", "--yes", "--plan", planned["id"], "-o", "json")
    assert ran.code == 0, ran.err
    data = ran.document["data"]
    assert data["plan"] == planned and "apt-get remove" in data["undo"][0]
    assert data["commands"] == planned["commands"] and data["pending"] == []
    here = node.installed()
    assert {here[name] for name in DRIVER} == {VERSION} and MODULE_PACKAGE in here
    assert node.called() == [
        "update-initramfs -u -k all",
        "modprobe nvidia",
        "modprobe nvidia-uvm",
        "systemctl enable --now nvidia-persistenced.service",
    ]
    assert node.exists(BLACKLIST)
    again = node.gpunode("driver", "install", "--yes")
    assert again.code == 0 and "nothing to do" in again.out
    entries = json.loads(node.gpunode("journal", "list", "-o", "json").out)["data"]["entries"]
    assert [one["operation"] for one in entries] == ["driver-install"] and entries[0]["files"] == [BLACKLIST]


def test_requested_version_is_installed_and_a_newer_one_later(make):
    node = make()
    assert node.gpunode("driver", "install", "--yes", "--version", "580.159.03", "--hold").code == 0
    assert {node.installed()[name] for name in DRIVER} == {OLDER}
    assert set(node.sh("apt-mark showhold").split()) >= set(DRIVER)
    refused = node.gpunode("driver", "install", "--yes")
    assert refused.code == 3 and "a package hold keeps" in refused.err
    node.sh(f"apt-mark unhold {' '.join(DRIVER)}")
    assert node.gpunode("driver", "install", "--yes").code == 0
    assert {node.installed()[name] for name in DRIVER} == {VERSION}


@pytest.mark.parametrize("module", [BUILT_NOTHING, BREAKS])
def test_driver_without_a_module_is_removed_with_its_files(make, module):
    node = make(module)
    ran = node.gpunode("driver", "install", "--yes", "-o", "json")
    assert ran.code == 4, ran.err
    assert "were restored" in ran.err and node.installed() == {}
    assert not node.exists(BLACKLIST) and "modprobe nvidia" not in node.called()


def test_module_that_does_not_load_keeps_the_packages_and_lists_pending_steps(make):
    node = make()
    node.fake("modprobe", 1)
    ran = node.gpunode("driver", "install", "--yes", "-o", "json")
    assert ran.code == 1
    data = ran.document["data"]
    assert data["pending"][0] == "modprobe nvidia" and "systemctl" in data["pending"][-1]
    assert {node.installed()[name] for name in DRIVER} == {VERSION}


def test_half_installed_packages_of_a_killed_run_are_completed(make, archive):
    node = make()
    package = archive(GOOD).flat / f"nvidia-utils-580-server_{VERSION}.deb"
    node.sh(f"dpkg --unpack {package}")
    ran = node.gpunode("driver", "install", "--yes", "-o", "json")
    assert ran.code == 0, ran.err
    first = ran.document["data"]["commands"][0]
    assert " dpkg " in first and first.endswith("--configure -a")
    assert {node.installed()[name] for name in DRIVER} == {VERSION}
    node.sh(f"dpkg --unpack {package}")
    planned = json.loads(node.gpunode("driver", "plan", "-o", "json").out)["data"]
    assert not planned["upToDate"] and planned["commands"][0] == first


def test_another_package_manager_is_waited_for_with_a_limit(make):
    node = make()
    with node.locked():
        ran = node.gpunode("driver", "install", "--yes", "--lock-timeout", "0.2")
    # on an overlay the holder of the lock is unknown beforehand: apt reports it, and all is rolled back
    assert ran.code in (3, 4) and "lock" in ran.err
    assert node.installed() == {} and not node.exists(BLACKLIST)
    assert node.gpunode("driver", "install", "--yes").code == 0


def test_transitional_branch_and_unconfirmed_plan_change_nothing(make):
    node = make()
    before = node.sh("find /etc /var/lib/dpkg /var/lib/gpunode -newer /usr/local/sbin/modprobe 2>&1 || true")
    ran = node.gpunode("driver", "install", "--yes", "--branch", "570")
    assert ran.code == 3 and "transitional" in ran.err
    ran = node.gpunode("driver", "install", "--yes", "--plan", "0123456789ab")
    assert ran.code == 3 and "0123456789ab isn't this node's plan" in ran.err
    assert re.search(r"hint: .* --yes --plan [0-9a-f]{12}\n", ran.err)
    assert node.gpunode("driver", "install", "--dry-run").code == 0
    after = node.sh("find /etc /var/lib/dpkg /var/lib/gpunode -newer /usr/local/sbin/modprobe 2>&1 || true")
    assert after == before and node.called() == []


def test_repository_mirror_is_used_with_its_key(make, signer, tmp_path):
    node = make()
    mirror = Repository(tmp_path / "mirror", signer)
    make_mirror(mirror)
    node.write(f"{MODULES}/build/include/generated/autoconf.h", "")
    where = ("--repository", mirror.url)
    refused = node.gpunode("driver", "install", "--yes", *where)
    assert (
        refused.code == 3 and "hint: give the key that the mirror is signed with: --key FILE" in refused.err
    )
    ran = node.gpunode("driver", "install", "--yes", *where, "--key", str(mirror.key), "-o", "json")
    assert ran.code == 0, ran.err
    here = node.installed()
    assert {here[name] for name in ("libnvidia-compute-580", "nvidia-dkms-580-open")} == {MIRRORED}
    listed = node.sh("cat /etc/apt/sources.list.d/nvidia-driver.list")
    assert listed == f"deb [signed-by=/etc/apt/keyrings/nvidia-driver.asc] {mirror.url}/ubuntu2404/x86_64 /\n"
    again = node.gpunode("driver", "install", "--yes", *where, "--key", str(mirror.key))
    assert again.code == 0 and "nothing to do" in again.out
