"""The first line of the doctor's report: it says ready only of GPUs that NVML was queried for."""

import pytest

from fixtures.machines import expected, machine, options, overlay
from gpunode.commands.demo import build_machine
from tests.cli import gpunode

READY = "This node is ready: no check found a fault"
NOT_EXAMINED = "No fault found; GPUs not examined: "


def headline(spec, root, *arguments):
    build_machine(spec, root)
    ran = gpunode("--root", str(root), "doctor", *arguments)
    document = gpunode("--root", str(root), "doctor", "-o", "json", *arguments).document
    html = gpunode("--root", str(root), "doctor", "-o", "html", *arguments).out
    return ran.out.splitlines()[0], document["data"]["gpusNotExamined"], html


def test_driver_container_with_responding_gpus_is_ready(tmp_path):
    line, why, html = headline(machine("gpu-operator-driver"), tmp_path / "m")
    assert (line, why) == (READY, "")
    assert f'<p class="verdict">{READY}</p>' in html


@pytest.mark.full
def test_driver_container_with_other_library_paths_is_examined(tmp_path):
    spec = overlay(machine("gpu-operator-driver"), {"remove": ["/run/nvidia/driver/usr/lib"]})
    spec["recording"]["devices"] = machine("healthy-h100")["recording"]["devices"]
    line, _, _ = headline(spec, tmp_path / "m")
    assert line == READY


@pytest.mark.full
def test_driver_container_without_a_device_file_is_not_ready(tmp_path):
    spec = machine("gpu-operator-driver")
    del spec["recording"]["devices"]["/run/nvidia/driver/dev/nvidiactl"]
    line, why, html = headline(spec, tmp_path / "m")
    assert (
        line
        == f"{NOT_EXAMINED}{why}"
        == f"{NOT_EXAMINED}NVML is not queried, because that would create /dev/nvidiactl"
    )
    assert "Ready" not in html


@pytest.mark.full
def test_machine_without_recorded_nvml_is_not_ready(tmp_path):
    spec = machine("healthy-h100")
    del spec["recording"]["nvml"]
    line, why, html = headline(spec, tmp_path / "m")
    assert line == f"{NOT_EXAMINED}nothing was recorded of this machine's NVML"
    assert line.endswith(why)
    assert NOT_EXAMINED.partition(";")[0] in html


def test_gpu_on_which_nvml_hangs_makes_the_node_not_examined(tmp_path):
    spec = machine("healthy-h100")
    del spec["recording"]["nvml"]["conditions"]["3"]
    spec["recording"]["nvml"]["problem"] = "NVML did not answer within 20 s"
    line, _, _ = headline(spec, tmp_path / "m")
    assert line.startswith(NOT_EXAMINED)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("pci-no-gpu-expected", "this node has no GPU, as expected"),
        ("vm-host", "all GPUs are reserved for virtual machines"),
    ],
)
def test_node_without_gpus_for_containers_is_not_ready(name, why, tmp_path):
    words = [f"--{key.replace('_', '-')}={value}" for key, value in options(name).items()]
    line, _, _ = headline(machine(name), tmp_path / "m", *words)
    assert line == NOT_EXAMINED + why


def test_page_of_a_container_ends_with_where_to_run_the_doctor(tmp_path):
    spec = overlay(machine("pci-no-gpu"), {"set": {"files": {"/.dockerenv": ""}}})
    build_machine(spec, tmp_path / "m")
    ran = gpunode("--root", str(tmp_path / "m"), "doctor", "--only", "pci-no-gpu")
    assert ran.out.endswith("\n\nThis is a container. Run gpunode doctor on its host.\n")
    assert "Fix first" not in ran.out


def test_uncorrectable_errors_are_reported_in_a_container(tmp_path):
    spec = overlay(machine("ecc-uncorrectable"), {"set": {"files": {"/.dockerenv": ""}}})
    build_machine(spec, tmp_path / "m")
    ran = gpunode("--root", str(tmp_path / "m"), "doctor", "-o", "json", "--only", "ecc-uncorrectable")
    (finding,) = ran.document["data"]["findings"]
    assert finding["status"] == expected("ecc-uncorrectable")["ecc-uncorrectable"]
