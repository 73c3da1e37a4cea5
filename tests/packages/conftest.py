"""One signed repository for all tests, and an apt root for each."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.packages.apt_root import NEEDED, Signer, make_repository, make_root

MISSING = [name for name in NEEDED if shutil.which(name) is None]


@pytest.fixture(scope="session")
def signer():
    if MISSING or os.geteuid() != 0:
        reason = f"needs root and {', '.join(NEEDED)}; missing: {', '.join(MISSING) or 'root'}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    made = Signer()
    yield made
    made.close()


@pytest.fixture(scope="session")
def repository(signer, tmp_path_factory):
    """Two releases, the older one with a revision more."""
    return make_repository(tmp_path_factory.mktemp("mirror") / "libnvidia", signer, "1.19.0-1", "1.20.0-1")


# in memory if possible: dpkg and gpunode sync every file, and a disk is slow
DIRECTORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@pytest.fixture
def apt(signer):
    place = tempfile.mkdtemp(prefix="gpunode-apt-", dir=DIRECTORY)
    yield make_root(Path(place) / "root")
    shutil.rmtree(place)
