"""The Pythons that gpunode supports: the code on each that is installed here, and what the packages require.

ruff and mypy check the code for the oldest one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.machines import machine
from gpunode.commands.demo import build_machine
from scripts.build_packages import DEPENDS, PYTHONS, REQUIRES
from tests.cli import REPOSITORY, clean_environment, gpunode
from tests.packages.apt_root import build

# What is compiled for the Python of the test is no library of another one. What needs such a library at its
# import is left out: lightkube.
_RUN = """\
import sys
from importlib import import_module
from unittest.mock import MagicMock
sys.modules["grpc"] = MagicMock()
sys.path[:0] = sys.argv[1:3]
for name in sys.argv[3].split():
    import_module(name)
from gpunode.cli import main
sys.argv[1:] = sys.argv[4:]
if sys.argv[1:]:
    main()
"""
_COMPILED = {"gpunode.kubernetes.client", "gpunode.kubernetes.kubeconfig"}


def modules() -> list[str]:
    paths = (path.relative_to(REPOSITORY).with_suffix("") for path in (REPOSITORY / "gpunode").rglob("*.py"))
    names = {".".join(path.parts).removesuffix(".__init__") for path in paths}
    return sorted(names - _COMPILED - {"gpunode.__main__"})


def python(version: str) -> str:
    """A program that is this Python, for example 3.10; skips the test if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    programs = [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python"))]
    for program in programs:
        if program and subprocess.run([program, "-c", ""], capture_output=True, check=False).returncode == 0:
            return str(program)
    pytest.skip(f"python{version} is not installed")


def run(version: str, *argv: str, names: str = "") -> subprocess.CompletedProcess[str]:
    """gpunode with another Python and the libraries of this one that are not compiled."""
    libraries = next(path for path in sys.path if path.endswith("site-packages"))
    return subprocess.run(
        [python(version), "-I", "-c", _RUN, str(REPOSITORY), libraries, names, *argv],
        env=clean_environment({"PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"}),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "version", [PYTHONS[0], *(pytest.param(one, marks=pytest.mark.full) for one in PYTHONS[1:])]
)
def test_all_modules_and_commands_work_with_this_python(version: str, tmp_path: Path) -> None:
    done = run(version, names=" ".join(modules()))
    assert done.returncode == 0, done.stderr
    root = build_machine(machine("healthy-h100"), tmp_path / "machine")
    dry_run = ("configure-runtime", "--runtime", "containerd", "--dry-run", "-o", "json")
    for argv in (dry_run, ("gpus",), ("manifests", "rbac", "--help")):
        done, here = run(version, "--root", str(root), *argv), gpunode("--root", str(root), *argv)
        assert (done.returncode, done.stdout) == (here.code, here.out), done.stderr
        assert done.stdout


# --- the packages ---------------------------------------------------------------------------------------

INSTALLED = [
    ({"python3": "3.9.2"}, False),
    ({"python3": "3.10.6"}, True),
    ({"python3": "3.14.0"}, True),
    ({"python3": "3.15.0"}, False),
    ({"python3": "3.9.2", "python3.11": "3.11.13"}, True),
    ({"python3": "3.15.0", "python3.10": "3.10.6"}, True),
]


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="dpkg is not installed")
@pytest.mark.parametrize(("installed", "accepted"), INSTALLED, ids=str)
def test_the_deb_needs_a_python_that_it_has_libraries_for(
    tmp_path: Path, installed: dict[str, str], accepted: bool
) -> None:
    for name in ("dpkg/info", "dpkg/updates", "root"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "dpkg/status").touch()
    debs = [build(tmp_path, name, f"{version}-1") for name, version in installed.items()]
    debs.append(build(tmp_path, "gpunode", "1", extra=f"Depends: {DEPENDS}\n"))
    places = ("--admindir", str(tmp_path / "dpkg"), "--instdir", str(tmp_path / "root"))
    done = subprocess.run(
        ["dpkg", "--force-not-root", *places, "-i", *debs], capture_output=True, text=True, check=False
    )
    assert (done.returncode == 0) is accepted, done.stderr
    assert accepted or "gpunode depends on python3" in done.stderr


@pytest.mark.skipif(shutil.which("rpmbuild") is None, reason="rpmbuild is not installed")
@pytest.mark.parametrize(("installed", "accepted"), INSTALLED, ids=str)
def test_the_rpm_needs_a_python_that_it_has_libraries_for(
    tmp_path: Path, installed: dict[str, str], accepted: bool
) -> None:
    needs = {**dict.fromkeys(installed, ""), "gpunode": f"Requires: ({REQUIRES})\n"}
    for name, line in needs.items():
        spec = tmp_path / f"{name}.spec"
        lines = (f"Name: {name}", f"Version: {installed.get(name, '1')}", "Release: 1", "Summary: stands in")
        head = "".join(f"{one}\n" for one in (*lines, "License: none", "BuildArch: noarch"))
        spec.write_text(f"{head}{line}%description\n%files\n")
        defined = ("--define", f"_topdir {tmp_path}", "--define", f"_rpmdir {tmp_path}")
        subprocess.run(["rpmbuild", "-bb", *defined, spec], capture_output=True, check=True)
    rpms = list(tmp_path.glob("noarch/*.rpm"))
    rpm = ("rpm", "--dbpath", str(tmp_path / "db"), "--test", "-i", *map(str, rpms))
    done = subprocess.run(rpm, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) is accepted, done.stderr
    assert accepted or "is needed by gpunode" in done.stderr


@pytest.mark.parametrize(
    ("program", "output", "system"),
    [
        ("uname", "aarch64", "aarch64 with glibc"),
        ("getconf", "glibc 2.17", "with glibc 2.17"),
        ("getconf", "", "with another C library"),
    ],
)
def test_the_bundle_names_a_system_that_it_is_not_for(
    tmp_path: Path, program: str, output: str, system: str
) -> None:
    """Nothing is written: the check comes before."""
    text = (REPOSITORY / "packaging/install.sh").read_text().replace("/opt", "/nowhere")
    script = tmp_path / "install.sh"
    script.write_text(text.replace("PATH=/usr/sbin", f"PATH={tmp_path}:/usr/sbin"))
    for name, printed in (("id", "0"), ("uname", "x86_64"), ("getconf", "glibc 2.36"), (program, output)):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {printed}\n[ -n '{printed}' ]\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(["sh", script], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert system in done.stderr and "hint: install gpunode's wheel" in done.stderr


def test_choose_python_names_the_pythons_it_looked_for(tmp_path: Path) -> None:
    (tmp_path / "lib/python3.99").mkdir(parents=True)
    script = REPOSITORY / "packaging/choose-python"
    done = subprocess.run(["sh", script, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "gpunode needs one of Python 3.99" in done.stderr and "install gpunode again" in done.stderr
    looked_for = script.read_text().partition("for candidate in python3 ")[2].partition(";")[0].split()
    assert looked_for == [f"python{version}" for version in reversed(PYTHONS)]


def test_every_place_names_the_same_pythons() -> None:
    project = (REPOSITORY / "pyproject.toml").read_text()
    assert f'requires-python = ">={PYTHONS[0]}"' in project
    assert f'target-version = "py{PYTHONS[0].replace(".", "")}"' in project
    assert f'python_version = "{PYTHONS[0]}"' in project
    assert f"gpunode needs Python {PYTHONS[0]} or newer" in (REPOSITORY / "scripts/make-venv").read_text()
    for page in ("README.md", "docs/packages.md"):
        assert f"Python {PYTHONS[0]} to {PYTHONS[-1]}" in (REPOSITORY / page).read_text(), page
