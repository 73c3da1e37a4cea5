"""`gpunode completion`: the scripts in the shells, bash for real."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from gpunode.commands.completion import VARIABLE
from tests.cli import clean_environment, command, gpunode


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("mig", ""), {"list", "export", "plan", "apply", "assert"}),
        (("journal", ""), {"list", "show"}),
        (("journal", "sh"), {"show"}),
        (("status", ""), {"runtime"}),
        (("mig", "apply", "--dr"), {"--drain", "--dry-run"}),
        (("labels", "--mig-st"), {"--mig-strategy"}),
        (("setup", "--plugin", ""), {"systemd", "daemonset"}),
        (("schema", "Toolkit"), {"ToolkitInstallation", "ToolkitStatus", "ToolkitRemoval", "ToolkitConfig"}),
    ],
)
def test_bash_completes_commands_and_values(
    tmp_path: Path, words: tuple[str, ...], offered: set[str]
) -> None:
    script = gpunode("completion", "bash")
    assert (script.code, script.err) == (0, "")
    program = tmp_path / "gpunode"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(command())} "$@"\n')
    program.chmod(0o755)
    line = shlex.join(("gpunode", *words))
    press_tab = (
        f"COMP_WORDS=({line}); COMP_CWORD={len(words)}\n_gpunode_completion {shlex.quote(str(program))}\n"
    )
    shown = 'printf "%s\\n" "${COMPREPLY[@]}"\n'
    done = subprocess.run(
        ["bash", "--norc", "-c", script.out + press_tab + shown],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert set(done.stdout.split()) == offered


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_script(shell: str) -> None:
    data = gpunode("completion", shell, "-o", "json").document["data"]
    assert data["shell"] == shell
    assert f"{VARIABLE}=complete_{shell}" in data["script"]


def test_unknown_shell_is_a_usage_error() -> None:
    ran = gpunode("completion", "ksh")
    assert (ran.code, ran.out) == (2, "")
    assert "is not one of bash, zsh, fish" in ran.err
