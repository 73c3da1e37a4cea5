"""`driver plan` on recorded machines: the right driver, for a reason, from one source, at one version.

The package managers' outputs are recorded runs (fixtures/package_answers.py), not the programs themselves.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fixtures.machines import machine, overlay
from fixtures.package_answers import UBUNTU, Shelf, record
from gpunode.commands.demo import build_machine
from gpunode.commands.driver import made
from gpunode.facts.kernels import flavour, header_package
from gpunode.packages.driver_model import Wish
from tests.cli import gpunode

JAMMY = "0ubuntu0.22.04.1"
CUDA = "cuda-rhel9-x86_64"
CUDA_DEB = "https://developer.download.nvidia.com/compute/cuda/repos/{}/x86_64"


EPEL = (("3.2.1-1.el9", "epel"),)
LIBRARIES = ("libnvidia-compute", "libnvidia-cfg1", "nvidia-compute-utils")


def archive(version: str, branch: str = "", *, switches: bool = False, module: str = "-open") -> Shelf:
    """Ubuntu's archive with one branch, as for 22.04."""
    branch = branch or version.partition(".")[0]
    names = [f"nvidia-headless-no-dkms-{branch}-server{module}", f"nvidia-headless-{branch}-server{module}"]
    names += [f"{name}-{branch}-server" for name in ("nvidia-utils", *LIBRARIES)]
    names += [f"nvidia-fabricmanager-{branch}", f"libnvidia-nscq-{branch}"] if switches else []
    offers = dict.fromkeys(names, ((f"{version}-{JAMMY}", UBUNTU),))
    for end in ("generic", "5.15.0-122-generic", "6.8.0-45-generic"):
        offers[f"linux-modules-nvidia-{branch}-server{module}-{end}"] = (("5.15.0-122.132+1", UBUNTU),)
    return Shelf(offers)


def cuda_rpm(*versions: str, kmod: str = "kmod-nvidia-open-dkms", without: tuple[str, ...] = ()) -> Shelf:
    names = ("nvidia-driver-cuda", kmod, "nvidia-persistenced", "nvidia-fabricmanager")
    offers = {name: tuple((f"3:{one}-1.el9", CUDA) for one in versions) for name in names}
    offers["dkms"] = EPEL
    return Shelf({name: some for name, some in offers.items() if name not in without})


def suse(version: str) -> Shelf:
    cuda = "cuda-sles15-x86_64"
    return Shelf(
        {
            "nvidia-open-driver-G07-signed-cuda-kmp-default": (
                (f"{version}_k6.4.0_150600.21-150600.3.50.1", "SLE-Updates"),
            ),
            "nvidia-compute-utils-G07": (("620.10.02-0", cuda), (f"{version}-0", cuda)),
            "nvidia-persistenced": ((f"{version}-0", cuda),),
        }
    )


SUSE_REPO = {"/etc/zypp/repos.d/cuda.repo": f"[cuda]\nbaseurl={CUDA_DEB.format('sles15')}\n"}


def stream(name: str) -> dict[str, str]:
    """dnf's state of the module's stream."""
    text = f"[nvidia-driver]\nname=nvidia-driver\nstream={name}\nprofiles=\nstate=enabled\n"
    return {"/etc/dnf/modules.d/nvidia-driver.module": text}


BARE_REPO = {"/etc/yum.repos.d/cuda.repo": f"[cuda]\nbaseurl={CUDA_DEB.format('rhel9')}\n"}
OLD_REPO = {**BARE_REPO, **stream("580-dkms")}
DNF_REPO = {**BARE_REPO, **stream("580-open")}
UBUNTU_REPO = {"/etc/apt/sources.list.d/cuda.list": f"deb {CUDA_DEB.format('ubuntu2204')} /\n"}


def built(root: Path, name: str, files: dict[str, str], remove: tuple[str, ...] = ()) -> Path:
    return build_machine(overlay(machine(name), {"set": {"files": files}, "remove": remove}), root / name)


def plan(root: Path, shelf: Shelf, *argv: str) -> dict[str, Any]:
    """The plan as a user gets it, through the command line."""
    wish = Wish(**_wish(argv))
    record(root, shelf, lambda host: made(host, wish))
    ran = gpunode("driver", "plan", "--root", str(root), "-o", "json", *argv)
    assert ran.code == 0, ran.err
    data = ran.document["data"]
    assert isinstance(data, dict)
    return data


def _wish(argv: tuple[str, ...]) -> dict[str, Any]:
    pairs = dict(zip(argv[::2], argv[1::2], strict=True))
    given = {name.removeprefix("--"): value for name, value in pairs.items()}
    return {name: int(value) if name == "branch" else value for name, value in given.items()}


def versions(data: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["version"] for one in data["packages"]}


def codes(data: dict[str, Any]) -> list[str]:
    return [one["code"] for one in data["refusals"]]


DEBIANS = ("nvidia-open-kernel-dkms", "nvidia-kernel-dkms", "libcuda1", "nvidia-smi")
DEBIAN = Shelf(dict.fromkeys(DEBIANS, (("550.163.01-1~deb12u1", "http://mirror.example.org/debian"),)))
# machine, its repositories, files beside it: branch, kernel module, route, version, reboot, a package of it
TABLE = {
    "ubuntu": (
        *("driver-not-installed", archive("580.173.02"), {}),
        *(580, "open", "ubuntu", "580.173.02", True, f"nvidia-utils-580-server=580.173.02-{JAMMY}"),
    ),
    "rocky": (
        *("driver-not-installed-rocky", cuda_rpm("620.10.02", "580.173.02", "580.159.03"), DNF_REPO),
        *(580, "open", "cuda-rpm", "580.173.02", False, "kmod-nvidia-open-dkms=3:580.173.02-1.el9"),
    ),
    "suse": (
        *("healthy-suse-kubelet", suse("595.91.07"), SUSE_REPO),
        *(595, "open", "suse", "595.91.07", True, "nvidia-compute-utils-G07=595.91.07-0"),
    ),
    "volta on suse": (
        *("gpu-arch-dropped", Shelf({
            "nvidia-driver-G06-kmp-default": (("580.173.02_k6.4.0_150600.21-0", "cuda"),),
            "nvidia-compute-utils-G06": (("580.173.02-0", "cuda"), ("575.57.08-0", "cuda")),
        }), SUSE_REPO),
        *(580, "proprietary", "suse", "580.173.02", False, "nvidia-compute-utils-G06=580.173.02-0"),
    ),
    "volta on rocky": (
        *("kmod-flavour-rocky9", cuda_rpm("580.173.02", kmod="kmod-nvidia-latest-dkms"), OLD_REPO),
        *(580, "proprietary", "cuda-rpm", "580.173.02", False, "kmod-nvidia-latest-dkms=3:580.173.02-1.el9"),
    ),
    "nvswitch": (
        *("healthy-h100-nvswitch", archive("580.173.02", switches=True), {}),
        *(580, "open", "ubuntu", "580.173.02", True, f"nvidia-fabricmanager-580=580.173.02-{JAMMY}"),
    ),
    "blackwell": (
        *("kmod-flavour-blackwell", Shelf({
            **archive("580.173.02").offers,
            "linux-modules-nvidia-580-server-open-generic": (("6.14.0-37.37", UBUNTU),),
            "linux-modules-nvidia-580-server-open-generic-hwe-24.04": (("6.14.0-37.37", UBUNTU),),
        }), {}),
        *(580, "open", "ubuntu", "580.173.02", True, f"nvidia-utils-580-server=580.173.02-{JAMMY}"),
    ),
    "vm with a gpu": (
        *("healthy-vm-passthrough", archive("580.173.02"), {}),
        *(580, None, "ubuntu", "580.173.02", True, f"nvidia-utils-580-server=580.173.02-{JAMMY}"),
    ),
    "fedora": (
        *("healthy-crio-fedora", cuda_rpm("620.10.02", "580.173.02"), {
            "/etc/yum.repos.d/cuda.repo": f"[cuda]\nbaseurl={CUDA_DEB.format('fedora43')}\n"
        }),
        *(580, "open", "cuda-rpm", "580.173.02", True, "nvidia-driver-cuda=3:580.173.02-1.el9"),
    ),
    "debian": (
        *("debian-nvidia-current", DEBIAN, {}),
        *(550, None, "debian", "550.163.01", True, "libcuda1=550.163.01-1~deb12u1"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TABLE)
def test_machine_gets_the_driver_that_it_needs(case, tmp_path):
    name, shelf, files, branch, flavour, route, version, reboot, package = TABLE[case]
    argv: tuple[str, ...] = ("--branch", "550") if case == "debian" else ()
    if name == "driver-not-installed-rocky":
        root = built(tmp_path, "healthy-docker-rocky9", files, ("/sys/module/nvidia", "/proc/driver/nvidia"))
    else:
        root = built(tmp_path, name, files)
    data = plan(root, shelf, *argv)
    assert (data["branch"], data["route"], data["version"]) == (branch, route, version)
    assert flavour in (None, data["flavour"])
    assert data["resolved"] and bool(data["reboot"]) == reboot
    desired, _, at = package.partition("=")
    assert versions(data)[desired] == at
    assert any(f"{desired}={at}" in line or f"{desired}-{at}" in line for line in data["commands"])
    assert all(one["because"] and one["source"] for one in data["decisions"])


@pytest.mark.parametrize(
    ("name", "branch", "expected"),
    [
        ("healthy-suse-kubelet", 580, {"nv-prefer-signed-open-driver", "nvidia-compute-utils-G06"}),
        (
            *("healthy-suse-kubelet", 590),
            {"nvidia-open-driver-G07-signed-cuda-kmp-default", "nvidia-compute-utils-G07"},
        ),
    ],
)
def test_suse_packages_are_named_g07_since_branch_590(name, branch, expected, tmp_path):
    data = plan(built(tmp_path, name, {}), Shelf({}), "--branch", str(branch))
    names = set(versions(data))
    assert expected <= names
    assert not any(("G06" if branch >= 590 else "G07") in name for name in names)


@pytest.mark.parametrize(
    ("name", "branch", "expected"),
    [
        ("debian-nvidia-current", 580, ["nvidia-driver-pinning-580", "'nvidia-driver-cuda=580.*'"]),
        ("debian-nvidia-current", 570, ["'nvidia-driver-cuda=570.*'", "'nvidia-kernel-open-dkms=570.*'"]),
        ("healthy-crio-fedora", 580, ["'nvidia-driver-cuda-580.*'", "'kmod-nvidia-open-dkms-580.*'"]),
        (
            *("healthy-suse-kubelet", 595),
            ["'nvidia-compute-utils-G07>=595'", "'nvidia-compute-utils-G07<596'"],
        ),
    ],
)
def test_branch_is_kept_before_the_repository_is_known(name, branch, expected, tmp_path):
    """The repository has newer branches under the same names, so a bare name would install the newest."""
    root = built(tmp_path, name, {})
    options = ("--branch", str(branch), "--repository", "nvidia")
    data = plan(root, Shelf({}), *options)
    installs = [line for line in data["commands"] if " install " in line]
    for part in expected:
        assert any(part in line for line in installs), installs
    pins = [line for line in installs if "-pinning-" in line]
    assert not pins or installs.index(pins[0]) < next(
        number for number, line in enumerate(installs) if "nvidia-driver-cuda" in line
    )
    dry = gpunode("driver", "install", "--dry-run", "--root", str(root), "-o", "json", *options)
    assert dry.document["data"]["plan"]["commands"] == data["commands"]


def test_all_driver_packages_have_the_same_version(tmp_path):
    root = built(tmp_path, "healthy-h100-nvswitch", {})
    data = plan(root, archive("580.173.02", switches=True))
    exact = [one for one in data["packages"] if one["exact"]]
    assert {one["name"] for one in exact} >= {"nvidia-fabricmanager-580", "libnvidia-nscq-580"}
    assert {one["version"].partition("-")[0] for one in exact} == {"580.173.02"}


def test_outdated_fabric_manager_is_refused(tmp_path):
    shelf = archive("580.173.02", switches=True)
    both = ((f"580.173.02-{JAMMY}", UBUNTU), (f"580.159.03-{JAMMY}", UBUNTU))
    offers = {name: both if "linux-" not in name else some for name, some in shelf.offers.items()}
    offers["nvidia-fabricmanager-580"] = both[1:]
    data = plan(built(tmp_path, "healthy-h100-nvswitch", {}), Shelf(offers))
    assert data["version"] == "580.159.03"
    offers["nvidia-fabricmanager-580"] = ((f"580.142-{JAMMY}", UBUNTU),)
    data = plan(built(tmp_path / "b", "healthy-h100-nvswitch", {}), Shelf(offers))
    assert codes(data) == ["no-common-version"]
    assert "nvidia-fabricmanager-580 580.142" in data["refusals"][0]["message"]


def test_older_version_applies_to_the_libraries_too(tmp_path):
    """Ubuntu's packages depend on these at their own version or newer: apt would select the newest."""
    both = tuple((f"{one}-{JAMMY}", UBUNTU) for one in ("580.173.02", "580.159.03"))
    offers = {name: some if "linux-" in name else both for name, some in archive("580.173.02").offers.items()}
    root = built(tmp_path, "driver-not-installed", {})
    data = plan(root, Shelf(offers), "--version", "580.159.03")
    found = {versions(data)[f"{name}-580-server"] for name in LIBRARIES}
    assert found == {f"580.159.03-{JAMMY}"}


def test_blackwell_switches_use_the_subnet_manager_of_nvidias_repository(tmp_path):
    names = ("libnvidia-compute-580", "nvidia-dkms-580-open", "nvidia-utils-580", "nvidia-fabricmanager")
    here = CUDA_DEB.format("ubuntu2204")
    offers = dict.fromkeys((*names, "nvidia-compute-utils-580", "libnvsdm"), (("580.173.02-0ubuntu1", here),))
    offers |= {"nvlsm": (("2026.02.1-1", here),), "infiniband-diags": (("39.0-1", UBUNTU),)}
    data = plan(built(tmp_path, "healthy-b200-nvlsm", UBUNTU_REPO), Shelf(offers))
    assert data["route"] == "cuda-ubuntu" and data["refusals"] == []
    assert set(versions(data)) >= {"nvlsm", "infiniband-diags", "libnvsdm", "nvidia-fabricmanager"}
    assert [one["path"] for one in data["files"]] == ["/etc/modules-load.d/gpunode-nvlink.conf"]
    assert "systemctl enable nvidia-fabricmanager.service" in data["commands"]


def test_blackwell_switches_without_a_driver_get_nvidias_repository(tmp_path):
    data = plan(built(tmp_path, "healthy-b200-nvlsm", {}), archive("580.173.02"))
    source = next(one for one in data["decisions"] if one["subject"] == "from")
    assert data["route"] == "cuda-ubuntu" and "only this repository has nvlsm" in source["because"]


def test_blackwell_switches_with_the_ubuntu_driver_lack_the_subnet_manager(tmp_path):
    """Without nvlsm the fabric never starts, while nvidia-smi looks normal."""
    here = dict.fromkeys(("nvidia-utils-580-server", "libnvidia-cfg1-580-server"), f"580.159.03-{JAMMY}")
    text = "".join(
        f"Package: {name}\nStatus: install ok installed\nVersion: {version}\n\n"
        for name, version in here.items()
    )
    shelf = archive("580.173.02", switches=True)
    root = built(tmp_path, "healthy-b200-nvlsm", {"/var/lib/dpkg/status": text})
    data = plan(root, Shelf(shelf.offers, here))
    assert data["route"] == "ubuntu" and codes(data) == ["package-missing"]
    assert "nvlsm" in data["refusals"][0]["message"] and "nvidia" in data["refusals"][0]["hint"]


def test_removal_of_foreign_packages_is_refused(tmp_path):
    shelf = archive("580.173.02")
    removes = {"nvidia-utils-535-server": "535.1-1", "slurm-wlm": "21.08-1"}
    data = plan(built(tmp_path, "driver-not-installed", {}), Shelf(shelf.offers, removes=removes))
    assert codes(data) == ["takes-others-out"]
    assert "slurm-wlm" in data["refusals"][0]["message"] and "535" not in data["refusals"][0]["message"]


def test_transitional_package_is_refused(tmp_path):
    shelf = archive("580.173.02", "570")
    data = plan(built(tmp_path, "driver-not-installed", {}), shelf, "--branch", "570")
    assert codes(data) == ["transitional-package"]
    assert "installs 580.173.02, of branch 580" in data["refusals"][0]["message"]


# machine, options, reason of the refusal
REFUSED = {
    "container": ("lxc-unprivileged", (), "container"),
    "wsl": ("healthy-wsl2", (), "wsl2"),
    "jetson": ("healthy-jetson-orin", (), "tegra"),
    "image": ("flatcar-without-toolkit", (), "immutable"),
    "no gpu": ("pci-no-gpu", (), "no-gpu"),
    "for vms": ("vm-host", (), "vfio"),
    "vgpu": ("healthy-vgpu-guest", (), "vgpu-guest"),
    "operator": ("gpu-operator-driver", (), "driver-container"),
    "in use": ("gpu-containers-running", (), "gpu-in-use"),
    "secure boot": ("secureboot-unsigned-rocky9", (), "secure-boot"),
    "blackwell, proprietary": ("kmod-flavour-blackwell", ("--flavour", "proprietary"), "wrong-flavour"),
    "volta, open": ("gpu-arch-dropped", ("--flavour", "open"), "wrong-flavour"),
    "volta, 595": ("gpu-arch-dropped", ("--branch", "595"), "gpu-dropped"),
    "blackwell, 550": ("kmod-flavour-blackwell", ("--branch", "550"), "branch-too-old"),
    "620, proprietary": (
        "healthy-docker-rocky9", ("--branch", "620", "--flavour", "proprietary"), "no-proprietary-module"
    ),
    "no packages of its own": ("healthy-docker-rocky9", ("--repository", "distribution"), "no-repository"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_change_that_breaks_the_node_is_refused(case, tmp_path):
    name, argv, code = REFUSED[case]
    root = built(tmp_path, name, {})
    data = plan(root, Shelf(), *argv)
    assert code in codes(data)
    ran = gpunode("driver", "install", "--yes", "--root", str(root), *argv)
    assert ran.code == 3 and "error: " in ran.err and "hint: " in ran.err


def test_run_file_driver_is_refused(tmp_path):
    spec = overlay(machine("healthy-docker-rocky9"), {"set": {"executables": ["/usr/bin/nvidia-uninstall"]}})
    data = plan(build_machine(spec, tmp_path / "m"), cuda_rpm("580.173.02"))
    assert "run-installer" in codes(data)


def test_programs_with_an_open_gpu_are_named(tmp_path):
    spec = overlay(
        machine("healthy-docker-rocky9"),
        {"set": {"links": {"/proc/1100/fd/7": "/dev/nvidia0", "/proc/1210/fd/3": "/dev/null"}}},
    )
    data = plan(build_machine(spec, tmp_path / "m"), cuda_rpm("580.173.02"))
    message = next(one["message"] for one in data["refusals"] if one["code"] == "gpu-in-use")
    assert "process 1100" in message and "1210" not in message


def test_two_conflicting_repositories_are_refused_until_one_is_selected(tmp_path):
    shelf = archive("580.173.02")
    offers = dict(shelf.offers)
    name = "nvidia-utils-580-server"
    offers[name] = (("580.178.04-0ubuntu1", CUDA_DEB.format("ubuntu2204")), *offers[name])
    status = {
        "/var/lib/dpkg/status": "Package: nvidia-utils-580-server\nStatus: install ok installed\n"
        f"Version: 580.159.03-{JAMMY}\n\n"
    }
    root = built(tmp_path, "driver-not-installed", {**UBUNTU_REPO, **status})
    data = plan(root, Shelf(offers))
    assert codes(data) == ["two-repositories"] and data["route"] == "ubuntu"
    data = plan(root, Shelf(offers), "--repository", "distribution")
    assert codes(data) == [] and versions(data)[name] == f"580.173.02-{JAMMY}"


def test_held_packages_are_kept_unless_the_version_is_equal(tmp_path):
    shelf = archive("580.173.02")
    offers = {
        name: (*some, *(((f"580.159.03-{JAMMY}", UBUNTU),) if "linux" not in name else ()))
        for name, some in shelf.offers.items()
    }
    name = "nvidia-utils-580-server"
    held = Shelf(offers, {name: f"580.159.03-{JAMMY}"}, held=(name,))
    root = built(tmp_path, "driver-not-installed", {})
    assert codes(plan(root, held)) == ["held"]
    assert codes(plan(root, held, "--version", "580.159.03")) == []


def test_dkms_is_used_if_the_repository_has_no_module_for_this_kernel(tmp_path):
    shelf = archive("580.173.02")
    offers = {name: some for name, some in shelf.offers.items() if not name.startswith("linux-modules")}
    data = plan(built(tmp_path, "driver-not-installed", {}), Shelf(offers))
    assert "nvidia-headless-580-server-open" in versions(data)


def test_kernel_headers_are_installed_first_or_the_plan_is_refused(tmp_path):
    root = built(tmp_path, "kernel-headers-missing-rocky9", DNF_REPO)
    kernel = (root / "proc/sys/kernel/osrelease").read_text().strip()
    data = plan(root, cuda_rpm("580.173.02"))
    assert "headers-missing" in codes(data)
    shelf = cuda_rpm("580.173.02")
    version = kernel.removesuffix(".x86_64")
    other = Shelf({**shelf.offers, "kernel-devel": (("5.14.0-1.el9", "baseos"),)})
    assert "headers-missing" in codes(
        plan(built(tmp_path / "a", "kernel-headers-missing-rocky9", DNF_REPO), other)
    )
    offered = ((f"{version}", "baseos"), ("5.14.0-1.el9", "baseos"))
    with_headers = Shelf({**shelf.offers, "kernel-devel": offered})
    data = plan(built(tmp_path / "b", "kernel-headers-missing-rocky9", DNF_REPO), with_headers)
    assert "headers-missing" not in codes(data)
    installs = [line for line in data["commands"] if " install " in line]
    assert installs[0].endswith(f" kernel-devel-{version}") and "kmod-nvidia" in installs[-1]


@pytest.mark.parametrize(
    ("family", "release", "kind", "package"),
    [
        ("debian", "6.8.0-1021-nvidia-64k", "nvidia-64k", "linux-headers-6.8.0-1021-nvidia-64k"),
        ("rhel", "5.14.0-427.13.1.el9_4.aarch64+64k", "aarch64+64k", "kernel-64k-devel"),
        ("rhel", "6.12.40-63.114.amzn2023.aarch64", "aarch64", "kernel6.12-devel"),
        ("suse", "6.4.0-150600.23.25-64kb", "64kb", "kernel-64kb-devel"),
    ],
)
def test_kernels_with_other_page_sizes_and_names_have_their_own_headers(family, release, kind, package):
    assert (flavour(release), header_package(family, release)[0]) == (kind, package)


def test_missing_dkms_on_rhel_hints_at_epel(tmp_path):
    data = plan(built(tmp_path, "healthy-docker-rocky9", DNF_REPO), cuda_rpm("580.173.02", without=("dkms",)))
    assert codes(data) == ["dkms-missing"]
    assert "epel-release-latest-9" in data["refusals"][0]["hint"]


def test_stream_follows_branch_and_flavour_and_the_old_one_is_reset(tmp_path):
    root = built(tmp_path, "healthy-docker-rocky9", {**BARE_REPO, **stream("latest-dkms")})
    data = plan(root, cuda_rpm("580.173.02"))
    modules = [line for line in data["commands"] if " module " in line]
    assert modules == ["dnf -y module reset nvidia-driver", "dnf -y module enable nvidia-driver:580-open"]
    assert not data["resolved"], "its packages aren't visible before"


def test_secure_boot_is_accepted_with_signed_ubuntu_modules(tmp_path):
    data = plan(built(tmp_path, "secureboot-unsigned", {}), archive("580.173.02"))
    assert "secure-boot" not in codes(data)


def test_installed_driver_needs_no_change(tmp_path):
    shelf = archive("580.159.03")
    names = (
        "linux-modules-nvidia-580-server-open-generic",
        "linux-modules-nvidia-580-server-open-5.15.0-122-generic",
        *("nvidia-headless-no-dkms-580-server-open", "nvidia-utils-580-server"),
        *(f"{name}-580-server" for name in LIBRARIES),
    )
    here = Shelf(shelf.offers, {name: shelf.offers[name][0][0] for name in names})
    root = built(tmp_path, "healthy-h100", {})
    data = plan(root, here)
    assert data["upToDate"] and data["commands"] == [] and data["id"] == ""
    ran = gpunode("driver", "install", "--root", str(root))
    assert ran.code == 0 and "nothing to do" in ran.out


# device ids: branch, kernel module, how many are left without a driver
MIXED = {
    "volta and hopper": (("0x1db6", "0x2330"), 580, "proprietary", 0),
    "volta and blackwell": (("0x1db6", "0x2901"), 580, "open", 1),
    "ampere and gb300": (("0x20b0", "0x3182"), 580, "open", 0),
    "one that nobody knows yet": (("0x2330", "0x3fff"), 580, "open", 1),
}


@pytest.mark.parametrize("case", MIXED)
def test_gpus_of_several_generations_get_the_driver_that_supports_most(case, tmp_path):
    ids, branch, flavour, left_out = MIXED[case]
    gpus = ("0000:18:00.0", "0000:2a:00.0")
    files = {
        f"/sys/bus/pci/devices/{one}/device": f"{number}\n" for one, number in zip(gpus, ids, strict=True)
    }
    root = built(tmp_path, "healthy-docker-rocky9", files, ("/sys/module/nvidia", "/var/lib/dkms"))
    (root / "lib/modules/5.14.0-427.13.1.el9_4.x86_64/modules.dep").write_text("")
    data = plan(root, Shelf())
    assert (data["branch"], data["flavour"]) == (branch, flavour)
    ran = gpunode("driver", "plan", "--root", str(root))
    assert (
        sum("gets no driver" in line or "don't know the GPU" in line for line in ran.err.splitlines())
        == left_out
    )


def test_hold_alone_is_the_only_remaining_step(tmp_path):
    shelf = archive("580.159.03")
    here = {name: some[0][0] for name, some in shelf.offers.items() if "6.8.0" not in name}
    here.pop("nvidia-headless-580-server-open")
    root = built(tmp_path, "healthy-h100", {})
    record(root, Shelf(shelf.offers, here), lambda host: made(host, Wish(hold=True)))
    ran = gpunode("driver", "plan", "--hold", "--root", str(root), "-o", "json")
    commands = ran.document["data"]["commands"]
    assert len(commands) == 1 and commands[0].startswith("apt-mark hold ")


def test_unknown_mirror_version_and_flavour_are_usage_errors(tmp_path):
    root = built(tmp_path, "healthy-h100", {})
    for argv in (
        ("--repository", "http://mirror/cuda"),
        ("--repository", "https://mirror/a b"),
        ("--version", "580"),
        ("--version", "580.159.03;reboot"),
        ("--flavour", "free"),
        ("--key", "/etc/hostname"),
        ("--repository", "https://mirror.example.com/cuda", "--key", "/nonexistent"),
        ("--repository", "https://me:secret@mirror.example.com/cuda"),
        ("--branch", "595", "--version", "580.159.03"),
    ):
        ran = gpunode("driver", "plan", "--root", str(root), *argv)
        assert ran.code in (1, 2) and "hint: " in ran.err and "Traceback" not in ran.err, argv


def test_mirror_of_nvidias_repository_is_added_in_its_place(tmp_path):
    root = built(tmp_path, "healthy-docker-rocky9", {})
    data = plan(root, Shelf(), "--repository", "https://mirror.example.com/cuda/repos")
    text = data["files"][0]["content"]
    assert "baseurl=https://mirror.example.com/cuda/repos/rhel9/x86_64\n" in text
    assert "developer.download" not in text and "gpgcheck=1" in text


def test_apt_gets_a_mirror_only_with_its_key(tmp_path):
    root, mirror = built(tmp_path, "driver-not-installed", {}), "https://mirror.example.com/cuda/repos"
    assert codes(plan(root, Shelf(), "--repository", mirror)) == ["mirror-not-set-up"]
    key = "-----BEGIN PGP PUBLIC KEY BLOCK-----\n\nAAAA\n-----END PGP PUBLIC KEY BLOCK-----\n"
    (root / "mirror.asc").write_text(key)
    argv = ("--root", str(root), "-o", "json", "--repository", mirror, "--key", "/mirror.asc")
    data = gpunode("driver", "plan", *argv).document["data"]
    ring = "/etc/apt/keyrings/nvidia-driver.asc"
    written = {file["path"]: file["content"] for file in data["files"]}
    source = "/etc/apt/sources.list.d/nvidia-driver.list"
    assert (codes(data), written[ring]) == ([], key)
    assert written[source] == f"deb [signed-by={ring}] {mirror}/ubuntu2204/x86_64 /\n"
    assert data["commands"][0].startswith("apt-get update") and source in data["commands"][0]


@pytest.mark.parametrize(
    ("name", "release", "address", "key"),
    [
        ("healthy-docker-rocky9", 'ID="rocky"\nID_LIKE="rhel"\nVERSION_ID="9.6"', "rhel9", "D42D0685"),
        ("healthy-docker-rocky9", 'ID="rocky"\nID_LIKE="rhel"\nVERSION_ID="10.1"', "rhel10", "CDF6BA43"),
        ("healthy-crio-fedora", "ID=fedora\nVERSION_ID=43", "fedora43", "1940C73E"),
        ("healthy-crio-fedora", "ID=fedora\nVERSION_ID=44", "fedora44", "73CD9B30"),
        ("healthy-suse-kubelet", "ID=sles\nVERSION_ID=16.0", "suse16", "3A8B5622"),
    ],
)
def test_each_repository_is_trusted_by_the_key_in_it(name, release, address, key, tmp_path):
    """NVIDIA signs new distributions with new keys: a file of another name isn't in the repository."""
    root = built(tmp_path, name, {"/etc/os-release": f"{release}\n"})
    data = plan(root, Shelf(), "--repository", "nvidia")
    text = data["files"][0]["content"]
    assert f"gpgkey={CUDA_DEB.format(address)}/{key}.pub\n" in text


AZURE = 'ID=azurelinux\nVERSION_ID="3.0"\nPRETTY_NAME="Microsoft Azure Linux 3.0"\n'
AZURE_REPO = CUDA_DEB.format("azl3")


def test_azure_linux_is_refused_with_the_commands_for_its_own_package_manager(tmp_path):
    root = built(tmp_path / "bare", "driver-not-installed", {"/etc/os-release": AZURE})
    (refusal,) = plan(root, Shelf())["refusals"]
    assert refusal["code"] == "no-repository" and "tdnf" in refusal["message"]
    install = "tdnf install azurelinux-repos-extended && tdnf install nvidia-open"
    assert refusal["hint"] == (
        f"curl -fsSLo /etc/yum.repos.d/cuda-azl3.repo {AZURE_REPO}/cuda-azl3.repo && {install}"
    )
    ran = gpunode("doctor", "--root", str(root), "-o", "json")
    (finding,) = [one for one in ran.document["data"]["findings"] if one["id"] == "driver-not-installed"]
    assert finding["fix"][0]["command"] == refusal["hint"]
    known = {
        "/etc/os-release": AZURE,
        "/etc/yum.repos.d/cuda.repo": f"[cuda]\nbaseurl={AZURE_REPO}\n",
    }
    root = built(tmp_path / "known", "driver-not-installed", known)
    assert plan(root, Shelf())["refusals"][0]["hint"] == install


def test_install_without_yes_shows_the_plan_and_changes_nothing(tmp_path):
    root = built(tmp_path, "driver-not-installed", {})
    record(root, archive("580.173.02"), lambda host: made(host, Wish()))
    before = sorted(str(path) for path in root.rglob("*"))
    ran = gpunode("driver", "install", "--root", str(root))
    assert ran.code == 3 and "was not confirmed" in ran.err
    assert f"nvidia-utils-580-server=580.173.02-{JAMMY}" in ran.out
    dry = gpunode("driver", "install", "--dry-run", "--root", str(root), "-o", "json")
    shown = gpunode("driver", "plan", "--root", str(root), "-o", "json")
    assert dry.code == 0 and dry.document["data"]["plan"] == shown.document["data"]
    assert sorted(str(path) for path in root.rglob("*")) == before


def test_plan_id_is_a_digest_of_its_actions(tmp_path):
    root = built(tmp_path, "driver-not-installed", {})
    first = plan(root, archive("580.173.02"))["id"]
    assert len(first) == 12 and plan(root, archive("580.173.02"))["id"] == first
    other = built(tmp_path / "b", "driver-not-installed", {})
    assert plan(other, archive("580.178.04"))["id"] != first
    refused = gpunode("driver", "install", "--dry-run", "--plan", "x", "--root", str(root))
    assert refused.code == 2 and "hint: " in refused.err


def test_dnf_repository_id_is_read_from_the_configuration(tmp_path):
    """Only our own ids began with cuda-: the packages of other ids weren't found."""
    files = {
        "/etc/yum.repos.d/gpu.repo": f"[site-gpu]\nbaseurl = {CUDA_DEB.format('rhel9')[:-6]}$basearch\n",
        **stream("580-open"),
    }
    offers = cuda_rpm("580.173.02").offers
    named = {
        name: tuple((version, place.replace(CUDA, "site-gpu")) for version, place in some)
        for name, some in offers.items()
    }
    data = plan(built(tmp_path, "healthy-docker-rocky9", files), Shelf(named))
    assert data["version"] == "580.173.02" and codes(data) == []


def test_missing_packages_hint_at_the_components_that_have_them(tmp_path):
    data = plan(built(tmp_path, "driver-not-installed", {}), Shelf({"dkms": (("3.0-1", UBUNTU),)}))
    assert codes(data) == ["package-missing"] and "multiverse" in data["refusals"][0]["hint"]


def test_plan_json_is_plain_data(tmp_path):
    root = built(tmp_path, "driver-not-installed", {})
    data = plan(root, archive("580.173.02"))
    assert json.loads(json.dumps(data)) == data


def test_machine_without_gpus_is_refused_in_the_first_line(tmp_path: Path) -> None:
    ran = gpunode("driver", "plan", "--root", str(tmp_path))
    assert (ran.code, ran.out.splitlines()[0]) == (0, "This plan can't be carried out:")


def test_dry_run_with_a_blocker_exits_3_and_names_it(tmp_path: Path) -> None:
    root = built(tmp_path, "driver-not-installed", {})
    plan(root, Shelf({"dkms": (("3.0-1", UBUNTU),)}))
    ran = gpunode("driver", "install", "--dry-run", "--root", str(root))
    first, second = ran.err.splitlines()[-2:]
    assert ran.code == 3 and "refused: branch 580 isn't available here" in first
    assert second.startswith("hint: ") and "multiverse" in second


@pytest.mark.parametrize(
    ("name", "shelf"),
    [
        ("driver-not-installed", archive("580.173.02")),
        ("driver-not-installed", Shelf()),
        ("healthy-docker-rocky9", Shelf({"dkms": EPEL})),  # the repository would have to be added first
    ],
)
def test_unknown_branch_is_refused_with_the_branches_that_exist(
    tmp_path: Path, name: str, shelf: Shelf
) -> None:
    root = built(tmp_path, name, {})
    data = plan(root, shelf, "--branch", "999")
    assert codes(data) == ["branch-unknown"] and data["commands"] == []
    hint = data["refusals"][0]["hint"]
    assert "580" in hint and "595" in hint and "550" not in hint  # 550 gets no more fixes
    for options in (("--dry-run",), ("--yes",)):
        ran = gpunode("driver", "install", *options, "--branch", "999", "--root", str(root))
        assert ran.code == 3
        assert "branch 999 is unknown" in ran.err.splitlines()[0] and f"hint: {hint}" in ran.err


def test_newer_branch_that_a_repository_has_is_not_refused(tmp_path: Path) -> None:
    data = plan(built(tmp_path, "driver-not-installed", {}), archive("999.10.02"), "--branch", "999")
    assert data["version"] == "999.10.02" and codes(data) == []
    root = built(tmp_path, "healthy-docker-rocky9", {})
    wish = ("--version", "999.10.02")
    assert codes(plan(root, Shelf({"dkms": EPEL}), *wish)) == ["branch-unknown"]  # no repository was read
    rhel = built(tmp_path / "repo", "healthy-docker-rocky9", {**BARE_REPO, **stream("999-open")})
    data = plan(rhel, cuda_rpm("999.10.02"), *wish)
    assert data["version"] == "999.10.02" and "branch-unknown" not in codes(data)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("driver-not-installed", "'nvidia-utils-580-server=580.1.2-*'"),
        ("healthy-crio-fedora", "'nvidia-driver-cuda-580.1.2-*'"),
        ("healthy-suse-kubelet", "'nvidia-compute-utils-G06>=580.1.2' 'nvidia-compute-utils-G06<580.1.2.0'"),
    ],
)
def test_version_that_was_not_looked_up_is_pinned(tmp_path: Path, name: str, expected: str) -> None:
    root = str(built(tmp_path, name, {}))  # no answer of a package manager is recorded
    ran = gpunode("driver", "plan", "--version", "580.1.2", "--root", root)
    assert expected in ran.out and "580.*" not in ran.out
    assert "requested on the command line; not looked up (--version 580.1.2)" in ran.out
    assert "every package here has" not in ran.out
    unknown = gpunode("driver", "plan", "--version", "999.9.9", "--root", root)
    assert "branch 999 is unknown" in unknown.out and "apt-get" not in unknown.out


def test_unknown_flavour_is_refused_before_the_machine_is_examined(tmp_path: Path) -> None:
    ran = gpunode("driver", "plan", "--flavour", "closed", "--root", str(tmp_path))
    assert ran.code == 2
    assert ran.err.splitlines() == [
        "error: unknown --flavour 'closed'",
        "hint: known: open, proprietary",
    ]
