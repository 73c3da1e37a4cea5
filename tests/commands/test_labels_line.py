"""How the command line of `gpunode labels` and `gpunode gpus` is read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fixtures.scenario import machine
from fixtures.stubs import have_compiler, stub_node
from gpunode.cli import app
from gpunode.commands import labels
from gpunode.commands.session import run_app
from gpunode.errors import GpunodeError
from gpunode.host import Host
from gpunode.output.result import Progress
from gpunode.plugin.config.options import Option
from tests.cli import clean_environment, gpunode


class Seen(NamedTuple):
    """Options of one run."""

    given: dict[str, Any]
    dry_run: bool


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> list[Seen]:
    """The options of each run of `labels`, which then fails."""
    seen: list[Seen] = []

    def run(host: Host, given: dict[str, Any], progress: Progress, *, dry_run: bool) -> None:
        seen.append(Seen(given, dry_run))
        raise GpunodeError("enough")

    monkeypatch.setattr(labels, "run", run)
    for name in os.environ:
        if name.startswith("GPUNODE_"):
            monkeypatch.delenv(name)
    return seen


def values(options: Seen) -> dict[str, Any]:
    return {name: value for name, value in options.given.items() if value not in (None, ())}


@pytest.mark.parametrize("option", labels.options(), ids=lambda option: option.field)
def test_every_spelling_of_an_option_is_parsed(options: list[Seen], option: Option) -> None:
    """Go's flag package accepts one dash, and a boolean without a value."""
    many = option.takes_many
    value = "true" if option.kind == "boolean" else "a,b"
    for flag in option.flags:
        for words in ([flag, value], [flag[1:], value], [f"{flag}={value}"]):
            assert run_app(app, ["labels", *words]) == 1
            assert values(options[-1]) == {option.field: (value,) if many else value}, words
        assert run_app(app, ["labels", f"{flag}=x=y", f"{flag}=1", "--dry-run", "--dry-run"]) == 1
        assert values(options[-1]) == {option.field: ("x=y", "1") if many else "1"}
        assert options[-1].dry_run
        if option.kind == "boolean":
            assert run_app(app, ["labels", flag, "--dry-run"]) == 1
            assert values(options[-1]) == {option.field: "true"}


def test_without_options_no_values_are_set(options: list[Seen]) -> None:
    assert run_app(app, ["labels"]) == 1
    assert (values(options[-1]), options[-1].dry_run) == ({}, False)


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        (["--to", "file", "-o", "yaml"], {"labels_to": ("file",)}),
        (["--dry-run", "-o", "/a/b"], {"output_file": "/a/b"}),
    ],
    ids=["format", "file"],
)
def test_o_is_the_output_format_or_the_file_as_in_gpu_feature_discovery(
    options: list[Seen], words: list[str], fields: dict[str, Any]
) -> None:
    assert run_app(app, ["labels", *words]) == 1
    assert values(options[-1]) == fields


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["labels", "--oops=1"], "error: no such option: --oops"),
        (["labels", "--to"], "error: --to needs a value"),
        (["labels", "word"], "error: unexpected argument: word"),
        (["labels", "--", "--to=file"], "error: unexpected argument: --to=file"),
        (["labels", "-o", "html"], "error: -o: 'html' is not one of table, json, yaml"),
        (["labels", "-o"], "error: -o needs a value"),
        (["labels", "--dry-run=true"], "error: option '--dry-run' does not take a value"),
        (["gpus", "x"], "error: unexpected argument: x"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_option_is_a_usage_error(words: list[str], message: str) -> None:
    ran = gpunode(*words)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(message)


@pytest.mark.skipif(not have_compiler(), reason="gcc is not installed")
@pytest.mark.parametrize("command_line", [["labels"], ["labels", "--vendor", "amd"], ["gpus"]], ids=" ".join)
def test_caller_ignoring_sigchld_causes_no_failure(command_line: list[str], tmp_path: Path) -> None:
    node = stub_node(tmp_path, machine(1))
    ignore = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
    script = f"{ignore}; os.execv(sys.argv[1], sys.argv[1:])"
    argv = [sys.executable, "-c", script, sys.executable, "-m", "gpunode", *command_line]
    done = subprocess.run(argv, capture_output=True, text=True, env=clean_environment(node.env), check=False)
    assert (done.returncode, "error" in done.stderr) == (0, False), done.stderr


def test_labels_prints_its_warnings_when_it_fails(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    simulated = ("labels", "--simulate", "h100:1", "--firmware")
    ran = gpunode(*simulated, "--to", "file", "--output-file", str(tmp_path / "file" / "gfd"))
    warning, error = ran.err.splitlines()[:2]
    assert ran.code == 1 and error.startswith("error: ")
    assert warning.strip() == "warning: --firmware: ignored: the vendor is nvidia"
