"""Handler or CDI: the choice for a container, and the error if neither is possible."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpunode.errors import DaemonError, PreconditionError
from gpunode.host import Host
from gpunode.runtime.verify.container import CdiReading, choose

SPEC = 'cdiVersion: "0.5.0"\nkind: nvidia.com/gpu\ndevices:\n- {name: all, containerEdits: {env: [A=b]}}\n'


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(root=tmp_path)


@pytest.fixture
def described(host: Host) -> Host:
    """A node with a specification of its GPUs."""
    (host.root / "etc/cdi").mkdir(parents=True)
    (host.root / "etc/cdi/nvidia.yaml").write_text(SPEC)
    return host


READING = CdiReading("docker", (28, 5, 2), True)


def test_handler_is_preferred(described: Host) -> None:
    way = choose(described, "nvidia", False, ("runc", "nvidia"), READING)
    assert (way.handler, way.devices, str(way)) == ("nvidia", (), "handler nvidia")


def test_cdi_is_used_without_a_handler_if_the_engine_reads_a_specification(described: Host) -> None:
    way = choose(described, "nvidia", False, ("runc",), READING)
    assert (way.handler, way.devices, str(way)) == ("", ("nvidia.com/gpu=all",), "cdi nvidia.com/gpu=all")


def test_cdi_is_used_on_request(described: Host) -> None:
    assert choose(described, "nvidia", True, ("runc", "nvidia"), READING).devices


def test_engine_without_a_handler_list_is_trusted(host: Host) -> None:
    assert choose(host, "nvidia", False, None, READING).handler == "nvidia"


def test_handler_named_by_the_caller_is_never_replaced_by_cdi(described: Host) -> None:
    with pytest.raises(DaemonError) as caught:
        choose(described, "nvidia-legacy", False, ("runc",), READING)
    assert caught.value.code == "handler-missing"


@pytest.mark.parametrize("reading", [replace(READING, enabled=False), replace(READING, version=(20, 10))])
def test_without_handler_and_cdi_the_handler_is_missing(described: Host, reading: CdiReading) -> None:
    with pytest.raises(DaemonError) as caught:
        choose(described, "nvidia", False, ("runc",), reading)
    assert caught.value.code == "handler-missing"
    assert caught.value.hint.startswith("gpunode configure-runtime --runtime docker")


def test_both_commands_are_hinted_if_both_would_work(host: Host) -> None:
    with pytest.raises(DaemonError) as caught:
        choose(host, "nvidia", False, ("runc",), READING)
    plain, _, other = caught.value.hint.partition("; or, without a runtime: ")
    assert (plain, other) == (
        "gpunode configure-runtime --runtime docker",
        "gpunode configure-runtime --runtime docker --cdi",
    )


@pytest.mark.parametrize(
    ("reading", "code", "message"),
    [
        (CdiReading("containerd", (1, 6, 20)), "cdi-unknown", "containerd 1.6.20 knows no CDI"),
        (CdiReading("docker", (24, 0, 9)), "cdi-unknown", "Docker 24.0.9 knows no CDI; 25 is the first"),
        (CdiReading("podman", (4, 0, 3)), "cdi-unknown", "podman 4.0.3"),
        (CdiReading("containerd", (1, 7, 24), False), "cdi-disabled", "containerd as it runs now"),
        (CdiReading("containerd", (1, 7), False, manager="k3s"), "cdi-disabled", "k3s's containerd"),
        (CdiReading("docker", (28,), True, ("/nowhere",)), "cdi-no-specification", "is in /nowhere"),
    ],
)
def test_obstacle_to_cdi_is_reported_before_any_object_is_created(
    described: Host, reading: CdiReading, code: str, message: str
) -> None:
    with pytest.raises(PreconditionError) as caught:
        choose(described, "nvidia", True, ("nvidia",), reading)
    assert caught.value.code == code
    assert message in caught.value.message
    assert caught.value.hint


def test_hint_names_the_kubernetes_distribution(host: Host) -> None:
    reading = CdiReading("containerd", (1, 7), False, manager="rke2")
    with pytest.raises(PreconditionError) as caught:
        choose(host, "nvidia", True, (), reading)
    assert caught.value.hint == "gpunode configure-runtime --runtime rke2 --cdi"


def test_specification_of_another_vendor_is_ignored(host: Host) -> None:
    (host.root / "etc/cdi").mkdir(parents=True)
    (host.root / "etc/cdi/amd.yaml").write_text(SPEC.replace("nvidia.com", "amd.com"))
    with pytest.raises(PreconditionError) as caught:
        choose(host, "nvidia", True, (), READING)
    assert caught.value.code == "cdi-no-specification"


@pytest.mark.parametrize(
    ("name", "option"), [("gpu", "--nvidia-runtime-name gpu"), ("nvidia-legacy", "--also legacy")]
)
def test_hint_registers_the_requested_handler(described: Host, name: str, option: str) -> None:
    with pytest.raises(DaemonError) as caught:
        choose(described, name, False, ("runc",), READING)
    assert caught.value.hint.startswith(f"gpunode configure-runtime --runtime docker {option};")
