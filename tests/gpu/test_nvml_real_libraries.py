"""NVIDIA's own libraries without a driver: the real errors, not those of the stubs."""

import json
import os
from pathlib import Path

import pytest

from fixtures.debian_driver import fetch_driver_libraries
from gpunode.cdi.driver_files import read_driver_files
from gpunode.gpu.child import start
from gpunode.gpu.nvml import DRIVER_NOT_LOADED
from gpunode.gpu.probe import probe
from gpunode.host import Host
from tests.cli import gpunode

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def libraries():
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("this machine has an NVIDIA driver: its absence can't be tested")
    try:
        return {"LD_LIBRARY_PATH": str(fetch_driver_libraries())}
    except RuntimeError as error:
        pytest.skip(f"Debian's libnvidia-ml1 and libcuda1 can't be fetched: {error}")


def test_real_nvml_reports_that_no_driver_is_loaded(libraries):
    answer = probe(Host(environ={**os.environ, **libraries}))
    assert (answer.inventory, answer.code, answer.timed_out) == (None, DRIVER_NOT_LOADED, False)
    assert "not loaded" in answer.message


def test_plugin_child_reports_the_unloaded_driver_and_ends(libraries):
    child = start(Host(environ={**os.environ, **libraries}), "gpunode.gpu.nvml_watcher", {})
    try:
        assert json.loads(child.read_line(20) or "")["error"]["code"] == DRIVER_NOT_LOADED
        assert child.read_line(5) == ""
    finally:
        assert child.end() == 0


def test_package_libraries_are_found_with_their_link_names(libraries):
    """Debian's directory behind its alternatives, with the links as the packages have them."""
    directory = Path(libraries["LD_LIBRARY_PATH"])
    root = next(parent for parent in directory.parents if parent.name == "unpacked")
    version = next(directory.glob("libcuda.so.*.*")).name.removeprefix("libcuda.so.")
    found = read_driver_files(Host(root, environ={}), version).libraries
    names = {library.name.partition(".so")[0]: set(library.links) for library in found}
    assert {"libcuda.so", "libcuda.so.1"} <= names["libcuda"]
    assert "libnvidia-ml.so.1" in names["libnvidia-ml"]


def test_gpus_prints_the_real_error(libraries):
    ran = gpunode("gpus", env=libraries)
    assert ran.code == 1
    assert "(NVML 9)" in ran.err


def test_real_libcuda_without_a_driver_is_a_reported_failure(libraries):
    ran = gpunode("verify", "-o", "json", env=libraries)
    assert ran.code == 1
    message = ran.document["errors"][0]["message"]
    assert message.startswith("cuInit: CUDA_ERROR_")
    assert ran.document["errors"][0]["hint"]
