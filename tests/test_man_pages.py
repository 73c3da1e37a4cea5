"""Manual pages: one for each command, with all its options, in roff that groff accepts."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import pytest
import typer

from gpunode.cli import COMMANDS, app
from gpunode.commands.variables import commands
from scripts.man_pages import pages


@pytest.fixture(scope="module")
def generated() -> dict[str, str]:
    return pages()


def test_every_command_has_a_page_and_is_listed(generated: dict[str, str]) -> None:
    assert set(generated) == {"gpunode.1", *(f"gpunode-{name}.1" for name in COMMANDS)}
    listed = generated["gpunode.1"].replace("\\-", "-")
    assert [name for name in COMMANDS if f"gpunode-{name} (1)" not in listed] == []


def test_options_arguments_and_examples_are_shown(generated: dict[str, str]) -> None:
    doctor, cdi = generated["gpunode-doctor.1"], generated["gpunode-cdi.1"]
    assert r"\fB\-\-preflight\fR" in doctor and r"\fB\-\-root\fR" not in doctor
    assert ".SH EXAMPLES" in doctor and r"gpunode doctor \-\-fix" in doctor
    assert ".SS gpunode cdi refresh" in cdi
    assert r"\fB\-\-root\fR" in generated["gpunode.1"]


def test_each_subcommand_has_a_section_with_its_options(generated: dict[str, str]) -> None:
    root: Any = typer.main.get_command(app)
    paths = [path for path, _ in commands(root, "") if " " in path]
    assert "toolkit config set" in paths
    pages_of = {path: generated[f"gpunode-{path.split()[0]}.1"].replace("\\-", "-") for path in paths}
    assert [path for path in paths if f".SS gpunode {path}\n" not in pages_of[path]] == []
    assert [path for path in paths if f".B gpunode {path}\n" not in pages_of[path]] == []
    toolkit = generated["gpunode-toolkit.1"]
    assert r"\fB\-\-create\fR" in toolkit and "sudo gpunode toolkit config set" in toolkit.replace("\\-", "-")


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_groff_prints_no_warning(generated: dict[str, str]) -> None:
    warnings = {}
    for name, text in generated.items():
        done = subprocess.run(
            ["groff", "-man", "-Tutf8", "-ww"], input=text, capture_output=True, text=True, check=True
        )
        if done.stderr:
            warnings[name] = done.stderr
    assert warnings == {}
