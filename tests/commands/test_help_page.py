"""Every help page at 80 columns: regular, and without what says nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from gpunode.cli import COMMANDS, app
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
    if "Needs root" in ran.out:
        assert "\n  sudo gpunode " in ran.out
    headings = re.findall(r"^(\w[\w ]+):$", ran.out, re.M)
    assert len(headings) == len(set(headings))
    for flags in re.findall(r"^  (-.*?)(?:  |$)", ran.out, re.M):
        names = re.findall(r"(?<![\w-])--[a-z][\w.-]*", flags.split(" / ")[0])
        assert len(names) <= 1, f"two names of one option: {flags}"


def test_help_in_a_narrow_terminal_names_every_option() -> None:
    ran = gpunode("setup", "--help", env={"COLUMNS": "40"})
    assert (ran.code, ran.err) == (0, "")
    assert "\n  --image REF\n" in ran.out and "\n  -y, --yes" in ran.out


def options_of(path: tuple[str, ...]) -> list[Any]:
    command: Any = typer.main.get_command(app)
    for name in path:
        command = command.get_command(None, name)
    return [option for option in command.get_params(typer.Context(command)) if not option.hidden]


@pytest.mark.parametrize("path", [path for path in PATHS if path not in GROUPS], ids=" ".join)
def test_an_option_for_several_values_is_recognized_by_its_placeholder(path: tuple[str, ...]) -> None:
    takes_many = {
        option.name: str(option.metavar)
        for option in options_of(path)
        if option.param_type_name == "option" and option.multiple
    }
    assert [name for name, placeholder in takes_many.items() if ",..." not in placeholder] == []


def test_first_page_explains_placeholders_that_many_pages_have() -> None:
    values = gpunode("--help").out.partition("\nValues:\n")[2]
    assert "  DURATION  500ms, 60s, 2m or 1h; a number alone is in seconds.\n" in values
    assert "  ID,...    Several values: separate them with commas, or repeat the option.\n" in values


@pytest.mark.parametrize(
    ("words", "env"),
    [
        (("--only", "cdi-disabled,cdi-perms"), {}),
        (("--only", "cdi-disabled", "--only", "cdi-perms"), {}),
        (("--only=cdi-disabled, cdi-perms,",), {}),
        ((), {"GPUNODE_DOCTOR_ONLY": "cdi-disabled,cdi-perms"}),
    ],
)
def test_commas_and_repeated_options_mean_the_same(words: tuple[str, ...], env: dict[str, str]) -> None:
    ran = gpunode("doctor", *words, "-o", "json", env=env)
    assert ran.document["data"]["selection"]["only"] == ["cdi-disabled", "cdi-perms"], ran.err


def test_option_with_commas_alone_is_empty() -> None:
    ran = gpunode("doctor", "--only", ",")
    assert (ran.code, ran.err.splitlines()[0]) == (2, "error: --only is empty")


@pytest.mark.parametrize("value", ["1", "true"])
def test_variable_of_verbose_takes_the_words_of_a_flag(value: str) -> None:
    assert gpunode("gpus", env={"GPUNODE_VERBOSE": value}).err.startswith("  + ")
    ran = gpunode("gpus", env={"GPUNODE_VERBOSE": "2"})
    assert (ran.code, ran.err.splitlines()[0]) == (2, "error: GPUNODE_VERBOSE: '2' is neither true nor false")


@pytest.mark.parametrize("duration", ["90", "90s", "1m30s"])
def test_duration_without_a_unit_is_in_seconds(duration: str) -> None:
    held = gpunode("plugin", "check-config", "--simulate", "h100:1", "--health-hold-down", duration)
    assert re.search(r"^--health-hold-down +90s ", held.out, re.M), held.err


def test_help_environment_lists_commands_in_the_order_of_the_first_page() -> None:
    headings = re.findall(r"^(\w.+):$", gpunode("help", "environment").out, re.M)
    assert headings[0] == "Every command" and len(headings) == len(set(headings))
    commands = list(dict.fromkeys(heading.split()[1] for heading in headings[1:]))
    assert commands == [name for name in COMMANDS if name in commands]


@pytest.mark.parametrize("columns", ["40", "80"])
def test_help_environment_folds_no_name(columns: str) -> None:
    listed = gpunode("help", "environment", env={"COLUMNS": columns}).out
    name = "SHARED_DEVICES_ALLOCATION_POLICY"
    assert re.search(rf"^  {name} +--shared-devices-allocation-policy$", listed, re.M)


def test_help_environment_of_labels_lists_the_variables_that_it_shares_with_the_plugin() -> None:
    listed = gpunode("help", "environment", "labels").out
    flags = set(re.findall(r"--[\w-]+$", listed, re.M))
    page = gpunode("labels", "--help").out
    assert {"--mig-strategy", "--config-file", "--fail-on-init-error", "--sleep-interval"} <= flags
    assert [flag for flag in flags if f"  {flag} " not in page] == []
    for name in ("MIG_STRATEGY", "GPUNODE_PLUGIN_SERVE_CONFIG_FILE", "GFD_SLEEP_INTERVAL"):
        assert f"  {name} " in listed


@pytest.mark.parametrize(
    ("command", "variable"),
    [
        ("plugin serve", "FAIL_ON_INIT_ERROR"),
        ("labels", "KUBE_API_QPS"),
        ("labels", "MPS_ROOT"),
    ],
)
def test_variable_of_an_option_without_effect_is_accepted_and_not_listed(command: str, variable: str) -> None:
    assert f"  {variable} " not in gpunode("help", "environment", *command.split()).out
    action = ["plugin", "check-config"] if command == "plugin serve" else [command]
    ran = gpunode(*action, "--simulate", "h100:1", env={variable: "/x" if variable == "MPS_ROOT" else "true"})
    assert ran.code == 0 and "unknown" not in ran.err


@pytest.mark.parametrize(
    "path",
    [("setup",), ("verify",), ("manifests", "all"), ("manifests", "vector-add")],
    ids=" ".join,
)
def test_help_names_the_image_of_the_test_pod(path: tuple[str, ...]) -> None:
    pod = gpunode("manifests", "vector-add").out
    image = re.findall(r"^ +image: (\S+)$", pod, re.M)
    assert image and f"{image[0]}]" in gpunode(*path, "--help").out


def test_help_of_status_says_that_all_engines_are_shown() -> None:
    text = " ".join(gpunode("status", "runtime", "--help").out.split())
    assert "[default: all that are installed]" in text and "auto" not in text


@pytest.mark.parametrize("action", ["plan", "assert", "apply"])
def test_mig_file_is_marked_as_required(action: str) -> None:
    text = " ".join(gpunode("mig", action, "--help").out.split())
    assert "- is standard input. [required]" in text
    ran = gpunode("mig", action)
    assert (ran.code, ran.err.splitlines()[0]) == (2, "error: no configuration file was given")
