"""NVML that the dynamic loader doesn't find: in a platform's directory, or in a driver container's root."""

import os
import shutil
from pathlib import Path

import pytest

from fixtures.scenario import machine
from fixtures.stubs import SCENARIO_VARIABLE, build
from gpunode.gpu import library_paths
from gpunode.gpu.library_paths import nvml_outside_loader
from gpunode.gpu.probe import probe
from gpunode.host import Host

SONAME = "libnvidia-ml.so.1"
OTHER = 61001


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
    answer = probe(Host(environ=environ), root=str(root), condition=condition)
    assert answer.inventory is not None, answer.message
    assert len(answer.inventory.gpus) == 2
    assert len(answer.conditions) == (2 if condition else 0)


def test_root_that_cannot_be_entered_is_an_error_result(tmp_path):
    answer = probe(Host(environ=dict(os.environ)), root=str(tmp_path / "absent"))
    assert answer.inventory is None
    assert "can't enter" in answer.message


def test_nvml_is_loaded_from_a_platform_directory(tmp_path, monkeypatch):
    path = install(tmp_path / "lib64")
    machine(3).write(tmp_path / "scenario.txt")
    environ = {**os.environ, SCENARIO_VARIABLE: str(tmp_path / "scenario.txt")}
    monkeypatch.setattr(library_paths, "PLATFORM", (str(path.parent),))
    answer = probe(Host(environ=environ))
    assert answer.inventory is not None, answer.message
    assert len(answer.inventory.gpus) == 3


@pytest.mark.parametrize(
    ("modes", "owner", "loaded"),
    [
        ({}, 0, True),
        ({"lib": 0o1777}, 0, True),  # sticky: other users can't replace root's file
        ({"lib": 0o1777}, OTHER, False),
        ({"lib": 0o777}, 0, False),
        ({"lib": 0o775}, 0, False),
        ({"": 0o777}, 0, False),
        ({f"lib/{SONAME}": 0o1666}, 0, False),  # the sticky bit of a file protects nothing
        ({"real/nvml": 0o666}, 0, False),
        ({"real": 0o777}, 0, False),
    ],
)
def test_library_that_other_users_can_replace_is_not_loaded(
    place: Path, monkeypatch: pytest.MonkeyPatch, modes: dict[str, int], owner: int, loaded: bool
) -> None:
    """`owner` owns the contents of the directory, or a link if the modes name its target."""
    path = place / "lib" / SONAME
    for directory in ("lib", "real"):
        (place / directory).mkdir()
    (place / "real/nvml").write_bytes(b"")
    if any(name.startswith("real") for name in modes):
        path.symlink_to("../real/nvml")
    else:
        path.write_bytes(b"")
    os.chown(path, owner, owner, follow_symlinks=False)
    for name, mode in modes.items():
        (place / name).chmod(mode)
    monkeypatch.setattr(library_paths, "PLATFORM", (str(place / "lib"),))
    assert nvml_outside_loader(Host()) == (str(path) if loaded else "")


def test_library_behind_a_symlink_of_another_user_is_not_loaded(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "nvml").write_bytes(b"")
    (place / SONAME).symlink_to("nvml")
    monkeypatch.setattr(library_paths, "PLATFORM", (str(place),))
    assert nvml_outside_loader(Host()) == f"{place}/{SONAME}"
    os.chown(place / SONAME, OTHER, OTHER, follow_symlinks=False)
    assert nvml_outside_loader(Host()) == ""


def test_driver_root_is_searched_last(tmp_path):
    for directory in (f"{library_paths.DRIVER_ROOT}/usr/lib64", "/run/opengl-driver/lib"):
        (tmp_path / directory.lstrip("/")).mkdir(parents=True)
        (tmp_path / directory.lstrip("/") / SONAME).write_bytes(b"")
    assert nvml_outside_loader(Host(tmp_path)) == f"/run/opengl-driver/lib/{SONAME}"


def test_inaccessible_directory_holds_no_library(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin's unit has no access to /home (ProtectHome=), where Container-Optimized OS has libraries."""
    (place / "hidden").mkdir(mode=0o700)
    monkeypatch.setattr(library_paths, "PLATFORM", (f"{place}/hidden",))
    child = os.fork()
    if child == 0:
        os.setresuid(OTHER, OTHER, OTHER)
        os._exit(0 if nvml_outside_loader(Host()) == "" else 1)
    assert os.waitpid(child, 0)[1] == 0
