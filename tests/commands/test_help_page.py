"""Every help page at 80 columns: regular, and without what says nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from gpunode.cli import app
from tests.cli import gpunode


def paths(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name in list(getattr(command, "commands", {})):
        yield from paths(command.get_command(None, name), (*path, name))


PATHS = tuple(paths(typer.main.get_command(app)))
GROUPS = {path[:-1] for path in PATHS if path}


@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_a_help_page_is_regular(path: tuple[str, ...]) -> None:
    ran = gpunode(*path, "--help", env={"COLUMNS": "80"})
    assert (ran.code, ran.err) == (0, "")
    assert max(map(len, ran.out.splitlines())) <= 80
    assert "SECONDS" not in ran.out and "{" not in ran.out
    assert not re.search(r"default: (None|False|0|0\.0|''|)\]", ran.out)
    if path not in GROUPS and path != ("demo",):
        assert re.search(r"\nExamples:\n  (sudo )?gpunode ", ran.out)
    headings = re.findall(r"^(\w[\w ]+):$", ran.out, re.M)
    assert len(headings) == len(set(headings))
    for flags in re.findall(r"^  (-.*?)(?:  |$)", ran.out, re.M):
        names = re.findall(r"(?<![\w-])--[a-z][\w.-]*", flags.split(" / ")[0])
        assert len(names) <= 1, f"two names of one option: {flags}"
