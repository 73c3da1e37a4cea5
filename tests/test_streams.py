"""Standard streams and directories as a shell may leave them: an error and exit code, no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from tests.cli import clean_environment, command

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def run_into(stdout: IO[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        stdout=stdout,
        stderr=subprocess.PIPE,
        env=clean_environment(),
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "arguments",
    [("--version",), ("--help",), ("doctor", "--help"), ("explain", "nvml-hang"), ("completion", "bash")],
)
def test_full_disk_behind_stdout_is_one_error(arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        ran = run_into(full, *arguments)
    assert ran.returncode == 1
    assert ran.stderr == (
        "error: can't write to standard output: No space left on device\n"
        "hint: redirect standard output to another file\n"
    )


def test_closed_pipe_behind_help_is_not_an_error() -> None:
    argv = " ".join([*command("--help"), "| true"])
    ran = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {argv}"], capture_output=True, text=True, check=False
    )
    assert "Traceback" not in ran.stderr and "Exception ignored" not in ran.stderr


@pytest.mark.parametrize("more", [ASCII, {"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "latin-1"}])
@pytest.mark.parametrize(
    "arguments", [("doctor",), ("doctor", "-o", "json"), ("--help",), ("explain", "nvml-hang")]
)
def test_stdout_without_utf8_is_written_to(
    tmp_path: Path, more: dict[str, str], arguments: tuple[str, ...]
) -> None:
    root = tmp_path / "caf\u00e9 \u65e5\u672c"
    for name in ("etc", "proc", "sys"):
        (root / name).mkdir(parents=True)
    (root / "etc/os-release").write_text('ID=debian\nPRETTY_NAME="D\u00e9bian \u65e5"\n')
    ran = subprocess.run(
        command("--root", str(root), *arguments),
        capture_output=True,
        env=clean_environment(more),
        check=False,
    )
    assert ran.returncode in (0, 1)
    assert b"Traceback" not in ran.stderr and b"this is a bug" not in ran.stderr
    assert ran.stdout


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--version",), 0),
        (("--help",), 0),
        (("explain", "nvml-hang"), 0),
        (("--root", ".", "doctor"), 1),
        (("report",), 1),
        (("report", "--output-file", "x.tar.gz"), 1),
        (("doctor", "--output-file", "x.json"), None),
        (("gpus",), None),
    ],
)
def test_deleted_working_directory_is_not_reported_as_a_bug(
    tmp_path: Path, arguments: tuple[str, ...], code: int | None
) -> None:
    script = 'mkdir "$0" && cd "$0" && rmdir "$0" && exec "$@"'
    argv = ["sh", "-c", script, str(tmp_path / "gone"), *command(*arguments)]
    ran = subprocess.run(argv, capture_output=True, text=True, env=clean_environment(), check=False)
    assert "Traceback" not in ran.stderr and "this is a bug" not in ran.stderr
    assert code is None or ran.returncode == code
    if code == 1:
        assert ran.stderr.splitlines()[-2:][0] == "error: the current directory was deleted"


_INTERRUPTED = """
import builtins, sys
real = builtins.__import__
def load(name, *rest):
    if name == "gpunode.cli":
        raise KeyboardInterrupt
    return real(name, *rest)
builtins.__import__ = load
sys.argv = ["gpunode", "doctor"]
from gpunode.__main__ import main
main()
"""


def test_ctrl_c_while_commands_are_imported_prints_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", _INTERRUPTED], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "")


def test_command_on_a_full_disk_or_a_closed_pipe_exits_as_documented() -> None:
    arguments = ("labels", "--simulate", "h100")
    with Path("/dev/full").open("w") as full:
        ran = run_into(full, *arguments)
    assert ran.returncode == 1
    assert "error: can't write to standard output: No space left on device\n" in ran.stderr
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        ran = run_into(closed, *arguments)
    assert "Traceback" not in ran.stderr and "Exception ignored" not in ran.stderr
    assert ran.returncode == 0
