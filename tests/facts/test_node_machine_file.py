import pytest

from fixtures.machines import machine, merged, overlay
from gpunode.commands.demo import build_machine
from gpunode.errors import ConfigError
from gpunode.host import Host


def test_every_section_becomes_what_the_host_reads(tmp_path):
    spec = {
        "files": {"/etc/a": "text", "/proc/7/cmdline": "x\0y\0"},
        "binary": {"/etc/b": "/w=="},
        "links": {"/etc/c": "a"},
        "dirs": ["/run/d"],
        "executables": ["/usr/bin/e"],
        "recording": {"devices": {"/dev/nvidia0": {"major": 195, "minor": 0, "mode": "0660"}}},
    }
    host = Host(build_machine(spec, tmp_path / "new"), environ={})
    assert (host.read_bytes("/etc/a"), host.read_bytes("/etc/b")) == (b"text", b"\xff")
    assert host.read_bytes("/proc/7/cmdline") == b"x\0y\0"
    assert (host.readlink("/etc/c"), host.is_dir("/run/d"), host.which("e")) == ("a", True, "/usr/bin/e")
    node = host.device("/dev/nvidia0")
    assert node is not None and (node.major, node.mode) == (195, 0o660)


@pytest.mark.parametrize("path", ["/../out", "/etc/../../out", "relative", ""])
@pytest.mark.parametrize("section", ["files", "links"])
def test_path_outside_the_root_is_refused(section, path, tmp_path):
    with pytest.raises(ConfigError):
        build_machine({section: {path: "x"}}, tmp_path / "root")
    assert not (tmp_path / "out").exists()


def test_symlink_of_the_machine_is_not_written_through(tmp_path):
    with pytest.raises(ConfigError):
        build_machine({"links": {"/etc": str(tmp_path), "/etc/x": "y"}}, tmp_path / "root")
    assert not (tmp_path / "x").is_symlink()


def test_non_empty_directory_is_refused(tmp_path):
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(ConfigError):
        build_machine({"files": {"/mine": ""}}, tmp_path)
    assert (tmp_path / "mine").read_text() == "precious"


def test_overlay_changes_a_copy_of_its_base():
    base = machine("healthy-h100")
    changed = overlay(base, {"set": {"files": {"/etc/new": "1"}}, "remove": ["/sys/module/nvidia_uvm"]})
    assert base == machine("healthy-h100")
    assert set(changed["files"]) - set(base["files"]) == {"/etc/new"}
    assert set(base["files"]) - set(changed["files"]) == {"/sys/module/nvidia_uvm/initstate"}


def test_removing_a_missing_path_is_an_error():
    with pytest.raises(KeyError):
        overlay(machine("healthy-h100"), {"remove": ["/no/such/path"]})


def test_merge_works_by_key_and_appends_lists():
    assert merged({"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"b": 3}, "d": [2]}) == {
        "a": {"b": 3, "c": 2},
        "d": [1, 2],
    }
