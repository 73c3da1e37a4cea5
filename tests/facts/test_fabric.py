"""NVSwitches and the fabric manager's log."""

import pytest

from gpunode.facts.fabric import (
    LOG,
    missing_requirements,
    package_version,
    parse_log,
    read_log,
    read_switches,
    versions_in,
)
from gpunode.facts.packages import Package, Packages
from gpunode.facts.pci import read_gpus
from gpunode.host import Host

START = (
    "[Nov 20 2026 06:02:11] [INFO] [tid 7] Fabric Manager version 580.159.03 is running with the following"
)
START += " configuration options"
REFUSED = (
    "[Nov 20 2026 06:02:12] [ERROR] [tid 7] fabric manager NVIDIA GPU driver interface version 580.126.09 "
    "don't match with driver version 580.159.03. Please update with matching NVIDIA driver package."
)
TOPOLOGY = "[ERROR] [tid 7] detected number of NVSwitches don't match with any supported system topology"


def test_log_is_read_from_the_last_start():
    old = "\n".join((START, TOPOLOGY, "[ERROR] detected NVSwitch fatal error 12028 on fid 0"))
    assert parse_log(f"{old}\n{START}\n[INFO] fine\n") == ()
    found = parse_log(f"{old}\n{START}\n[ERROR] [tid 7] detected NVSwitch non-fatal error 20034 on fid 0\n")
    assert [(one.kind, one.line) for one in found] == [("non-fatal", 5)]
    assert found[0].text == "detected NVSwitch non-fatal error 20034 on fid 0"


def test_refused_driver_is_reported_with_both_versions():
    (found,) = parse_log(f"{START}\n{REFUSED}\n")
    assert found.kind == "version"
    assert versions_in(found.text) == ("580.126.09", "580.159.03")
    assert versions_in("anything else") is None


def test_only_the_end_of_a_long_log_is_read(tmp_path):
    place = tmp_path / LOG.lstrip("/")
    place.parent.mkdir(parents=True)
    place.write_bytes(f"{START}\n".encode() + b"[INFO] \xff heartbeat\n" * 200_000 + f"{TOPOLOGY}\n".encode())
    (found,) = read_log(Host(tmp_path))
    assert (found.kind, found.line) == ("topology", None)
    place.write_text(f"{START}\n{TOPOLOGY}\n")
    assert read_log(Host(tmp_path))[0].line == 2
    place.unlink()
    assert read_log(Host(tmp_path)) == ()


@pytest.mark.parametrize(
    ("name", "version", "found"),
    [
        ("nvidia-fabricmanager-580", "580.159.03-0ubuntu1", ("nvidia-fabricmanager-580", "580.159.03")),
        ("nvidia-fabric-manager", "580.159.03-1", ("nvidia-fabric-manager", "580.159.03")),
        ("nvidia-fabricmanager-dev-580", "580.159.03-1", None),
        ("nvidia-fabricmanager-devel", "580.159.03-1", None),
        ("nvidia-fabricmanager", "garbled", None),
    ],
)
def test_version_is_read_from_the_package(name, version, found):
    packages = Packages("dpkg", {name: Package(name, version)})
    assert package_version(packages) == found


def device(root, address, **values):
    place = root / "sys/bus/pci/devices" / address
    place.mkdir(parents=True)
    driver = values.pop("driver", None)
    for name, value in values.items():
        (place / name).write_text(f"{value}\n")
    if driver:
        (place / "driver").symlink_to(f"../../../../bus/pci/drivers/{driver}")


GPU = {"vendor": "0x10de", "class": "0x030200"}
SWITCH = {"vendor": "0x10de", "class": "0x068000", "device": "0x22a3"}


def switches(root):
    host = Host(root)
    return [one.address for one in read_switches(host, read_gpus(host))]


def test_nvswitches_are_bridges_of_nvidia(tmp_path):
    device(tmp_path, "0000:18:00.0", device="0x2330", **GPU)
    device(tmp_path, "0000:07:00.0", driver="nvidia-nvswitch", **SWITCH)
    device(tmp_path, "0000:08:00.0", driver="vfio-pci", **SWITCH)
    device(tmp_path, "0000:00:1f.0", **{**SWITCH, "vendor": "0x8086"})
    assert switches(tmp_path) == ["0000:07:00.0"]


def test_nvswitches_without_a_gpu_are_ignored(tmp_path):
    device(tmp_path, "0000:07:00.0", driver="nvidia-nvswitch", **SWITCH)
    assert switches(tmp_path) == []


@pytest.mark.parametrize(
    ("gpu", "vpd", "found"),
    [("0x2901", b"..SW_MNG..", ["mlx5_0"]), ("0x2901", b"ConnectX-7", []), ("0x2330", b"..SW_MNG..", [])],
)
def test_blackwell_nvswitches_are_found_by_their_management_cards(tmp_path, gpu, vpd, found):
    device(tmp_path, "0000:18:00.0", device=gpu, **GPU)
    card = tmp_path / "sys/class/infiniband/mlx5_0/device"
    card.mkdir(parents=True)
    (card / "vpd").write_bytes(vpd)
    assert switches(tmp_path) == found


def test_requirements_of_a_blackwell_fabric_manager(tmp_path):
    host = Host(tmp_path)
    assert [missing.need for missing in missing_requirements(host)] == [
        "nvlsm",
        "infiniband-diags",
        "ib_umad",
    ]
    for path in ("opt/nvidia/nvlsm/sbin/nvlsm", "usr/sbin/ibstat", "sys/module/ib_umad/initstate"):
        place = tmp_path / path
        place.parent.mkdir(parents=True)
        place.write_text("live\n")
        place.chmod(0o755)
    assert missing_requirements(host) == ()
