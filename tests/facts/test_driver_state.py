"""State and builds of the driver: firmware, crashes, parameters, DKMS's log."""

from pathlib import Path

import pytest

from gpunode.facts.driver import crash, firmware, firmware_versions, switched_off, wants_firmware
from gpunode.facts.kernel_log import KernelLine
from gpunode.facts.module_builds import failed_build
from gpunode.host import Host
from tests.files import write
from tests.required import required


def host(root: Path, files) -> Host:
    for name, text in files.items():
        write(root, name, text)
    return Host(root, environ={})


def lines(*texts):
    return tuple(KernelLine(float(number), text) for number, text in enumerate(texts))


@pytest.mark.parametrize(
    "place", ["RIP: 0010:_nv042643rm+0x1c/0x50 [nvidia]", "pc : uvm_va_block+0x4/0x8 [nvidia_uvm]"]
)
def test_driver_crash_is_recognized_by_the_instruction_address(place):
    log = lines(
        "eth0: link up", "BUG: unable to handle page fault", "Oops: 0000 [#1] SMP", place, "Call Trace:"
    )
    assert [line.text for line in crash(log)] == ["BUG: unable to handle page fault", place]


@pytest.mark.parametrize(
    "log",
    [
        (
            "BUG: unable to handle page fault",
            "RIP: 0010:ext4_read+0x1/0x2 [ext4]",
            " nv_open+0x1/0x9 [nvidia]",
        ),
        ("RIP: 0010:_nv042643rm+0x1c/0x50 [nvidia]",),
        ("WARNING: CPU: 3 PID: 1 at nvidia/nv.c:1 nv_open", "RIP: 0010:nv_open+0x1/0x2 [nvidia]"),
        ("BUG: soft lockup - CPU#3 stuck", *(["x"] * 61), "RIP: 0010:nv_open+0x1/0x2 [nvidia]"),
        (),
    ],
    ids=["another module's", "no crash", "a warning", "too far away", "nothing"],
)
def test_log_without_a_driver_crash_gives_none(log):
    assert crash(lines(*log)) == ()


def test_firmware_is_searched_in_the_kernels_paths(tmp_path):
    at = "usr/local/firmware/nvidia/580.159.03/gsp_ga10x.bin"
    parameter = "sys/module/firmware_class/parameters/path"
    custom = host(tmp_path / "custom", {at: "x", parameter: "/usr/local/firmware\n"})
    assert firmware(custom, "580.159.03", "6.8.0") == (
        "/usr/local/firmware/nvidia/580.159.03",
        "gsp_ga10x.bin",
    )
    usual = host(
        tmp_path / "usual", {"lib/firmware/nvidia/580.159.03/gsp_tu10x.bin.xz": "x", parameter: "\n"}
    )
    assert firmware(usual, "580.159.03", "6.8.0")[1:] == ("gsp_tu10x.bin.xz",)
    assert firmware(usual, "580.126.09", "6.8.0") == ()


def test_nouveau_firmware_has_no_driver_version(tmp_path):
    files = {
        "lib/firmware/nvidia/ga102/gsp/booter.bin": "",
        "lib/firmware/nvidia/535.309.01/gsp_ga10x.bin": "",
    }
    assert firmware_versions(host(tmp_path, files)) == ("535.309.01",)


def test_only_disabled_parameters_are_reported(tmp_path):
    usual = host(
        tmp_path / "a", {"proc/driver/nvidia/params": "ModifyDeviceFiles: 1\nEnableGpuFirmware: 18\n"}
    )
    assert switched_off(usual) == () and not wants_firmware(usual)
    off = host(tmp_path / "b", {"proc/driver/nvidia/params": "ModifyDeviceFiles: 0\nEnableGpuFirmware: 0\n"})
    assert switched_off(off) == ("ModifyDeviceFiles", "EnableGpuFirmware")
    assert switched_off(Host(tmp_path / "nothing", environ={})) == ()


LOG = """DKMS (dkms-3.0.11) make.log for nvidia-580.159.03 for kernel 6.14.0-15-generic (x86_64)
Wed Aug 26 03:10:11 UTC 2026
warning: the compiler differs from the one used to build the kernel
/var/lib/dkms/nvidia/580.159.03/build/nvidia/nv-mmap.c:312:5: error: implicit declaration of 'vm_flags_set'
make: *** [Makefile:82: modules] Error 2
"""


def test_first_compiler_error_is_the_reason_of_a_failed_build(tmp_path):
    node = host(tmp_path, {"var/lib/dkms/nvidia/580.159.03/build/make.log": LOG})
    found = required(failed_build(node, "6.14.0-15-generic"))
    assert (found.line, found.version, found.realtime) == (4, "580.159.03", False)
    assert found.text.endswith("'vm_flags_set'")
    assert failed_build(node, "6.14.0-15") is None, "another kernel's log says nothing about this one"


def test_build_log_without_a_compiler_error_gives_no_reason(tmp_path):
    text = LOG.replace("error: ", "warning: ")
    node = host(tmp_path, {"var/lib/dkms/nvidia/580.159.03/build/make.log": text})
    assert failed_build(node, "6.14.0-15-generic") is None
