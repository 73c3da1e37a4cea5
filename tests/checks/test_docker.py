"""Unusual Docker setups: a working one is no finding, and a fix suits the owner of the Docker."""

import json

import pytest

from fixtures.machines import machine
from gpunode.checks.catalogue import BY_ID
from gpunode.checks.runner import run_checks
from gpunode.commands.demo import build_machine
from gpunode.facts.node import Node
from gpunode.host import Host
from tests.checks.test_cdi import GPU

ROCKY, FILE, SOCKET = "healthy-docker-rocky9", "/etc/docker/daemon.json", "/run/docker.sock"
VALIDATE = f"dockerd --validate --config-file {FILE}"


def judged(tmp_path, identifier, name, change):
    spec = machine(name)
    change(spec)
    return BY_ID[identifier].run(Node(Host(build_machine(spec, tmp_path), environ={})))


def file(text, version="27.3.1"):
    def change(spec):
        spec["files"][FILE] = text
        output = {"stdout": f"Docker version {version}, build 311b9ff\n"}
        spec["recording"]["commands"]["/usr/bin/dockerd --version"] = output

    return change


def test_duplicate_key_does_not_prevent_docker_from_starting(tmp_path):
    twice = file('{\n "log-driver": "json-file",\n "log-driver": "local"\n}\n')
    verdict = judged(tmp_path / "twice", "docker-config-invalid-json", ROCKY, twice)
    assert (verdict.status.value, verdict.evidence[0].line) == ("warn", 3)
    assert judged(tmp_path / "keys", "docker-unknown-key", ROCKY, twice).status.value == "pass"


@pytest.mark.parametrize("text", ["", " \n", '\ufeff{"debug": false}'])
@pytest.mark.parametrize(("version", "expected"), [("20.10.24+dfsg1", "fail"), ("23.0.0", "pass")])
def test_older_dockers_refuse_an_empty_file_and_a_byte_order_mark(tmp_path, text, version, expected):
    verdict = judged(tmp_path, "docker-config-invalid-json", ROCKY, file(text, version))
    assert verdict.status.value == expected


def listening(*addresses):
    def change(spec):
        words = [word for address in addresses for word in ("-H", address)]
        spec["files"]["/proc/1210/cmdline"] = "\0".join(("/usr/bin/dockerd", *words, ""))
        del spec["recording"]["sockets"][SOCKET]
        del spec["recording"]["daemons"][SOCKET]

    return change


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        (["tcp://127.0.0.1:2375"], "pass"),
        (["tcp://127.0.0.1:2375", "unix://"], "fail"),
        (["unix:///run/docker.sock"], "fail"),
    ],
)
def test_docker_listening_on_tcp_only_has_no_missing_socket(tmp_path, addresses, expected):
    verdict = judged(tmp_path, "docker-not-running", ROCKY, listening(*addresses))
    assert verdict.status.value == expected


@pytest.mark.parametrize(
    ("name", "command"),
    [("healthy-workstation", "apt install docker-ce && "), (ROCKY, "dnf install docker-ce && ")],
)
def test_docker_beside_docker_desktop_keeps_its_command(tmp_path, name, command):
    def desktop(spec):
        gone = ("/usr/bin/dockerd",)
        spec["executables"] = [path for path in spec["executables"] if path not in gone]
        for path in [*spec["files"]]:
            if "docker" in path or spec["files"][path].startswith("/usr/bin/dockerd"):
                del spec["files"][path]
        spec["files"] |= {
            "/etc/passwd": "anna:x:1000:1000::/home/anna:/bin/sh\n",
            "/proc/4100/cmdline": "com.docker.backend\0",
            "/proc/4100/stat": "4100 (com.docker.back) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 9 0 0\n",
            "/proc/4100/status": "Name:\tcom.docker.back\nUid:\t1000\t1000\t1000\t1000\n",
            "/home/anna/.docker/config.json": '{"currentContext": "desktop-linux"}',
        }

    verdict = judged(tmp_path, "docker-desktop", name, desktop)
    assert verdict.status.value == "fail"
    assert verdict.fix.command.startswith(f"{command}sudo -Hu anna docker context use default")


def test_unreadable_specification_does_not_replace_the_docker_runtime(tmp_path):
    def broken(spec):
        spec["files"]["/etc/cdi/nvidia.yaml"] = "kind: [nvidia.com/gpu\n"
        info = spec["recording"]["daemons"][SOCKET]["info"]
        info["CDISpecDirs"] = ["/etc/cdi"]
        del info["Runtimes"]["nvidia"]

    assert judged(tmp_path, "docker-runtime-missing", ROCKY, broken).status.value == "warn"


def test_docker_needs_no_runtime_if_it_uses_cdi(tmp_path):
    def by_cdi(spec):
        spec["files"]["/etc/cdi/nvidia.yaml"] = GPU
        spec["recording"]["daemons"][SOCKET]["info"]["CDISpecDirs"] = ["/etc/cdi"]

    verdict = judged(tmp_path, "docker-runtime-missing", "docker-runtime-missing", by_cdi)
    assert verdict.status.value == "pass" and "through CDI" in verdict.summary


def test_google_sudoers_members_may_be_in_the_docker_group(tmp_path):
    def group(spec):
        spec["files"]["/etc/group"] = "google-sudoers:x:1001:anna\ndocker:x:998:anna\n"

    assert not judged(tmp_path, "docker-group", ROCKY, group).note


def test_missing_runtime_program_is_a_warning_if_docker_uses_cdi(tmp_path):
    def without_program(spec):
        spec["executables"] = [path for path in spec["executables"] if "nvidia-c" not in path]

    def cdi_off(spec):
        without_program(spec)
        spec["recording"]["daemons"][SOCKET]["info"]["CDISpecDirs"] = []

    by_cdi = judged(tmp_path / "cdi", "docker-runtime-missing", "healthy-workstation", without_program)
    assert by_cdi.status.value == "warn" and FILE in by_cdi.fix.command
    without = judged(tmp_path / "without", "docker-runtime-missing", "healthy-workstation", cdi_off)
    assert without.status.value == "fail"


@pytest.mark.parametrize(
    ("load", "file", "expected", "command"),
    [
        ("masked", "masked", "skip", ""),
        ("loaded", "disabled", "fail", "systemctl enable --now docker"),
        ("loaded", "enabled", "fail", "systemctl restart docker"),
    ],
)
def test_stopped_docker_is_enabled_unless_it_was_disabled_on_purpose(tmp_path, load, file, expected, command):
    def stopped(spec):
        for path in [path for path in spec["files"] if path.startswith("/proc/1210/")]:
            del spec["files"][path]
        del spec["recording"]["sockets"][SOCKET]
        output = (
            f"Id=docker.service\nLoadState={load}\nActiveState=inactive\nSubState=dead\nUnitFileState={file}"
        )
        spec["recording"]["commands"]["systemctl show docker.service"] = {"stdout": output}

    verdict = judged(tmp_path, "docker-not-running", ROCKY, stopped)
    assert verdict.status.value == expected
    assert (verdict.fix.command if verdict.fix else "") == command


@pytest.mark.parametrize(("state", "expected"), [("disabled", "skip"), ("enabled", "fail")])
def test_dockerd_process_of_a_user_does_not_hide_the_stopped_service(tmp_path, state, expected):
    def switched(spec):
        unit = spec["recording"]["commands"]["systemctl show docker.service"]
        unit["stdout"] = unit["stdout"].replace("disabled", state)

    assert judged(tmp_path, "docker-not-running", "docker-rootless", switched).status.value == expected


@pytest.mark.parametrize(
    ("path", "expected"), [("", "skip"), ("/etc/init.d/docker", "fail"), ("/run/systemd/system/x", "fail")]
)
def test_rootless_docker_is_known_without_systemd_and_docker_service(tmp_path, path, expected):
    def changed(spec):
        spec["recording"]["commands"] = {}
        spec["dirs"] = [one for one in spec["dirs"] if one != "/run/systemd/system"]
        spec["files"] |= {path: ""} if path else {}

    assert judged(tmp_path, "docker-not-running", "docker-rootless", changed).status.value == expected


RELOADS = "reloads Docker: running containers continue"
INFO = {"LiveRestoreEnabled": False, "ContainersRunning": 3}


def fix_of(tmp_path, identifier, name, change=lambda spec: None):
    """The first fix of a finding, with what it disturbs."""
    spec = machine(name)
    answer = spec["recording"]["daemons"].get(SOCKET)
    if answer:
        answer["info"] |= INFO
    change(spec)
    findings = run_checks(Node(Host(build_machine(spec, tmp_path), environ={})))
    (finding,) = [finding for finding in findings if finding.id == identifier]
    return finding.fixes[0]


def with_flag(spec):
    spec["files"]["/proc/1210/cmdline"] += "--add-runtime\0other=/usr/bin/other\0"


@pytest.mark.parametrize(
    ("identifier", "reload", "restart"),
    [
        (
            "docker-runtime-missing",
            "gpunode configure-runtime --runtime docker",
            "gpunode configure-runtime --runtime docker",
        ),
        ("docker-not-restarted", "systemctl reload docker", "systemctl restart docker"),
        (
            "docker-unknown-key",
            f"${{EDITOR:-vi}} +3 {FILE} && {VALIDATE} && systemctl reload docker",
            f"${{EDITOR:-vi}} +3 {FILE} && {VALIDATE} && systemctl restart docker",
        ),
    ],
)
def test_docker_is_restarted_only_where_a_reload_is_not_enough(identifier, reload, restart, tmp_path):
    """A reload makes dockerd forget runtimes that were given as flags."""
    fix = fix_of(tmp_path / "reload", identifier, identifier)
    assert fix.command == reload
    note = "Docker is running. This reloads it: running containers continue"
    assert (fix.effect, fix.note) in ((RELOADS, ""), ("", note))
    fix = fix_of(tmp_path / "restart", identifier, identifier, with_flag)
    assert (fix.command, fix.effect) == (restart, "restarts Docker, which stops 3 running containers")


def test_settings_that_conflict_with_flags_are_deleted_from_the_last_line_up(tmp_path):
    fix = fix_of(tmp_path, "docker-flag-file-conflict", "docker-flag-file-conflict-ubuntu")
    assert fix.change == (
        'In /etc/docker/daemon.json, line 4: delete "hosts"; line 3: delete "containerd". '
        "Leave no comma before }. Keep the flags"
    )


def test_password_in_a_conflicting_setting_is_not_shown(tmp_path):
    def change(spec):
        spec["files"][FILE] = '{"hosts": ["tcp://admin:hunter2@10.0.0.7:2376"]}'

    name = "docker-flag-file-conflict"
    verdict = judged(tmp_path, name, name, change)
    assert verdict.summary == f"Docker runs, but can't start again: its flags and {FILE} both set hosts"
    assert "10.0.0.7" in verdict.evidence[0].value and "hunter2" not in verdict.evidence[0].value


def test_addresses_that_only_the_file_has_are_added_to_the_unit_first(tmp_path):
    def change(spec):
        hosts = '["fd://", "unix:///run/docker.sock", "tcp://10.0.0.7:2376"]'
        spec["files"][FILE] = f'{{"hosts": {hosts}}}'

    name = "docker-flag-file-conflict"
    assert fix_of(tmp_path / "usual", name, name).before == ""
    fix = fix_of(tmp_path / "more", name, name, change)
    assert fix.before == "First, if clients need it, add to docker.service: -H tcp://10.0.0.7:2376"


def test_file_is_validated_only_by_a_dockerd_that_can(tmp_path):
    def old(spec):
        output = {"stdout": "Docker version 20.10.24, build 297e128\n"}
        spec["recording"]["commands"]["/usr/bin/dockerd --version"] = output

    fix = fix_of(tmp_path, "docker-flag-file-conflict", "docker-flag-file-conflict", old)
    assert fix.command == f"${{EDITOR:-vi}} +2 {FILE} && systemctl reload docker"


def test_setting_that_only_a_start_reads_needs_a_restart(tmp_path):
    def change(spec):
        for text in (spec["files"], spec["recording"]["commands"]):
            whole = json.dumps(text).replace("default_runtime", "storage_driver")
            text |= json.loads(whole)

    fix = fix_of(tmp_path, "docker-unknown-key", "docker-unknown-key", change)
    assert fix.change.endswith('change "storage_driver" to "storage-driver"')
    assert fix.command.endswith("&& systemctl restart docker")
    assert fix.effect == "restarts Docker, which stops 3 running containers"


def test_default_runtime_missing_from_the_file_is_not_reloaded(tmp_path):
    """Docker 20.10 crashes at such a reload."""

    def change(spec):
        spec["files"][FILE] = '{"runtimes": {"nvidia": {"path": "nvidia-container-runtime"}}}'
        spec["recording"]["daemons"][SOCKET]["info"]["DefaultRuntime"] = "other"

    fix = fix_of(tmp_path, "docker-not-restarted", "docker-not-restarted", change)
    assert fix.command == "systemctl restart docker"


def test_corrected_file_of_a_running_docker_is_loaded_by_a_reload(tmp_path):
    fix = fix_of(tmp_path / "up", "docker-config-invalid-json", "docker-config-invalid-json")
    assert fix.command == "${EDITOR:-vi} +4 /etc/docker/daemon.json"
    assert fix.note.split("\n")[1:] == [f"{VALIDATE} && systemctl reload docker"]

    def stopped(spec):
        for path in [path for path in spec["files"] if path.startswith("/proc/1210/")]:
            del spec["files"][path]

    fix = fix_of(tmp_path / "down", "docker-config-invalid-json", "docker-config-invalid-json", stopped)
    assert fix.command == f"${{EDITOR:-vi}} +4 {FILE} && {VALIDATE} && systemctl restart docker"
    assert fix.effect == "starts Docker, which isn't running"
