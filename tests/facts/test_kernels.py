import pytest

from gpunode.facts.boot import chosen_kernel, kernel_waiting
from gpunode.facts.kernels import Kernel, newer_kernels
from gpunode.facts.module_builds import failed_build
from gpunode.facts.system import clock
from gpunode.host import Host
from tests.files import write

RUNNING, NEWER = "5.15.0-122-generic", "5.15.0-124-generic"


@pytest.mark.parametrize(
    ("packages", "waits"),
    [
        (f"linux-image-{NEWER}\nlinux-base\n", NEWER),
        (f"linux-image-unsigned-{NEWER}\n", NEWER),
        ("libc6\ndbus\n", None),
        (f"linux-image-{RUNNING}\n", None),
        ("linux-image-5.15.0-999-generic\n", None),
        ("", None),
    ],
)
def test_only_an_installed_newer_kernel_is_pending(tmp_path, packages, waits):
    write(tmp_path, "run/reboot-required.pkgs", packages)
    kernels = (Kernel(RUNNING, True), Kernel(NEWER, True))
    assert kernel_waiting(Host(tmp_path), kernels, RUNNING) == waits


def test_grub_environment_names_the_chosen_entry(tmp_path):
    assert chosen_kernel(Host(tmp_path)) == ""
    write(
        tmp_path,
        "boot/grub2/grubenv",
        "# GRUB\nsaved_entry=0f0e-5.14.0-427.el9.x86_64\n#####",
    )
    assert chosen_kernel(Host(tmp_path)) == "0f0e-5.14.0-427.el9.x86_64"


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("5.15.0-99-generic", "5.15.0-122-generic"),
        ("6.12.0-55.el10.x86_64", "6.12.0-55.9.1.el10_0.x86_64"),
        ("6.12.48+deb13-amd64", "6.12.48+deb13.1-amd64"),
        ("6.1.112-122.189.amzn2023.x86_64", "6.12.8-30.68.amzn2023.x86_64"),
        ("6.4.0-150600.9-default", "6.4.0-150600.23.25-default"),
    ],
)
def test_kernels_are_sorted_by_release(older, newer):
    kernels = (Kernel(older, True), Kernel(newer, True))
    assert [one.release for one in newer_kernels(kernels, older)] == [newer]
    assert newer_kernels(kernels, newer) == ()


def test_oracle_kernel_is_not_a_newer_red_hat_kernel():
    kernels = (Kernel("5.14.0-427.el9.x86_64", True), Kernel("5.15.0-206.153.7.el9uek.x86_64", False))
    assert newer_kernels(kernels, "5.14.0-427.el9.x86_64") == ()


LOG = "var/lib/dkms/nvidia/580.95.05/build/make.log"
SOURCE = "/var/lib/dkms/nvidia/580.95.05/build/nvidia/nv-mmap.c:512:5: error: too few arguments to function"


@pytest.mark.parametrize(
    ("head", "line", "found"),
    [
        (f"DKMS make.log for nvidia-580.95.05 for kernel {RUNNING} (x86_64)", SOURCE, True),
        (f"DKMS (dkms-3.2.2) make.log for nvidia/580.95.05 for kernel {RUNNING} (x86_64)", SOURCE, True),
        (f"DKMS make.log for nvidia-580.95.05 for kernel {NEWER} (x86_64)", SOURCE, False),
        (f"DKMS make.log for nvidia-580.95.05 for kernel {RUNNING}-rt (x86_64)", SOURCE, False),
        (
            f"make.log for kernel {RUNNING} (x86_64)",
            "gcc: error: unrecognized option '-fx'",
            False,
        ),
        (f"make.log for kernel {RUNNING} (x86_64)", "nv.c:12:1: warning: -Werror= isn't an error: no", False),
        (
            f"make.log for kernel {RUNNING} (x86_64)",
            "ERROR: modpost: GPL-incompatible module nvidia.ko uses GPL-only symbol '__rcu_read_lock'",
            True,
        ),
    ],
)
def test_only_compiler_errors_in_the_sources_are_a_failed_build(tmp_path, head, line, found):
    write(tmp_path, LOG, f"{head}\ndate\nmake[1]: Entering directory '/usr/src'\n{line}\nmake: *** Error 2\n")
    failed = failed_build(Host(tmp_path), RUNNING)
    assert (failed is not None) == found
    if failed is not None:
        assert (failed.text, failed.version, failed.realtime) == (line, "580.95.05", False)


def test_recording_has_the_time_of_its_machine(tmp_path):
    assert clock(Host(tmp_path)) == 0.0
    write(tmp_path, "proc/stat", "btime 1000\n")
    write(tmp_path, "proc/uptime", "20.50 1.00\n")
    assert clock(Host(tmp_path)) == 1020.5
