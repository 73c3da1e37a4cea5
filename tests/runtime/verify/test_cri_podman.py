"""Requests to each engine, and the parsing of its response; the engines themselves run elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fixtures.crio import start_crio
from fixtures.stubs import have_compiler
from gpunode.errors import DaemonError
from gpunode.facts.cdi import DIRECTORIES
from gpunode.facts.daemons import Daemon
from gpunode.host import Host
from gpunode.host.process import Completed
from gpunode.runtime.verify import cri as crio
from gpunode.runtime.verify import podman
from gpunode.runtime.verify.container import ALL, CdiReading, ContainerRequest, GpuAccess
from gpunode.runtime.verify.cri import _client
from gpunode.runtime.verify.docker import _reading, specification
from gpunode.runtime.verify.image import HostFiles, Names, pause_image
from gpunode.runtime.verify.podman import Podman, said
from tests.cli import gpunode
from tests.files import write

BY_CDI = GpuAccess(CdiReading("docker"), devices=(ALL,))
BY_HANDLER = GpuAccess(CdiReading("docker"), "nvidia")
REQUEST = ContainerRequest("docker", argv=("-m", "x"), env={"A": "b"})


def test_docker_is_called_with_a_runtime_or_with_devices_but_not_both() -> None:
    plain = specification(REQUEST, BY_HANDLER, "image", {"l": "m"})
    assert (plain["HostConfig"]["Runtime"], plain["Labels"]) == ("nvidia", {"l": "m"})
    assert "DeviceRequests" not in plain["HostConfig"]
    by_cdi = specification(REQUEST, BY_CDI, "image", {})["HostConfig"]
    assert by_cdi["DeviceRequests"] == [{"Driver": "cdi", "DeviceIDs": [ALL]}]
    assert "Runtime" not in by_cdi


@pytest.mark.parametrize(
    ("info", "enabled", "directories"),
    [
        ({"ServerVersion": "20.10.24+dfsg1"}, None, DIRECTORIES),
        ({"ServerVersion": "26.1.5", "CDISpecDirs": []}, False, ()),
        ({"ServerVersion": "28.5.2", "CDISpecDirs": ["/etc/cdi", 7]}, True, ("/etc/cdi",)),
        ({"ServerVersion": 7, "CDISpecDirs": "no"}, None, DIRECTORIES),
    ],
)
def test_cdi_state_is_read_from_docker_info(
    info: dict[str, object], enabled: bool | None, directories: tuple[str, ...]
) -> None:
    reading = _reading(info)
    assert (reading.enabled, reading.directories) == (enabled, directories)


def test_cdi_needs_a_container() -> None:
    ran = gpunode("verify", "--cdi")
    assert ran.code == 2
    assert "hint: gpunode verify --on docker --cdi" in ran.err


def test_log_of_an_ended_container_is_read_until_the_daemon_has_written_it(tmp_path: Path) -> None:
    """containerd may report the exit before the last lines are in the file."""
    log, later = tmp_path / "log", iter(("", "t stdout F one\n", "t stdout F two\n"))

    class Writing(Host):
        def sleep(self, seconds: float) -> None:
            with log.open("a") as file:
                file.write(next(later, ""))

    assert crio._whole_log(Writing(), str(log)) == "t stdout F one\nt stdout F two\n"


# --- podman -------------------------------------------------------------------------------------------------


def test_podman_is_called_with_devices_or_with_a_runtime() -> None:
    by_cdi = podman._arguments(Host(), REQUEST, BY_CDI, "image", "name")
    assert by_cdi[0] == "run"
    assert by_cdi[by_cdi.index("--device") + 1] == ALL
    assert by_cdi[-3:] == ("image", "-m", "x")
    by_handler = podman._arguments(Host(), REQUEST, BY_HANDLER, "image", "name")
    assert by_handler[:3] == ("--runtime", "nvidia", "run")
    assert "--device" not in by_handler


def ended(code: int, stderr: str) -> Completed:
    return Completed(("podman",), code, "", stderr)


def test_program_may_exit_with_podmans_own_codes() -> None:
    refused = []
    for code, stderr in ((125, "my error\n"), (1, "Error: mine\n"), (127, "")):
        try:
            podman._refuse_failure(Host(), REQUEST, BY_HANDLER, ended(code, stderr))
        except DaemonError:
            refused.append((code, stderr))
    assert refused == []


@pytest.mark.parametrize("code", [125, 126, 127])
def test_failure_of_podman_is_not_a_failure_of_the_program(code: int) -> None:
    stderr = 'time="2026" level=warning msg="x"\nError: OCI runtime error: crun: cgroups in hybrid mode\n'
    with pytest.raises(DaemonError) as caught:
        podman._refuse_failure(Host(), REQUEST, BY_HANDLER, ended(code, stderr))
    assert caught.value.code == "cgroup-hybrid"


def test_timed_out_run_names_its_limit() -> None:
    late = ended(-9, "")._replace(timed_out=True)
    with pytest.raises(DaemonError, match="within 60 s"):
        podman._refuse_failure(Host(), REQUEST, BY_HANDLER, late)


@pytest.mark.parametrize(
    ("stderr", "message"),
    [
        ("Error: one\nError: two\n", "two"),
        ("no such thing\n", "no such thing"),
        ("  \n", "exit code 125"),
        ("Error: what\n  level=debug\n", "what"),
    ],
)
def test_podman_error_is_extracted(stderr: str, message: str) -> None:
    assert said(ended(125, stderr)) == message


def scripted(directory: Path, output: str, code: int = 0) -> Podman:
    """A podman with this response to every query: real ones don't respond this badly."""
    (directory / "answer").write_text(output)
    program = directory / "podman"
    program.write_text(f"#!/bin/sh\ncat {directory}/answer\necho Error: no >&2\nexit {code}\n")
    program.chmod(0o755)
    return Podman(Host(), str(program))


@pytest.mark.parametrize(
    "output", ["", "null", "{", "[7, null]", '[{"Id": 7}]', '[{"Id": "a", "Labels": []}]']
)
def test_malformed_listing_gives_no_names(tmp_path: Path, output: str) -> None:
    assert scripted(tmp_path, output).labelled_containers({"a": "b"}) == {}
    assert scripted(tmp_path, output).image_names("x") == ()


def test_listing_gives_labels_and_names(tmp_path: Path) -> None:
    found = [{"Id": "a", "Labels": {"x": "y"}, "Names": ["n:2", "n:1", 7]}, {"Names": None}]
    asked = scripted(tmp_path, json.dumps(found))
    assert asked.labelled_containers({"x": "y"}) == {"a": {"x": "y"}}
    assert asked.image_names("n") == ("n:1", "n:2")


def test_failing_podman_does_not_mean_a_missing_image(tmp_path: Path) -> None:
    assert scripted(tmp_path, "").has_image("x")
    assert not scripted(tmp_path, "", 1).has_image("x")
    with pytest.raises(DaemonError, match="podman image exists: no"):
        scripted(tmp_path, "", 125).has_image("x")


def test_podman_that_cannot_list_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DaemonError, match="podman ps: no"):
        scripted(tmp_path, "", 125).labelled_containers({})


# --- CRI-O and containerd ----------------------------------------------------------------------------------


@pytest.mark.skipif(not have_compiler(), reason="needs gcc")
def test_crio_settings_are_those_of_the_running_daemon() -> None:
    with start_crio("nvidia-ctk") as engine:
        settings = crio._settings(Host(), engine.socket, None)
    assert settings.handlers is not None
    assert "nvidia" in settings.handlers


def test_crio_settings_fall_back_to_the_files(tmp_path: Path) -> None:
    (tmp_path / "crio.conf").write_text(
        '[crio.runtime]\ncdi_spec_dirs = ["/opt/cdi"]\n[crio.runtime.runtimes.nvidia]\nruntime_path = "/n"\n'
        '[crio.image]\npause_image = "pause:1"\n'
    )
    argv = ("crio", "--config-dir", str(tmp_path / "none"))
    daemon = Daemon("crio", None, (1, 32, 4), str(tmp_path / "crio.conf"), "", "", None, argv)
    settings = crio._settings(Host(), str(tmp_path / "none.sock"), daemon)
    assert settings == crio._Settings(("crun", "nvidia"), ("/opt/cdi",), "pause:1")
    (tmp_path / "crio.conf").write_text("[crio\n")
    assert crio._settings(Host(), str(tmp_path / "none.sock"), daemon) == crio._Settings()


SETTINGS = crio._Settings(root="/s/root", runroot="/s/run", driver="overlay")


def programs(directory: Path, *names: str) -> Host:
    for name in names:
        (directory / name).write_text('#!/bin/sh\necho "$@" >&2\nexit 1\n')
        (directory / name).chmod(0o755)
    return Host(root=directory)


def test_images_are_loaded_into_the_storage_of_crio(tmp_path: Path) -> None:
    (tmp_path / "usr/bin").mkdir(parents=True)
    assert crio._storage(programs(tmp_path / "usr/bin"), SETTINGS) is None
    host = Host(root=tmp_path)
    programs(tmp_path / "usr/bin", "skopeo")
    assert crio._storage(host, SETTINGS) == crio._Skopeo(host, "/usr/bin/skopeo", "[overlay@/s/root+/s/run]")
    programs(tmp_path / "usr/bin", "podman")
    storage = crio._storage(host, SETTINGS)
    assert isinstance(storage, Podman)
    assert storage.options == (
        "--root",
        "/s/root",
        "--runroot",
        "/s/run",
        "--storage-driver",
        "overlay",
    )


def test_skopeo_loads_every_name_of_an_image_and_its_error_is_reported(tmp_path: Path) -> None:
    programs(tmp_path, "skopeo")
    storage = crio._Skopeo(Host(), str(tmp_path / "skopeo"), "[vfs@/r+/x]")
    archive = pause_image(HostFiles(b"", "/usr/bin/python3", (), "amd64"), "pause:1", Names("t"))
    assert crio._names_of(archive) == ("pause:1", "gpunode.local/stand-in:t")
    with pytest.raises(DaemonError) as loading:
        storage.load_image(archive)
    assert loading.value.message.startswith("--insecure-policy copy docker-archive:/")
    assert loading.value.message.endswith("/image.tar:pause:1 containers-storage:[vfs@/r+/x]pause:1")
    with pytest.raises(DaemonError) as removing:
        storage.remove_image("pause:1")
    assert removing.value.message == "delete containers-storage:[vfs@/r+/x]pause:1"


@pytest.mark.parametrize(
    ("there", "manager", "client"),
    [
        (("opt/c/bin/ctr", "usr/bin/ctr"), "", ("/opt/c/bin/ctr",)),
        (("usr/bin/ctr", "usr/bin/k3s"), "k3s", ("ctr",)),
        (("usr/bin/k3s",), "k3s", ("k3s", "ctr")),
        (("snap/bin/microk8s.ctr",), "microk8s", ("/snap/bin/microk8s.ctr",)),
        ((), "", ("ctr",)),
    ],
)
def test_ctr_of_the_same_package_as_the_daemon_is_used(
    tmp_path: Path, there: tuple[str, ...], manager: str, client: tuple[str, ...]
) -> None:
    for path in there:
        write(tmp_path, path, "x", 0o755)
    daemon = Daemon("containerd", "/opt/c/bin/containerd", (), "", "", "", None, manager=manager)
    assert _client(Host(root=tmp_path), daemon) == client
