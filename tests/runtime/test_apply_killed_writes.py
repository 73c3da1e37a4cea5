"""A run killed by SIGKILL at any step of writing a file leaves nothing that an engine reads."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.crio import make_node
from gpunode.host import Host
from tests.cli import clean_environment, gpunode

KILLER = """
import os, signal, sys, tempfile
from pathlib import Path

step, name, root = sys.argv[1], sys.argv[2], sys.argv[4]

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

def before(module, function, matches):
    inner = getattr(module, function)
    def call(*args, **kwargs):
        if matches(*args):
            kill()
        return inner(*args, **kwargs)
    setattr(module, function, call)

def path_of(descriptor):
    return os.readlink(f"/proc/self/fd/{descriptor}")

def ours(path):
    path = str(path)
    return os.path.basename(path).startswith(f".{name}.") and path.startswith(root) and "journal" not in path

of_file = lambda descriptor, *_: ours(path_of(descriptor))
if step == "created":
    before(os, "fdopen", of_file)
elif step in ("half", "written"):
    inner = os.fchmod
    def fchmod(descriptor, mode):
        if of_file(descriptor):
            if step == "half":
                os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
            kill()
        inner(descriptor, mode)
    os.fchmod = fchmod
elif step in ("synced", "renamed"):
    inner = os.replace
    def replace(source, target, *, src_dir_fd, dst_dir_fd):
        if step == "renamed":
            inner(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        if ours(f"{path_of(src_dir_fd)}/{source}"):
            kill()
        if step == "synced":
            inner(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
    os.replace = replace
sys.argv = ["gpunode", *sys.argv[3:]]
from gpunode.__main__ import main
sys.exit(main())
"""
CRIO = "etc/crio/crio.conf.d/99-nvidia.toml"
CONTAINERD = "etc/containerd/config.toml"


def crio_node(root: Path) -> Path:
    return make_node(root, "packaged")


def containerd_node(root: Path) -> Path:
    """Its drop-in directory has a glob that takes hidden files too, as filepath.Glob does."""
    commands = {
        "/usr/bin/containerd --version": {"stdout": "containerd github.com/containerd/containerd 1.7.20 x"}
    }
    for name in (".gpunode", "etc/containerd/conf.d", "usr/bin"):
        (root / name).mkdir(parents=True)
    (root / ".gpunode/recording.json").write_text(json.dumps({"commands": commands}))
    (root / CONTAINERD).write_text('version = 2\nimports = ["/etc/containerd/conf.d/*"]\n')
    for program in ("containerd", "nvidia-container-runtime"):
        (root / "usr/bin" / program).write_text("x")
        (root / "usr/bin" / program).chmod(0o755)
    return root


NODES = {"crio": (crio_node, CRIO), "containerd": (containerd_node, CONTAINERD)}


def configure(root: Path, engine: str) -> tuple[str, ...]:
    return ("--root", str(root), "configure-runtime", "--runtime", engine, "--no-verify")


def seen_by_engines(root: Path) -> list[str]:
    """Temporary files in the directories of which an engine reads files."""
    places = (root / "etc/crio/crio.conf.d", root / "etc/containerd", root / "etc/cdi")
    return [path.name for place in places for path in place.rglob(".*")]


def temporary(root: Path) -> list[Path]:
    return [path for path in root.rglob(".*") if path.name.endswith(".gpunode") and path.is_file()]


@pytest.mark.parametrize("step", ["created", "half", "written", "synced", "renamed"])
@pytest.mark.parametrize("engine", list(NODES))
def test_run_after_a_killed_one_succeeds_and_leaves_no_temporary_file(
    tmp_path: Path, engine: str, step: str
) -> None:
    make, path = NODES[engine]
    root = make(tmp_path / "node")
    name = path.rpartition("/")[2]
    argv = [sys.executable, "-c", KILLER, step, name, *configure(root, engine)]
    killed = subprocess.run(argv, env=clean_environment(), capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert seen_by_engines(root) == []
    assert bool(temporary(root)) == (step != "renamed")
    again = gpunode(*configure(root, engine))
    assert again.code == 0, again.err
    assert temporary(root) == []
    assert "nvidia-container-runtime" in (root / path).read_text()
    assert gpunode(*configure(root, engine)).out.count("unchanged") >= 1


def test_partially_written_file_of_an_earlier_release_is_removed(tmp_path: Path) -> None:
    root = crio_node(tmp_path)
    assert gpunode(*configure(root, "crio")).code == 0
    place = (root / CRIO).parent
    leftover = place / ".99-nvidia.toml.a1b2c3_x.gpunode"
    leftover.write_text("[crio.runtime.runtimes.nvi")
    others = [place / "98-own.toml.gpunode", root / "etc/crio/.99-nvidia.toml.gpunode"]
    for other in others:
        other.write_text("")
    ran = gpunode(*configure(root, "crio"))
    assert ran.code == 0, ran.err
    assert f"/{leftover.relative_to(root)}, the temporary file of a killed run, was removed" in (
        ran.out + ran.err
    )
    assert not leftover.exists() and all(other.exists() for other in others)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_file_of_another_user_with_such_a_name_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "conf.d/a.toml"
    target.parent.mkdir()
    theirs, link = (target.parent / f".a.toml.{kind}.gpunode" for kind in ("aaaaaaaa", "bbbbbbbb"))
    theirs.write_text("")
    os.chown(theirs, 65534, 65534)
    link.symlink_to("/etc/passwd")
    assert Host().remove_leftovers(str(target)) == ()
    assert theirs.exists() and link.is_symlink()


@pytest.mark.parametrize("reason", ["writable by others", "read-only", "another mount"])
def test_write_succeeds_if_the_parent_directory_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    target = tmp_path / "conf.d/a.toml"
    target.parent.mkdir()
    if reason == "writable by others":
        tmp_path.chmod(0o777)
    elif reason == "read-only":
        tmp_path.chmod(0o555)
    else:
        inner = os.replace

        def replace(source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
            if os.fstat(src_dir_fd).st_ino != os.fstat(dst_dir_fd).st_ino:
                raise OSError(18, "Invalid cross-device link")
            inner(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

        monkeypatch.setattr(os, "replace", replace)
    Host().write_atomic(str(target), b"new", above=True)
    tmp_path.chmod(0o755)
    assert target.read_bytes() == b"new"
    assert [path.name for path in tmp_path.rglob("*")] == ["conf.d", "a.toml"]
