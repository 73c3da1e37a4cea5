"""vGPUs by the configuration space of PCI devices: valid, truncated and random."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from gpunode.facts.pci import VirtualGpu, parse_config_space, read_vgpus
from gpunode.host import Host

DEVICES = "sys/bus/pci/devices"


def config_space(*capabilities: bytes, status: int = 0x10) -> bytes:
    """256 bytes with these capabilities, each without its first two bytes, linked from 0x40 on."""
    data = bytearray(256)
    data[0:2] = b"\xde\x10"
    data[0x06] = status
    at = 0x40
    data[0x34] = at
    for number, (kind, body) in enumerate((one[0], one[1:]) for one in capabilities):
        after = at + 2 + len(body) + 3 & 0xFC
        data[at : at + 2 + len(body)] = bytes([kind, after if number + 1 < len(capabilities) else 0]) + body
        at = after
    return bytes(data)


def vgpu(*records: bytes) -> bytes:
    """NVIDIA's vendor-specific capability: its length, the mark, the records."""
    body = b"VF" + b"".join(records)
    return bytes([0x09, len(body) + 3]) + body


MSI = b"\x05" + bytes(12)
OTHER = b"\x01\x04\x00\x00"
HOST_DRIVER = b"\x00\x16" + b"550.90.05\0" + b"r550_00\0\0\0"


def test_host_driver_is_found_behind_other_records() -> None:
    assert parse_config_space(config_space(MSI, vgpu(OTHER, HOST_DRIVER))) == VirtualGpu(
        "550.90.05", "r550_00"
    )


def test_device_without_vgpu_data_is_not_a_vgpu() -> None:
    assert parse_config_space(config_space(MSI)) is None
    assert parse_config_space(config_space(b"\x09\x08hello")) is None
    assert parse_config_space(config_space(vgpu(HOST_DRIVER), status=0)) is None
    assert parse_config_space(config_space(vgpu(HOST_DRIVER))[:64]) is None


def test_vgpu_without_host_records_has_unknown_host() -> None:
    for records in ((), (OTHER,), (HOST_DRIVER[:12],), (b"\x01\x00",)):
        assert parse_config_space(config_space(vgpu(*records))) == VirtualGpu()


@given(st.binary(min_size=200, max_size=4096))
def test_any_bytes_are_parsed_without_an_error(data: bytes) -> None:
    found = parse_config_space(b"\0" * 6 + b"\x10" + data)
    assert found is None or data.count(b"VF"), "only a device that says VF is one"


def machine(root: Path, **devices: tuple[str, bytes]) -> Host:
    for number, (vendor, data) in enumerate(devices.values()):
        at = root / DEVICES / f"0000:{number:02x}:00.0"
        at.mkdir(parents=True)
        (at / "vendor").write_text(vendor + "\n")
        (at / "config").write_bytes(data)
    return Host(root, {})


def test_vgpus_of_a_machine_are_listed(tmp_path: Path) -> None:
    whole = config_space(vgpu(HOST_DRIVER))
    host = machine(tmp_path, a=("0x10de", config_space(MSI)), b=("0x8086", b""), c=("0x10de", whole))
    assert read_vgpus(host) == (VirtualGpu("550.90.05", "r550_00"),)


def test_unreadable_config_space_is_unknown_instead_of_no_vgpu(tmp_path: Path) -> None:
    assert read_vgpus(machine(tmp_path / "a", a=("0x10de", config_space(MSI)[:64]))) is None
    assert read_vgpus(Host(tmp_path / "b", {})) is None
    assert read_vgpus(machine(tmp_path / "c", a=("0x8086", b""))) == ()
