"""NVML that the dynamic loader doesn't find: in a platform's directory, or in a driver container's root."""

import os
import shutil
from pathlib import Path

import pytest

from fixtures.scenario import machine
from fixtures.stubs import SCENARIO_VARIABLE, build
from gpunode.gpu import library_paths
from gpunode.gpu.isolated import probe
from gpunode.gpu.library_paths import PLATFORM, nvml_outside_loader, protected_file
from gpunode.host import Host
from tests.gpu.children import run_python

SONAME = "libnvidia-ml.so.1"


def install(directory: Path) -> Path:
    directory.mkdir(parents=True)
    shutil.copy(build() / "nvml" / SONAME, directory / SONAME)
    return directory / SONAME


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may enter another root directory")
@pytest.mark.parametrize("condition", [False, True])
def test_nvml_is_queried_inside_the_root_of_a_driver_container(tmp_path, condition):
    root = tmp_path / "driver"
    install(root / "usr/lib64")
    machine(2).write(root / "scenario.txt")
    environ = {**os.environ, SCENARIO_VARIABLE: "/scenario.txt", "LD_LIBRARY_PATH": "/usr/lib64"}
    answer = probe(Host(environ=environ), root=str(root), topology=True, condition=condition)
    assert answer.inventory is not None, answer.message
    assert len(answer.inventory.gpus) == 2
    assert answer.topology is not None
    assert len(answer.conditions) == (2 if condition else 0)


def test_a_root_that_cannot_be_entered_is_an_answer(tmp_path):
    answer = probe(Host(environ=dict(os.environ)), root=str(tmp_path / "absent"))
    assert answer.inventory is None
    assert "can't enter" in answer.message


OPEN = """
import json, sys
from gpunode.gpu import library_paths
library_paths.PLATFORM = (sys.argv[1],)
from gpunode.gpu.nvml import Nvml
with Nvml.open() as nvml:
    print(json.dumps(nvml.device_count()))
"""


def test_nvml_in_a_directory_of_the_platform_is_loaded_from_there(tmp_path):
    path = install(tmp_path / "lib64")
    machine(3).write(tmp_path / "scenario.txt")
    environ = {SCENARIO_VARIABLE: str(tmp_path / "scenario.txt")}
    assert run_python(OPEN, environ, str(path.parent)) == 3


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_library_that_others_can_replace_is_not_loaded(tmp_path, mode):
    directory = tmp_path / PLATFORM[2].lstrip("/")
    directory.mkdir(parents=True)
    (directory / SONAME).write_bytes(b"")
    host = Host(tmp_path)
    assert nvml_outside_loader(host) == f"{PLATFORM[2]}/{SONAME}"
    directory.chmod(mode)
    assert nvml_outside_loader(host) == ""
    assert not protected_file(host, f"{PLATFORM[2]}/{SONAME}")
    directory.chmod(0o1777)  # sticky: nobody else can replace our file
    assert protected_file(host, f"{PLATFORM[2]}/{SONAME}")


def test_the_driver_root_is_the_last_place(tmp_path):
    for directory in (f"{library_paths.DRIVER_ROOT}/usr/lib64", "/run/opengl-driver/lib"):
        (tmp_path / directory.lstrip("/")).mkdir(parents=True)
        (tmp_path / directory.lstrip("/") / SONAME).write_bytes(b"")
    assert nvml_outside_loader(Host(tmp_path)) == f"/run/opengl-driver/lib/{SONAME}"
