"""A report is readable at night: few lines, no repetition, and the real impact of a command."""

import re
from dataclasses import replace

import pytest

from fixtures.machines import machine, options, recorded_host
from gpunode.checks import containerd, crio, docker, driver_packages, fixes
from gpunode.checks.catalogue import BY_ID
from gpunode.checks.finding import Evidence, Fix, effect_of
from gpunode.checks.fixes import POWER_OFF
from gpunode.checks.platform import RESTART_WSL
from gpunode.checks.report import evidence_lines
from gpunode.commands import doctor
from gpunode.commands.demo import build_machine
from gpunode.facts.node import Node, Questions
from gpunode.host import Host
from gpunode.output.render import plain_lines
from tests.silent import SilentProgress


@pytest.mark.parametrize(
    ("fix", "prefix"),
    [
        (fixes.configure("docker", "--cdi"), "restarts Docker"),
        (
            fixes.configure("docker", "--set-as-default"),
            "reloads Docker; a restart, if it needs one (see --dry-run), stops its containers unless",
        ),
        (docker.UPGRADE.rhel, "restarts Docker, which stops its containers unless live-restore is on"),
        (fixes.configure("containerd"), "restarts containerd"),
        (containerd.UPGRADE.suse, "restarts containerd"),
        (fixes.configure("k3s"), "restarts this node's Kubernetes"),
        (fixes.restart_managed("rke2", "rke2-server.service"), "restarts this node's Kubernetes"),
        (crio.RESTART, "restarts CRI-O"),
        (fixes.START_KUBELET, "restarts the kubelet"),
        (fixes.RESTART_PLUGIN_POD, "restarts the device plugin: "),
        (fixes.set_plugin_variable("MIG_STRATEGY=mixed"), "restarts the device plugin on all nodes"),
        (RESTART_WSL, "ends everything that runs in WSL"),
        (BY_ID["wsl2"].fix_for("other"), "ends everything that runs in WSL"),
        (Fix("something else", disruptive="restart"), "restarts a daemon"),
        (Fix("something", disruptive="drain"), "stops GPU work"),
        (POWER_OFF, "powers the node off"),
        (driver_packages.UPGRADE_DRIVER, "reboots this machine"),
    ],
    ids=lambda value: getattr(value, "command", None),
)
def test_effect_of_a_fix_names_what_it_disturbs(fix, prefix, tmp_path):
    node = Node(Host(tmp_path, environ={}))
    assert effect_of(fix, node).startswith(prefix)
    assert effect_of(replace(fix, disruptive="none"), node) == ""


@pytest.mark.parametrize(
    ("name", "effect"),
    [
        ("crio-not-selected", "stops CRI-O"),
        (
            "cgroup-device-revoked",
            "stops these containers and ends their work: the kubelet starts them again",
        ),
        ("cgroup-device-revoked-rocky9", "restarts these containers, which ends their work"),
        ("plugin-not-registered", "configures the kubelet's container engine, and restarts it if needed"),
        ("imex-channels", "restarts the IMEX daemon"),
        ("fabricmanager-missing-b200", "restarts the fabric manager"),
        ("docker-not-running", "starts Docker, which isn't running"),
    ],
)
def test_effect_of_a_fix_on_a_recorded_machine(name, effect, tmp_path):
    findings = doctor.run(recorded_host(name, tmp_path), SilentProgress()).data.findings
    (fix,) = [fix for finding in findings for fix in finding.fixes if fix.effect]
    assert fix.effect.startswith(effect)


def test_evidence_that_differs_in_one_path_component_is_merged():
    alike = [Evidence(f"/sys/bus/pci/devices/{one}/driver", "vfio-pci") for one in ("a", "b", "c")]
    other = Evidence("/etc/modprobe.d/vfio.conf", "options vfio-pci", 3)
    assert list(evidence_lines([*alike, other])) == [
        "/sys/bus/pci/devices/{a,b,c}/driver: vfio-pci",
        "/etc/modprobe.d/vfio.conf:3: options vfio-pci",
    ]


@pytest.mark.parametrize(
    "sources",
    [
        ("/dev/nvidia0", "/dev/nvidia1"),
        ("/a/b/c", "/a/x/y", "/a/b/d"),
        ("NVML, GPU 0", "NVML, GPU 1", "NVML, GPU 2"),
        ("/dev/a b", "/dev/c", "/dev/d"),
    ],
)
def test_evidence_that_a_shell_cannot_expand_is_not_merged(sources):
    assert len(list(evidence_lines([Evidence(one, "x") for one in sources]))) == len(sources)


def test_command_that_fixes_several_findings_is_printed_once(tmp_path):
    host = recorded_host("cuda-driver-version-suse", tmp_path)
    blocks = doctor.run(host, SilentProgress(), questions=Questions(cuda="13.0")).blocks
    lines = [line for block in blocks for line in plain_lines(block)]
    first = lines.index("Fix first, as root: cuda-driver-version")
    assert lines.count("  Fix: see the steps at the end") == 1
    assert lines.count("  Fix: the same as for cuda-driver-version") == 2
    steps = [line for line in lines[first + 1 :] if re.match(r"  \d\. ", line)]
    commands = [step.split(maxsplit=1)[1] for step in steps]
    assert commands[0].startswith("kubectl drain NODE ")
    assert commands[1:] == [
        "gpunode driver install --yes",
        "reboot",
        "gpunode doctor",
        "kubectl uncordon NODE",
    ]
    assert [line for line in lines if commands[1] in line] == steps[1:2]


def page(name, root):
    """The lines of the doctor's page about a recorded machine."""
    result = doctor.run(recorded_host(name, root), SilentProgress(), questions=Questions(**options(name)))
    return [line for block in result.blocks for line in plain_lines(block)]


def test_fix_of_a_cause_comes_before_the_errors_that_it_explains(tmp_path):
    host = recorded_host("esxi-bar-without-room", tmp_path)
    result = doctor.run(host, SilentProgress())
    assert result.data.first == "bar-too-small"
    assert result.data.order == ("bar-too-small", "gpu-bound-other-driver", "cdi-spec-stale")
    lines = [line for block in result.blocks for line in plain_lines(block)]
    assert lines[0] == "1 error, 2 warnings: the firmware assigned no address window to a GPU"
    shown = [
        line.split()[1].rstrip(":") for line in lines if line.startswith(("FAIL ", "WARN ")) and ": " in line
    ]
    assert tuple(shown) == result.data.order
    page = result.documents["html"](result.envelope())
    places = [page.index(f'id="{identifier}"') for identifier in result.data.order]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("info", "effect"),
    [
        ({}, "stops its containers unless live-restore is on"),
        ({"ContainersRunning": 3}, "stops its containers unless live-restore is on"),
        ({"LiveRestoreEnabled": True, "ContainersRunning": 3}, "stops no container: live-restore is on"),
        ({"LiveRestoreEnabled": False, "ContainersRunning": 0}, "stops no container: none is running"),
        ({"LiveRestoreEnabled": False, "ContainersRunning": 1}, "stops 1 running container"),
        ({"LiveRestoreEnabled": False, "ContainersRunning": 3}, "stops 3 running containers"),
    ],
)
def test_dockers_own_report_says_whether_a_restart_stops_containers(info, effect, tmp_path):
    spec = machine("docker-older-than-toolkit")
    answer = spec["recording"]["daemons"]["/run/docker.sock"]["info"]
    for name in ("LiveRestoreEnabled", "ContainersRunning"):
        answer.pop(name, None)
    answer.update(info)
    result = doctor.run(Host(build_machine(spec, tmp_path / "machine"), environ={}), SilentProgress())
    (finding,) = [one for one in result.data.findings if one.id == "docker-runtime-missing"]
    assert finding.fixes[0].effect == f"restarts Docker, which {effect}"


def test_a_command_that_only_shows_the_cause_is_not_called_a_fix(tmp_path):
    lines = page("pcie-link-with-errors", tmp_path)
    at = lines.index("  1. lspci -vv -s 0000:01:00.0 | grep -e LnkCap: -e LnkSta:")
    assert lines[at + 1].startswith("     Stop the GPU work, power the node off and reseat the card")
    assert lines[at - 1] == "Look first, as root: pcie-link-degraded"


def test_a_driver_in_use_is_replaced_after_a_drain(tmp_path):
    lines = page("cuda-driver-version", tmp_path)
    assert lines[lines.index("Fix first, as root: cuda-driver-version") + 1 :] == [
        "  1. kubectl drain gpu-node-07 --ignore-daemonsets --delete-emptydir-data",
        "     (where kubectl is set up; evicts this node's pods and deletes their emptyDir volumes; if it "
        "fails, kubectl uncordon gpu-node-07 and fix what it names)",
        "  2. gpunode driver install --yes",
        "     (GPU programs that start before the reboot fail)",
        "     It installs branch 580. If this fails, it restores the old packages. If it reports that it "
        "couldn't, don't reboot",
        "  3. reboot",
        "  4. gpunode doctor",
        "  5. kubectl uncordon gpu-node-07",
        "     (once the doctor finds no error)",
        "More: gpunode explain cuda-driver-version",
    ]
    fresh = page("driver-not-installed", tmp_path / "fresh")
    assert not any("before the reboot fail" in line for line in fresh)


def test_a_reset_names_what_still_holds_the_gpu(tmp_path):
    lines = page("gpu-reset-required", tmp_path)
    at = lines.index("  2. nvidia-smi --gpu-reset -i 0000:5d:00.0")
    assert lines[0].startswith("1 error: GPU 3 (0000:5d:00.0): the driver requests a reset")
    assert lines[at - 3].startswith("Fix first, as root: ")
    assert lines[at - 2].startswith("  1. kubectl drain ")
    assert lines[at + 1] == "     (resets only an idle GPU)"
    assert lines[at + 2].startswith("     The drain leaves the pods of DaemonSets running")
    assert lines[at + 2].endswith("If you can't end them, reboot: that resets the GPU as well")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("docker-config-invalid-json", "In /etc/docker/daemon.json, line 4: {}: }}"),
        ("containerd-config-not-toml", "In /etc/containerd/config.toml, line 2: {}: [plugins"),
        ("crio-not-running", "In /etc/crio/crio.conf.d/99-nvidia.conf, line 3: {}: "),
    ],
)
def test_a_syntax_error_is_shown_with_its_line(name, change, tmp_path):
    start = change.format("correct the syntax error in this line or just before it")
    (line,) = [line for line in page(name, tmp_path) if line.startswith("  1. In /etc/")]
    assert line.startswith(f"  1. {start}")


def test_settings_to_copy_are_written_as_in_the_file(tmp_path):
    lines = page("containerd-imports-clobber", tmp_path)
    assert '  /etc/containerd/config.toml:5: sandbox_image = "registry.example.com/pause:3.10"' in lines
    assert "  /etc/containerd/config.toml:14: containerd.runtimes.runc.options.SystemdCgroup = true" in lines
    at = lines.index("Fix first, as root: containerd-imports-clobber") + 1
    assert lines[at] == "  This changes containerd's cgroup driver, which must not change under running pods"
    assert lines[at + 1].startswith("  1. kubectl drain ")
    assert lines[at + 3 : at + 12] == [
        "  2. In /etc/containerd/conf.d/99-nvidia.toml: add these settings in this order, so that the line "
        "numbers below remain right. To give up, leave vi with :cq",
        "       # at the end:",
        '       [plugins."io.containerd.grpc.v1.cri".registry]',
        '       config_path = "/etc/containerd/certs.d"',
        '       # below line 8, [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]:',
        "       SystemdCgroup = true",
        '       # below line 3, [plugins."io.containerd.grpc.v1.cri"]:',
        '       sandbox_image = "registry.example.com/pause:3.10"',
        "     ${EDITOR:-vi} /etc/containerd/conf.d/99-nvidia.toml && "
        "containerd config dump > /dev/null && systemctl restart containerd",
    ]


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("containerd-systemdcgroup-kubelet", "containerd"),
        ("kubelet-cgroupfs", "containerd"),
        ("crio-cgroup-manager", "CRI-O"),
        ("docker-cgroup-driver-mismatch", "Docker"),
        ("containerd-config-v1-table", "containerd"),
    ],
)
def test_node_is_drained_before_its_cgroup_driver_changes(name, engine, tmp_path):
    lines = page(name, tmp_path)
    at = next(number for number, line in enumerate(lines) if line.startswith("Fix first, as root: ")) + 1
    assert lines[at] == f"  This changes {engine}'s cgroup driver, which must not change under running pods"
    steps = [line for line in lines[at:] if re.match(r"  \d\. ", line)]
    assert steps[0].startswith("  1. kubectl drain ")
    assert steps[2:4] == ["  3. reboot", "  4. gpunode doctor"]
    assert steps[4].startswith("  5. kubectl uncordon ")


@pytest.mark.parametrize("name", ["runtime-mode-legacy", "toolkit-cve"])
def test_containers_that_run_now_are_not_protected_by_a_new_mode(name, tmp_path):
    lines = page(name, tmp_path)
    warning = (
        "     This protects only containers that start after it: restart the GPU containers that run now "
        "before you run 'systemctl daemon-reload' or install packages"
    )
    assert warning in lines[lines.index("Fix first, as root: dev-char-symlinks") :]


@pytest.mark.parametrize("name", ["plugin-cannot-see-nvml", "plugin-mount-mismatch"])
def test_change_of_the_plugin_on_every_node_is_announced(name, tmp_path):
    assert "This changes the device plugin on every node of the cluster" in "\n".join(page(name, tmp_path))


def test_confidential_gpus_are_attested_before_they_accept_work(tmp_path):
    lines = page("cc-mode", tmp_path)
    at = lines.index("Fix first, as root: cc-mode")
    assert lines[at + 1 : at + 4] == [
        "  First attest the GPUs: with this setting they accept work, whether attested or not",
        "  1. nvidia-smi conf-compute -srs 1",
        "     (disrupts nothing that runs)",
    ]


def test_few_allocatable_gpus_are_counted_against_those_of_the_node(tmp_path):
    lines = page("allocatable-fewer-suse", tmp_path)
    assert "WARN allocatable-zero: the kubelet can allocate only 3 of this node's 4 GPUs" in lines


@pytest.mark.parametrize("serves", [True, False])
def test_a_reboot_is_unsafe_while_only_the_file_disables_the_cri(serves, tmp_path):
    spec = machine("containerd-cri-disabled")
    if not serves:
        del spec["recording"]["daemons"]["/run/containerd/containerd.sock"]
    result = doctor.run(Host(build_machine(spec, tmp_path), environ={}), SilentProgress())
    lines = [line for block in result.blocks for line in plain_lines(block)]
    (answer,) = [line for line in lines if line.startswith("Safe to reboot? ")]
    assert answer.startswith("Safe to reboot? No" if serves else "Safe to reboot? Yes")
    evidence = "the running containerd still serves the CRI: it started before this setting"
    assert any(line.endswith(evidence) for line in lines) is serves


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "allocatable-zero-after-xid-79",
            (
                "  2. reboot",
                "     (stops Docker's own containers too)",
                "     If the GPU is missing again after this, power the node off and on; then ask the node's "
                "vendor",
            ),
        ),
        (
            "allocatable-fewer-suse",
            (
                "  1. nvidia-smi -L; dmesg --time-format iso | grep Xid",
                "     A restart of the plugin marks all GPUs healthy again, whatever their state. Go on only "
                "if this lists every GPU and no XID after 2026-01-03 04:11:09 UTC; otherwise, or if the "
                "kubelet still counts too few GPUs afterwards, drain the node and reboot",
                "  2. kubectl delete pod --namespace kube-system nvidia-device-plugin-daemonset-7x2lq",
                "     (restarts the device plugin: running pods continue)",
                "     The DaemonSet starts a new pod. Run kubectl where it can reach the cluster",
            ),
        ),
        (
            "operator-validations",
            ("  1. gpunode verify --on containerd", "     (disrupts nothing that runs)"),
        ),
        (
            "toolkit-missing",
            (
                "  1. gpunode toolkit install",
                "     (disrupts nothing that runs)",
                "  2. gpunode configure-runtime --runtime containerd",
                "     (restarts containerd: running containers continue)",
                "  3. gpunode doctor",
            ),
        ),
        (
            "jetson-without-toolkit",
            (
                "  1. apt install nvidia-container-toolkit",
                "     (disrupts nothing that runs)",
                "  2. gpunode configure-runtime --runtime docker",
                "     (reloads Docker: running containers continue)",
            ),
        ),
        (
            "page-retirement-pending",  # a node without Kubernetes
            (
                "  First end all work on the GPU: the reset fails while fuser -v /dev/nvidia* lists a "
                "process",
                "  1. nvidia-smi --gpu-reset -i 0000:01:00.0",
                "     (resets only an idle GPU)",
                "     If some of it doesn't end, reboot: that resets the GPU as well",
            ),
        ),
        ("crio-not-running", ("     (starts CRI-O)",)),
        (
            "mig-strategy-single-by-gpunode",
            (
                "  2. systemctl edit --full gpunode-device-plugin && systemctl restart gpunode-device-plugin",
                "     (restarts the device plugin)",
                "     In the editor that opens, change --mig-strategy to mixed. This copies the unit, and "
                "hides updates of the original until systemctl revert gpunode-device-plugin",
            ),
        ),
        (
            "mig-mode-pending",
            (
                "  1. nvidia-smi -i 0000:5d:00.0 -mig 0",
                "     To keep the present MIG mode, run only this, which disrupts nothing. To change it, as "
                "a reset or a reboot would, begin with the next step",
            ),
        ),
        (
            "dkms-next-kernel-rocky9",
            (
                "  Nothing to do now, but don't reboot yet. To make a reboot safe at once, run grubby "
                "--set-default=/boot/vmlinuz-5.14.0-427.13.1.el9_4.x86_64 (the running kernel then boots; "
                "disrupts nothing). In the next maintenance window:",
            ),
        ),
        (
            "containerd-cri-disabled",
            (
                "     (removes the CRI from disabled_plugins, registers the nvidia runtime, and restarts "
                "containerd: running containers continue)",
            ),
        ),
        (
            "containerd-config-not-toml",
            (
                "     ${EDITOR:-vi} +2 /etc/containerd/config.toml && containerd config dump > /dev/null",
                "     Then run gpunode doctor. Only if it finds no other error in this file, restart "
                "containerd; running containers continue:",
                "     systemctl restart containerd",
                "  2. gpunode doctor",
            ),
        ),
        (
            "plugin-strategy-envvar-refused",
            (
                "  This changes the device plugin on every node of the cluster. First run this on each of "
                "its other GPU nodes, where pods otherwise get no GPUs: gpunode toolkit config set "
                "accept-nvidia-visible-devices-as-volume-mounts=true",
            ),
        ),
        (
            "gpu-health-warnings",  # a reset without -i would end the work on all GPUs
            (
                "  End all work on the GPU and reset it; if a link stays down after that, check board and "
                "bridge:",
                "  nvidia-smi --gpu-reset -i 0000:ab:00.0",
            ),
        ),
        ("mig-cdi-stale", ("  /var/run/cdi/nvidia.yaml: and 4 more are missing",)),
        (
            "akmods-failed-fedora",  # podman has no daemon that starts containers again
            (
                "     dnf list --showduplicates kernel-core",
                "  2. reboot",
                "     (containers stop; only those of a systemd unit, such as podman-restart, start again)",
            ),
        ),
        (
            "nouveau-loaded-suse",
            (
                "     (disrupts nothing that runs)",
                "     If this fails, don't reboot",
                "  2. kubectl drain NODE --ignore-daemonsets --delete-emptydir-data",
            ),
        ),
        (
            "no-kernel-image",  # its first step is the doctor
            (
                "  1. gpunode doctor --cuda 12.9",
                "     Nothing is wrong with the node. Build the program with CUDA 12.9 or older, or use an "
                "image of it",
                "More: gpunode explain no-kernel-image",
            ),
        ),
        (
            "dkms-not-built",
            (
                "     If this fails, another kernel has a module. At the next boot, choose kernel "
                "5.15.0-122-generic, which has one, in the boot loader's menu",
            ),
        ),
        (
            "docker-flag-file-conflict",
            ('  /etc/docker/daemon.json:2: "hosts": ["unix:///run/docker.sock"] is also a flag',),
        ),
        (
            "plugin-strategy-mismatch",
            ("     Then delete the pods that started without GPUs: they get none later",),
        ),
        (
            "disk-pressure-rocky9",
            (
                "  1. docker image prune",
                "     (disrupts nothing that runs)",
                "     It asks first, then deletes images that have no tag and no container. docker system df "
                "shows what else takes space. If this isn't enough, delete also tagged images that have no "
                "container, if they can be pulled again:",
                "     docker image prune --all",
            ),
        ),
    ],
)
def test_a_page_names_the_next_step(name, lines, tmp_path):
    whole = page(name, tmp_path)
    at = whole.index(lines[0])
    assert tuple(whole[at : at + len(lines)]) == lines


@pytest.mark.parametrize(
    "name", ["apt-signed-by", "cdi-duplicate", "cdi-perms", "compute-mode-prohibited", "persistenced-broken"]
)
def test_a_harmless_fix_is_marked_as_such(name, tmp_path):
    whole = page(name, tmp_path)
    (first,) = [number for number, line in enumerate(whole) if line.startswith("  1. ")]
    assert whole[first + 1] == "     (disrupts nothing that runs)"


def test_a_line_of_the_plugins_log_has_its_age(tmp_path):
    class At(Host):
        def now(self) -> float:
            return 1767424329.0  # 2026-01-03T07:12:09Z

    root = recorded_host("allocatable-fewer-suse", tmp_path).root
    lines = [
        line
        for block in doctor.run(At(root, environ={}), SilentProgress()).blocks
        for line in plain_lines(block)
    ]
    assert any("marking device as unhealthy. (3 h ago)" in line for line in lines)


@pytest.mark.parametrize(
    ("name", "why", "elsewhere"),
    [
        ("driver-upgrade-pending", "Libraries refuse a module of another version", "Schedule a reboot"),
        ("kmod-flavour-blackwell", "Blackwell and Grace Hopper work only with the open", "before Turing"),
        ("toolkit-too-old", "Device plugins need toolkit 1.7.0 or newer.", "cgroup subsystem"),
        ("compute-mode-prohibited", "In compute mode prohibited a GPU refuses", "exclusive mode"),
        ("docker-unknown-key", "The running dockerd keeps the configuration", "have hyphens"),
        ("cdi-duplicate", "Engines reject a device that two files", "overrides"),
    ],
)
def test_the_reason_fits_the_fault_of_this_node(name, why, elsewhere, tmp_path):
    text = "\n".join(page(name, tmp_path))
    assert why in text and elsewhere not in text


def test_drained_node_gets_other_mig_names(tmp_path):
    lines = page("mig-strategy-single-by-gpunode", tmp_path)
    assert any(line.startswith("  1. kubectl drain ") for line in lines)
    assert any(line.startswith("  4. kubectl uncordon ") for line in lines)


def test_plugin_to_uninstall_is_named_by_its_resource(tmp_path):
    text = "\n".join(page("plugins-of-two-vendors", tmp_path))
    assert "Of the plugins that offer nvidia.com/gpu and volcano.sh/vgpu-number, keep the one that" in text


def test_months_of_old_docker_releases_have_two_digits(tmp_path):
    text = "\n".join(page("docker-version-old", tmp_path))
    assert "docker 18.09.9" in text and "Docker 18.09.9 doesn't support --gpus" in text


def test_each_device_of_an_lxc_container_has_a_number(tmp_path):
    text = "\n".join(page("lxc-without-devices", tmp_path))
    assert "pct set VMID -dev0 /dev/nvidiactl -dev1 /dev/nvidia-uvm -dev2 /dev/nvidia0 " in text


def test_a_failed_build_says_which_kernel_not_to_boot(tmp_path):
    spec = machine("akmods-build-failed")
    older = "6.16.9-200.fc42.x86_64"
    spec["files"][f"/lib/modules/{older}/modules.dep"] = "extra/nvidia/nvidia.ko.xz:\n"
    spec["files"][f"/lib/modules/{older}/vmlinuz"] = ""
    findings = doctor.run(Host(build_machine(spec, tmp_path), environ={}), SilentProgress()).data.findings
    (fix, _) = next(one.fixes for one in findings if one.id == "kernel-unsupported")
    text, command = fix.note.split("\n")
    assert text.startswith(
        "If this fails or prints no version, don't reboot into kernel 6.17.8-300.fc43.x86_64"
    )
    assert command == f"grubby --set-default=/boot/vmlinuz-{older}"


def test_the_gpu_that_has_fallen_off_the_bus_is_in_the_headline(tmp_path):
    first = page("allocatable-zero-after-xid-79", tmp_path)[0]
    assert first.endswith("none of this node's GPUs: GPU 0000:18:00.0 has fallen off the bus")


def test_a_stopped_kubelet_is_named_with_its_command(tmp_path):
    lines = page("containerd-cri-disabled-kubelet-stopped", tmp_path)
    assert "  kubelet.service: stopped" in lines
    at = lines.index(
        "     Then start the kubelet, unless it was stopped on purpose; this ends pods that the cluster has "
        "evicted meanwhile:"
    )
    assert lines[at + 1] == "     systemctl start kubelet"
    assert lines[0].startswith("1 error: the kubelet is stopped, and containerd's CRI plugin is disabled")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "vgpu-license-no-token",
            "  First download the token from NVIDIA's licensing portal into the current directory",
        ),
        (
            "driver-lib-mismatch-kubelet-not-running",
            "  First make sure that the kubelet wasn't stopped on purpose",
        ),
    ],
)
def test_steps_that_precede_a_command_are_printed_before_it(name, line, tmp_path):
    lines = page(name, tmp_path)
    at = lines.index(line)
    assert lines[at + 1].startswith("  1. ")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("bar-too-small", "turn on Above 4G Decoding"),
        ("apparmor-denied", "start the container with --security-opt apparmor=PROFILE"),
        ("esxi-bar-without-room", "fix bar-too-small first, then run this"),
        ("mok-pending", "press a key within ten seconds, choose Enroll MOK and enter it"),
        ("plugin-not-registered", "(configures the kubelet's container engine, and restarts it if needed"),
        ("crio-not-running", "/etc/crio/crio.conf.d/99-nvidia.conf:3: column 16: invalid value"),
        ("bar-too-small-vm", "the firmware assigned no address window to 2 GPUs"),
        (
            "cgroup-device-revoked",
            "The next systemctl daemon-reload, also by a package's installation, revokes",
        ),
        ("gsp-firmware-docker-unknown-key", "GSP firmware for this driver (first fix docker-unknown-key)"),
        ("gsp-firmware-docker-unknown-key", "  If the command succeeds, reboot"),
        ("lxc-library-mismatch", "  1. modinfo -F version nvidia"),
        ("lxc-library-mismatch", "Run this on the host: if it prints 580.173.02, only reboot the host"),
        (
            "plugins-of-two-vendors",
            "First change the request of the workloads that use another one's resource",
        ),
        (
            "dkms-next-kernel-rocky9",
            "-F version nvidia && grubby --set-default=/boot/vmlinuz-5.14.0-503.11.1.el9_5.x86_64",
        ),
        ("toolkit-config-invalid", "/etc/nvidia-container-runtime/config.toml:5: column 14: invalid value"),
        ("containerd-nri-off", 'below line 18, [plugins."io.containerd.nri.v1.nri"], set disable = false'),
    ],
)
def test_finding_says_what_to_do(name, text, tmp_path):
    assert any(text in line for line in page(name, tmp_path))


def test_the_headline_of_a_failing_plugin_is_the_root_cause(tmp_path):
    assert page("thor-plugin-crash-loop", tmp_path)[0] == (
        "1 error: the device plugin fails: error building Device: error getting device memory: Not Supported"
    )
