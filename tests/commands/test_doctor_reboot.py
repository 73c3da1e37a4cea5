"""The section "Safe to reboot?", through the command line: its contents and its omissions."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fixtures.machines import HEALTHY, machine, recorded_host
from gpunode.checks.finding import FindingStatus
from gpunode.checks.report import RebootVerdict, blocks, reboot
from gpunode.commands import doctor
from gpunode.commands.demo import build_machine
from gpunode.facts.containerd import CRI_PLUGINS
from gpunode.host import Host
from gpunode.output.render import plain_lines
from tests.cli import gpunode
from tests.silent import SilentProgress

YES = "Safe to reboot? Yes: no check found a problem that a reboot would cause"
NO = "Safe to reboot? No, fix this before a reboot:"
PODS = "  A reboot ends this node's pods"
CONTAINERS = "  A reboot ends 2 containers of Docker"


@pytest.fixture
def ask(tmp_path) -> Callable[..., str]:
    """Through the command line, as a user does."""

    def asked(machine: str, *arguments: str) -> str:
        root = recorded_host(machine, tmp_path / machine).root
        return gpunode("--root", str(root), "doctor", *arguments).out

    return asked


@pytest.fixture
def text(tmp_path) -> Callable[[str], str]:
    """The same report, without starting a program for it."""

    def shown(machine: str) -> str:
        return drawn(recorded_host(machine, tmp_path / machine))

    return shown


def drawn(host: Host) -> str:
    result = doctor.run(host, SilentProgress())
    return "\n".join(line for block in result.blocks for line in plain_lines(block))


def section(text: str) -> list[str]:
    """Its lines, without the surrounding output."""
    lines = text.splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("Safe to reboot?")]
    if not starts:
        return []
    (start,) = starts
    rest = lines[start + 1 :]
    end = next((number for number, line in enumerate(rest) if not line.startswith("  ")), len(rest))
    return lines[start : start + 1 + end]


BREAKS = {
    "dkms-next-kernel": ("dkms-not-built", "apt install linux-headers-5.15.0-124-generic"),
    "dkms-next-kernel-rocky9": (
        "dkms-not-built",
        "modinfo -k 5.14.0-503.11.1.el9_5.x86_64 -F version nvidia",
    ),
    "mok-pending": ("mok-pending", "mokutil --list-new"),
    "secureboot-key-waits": ("secureboot-unsigned", "mokutil --list-new"),
    "driver-upgrade-pending": ("driver-upgrade-pending", "apt install libnvidia-compute-580"),
    "driver-lib-mismatch-stays": ("driver-lib-mismatch", "gpunode driver install --yes"),
    "module-disabled-next-boot": ("module-disabled-next-boot", "sed -i '3s/^/# /'"),
    "nouveau-not-blacklisted": ("nouveau-not-blacklisted", "blacklist nouveau"),
    "cdi-lost-at-reboot": ("cdi-lost-at-reboot", "gpunode cdi refresh --install"),
    "cdi-lost-at-reboot-rocky9": ("cdi-lost-at-reboot", "systemctl enable --now nvidia-cdi-refresh.service"),
    "dev-char-lost-at-reboot": ("dev-char-lost-at-reboot", "/etc/udev/rules.d/71-nvidia-dev-char.rules"),
    "uvm-lost-at-reboot": ("uvm-lost-at-reboot", "/etc/modules-load.d/nvidia-uvm.conf"),
    "mig-config-lost": ("mig-config-lost", "gpunode mig export > /etc/gpunode-mig.yaml"),
    "docker-config-invalid-json": ("docker-config-invalid-json", "+4 /etc/docker/daemon.json"),
    "docker-flag-file-conflict": ("docker-flag-file-conflict", "/etc/docker/daemon.json"),
    "docker-unknown-key": ("docker-unknown-key", "/etc/docker/daemon.json"),
    "docker-names-removed-operator-toolkit": ("docker-default-runtime", "gpunode configure-runtime"),
    "containerd-import-missing": ("containerd-config-version", "/etc/containerd/config.toml"),
    "containerd-config-not-toml": ("containerd-config-version", "/etc/containerd/config.toml"),
    "containerd-config-version": ("containerd-config-version", "/etc/containerd/config.toml"),
}


@pytest.mark.parametrize("machine", BREAKS)
def test_problem_after_a_reboot_is_printed_with_its_command(text, machine):
    identifier, command = BREAKS[machine]
    page = text(machine)
    shown = section(page)
    assert shown[0] == NO
    assert f"  {identifier}" in shown
    (problem,) = [part for part in page.split("\n\n") if re.match(rf"[A-Z]+ {identifier}: ", part)]
    fixes = [line for line in problem.splitlines() if line.startswith(("  Fix: ", "  Look: "))]
    if fixes and fixes[0].endswith(": see the steps at the end"):
        heading, *fixes = page.split("\n\n")[-1].splitlines()
        assert heading.endswith(f" first, as root: {identifier}")
        fixes = [line for line in fixes if not re.match(r"  \d\. In /", line)]
    assert sum(command in line for line in fixes) == 1
    assert not any(line.lstrip() == "reboot" for line in shown), "a reboot is no remedy before a reboot"


# their drivers are not installed by packages: with Windows, and with the board's image
WITHOUT_SECTION = ("pci-no-gpu", "healthy-wsl2", "healthy-jetson-orin")
FIXED_BY_REBOOT = ("driver-lib-mismatch", "driver-lib-mismatch-unattended", "driver-lib-mismatch-rocky9")


@pytest.mark.parametrize("machine", FIXED_BY_REBOOT)
def test_fault_that_a_reboot_fixes_is_no_reason_against_it(text, machine):
    assert section(text(machine)) == [
        "Safe to reboot? No problem found, but 4 checks wait for the fix of driver-lib-mismatch",
        "  A reboot is the fix for driver-lib-mismatch",
        CONTAINERS if machine == "driver-lib-mismatch-unattended" else PODS,
    ]


# no kubelet, and no running container; or no kubelet, and containers of Docker; the others have a kubelet
IDLE = ("healthy-docker-rocky9", "healthy-podman-fedora", "healthy-nixos-podman", "healthy-silverblue-podman")
WITH_DOCKER = (
    *("healthy-workstation", "healthy-vm-passthrough", "healthy-vgpu-guest", "healthy-arch-docker"),
    *("healthy-gentoo-openrc", "healthy-unraid", "healthy-proxmox-lxc-docker"),
)


@pytest.mark.parametrize("machine", [one for one in HEALTHY if one not in WITHOUT_SECTION])
def test_healthy_node_is_safe_to_reboot(text, machine):
    ends = [] if machine in IDLE else [CONTAINERS] if machine in WITH_DOCKER else [PODS]
    assert section(text(machine)) == [YES, *ends]


def test_programs_that_a_reboot_ends_are_counted(ask, tmp_path):
    assert section(ask("gpu-used-by-desktop")) == [YES, f"{PODS}, 1 GPU program"]
    spec = machine("gpu-used-by-desktop")
    conditions = spec["recording"]["nvml"]["conditions"]
    conditions["1"]["processes"] = [{"pid": 2100}, {"pid": 0}, {"pid": 0}]  # the first on two GPUs
    page = gpunode("--root", str(build_machine(spec, tmp_path / "m")), "doctor", "-o", "html").out
    assert '<p class="quiet">A reboot ends this node&#x27;s pods, 3 GPU programs.</p>' in page


@pytest.mark.parametrize("machine", WITHOUT_SECTION)
def test_reboot_section_is_omitted_if_no_check_applies(text, machine):
    assert section(text(machine)) == []


def test_report_on_the_command_line_ends_with_the_section(ask):
    shown = section(ask("dkms-next-kernel"))
    assert shown[:2] == [NO, "  dkms-not-built"]


def test_command_that_restores_several_items_is_printed_once(text):
    # the unit that writes the specification loads it
    assert section(text("cdi-lost-at-reboot")) == [NO, "  cdi-lost-at-reboot", PODS]


def test_script_started_by_a_unit_is_recognized_as_restoring_files(text):
    assert section(text("cdi-written-by-own-unit")) == [YES, PODS]
    assert section(text("dev-char-made-at-boot")) == [YES]


def test_json_has_the_same_reboot_verdict(ask):
    def verdict(machine, *arguments):
        return json.loads(ask(machine, "-o", "json", *arguments))["data"]["reboot"]

    assert verdict("mok-pending") == {
        "safe": False,
        "findings": ["mok-pending"],
        "mends": [],
        "unjudged": [],
        "waiting": [],
        "before": {},
    }
    mends = verdict("driver-lib-mismatch")
    assert mends == {
        "safe": True,
        "findings": [],
        "mends": ["driver-lib-mismatch"],
        "unjudged": [],
        "waiting": ["driver-upgrade-pending", "ecc-mode-pending", "mig-mode-pending", "cdi-lost-at-reboot"],
        "before": {},
    }


def test_table_that_containerd_ignores_does_not_stop_it_at_a_reboot(text):
    page = text("containerd-config-v1-table")
    assert "containerd-config-version: " in page
    assert section(page) == [
        "Safe to reboot? Unknown: 1 check waits for the fix of containerd-config-version",
        PODS,
    ]


@pytest.mark.parametrize(
    ("machine", "identifier"),
    [
        ("crio-conmon-missing", "crio-not-running"),
        ("crio-not-running", "crio-not-running"),
        ("kubelet-stopped-by-swap", "kubelet-swap-memlock-hugepages"),
        ("kubelet-refuses-cgroups-v1", "memory-cgroup-v1"),
    ],
)
def test_pods_of_an_engine_that_does_not_start_would_not_come_back(text, machine, identifier):
    assert section(text(machine)) == [NO, f"  {identifier}", PODS]


@pytest.mark.parametrize(
    ("machine", "identifier", "unit"),
    [
        ("kubelet-not-running", "kubelet-not-running", "kubelet.service"),
        ("containerd-not-running", "containerd-not-restarted", "containerd.service"),
    ],
)
@pytest.mark.parametrize(
    ("result", "enabled", "starts"),
    [("success", "enabled", True), ("success", "disabled", False), ("exit-code", "enabled", False)],
)
def test_stopped_daemon_that_the_next_boot_does_not_start_is_fixed_first(
    tmp_path, machine, identifier, unit, result, enabled, starts
):
    host = stopped(tmp_path / "node", machine, unit, result, enabled)
    assert section(drawn(host)) == [*([YES] if starts else [NO, f"  {identifier}"]), PODS]


def stopped(root: Path, name: str, unit: str, result: str, enabled: str) -> Host:
    """A recorded machine with this state of a stopped unit."""
    spec = machine(name)
    state = (
        f"Result={result}\nId={unit}\nNames={unit}\nLoadState=loaded\nActiveState=inactive\n"
        f"SubState=dead\nUnitFileState={enabled}\n"
    )
    spec["recording"].setdefault("commands", {})[f"systemctl show {unit}"] = {"stdout": state}
    return Host(build_machine(spec, root), environ={})


@pytest.mark.parametrize("machine", ["secureboot-unsigned", "secureboot-key-not-enrolled"])
def test_a_reboot_makes_a_rejected_module_no_worse(text, machine):
    line, work = section(text(machine))
    assert line.startswith("Safe to reboot? Unknown: ") and work == PODS


def test_a_missing_driver_leaves_nothing_that_a_reboot_could_break(text):
    assert section(text("driver-not-installed")) == []


def test_fault_that_breaks_a_reboot_is_fixed_before_the_reboot_that_ends_another_fix(tmp_path):
    host = recorded_host("nouveau-loaded-docker-invalid-cdi-stale", tmp_path)
    result = doctor.run(host, SilentProgress())
    lines = [line for block in result.blocks for line in plain_lines(block)]
    assert result.data.first == "docker-config-invalid-json"
    assert "  Before the reboot that nouveau-loaded needs" in lines
    nouveau = next(number for number, line in enumerate(lines) if line.startswith("FAIL nouveau-loaded: "))
    docker = next(number for number, line in enumerate(lines) if line.startswith("WARN docker-config"))
    assert (
        docker < nouveau < lines.index("  If the command succeeds, drain this Kubernetes node and reboot it")
    )


def test_every_page_has_the_section(ask):
    page = ask("driver-lib-mismatch", "-o", "html")
    assert "Safe to reboot?" in page and "A reboot is the fix for driver-lib-mismatch." in page


def test_html_page_says_for_which_reboot_the_first_fix_is(ask):
    machine = "nouveau-loaded-docker-invalid-cdi-stale"
    page = ask(machine, "-o", "html")
    assert '<p>Before the reboot that <a href="#nouveau-loaded">nouveau-loaded</a> needs:</p>' in page
    assert "Before the reboot" not in ask("docker-unknown-key", "-o", "html")


def test_html_page_names_what_to_fix_before_the_reboot(ask):
    page = ask("nouveau-loaded-docker-invalid-cdi-stale", "-o", "html")
    assert page.index('id="docker-config-invalid-json"') < page.index(
        "<p>If the command succeeds, drain this Kubernetes node and reboot it.</p>"
    )
    page = ask("driver-lib-mismatch-kubelet-not-running", "-o", "html")
    assert page.index('id="kubelet-not-running"') < page.index(
        "reboots this machine, drain this Kubernetes node first</p>"
    )
    steps = page.partition('<ol class="steps">')[2].partition("</ol>")[0]
    commands = re.findall(r"<code>(.*?)</code>", steps)
    assert [command.split()[0] for command in commands] == ["systemctl", "journalctl", "gpunode"]


def test_check_without_access_does_not_count_as_safe(tmp_path):
    class Closed(Host):
        def path(self, path: str | Path, *, follow: bool = True) -> Path:
            if str(path).startswith("/var/lib/dkms") or str(path).startswith("/lib/modules"):
                raise PermissionError(13, "Permission denied", str(path))
            return super().path(path, follow=follow)

    root = recorded_host("healthy-h100", tmp_path).root
    line, work = section(drawn(Closed(root, environ={})))
    assert line.startswith("Safe to reboot? Unknown: ") and work == PODS


def test_fault_unrelated_to_the_next_boot_is_not_listed(text):
    assert section(text("nvidia-smi-missing")) == [YES, PODS]


@pytest.mark.parametrize(
    ("status", "skipped", "reason"),
    [
        (FindingStatus.ERROR, "", "1 check could not run"),
        (FindingStatus.SKIP, "unreadable", "1 check could not run without root"),
    ],
)
def test_undecided_check_is_no_reason_against_a_reboot(status, skipped, reason, tmp_path):
    host = recorded_host("healthy-h100", tmp_path)
    data = doctor.run(host, SilentProgress()).data
    findings = tuple(
        replace(finding, status=status, skipped=skipped) if finding.id == "dkms-not-built" else finding
        for finding in data.findings
    )
    assert reboot(findings) == RebootVerdict(None, findings=(), mends=(), unjudged=("dkms-not-built",))
    drawn = [line for block in blocks(data.node, findings) for line in plain_lines(block)]
    assert section("\n".join(drawn)) == [f"Safe to reboot? Unknown: {reason}", PODS]


ENGINES = {  # machine, finding, and the default in the daemon's answer
    "containerd": ("healthy-h100", "containerd-not-restarted", '"defaultHandler": "runc"'),
    "docker": ("healthy-docker-rocky9", "docker-not-restarted", '"DefaultRuntime": "runc"'),
    "crio": ("healthy-crio", "crio-runtime-missing", 'default_runtime = \\"crun\\"'),
}


@pytest.fixture
def report(tmp_path) -> Callable[..., tuple[list[str], str]]:
    """The section and the whole report: nvidia is `removed` from the files, the running daemon's default, or
    in its command line."""

    def reported(engine: str, *, removed: bool = False, default: bool = False, argv: str = ""):
        name, _, answer = ENGINES[engine]
        spec = machine(name)
        if default:
            text = json.dumps(spec["recording"])
            changed = text.replace(answer, re.sub("runc|crun", "nvidia", answer))
            assert changed != text
            spec["recording"] = json.loads(changed)
        if argv:
            spec["files"]["/proc/1222/cmdline" if engine == "crio" else "/proc/1210/cmdline"] += argv
        if argv and engine == "docker":  # unconfigure-runtime refuses: it can't remove a flag
            spec["files"]["/etc/docker/daemon.json"] = "{}"
        root = str(build_machine(spec, tmp_path))
        if removed:
            assert gpunode("--root", root, "unconfigure-runtime", "--runtime", engine).code == 0
        ran = gpunode("--root", root, "doctor")
        assert ran.code == 0
        return section(ran.out), ran.out

    return reported


@pytest.mark.parametrize("engine", ENGINES)
def test_handler_that_only_the_running_daemon_has_is_lost_at_a_reboot(report, engine):
    shown, page = report(engine, removed=True)
    assert shown[:2] == [NO, f"  {ENGINES[engine][1]}"]
    assert " nvidia only until its next start: no file names it" in page.splitlines()[0]
    assert f"  1. gpunode configure-runtime --runtime {engine}\n" in page
    if engine == "docker":
        assert "removal instead; it restarts Docker, which stops no container" in " ".join(page.split())


@pytest.mark.parametrize("engine", ENGINES)
def test_default_that_only_the_running_daemon_has_is_lost_at_a_reboot(report, engine):
    shown, page = report(engine, default=True)
    assert shown[:2] == [NO, f"  {ENGINES[engine][1]}"]
    assert re.search(r"has the default (handler|runtime) nvidia only until its next start", page)
    assert f"  1. gpunode configure-runtime --runtime {engine} --set-as-default\n" in page


def test_lost_variant_and_other_name_are_options_of_the_fix(tmp_path):
    spec = machine("healthy-docker-rocky9")
    text = json.dumps(spec["recording"])
    for name in ("nvidia-cdi", "gpu"):
        path = "/usr/bin/nvidia-container-runtime"
        text = text.replace('"Runtimes": {', f'"Runtimes": {{"{name}": {{"path": "{path}"}}, ')
    spec["recording"] = json.loads(text)
    page = drawn(Host(build_machine(spec, tmp_path), environ={}))
    assert "gpunode configure-runtime --runtime docker --nvidia-runtime-name gpu --also cdi\n" in page


@pytest.mark.parametrize(
    ("engine", "argv"),
    [
        ("docker", "--add-runtime=nvidia=/usr/bin/nvidia-container-runtime\0--default-runtime=nvidia\0"),
        ("crio", "--runtimes\0nvidia:/usr/bin/nvidia-container-runtime\0--default-runtime=nvidia\0"),
    ],
)
def test_handler_and_default_from_the_command_line_survive_a_reboot(report, engine, argv):
    shown, _ = report(engine, removed=engine == "crio", default=True, argv=argv)
    assert shown[0] == YES


@pytest.mark.parametrize(
    ("release", "main", "dropped"), [("1.7.2", "", 2), ("2.1.5", "version = 3\n", 2), ("2.1.5", "", 3)]
)
def test_handler_in_a_drop_in_of_another_version_than_the_main_file_survives_a_reboot(
    release, main, dropped, tmp_path
):
    """Docker's containerd.io has a main file without a version, and nvidia-ctk adds a drop-in with one."""
    spec = json.loads(json.dumps(machine("healthy-h100")).replace("1.7.2", release))
    spec["files"]["/etc/containerd/config.toml"] = f'{main}imports = ["/etc/containerd/conf.d/*.toml"]\n'
    handler = f'plugins."{CRI_PLUGINS[dropped]}".containerd.runtimes.nvidia'
    options = 'options.BinaryName = "/usr/bin/nvidia-container-runtime"'
    text = f'version = {dropped}\n[{handler}]\nruntime_type = "io.containerd.runc.v2"\n{options}\n'
    spec["files"]["/etc/containerd/conf.d/99-nvidia.toml"] = text
    assert "until its next start" not in drawn(Host(build_machine(spec, tmp_path), environ={}))


def test_missing_file_in_a_container_is_that_of_another_root(tmp_path):
    spec = machine("healthy-docker-rocky9")
    spec["files"]["/.dockerenv"] = ""
    del spec["files"]["/etc/docker/daemon.json"]
    assert "until its next start" not in drawn(Host(build_machine(spec, tmp_path), environ={}))


def test_lost_default_that_configure_runtime_does_not_set_is_not_replaced(tmp_path):
    spec = machine("healthy-docker-rocky9")
    text = json.dumps(spec["recording"]).replace('"DefaultRuntime": "runc"', '"DefaultRuntime": "nvidia-cdi"')
    spec["recording"] = json.loads(
        text.replace('"Runtimes": {', '"Runtimes": {"nvidia-cdi": {"path": "nvidia-container-runtime.cdi"}, ')
    )
    page = drawn(Host(build_machine(spec, tmp_path), environ={}))
    assert "gpunode configure-runtime --runtime docker --also cdi\n" in page


WRONG_TYPES = {
    '{"runtimes": []}': "runtimes is not an object",
    '{"debug": "yes"}': "debug is not true or false",
    '{"exec-opts": "x"}': "exec-opts is not a list",
    '{"live-restore": "true"}': "live-restore is not true or false",
    '{"default-runtime": 5}': "default-runtime is not a string",
    '{"features": []}': "features is not an object",
    '{"data-root": 5}': "data-root is not a string",
    '{"insecure-registries": "x"}': "insecure-registries is not a list",
    '{"runtimes": {"nvidia": "x"}}': 'the runtime "nvidia" is not an object',
}


@pytest.mark.parametrize("content", WRONG_TYPES)
def test_value_of_a_type_that_dockerd_refuses_is_fixed_before_a_reboot(tmp_path, content):
    host = recorded_host("healthy-docker-rocky9", tmp_path)
    (tmp_path / "etc/docker/daemon.json").write_text(content)
    ran = gpunode("--root", str(host.root), "doctor")
    assert ran.code == 1 and section(ran.out) == [NO, "  docker-unknown-key"]
    what = f"Docker can't start with /etc/docker/daemon.json: {WRONG_TYPES[content]}"
    assert ran.out.startswith(f"1 error: {what}\n")
    assert "  1. In /etc/docker/daemon.json, line 1: correct the value: " in ran.out


def test_wrong_type_is_one_warning_if_the_kubelet_uses_another_engine(tmp_path):
    host = recorded_host("healthy-h100", tmp_path)
    (tmp_path / "etc/docker/daemon.json").write_text('{"runtimes": []}')
    ran = gpunode("--root", str(host.root), "doctor")
    assert ran.code == 0 and ran.out.startswith("1 warning: Docker can't start with ")
