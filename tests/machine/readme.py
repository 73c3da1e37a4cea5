"""README.md's commands: those that install gpunode, and the quick start with its output."""

from __future__ import annotations

import re

from tests.cli import REPOSITORY

OMITTED = "..."
"""A line that stands for output that README leaves out."""


def install_commands() -> list[str]:
    """Lines of the first block under "Install"."""
    return _first_block("Install", "").splitlines()


def quick_start() -> dict[str, list[str]]:
    """Lines that README shows below each command of the quick start, in order."""
    parts = re.split(r"^\$ ", _first_block("Quick start", "console"), flags=re.MULTILINE)[1:]
    return {command: text.splitlines() for command, _, text in (part.partition("\n") for part in parts)}


def _first_block(heading: str, language: str) -> str:
    text = (REPOSITORY / "README.md").read_text()
    block = re.search(rf"^## {heading}\n.*?^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert block is not None, heading
    return block[1]
