"""Unusual toolkit setups that work, and severity by the engines that are present."""

import pytest

from fixtures.machines import machine
from gpunode.checks.catalogue import BY_ID
from gpunode.commands import doctor
from gpunode.commands.demo import build_machine
from gpunode.facts.node import Node
from gpunode.host import Host
from tests.silent import SilentProgress

CONFIG = "/etc/nvidia-container-runtime/config.toml"
ROCKY, UBUNTU, SUSE = "healthy-docker-rocky9", "healthy-h100", "healthy-suse-kubelet"
APT = "/etc/apt/sources.list.d"
STANZA = (
    "Types: deb\nURIs: https://nvidia.github.io/libnvidia-container/stable/deb/$(ARCH)\nSuites: /\n"
    "Signed-By:\n /k\n"
)
LATE = "deb https://nvidia.github.io/libnvidia-container/stable/deb/$(ARCH) /\n"
REPOSITORY = "https://nvidia.github.io/libnvidia-container/stable/deb/amd64"


def judged(tmp_path, identifier, name, files=(), change=lambda spec: None):
    spec = machine(name)
    spec["files"] |= dict(files)
    change(spec)
    return BY_ID[identifier].run(Node(Host(build_machine(spec, tmp_path), environ={})))


def status(*arguments, **more):
    verdict = judged(*arguments, **more)
    return "note" if verdict.note else verdict.status.value


def toolkit(version):
    def change(spec):
        output = {"stdout": f"NVIDIA Container Toolkit CLI version {version}\n"}
        spec["recording"]["commands"]["/usr/bin/nvidia-ctk --version"] = output

    return change


NO_CGROUPS = {CONFIG: "[nvidia-container-cli]\nno-cgroups = true\n"}


@pytest.mark.parametrize(
    ("name", "version", "expected"),
    [
        (ROCKY, "1.20.0", "fail"),  # Docker 27 implements --gpus with the hook
        (SUSE, "1.20.0", "pass"),  # containerd's runtime makes a specification for each container
        (SUSE, "1.17.8", "fail"),  # earlier releases called nvidia-container-cli
    ],
)
def test_no_cgroups_matters_only_if_an_engine_runs_the_program(tmp_path, name, version, expected):
    found = status(tmp_path, "no-cgroups-wrong", name, NO_CGROUPS, toolkit(version))
    assert found == expected


def test_no_cgroups_beside_a_rootless_docker_is_a_note(tmp_path):
    def rootless(spec):
        spec["files"] |= {
            "/proc/4100/cmdline": "dockerd\0",
            "/proc/4100/stat": spec["files"]["/proc/1210/stat"].replace("1210", "4100"),
            "/proc/4100/status": "Name:\tdockerd\nUid:\t1000\t1000\t1000\t1000\n",
        }

    assert status(tmp_path, "no-cgroups-wrong", ROCKY, NO_CGROUPS, rootless) == "note"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "pass"),
        ("# nothing\n", "pass"),
        ("unknown-key = 1\n[other]\nx = 1\n", "pass"),
        ('[nvidia-container-runtime]\nruntimes = ["/opt/none"]\n', "fail"),
        ('[nvidia-container-runtime]\nmode = "quick"\n', "fail"),
        ("[nvidia-container-cli\n", "fail"),
    ],
)
def test_settings_that_the_toolkit_accepts_pass(tmp_path, text, expected):
    assert status(tmp_path, "toolkit-config-invalid", ROCKY, {CONFIG: text}) == expected


@pytest.mark.parametrize(
    ("version", "expected"), [("1.17.0", "warn"), ("1.17.1", "pass"), ("1.18.1", "warn"), ("1.18.2", "pass")]
)
def test_release_is_bad_until_the_fixed_one(tmp_path, version, expected):
    assert status(tmp_path, "toolkit-known-bad-version", ROCKY, change=toolkit(version)) == expected


@pytest.mark.parametrize(("version", "expected"), [("1.17.0", True), ("1.17.1", False), ("1.17.2", False)])
def test_cve_is_reported_until_the_fixed_release(tmp_path, version, expected):
    verdict = judged(tmp_path, "toolkit-cve", ROCKY, change=toolkit(version))
    assert any("CVE-2024-0135" in one.value for one in verdict.evidence) is expected


def test_release_fault_of_an_absent_engine_is_ignored(tmp_path):
    """1.18.2 to 1.19.0 put CRI-O's file where CRI-O doesn't look; a configured CRI-O has a right one."""
    assert status(tmp_path / "docker", "toolkit-known-bad-version", ROCKY, change=toolkit("1.19.0")) == "pass"
    found = status(tmp_path / "crio", "toolkit-known-bad-version", "healthy-crio", change=toolkit("1.19.0"))
    assert found == "note"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, "skip"),
        ({"a.list": f"deb [signed-by=/k.gpg] {REPOSITORY} /\n"}, "pass"),
        ({"a.list": f"deb {REPOSITORY} /\n", "b.list": f"# deb [signed-by=/k] {REPOSITORY} /\n"}, "pass"),
        (dict.fromkeys(("a.list", "b.list"), f"deb [signed-by=/k.gpg] {REPOSITORY} /\n"), "pass"),
        ({"a.list": f"deb {REPOSITORY} /\n", "b.list": f"deb [signed-by=/k] {REPOSITORY} /\n"}, "warn"),
        ({"a.list": LATE, "b.list": f"deb [signed-by=/k] {REPOSITORY} /\n"}, "warn"),
        ({"a.sources": STANZA, "b.list": f"deb [signed-by=/k] {REPOSITORY} /\n"}, "pass"),
        ({"a.list": "deb https://nvidia.github.io/nvidia-docker/ubuntu18.04/amd64 /\n"}, "warn"),
    ],
)
def test_sources_of_apt(tmp_path, files, expected):
    found = {f"{APT}/{name}": text for name, text in files.items()}
    assert status(tmp_path, "apt-signed-by", UBUNTU, found) == expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [("", "skip"), ("/usr/bin:/bin", "pass"), ("/opt/docker/bin", "warn"), ("/sbin:/usr/local/bin", "warn")],
)
def test_toolkit_is_searched_in_the_path_of_dockerd(tmp_path, path, expected):
    files = {"/proc/1210/environ": f"PATH={path}\0"} if path else {}
    assert status(tmp_path, "toolkit-not-on-daemon-path", ROCKY, files) == expected


def test_operator_toolkit_outside_the_docker_path_is_skipped(tmp_path):
    def operator(spec):
        spec["executables"] = [
            path.replace("/usr/bin/nvidia", "/usr/local/nvidia/toolkit/nvidia")
            for path in spec["executables"]
        ]

    files = {"/proc/1210/environ": "PATH=/usr/bin\0"}
    assert status(tmp_path, "toolkit-not-on-daemon-path", ROCKY, files, operator) == "skip"


@pytest.mark.parametrize(
    ("stderr", "means"),
    [
        ("initialization error: nvml error: driver not loaded", "kernel module"),
        ("load library failed: libnvidia-ml.so.1: cannot open", "library of the driver"),
        ("something else", "doesn't work with this driver"),
    ],
)
def test_error_of_nvidia_container_cli_is_explained(tmp_path, stderr, means):
    def failing(spec):
        answer = {"code": 1, "stderr": f"nvidia-container-cli: {stderr}\n"}
        spec["recording"]["commands"]["/usr/bin/nvidia-container-cli info"] = answer

    verdict = judged(tmp_path, "toolkit-cli-probe", ROCKY, change=failing)
    assert verdict.status.value == "fail" and means in verdict.summary


BARE_NAMES = {CONFIG: '[nvidia-container-runtime]\nruntimes = ["docker-runc", "runc", "crun"]\n'}


def without_runc(spec):
    spec["executables"] = [path for path in spec["executables"] if not path.endswith(("/runc", "/crun"))]


@pytest.mark.parametrize("name", ["healthy-k3s", "healthy-rke2", "healthy-crio"])
def test_runc_of_a_distribution_outside_the_path_is_accepted(tmp_path, name):
    assert status(tmp_path, "toolkit-config-invalid", name, BARE_NAMES, without_runc) == "pass"


def test_low_level_runtime_is_searched_in_the_path_of_dockerd(tmp_path):
    def elsewhere(spec):
        without_runc(spec)
        spec["executables"].append("/opt/bin/runc")
        spec["files"]["/proc/1210/environ"] = "PATH=/usr/bin:/opt/bin\0"

    assert status(tmp_path, "toolkit-config-invalid", ROCKY, BARE_NAMES, elsewhere) == "pass"


@pytest.mark.parametrize(
    ("there", "command"),
    [
        ("/usr/bin/crun", "gpunode toolkit config unset nvidia-container-runtime.runtimes"),
        (
            "/usr/libexec/crio/crun",
            "gpunode toolkit config set nvidia-container-runtime.runtimes=/usr/libexec/crio/crun",
        ),
        ("", "dnf install runc"),
    ],
)
def test_missing_low_level_runtime_is_replaced_by_an_installed_one(tmp_path, there, command):
    def change(spec):
        without_runc(spec)
        spec["executables"] += [there] if there else []

    named = {CONFIG: '[nvidia-container-runtime]\nruntimes = ["runc-1"]\n'}
    verdict = judged(tmp_path, "toolkit-config-invalid", ROCKY, named, change)
    assert (verdict.status.value, verdict.fix.command) == ("fail", command)


@pytest.mark.parametrize(("version", "expected"), [("1.16.2", "pass"), ("1.17.3", "fail")])
def test_older_releases_accept_the_containers_ldconfig(tmp_path, version, expected):
    own = {CONFIG: '[nvidia-container-cli]\nldconfig = "/sbin/ldconfig"\n'}
    assert status(tmp_path, "toolkit-config-invalid", ROCKY, own, toolkit(version)) == expected


@pytest.mark.parametrize("value", ["all", ""])
def test_all_capabilities_can_be_written_as_one_word(tmp_path, value):
    text = {CONFIG: f'supported-driver-capabilities = "{value}"\n'}
    assert status(tmp_path, "toolkit-config-invalid", ROCKY, text) == "pass"


@pytest.mark.parametrize(("version", "expected"), [("1.17.8", "pass"), ("1.18.1", "note")])
def test_legacy_mode_is_noted_if_another_mode_is_supported(tmp_path, version, expected):
    legacy = {CONFIG: '[nvidia-container-runtime]\nmode = "legacy"\n'}
    assert status(tmp_path, "runtime-mode", ROCKY, legacy, toolkit(version)) == expected


def test_only_a_device_plugin_needs_a_toolkit_that_supports_it(tmp_path):
    def old(spec):
        toolkit("1.5.1")(spec)
        spec["files"].pop("/sys/fs/cgroup/cgroup.controllers", None)

    assert status(tmp_path / "docker", "toolkit-too-old", ROCKY, change=old) == "pass"
    assert status(tmp_path / "kubelet", "toolkit-too-old", SUSE, change=old) == "fail"


OPERATORS = "/usr/local/nvidia/toolkit"


def by_the_operator(spec):
    spec["executables"] = [
        path.replace("/usr/bin/nvidia-c", f"{OPERATORS}/nvidia-c") for path in spec["executables"]
    ]
    output = {"stdout": "NVIDIA Container Toolkit CLI version 1.18.0\n"}
    spec["recording"]["commands"][f"{OPERATORS}/nvidia-ctk --version"] = output


def test_operator_toolkit_is_fixed_through_the_operator(tmp_path):
    files = {
        f"{OPERATORS}/.config/nvidia-container-runtime/config.toml": NO_CGROUPS[CONFIG]
        + '[nvidia-container-runtime]\nmode = "legacy"\n'
    }
    bad = judged(tmp_path / "bad", "toolkit-known-bad-version", SUSE, files, by_the_operator)
    assert "gpu-operator" in bad.fix.command
    wrong = judged(tmp_path / "wrong", "no-cgroups-wrong", SUSE, files, by_the_operator)
    assert f"--config {OPERATORS}/.config" in wrong.fix.command


def alone(spec):
    """Podman, and no other engine."""
    gone = ("/usr/bin/dockerd", "/usr/bin/containerd")
    spec["executables"] = [path for path in spec["executables"] if path not in gone] + ["/usr/bin/podman"]
    for path in [*spec["files"]]:
        if path.startswith(("/proc/1100/", "/proc/1210/", "/usr/lib/systemd/system/")):
            del spec["files"][path]


HOOK = {
    "/usr/share/containers/oci/hooks.d/oci-nvidia-hook.json": '{"version": "1.0.0", "hook": {"path": '
    '"/usr/bin/nvidia-container-runtime-hook"}, "when": {"always": true}}'
}
BY_CDI = "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices:\n- name: all\n  containerEdits: {}\n"
STILL = "containerEdits:\n  env: [NVIDIA_VISIBLE_DEVICES=void]\n"


def test_specification_that_disables_the_hook_does_not_conflict_with_it(tmp_path):
    for name, text, change, expected in (
        ("both", BY_CDI, alone, "warn"),
        ("still", BY_CDI + STILL, alone, "pass"),
        ("docker", BY_CDI, lambda spec: spec["executables"].append("/usr/bin/podman"), "skip"),
    ):
        files = HOOK | {"/etc/cdi/nvidia.yaml": text}
        assert status(tmp_path / name, "hook-conflict", ROCKY, files, change) == expected, name


def test_finding_names_the_line_after_values_of_several_lines(tmp_path):
    text = """supported-driver-capabilities = '''
[nvidia-container-cli]
no-cgroups = false
'''

[nvidia-container-cli]
environment = [
  "A=[",
]
no-cgroups = "no"
"""
    spec = machine("toolkit-config-invalid")
    spec["files"][CONFIG] = text
    result = doctor.run(Host(build_machine(spec, tmp_path), environ={}), SilentProgress())
    (finding,) = [finding for finding in result.data.findings if finding.id == "toolkit-config-invalid"]
    lines = text.splitlines()
    assert {lines[evidence.line - 1] for evidence in finding.evidence if evidence.line} == {
        "supported-driver-capabilities = '''",
        'no-cgroups = "no"',
    }
