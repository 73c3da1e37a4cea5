"""The commands by which README.md says to install gpunode."""

from __future__ import annotations

import re

from tests.cli import REPOSITORY


def install_commands() -> list[str]:
    """Lines of the first block under "Install it", up to the command that sets the node up."""
    text = (REPOSITORY / "README.md").read_text()
    block = re.search(r"^## Install it\n.*?^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert block is not None
    commands = block[1].splitlines()
    assert commands[-1] == "sudo gpunode setup", commands
    return commands[:-1]
