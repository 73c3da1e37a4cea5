"""The image made from this machine: complete enough to run in an empty root, and reproducible."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from fixtures.stubs import build, have_compiler
from gpunode.errors import PreconditionError
from gpunode.gpu.vectoradd import MODULE
from gpunode.host import Host
from gpunode.runtime.verify import image
from gpunode.runtime.verify.image import Names, assemble, elf_interpreter, pause_image, verification_image
from tests.waiting import PATIENCE, eventually


@pytest.fixture(scope="module")
def files():
    return assemble(Host())


@pytest.fixture(scope="module")
def unpacked(files, tmp_path_factory):
    return unpack(files, tmp_path_factory.mktemp("root"))


def unpack(files, root):
    with tarfile.open(fileobj=io.BytesIO(files.content)) as tar:
        tar.extraction_filter = getattr(tarfile, "tar_filter", None)  # Python 3.11.2 has none yet
        tar.extractall(root)
    return root


def test_same_machine_gives_the_same_image(files):
    assert assemble(Host()).digest == files.digest


def test_image_contains_the_running_python_and_its_loader(files, unpacked):
    assert files.python == str(Path(sys.executable).resolve())
    loader = elf_interpreter((unpacked / files.python.lstrip("/")).read_bytes())
    assert loader is not None
    assert Host(root=unpacked).is_file(loader)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for chroot")
def test_python_runs_ctypes_and_json_in_an_empty_root(files, unpacked):
    env = image._environment(files)
    code = "import ctypes, json; ctypes.CDLL('libdl.so.2'); print(json.dumps([1]))"
    argv = ["chroot", str(unpacked), files.python, "-S", "-s", "-B", "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, **env}, timeout=PATIENCE)
    assert (done.stdout, done.stderr) == ("[1]\n", "")


def test_image_has_writable_directories_for_hooks(unpacked):
    for name in ("etc", "tmp", "dev", "proc", "sys", "run", "var"):
        assert (unpacked / name).is_dir(), name


def test_image_requests_gpus_and_the_sandbox_image_does_not(files):
    reference, archive = verification_image(files, Names("x", {"made": "here"}))
    assert reference == f"gpunode.local/verify:{files.digest}-x"
    assert b"NVIDIA_VISIBLE_DEVICES=all" in archive
    assert b'"Labels": {"made": "here"}' in archive
    assert b"NVIDIA_VISIBLE_DEVICES=void" in pause_image(files, "registry.k8s.io/pause:3.8", Names("x"))


def test_image_for_a_cdi_proof_requests_no_gpus_from_a_runtime(files):
    assert b"NVIDIA_VISIBLE_DEVICES=void" in verification_image(files, Names("x"), by_handler=False)[1]


def test_library_is_found_without_a_custom_search_path(files):
    """A driver that only LD_LIBRARY_PATH finds is one that users' containers don't find."""
    given = {*files.libraries, "/opt/python/lib"}
    _, archive = verification_image(replace(files, libraries=tuple(sorted(given))), Names("x"))
    found = re.search(rb'"LD_LIBRARY_PATH=([^"]*)"', archive)
    assert found is not None
    searched = found[1].decode().split(":")
    assert "/opt/python/lib" in searched
    assert not [path for path in searched if "linux-gnu" in path or "nvidia" in path]


def test_image_has_the_files_that_ldconfig_hooks_need(unpacked):
    assert (unpacked / "etc/ld.so.cache").read_bytes() == b""
    assert "ld.so.conf.d" in (unpacked / "etc/ld.so.conf").read_text()
    assert (unpacked / "etc/ld.so.conf.d").is_dir()


@pytest.mark.skipif(os.geteuid() != 0 or not have_compiler(), reason="needs root for chroot, and gcc")
def test_driver_in_any_directory_is_found_after_a_hook_ran_ldconfig(files, tmp_path):
    """As NVIDIA's hooks do it: the node's ldconfig, in the container's root, with the directories."""
    place = unpack(files, tmp_path / "root") / "opt/driver"
    place.mkdir(parents=True)
    shutil.copy(build() / "all/libcuda.so.1", place)
    code = "import ctypes; ctypes.CDLL('libcuda.so.1')"
    argv = ["chroot", str(tmp_path / "root"), files.python, "-S", "-s", "-B", "-c", code]
    environ = dict(image._environment(files))
    before = subprocess.run(argv, capture_output=True, text=True, env=environ, timeout=PATIENCE, check=False)
    assert "libcuda.so.1: cannot open shared object file" in before.stderr
    subprocess.run(
        [Host().which("ldconfig") or "ldconfig", "-r", str(tmp_path / "root"), "/opt/driver"],
        check=True,
        timeout=PATIENCE,
    )
    subprocess.run(argv, env=environ, check=True, timeout=PATIENCE)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for chroot")
def test_sandbox_program_starts_by_its_path_and_ends_on_sigterm(unpacked):
    with subprocess.Popen(["chroot", str(unpacked), "/pause"], stderr=subprocess.PIPE) as child:
        waits = f"/proc/{child.pid}/wchan"
        assert eventually(lambda: b"/pause" in Path(f"/proc/{child.pid}/cmdline").read_bytes())
        assert eventually(lambda: "pause" in Path(waits).read_text())
        child.terminate()
        assert child.wait(timeout=PATIENCE) == 0


def test_interpreter_that_does_not_respond_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(PreconditionError) as caught:
        assemble(Host())
    assert "false" in caught.value.message
    assert "--image" in caught.value.hint


@pytest.mark.parametrize(
    "data", [b"", b"#!/bin/sh\n", b"\x7fELF\x01\x01", b"\x7fELF\x02\x01", b"\x7fELF\x02\x01" + b"\xff" * 60]
)
def test_file_that_is_not_elf_has_no_interpreter(data):
    assert elf_interpreter(data) is None


def test_symlink_loop_is_left_out(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    tree = image._FileCollector(Host(root=tmp_path))
    assert tree.add("/a/x") is None


def test_python_with_another_c_library_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(image, "elf_interpreter", lambda data: "/lib/ld-musl-x86_64.so.1")
    with pytest.raises(PreconditionError, match="musl") as caught:
        assemble(Host())
    assert "--image" in caught.value.hint


def test_aliased_module_includes_its_own_file():
    """As collections.abc is one from Python 3.13 on."""
    alias = (
        "import sys, collections, _collections_abc\n"
        "collections.abc = sys.modules['collections.abc'] = _collections_abc\n"
    )
    argv = [
        sys.executable,
        "-I",
        "-S",
        "-B",
        "-c",
        alias + image._PROBE,
        str(image._PACKAGE.parent),
    ]
    done = subprocess.run([*argv, MODULE], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert any(path.endswith("/collections/abc.py") for path in json.loads(done.stdout)["modules"])
