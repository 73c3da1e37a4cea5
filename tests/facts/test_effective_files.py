"""Settings of engines' files, in one format."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpunode.facts.daemons import Daemon
from gpunode.facts.effective import COMMAND_LINE, engine_settings
from gpunode.host import Host
from tests.files import write

CONTAINERD = "/etc/containerd/config.toml"
DOCKER = "/etc/docker/daemon.json"
P2 = "io.containerd.grpc.v1.cri"


def host_with(root: Path, path: str, text: str) -> Host:
    write(root, path, text)
    return Host(root, environ={})


def daemon(name: str, path: str, version: tuple[int, ...], *argv: str) -> Daemon:
    return Daemon(name, None, version, path, "", "", None, (name, *argv))


def test_last_file_with_a_handler_is_named(tmp_path: Path) -> None:
    runtime = f'[plugins."{P2}".containerd.runtimes.{{}}.options]\nBinaryName = "{{}}"\n'
    main = (
        'version = 2\nimports = ["conf.d/*.toml"]\n'
        + runtime.format("runc", "/r")
        + runtime.format("x", "/x")
    )
    write(tmp_path, "/etc/containerd/conf.d/1.toml", "version = 2\n" + runtime.format("x", "/y"))
    found = engine_settings(
        host_with(tmp_path, CONTAINERD, main), daemon("containerd", CONTAINERD, (2, 1, 9))
    )
    assert [(one.path, one.role) for one in found.files] == [
        (CONTAINERD, "main"),
        ("/etc/containerd/conf.d/1.toml", "drop-in"),
    ]
    assert {one.name: (one.path, one.file) for one in found.handlers} == {
        "runc": ("/r", CONTAINERD),
        "x": ("/y", "/etc/containerd/conf.d/1.toml"),
    }


@pytest.mark.parametrize(
    ("version", "text", "cdi"),
    [
        ((1, 6, 20), "enable_cdi = true", None),
        ((1, 7, 24), "", False),
        ((1, 7, 24), "enable_cdi = true", True),
        ((2, 1, 9), "", True),
        ((2, 1, 9), "enable_cdi = false", False),
        ((2, 1, 9), "enable_cdi = 5", True),
    ],
)
def test_cdi_in_containerd_depends_on_its_release(
    tmp_path: Path, version: tuple[int, ...], text: str, cdi: bool | None
) -> None:
    host = host_with(tmp_path, CONTAINERD, f'version = 2\n[plugins."{P2}"]\n{text}\n')
    assert engine_settings(host, daemon("containerd", CONTAINERD, version)).cdi is cdi


@pytest.mark.parametrize(
    ("version", "text", "argv", "cdi"),
    [
        ((24,), '{"features": {"cdi": true}}', (), None),
        ((28, 1), "{}", (), False),
        ((28, 1), '{"features": {"cdi": true}}', (), True),
        ((28, 1), "{}", ("--feature", "cdi=true"), True),
        ((28, 2), "{}", (), True),
        ((29, 0), '{"features": {"cdi": false}}', (), False),
    ],
)
def test_cdi_in_docker_depends_on_its_release(
    tmp_path: Path, version: tuple[int, ...], text: str, argv: tuple[str, ...], cdi: bool | None
) -> None:
    assert (
        engine_settings(host_with(tmp_path, DOCKER, text), daemon("docker", DOCKER, version, *argv)).cdi
        is cdi
    )


def test_dockerd_flags_count_as_configured(tmp_path: Path) -> None:
    host = host_with(tmp_path, DOCKER, '{"runtimes": {"a": {"path": "/a"}}}')
    flags = ("--add-runtime", "nvidia=/usr/bin/n", "--add-runtime=b=/b", "--default-runtime=nvidia")
    found = engine_settings(host, daemon("docker", DOCKER, (28,), *flags))
    assert {one.name: (one.path, one.file) for one in found.handlers} == {
        "a": ("/a", DOCKER),
        "nvidia": ("/usr/bin/n", COMMAND_LINE),
        "b": ("/b", COMMAND_LINE),
    }
    assert found.default == "nvidia"


def test_crio_flags_count_as_configured(tmp_path: Path) -> None:
    host = host_with(tmp_path, "/etc/crio/crio.conf", '[crio.runtime]\ndefault_runtime = "crun"\n')
    flags = ("--runtimes", "nvidia:/usr/bin/n:/run/n,b:/b", "--default-runtime", "nvidia")
    found = engine_settings(host, daemon("crio", "/etc/crio/crio.conf", (1, 32), *flags))
    assert found.paths == {"nvidia": "/usr/bin/n", "b": "/b"}
    assert (found.default, found.cdi) == ("nvidia", True)


@pytest.mark.parametrize(
    ("name", "path", "text"),
    [
        ("containerd", CONTAINERD, "version = 'x'"),
        ("containerd", CONTAINERD, "[[["),
        ("docker", DOCKER, "[]"),
        ("docker", DOCKER, '{"a": 1, "a": 2}'),
        ("crio", "/etc/crio/crio.conf", "crio = 5"),
        ("podman", "/etc/containers/containers.conf", "engine = 5"),
    ],
)
def test_unreadable_file_is_named_and_gives_no_settings(
    tmp_path: Path, name: str, path: str, text: str
) -> None:
    found = engine_settings(host_with(tmp_path, path, text), daemon(name, path, (9, 9)))
    assert path in found.problem and found.readable
    assert (found.handlers, found.default, found.cdi) == ((), "", None)


@pytest.mark.parametrize("name", ["containerd", "docker", "crio", "podman"])
def test_missing_file_is_not_a_problem(tmp_path: Path, name: str) -> None:
    path = {"containerd": CONTAINERD, "docker": DOCKER}.get(name, "/etc/x.conf")
    found = engine_settings(Host(tmp_path, environ={}), daemon(name, path, (9, 9)))
    assert [(one.path, one.role, one.text) for one in found.files] == [(path, "main", None)]
    assert (found.problem, found.handlers) == ("", ())
