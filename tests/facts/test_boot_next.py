"""Restoring at boot: every place that administrators use for it, and no false match."""

from pathlib import Path

import pytest

from gpunode.facts.boot import loaded, started
from gpunode.host import Host
from tests.files import write

COMMANDS = ("cdi generate",)
GENERATE = "nvidia-ctk cdi generate --output=/var/run/cdi/nvidia.yaml"


def host(root: Path, files) -> Host:
    for name, text in files.items():
        write(root, name, text)
    return Host(root, environ={})


@pytest.mark.parametrize(
    "path",
    [
        "etc/systemd/system/cdi.service",
        "etc/cron.d/gpu",
        "etc/crontab",
        "etc/rc.local",
        "var/spool/cron/crontabs/root",
    ],
)
def test_command_is_found_in_cron_units_and_scripts(tmp_path, path):
    assert started(host(tmp_path, {path: f"@reboot {GENERATE}\n"}), COMMANDS) == f"/{path}"


def test_script_is_followed_once(tmp_path):
    files = {
        "etc/systemd/system/gpu.service": "[Service]\nExecStart=-/usr/local/bin/one\n",
        "usr/local/bin/one": "#!/bin/sh\n/usr/local/bin/two\n",
        "usr/local/bin/two": f"#!/bin/sh\n{GENERATE}\n",
    }
    assert started(host(tmp_path / "deep", files), COMMANDS) == ""
    files["usr/local/bin/one"] = f"#!/bin/sh\n{GENERATE}\n"
    assert started(host(tmp_path / "flat", files), COMMANDS) == "/etc/systemd/system/gpu.service"


def test_unit_that_is_queried_from_systemd_is_left_out(tmp_path):
    node = host(tmp_path, {"etc/systemd/system/nvidia-cdi-refresh.service": f"ExecStart={GENERATE}\n"})
    assert started(node, COMMANDS, besides=("nvidia-cdi-refresh.service",)) == ""


def test_udev_rules_are_searched_only_in_rules_directories(tmp_path):
    node = host(tmp_path, {"etc/udev/rules.d/71-gpu.rules": f'RUN+="{GENERATE}"\n'})
    assert started(node, COMMANDS) == ""
    assert started(node, COMMANDS, rules=True) == "/etc/udev/rules.d/71-gpu.rules"


def test_unreadable_directory_does_not_count_as_searched(tmp_path):
    class Closed(Host):
        def path(self, path, *, follow=True):
            if str(path).endswith("/gpu"):
                raise PermissionError(13, "Permission denied", str(path))
            return super().path(path, follow=follow)

    root = host(tmp_path, {"etc/cron.d/gpu": "# nothing\n"}).root
    assert started(Closed(root, environ={}), COMMANDS) == "/etc/cron.d/gpu"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("etc/modules-load.d/nvidia.conf", "nvidia\nnvidia_uvm\n"),
        ("etc/modules", "nvidia-uvm\n"),
        ("usr/lib/modprobe.d/nvidia.conf", "softdep nvidia post: nvidia-uvm\n"),
        ("usr/lib/udev/rules.d/71-nvidia.rules", 'RUN+="/sbin/modprobe nvidia-uvm"\n'),
        ("etc/rc.local", "nvidia-modprobe -c0 -u\n"),
    ],
)
def test_unified_memory_is_loaded_by(tmp_path, path, text):
    assert loaded(host(tmp_path, {path: text}), "nvidia-uvm") == f"/{path}"


@pytest.mark.parametrize(
    "text", ["# nvidia_uvm\n", "options nvidia_uvm uvm_disable_hmm=1\n", "blacklist nvidia-uvm\n", "nvidia\n"]
)
def test_comment_about_the_module_does_not_load_it(tmp_path, text):
    files = {"etc/modprobe.d/nvidia.conf": text, "etc/modules-load.d/nvidia.conf": "# nvidia_uvm\nnvidia\n"}
    assert loaded(host(tmp_path, files), "nvidia-uvm") == ""
