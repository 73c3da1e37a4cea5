"""Commands that depend on how this node got its driver and engines: each must be correct literally."""

import re

import pytest

from fixtures.machines import machine, names, options, recorded_host
from gpunode.checks import docker as docker_fixes
from gpunode.checks import driver_packages, fixes
from gpunode.checks.devices import keep_initialised
from gpunode.checks.finding import Fix, effect_of
from gpunode.checks.fixes import ON_HOST
from gpunode.checks.preconditions import fitting
from gpunode.checks.runner import run_checks
from gpunode.commands import doctor
from gpunode.commands.demo import build_machine
from gpunode.facts.daemons import Daemon
from gpunode.facts.node import Node, Questions
from gpunode.facts.system import CONTAINER, WSL2
from gpunode.facts.systemd import read_unit
from gpunode.host import Host
from gpunode.output.render import plain_lines
from tests.memory import temporary
from tests.silent import SilentProgress


def commands(spec, root):
    """Fix commands by check id."""
    findings = run_checks(Node(Host(build_machine(spec, root), environ={})))
    return {
        finding.id: " && ".join(fix.command for fix in finding.fixes) for finding in findings if finding.fixes
    }


def without_driver(release, device="0x2330"):
    spec = machine("driver-not-installed")
    spec["files"]["/etc/os-release"] = release
    for path in spec["files"]:
        if path.startswith("/sys/bus/pci") and path.endswith("/device"):
            spec["files"][path] = f"{device}\n"
    return spec


DEBIAN = 'ID=debian\nVERSION_ID="12"\n'


def test_driver_fix_installs_the_planned_driver(tmp_path):
    command = commands(without_driver(DEBIAN), tmp_path)["driver-not-installed"]
    assert command == "gpunode driver install --yes"


def next_kernel(dep, release="5.15.0-122-generic"):
    """The node of dkms-next-kernel, with a module that wasn't built by DKMS."""
    spec = machine("dkms-next-kernel")
    spec["files"] = {path: text for path, text in spec["files"].items() if "/var/lib/dkms" not in path}
    spec["files"][f"/lib/modules/{release}/modules.dep"] = dep
    return spec


@pytest.mark.parametrize(
    ("dep", "package"),
    [
        ("kernel/nvidia-550/nvidia.ko:\n", "linux-modules-nvidia-550-5.15.0-124-generic"),
        ("kernel/nvidia-550srv/nvidia.ko:\n", "linux-modules-nvidia-550-server-5.15.0-124-generic"),
        (
            "kernel/nvidia-550srv-open/nvidia.ko.zst:\n",
            "linux-modules-nvidia-550-server-open-5.15.0-124-generic",
        ),
    ],
)
def test_prebuilt_modules_of_ubuntu_are_installed_instead_of_built(dep, package, tmp_path):
    found = commands(next_kernel(dep), tmp_path)
    assert found == {"dkms-not-built": f"apt update && apt install {package}"}


def test_run_file_driver_is_rebuilt_by_the_run_file(tmp_path):
    spec = next_kernel("kernel/drivers/video/nvidia.ko:\n")
    spec["executables"].append("/usr/bin/nvidia-uninstall")
    command = commands(spec, tmp_path)["dkms-not-built"]
    assert command == run_file("--kernel-name=5.15.0-124-generic")


def run_file(option, architecture="x86_64", desktop="XFree86/Linux-x86_64"):
    """The command with NVIDIA's .run installer of 580.159.03, which nothing leaves on a node."""
    name = f"NVIDIA-Linux-{architecture}-580.159.03.run"
    place = "https://us.download.nvidia.com"
    fetch = " || ".join(f"curl -fO {place}/{part}/580.159.03/{name}" for part in ("tesla", desktop))
    return f"cd /root && {{ {fetch}; }} && sh {name} {option}"


def test_run_file_matches_the_nodes_architecture(tmp_path):
    spec = next_kernel("kernel/drivers/video/nvidia.ko:\n")
    spec["executables"].append("/usr/bin/nvidia-uninstall")
    spec["files"]["/lib/ld-linux-aarch64.so.1"] = ""
    command = commands(spec, tmp_path)["dkms-not-built"]
    assert command == run_file("--kernel-name=5.15.0-124-generic", "aarch64", "XFree86/aarch64")


@pytest.mark.parametrize("key", ["/var/lib/shim-signed/mok/MOK.der", "/var/lib/dkms/mok.pub"])
def test_enrolled_key_is_the_one_on_the_node(key, tmp_path):
    spec = machine("secureboot-key-not-enrolled")
    del spec["files"]["/var/lib/shim-signed/mok/MOK.der"]
    spec["files"][key] = "certificate"
    assert commands(spec, tmp_path)["secureboot-unsigned"] == f"mokutil --import {key} && reboot"


@pytest.mark.parametrize(
    ("signer", "enrolled"),
    [("Canonical Ltd. Kernel Module Signing", ""), ("DKMS module signing key", "CN=DKMS module signing key")],
)
def test_module_with_an_accepted_signature_is_not_reported(signer, enrolled, tmp_path):
    spec = machine("secureboot-key-not-enrolled")
    commands_of_node = spec["recording"]["commands"]
    commands_of_node["modinfo -F signer nvidia"] = {"stdout": f"{signer}\n"}
    commands_of_node["mokutil --list-enrolled"] = {"stdout": f"[key 1]\n Issuer: {enrolled}\n"}
    assert "secureboot-unsigned" not in commands(spec, tmp_path)


def test_akmods_builds_and_signs_the_module_on_its_nodes(tmp_path):
    unsigned = machine("secureboot-unsigned-rocky9")
    unsigned["executables"].append("/usr/sbin/akmods")
    unsigned["files"] = {path: text for path, text in unsigned["files"].items() if "mok" not in path}
    assert commands(unsigned, tmp_path / "unsigned")["secureboot-unsigned"] == (
        "kmodgenca --auto && akmods --force --rebuild && mokutil --import "
        "/etc/pki/akmods/certs/public_key.der && reboot"
    )
    unbuilt = machine("akmods-build-failed")
    unbuilt["files"] = {path: text for path, text in unbuilt["files"].items() if "failed.log" not in path}
    assert commands(unbuilt, tmp_path / "unbuilt") == {
        "dkms-not-built": "dnf install kernel-devel-6.17.8-300.fc43.x86_64 && "
        "akmods --force --kernels 6.17.8-300.fc43.x86_64 && modprobe nvidia"
    }


def test_unsigned_module_is_rebuilt_before_its_key_is_enrolled(tmp_path):
    spec = machine("secureboot-unsigned")
    spec["files"]["/var/lib/dkms/mok.pub"] = "certificate"
    command = commands(spec, tmp_path)["secureboot-unsigned"]
    assert command.startswith("dkms build --force nvidia/580.159.03 -k $(uname -r) && dkms install")


def test_a_directory_that_ldconfig_already_reads_is_not_added_again(tmp_path):
    spec = machine("libraries-not-linked")
    added = "echo /usr/lib/nvidia >> /etc/ld.so.conf.d/nvidia-driver.conf && ldconfig"
    assert commands(spec, tmp_path / "unlisted")["libnvidia-ml-missing"] == added
    spec["files"]["/etc/ld.so.conf.d/driver.conf"] = "/usr/lib/nvidia\n"
    assert commands(spec, tmp_path / "listed")["libnvidia-ml-missing"] == "ldconfig"


def test_libraries_in_an_lxc_container_replace_its_packages_and_a_reboot_does_not_matter(tmp_path):
    spec = machine("lxc-library-mismatch")
    spec["files"]["/var/lib/dpkg/status"] = (
        "Package: libnvidia-compute-580\nStatus: install ok installed\nVersion: 580.173.02-0ubuntu1\n"
    )
    findings = run_checks(Node(Host(build_machine(spec, tmp_path), environ={})))
    (finding,) = [one for one in findings if one.id == "driver-lib-mismatch"]
    assert finding.fixes[0].command == (
        "apt install --allow-downgrades 'libnvidia-compute-580=580.159.03*' && "
        "apt-mark hold libnvidia-compute-580"
    )
    assert "apt remove libnvidia-compute-580 && cd /root" in finding.fixes[0].note
    assert not finding.reboot


def test_every_missing_device_file_is_created(tmp_path):
    spec = machine("healthy-h100")
    for gone in ("/dev/nvidiactl", "/dev/nvidia3"):
        del spec["recording"]["devices"][gone]
    command = commands(spec, tmp_path)["dev-nodes-missing"]
    assert command == "nvidia-modprobe -c255 -c3 && nvidia-modprobe -c0 -u"


def test_device_files_of_a_driver_container_are_not_missing(tmp_path):
    assert commands(machine("gpu-operator-driver"), tmp_path) == {}


def test_dead_plugin_is_restarted_as_a_unit_or_shows_the_log_of_its_pod(tmp_path):
    spec = machine("plugin-socket-dead")
    found = commands(spec, tmp_path / "pod")["plugin-socket-dead"]
    assert found == (
        "crictl ps --all --latest --quiet --name nvidia-device-plugin | "
        "xargs --no-run-if-empty crictl logs --tail 20"
    )
    unit = "/etc/systemd/system/gpunode-device-plugin.service"
    spec["files"][unit] = "[Service]\nExecStart=/usr/bin/gpunode plugin serve\n"
    found = commands(spec, tmp_path / "unit")["plugin-socket-dead"]
    assert found == "systemctl restart gpunode-device-plugin"


def test_stale_socket_beside_a_responding_plugin_is_only_removed(tmp_path):
    spec = machine("plugin-socket-dead")
    spec["recording"]["sockets"]["/var/lib/kubelet/device-plugins/gpunode.sock"] = "listening"
    command = commands(spec, tmp_path)["plugin-socket-dead"]
    assert command == "rm /var/lib/kubelet/device-plugins/nvidia-gpu.sock"


@pytest.mark.parametrize(
    ("manager", "unit", "command"),
    [
        ("k3s", "k3s-agent.service", "systemctl restart k3s-agent"),
        ("rke2", None, "systemctl restart rke2"),
        ("k0s", "k0sworker.service", "systemctl restart k0sworker"),
        ("microk8s", "snap.microk8s.daemon-containerd.service", "snap restart microk8s.daemon-containerd"),
    ],
)
def test_distribution_containerd_is_restarted_by_the_distribution(manager, unit, command):
    assert fixes.restart_managed(manager, unit).command == command


def test_each_docker_is_restarted_by_its_own_service_manager(tmp_path):
    system = Daemon("docker", None, (27, 3), "/etc/docker/daemon.json", "", "/run/docker.sock", None)
    snap = system._replace(config_path="/var/snap/docker/2893/config/daemon.json", manager="snap")
    own = system._replace(config_path="/home/anna/.config/docker/daemon.json", user="anna")
    assert docker_fixes.restart_docker(system, "reload") == "systemctl reload docker"
    assert docker_fixes.restart_docker(snap, "reload") == "snap restart docker"
    assert docker_fixes.restart_docker(own) == "systemctl --user restart docker"
    node = Node(Host(tmp_path, environ={}))
    assert not docker_fixes.edit(node, own, 3, "").needs_root
    assert docker_fixes.edit(node, system, 3, "").needs_root
    edit = docker_fixes.edit(node, snap, 3, "")
    assert edit.command == "${EDITOR:-vi} +3 /var/snap/docker/2893/config/daemon.json && snap restart docker"
    assert effect_of(edit, node) == "restarts Docker, which stops its containers unless live-restore is on"


def test_file_rendered_by_k3s_is_never_edited(tmp_path):
    found = commands(machine("k3s-template-repeats-a-table"), tmp_path / "template")
    template = "/var/lib/rancher/k3s/agent/etc/containerd/config-v3.toml.tmpl"
    assert found["containerd-config-version"] == f"${{EDITOR:-vi}} {template} && systemctl restart k3s"
    spec = machine("k3s-template-repeats-a-table")
    del spec["files"][template]
    found = commands(spec, tmp_path / "none")
    assert found["containerd-config-version"] == "systemctl restart k3s"


def test_k3s_is_configured_by_name_beside_another_containerd(tmp_path):
    spec = machine("k3s-runtime-missing")
    # a custom template: what k3s would detect doesn't count
    spec["files"]["/var/lib/rancher/k3s/agent/etc/containerd/config-v3.toml.tmpl"] = "# no runtime nvidia\n"
    found = commands(spec, tmp_path)
    assert found["containerd-runtime-missing"] == "gpunode configure-runtime --runtime k3s"


@pytest.mark.parametrize("package", ["docker.io", "docker-ce"])
def test_old_docker_is_upgraded_from_its_own_package_source(package, tmp_path):
    spec = machine("docker-version-old")
    spec["files"]["/etc/os-release"] = DEBIAN
    status = f"Package: {package}\nStatus: install ok installed\nVersion: 18.09.1\n\n"
    spec["files"]["/var/lib/dpkg/status"] = status
    command = commands(spec, tmp_path)["docker-version-old"]
    assert command == f"apt update && apt install --only-upgrade {package}"


GUIDES = (fixes.DRIVER_GUIDE, fixes.TOOLKIT_GUIDE)
MANAGERS = {"apt": "debian", "dnf": "rhel", "zypper": "suse"}
OF_THE_KERNEL = {"modprobe", "rmmod", "dkms", "akmods", "mokutil", "update-initramfs", "dracut"}
OF_THE_DRIVER = (
    "nvidia-driver",
    "nvidia-open",
    "nvidia-dkms",
    "cuda-drivers",
    "linux-headers",
    "kernel-devel",
)


def programs(command):
    """The programs that a command calls; none in a text that asks a person to work on another machine."""
    if command == ON_HOST:
        return set()
    return {call.split()[0] for call in re.split(" && |; ", command) if call.split()}


def names_any(texts, command):
    return any(text in command for text in texts)


def takes_no_packages(node):
    """Whether this node's driver isn't a package: it is in the system's image or in the operator's pod."""
    is_image = node.distribution.immutable or node.host.is_dir("/home/kubernetes/bin")
    return is_image or any("nvidia-driver-daemonset" in pod for pod in node.operator.pods)


def imports_a_missing_key(node, command):
    """The key neither exists nor is created by the same command."""
    key = re.search(r"mokutil --import (\S+)", command)
    creates = programs(command) & {"update-secureboot-policy", "dkms"}
    return key is not None and not node.host.exists(key[1]) and not creates


def starts_a_missing_service(node, command):
    """The service neither exists nor comes with a package of the same command."""
    if "install" in command or node.distribution.id == "flatcar":  # Flatcar's image has nvidia.service
        return False
    units = re.findall(r"systemctl (?:re)?(?:start|load) ([\w@-]+)(?:\.service)?(?: |$)", command)
    return not all(has_unit(node, f"{unit}.service") for unit in units)


def has_unit(node, name):
    state = node.units.get(name)
    return read_unit(node.host, name) is not None or (state is not None and state.installed)


def installs_the_present_branch(node, command):
    branch = re.search(r"driver install --branch (\d+)", command)
    return branch is not None and branch[1] == node.driver_version.partition(".")[0]


# each function returns whether the command makes this mistake on the node
MISTAKES = {
    "a reboot of what can't reboot": lambda node, command: (
        node.kind in (CONTAINER, WSL2) and "reboot" in programs(command)
    ),
    "a reboot that isn't a step of its own": lambda node, command: "&& reboot" in command,
    "a program for the kernel in a container": lambda node, command: (
        node.kind == CONTAINER and programs(command) & OF_THE_KERNEL
    ),
    "a package of the driver in a container": lambda node, command: (
        node.kind == CONTAINER and "install" in command and names_any(OF_THE_DRIVER, command)
    ),
    "a package manager of another distribution": lambda node, command: any(
        MANAGERS.get(program, node.distribution.family) != node.distribution.family
        for program in programs(command)
    ),
    "dkms where it builds no driver": lambda node, command: "dkms" in programs(command) and not node.dkms,
    "modprobe without the running kernel's modules": lambda node, command: (
        "modprobe" in programs(command) and not node.host.is_dir(f"/lib/modules/{node.kernel}")
    ),
    "a guide to packages where none can be installed": lambda node, command: (
        names_any(GUIDES, command) and takes_no_packages(node)
    ),
    "a driver that gpunode refuses to install here": lambda node, command: (
        "gpunode driver install" in command and (takes_no_packages(node) or node.kind in (CONTAINER, WSL2))
    ),
    "the branch that is installed": installs_the_present_branch,
    "a key that doesn't exist": imports_a_missing_key,
    "a service that isn't on the node": starts_a_missing_service,
    "a user by number without '#'": lambda node, command: re.search(r"sudo -Hu \d", command),
    "headers of another distribution's kernel": lambda node, command: (
        "-pve" in node.kernel and "linux-headers-" in command
    ),
    "NVIDIA's repository over RPM Fusion's driver": lambda node, command: (
        "akmod-nvidia" in node.packages.installed and "developer.download.nvidia.com" in command
    ),
}


@pytest.fixture(scope="module", params=names())
def diagnosed(request):
    """A recorded machine and the doctor's result on it, once for all tests of the machine."""
    nodes, node_of = [], doctor.node_of

    def kept(*arguments):
        nodes.append(node_of(*arguments))
        return nodes[0]

    with temporary("gpunode-test-") as root:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(doctor, "node_of", kept)
            host, questions = recorded_host(request.param, root), Questions(**options(request.param))
            result = doctor.run(host, SilentProgress(), questions=questions)
        (node,) = nodes
        yield node, result


@pytest.mark.full
def test_no_offered_command_contradicts_its_machine(diagnosed):
    node, result = diagnosed
    offered = [(finding.id, fix.command) for finding in result.data.findings for fix in finding.fixes]
    mistakes = [
        (check, command, mistake)
        for check, command in offered
        for mistake, makes in MISTAKES.items()
        if makes(node, command)
    ]
    assert mistakes == []


@pytest.mark.full
def test_page_has_one_first_step(diagnosed):
    """The page's own data agrees, and a reboot is first only if it breaks nothing."""
    _, result = diagnosed
    lines = [line for block in result.blocks for line in plain_lines(block)]
    by_id = {finding.id: finding for finding in result.data.findings}
    chosen = by_id.get(result.data.first)
    root = ", as root" if chosen is not None and chosen.fixes[0].needs_root else ""
    label = "Look" if chosen is not None and chosen.fixes[0].look else "Fix"
    first = [f"{label} first{root}: {chosen.id}"] if chosen is not None else []
    if chosen is not None and chosen.fixes[0].command == ON_HOST:
        first = []
        assert lines[-1] == "This is a container. Run gpunode doctor on its host."
    assert [line for line in lines if line.startswith(("Fix first", "Look first"))] == first
    assert not [line for line in lines if line.startswith("Safe to reboot? No") and "first" in line]
    printed = [line.removeprefix("  Fix: ").removeprefix("  Look: ") for line in lines]
    printed = [re.sub(r"^  \d\. ", "", line).strip() for line in printed]
    commands = {fix.command for finding in by_id.values() for fix in finding.fixes[:1]} - {"gpunode doctor"}
    assert all(printed.count(command) <= 1 for command in commands)
    if chosen is not None and first:
        assert chosen.fixes[0].command in printed[lines.index(first[0]) :]
    assert [line for line in lines if line.startswith(("SKIP ", "WAIT ")) and len(line) > 80] == []

    for finding in by_id.values():
        assert all(bool(fix.change) == ("EDITOR" in fix.command) for fix in finding.fixes), finding.id
        assert all(bool(fix.effect) == (fix.disruptive != "none") for fix in finding.fixes), finding.id
        assert all(
            fix.note and fix.disruptive == "none" and not fix.safe for fix in finding.fixes if fix.look
        )
    if chosen is not None and chosen.fixes[0].command == "reboot":
        assert not result.data.reboot.findings


RKE2_CRICTL = "/var/lib/rancher/rke2/bin/crictl --runtime-endpoint unix:///run/k3s/containerd/containerd.sock"
# one machine for each command that used to be useless there, with the command that works
FIRST = {
    "allocatable-zero-after-xid-79": "reboot",
    "arch-without-driver": "pacman -Syu nvidia-open",
    "azure-linux-next-kernel": "tdnf update",
    "containerd-drop-in-of-higher-version": (
        "mv /etc/containerd/conf.d/99-nvidia.toml /etc/containerd/conf.d/99-nvidia.toml.disabled && "
        "gpunode configure-runtime --runtime containerd"
    ),
    "containerd-systemdcgroup-kubelet": (
        "sed -i 's/SystemdCgroup = false/SystemdCgroup = true/' /etc/containerd/config.toml && "
        "systemctl restart containerd"
    ),
    "cos-gke-without-driver": (
        "kubectl apply --filename https://raw.githubusercontent.com/GoogleCloudPlatform/"
        "container-engine-accelerators/master/nvidia-driver-installer/cos/daemonset-preloaded.yaml"
    ),
    "crio-conmon-missing": "dnf reinstall cri-o && systemctl restart crio",
    "docker-older-than-toolkit": "systemctl restart docker",
    "docker-rootless": (
        "sudo -Hu '#1000' XDG_RUNTIME_DIR=/run/user/1000 gpunode configure-runtime --runtime docker"
    ),
    "flatcar-without-driver": "systemctl restart nvidia.service",
    "flatcar-without-toolkit": (
        "mkdir -p /etc/sysupdate.nvidia-runtime.d /etc/extensions /opt/extensions/nvidia-runtime && "
        "curl -fLo /etc/sysupdate.nvidia-runtime.d/nvidia-runtime.conf "
        "https://extensions.flatcar.org/extensions/nvidia-runtime.conf && "
        "/usr/lib/systemd/systemd-sysupdate -C nvidia-runtime update && systemd-sysext refresh"
    ),
    "gentoo-next-kernel": "eselect kernel set linux-6.12.47-gentoo-dist && emerge @module-rebuild",
    "image-newer-than-any-driver": "use an image of CUDA 13.0 or older",
    "k0s-drop-in-of-other-version": (
        "mv /etc/k0s/containerd.d/nvidia.toml /etc/k0s/containerd.d/nvidia.toml.disabled && "
        "systemctl restart k0sworker && "
        "gpunode configure-runtime --runtime k0s"
    ),
    "kernel-modules-removed": "reboot",
    "gpu-bound-vfio-rocky9": (
        "sed -i '2s/^/# /' /etc/modprobe.d/vfio.conf && dracut -f --regenerate-all && modprobe nvidia; "
        "cd /sys/bus/pci && for gpu in 0000:18:00.0 0000:2a:00.0; do echo $gpu > devices/$gpu/driver/unbind; "
        "echo nvidia > devices/$gpu/driver_override; echo $gpu > drivers_probe; done"
    ),
    "kubelet-stopped-by-swap": (
        r"swapoff --all && sed -i.bak '/\sswap\s/s/^/# /' /etc/fstab && systemctl restart kubelet"
    ),
    "allocatable-fewer-suse": (
        "kubectl delete pod --namespace kube-system nvidia-device-plugin-daemonset-7x2lq"
    ),
    "mig-strategy-single-by-gpunode": (
        "systemctl edit --full gpunode-device-plugin && systemctl restart gpunode-device-plugin"
    ),
    "lxc-library-mismatch": run_file("--no-kernel-modules"),
    "microos-next-kernel": (
        "transactional-update pkg install --force nvidia-open-driver-G06-signed-kmp-default"
    ),
    "mig-config-lost-suse": (
        "gpunode mig export > /etc/gpunode-mig.yaml && "
        "gpunode mig apply --config-file /etc/gpunode-mig.yaml --persist"
    ),
    "bar-too-small-vm": (
        "shut this virtual machine down, give it more 64-bit PCI address space on its host (QEMU: -global "
        "q35-pcihost.pci-hole64-size=2048G), and start it again"
    ),
    "module-fails-to-load": "systemctl poweroff",
    "nixos-kernel-without-module": "nixos-rebuild boot",
    "persistence-off": "apt install nvidia-compute-utils-580 && systemctl enable --now nvidia-persistenced",
    "plugin-config-does-not-exist": 'kubectl label node "$(uname -n)" nvidia.com/device-plugin.config-',
    "plugin-not-registered": "gpunode setup --kubernetes",
    "plugin-socket-dead-rke2": (
        f"{RKE2_CRICTL} ps --all --latest --quiet --name nvidia-device-plugin | "
        f"xargs --no-run-if-empty {RKE2_CRICTL} logs --tail 20"
    ),
    "proxmox-next-kernel": "apt install proxmox-headers-6.14.11-1-pve && dkms autoinstall -k 6.14.11-1-pve",
    "rpmfusion-driver-old": "dnf upgrade akmod-nvidia 'xorg-x11-drv-nvidia*' && akmods --force",
    "talos-modules-not-listed": (
        "follow https://docs.siderolabs.com/talos/v1.13/configure-your-talos-cluster/hardware-and-drivers/"
        "nvidia-gpu to have Talos load nvidia and nvidia_uvm"
    ),
    "toolkit-cli-probe": "dnf install nvidia-persistenced && systemctl enable --now nvidia-persistenced",
    "toolkit-too-old-no-plugin": "gpunode toolkit install --upgrade",
}


@pytest.mark.parametrize("name", FIRST)
def test_first_command_works_on_this_system(name, tmp_path):
    result = doctor.run(recorded_host(name, tmp_path), SilentProgress(), questions=Questions(**options(name)))
    (finding,) = [one for one in result.data.findings if one.id == result.data.first]
    assert finding.fixes[0].command == FIRST[name]


# by machine, what a user has to know beside the first command: its effect and note, on this node
BESIDE = {
    "containerd-stopped-kubelet-stopped": (
        "starts containerd and kubelet, which ends pods that the cluster has evicted meanwhile",
        "If one of them stops again, the log has the reason:\n"
        "journalctl -b -u containerd -u kubelet -n 30 --no-pager",
    ),
    "dkms-next-kernel-rocky9": (
        "GPU programs that start before the reboot fail",
        "If this fails or prints no version, don't reboot into kernel 5.14.0-503.11.1.el9_5.x86_64: it still "
        "has no module. Into kernel 5.14.0-427.13.1.el9_4.x86_64 only if this prints one:\n"
        "modinfo -k 5.14.0-427.13.1.el9_4.x86_64 -F version nvidia",
    ),
    "driver-two-installs": (
        "GPU programs that start before the reboot fail",
        "If this fails, don't reboot",
    ),
    "driver-upgrade-pending": (
        "GPU programs that start before the reboot fail",
        "If this fails, don't reboot",
    ),
    "flatcar-without-toolkit": (
        "for a moment /usr lacks all system extensions, such as Docker's: containers that start then fail, "
        "running ones continue",
        "Then register its runtime, which reloads or restarts the container engine:\n"
        "gpunode configure-runtime --runtime containerd",
    ),
    "kernel-modules-removed": (
        "reboots this machine",
        "The modules of the running kernel 5.15.0-122-generic were removed: "
        "a reboot starts 5.15.0-130-generic",
    ),
    "lxc-library-mismatch": ("GPU programs that start meanwhile in this container fail", ""),
    "mig-mode-pending": (
        "resets only an idle GPU",
        "The drain leaves the pods of DaemonSets running, such as the device plugin and DCGM, and the reset "
        "fails while fuser -v /dev/nvidia* lists a process. If you can't end them, reboot: that resets the "
        "GPU as well. When MIG is on, create MIG devices, with FILE in the format of gpunode mig export:\n"
        "gpunode mig apply --config-file FILE --persist",
    ),
    "operator-leftovers": (
        "restarts containerd: running containers continue",
        "GPU pods that run now need the old files until they end: a drain ends them. Then move the files:\n"
        "mv /usr/local/nvidia/toolkit /usr/local/nvidia/toolkit.old",
    ),
}


@pytest.mark.parametrize("name", BESIDE)
def test_first_command_says_what_it_disturbs_and_what_follows(name, tmp_path):
    result = doctor.run(recorded_host(name, tmp_path), SilentProgress(), questions=Questions(**options(name)))
    (finding,) = [one for one in result.data.findings if one.id == result.data.first]
    assert (finding.fixes[0].effect, finding.fixes[0].note) == BESIDE[name]


def test_firmware_of_working_gpus_is_restored_without_a_reboot(tmp_path):
    result = doctor.run(recorded_host("gsp-firmware-gone", tmp_path), SilentProgress())
    (finding,) = [one for one in result.data.findings if one.id == "gsp-firmware"]
    assert [fix.disruptive for fix in finding.fixes] == ["none"]


def test_a_stopped_containerd_is_explained_as_such(tmp_path):
    result = doctor.run(recorded_host("containerd-not-running", tmp_path), SilentProgress())
    (finding,) = [one for one in result.data.findings if one.id == "containerd-not-restarted"]
    assert finding.why == "Without containerd no pod or container can start. Those that run continue."


@pytest.mark.parametrize(
    ("arguments", "unit", "command"),
    [
        (
            "",
            True,
            "mkdir -p /etc/gpunode && echo GPUNODE_PLUGIN_SERVE_MIG_STRATEGY=mixed >> /etc/gpunode/env && "
            "systemctl restart gpunode-device-plugin",
        ),
        ("--mig-strategy=single", False, "gpunode plugin status"),
        (
            "",
            False,
            "kubectl set env --namespace kube-system daemonset/gpunode-device-plugin "
            "GPUNODE_PLUGIN_SERVE_MIG_STRATEGY=mixed",
        ),
    ],
)
def test_the_strategy_of_gpunodes_plugin_is_set_where_it_was(arguments, unit, command, tmp_path):
    spec = machine("mig-strategy-single-by-gpunode")
    words = ["/usr/bin/python3", "/usr/bin/gpunode", "plugin", "serve", *arguments.split()]
    spec["files"]["/proc/2100/cmdline"] = "\0".join(words) + "\0"
    spec["files"]["/proc/2100/environ"] = "GPUNODE_PLUGIN_SERVE_MIG_STRATEGY=single\0"
    if not unit:
        del spec["files"]["/usr/lib/systemd/system/gpunode-device-plugin.service"]
        spec["files"]["/proc/2100/cgroup"] = f"0::/kubepods.slice/cri-containerd-{'ab' * 32}.scope\n"
    node = Node(Host(build_machine(spec, tmp_path / "machine"), environ={}))
    (finding,) = [one for one in run_checks(node) if one.id == "mig-strategy-mismatch"]
    assert finding.fixes[0].command == command
    assert finding.fixes[0].look is (command == "gpunode plugin status")


@pytest.mark.parametrize("name", ["bottlerocket-variant-without-nvidia", "talos-modules-not-listed"])
def test_guide_is_not_followed_as_root(name, tmp_path):
    result = doctor.run(recorded_host(name, tmp_path), SilentProgress())
    lines = [line for block in result.blocks for line in plain_lines(block)]
    (chosen,) = [finding for finding in result.data.findings if finding.id == result.data.first]
    assert chosen.fixes[0].command.startswith("follow https://")
    assert f"Fix first: {chosen.id}" in lines


@pytest.mark.parametrize(("version", "package"), [("580.159.03", "G06"), ("595.71.05", "G07")])
def test_suse_packages_match_the_driver_branch(version, package, tmp_path):
    spec = machine("healthy-suse-kubelet")
    spec["files"]["/sys/module/nvidia/version"] = version
    node = Node(Host(build_machine(spec, tmp_path / "machine"), environ={}))
    libraries = f"zypper install nvidia-compute-utils-{package}"
    for fix in (driver_packages.install_libraries(node), driver_packages.reinstall_libraries(node)):
        assert fix == Fix(f"{libraries} && ldconfig")
    assert keep_initialised(node) == Fix(f"{libraries} && systemctl enable --now nvidia-persistenced")


@pytest.mark.parametrize(
    ("version", "module", "names"),
    [
        ("580.159.03", "x86_64  580", "nvidia-driver-G06-kmp-default"),
        ("580.159.03", "Open Kernel Module for x86_64  580", "nvidia-open-driver-G06-signed-kmp-default"),
        ("595.71.05", "Open Kernel Module for x86_64  595", "nvidia-open-driver-G07-signed-cuda-kmp-default"),
    ],
)
def test_suse_module_matches_the_installed_driver(version, module, names, tmp_path):
    spec = machine("microos-next-kernel")
    spec["files"]["/sys/module/nvidia/version"] = f"{version}\n"
    spec["files"]["/proc/driver/nvidia/version"] = f"NVRM version: NVIDIA UNIX {module}  Release Build\n"
    command = commands(spec, tmp_path)["dkms-not-built"]
    assert command == f"transactional-update pkg install --force {names} && reboot"


def test_suse_modules_of_two_kernels_are_named_once_each(tmp_path, monkeypatch):
    modules = " ".join(f"nvidia-open-driver-G06-signed-kmp-{kernel}" for kernel in ("default", "64kb"))
    monkeypatch.setattr("gpunode.checks.driver_packages.suse_modules", lambda node: modules)
    node = Node(recorded_host("healthy-suse-kubelet", tmp_path))
    fix = fitting(node, driver_packages.build_module(node, node.kernel))
    assert fix.command == f"zypper install --force {modules} && modprobe nvidia"


def test_failed_module_is_not_loaded_again_before_its_log_was_read(tmp_path):
    spec = machine("module-fails-to-load")
    log = "/.gpunode/kernel.log"
    assert commands(spec, tmp_path / "power")["module-not-loaded"] == "systemctl poweroff"
    lines = [line for line in spec["files"][log].splitlines(True) if "D3cold" not in line]
    spec["files"][log] = "".join(lines)
    assert commands(spec, tmp_path / "other")["module-not-loaded"] == fixes.READ_KERNEL_LOG.command


def test_gentoo_loads_a_module_only_into_the_running_kernel(tmp_path):
    node = Node(recorded_host("gentoo-next-kernel", tmp_path))
    fix = fitting(node, Fix(f"dkms autoinstall -k {node.kernel} && modprobe nvidia"))
    assert fix.command == (
        "eselect kernel set linux-6.12.41-gentoo-dist && emerge @module-rebuild && modprobe nvidia"
    )


def test_too_small_bar_of_a_vm_is_fixed_in_the_hypervisor(tmp_path):
    command = commands(machine("esxi-bar-without-room"), tmp_path)["bar-too-small"]
    assert command.startswith("shut this virtual machine down, follow https://blogs.vmware.com/")
    what = "pciPassthru.use64bitMMIO and pciPassthru.64bitMMIOSizeGB"
    assert command.endswith(f" to set {what}, and start it again")


@pytest.mark.parametrize(
    ("name", "version", "status"),
    [
        ("containerd-drop-in-of-higher-version", "2.3.4", "fail"),
        ("containerd-drop-in-of-higher-version", "2.3.5", "pass"),
        ("k0s-drop-in-of-other-version", "2.3.5", "fail"),
    ],
)
def test_containerd_refused_drop_ins_of_a_higher_version_for_five_releases(name, version, status, tmp_path):
    spec = machine(name)
    answers = spec["recording"]["commands"]
    for command in [command for command in answers if "containerd --version" in command]:
        answers[command]["stdout"] = f"containerd github.com/containerd/containerd/v2 v{version} 0a1b2c3"
    node = Node(Host(build_machine(spec, tmp_path / "machine"), environ={}))
    (finding,) = [one for one in run_checks(node) if one.id == "containerd-config-version"]
    assert finding.status.value == status


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("plugin-config-does-not-exist", "specified config a100-timesliced does not exist"),
        ("thor-plugin-crash-loop", "error building Device: error getting device memory: Not Supported"),
    ],
)
def test_last_container_error_of_a_plugin_is_the_summary(name, words, tmp_path):
    (finding,) = [
        one for one in run_checks(Node(recorded_host(name, tmp_path))) if one.id == "plugin-not-registered"
    ]
    assert finding.summary.startswith("the device plugin fails: ") and finding.summary.endswith(words)
    assert finding.evidence[0].source.startswith("/var/log/pods/")
