"""Cases close to false alarms about a GPU's health and a container's devices."""

import copy

import pytest

from fixtures.machines import machine
from gpunode.checks.catalogue import BY_ID
from gpunode.checks.runner import Selection, run_checks
from gpunode.commands.demo import build_machine
from gpunode.facts import node as node_module
from gpunode.facts.node import Node, Questions
from gpunode.gpu import probe as probe_module
from gpunode.host import Host

LOG = "/.gpunode/kernel.log"
UPTIME = "200000.00 1.00\n"
LOADED = "[199500.1] NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  550.54.14  Release Build\n"


def judged(name, change, tmp_path, identifier):
    spec = machine(name)
    change(spec)
    node = Node(Host(build_machine(spec, tmp_path), environ={}), Questions())
    (finding,) = [one for one in run_checks(node, Selection(only={identifier})) if one.id == identifier]
    return finding


def status(finding):
    return "note" if finding.note else finding.status.value


def gpus(spec):
    return spec["recording"]["nvml"]["conditions"]


def with_log(text, recovery="none"):
    def change(spec):
        spec["files"] |= {LOG: text, "/proc/uptime": UPTIME}
        for gpu in gpus(spec).values():
            gpu["reading"]["recoveryAction"] = recovery

    return change


def xid(number, seconds=199000, address="0000:18:00"):
    return f"[{seconds}.000001] NVRM: Xid (PCI:{address}): {number}, pid=1, name=python3, words\n"


@pytest.mark.parametrize(
    ("log", "recovery", "expected"),
    [
        ("", "none", "pass"),
        (xid(119), "none", "warn"),
        (xid(119), None, "fail"),
        (xid(119, 100), None, "pass"),  # more than a day ago: a later reset is unknown
        (xid(13), None, "note"),
        (xid(13, 100), None, "pass"),
        (xid(119) + LOADED, None, "pass"),
        (xid(119) + LOADED.replace("Open Kernel Module for x86_64", "x86_64 Kernel Module"), None, "pass"),
        (LOADED.replace("199500", "10") + xid(119), None, "fail"),
        (xid(63), None, "pass"),
        (xid(154), "none", "pass"),
        (xid(94), None, "note"),
        (xid(109), None, "note"),
        (xid(79), None, "warn"),  # the GPU responds: it has recovered
        (xid(999), None, "warn"),
        (xid(119, address="0000:ff:00"), None, "warn"),  # of no GPU that NVML lists
        ("[199000.1] python3[1]: NVRM: Xid (PCI:0000:18:00): 119, pid=1\n", None, "pass"),
    ],
)
def test_xid_is_reported_as_long_as_its_effect_lasts(log, recovery, expected, tmp_path):
    assert status(judged("healthy-h100", with_log(log, recovery), tmp_path, "xid-recent")) == expected


@pytest.mark.parametrize(("number", "command"), [(151, "reboot"), (119, "nvidia-smi --gpu-reset")])
def test_xid_names_the_recovery_that_its_kind_needs(number, command, tmp_path):
    found = judged("healthy-h100", with_log(xid(number), None), tmp_path, "xid-recent")
    assert found.fixes[0].command.startswith(command)


def test_without_uptime_xids_are_skipped(tmp_path):
    def change(spec):
        spec["files"][LOG] = xid(119)
        spec["files"].pop("/proc/uptime", None)

    assert status(judged("healthy-h100", change, tmp_path, "xid-recent")) == "skip"


def test_gpu_rebound_to_vfio_after_falling_off_the_bus_is_not_lost(tmp_path):
    def change(spec):
        spec["files"][LOG] = xid(79, address="0000:2a:00")
        spec["links"]["/sys/bus/pci/devices/0000:2a:00.0/driver"] = "../../../bus/pci/drivers/vfio-pci"
        nvml = spec["recording"]["nvml"]
        nvml["inventory"]["gpus"] = nvml["inventory"]["gpus"][:1]

    assert status(judged("healthy-docker-rocky9", change, tmp_path, "gpu-lost")) == "pass"


def test_unreadable_kernel_log_falls_back_to_nvml(tmp_path):
    def change(spec):
        spec.setdefault("dirs", []).append(LOG)

    assert status(judged("healthy-h100", change, tmp_path, "gpu-lost")) == "pass"


def set_gpu(index, **values):
    return lambda spec: gpus(spec)[str(index)].update(values)


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("healthy-h100", set_gpu(0, nvlinks=[True] * 17 + [False]), "warn"),
        ("healthy-h100", set_gpu(0, nvlinks=[False] * 18), "pass"),  # a card without its bridge
        ("healthy-h100", set_gpu(0, nvlinks=[False] * 18, migMode=True, migModeNext=True), "pass"),
        ("healthy-h100", set_gpu(0, nvlinks=[]), "pass"),
        ("healthy-docker-rocky9", lambda _: None, "skip"),
    ],
)
def test_link_is_down_only_if_its_peers_have_it_up(name, change, expected, tmp_path):
    assert status(judged(name, change, tmp_path, "nvlink-down")) == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"memoryUsed": 40 << 30}, "warn"),
        ({"memoryUsed": 40 << 30, "processes": [{"pid": 7}]}, "pass"),
        ({"memoryUsed": 40 << 30, "processes": None}, "skip"),
        ({"memoryUsed": 40 << 30, "memoryReserved": None}, "skip"),
        ({"memoryUsed": 40 << 30, "migMode": True}, "skip"),
        ({"memoryUsed": 40 << 30, "virtualization": "vgpu"}, "skip"),
        ({"memoryUsed": 40 << 30, "ccEnabled": True}, "skip"),
    ],
)
def test_unowned_memory_is_reported_only_if_all_processes_are_known(values, expected, tmp_path):
    def change(spec):
        gpu = gpus(spec)["0"]
        gpu.update(values)
        spec["recording"]["nvml"]["conditions"] = {"0": gpu}

    assert status(judged("healthy-h100", change, tmp_path, "zombie-gpu-memory")) == expected


def test_mps_may_set_the_compute_mode(tmp_path):
    def change(spec):
        gpus(spec)["0"]["computeMode"] = "exclusive-process"
        spec["files"] |= {
            "/proc/77/cmdline": "nvidia-cuda-mps-control\0-d\0",
            "/proc/77/stat": "77 (x) S " + "0 " * 30,
        }

    assert status(judged("healthy-h100", change, tmp_path, "compute-mode")) == "pass"


def test_desktop_of_a_workstation_is_not_reported(tmp_path):
    change = set_gpu(0, displayActive=True, processes=[{"pid": 1222, "graphics": True}])
    assert status(judged("healthy-workstation", change, tmp_path, "gpu-used-by-desktop")) == "pass"


def test_desktop_keeps_the_gpu_initialized(tmp_path):
    change = set_gpu(0, displayActive=True, persistence=False)
    assert status(judged("healthy-workstation", change, tmp_path, "persistence-off")) == "pass"


HEALTH = [one.id for one in BY_ID.values() if one.layer == "health" and one.id != "bad-cuda-env"]


@pytest.mark.parametrize("identifier", [*HEALTH, "persistence-off", "imex-channels"])
def test_value_unsupported_on_every_gpu_passes(identifier, tmp_path):
    def change(spec):
        spec["recording"]["nvml"]["conditions"] = {str(index): {} for index in range(8)}

    assert status(judged("healthy-h100", change, tmp_path, identifier)) in ("pass", "skip")


@pytest.mark.parametrize("identifier", [*HEALTH, "persistence-off", "imex-channels"])
def test_without_conditions_health_checks_do_not_fail(identifier, tmp_path):
    def change(spec):
        del spec["recording"]["nvml"]["conditions"]

    assert status(judged("healthy-h100", change, tmp_path, identifier)) in ("pass", "skip")


def without_reload(spec):
    spec["files"] = {path: text for path, text in spec["files"].items() if "/generator/" not in path}


def with_the_hosts_dev(spec):
    spec["recording"]["devices"]["/proc/7001/root/dev/mem"] = {"major": 1, "minor": 1, "mode": "0640"}


def without_unit_states(spec):
    commands = spec["recording"]["commands"]
    spec["recording"]["commands"] = {key: value for key, value in commands.items() if "scope" not in key}


@pytest.mark.parametrize("change", [without_reload, with_the_hosts_dev, without_unit_states])
def test_container_reports_lost_gpus_only_with_evidence(change, tmp_path):
    assert status(judged("cgroup-device-revoked", change, tmp_path, "cgroup-device-revoked")) == "pass"


def docker_info(**info):
    def change(spec):
        spec["recording"]["daemons"]["/run/docker.sock"]["info"].update(copy.deepcopy(info))

    return change


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({"RuncCommit": {"ID": "v1.1.4-0-g5fd4c4d"}}, "warn"),
        ({"RuncCommit": {"ID": "v1.1.2-0-ga916309"}}, "pass"),
        ({"RuncCommit": {"ID": "v1.1.12-0-g51d5e94"}}, "pass"),
        ({"RuncCommit": {"ID": "N/A"}}, "pass"),
        ({"RuncCommit": 3}, "pass"),
        ({"RuncCommit": {"ID": "v1.1.4"}, "CgroupDriver": "cgroupfs"}, "skip"),
    ],
)
def test_missing_dev_char_links_matter_only_for_some_runc_releases(info, expected, tmp_path):
    found = judged("healthy-docker-rocky9", docker_info(**info), tmp_path, "dev-char-symlinks")
    assert status(found) == expected


def test_persistence_daemon_of_ubuntu_matches_the_driver_branch(tmp_path):
    def change(spec):
        spec["files"]["/var/lib/dpkg/status"] = (
            "Package: nvidia-utils-580-server\nStatus: install ok installed\nVersion: 580.159.03-0ubuntu1\n\n"
        )

    fix = judged("persistence-off", change, tmp_path, "persistence-off").fixes[0]
    assert fix.command.startswith("apt install nvidia-compute-utils-580-server && systemctl enable")


def by_run_installer(spec):
    spec["files"].pop("/var/lib/dpkg/status", None)
    spec.setdefault("executables", []).append("/usr/bin/nvidia-uninstall")


@pytest.mark.parametrize(
    ("name", "change", "install"),
    [
        ("persistence-off-suse", lambda _: None, "zypper install nvidia-compute-utils-G07 && "),
        ("persistence-off", by_run_installer, "nvidia-persistenced-init/install.sh"),
    ],
)
def test_persistence_daemon_is_installed_from_the_drivers_source(name, change, install, tmp_path):
    def without_the_daemon(spec):
        change(spec)
        spec["files"] = {path: text for path, text in spec["files"].items() if "persistenced" not in path}
        commands = spec["recording"]["commands"]
        for key in [key for key in commands if key.startswith("systemctl show")]:
            del commands[key]

    fix = judged(name, without_the_daemon, tmp_path, "persistence-off").fixes[0]
    assert install in fix.command


def test_gpu_on_which_nvml_hangs_is_reported(tmp_path, monkeypatch):
    whole = probe_module.probe

    def stops(*given, **named):
        return whole(*given, **named)._replace(untold="NVML did not answer: the condition of GPU 3")

    monkeypatch.setattr(node_module, "probe", stops)
    found = judged("healthy-h100", lambda _: None, tmp_path, "nvml-hang")
    assert status(found) == "note" and "GPU 3" in found.evidence[0].value


def test_nvml_that_fails_for_the_node_or_for_one_gpu_is_reported(tmp_path):
    def whole(spec):
        spec["recording"]["nvml"] = {"error": {"code": 999, "message": "Unknown Error"}}

    def one(spec):
        spec["recording"]["nvml"]["inventory"]["gpus"][3]["error"] = "Unknown Error"

    found = judged("healthy-h100", whole, tmp_path / "whole", "nvml-hang")
    assert (status(found), found.evidence[0].value) == ("fail", "Unknown Error (code 999)")
    found = judged("healthy-h100", one, tmp_path / "one", "nvml-hang")
    assert (status(found), found.summary) == ("fail", "1 of 8 GPUs don't answer NVML")
    assert "GPU 3" in found.evidence[0].source


def running(name):
    return {"/proc/900/cmdline": f"/usr/bin/{name}\0", "/proc/900/stat": f"900 ({name}) " + "S " + "0 " * 48}


def test_imex_daemon_of_the_node_is_off_if_pods_run_one(tmp_path):
    def change(spec):
        spec["files"] |= running("compute-domain-kubelet-plugin")

    assert status(judged("imex-channels", change, tmp_path, "imex-channels")) == "pass"


@pytest.mark.parametrize(
    ("slows_down_at", "expected"),
    [(87, "pass"), (84, "warn"), (4294967294, "pass"), (2, "pass"), (0, "pass")],
)
def test_busy_gpu_is_hot_or_slow_only_at_its_own_limit(slows_down_at, expected, tmp_path):
    change = set_gpu(0, temperature=84, temperatureSlowdown=slows_down_at)
    assert status(judged("healthy-h100", change, tmp_path, "thermal-power-throttle")) == expected


@pytest.mark.parametrize(("chassis", "expected"), [("10\n", "pass"), ("23\n", "warn"), ("", "warn")])
def test_laptop_may_suspend_its_gpu(chassis, expected, tmp_path):
    def change(spec):
        spec["files"]["/sys/class/dmi/id/chassis_type"] = chassis

    assert status(judged("persistence-off", change, tmp_path, "persistence-off")) == expected


@pytest.mark.parametrize(("name", "seconds"), [("healthy-h100", 20.0), ("healthy-workstation", 15.0)])
def test_many_gpus_get_more_time_to_initialize(name, seconds, tmp_path, monkeypatch):
    asked = []
    whole = probe_module.probe

    def probe(host, timeout, **named):
        asked.append(timeout)
        return whole(host, timeout, **named)

    monkeypatch.setattr(node_module, "probe", probe)
    assert judged(name, lambda _: None, tmp_path, "nvml-hang").status.value == "pass"
    assert asked == [seconds]
