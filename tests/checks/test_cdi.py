"""Unusual specifications without an effect are no finding, and severity follows the impact of a fault."""

import pytest

from fixtures.machines import machine
from gpunode.checks.catalogue import BY_ID
from gpunode.commands.demo import build_machine
from gpunode.facts.node import Node
from gpunode.host import Host
from tests.required import required

ROCKY, STATION = "healthy-docker-rocky9", "healthy-workstation"
SPEC = """cdiVersion: 0.5.0
kind: {kind}
devices:
- name: "0"
  containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
containerEdits:
  deviceNodes:
  - path: /dev/nvidiactl
  - path: /dev/nvidia-uvm
"""
GPU = SPEC.format(kind="nvidia.com/gpu")


def judged(tmp_path, identifier, name, files=(), change=lambda spec: None):
    spec = machine(name)
    spec["files"] |= dict(files)
    change(spec)
    return BY_ID[identifier].run(Node(Host(build_machine(spec, tmp_path), environ={})))


def status(*arguments, **more):
    verdict = judged(*arguments, **more)
    return "note" if verdict.note else verdict.status.value


def test_conflicting_specifications_fail_only_if_an_engine_reads_them(tmp_path):
    twice = {"/etc/cdi/a.yaml": GPU, "/etc/cdi/b.yaml": GPU}
    assert status(tmp_path / "unread", "cdi-duplicate", ROCKY, twice) == "warn"
    assert status(tmp_path / "read", "cdi-duplicate", STATION, twice) == "fail"


@pytest.mark.parametrize(
    "files",
    [
        {"/etc/cdi/a.yaml": GPU, "/etc/cdi/b.yaml": SPEC.format(kind="management.nvidia.com/gpu")},
        {"/etc/cdi/a.yaml": GPU, "/var/run/cdi/b.yaml": GPU},
        {"/etc/cdi/a.yaml": GPU, "/etc/cdi/b.yaml": GPU.replace('"0"', '"1"')},
        {"/etc/cdi/a.yaml": GPU, "/etc/cdi/b.yml": GPU},
        {"/etc/cdi/a.yaml": GPU, "/etc/cdi/b.yaml": SPEC.format(kind="amd.com/gpu")},
    ],
)
def test_specifications_without_conflict_pass(tmp_path, files):
    assert status(tmp_path, "cdi-duplicate", ROCKY, files) == "pass"


OLD = "mv /etc/cdi/nvidia.yaml /etc/cdi/nvidia.yaml.disabled"


@pytest.mark.parametrize(
    ("written_at_boot", "command"),
    [(True, OLD), (False, f"gpunode cdi refresh --install && {OLD}")],
)
def test_old_file_is_disabled_only_if_a_reboot_leaves_another(tmp_path, written_at_boot, command):
    script = {"/etc/cron.d/cdi": "@reboot root gpunode cdi refresh\n"} if written_at_boot else {}
    verdict = judged(tmp_path, "cdi-duplicate", "cdi-duplicate-shadowed", script)
    assert verdict.fix is not None and verdict.fix.command == command


def test_without_unified_memory_its_device_is_not_required(tmp_path):
    def without_fields(spec):
        del spec["recording"]["devices"]["/dev/nvidia-uvm"]

    lacks = {"/etc/cdi/a.yaml": GPU.replace("  - path: /dev/nvidia-uvm\n", "")}
    assert status(tmp_path, "cdi-uvm-absent-in-spec", ROCKY, lacks, without_fields) == "skip"


def test_hidden_specification_is_not_checked_for_stale_entries(tmp_path):
    old = GPU.replace("/dev/nvidiactl", "/dev/nvidia-gone")
    files = {"/etc/cdi/nvidia.yaml": old, "/var/run/cdi/nvidia.yaml": GPU}
    assert status(tmp_path, "cdi-spec-stale", ROCKY, files) == "pass"


def test_replaced_gpu_makes_a_specification_stale(tmp_path):
    named = GPU.replace('"0"', "GPU-00000000-0000-0000-0000-000000000000")
    verdict = judged(tmp_path, "cdi-spec-stale", STATION, {"/etc/cdi/nvidia.yaml": named})
    assert verdict.status.value == "fail"
    assert "no such GPU" in verdict.evidence[0].value


def test_gpu_without_uuid_in_nvml_does_not_make_a_specification_stale(tmp_path):
    def sick(spec):
        spec["recording"]["nvml"]["inventory"]["gpus"][0]["error"] = "GPU is lost"

    named = GPU.replace('"0"', "GPU-00000000-0000-0000-0000-000000000000")
    files = {"/etc/cdi/nvidia.yaml": named}
    assert status(tmp_path, "cdi-spec-stale", ROCKY, files, sick) == "pass"


def test_docker_without_cdi_and_toolkit_needs_the_toolkit(tmp_path):
    def old(spec):
        spec["executables"] = [path for path in spec["executables"] if "nvidia" not in path]
        spec["recording"]["commands"]["/usr/bin/dockerd --version"] = {"stdout": "Docker version 24.0.7\n"}

    verdict = judged(tmp_path, "cdi-disabled", ROCKY, {"/etc/cdi/a.yaml": GPU}, old)
    assert verdict.status.value == "fail"
    assert required(verdict.fix).command == "gpunode toolkit install"


def test_disabled_cdi_in_docker_passes_if_the_hook_works(tmp_path):
    assert status(tmp_path, "cdi-disabled", ROCKY, {"/etc/cdi/a.yaml": GPU}) == "pass"


@pytest.mark.parametrize(
    ("modes", "expected"),
    [
        ({}, "pass"),
        ({"/etc/cdi": "0755", "/etc/cdi/a.yaml": "0644"}, "pass"),
        ({"/etc/cdi": "0700", "/etc/cdi/a.yaml": "0644"}, "warn"),
        ({"/etc/cdi": "0755", "/etc/cdi/a.yaml": "0640"}, "warn"),
    ],
)
def test_rootless_engines_need_a_readable_file_and_directory(tmp_path, modes, expected):
    def podman(spec):
        spec["executables"].append("/usr/bin/podman")
        spec["recording"]["modes"] = modes

    assert status(tmp_path, "cdi-perms", ROCKY, {"/etc/cdi/a.yaml": GPU}, podman) == expected


PODMAN = "healthy-podman-fedora"
HOOK = '{"version": "1.0.0", "hook": {"path": "/usr/bin/nvidia-container-runtime-hook"}}'
RUNTIME = '[engine.runtimes]\nnvidia = ["/usr/bin/nvidia-container-runtime"]\n'


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, "fail"),
        ({"/usr/share/containers/oci/hooks.d/oci-nvidia-hook.json": HOOK}, "skip"),
        ({"/etc/containers/containers.conf": RUNTIME}, "skip"),
        ({"/etc/containers/containers.conf": RUNTIME.replace("nvidia-container-runtime", "crun")}, "fail"),
        ({"/etc/cdi/nvidia.yaml": GPU}, "pass"),
    ],
)
def test_podman_needs_a_specification_unless_it_has_the_hook(tmp_path, files, expected):
    def without(spec):
        for path in [path for path in spec["files"] if "/cdi/" in path]:
            del spec["files"][path]
        spec["files"] |= files

    assert status(tmp_path, "cdi-spec-missing", PODMAN, change=without) == expected


UNIT = "Id={}\nLoadState={}\nActiveState={}\nSubState=x\nUnitFileState={}\nResult=success\n"


@pytest.mark.parametrize(
    ("units", "expected"),
    [
        ([], "skip"),
        ([("nvidia-cdi-refresh.service", "not-found", "inactive", "")], "skip"),
        ([("nvidia-cdi-refresh.service", "loaded", "inactive", "disabled")], "pass"),
        (
            [
                ("nvidia-cdi-refresh.service", "loaded", "inactive", "enabled"),
                ("nvidia-cdi-refresh.path", "loaded", "inactive", "disabled"),
            ],
            "warn",
        ),
        (
            [
                ("nvidia-cdi-refresh.service", "loaded", "failed", "enabled"),
                ("gpunode-cdi-refresh.path", "loaded", "active", "enabled"),
            ],
            "pass",
        ),
    ],
)
def test_refresh_check_knows_each_unit_that_updates_the_specification(tmp_path, units, expected):
    def systemd(spec):
        output = "\n".join(UNIT.format(*unit) for unit in units)
        spec["recording"]["commands"]["systemctl show cdi"] = {"stdout": output}

    assert status(tmp_path, "cdi-refresh-inactive", ROCKY, change=systemd) == expected


UNTRUE = {"/etc/cdi/nvidia.yaml": GPU.replace("/dev/nvidiactl", "/dev/nvidia-gone")}
WITHOUT_UVM = {"/etc/cdi/nvidia.yaml": GPU.replace("  - path: /dev/nvidia-uvm\n", "")}


@pytest.mark.parametrize(
    ("identifier", "files"), [("cdi-spec-stale", UNTRUE), ("cdi-uvm-absent-in-spec", WITHOUT_UVM)]
)
def test_stale_specification_is_an_error_only_if_an_engine_uses_it(tmp_path, identifier, files):
    def by_docker(spec):
        spec["recording"]["daemons"]["/run/docker.sock"]["info"]["CDISpecDirs"] = ["/etc/cdi"]

    by_mode = {"/etc/nvidia-container-runtime/config.toml": '[nvidia-container-runtime]\nmode = "cdi"\n'}
    assert status(tmp_path / "nobody", identifier, ROCKY, files) == "warn"
    assert status(tmp_path / "docker", identifier, ROCKY, files, by_docker) == "fail"
    assert status(tmp_path / "mode", identifier, ROCKY, files | by_mode) == "fail"


OPERATORS = """[nvidia-container-runtime]
mode = "cdi"
[nvidia-container-runtime.modes.cdi]
default-kind = "management.nvidia.com/gpu"
"""


def test_operator_toolkit_uses_its_own_cdi_kind(tmp_path):
    settings = {"/etc/nvidia-container-runtime/config.toml": OPERATORS}
    spec = {"/var/run/cdi/management.nvidia.com-gpu.yaml": SPEC.format(kind="management.nvidia.com/gpu")}
    assert status(tmp_path / "there", "cdi-spec-missing", ROCKY, settings | spec) == "pass"
    assert status(tmp_path / "gone", "cdi-spec-missing", ROCKY, settings) == "fail"


def test_user_without_access_to_docker_gets_a_skipped_cdi_check(tmp_path):
    def denied(spec):
        spec["executables"] = [path for path in spec["executables"] if "nvidia" not in path]
        spec["recording"]["sockets"]["/run/docker.sock"] = "denied"
        del spec["recording"]["daemons"]["/run/docker.sock"]

    assert status(tmp_path, "cdi-disabled", STATION, {"/etc/cdi/a.yaml": GPU}, denied) == "skip"
