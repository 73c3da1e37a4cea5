"""Pure parsers over text as real machines print it."""

import pytest

from gpunode.commands.demo import build_machine
from gpunode.facts.cdi import CdiNode, parse_spec
from gpunode.facts.devices import character_majors, expected_major
from gpunode.facts.driver import driver_packages, version_numbers
from gpunode.facts.kernels import Kernel, flavour, lists_module, newer_kernels
from gpunode.facts.kubelet import find_kubelet, setting
from gpunode.facts.libraries import find_library, linked_libraries
from gpunode.facts.module_builds import enforces_signatures
from gpunode.facts.packages import read_packages
from gpunode.facts.pci import read_gpus
from gpunode.facts.processes import Process
from gpunode.facts.system import BARE_METAL, CONTAINER, TEGRA, VM, WSL2, family_of, node_class
from gpunode.facts.toolkit import find_toolkit
from gpunode.gpu.library_paths import DRIVER_ROOT, IN_DRIVER_ROOT, PLATFORM
from gpunode.host import Host


def host(root, **sections):
    return Host(build_machine(sections, root), environ={})


@pytest.mark.parametrize(
    ("identifier", "like", "family"),
    [
        ("ubuntu", "debian", "debian"),
        ("pop", "ubuntu debian", "debian"),
        ("rocky", "rhel centos fedora", "rhel"),
        ("amazon", "fedora", "rhel"),
        ("sles", "suse", "suse"),
        ("opensuse-leap", "suse opensuse", "suse"),
        ("arch", "", "other"),
        ("rhcos", "rhel fedora", "other"),
        ("", "", "other"),
    ],
)
def test_distribution_family(identifier, like, family):
    assert family_of(identifier, like) == family


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"/sys/class/dmi/id/sys_vendor": "Supermicro\n"}, BARE_METAL),
        ({"/sys/class/dmi/id/sys_vendor": "QEMU\n"}, VM),
        (
            {
                "/sys/class/dmi/id/sys_vendor": "Amazon EC2\n",
                "/sys/class/dmi/id/product_name": "p5.48xlarge\n",
            },
            VM,
        ),
        (
            {
                "/sys/class/dmi/id/sys_vendor": "Amazon EC2\n",
                "/sys/class/dmi/id/product_name": "g4dn.metal\n",
            },
            BARE_METAL,
        ),
        ({"/proc/cpuinfo": "flags\t\t: fpu hypervisor sse\n"}, VM),
        ({"/proc/sys/kernel/osrelease": "5.15.153.1-microsoft-standard-WSL2\n"}, WSL2),
        ({"/etc/nv_tegra_release": "# R36\n"}, TEGRA),
        ({"/.dockerenv": ""}, CONTAINER),
        ({"/sys/class/dmi/id/sys_vendor": "QEMU\n", "/run/.containerenv": ""}, CONTAINER),
    ],
)
def test_kind_of_node(files, expected, tmp_path):
    assert node_class(host(tmp_path, files=files)) == expected


@pytest.mark.parametrize(("data", "state"), [("BgAAAAE=", True), ("BgAAAAA=", False), ("AQ==", None)])
def test_secure_boot_state_is_the_byte_after_the_attributes(data, state, tmp_path):
    path = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
    assert enforces_signatures(host(tmp_path, binary={path: data})) is state


def test_only_nvidia_display_functions_are_gpus(tmp_path):
    def function(address, vendor, kind):
        place = f"/sys/bus/pci/devices/{address}"
        return {f"{place}/vendor": vendor, f"{place}/class": kind, f"{place}/numa_node": "-1\n"}

    files = function("0000:01:00.0", "0x10de\n", "0x030000\n") | function(
        "0000:01:00.1", "0x10de\n", "0x040300\n"
    )
    files |= function("0000:02:00.0", "0x1002\n", "0x030000\n") | function(
        "0000:03:00.0", "0x10de\n", "0x068000\n"
    )
    (gpu,) = read_gpus(host(tmp_path, files=files))
    assert (gpu.address, gpu.driver, gpu.numa) == ("0000:01:00.0", None, None)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("updates/dkms/nvidia.ko: kernel/a.ko", True),
        ("extra/nvidia.ko.xz:", True),
        ("updates/dkms/nvidia-current.ko.zst: x.ko", True),
        ("kernel/drivers/net/ethernet/nvidia/forcedeth.ko:", False),
        ("updates/nvidia-uvm.ko: updates/nvidia.ko", False),
    ],
)
def test_modules_dep_entry_matches_the_whole_module_name(line, expected):
    assert lists_module(f"kernel/fs/ext4.ko:\n{line}\n") is expected


def test_versions_compare_as_numbers():
    assert version_numbers("384.81") < version_numbers("384.111") < version_numbers("550.54.14")
    assert version_numbers("not a version") == ()


@pytest.mark.parametrize(
    ("running", "other", "newer"),
    [
        ("5.15.0-91-generic", "5.15.0-101-generic", True),
        ("5.15.0-101-generic", "5.15.0-91-generic", False),
        ("5.15.0-91-generic", "6.8.0-1013-azure", False),
        ("5.14.0-362.8.1.el9_3.x86_64", "5.14.0-427.13.1.el9_4.x86_64", True),
        ("5.14.0-427.13.1.el9_4.x86_64", "5.14.0-427.16.1.el9_4.x86_64+debug", False),
        ("6.4.0-150600.21-default", "6.4.0-150600.23.25-default", True),
        ("6.1.0-18-amd64", "6.1.0-21-amd64", True),
        ("6.1.0-18-amd64", "6.1.0-21-cloud-amd64", False),
    ],
)
def test_only_a_newer_kernel_of_the_same_flavour_boots_next(running, other, newer):
    found = newer_kernels((Kernel(running, True), Kernel(other, False)), running)
    assert bool(found) is newer, flavour(other)


def test_dpkg_lists_driver_packages_without_libraries(tmp_path):
    status = "Package: {}\nStatus: {}\n"
    blocks = [
        status.format("nvidia-dkms-550", "install ok installed"),
        status.format("nvidia-driver-470", "deinstall ok config-files"),
        status.format("libnvidia-compute-550", "install ok installed"),
        status.format("nvidia-container-toolkit", "install ok installed"),
    ]
    machine = host(tmp_path, files={"/var/lib/dpkg/status": "\n".join(blocks)})
    assert driver_packages(read_packages(machine)) == ("nvidia-dkms-550",)


def test_majors_are_read_from_the_character_devices(tmp_path):
    majors = character_majors(
        "Character devices:\n195 nvidia-frontend\n511 nvidia-uvm\n\nBlock devices:\n 8 nvidia-uvm\n"
    )
    assert majors == {"nvidia-frontend": 195, "nvidia-uvm": 511}
    assert expected_major("/dev/nvidia0", majors) == 195
    assert expected_major("/dev/nvidia-uvm-tools", majors) == 511
    assert expected_major("/dev/nvidia-caps/nvidia-cap1", majors) is None


def test_library_on_disk_missing_in_the_linker_cache_is_not_linked(tmp_path):
    files = {"/opt/nvidia/lib64/libcuda.so.550.54.14": "x"}
    machine = host(tmp_path, files=files, links={"/opt/nvidia/lib64/libcuda.so.1": "libcuda.so.550.54.14"})
    library = find_library(machine, "libcuda.so.1", linked_libraries(machine))
    assert library is not None
    assert (library.version, library.linked) == ("550.54.14", False)


@pytest.mark.parametrize("directory", [*PLATFORM, *IN_DRIVER_ROOT])
def test_library_in_a_platform_directory_needs_no_ldconfig(directory, tmp_path):
    machine = host(
        tmp_path,
        files={f"{directory}/libcuda.so.580.159.03": "x", "/opt/nvidia/lib64/libcuda.so.1": "x"},
        links={f"{directory}/libcuda.so.1": "libcuda.so.580.159.03"},
    )
    library = find_library(machine, "libcuda.so.1", linked_libraries(machine))
    assert library is not None
    assert library.path == f"{directory}/libcuda.so.1"
    assert (library.version, library.linked) == ("580.159.03", True)
    assert library.root == (DRIVER_ROOT if directory in IN_DRIVER_ROOT else "")


def test_cache_entry_of_a_missing_file_is_ignored(tmp_path):
    machine = host(tmp_path, libraries={"libcuda.so.1": "/usr/lib/gone/libcuda.so.1"})
    assert find_library(machine, "libcuda.so.1", linked_libraries(machine)) is None


@pytest.mark.parametrize(
    ("answers", "version"),
    [
        ({"nvidia-ctk": "NVIDIA Container Toolkit CLI version 1.17.4\ncommit: 9b69590c\n"}, (1, 17, 4)),
        ({"nvidia-container-cli": "cli-version: 1.5.1\nlib-version: 1.5.1\n"}, (1, 5, 1)),
        ({"nvidia-container-runtime": "NVIDIA Container Runtime version 1.14.3\n"}, (1, 14, 3)),
        ({"nvidia-container-runtime": "3.5.0\n"}, ()),
        ({"nvidia-ctk": ""}, ()),
    ],
)
def test_toolkit_version_is_the_first_plausible_output(answers, version, tmp_path):
    commands = {f"/usr/bin/{name} --version": {"stdout": text} for name, text in answers.items()}
    programs = [f"/usr/bin/{name}" for name in answers]
    assert (
        find_toolkit(host(tmp_path, executables=programs, recording={"commands": commands})).version
        == version
    )


def test_empty_program_file_is_not_a_toolkit(tmp_path):
    machine = host(tmp_path, files={"/usr/bin/nvidia-container-runtime": ""})
    assert find_toolkit(machine).programs == {}


def test_cdi_spec_is_read_with_the_edits_of_its_devices():
    spec = parse_spec(
        '{"kind": "nvidia.com/gpu", "devices": [{"name": "0", "containerEdits": {"deviceNodes": '
        '[{"path": "/dev/x", "hostPath": "/dev/nvidia0", "major": 195, "minor": true}, 7]}}, null], '
        '"containerEdits": {"mounts": [{"hostPath": "/a"}, {"hostPath": 3}], "hooks": "none"}}',
        "/etc/cdi/nvidia.json",
    )
    assert spec is not None
    assert spec.nodes == (CdiNode("/dev/nvidia0", 195, 0),)
    assert (spec.names, spec.mounts, spec.hooks) == (("0",), ("/a",), ())


def test_broken_files_of_other_vendors_are_ignored():
    assert parse_spec("kind: vendor.com/device\n", "/etc/cdi/other.yaml") is None
    assert parse_spec("a: [", "/etc/cdi/other.yaml") is None
    broken = parse_spec("a: [", "/etc/cdi/nvidia.yaml")
    assert broken is not None and broken.problem.startswith("can't be parsed")


@pytest.mark.parametrize(
    "text", ["cgroupDriver: systemd\n", '{\n "cgroupDriver": "systemd",\n}', "cgroupDriver: systemd # x"]
)
def test_kubelet_settings_in_yaml_and_json(text):
    assert setting(f"kind: KubeletConfiguration\n{text}", "cgroupDriver") == "systemd"


KUBEADM = 'KUBELET_KUBEADM_ARGS="--container-runtime-endpoint=unix:///run/crio/crio.sock --x"\n'
UNIT = "[Service]\nExecStart=/usr/bin/kubelet\n"
KUBELET = Process(9, ("/usr/bin/kubelet", "--container-runtime-endpoint=unix:///run/cri-dockerd.sock"), 0.0)


@pytest.mark.parametrize(
    ("processes", "files", "engine"),
    [
        ((KUBELET,), {}, "docker"),
        (
            (),
            {"/var/lib/kubelet/config.yaml": "containerRuntimeEndpoint: unix:///var/run/crio/crio.sock\n"},
            "crio",
        ),
        (
            (Process(9, ("k3s-agent",), 0.0),),
            {"/etc/systemd/system/k3s-agent.service": UNIT},
            "containerd",
        ),
        ((Process(9, ("/usr/bin/kubelet",), 0.0),), {}, "containerd"),
        (
            (),
            {
                "/usr/lib/systemd/system/kubelet.service": UNIT,
                "/var/lib/kubelet/kubeadm-flags.env": KUBEADM,
            },
            "crio",
        ),
    ],
)
def test_engine_of_the_kubelet(processes, files, engine, tmp_path):
    kubelet = find_kubelet(host(tmp_path, files=files), processes)
    assert kubelet is not None and kubelet.engine == engine


def test_node_without_a_kubelet(tmp_path):
    assert find_kubelet(host(tmp_path), ()) is None
