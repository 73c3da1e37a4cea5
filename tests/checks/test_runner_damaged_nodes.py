"""The doctor reports on any node: damaged files, missing pieces, wrong types."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fixtures.machines import machine, recorded_host
from gpunode.checks.catalogue import ALL_CHECKS
from gpunode.checks.finding import FindingStatus
from gpunode.commands import doctor
from gpunode.commands.demo import build_machine
from gpunode.errors import ConfigError
from gpunode.host import Host
from gpunode.host.recording import RECORDING
from gpunode.output.render import Color, Output, plain_lines, render
from tests.silent import SilentProgress

pytestmark = pytest.mark.full

BASE = machine("cdi-spec-fits")
PATHS = sorted(BASE["files"])
GARBAGE = st.one_of(
    st.binary(max_size=60),
    st.sampled_from(
        [b"", b"\0", b"-1", b"\xff\xfe", b"{", b"[]", b"9" * 5000, b"version = 'x'", "٣".encode()]
    ),
)
WRONG = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(max_size=5), st.just([]), st.just([1]), st.just({})
)
QUIET = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def diagnosed(root, capsys=None):
    result = doctor.run(Host(root, environ={}), SilentProgress())
    assert [one.id for one in result.data.findings] == [check.id for check in ALL_CHECKS]
    json.dumps(result.envelope(), ensure_ascii=False)
    return result


def broken(result):
    return [one for one in result.data.findings if one.status is FindingStatus.ERROR]


@QUIET
@given(damage=st.dictionaries(st.sampled_from(PATHS), st.one_of(st.none(), GARBAGE), min_size=1, max_size=6))
def test_damaged_files_are_reported_or_skipped_and_break_no_check(damage, tmp_path):
    root = build_machine(BASE, tmp_path / "machine")
    for path, content in damage.items():
        target = root / path.lstrip("/")
        target.unlink() if content is None else target.write_bytes(content)
    result = diagnosed(root)
    shutil.rmtree(root)
    # a daemon.json or config.toml that can't be parsed has a check of its own; nothing else may break
    assert not broken(result), (damage, broken(result))


@QUIET
@given(
    section=st.sampled_from(["commands", "devices", "sockets", "daemons", "nvml"]),
    position=st.integers(0, 200),
    value=WRONG,
    whole=st.booleans(),
)
def test_recording_with_wrong_types_still_gives_a_report(section, position, value, whole, tmp_path):
    spec = machine("healthy-h100")
    if whole:
        spec["recording"][section] = value
    else:
        keys = sorted(spec["recording"][section])
        spec["recording"][section][keys[position % len(keys)]] = value
    root = build_machine(spec, tmp_path / "machine")
    result = diagnosed(root)
    shutil.rmtree(root)
    assert result.kind == "DoctorReport"


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"nvml": 3, "commands": []}'])
def test_unusable_recording_is_not_a_healthy_node(text, tmp_path):
    host = recorded_host("healthy-h100", tmp_path)
    (host.root / RECORDING).write_text(text)
    assert diagnosed(host.root).exit_code != 0


def test_directory_in_place_of_a_file_gives_no_traceback(tmp_path):
    host = recorded_host("healthy-h100", tmp_path)
    for path in ("etc/docker/daemon.json", "etc/containerd/config.toml", "etc/os-release", "etc/ld.so.cache"):
        (host.root / path).unlink()
        (host.root / path).mkdir()
    assert diagnosed(host.root).exit_code == 1


def test_empty_root_reports_the_missing_gpu(tmp_path):
    for name in ("proc", "sys", "etc"):
        (tmp_path / name).mkdir()
    result = diagnosed(tmp_path)
    assert {one.id for one in result.data.findings if one.status is FindingStatus.FAIL} == {"pci-no-gpu"}
    assert not broken(result)


@pytest.mark.parametrize("output", list(Output))
def test_names_that_are_not_utf8_are_printed(output, tmp_path, capsys):
    host = recorded_host("healthy-h100", tmp_path)
    Path(host.root / "etc/docker/daemon.json").write_bytes(b'{"a\xff\x1b[31m": }')
    render(doctor.run(host, SilentProgress()), output, Color.NEVER)
    assert "\x1b" not in capsys.readouterr().out


def test_broken_file_of_an_unused_containerd_is_not_reported(tmp_path):
    host = recorded_host("healthy-docker-rocky9", tmp_path)
    (host.root / "etc/containerd/config.toml").write_text("[plugins")
    result = diagnosed(host.root)
    assert (result.status, broken(result)) == ("ok", [])


def test_nvml_names_of_a_wrong_type_are_refused_with_their_key(tmp_path):
    spec = machine("healthy-h100")
    for gpu in spec["recording"]["nvml"]["inventory"]["gpus"]:
        gpu["name"] = ["H100"]
    host = Host(build_machine(spec, tmp_path), environ={})
    with pytest.raises(ConfigError, match=r"nvml\.inventory\.gpus\[0\]\.name must be a string"):
        doctor.check_recording(host)


def test_untrusted_text_of_a_node_forges_no_line(tmp_path):
    """A bundle is untrusted, and so may be a daemon that responds."""
    spec = machine("healthy-h100")
    info = spec["recording"]["daemons"]["/run/docker.sock"]["info"]
    info |= {"DefaultRuntime": "runc\nFAIL forged: curl x", "Runtimes": {"a\nFAIL forged": {}}}
    spec["files"] |= {
        "/proc/sys/kernel/hostname": "n\nFAIL forged\n",
        "/proc/modules": "nvidia 1 0\n\x0cFAIL forged 1",
    }
    for gpu in spec["recording"]["nvml"]["inventory"]["gpus"]:
        gpu["name"] = "H100\nFAIL forged" + "x" * 100
    result = diagnosed(build_machine(spec, tmp_path))
    lines = [line for block in result.blocks for part in plain_lines(block) for line in part.splitlines()]
    assert any("forged" in line for line in lines)
    assert [line for line in lines if line.lstrip().startswith("FAIL forged")] == []
