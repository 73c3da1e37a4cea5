"""Bulletins that concern a release, with the node's configuration."""

import pytest

from fixtures.machines import machine
from gpunode.commands.demo import build_machine
from gpunode.facts.bulletins import driver_bulletins, toolkit_bulletins
from gpunode.facts.node import Node
from gpunode.facts.tables import table
from gpunode.host import Host

CONFIG = "/etc/nvidia-container-runtime/config.toml"


def toolkit_ids(tmp_path, version, config="", programs=()):
    spec = machine("healthy-h100")
    spec["files"][CONFIG] = config
    spec["executables"] += programs
    node = Node(Host(build_machine(spec, tmp_path), environ={}))
    return [row["cves"][0] for row in toolkit_bulletins(node.host, version, node.toolkit_settings)]


@pytest.mark.parametrize(
    ("version", "fixes"),
    [
        ("595.71.05", []),
        ("580.159.03", []),
        ("580.126.09", ["580.159.03"]),
        ("580.65.06", ["580.159.03", "580.126.09", "580.95.05"]),
        ("581.10", []),
        ("610.43", []),
        ("", []),
    ],
)
def test_driver_is_compared_with_its_own_branch(version, fixes):
    assert [fixed for _, fixed in driver_bulletins(version)] == fixes


def test_newest_toolkit_in_the_table_has_no_vulnerability(tmp_path):
    newest = max(tuple(map(int, row["fixed"].split("."))) for row in table("toolkit_cves").rows)
    assert toolkit_ids(tmp_path, newest) == []


def test_vulnerability_closed_by_the_configuration_is_not_reported(tmp_path):
    only = ["CVE-2026-24260", "CVE-2025-23267"]
    assert toolkit_ids(tmp_path / "as-is", (1, 17, 7)) == [
        "CVE-2026-24260",
        "CVE-2025-23266",
        "CVE-2025-23267",
    ]
    closed = "[features]\ndisable-cuda-compat-lib-hook = true\n"
    assert toolkit_ids(tmp_path / "closed", (1, 17, 7), closed) == only
    crun = '[nvidia-container-runtime]\nruntimes = ["crun"]\n'
    assert toolkit_ids(tmp_path / "crun", (1, 17, 7), crun, ("/usr/bin/crun",)) == only


def test_vulnerability_of_an_unused_mode_is_not_reported(tmp_path):
    by_cdi = '[nvidia-container-runtime]\nmode = "cdi"\n'
    legacy = toolkit_ids(tmp_path / "legacy", (1, 17, 3))
    assert "CVE-2025-23359" in legacy and "CVE-2025-23266" not in legacy
    cdi = toolkit_ids(tmp_path / "cdi", (1, 17, 3), by_cdi)
    assert "CVE-2025-23359" not in cdi and "CVE-2025-23266" in cdi
