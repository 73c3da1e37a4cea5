"""What runs without the command line's parser is what that would have run, or isn't taken at all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fixtures.scenario import machine
from fixtures.stubs import have_compiler, stub_node
from gpunode import quick
from gpunode.commands.labels import options
from gpunode.plugin.config.options import OPTIONS
from tests.cli import clean_environment, fresh_gpunode
from tests.gpu.children import run_python

_PARSED = """
import json, sys
from gpunode import quick
from gpunode.commands import session
from gpunode.cli import app
from gpunode.commands import gpus, labels
from gpunode.errors import GpunodeError
asked = []
def run(host, options, progress):
    asked.append([getattr(options, "given", None), getattr(options, "dry_run", None)])
    raise GpunodeError("enough")
labels.run = gpus.run = run
found = []
for line in json.loads(sys.argv[1]):
    asked.clear()
    for way in (quick.run, lambda line: session.run_app(app, line)):
        sys.stdout.flush()
        way(line)
    for one in asked:
        one[0] = {k: v for k, v in (one[0] or {}).items() if v is not None and v != ()}
    found.append(list(asked))
sys.stdout = sys.__stdout__
print(json.dumps(found))
"""


def lines() -> list[list[str]]:
    """Every flag of the table, with a value of its own and behind an equals sign, twice, and a few more."""
    made: list[list[str]] = [["gpus"], ["labels"], ["labels", "--dry-run"], ["labels", "--to="]]
    for option in options():
        for flag in option.flags:
            value = "true" if option.kind == "boolean" else "a,b"
            made += [["labels", flag, value], ["labels", f"{flag}={value}", flag, "--dry-run", "--dry-run"]]
            made += [["labels", flag[1:], value], ["labels", f"{flag}=x=y", f"{flag}=1"]]
    return made


def test_a_line_is_read_as_the_command_line_reads_it() -> None:
    given = lines()
    assert all(quick.read(line, {}) is not None for line in given)
    import json

    for line, (quickly, parsed) in zip(given, run_python(_PARSED, {}, json.dumps(given)), strict=True):
        assert quickly == parsed, line


@pytest.mark.parametrize(
    ("words", "form"),
    [(["gpus", "-o", "json"], "json"), (["labels", "--to", "file", "-o", "yaml"], "yaml")],
)
def test_how_to_print_may_come_last(words: list[str], form: str) -> None:
    line = quick.read(words, {})
    assert line is not None
    assert line[1] == form


@pytest.mark.parametrize(
    "line",
    [
        *("", "-o json", "--dry-run --to file", "--to=node --node-name --vendor"),
        "--no-timestamp --mig-strategy=single",
    ],
)
def test_nvml_is_started_early_where_it_is_sure_to_be_asked(line: str) -> None:
    assert quick.asks_nvml(line.split(), {"PATH": "/bin"})


@pytest.mark.parametrize(
    "line",
    [
        *("extra", "--no-timestamp extra", "--to file extra", "-v", "--root /x", "--driver-root=/x"),
        *("--vendor amd", "--oneshot=false", "--config-file x", "--simulate=h100", "--watch"),
    ],
)
def test_nobody_s_nvml_is_started_for_another_line(line: str) -> None:
    assert not quick.asks_nvml(line.split(), {})


DECISIVE = {
    *("vendor", "simulate", "device_discovery_strategy", "config_file", "oneshot"),
    *("driver_root", "container_driver_root"),
}


def test_a_variable_may_mean_another_nvml_or_none() -> None:
    assert quick.asks_nvml([], {"TF_CLI_CONFIG_FILE": "x", "VENDOR": "x", "GPUNODE_LABELS_TO": "file"})
    chosen = [option for option in OPTIONS if option.field in DECISIVE]
    assert len(chosen) == len(DECISIVE)
    for option in chosen:
        for name in (option.variable, *option.variables, *(f"GFD_{one}" for one in option.variables)):
            assert not quick.asks_nvml([], {name: "x"}), name


def test_what_is_harmless_is_an_option_and_no_decisive_one() -> None:
    flags = {flag: option for option in options() for flag in option.flags}
    known = {*quick._FLAGS, *quick._VALUED} - {"--dry-run", "-o"}
    assert known <= flags.keys()
    assert all((flags[flag].kind == "boolean") is (flag in quick._FLAGS) for flag in known)
    assert not DECISIVE & {flags[flag].field for flag in known}


@pytest.mark.skipif(not have_compiler(), reason="gcc is not installed")
@pytest.mark.parametrize("words", [["labels"], ["labels", "--vendor", "amd"], ["gpus"]], ids=" ".join)
def test_who_ignores_the_end_of_children_is_no_reason_to_fail(words: list[str], tmp_path: Path) -> None:
    node = stub_node(tmp_path, machine(1))
    ignore = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
    argv = [
        sys.executable,
        "-c",
        f"{ignore}; os.execv(sys.argv[1], sys.argv[1:])",
        sys.executable,
        "-m",
        "gpunode",
        *words,
    ]
    done = subprocess.run(argv, capture_output=True, text=True, env=clean_environment(node.env), check=False)
    assert (done.returncode, "error" in done.stderr) == (0, False), done.stderr


@pytest.mark.parametrize(
    "words",
    [
        *([], ["--version"], ["doctor"], ["labels", "--help"], ["labels", "-h"], ["--debug", "labels"]),
        *(
            ["labels", "--watch"],
            ["labels", "--oops=1"],
            ["labels", "--to"],
            ["labels", "word"],
            ["gpus", "x"],
        ),
        *(["labels", "-o", "/a/b"], ["labels", "-o", "html"], ["labels", "-o"], ["labels", "--root", "/x"]),
        *(["labels", "--", "--to=file"], ["gpus", "-v"], ["labels", "--dry-run=true"], ["gpus", "x"]),
    ],
    ids=" ".join,
)
def test_what_isn_t_plain_is_the_command_lines(words: list[str]) -> None:
    assert quick.read(words, {}) is None


@pytest.mark.parametrize("name", ["ROOT", "OUTPUT", "DEBUG", "LABELS_WATCH", "LABELS_DRY_RUN"])
def test_variables_of_the_command_line_are_its_own(name: str) -> None:
    assert quick.read(["labels"], {f"GPUNODE_{name}": ""}) is None


@pytest.mark.parametrize("words", [["labels", "--simulate", "a100"], ["gpus"]], ids=" ".join)
def test_the_parser_is_not_loaded(words: list[str]) -> None:
    ran = fresh_gpunode(*words, env={"PYTHONPROFILEIMPORTTIME": "1"})
    loaded: set[Any] = {line.rpartition("|")[2].strip() for line in ran.err.splitlines()}
    assert "gpunode.quick" in loaded
    assert loaded & {"typer", "rich", "yaml", "gpunode.cli"} == set()
