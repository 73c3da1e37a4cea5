"""Variables that change CUDA for a whole node: their sources, and values without effect."""

import pytest

from gpunode.commands.demo import build_machine
from gpunode.facts.cuda import settings
from gpunode.host import Host


def assignments(files, tmp_path, environ=None):
    return [
        (one.name, one.value, one.source, one.line)
        for one in settings(
            Host(build_machine({"files": files}, tmp_path), environ=environ or {}), ["dockerd"]
        )
    ]


@pytest.mark.parametrize(
    ("path", "text", "line"),
    [
        ("/etc/environment", 'PATH="/usr/bin"\nCUDA_PROFILE="1"\n', 2),
        ("/etc/environment", "export CUDA_PROFILE=1\n", 1),
        ("/etc/systemd/system.conf", "[Manager]\nDefaultEnvironment=LANG=C CUDA_PROFILE=1\n", 2),
        ("/etc/systemd/system.conf.d/x.conf", '[Manager]\nDefaultEnvironment="CUDA_PROFILE=1"\n', 2),
    ],
)
def test_file_and_line_are_reported(path, text, line, tmp_path):
    assert assignments({path: text}, tmp_path) == [("CUDA_PROFILE", "1", path, line)]


def test_variables_of_a_unit_are_reported(tmp_path):
    unit = "[Service]\nEnvironment=CUDA_VISIBLE_DEVICES=0,1\nExecStart=/usr/bin/dockerd\n"
    files = {"/usr/lib/systemd/system/docker.service": unit}
    assert assignments(files, tmp_path) == [("CUDA_VISIBLE_DEVICES", "0,1", "docker.service", None)]


@pytest.mark.parametrize(
    ("program", "unit"),
    [
        ("k3s", "k3s-agent.service"),
        ("rke2", "rke2-server.service"),
        ("rke2", "rke2-agent.service"),
        ("k0s", "k0scontroller.service"),
        ("k0s", "k0sworker.service"),
    ],
)
def test_units_of_distributions_are_read_as_well(program, unit, tmp_path):
    text = "[Service]\nEnvironmentFile=-/etc/default/%N\nExecStart=/usr/local/bin/x\n"
    files = {f"/etc/systemd/system/{unit}": text}
    files[f"/etc/default/{unit.removesuffix('.service')}"] = "CUDA_PROFILE=1\n"
    host = Host(build_machine({"files": files}, tmp_path), environ={})
    assert [one.source for one in settings(host, [program])] == [unit]
    assert settings(host, ["containerd"]) == ()


@pytest.mark.parametrize(
    "text",
    [
        "# CUDA_PROFILE=1\n",
        "CUDA_PROFILE=0\n",
        "CUDA_PROFILE=\n",
        "NVIDIA_VISIBLE_DEVICES=all\n",
        "MY_CUDA_PROFILE=1\n",
        "PATH=/opt/CUDA_PROFILE=1/bin\n",
        "CUDA_PROFILE\n",
        "\ud800".encode("utf-8", "surrogatepass").decode("utf-8", "replace"),
    ],
)
def test_variables_without_effect_are_not_reported(text, tmp_path):
    assert assignments({"/etc/environment": text}, tmp_path) == []


def test_unbalanced_quote_is_skipped(tmp_path):
    text = '[Manager]\nDefaultEnvironment="CUDA_PROFILE=1\n'
    assert assignments({"/etc/systemd/system.conf": text}, tmp_path) == []


def test_caller_may_set_cuda_visible_devices(tmp_path):
    environ = {"CUDA_VISIBLE_DEVICES": "1", "CUDA_INJECTION64_PATH": "/x.so"}
    assert [one[0] for one in assignments({}, tmp_path, environ)] == ["CUDA_INJECTION64_PATH"]
