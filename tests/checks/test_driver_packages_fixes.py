"""Driver commands fit the GPUs, the packages and the kernel of the node."""

import json
import shlex

import pytest

from fixtures.machines import expected, machine, options, overlay, recorded_host
from gpunode.checks import driver_packages
from gpunode.checks.catalogue import BY_ID
from gpunode.checks.preconditions import fitting
from gpunode.checks.runner import Selection, run_checks
from gpunode.commands.demo import build_machine
from gpunode.facts.driver_targets import REPOSITORY, last_branch
from gpunode.facts.kernels import kernel_devel
from gpunode.facts.node import Node, Questions
from gpunode.facts.packages import RPM_QUERY
from gpunode.facts.tables import table
from gpunode.host import Host
from tests.cli import gpunode
from tests.required import required

COMMANDS = {
    "kmod-flavour-blackwell": "gpunode driver install --yes",
    "kmod-flavour-rocky9": "gpunode driver install --yes",
    "gpu-arch-dropped": "gpunode driver install --yes",
    "gpu-arch-dropped-rocky9": "gpunode driver install --yes",
    "gpu-arch-next-upgrade": "apt-mark hold cuda-drivers",
    "driver-too-old-for-gpu-rocky9": "gpunode driver install --yes",
    "driver-two-installs": (
        "nvidia-uninstall && apt install --reinstall libnvidia-compute-580-server && reboot"
    ),
    "driver-lib-mismatch-rocky9": "reboot",
    "driver-lib-mismatch-stays": "gpunode driver install --yes && reboot",
    "gsp-firmware": (
        "apt install --reinstall nvidia-firmware-580-server-580.159.03 && "
        "ls /lib/firmware/nvidia/580.159.03/gsp* && reboot"
    ),
    "gsp-firmware-gone": (
        "dnf reinstall nvidia-kmod-common-580.159.03 && ls /lib/firmware/nvidia/580.159.03/gsp*"
    ),
    "kernel-headers-missing": "apt install linux-headers-5.15.0-122-generic",
    "dkms-next-kernel-refused": (
        "gpunode driver install --yes && modinfo -k 5.15.0-124-generic -F version nvidia && reboot"
    ),
    "driver-refuses-kernel": "modinfo -k 5.15.0-124-generic -F version nvidia && reboot",
    "module-disabled-rocky9": "sed -i '2s/^/# /' /etc/modprobe.d/no-gpu.conf && modprobe nvidia",
    "secureboot-unsigned-rocky9": "mokutil --import /var/lib/dkms/mok.pub && reboot",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_command_fits_the_node(name, tmp_path):
    (identifier,) = expected(name)
    node = Node(recorded_host(name, tmp_path), Questions(**options(name)))
    (finding,) = [one for one in run_checks(node, Selection(only=(identifier,))) if one.id == identifier]
    assert COMMANDS[name] in " && ".join(fix.command for fix in finding.fixes)


def test_branch_without_fixes_is_compared_with_those_of_the_last_bulletin(tmp_path):
    last = max(table("driver_cves").rows, key=lambda row: row["published"])
    fixed = sorted({version.partition(".")[0] for version in last["fixed"]}, reverse=True)
    assert "580" in fixed
    recorded_host("driver-eol", tmp_path)
    ran = gpunode("--root", str(tmp_path), "doctor", "--only", "driver-eol")
    evidence = f"bulletin {last['bulletin']} of {last['published']}: fixes branches {', '.join(fixed)}"
    assert (ran.code, evidence in ran.out) == (0, True), ran.out


TRANSACTIONS = {
    "driver-lib-mismatch-unattended": ("/var/log/apt/history.log", 4, "by /usr/bin/unattended-upgrade"),
    "driver-lib-mismatch-rocky9": ("/var/log/dnf.rpm.log", 1, "nvidia-driver-cuda-libs"),
}


@pytest.mark.parametrize("name", TRANSACTIONS)
def test_driver_mismatch_names_the_package_transaction_that_caused_it(name, tmp_path):
    path, line, words = TRANSACTIONS[name]
    findings = run_checks(Node(recorded_host(name, tmp_path)), Selection(only=("driver-lib-mismatch",)))
    shown = [one for finding in findings for one in finding.evidence if one.source == path]
    assert [one.line for one in shown] == [line] and words in shown[0].value


def on(base, tmp_path, **change):
    """A node of `base` with other files, or without some."""
    return Node(
        Host(build_machine(overlay(machine(base), {"set": change}), tmp_path / "machine"), environ={})
    )


def dpkg(*names, version="535.288.01-0ubuntu0.22.04.1"):
    blocks = (f"Package: {name}\nStatus: install ok installed\nVersion: {version}\n" for name in names)
    return {"/var/lib/dpkg/status": "\n".join(blocks)}


def test_run_installer_driver_is_not_fixed_with_packages(tmp_path):
    node = on("healthy-docker-rocky9", tmp_path, executables=["/usr/bin/nvidia-uninstall"])
    offered = fitting(node, driver_packages.install_driver(node))
    assert offered.command.startswith("follow https://www.nvidia.com/")
    assert "580.159.03.run" in required(driver_packages.install_libraries(node)).command


@pytest.mark.parametrize(
    ("ids", "last"),
    [
        (("0x2330",), 0),
        (("0x1db6",), 580),
        (("0x102d",), 470),  # K80
        (("0x1db6", "0x20b2"), 580),  # V100 and A100: branch 580 drives both
        (("0x1db6", "0x2901"), 0),  # V100 and B200: no branch drives both
    ],
)
def test_last_branch_that_supports_all_gpus(ids, last, tmp_path):
    files: dict[str, str] = {}
    for number, device in enumerate(ids):
        place = f"/sys/bus/pci/devices/0000:{number + 1:02x}:00.0"
        files |= {f"{place}/vendor": "0x10de", f"{place}/class": "0x030200", f"{place}/device": device}
    assert last_branch(Node(Host(build_machine({"files": files}, tmp_path / "m"), environ={})).gpus) == last


def findings(node, identifier):
    return next(one for one in run_checks(node, Selection(only=(identifier,))) if one.id == identifier)


def card(device, driver="", address="0000:03:00.0"):
    place = f"/sys/bus/pci/devices/{address}"
    files = {f"{place}/vendor": "0x10de", f"{place}/class": "0x030000", f"{place}/device": device}
    links = {f"{place}/driver": f"../../../../bus/pci/drivers/{driver}"} if driver else {}
    return {"files": files, "links": links}


@pytest.mark.parametrize(
    ("device", "driver", "identifier", "status", "noted"),
    [
        ("0x128b", "nouveau", "nouveau-loaded", "pass", False),  # GT 710: this driver doesn't support it
        ("0x25b6", "nouveau", "nouveau-loaded", "pass", True),
        ("0x128b", "", "gpu-arch-dropped", "pass", True),
        ("0x1d01", "", "kmod-flavour", "pass", True),
        ("0x128b", "", "gpu-bound-other-driver", "pass", False),
        ("0x25b6", "", "gpu-bound-other-driver", "warn", False),
    ],
)
def test_display_card_beside_compute_gpus(device, driver, identifier, status, noted, tmp_path):
    finding = findings(on("healthy-h100", tmp_path, **card(device, driver)), identifier)
    assert (finding.status, finding.note) == (status, noted)


def test_compute_gpus_keep_their_driver_if_an_old_gpu_has_no_support(tmp_path):
    old = {f"/sys/bus/pci/devices/0000:03:00.0/{name}": value for name, value in V100.items()}
    finding = findings(on("healthy-b200-nvlsm", tmp_path, files=old), "kmod-flavour")
    assert finding.status == "warn" and "doesn't support the others" in finding.summary
    assert finding.fixes[0].command == "lspci -nnks 0000:03:00.0"


V100 = {"vendor": "0x10de", "class": "0x030200", "device": "0x1db6"}


@pytest.mark.parametrize(
    "files",
    [
        {"/etc/dnf/modules.d/nvidia-driver.module": "[nvidia-driver]\nstream=580-dkms\nstate=enabled\n"},
        {"/etc/dnf/plugins/versionlock.list": "nvidia-driver-3:580.159.03-1.el9.*\n"},
    ],
)
def test_cuda_drivers_may_be_pinned_to_the_last_branch_of_old_gpus(files, tmp_path):
    base = machine("healthy-docker-rocky9")
    old = {name: "0x1db6" for name in base["files"] if name.endswith(":00.0/device")}
    spec = overlay(base, {"set": {"files": {**old, **files}}})
    answers = spec["recording"].setdefault("commands", {})
    answers[shlex.join(RPM_QUERY)] = {"code": 0, "stdout": "cuda-drivers\t580.159.03-1.el9\t1767000000\n"}
    node = Node(Host(build_machine(spec, tmp_path / "machine"), environ={}))
    assert findings(node, "gpu-arch-dropped").status == "pass"


def test_mok_key_is_enrolled_from_the_dkms_path(tmp_path):
    files = {
        "/var/lib/dkms/nvidia-current/550.163.01/source/dkms.conf": "",
        "/var/lib/dkms/mok.pub": "",
    }
    node = Node(Host(build_machine({"files": files}, tmp_path / "machine"), environ={}))
    again = required(driver_packages.enrol_key(node, signed=False)).command
    assert again.startswith("dkms build --force nvidia-current/550.163.01 -k ")


def test_suse_module_is_rebuilt_by_reinstalling_its_package(tmp_path):
    spec = machine("healthy-suse-kubelet")
    answer = {"code": 0, "stdout": "nvidia-driver-G06-kmp-default\t580.159.03_k6.4.0-1\t1767000000\n"}
    spec["recording"].setdefault("commands", {})[shlex.join(RPM_QUERY)] = answer
    node = Node(Host(build_machine(spec, tmp_path / "machine"), environ={}))
    fix = driver_packages.build_module(node, "6.4.0-150600.99-default")
    assert fix.command == "zypper install --force nvidia-driver-G06-kmp-default"


@pytest.mark.parametrize(
    ("version", "package"),
    [
        ("550.163.01", "kernel-firmware-nvidia-gspx-G06"),
        ("570.86.16", "nvidia-common-G06"),
        ("580.159.03", "nvidia-common-G06"),
        ("595.71.05", "nvidia-common-G07"),
    ],
)
def test_firmware_on_suse_is_installed_in_the_version_of_the_module(version, package, tmp_path):
    spec = json.loads(json.dumps(machine("healthy-suse-kubelet")).replace("595.71.05", version))
    files = {path: text for path, text in spec["files"].items() if "/lib/firmware/" not in path}
    other = {"/lib/firmware/nvidia/535.288.01/gsp_ga10x.bin": "firmware"}
    node = Node(Host(build_machine(spec | {"files": files | other}, tmp_path / "machine"), environ={}))
    command = findings(node, "gsp-firmware").fixes[0].command
    listed = f"ls /lib/firmware/nvidia/{version}/gsp*"
    assert command == f"zypper install --force {package}={version} && {listed}"


@pytest.mark.parametrize("flavour", ["default", "azure", "rt", "longterm", "64kb"])
def test_kernel_headers_on_suse_are_those_of_the_kernel_flavour(flavour, tmp_path):
    text = json.dumps(machine("healthy-suse-kubelet")).replace("23.25-default", f"23.25-{flavour}")
    spec = json.loads(text)
    del spec["files"]["/usr/src/linux-6.4.0-150600.23.25-obj/include/generated/autoconf.h"]
    node = Node(Host(build_machine(spec, tmp_path / "machine"), environ={}))
    finding = findings(node, "kernel-headers-missing")
    assert finding.fixes[0].command == f"zypper install kernel-{flavour}-devel=6.4.0-150600.23.25"


def test_vgpu_host_is_not_checked_as_a_container_host(tmp_path):
    """Its GPUs have virtual functions, its driver has no CUDA, and the toolkit is not installed."""
    base = machine("healthy-h100")
    wanted = ("nvidia-c", "libcuda")
    spec = {
        section: {path: one for path, one in value.items() if not any(word in path for word in wanted)}
        if isinstance(value, dict) and section != "recording"
        else [path for path in value if not any(word in path for word in wanted)]
        if isinstance(value, list)
        else value
        for section, value in base.items()
    }
    function = "/sys/bus/pci/devices/0000:18:00.4"
    files = {f"{function}/vendor": "0x10de", f"{function}/class": "0x030200", f"{function}/device": "0x2330"}
    files["/sys/module/nvidia_vgpu_vfio/initstate"] = "live"
    change = {"files": files, "links": {f"{function}/physfn": "../0000:18:00.0"}}
    node = Node(Host(build_machine(overlay(spec, {"set": change}), tmp_path / "machine"), environ={}))
    assert len(node.gpus) == 8
    found = {one.id: one for one in run_checks(node)}
    assert found["libcuda-missing"].skipped == "not-applicable"
    assert not [one.id for one in found.values() if one.status in ("fail", "warn", "error")]


def test_precompiled_module_is_installed_from_the_next_kernels_package(tmp_path):
    spec = overlay(machine("healthy-docker-rocky9"), {"remove": ["/var/lib/dkms"]})
    answer = {"code": 0, "stdout": "kmod-nvidia-580.159.03-5.14.0-427.13.1\t3:580.159.03-1.el9\t1767000000\n"}
    spec["recording"].setdefault("commands", {})[shlex.join(RPM_QUERY)] = answer
    node = Node(Host(build_machine(spec, tmp_path / "machine"), environ={}))
    fix = driver_packages.build_module(node, "5.14.0-503.11.1.el9_5.x86_64")
    assert fix.command == "dnf install kmod-nvidia-580.159.03-5.14.0-503.11.1"


@pytest.mark.parametrize("held", [True, False])
def test_held_libraries_hold_the_packages_that_depend_on_them(held, tmp_path):
    state = "hold" if held else "install"
    libraries = (
        f"Package: libnvidia-compute-580-server\nStatus: {state} ok installed\nVersion: 580.159.03-0\n"
    )
    others = dpkg("cuda-drivers", "nvidia-compute-utils-580-server", version="580.159.03-0")
    files = {
        "/var/lib/dpkg/status": f"{libraries}\n{others['/var/lib/dpkg/status']}",
        "/etc/apt/apt.conf.d/20auto-upgrades": 'APT::Periodic::Unattended-Upgrade "1";\n',
        "/etc/apt/apt.conf.d/50unattended-upgrades": 'Unattended-Upgrade::Allowed-Origins { "Ubuntu"; };\n',
    }
    node = on("healthy-h100", tmp_path, files=files, executables=["/usr/bin/unattended-upgrade"])
    assert findings(node, "unattended-upgrades-driver").status == ("pass" if held else "warn")


@pytest.mark.parametrize(
    ("release", "package"),
    [
        ("5.14.0-427.el9.x86_64", "kernel-devel-5.14.0-427.el9.x86_64"),
        ("5.14.0-427.el9.x86_64+rt", "kernel-rt-devel-5.14.0-427.el9.x86_64"),
        ("5.14.0-427.el9.aarch64+64k", "kernel-64k-devel-5.14.0-427.el9.aarch64"),
        ("5.15.0-206.153.7.el9uek.x86_64", "kernel-uek-devel-5.15.0-206.153.7.el9uek.x86_64"),
        ("6.1.119-129.201.amzn2023.x86_64", "kernel-devel-6.1.119-129.201.amzn2023.x86_64"),
        ("6.12.40-63.114.amzn2023.x86_64", "kernel6.12-devel-6.12.40-63.114.amzn2023.x86_64"),
        ("$(uname -r)", "kernel-devel-$(uname -r)"),
    ],
)
def test_kernel_headers_package_follows_the_kernel_flavour(release, package):
    assert kernel_devel(release) == package
    assert package in driver_packages.build_module_for(release, "rhel").command


@pytest.mark.parametrize(
    ("installed", "command"), [((), "apt install"), (("nvidia-utils-580",), "apt install --reinstall")]
)
def test_apt_reinstalls_installed_library_packages(tmp_path, installed, command):
    """Without --reinstall apt leaves the newest version alone, whatever replaced its files."""
    spec = machine("driver-libs-mixed")
    for path, text in dpkg(*installed, version="580.159.03-0ubuntu0.22.04.1").items():
        spec["files"][path] = "\n\n".join(
            part for part in (spec["files"].get(path, "").strip(), text) if part
        )
    verdict = BY_ID["driver-libs-mixed"].run(Node(Host(build_machine(spec, tmp_path / "m"), environ={})))
    assert verdict.fix is not None
    assert verdict.fix.command == f"{command} libnvidia-compute-580 nvidia-utils-580 && ldconfig"


@pytest.mark.parametrize(
    ("version", "names"),
    [
        ("590.48.01-0ubuntu0.22.04.1", "libnvidia-compute-590 nvidia-utils-590"),  # of Ubuntu's archive
        ("590.48.01-0ubuntu1", "libnvidia-compute nvidia-utils"),  # of NVIDIA's repository
    ],
)
def test_only_ubuntus_packages_have_the_branch_in_their_names_from_590(version, names, tmp_path):
    spec = machine("driver-libs-mixed")
    spec["files"] |= dpkg("nvidia-driver-590-open", version=version)
    spec["files"]["/etc/apt/sources.list.d/cuda.list"] = f"deb https://{REPOSITORY}/ubuntu2204/x86_64/ /\n"
    spec["files"]["/sys/module/nvidia/version"] = "590.48.01\n"
    verdict = BY_ID["driver-libs-mixed"].run(Node(Host(build_machine(spec, tmp_path / "m"), environ={})))
    assert required(verdict.fix).command == f"apt install {names} && ldconfig"
