"""Why an engine can't use a specification: determined from the files, whatever the engine's message."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpunode.errors import DaemonError
from gpunode.host import Host
from gpunode.runtime.verify.container import ALL, CdiReading, GpuAccess
from gpunode.runtime.verify.failures import explain, without_driver

GOOD = """\
cdiVersion: "0.5.0"
kind: nvidia.com/gpu
devices:
- name: all
  containerEdits: {deviceNodes: [{path: /dev/nvidia0, hostPath: /dev/nvidia0}]}
containerEdits:
  mounts: [{hostPath: /lib/libcuda.so.535, containerPath: /lib/libcuda.so.1}]
  hooks: [{hookName: createContainer, path: /usr/bin/nvidia-cdi-hook}]
"""
WAY = GpuAccess(CdiReading("podman", (4, 3, 1), True), devices=(ALL,))
UNRESOLVED = "setting up CDI devices: unresolvable CDI devices nvidia.com/gpu=all"


@pytest.fixture
def host(tmp_path: Path) -> Host:
    for directory in ("etc/cdi", "run/cdi", "lib", "usr/bin", "dev"):
        (tmp_path / directory).mkdir(parents=True)
    (tmp_path / "var").mkdir()
    (tmp_path / "var/run").symlink_to("/run")
    return Host(root=tmp_path)


def explained(host: Host, message: str = UNRESOLVED, way: GpuAccess = WAY) -> DaemonError:
    return explain(host, DaemonError(message), way)


def put(host: Host, text: str, path: str = "run/cdi/nvidia.yaml") -> None:
    (host.root / path).write_text(text)


def test_missing_specification(host: Host) -> None:
    error = explained(host)
    assert (error.code, error.hint) == ("cdi-no-specification", "gpunode cdi refresh")
    assert UNRESOLVED in error.message


def test_invalid_yaml_is_named(host: Host) -> None:
    put(host, "kind: nvidia.com/gpu\ndevices: [\n")
    error = explained(host)
    assert error.code == "cdi-unresolvable"
    assert error.message.startswith("/var/run/cdi/nvidia.yaml can't be parsed: ")


@pytest.mark.parametrize(("version", "fault"), [("0.6.0", True), ("1.1.0", True), ("0.5.0", False)])
def test_version_that_this_release_does_not_read(host: Host, version: str, fault: bool) -> None:
    put(host, GOOD.replace("0.5.0", version))
    said = f"/var/run/cdi/nvidia.yaml is written for CDI {version}, and podman 4.3.1 reads 0.5.0 at most"
    assert explained(host).message.startswith(said) is fault


@pytest.mark.parametrize("version", ["", "5", "a.b.c", "1.2.3.4"])
def test_invalid_version_is_not_the_cause(host: Host, version: str) -> None:
    put(host, GOOD.replace("0.5.0", version))
    assert explained(host).code == "cdi-unresolvable"


def test_device_in_no_file(host: Host) -> None:
    put(host, GOOD.replace("name: all", 'name: "0"'))
    assert "names no device all; it has 0" in explained(host).message


def test_device_in_two_files_of_one_directory(host: Host) -> None:
    put(host, GOOD)
    put(host, GOOD, "run/cdi/old.yaml")
    error = explained(host)
    assert "/var/run/cdi/nvidia.yaml and /var/run/cdi/old.yaml name the same device" in error.message


def test_same_device_in_both_directories_is_no_conflict(host: Host) -> None:
    put(host, GOOD)
    put(host, GOOD, "etc/cdi/nvidia.yaml")
    assert explained(host).message.startswith("the engine finds no CDI specification that names the GPUs")


@pytest.mark.parametrize("path", ["/lib/libcuda.so.535", "/dev/nvidia0", "/usr/bin/nvidia-cdi-hook"])
def test_missing_path_in_the_message_makes_the_specification_stale(host: Host, path: str) -> None:
    put(host, GOOD)
    message = f'error mounting "{path}": no such file or directory'
    assert explained(host, message).message.startswith(
        f"/var/run/cdi/nvidia.yaml names {path}, which does not exist: "
    )
    (host.root / path.lstrip("/")).touch()
    assert explained(host, message).code != "cdi-stale"


def test_other_failure_keeps_its_message(host: Host) -> None:
    put(host, GOOD)
    error = explain(host, DaemonError("out of cheese", hint="buy some", code="x"), WAY)
    assert (error.message, error.hint, error.code) == (f"cdi {ALL}: out of cheese", "buy some", "x")


def test_specification_without_libcuda_is_named_if_the_container_has_none(host: Host) -> None:
    put(host, GOOD.replace("libcuda", "libother"))
    assert "/var/run/cdi/nvidia.yaml mounts no libcuda.so" in without_driver(host, WAY).message


def test_mount_outside_the_loader_path_is_named_if_the_container_has_no_driver(host: Host) -> None:
    put(host, GOOD)
    error = without_driver(host, WAY)
    assert "mounts /lib/libcuda.so.535, but not where" in error.message
    assert error.code == "driver-not-injected"
