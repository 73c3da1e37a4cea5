"""`gpunode toolkit` on a real dnf and a real zypper with a signed repository, if this machine has them.

dnf 5 is in no stable Debian yet; on a machine that has it these tests pass as well.
"""

import shutil
import subprocess

import pytest

from tests.packages.apt_root import PACKAGES
from tests.packages.rpm_root import NEEDED, OTHERS, make_rpm_repository, make_rpm_root

pytestmark = pytest.mark.full

OLDER, NEWEST = (dict.fromkeys(PACKAGES, version) for version in ("1.19.0-1", "1.20.0-1"))
OURS = ("nvidia-container-toolkit.repo", "RPM-GPG-KEY-nvidia-container-toolkit")


@pytest.fixture(scope="module")
def mirror(signer, tmp_path_factory):
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing or subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], check=False).returncode:
        pytest.skip(f"needs {', '.join(missing) or 'the right to mount'}")
    return make_rpm_repository(tmp_path_factory.mktemp("rpm"), signer, "1.19.0", "1.20.0")


@pytest.fixture(params=["dnf", "dnf5", "zypper"])
def rpm(request, mirror, tmp_path):
    if shutil.which(request.param) is None:
        pytest.skip(f"needs {request.param}")
    return make_rpm_root(tmp_path / "root", request.param, next(mirror.base.glob(f"{OTHERS}-1.20*")))


def test_install_from_mirror_upgrade_from_file_and_remove(rpm, mirror):
    before = rpm.settings()
    asked = ("--repository", mirror.url, "--key", str(mirror.key))
    done = rpm.gpunode("toolkit", "install", *asked, "--version", "1.19.0")
    assert done.code == 0, done.err
    assert rpm.installed() == {OTHERS: "1.20.0-1", **OLDER}
    status = rpm.json("toolkit", "status")
    assert status["exitCode"] == 0
    for one in status["data"]["packages"]:
        assert (one["installed"], one["candidate"]) == ("1.19.0-1", "1.20.0-1")
        assert one["origins"] == one["candidateOrigins"] == ["nvidia-container-toolkit"]
    done = rpm.gpunode("toolkit", "install", "--from", str(mirror.flat), "--version", "1.20.0")
    assert done.code == 0, done.err
    assert rpm.installed() == {OTHERS: "1.20.0-1", **NEWEST}
    done = rpm.gpunode("toolkit", "remove")
    assert done.code == 0, done.err
    assert rpm.installed() == {OTHERS: "1.20.0-1"}
    assert not [path for path in rpm.settings().keys() - before.keys() if path.endswith(OURS)]


def test_repository_signed_by_another_key_is_refused(rpm, mirror):
    done = rpm.gpunode("toolkit", "install", "--repository", mirror.url)  # with NVIDIA's key
    assert done.code == 4 and "the repository's key is missing, expired or another" in done.err, done.err
    assert "were restored" in done.err and rpm.installed() == {OTHERS: "1.20.0-1"}
    assert not [path for path in rpm.settings() if path.endswith(OURS)]


def test_missing_mirror_is_reported(rpm, mirror, tmp_path):
    asked = ("--repository", f"file://{tmp_path}/none", "--key", str(mirror.key))
    done = rpm.gpunode("toolkit", "install", *asked)
    assert done.code == 4, done.err
    assert "hint: the repository can't be reached" in done.err or "hint: there is nothing at that" in done.err
    assert not [path for path in rpm.settings() if path.endswith(OURS)]
