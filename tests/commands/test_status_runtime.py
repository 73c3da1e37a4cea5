"""`gpunode status runtime` on recorded machines: engines, files, writers, handlers, and disagreements."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from fixtures.machines import recorded_host
from tests.cli import gpunode
from tests.facts.test_writers import COPY, MAIN
from tests.files import write
from tests.ordinary_user import AS_ORDINARY_USER, make_readable, public_directory

DROP_IN = "/etc/containerd/conf.d/99-nvidia.toml"


def engines(root: Path) -> dict[str, Any]:
    """`data.engines` by name, of a run that must succeed."""
    ran = gpunode("status", "runtime", "--root", str(root), "-o", "json")
    assert ran.code == 0, ran.err
    assert ran.document["kind"] == "RuntimeStatus"
    return {one["name"]: one for one in ran.document["data"]["engines"]}


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """A healthy node with Docker, containerd and a kubelet."""
    return recorded_host("healthy-h100", tmp_path / "node").root


def test_healthy_node_agrees_with_its_files(node: Path) -> None:
    found = engines(node)
    assert list(found) == ["containerd", "docker"]  # the kubelet's engine comes first
    for one in found.values():
        assert (one["drift"], one["problem"], one["silence"], one["running"]) == ([], "", "", True)
    containerd = found["containerd"]
    assert (containerd["kubelet"], found["docker"]["kubelet"]) == (True, False)
    (nvidia,) = [one for one in containerd["handlers"] if one["name"] == "nvidia"]
    assert nvidia == {
        "name": "nvidia",
        "path": "/usr/bin/nvidia-container-runtime",
        "file": "/etc/containerd/config.toml",
        "active": True,
        "programExists": True,
    }
    assert containerd["files"][0]["writer"] == "administrator"


def test_months_of_old_docker_releases_have_two_digits(tmp_path: Path) -> None:
    root = recorded_host("docker-version-old", tmp_path / "node").root
    assert engines(root)["docker"]["version"] == "18.09.9"
    planned = gpunode(
        "configure-runtime", "--runtime", "docker", "--dry-run", "--root", str(root), "-o", "json"
    )
    assert planned.document["data"]["engineVersion"] == "18.09.9"
    ran = gpunode("configure-runtime", "--runtime", "docker", "--cdi", "--dry-run", "--root", str(root))
    assert "Docker 18.09.9 has no CDI" in ran.err


def test_reading_changes_nothing(node: Path) -> None:
    def state() -> dict[str, str]:
        return {
            str(path): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(node.rglob("*"))
            if path.is_file()
        }

    before = state()
    assert gpunode("status", "runtime", "--root", str(node)).code == 0
    assert state() == before


@pytest.mark.parametrize(
    ("machine", "name", "fix"),
    [
        ("containerd-not-restarted", "containerd", "systemctl restart containerd.service"),
        ("docker-not-restarted", "docker", "systemctl reload docker.service"),
    ],
)
def test_daemon_with_unread_changes_has_drift(tmp_path: Path, machine: str, name: str, fix: str) -> None:
    root = recorded_host(machine, tmp_path / "node").root
    (drift,) = engines(root)[name]["drift"]
    assert (drift["kind"], drift["subject"], drift["fix"]) == ("not-active", "nvidia", fix)
    ran = gpunode("status", "runtime", "--root", str(root))
    assert f"  Fix: {fix}\n" in ran.out and "no, 1 difference" in ran.out
    assert ran.out.splitlines()[0].endswith("CDI  FILES ACTIVE      USED BY")


@pytest.mark.parametrize(
    ("machine", "name"),
    [("healthy-h100", "containerd"), ("healthy-h100", "docker"), ("healthy-crio", "crio")],
)
def test_runtime_that_the_next_restart_removes_is_written_again(
    tmp_path: Path, machine: str, name: str
) -> None:
    root = recorded_host(machine, tmp_path / "node").root
    assert gpunode("unconfigure-runtime", "--runtime", name, "--root", str(root)).code == 0
    ran = gpunode("status", "runtime", "--root", str(root))
    fix = f"gpunode configure-runtime --runtime {name}"
    assert "it is gone after the next restart" in ran.out
    assert [line for line in ran.out.splitlines() if "Fix: " in line] == [f"  Fix: {fix}"]
    assert gpunode(*fix.split()[1:], "--root", str(root)).code == 0
    assert engines(root)[name]["drift"] == []


def test_broken_file_is_named_and_the_running_configuration_still_shown(tmp_path: Path) -> None:
    root = recorded_host("containerd-config-not-toml", tmp_path / "node").root
    found = engines(root)["containerd"]
    assert found["problem"].startswith("/etc/containerd/config.toml:2:9: ") and found["readable"]
    assert {one["name"]: one["active"] for one in found["handlers"]} == {"runc": True, "nvidia": True}
    assert found["drift"] == []


def test_stopped_daemon_is_listed_with_the_reason(tmp_path: Path) -> None:
    root = recorded_host("containerd-not-running", tmp_path / "node").root
    found = engines(root)["containerd"]
    assert found["running"] is False and "refused" in found["silence"]
    assert {one["name"]: one["active"] for one in found["handlers"]} == {"runc": None, "nvidia": None}
    assert (found["drift"], found["activeDefault"], found["configuredDefault"]) == ([], "", "runc")


def test_rootless_docker_is_listed_with_its_user(tmp_path: Path) -> None:
    root = recorded_host("docker-rootless", tmp_path / "node").root
    ran = gpunode("status", "runtime", "--root", str(root), "-o", "json")
    users = [one["user"] for one in ran.document["data"]["engines"] if one["name"] == "docker"]
    assert users == ["", "1000"]


def test_generated_copy_is_recognized_by_its_writer_and_shadowed_values(node: Path) -> None:
    later = MAIN.replace("pause:3.9", "pause:3.10")
    write(node, "/etc/containerd/config.toml", f'imports = ["/etc/containerd/conf.d/*.toml"]\n{later}')
    write(node, DROP_IN, COPY)
    found = engines(node)["containerd"]
    drop_in = found["files"][1]
    assert (drop_in["path"], drop_in["writer"], drop_in["generatedCopy"]) == (DROP_IN, "nvidia-ctk", True)
    shadowed = [(one["subject"], one["fix"]) for one in found["drift"] if one["kind"] == "shadowed"]
    assert shadowed == [("sandbox_image", "gpunode configure-runtime --runtime containerd --replace")]
    write(node, DROP_IN, COPY.replace("/usr/bin/nvidia", "/usr/local/nvidia/toolkit/nvidia"))
    assert engines(node)["containerd"]["files"][1]["writer"] == "gpu-operator"


def test_file_written_by_gpunode_is_known_from_the_journal_until_edited(node: Path) -> None:
    program = "/usr/bin/nvidia-container-runtime"
    argv = ("configure-runtime", "--runtime", "docker", "--nvidia-runtime-name", "gpu")
    ran = gpunode(*argv, "--nvidia-runtime-path", program, "--root", str(node))
    assert ran.code == 0, ran.err
    file = engines(node)["docker"]["files"][0]
    assert (file["writer"], file["edited"]) == ("gpunode", False)
    (manifest,) = (node / "var/lib/gpunode/journal").glob("*/manifest.json")
    committed = manifest.read_text()
    manifest.write_text(committed.replace('"committed"', '"applied"'))  # as a killed run leaves it
    assert engines(node)["docker"]["files"][0]["writer"] == "gpunode"
    manifest.write_text(committed)
    place = node / "etc/docker/daemon.json"
    place.write_text(place.read_text() + "\n")
    file = engines(node)["docker"]["files"][0]
    assert (file["writer"], file["edited"]) == ("gpunode", True)
    kinds = {(one["kind"], one["subject"]) for one in engines(node)["docker"]["drift"]}
    assert kinds == {("not-active", "gpu")}


def test_without_the_journal_the_writer_of_a_file_is_not_guessed() -> None:
    with public_directory() as place:
        root = recorded_host("healthy-h100", place / "node").root
        make_readable(root)
        (root / "var/lib/gpunode/journal").mkdir(parents=True, mode=0o700)
        ran = gpunode("status", "runtime", "--root", str(root), "-o", "json", prefix=AS_ORDINARY_USER)
        assert ran.code == 0, ran.err
        writers = {one["files"][0]["writer"] for one in ran.document["data"]["engines"]}
        assert writers == {"unknown"}


def test_unmodified_package_file_has_its_package_as_writer(node: Path) -> None:
    text = (node / "etc/containerd/config.toml").read_bytes()
    sum_ = hashlib.md5(text, usedforsecurity=False).hexdigest()
    conffiles = f"Package: containerd\nConffiles:\n /etc/containerd/config.toml {sum_}\nDescription: x\n"
    write(node, "/var/lib/dpkg/status", conffiles)
    assert engines(node)["containerd"]["files"][0]["writer"] == "package"
    write(node, "/etc/containerd/config.toml", text.decode() + "# mine\n")
    assert engines(node)["containerd"]["files"][0]["writer"] == "administrator"


def test_missing_runtime_program_is_marked(node: Path) -> None:
    (node / "usr/bin/nvidia-container-runtime").unlink()
    handlers = engines(node)["containerd"]["handlers"]
    assert {one["name"]: one["programExists"] for one in handlers} == {"runc": None, "nvidia": False}
    assert "nvidia-container-runtime (missing)" in gpunode("status", "runtime", "--root", str(node)).out


@pytest.mark.parametrize(
    "text",
    ['{"runtimes": [], "features": 5}', '{"runtimes": {"nvidia": 5}, "default-runtime": {}}', "[1", "\x00"],
)
def test_malformed_files_cause_no_crash(node: Path, text: str) -> None:
    write(node, "/etc/docker/daemon.json", text)
    write(node, "/etc/containerd/config.toml", "version = 2\nplugins = 5\nimports = 3\n")
    ran = gpunode("status", "runtime", "--root", str(node))
    assert ran.code == 0 and "bug in gpunode" not in ran.err


def test_node_without_engines_is_a_precondition_failure(tmp_path: Path) -> None:
    ran = gpunode("status", "runtime", "--root", str(tmp_path))
    assert ran.code == 3
    assert "no container engine" in ran.err
    assert gpunode("status", "runtime", "--runtime", "nope", "--root", str(tmp_path)).code == 2


def test_cdi_devices_are_listed_by_file(node: Path) -> None:
    spec = 'cdiVersion: "0.5.0"\nkind: nvidia.com/gpu\ndevices:\n- name: "0"\n- name: all\n'
    write(node, "/var/run/cdi/nvidia.yaml", spec)
    ran = gpunode("status", "runtime", "--root", str(node))
    assert "/var/run/cdi/nvidia.yaml  nvidia.com/gpu: 0, all" in ran.out
