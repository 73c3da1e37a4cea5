"""Settings lost by an import of containerd, pinned memory, and GPU injection by NRI."""

import pytest

from gpunode.commands.demo import build_machine
from gpunode.facts.containerd import Lost, in_force, is_lost, load_config, lost_settings
from gpunode.facts.device_plugins import nri_plugin
from gpunode.facts.processes import locked_memory, running
from gpunode.host import Host

CRI = 'plugins."io.containerd.grpc.v1.cri"'
MAIN = f"""version = 2
imports = ["/etc/containerd/conf.d/*.toml"]
[{CRI}]
  sandbox_image = "pause:3.9"
  [{CRI}.registry.configs."r.example.com".auth]
    password = "hunter2"
"""
DROP_IN = f'version = 2\n[{CRI}.containerd.runtimes.nvidia]\n  runtime_type = "io.containerd.runc.v2"\n'


def host_with(tmp_path, files):
    return Host(build_machine({"files": files}, tmp_path / "root"), environ={})


def config(tmp_path, files, release):
    host = host_with(tmp_path, {f"/etc/containerd/{name}": text for name, text in files.items()})
    return load_config(host, "/etc/containerd/config.toml", release)


@pytest.mark.parametrize(
    ("release", "names"),
    [
        ((1, 7, 2), ["sandbox_image", "registry.configs.r.example.com.auth.password"]),
        ((2, 1, 0), []),
    ],
)
def test_older_containerd_uses_a_plugin_table_only_from_the_last_file(tmp_path, release, names):
    files = {"config.toml": MAIN, "conf.d/99-nvidia.toml": DROP_IN}
    lost = lost_settings(config(tmp_path, files, release))
    assert [one.name for one in lost] == names
    assert "hunter2" not in "".join(map(str, lost))


def test_third_file_can_restore_a_setting(tmp_path):
    again = f'version = 2\n[{CRI}]\n  sandbox_image = "pause:3.9"\n'
    files = {"config.toml": MAIN, "conf.d/50-nvidia.toml": DROP_IN, "conf.d/99-again.toml": again}
    lost = lost_settings(config(tmp_path, files, (1, 7, 2)))
    assert "sandbox_image" not in [one.name for one in lost]
    assert "containerd.runtimes.nvidia.runtime_type" in [one.name for one in lost]


def test_file_without_the_cri_table_drops_nothing(tmp_path):
    files = {"config.toml": MAIN, "conf.d/10-metrics.toml": "[metrics]\n  address = ':1338'\n"}
    assert lost_settings(config(tmp_path, files, (1, 6, 20))) == ()


def test_keys_of_the_running_daemon_are_mapped_from_camel_case():
    running = {"sandboxImage": "pause", "enableCDI": True, "cni": {"binDir": "/opt/cni/bin"}}
    assert in_force(running, ("sandbox_image",)) == "pause"
    assert in_force(running, ("enable_cdi",)) is True
    assert in_force(running, ("cni", "bin_dir")) == "/opt/cni/bin"
    assert in_force(running, ("registry", "config_path")) is None
    assert in_force({"cni": "odd"}, ("cni", "bin_dir")) is None


@pytest.mark.parametrize(
    ("running", "lost"),
    [
        ({"registry": {"mirrors": None}}, True),
        ({"registry": {"mirrors": {"quay.io": {"endpoint": ["a"]}}}}, True),
        ({"registry": {"mirrors": {"docker.io": {"endpoint": ["b"]}}}}, True),
        ({"registry": {"mirrors": {"docker.io": {"endpoint": ["a"]}}}}, False),
        ({"sandboxImage": "pause"}, False),
    ],
)
def test_setting_is_lost_if_the_running_daemon_does_not_list_it(running, lost):
    one = Lost(("registry", "mirrors", "docker.io", "endpoint"), ["a"], "config.toml", "99.toml")
    assert is_lost(running, one) == lost


@pytest.mark.parametrize(
    ("line", "bytes_"),
    [
        ("Max locked memory         8388608              8388608              bytes     ", 8388608),
        ("Max locked memory         unlimited            unlimited            bytes     ", -1),
        ("Max locked memory         many                 many                 bytes     ", None),
        ("Max locked memory", None),
        ("Max open files            1024                 4096                 files     ", None),
    ],
)
def test_locked_memory(tmp_path, line, bytes_):
    host = host_with(tmp_path, {"/proc/7/limits": f"Limit  Soft Limit  Hard Limit  Units\n{line}\n"})
    assert locked_memory(host, 7) == bytes_
    assert locked_memory(host, 8) is None


STAT = "2600 (x) S 1 2600 2600 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 6000 0 0\n"


@pytest.mark.parametrize(
    ("cmdline", "environ", "injects"),
    [
        ("nvidia-ctk-installer\0", "ENABLE_NRI_PLUGIN=true\0", True),
        ("nvidia-ctk-installer\0", "ENABLE_NRI_PLUGIN=false\0", False),
        ("nvidia-ctk-installer\0", "", False),
        ("nvidia-ctk-installer\0--enable-nri-plugin\0", "", True),
        ("nvidia-ctk-installer\0--enable-nri-plugin=false\0", "ENABLE_NRI_PLUGIN=true\0", False),
        ("/usr/bin/python3\0--enable-nri-plugin\0", "ENABLE_NRI_PLUGIN=true\0", False),
    ],
)
def test_nri_plugin_that_injects_devices_is_recognized(tmp_path, cmdline, environ, injects):
    files = {"/proc/2600/cmdline": cmdline, "/proc/2600/stat": STAT, "/proc/2600/environ": environ}
    host = host_with(tmp_path, files)
    assert (nri_plugin(host, running(host)) is not None) == injects
