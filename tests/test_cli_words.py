"""Only the commands that a line names are built; nobody notices but the clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli import gpunode


def test_a_directory_that_bears_a_commands_name_is_no_obstacle(tmp_path: Path) -> None:
    root = tmp_path / "gpus"
    root.mkdir()
    ran = gpunode("--root", str(root), "-o", "json", "doctor", "--only", "pci-no-gpu")
    assert ran.document["kind"] == "DoctorReport"


def test_a_value_that_is_a_commands_name_is_no_obstacle() -> None:
    ran = gpunode("-o", "json", "explain", "doctor")
    assert ran.code == 2
    assert ran.document["kind"] == "CheckExplanation"


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_help_lists_every_command(argv: list[str]) -> None:
    ran = gpunode(*argv)
    for name in ("doctor", "configure-runtime", "rollback", "plugin", "toolkit", "gpus"):
        assert f"\n  {name}" in ran.out + ran.err


def test_an_unknown_command_beside_a_known_word_is_usage() -> None:
    ran = gpunode("help", "doctor")
    assert (ran.code, ran.out) == (2, "")
    assert "no such command" in ran.err.lower() and "Traceback" not in ran.err


def test_a_group_alone_shows_its_own_commands() -> None:
    ran = gpunode("toolkit", "config")
    assert ran.code == 2
    assert all(f"\n  {name}" in ran.err for name in ("get", "set", "unset"))
