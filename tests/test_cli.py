"""The command line contract: arguments, streams, exit codes, the envelope."""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import typer

from fixtures.machines import recorded_host
from gpunode import __version__
from gpunode.cli import COMMANDS, app
from gpunode.commands.demo import build_demo_node
from gpunode.commands.options import ONE_SHOT
from gpunode.commands.variables import variables
from tests.cli import checked, clean_environment, command, gpunode
from tests.waiting import PATIENCE, eventually

VERBS = [
    *(["doctor"], ["explain"], ["configure-runtime"], ["unconfigure-runtime"], ["rollback"], ["verify"]),
    *(["gpus"], ["setup"], ["demo"], ["plugin", "serve"]),
]


def test_version() -> None:
    ran = gpunode("--version")
    assert (ran.code, ran.out, ran.err) == (0, f"gpunode {__version__}\n", "")


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_help_ends_with_where_to_find_global_options_and_variables(verb: list[str]) -> None:
    ran = gpunode(*verb, "--help")
    assert ran.code == 0
    assert (
        "env var" not in ran.out
        and "default: 0" not in ran.out
        and "<" not in ran.out.partition("\nVariables: ")[0]
    )
    flags = re.findall(r"^  (?:-\w, )?--([a-z-]+)", ran.out, re.M)
    set_once = {f"--{flag}" for flag in flags if flag.replace("-", "_") in ONE_SHOT}
    closing = " ".join(ran.out.rpartition("\n\n")[2].split())
    listed = re.search(r" \(not (.*)\)", closing)
    assert set(listed[1].split(", ") if listed else ()) == set_once
    except_ = listed[0] if listed else ""
    prefix = "_".join(["GPUNODE", *verb]).upper().replace("-", "_")
    other = " or GPUNODE_PLUGIN_SERVE_<OPTION>" if verb == ["labels"] else ""
    lines = ["Global options, such as -o json and --root PATH: gpunode --help"]
    if len(flags) > len(set_once):
        page = " ".join(["gpunode help environment", *verb])
        lines.append(f"Variables: {prefix}_<OPTION>{other}{except_}; see {page}")
    assert closing == " ".join(lines)
    assert "--color" not in ran.out and "--debug" not in ran.out


def test_first_help_page_lists_the_global_options_last() -> None:
    common = gpunode("--help").out.partition("\nGlobal options:\n")[2]
    assert all(f" {name}" in common for name in ("--root", "--color", "--verbose", "--debug", "--help"))
    assert "Variables: GPUNODE_<COMMAND>_<OPTION>; see gpunode help environment" in common


def test_each_option_has_the_variable_of_its_name() -> None:
    serve = ("plugin serve", "labels")  # share a table of options, each of which has one variable
    for one in variables(typer.main.get_command(app)):
        regular = "_".join(["GPUNODE", *one.command.split(), one.option.removeprefix("--")])
        if one.command not in serve:
            assert one.name == regular.upper().replace("-", "_"), one


@pytest.mark.parametrize(
    ("argv", "variable", "value", "problem"),
    [
        ("cdi generate", "CDI_GENERATE_FORMAT", "xml", "unknown --format 'xml'"),
        ("mig export", "MIG_EXPORT_FORMAT", "xml", "unknown format 'xml'"),
        ("setup", "SETUP_CONTEXT", "prod", "--context goes with --kubernetes"),
        ("mig plan", "MIG_PLAN_CONFIG_FILE", "/nowhere", "/nowhere doesn't exist"),
        ("mig plan", "MIG_CONFIG_FILE", "/nowhere", "/nowhere doesn't exist"),
    ],
)
def test_variable_is_named_after_the_flag(argv: str, variable: str, value: str, problem: str) -> None:
    ran = gpunode(*argv.split(), env={f"GPUNODE_{variable}": value})
    assert ran.code in (1, 2) and ran.err.startswith(f"error: {problem}") and "warning" not in ran.err


@pytest.mark.parametrize("columns", [80, 100, 300])
def test_help_is_as_wide_as_the_terminal_up_to_a_limit(columns: int) -> None:
    ran = gpunode("doctor", "--help", env={"COLUMNS": str(columns)})
    widest = max(map(len, ran.out.splitlines()))
    assert columns - 20 < widest <= columns if columns < 110 else 90 < widest <= 110


def test_variables_in_help_set_the_options_and_one_shot_flags_have_none() -> None:
    listed = gpunode("help", "environment").out
    assert re.search(r"^  GPUNODE_CONFIGURE_RUNTIME_RUNTIME +--runtime$", listed, re.M)
    for name in ("GPUNODE_MIG_CONFIG_FILE", "MIG_PARTED_CONFIG_FILE"):
        assert re.search(rf"^  {name} +--config-file$", listed, re.M)
    assert max(map(len, listed.splitlines())) <= 80
    of_plan = gpunode("help", "environment", "mig", "plan").out
    assert "GPUNODE_MIG_CONFIG_FILE" in of_plan and "GPUNODE_MIG_APPLY" not in of_plan
    for name in ("DRY_RUN", "YES", "APPLY", "EXIT_CODE"):
        assert f"_{name}  " not in listed
    ran = gpunode("verify", env={"GPUNODE_VERIFY_ON": "lxc"})
    assert ran.code == 2 and "'lxc'" in ran.err


@pytest.mark.parametrize(
    ("argv", "variable", "error", "hint"),
    [
        ("configure-runtime", "CONFIGURE_RUNTIME_DRY_RUN", ": --dry-run has no variable", "give it on the"),
        ("labels", "LABELS_DRY_RUN", ": --dry-run has no variable", "give it on the command line"),
    ],
)
def test_variable_of_a_one_shot_flag_is_refused(
    tmp_path: Path, argv: str, variable: str, error: str, hint: str
) -> None:
    ran = gpunode(*argv.split(), "--root", str(tmp_path), env={f"GPUNODE_{variable}": "true"})
    assert (ran.code, ran.out, list(tmp_path.iterdir())) == (2, "", [])
    first, second = ran.err.splitlines()
    assert first == f"error: GPUNODE_{variable}{error}" and second.startswith(f"hint: {hint}")


@pytest.mark.parametrize(
    ("variable", "value", "err"),
    [
        ("COLOUR", "always", "warning: GPUNODE_COLOUR is unknown; did you mean GPUNODE_COLOR?\n"),
        ("XYZ", "1", "warning: GPUNODE_XYZ is unknown\n"),
        ("XYZ", "", ""),
        ("STATE_DIR", "/state", ""),
        ("VERSION_OUTPUT", "table", ""),
        ("DOCTOR_DRY_RUN", "true", ""),
        ("PLUGIN_SERVICE_HOST", "10.0.0.1", ""),
        ("PORT_443_TCP_ADDR", "10.0.0.1", ""),
    ],
)
def test_a_variable_of_no_command_is_reported(variable: str, value: str, err: str) -> None:
    ran = gpunode("version", env={f"GPUNODE_{variable}": value})
    assert (ran.code, ran.err) == (0, err)


def test_variable_that_sets_no_option_of_its_command_is_a_warning() -> None:
    """No error: the environment of the device plugin's unit may have one after a downgrade."""
    ran = gpunode("explain", "nvml-hang", env={"GPUNODE_EXPLAIN_OUTPU": "json"})
    assert ran.code == 0 and "warning: GPUNODE_EXPLAIN_OUTPU is unknown" in ran.err


def test_help_command_prints_the_same_page() -> None:
    assert gpunode("help").out == gpunode("--help").out
    assert gpunode("help", "mig", "apply").out == gpunode("mig", "apply", "--help").out
    assert gpunode("version").out == gpunode("--version").out
    assert gpunode("version", "-o", "json").document["data"] == {"version": __version__}


def test_help_for_an_unknown_command_is_a_usage_error() -> None:
    for words in (["doktor"], ["mig", "nope"], ["doctor", "nope"], ["environment", "nope"]):
        ran = gpunode("help", *words)
        assert (ran.code, ran.out) == (2, "")
        assert ran.err.startswith(f"error: no such command '{words[-1]}'")


def test_quiet_prints_only_data_and_errors(tmp_path: Path) -> None:
    build_demo_node(tmp_path)
    report = tmp_path / "report.json"
    words = ("doctor", "--only", "pci-no-gpu", "--output-file", str(report), "--root", str(tmp_path))
    assert f"wrote {report}" in gpunode(*words).err
    ran = gpunode(*words, "-q")
    assert (ran.code, ran.out, ran.err) == (0, "", "")
    dry = ("configure-runtime", "--runtime", "docker", "--dry-run", "--root", str(tmp_path))
    loud, quiet = gpunode(*dry), gpunode("--quiet", *dry)
    assert (quiet.code, quiet.out, quiet.err) == (loud.code, loud.out, "")
    assert gpunode("verify", "-q", "--on", "lxc").err.startswith("error: ")


def test_status_and_journal_list_without_a_subcommand(tmp_path: Path) -> None:
    for alone, named in (("status", "runtime"), ("journal", "list")):
        ran = gpunode(alone, "-o", "json", "--root", str(tmp_path))
        assert ran.document == gpunode(alone, named, "-o", "json", "--root", str(tmp_path)).document
        assert f"\n  {named}" in gpunode(alone, "--help").out


@pytest.mark.parametrize(
    "argv",
    [["doktor"], ["doctor", "--nope"], ["verify", "--on", "lxc"], ["-o", "xml", "doctor"], []],
    ids=lambda argv: " ".join(argv) or "nothing",
)
def test_usage_error_exits_with_2_and_an_empty_stdout(argv: list[str]) -> None:
    ran = gpunode(*argv)
    assert ran.code == 2
    assert ran.out == ""
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (
            ("verify", "--timeout", "soon"),
            "--timeout: 'soon' is not a duration such as 60s, 1m30s or 500ms",
        ),
        (("setup", "--wait", "0s"), "--wait: 0s is not between 1s and 24h"),
        (("toolkit", "install", "--lock-timeout", "2d"), "--lock-timeout: '2d' is not a duration"),
        (("node", "advertise", "--resource", "a.b/c", "--wait", "-1"), "--wait: '-1' is not a duration"),
        (("plugin", "status", "--timeout", "nan"), "--timeout: 'nan' is not a duration"),
    ],
)
def test_a_time_that_is_none_is_usage(argv: tuple[str, ...], problem: str) -> None:
    ran = gpunode(*argv)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"error: {problem}")


@pytest.mark.parametrize("time", ["2m", "1m30s", "500ms", "90", "0.5"])
def test_a_time_has_a_unit_or_is_in_seconds(tmp_path: Path, time: str) -> None:
    build_demo_node(tmp_path)
    ran = gpunode("plugin", "status", "--timeout", time, "--root", str(tmp_path), "-o", "json")
    assert ran.document["kind"] == "PluginStatus" and ran.code != 2


@pytest.mark.parametrize(
    ("argv", "name", "value", "problem"),
    [
        ("doctor", "GPUNODE_DOCTOR_OUTPUT", "xml", "GPUNODE_DOCTOR_OUTPUT: 'xml' is not one of table"),
        ("doctor", "GPUNODE_OUTPUT", "xml", "GPUNODE_OUTPUT: 'xml' is not one of table, json"),
        ("doctor", "GPUNODE_DOCTOR_STRICT", "maybe", "GPUNODE_DOCTOR_STRICT: 'maybe' is neither true"),
        ("doctor", "GPUNODE_DOCTOR_EXPECT_GPUS", "two", "GPUNODE_DOCTOR_EXPECT_GPUS: 'two' is not a whole"),
        ("verify", "GPUNODE_VERIFY_TIMEOUT", "2d", "GPUNODE_VERIFY_TIMEOUT: '2d' is not a duration"),
        ("mig plan", "MIG_PARTED_MODE_CHANGE_ONLY", "x", "MIG_PARTED_MODE_CHANGE_ONLY: 'x' is neither"),
        ("doctor", "GPUNODE_DOCTOR_ONLY", "x", "unknown check 'x' (set by GPUNODE_DOCTOR_ONLY)"),
        (
            "configure-runtime",
            "GPUNODE_CONFIGURE_RUNTIME_RUNTIME",
            "lxc",
            "unknown runtime 'lxc' (set by GPUNODE_CONFIGURE_RUNTIME_RUNTIME)",
        ),
        ("plugin check-config", "MIG_STRATEGY", "x", "MIG_STRATEGY: 'x' is "),
    ],
)
def test_a_wrong_value_of_a_variable_names_it(argv: str, name: str, value: str, problem: str) -> None:
    ran = gpunode(*argv.split(), env={name: value})
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.removeprefix("error: ").startswith(problem)


@pytest.mark.parametrize(
    ("argv", "error", "hint"),
    [
        ("setup --runtime lxc", "unknown runtime 'lxc'", "known: docker, containerd"),
        ("verify --namespace x", "--namespace is for a pod, and --on is host", "gpunode verify --on kub"),
        ("doctor --ignore", "--ignore needs a value", "see gpunode doctor --help"),
        ("mig apply --persist=x", "option '--persist' does not take a value", "see gpunode mig apply --help"),
        ("doctor --expect-gpus two", "--expect-gpus: 'two' is not a whole number", "see"),
        ("cdi generate --format xml", "unknown --format 'xml'", "known: yaml, json"),
        ("doctor --onyl x", "no such option: --onyl", "did you mean --only? See gpunode doctor --help"),
        ("explain --list", "no such option: --list", "see gpunode explain --help"),
        ("doktor", "no such command 'doktor'", "did you mean doctor? See gpunode --help"),
        ("help mig aply", "no such command 'aply'", "did you mean apply? See gpunode mig --help"),
        ("help environment foo", "no such command 'foo'", "see gpunode --help"),
        ("help environment demo foo", "no such command 'demo foo'", "see gpunode --help"),
        ("help environment version", "version has no variables of its own", "see gpunode --help"),
        ("plugin status x", "unexpected argument: x", "see gpunode plugin status --help"),
        ("doctor --only nosuch", "unknown check 'nosuch'", "run gpunode explain to list all checks"),
        (
            "doctor --only drvier-lib-mismatch",
            "unknown check 'drvier-lib-mismatch'",
            "did you mean driver-lib",
        ),
        (
            "plugin check-config /nope.yaml",
            "/nope.yaml: does not exist",
            "check the path; a config file is opt",
        ),
        ("node advertise --resource gpu", "'gpu' has no domain", "a resource is DOMAIN/NAME, such as nvidia"),
        ("schema doctorreport", "unknown kind 'doctorreport'", "did you mean DoctorReport?"),
        ("mig plan -f /nowhere", "/nowhere doesn't exist", "name a file"),
    ],
)
def test_a_mistake_is_named_with_what_to_do(argv: str, error: str, hint: str) -> None:
    ran = gpunode(*argv.split())
    assert ran.code in (1, 2) and ran.out == ""
    first, second = ran.err.splitlines()
    assert first == f"error: {error}" and second.startswith(f"hint: {hint}")


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        ("uninstall", "to undo everything that gpunode changed: gpunode reset"),
        ("undo", "to undo one change: gpunode rollback"),
        ("toolkit uninstall", "to remove the toolkit: gpunode toolkit remove"),
        ("driver uninstall", "gpunode doesn't remove drivers; use the package manager"),
        ("mig show", "did you mean gpunode mig list?"),
        ("help mig status", "did you mean gpunode mig list?"),
        ("cdi remove", "to remove the specifications that gpunode wrote: gpunode cdi refresh --remove"),
        ("plugin start", "did you mean gpunode plugin serve?"),
        ("gpunode doctor --only x", "leave out the second gpunode: gpunode doctor --only x"),
        ("completion --shell bash", "name the shell alone: gpunode completion bash"),
        ("doctor --hepl", "see gpunode doctor --help"),
        ("setup docker", "did you mean --runtime docker? See gpunode setup --help"),
        ("configure-runtime docker", "did you mean --runtime docker? See gpunode configure-runtime --help"),
        ("status runtime docker", "did you mean --runtime docker? See gpunode status runtime --help"),
        ("status docker", "did you mean --runtime docker? See gpunode status --help"),
        ("verify host", "did you mean --on host? See gpunode verify --help"),
        ("manifests rbac plugin", "did you mean --for plugin? See gpunode manifests rbac --help"),
        ("doctor \u2013only x", "'\u2013' is not '-': type --only"),
        ("gpus \u2014o json", "'\u2014' is not '-': type -o"),
        ("rollback \u2013\u2013dry-run", "'\u2013' is not '-': type --dry-run"),
        ("doctor -- --fix", "after -- no word is an option: leave out --"),
        ("gpus -- --debug", "after -- no word is an option: leave out --"),
    ],
)
def test_word_of_another_program_and_a_pasted_dash_get_their_own_hint(argv: str, hint: str) -> None:
    ran = gpunode(*argv.split())
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.splitlines()[1:] == [f"hint: {hint}"]


@pytest.mark.parametrize(
    ("argv", "error", "hint"),
    [
        (
            "setup --plugin deamonset",
            "--plugin: 'deamonset' is not one of systemd, daemonset",
            "did you mean daemonset?",
        ),
        ("manifests rbac --for verfy", "--for: 'verfy' is not one of plugin, labels", "did you mean verify?"),
        (
            "plugin check-config --mig-strategy snigle",
            "--mig-strategy: 'snigle' is not one of none",
            "did you mean single? See gpunode plugin check-config --help",
        ),
        (
            "plugin check-config --mig-strategy x",
            "--mig-strategy: 'x' is not one of none",
            "see gpunode plugin check-config --help",
        ),
        (
            "labels --output json",
            "--output-file: 'json' is not an absolute path",
            "for the result as json: -o json",
        ),
        (
            "labels --oneshot maybe",
            "--oneshot: 'maybe' is neither true nor false",
            "see gpunode labels --help",
        ),
        (
            "labels --oneshot=maybe",
            "--oneshot: 'maybe' is neither true nor false",
            "see gpunode labels --help",
        ),
        ("plugin serve --mps maybe", "--mps: 'maybe' is neither true nor false", "see gpunode plugin serve"),
        ("completion fsh", "SHELL: 'fsh' is not one of bash, zsh, fish", "did you mean fish?"),
        ("manifests all --metrics-port 99999", "--metrics-port: must be 0 to 65535, not 99999", "see"),
    ],
)
def test_value_out_of_a_choice_or_range_is_refused_with_what_is_allowed(
    argv: str, error: str, hint: str
) -> None:
    ran = gpunode(*argv.split())
    assert (ran.code, ran.out) == (2, "")
    first, second = ran.err.splitlines()
    assert first.startswith(f"error: {error}") and second.startswith(f"hint: {hint}")


def test_help_of_a_boolean_shows_its_values() -> None:
    assert "--mps [true|false] " in gpunode("plugin", "serve", "--help").out


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (
            "setup --dry-run --runtime docker --runtime=k3s",
            "--runtime takes one value, and is given 'docker' and 'k3s'",
        ),
        ("verify --on docker --on host", "--on takes one value, and is given 'docker' and 'host'"),
        ("mig plan -f a --config-file b", "--config-file takes one value, and is given 'a' and 'b'"),
        ("--root /a --root /b doctor", "--root takes one value, and is given '/a' and '/b'"),
        ("doctor --root=/a --root=/b", "--root takes one value, and is given '/a' and '/b'"),
        ("status --root /a --root /b", "--root takes one value, and is given '/a' and '/b'"),
    ],
)
def test_two_values_of_one_option_are_refused_and_named(argv: str, error: str) -> None:
    ran = gpunode(*argv.split())
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"error: {error}\nhint: see gpunode ")


def test_equal_values_lists_and_output_formats_can_be_repeated(tmp_path: Path) -> None:
    build_demo_node(tmp_path)
    root = ("--root", str(tmp_path))
    ran = gpunode(
        "doctor",
        *root,
        *root,
        "--only",
        "pci-no-gpu",
        "--only",
        "pci-gpu-count-mismatch",
        "-oyaml",
        "-o",
        "json",
    )
    assert [one["id"] for one in ran.document["data"]["findings"]] == ["pci-no-gpu", "pci-gpu-count-mismatch"]


def test_last_value_of_a_plugin_option_counts_as_for_nvidias_plugin() -> None:
    ran = gpunode("plugin", "check-config", "--mig-strategy", "single", "--mig-strategy=mixed")
    assert ran.code == 0 and re.search(r"--mig-strategy +mixed", ran.out)


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (
            ("configure-runtime", "--runtime", "--dry-run"),
            "--runtime needs a value, and --dry-run follows it",
        ),
        (("configure-runtime", "--dry-run", "--config", "-y"), "--config needs a value, and -y follows it"),
        (("--root", "--debug", "gpus"), "--root needs a value, and --debug follows it"),
        (("configure-runtime", "--dry-run", "--runtime", ""), "--runtime is empty"),
        (("reset", "--dry-run", "--node="), "--node is empty"),
        (("--root", "", "doctor"), "--root is empty"),
        (("rollback", "", "--root", "/nowhere"), "'ID' is empty"),
        (("toolkit", "config", "set", ""), "'KEY=VALUE' is empty"),
    ],
)
def test_missing_or_empty_value_is_refused(argv: tuple[str, ...], error: str) -> None:
    ran = gpunode(*argv)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"error: {error}\nhint: see gpunode ")


@pytest.mark.parametrize("name", COMMANDS)
def test_description_of_a_command_begins_with_its_line_in_the_list(name: str) -> None:
    page = " ".join(gpunode(name, "--help").out.split())
    assert page.startswith(f"Usage: gpunode {name} ")
    assert COMMANDS[name][1] in page.partition(" Options: ")[0]


def test_a_flag_that_is_wrong_is_named_even_where_its_variable_is_set() -> None:
    ran = gpunode("verify", "--on", "lxc", env={"GPUNODE_VERIFY_ON": "host"})
    assert ran.code == 2 and ran.err.startswith("error: --on: 'lxc' is not one of")


def test_usage_error_is_printed_as_envelope_and_text() -> None:
    ran = gpunode("verify", "--on", "lxc", "-o", "json")
    assert ran.code == 2
    assert ran.err.startswith("error: --on: 'lxc' is not one of host, ")
    assert "\nhint: see gpunode verify --help\n" in ran.err
    assert ran.document["exitCode"] == 2
    assert ran.document["errors"][0]["code"] == "usage"
    assert "containerd" in ran.document["errors"][0]["message"]


def test_global_options_are_accepted_before_and_after_the_verb(tmp_path: Path) -> None:
    for argv in (
        ["-o", "json", "--root", str(tmp_path), "gpus"],
        ["gpus", "-o", "json", "--root", str(tmp_path)],
    ):
        ran = gpunode(*argv)
        assert ran.document["kind"] == "GpuInventory"
    by_environment = gpunode("gpus", env={"GPUNODE_OUTPUT": "json", "GPUNODE_ROOT": str(tmp_path)})
    assert by_environment.document["kind"] == "GpuInventory"


def test_root_that_is_not_a_directory_is_a_usage_error(tmp_path: Path) -> None:
    ran = gpunode("doctor", "--root", str(tmp_path / "nowhere"))
    assert ran.code == 2
    assert "nowhere is not a directory" in ran.err
    assert "hint: " in ran.err


def test_rollback_with_an_empty_journal_refers_to_reset_and_no_list(tmp_path: Path) -> None:
    build_demo_node(tmp_path)
    ran = gpunode("rollback", "--dry-run", "--root", str(tmp_path))
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == (
        f"error: nothing to roll back: /var/lib/gpunode/journal has no entries (under --root {tmp_path})\n"
        "hint: no change was recorded here; look for other traces of gpunode: "
        f"gpunode --root {tmp_path} reset --dry-run\n"
    )


def test_root_of_empty_directories_gives_a_report(tmp_path: Path) -> None:
    for name in ("proc", "sys", "etc"):
        (tmp_path / name).mkdir()
    ran = gpunode("doctor", "-o", "json", "--root", str(tmp_path))
    assert ran.code == 1
    failed = [found["id"] for found in ran.document["data"]["findings"] if found["status"] == "fail"]
    assert failed == ["pci-no-gpu"]


@pytest.mark.parametrize(
    ("existing", "missing"),
    [((), "/proc, /sys or /etc"), (("etc",), "/proc or /sys"), (("proc", "sys"), "/etc")],
)
def test_doctor_refuses_a_root_that_is_not_a_machine(
    tmp_path: Path, existing: tuple[str, ...], missing: str
) -> None:
    for name in existing:
        (tmp_path / name).mkdir()
    ran = gpunode("doctor", "--root", str(tmp_path))
    assert (ran.code, ran.out) == (3, "")
    assert ran.err.startswith(
        f"error: {tmp_path} isn't the root directory of a machine: it has no {missing}\n"
    )
    assert "\nhint: name a mounted host" in ran.err
    document = gpunode("doctor", "-o", "json", "--root", str(tmp_path)).document
    assert (document["exitCode"], document["errors"][0]["code"]) == (3, "not-a-machine")


def test_debug_shows_the_traceback_and_keeps_the_exit_code(tmp_path: Path) -> None:
    ran = gpunode("gpus", "--root", str(tmp_path), "--debug")
    assert ran.code == gpunode("gpus", "--root", str(tmp_path)).code != 0
    assert "Traceback" in ran.err
    assert "\nerror: " in ran.err
    ran = gpunode("gpus", "--root", f"{tmp_path}/\x1b]0;title\x07", "--debug")
    assert "Traceback" in ran.err
    assert "\x1b" not in ran.err


def test_reader_that_closes_early_is_not_an_error(tmp_path: Path) -> None:
    child = subprocess.Popen(
        command("explain"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=clean_environment(), text=True
    )
    assert child.stdout is not None
    child.stdout.close()
    _, err = child.communicate(timeout=PATIENCE)
    assert "Traceback" not in err
    assert "BrokenPipe" not in err


def has_open(pid: int, path: Path) -> bool:
    """Whether that process has the file open; a descriptor that goes away meanwhile isn't it."""
    links = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            links.append(descriptor.readlink())
    return path.resolve() in links


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name)
def test_signal_ends_a_command_with_130(number: signal.Signals, tmp_path: Path) -> None:
    """A lock held by another process keeps the command waiting while the signal arrives."""
    build_demo_node(tmp_path)
    lock = tmp_path / "state/lock"
    lock.parent.mkdir()
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        child = subprocess.Popen(
            command("configure-runtime", "--runtime", "docker", "--root", str(tmp_path), "-o", "json"),
            env=clean_environment({"GPUNODE_STATE_DIR": "/state"}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert eventually(lambda: has_open(child.pid, lock) or child.poll() is not None)
        child.send_signal(number)
        out, err = child.communicate(timeout=PATIENCE)
    assert child.returncode == 130, err
    assert checked(out)["exitCode"] == 130
    assert "error: interrupted" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name)
def test_signal_after_the_result_does_not_change_the_exit_code(number: signal.Signals) -> None:
    script = (
        "import os, sys\nfrom gpunode.__main__ import main\nsys.argv[1:] = ['explain']\n"
        f"try:\n    main()\nfinally:\n    os.kill(os.getpid(), {number.value})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=clean_environment(), capture_output=True, timeout=PATIENCE
    )
    assert (done.returncode, done.stderr, b"xid" in done.stdout) == (0, b"", True)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("arguments", [("labels", "--simulate", "h100:1"), ("explain",)], ids=" ".join)
def test_closed_stream_is_not_an_error_and_no_file_gets_the_output(
    arguments: tuple[str, ...], closed: str
) -> None:
    line = ["sh", "-c", f'exec "$@" {closed}', "sh", *command(*arguments)]
    done = subprocess.run(line, capture_output=True, env=clean_environment(), text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    assert (done.stdout == "") == (">&-" in closed.split())


def test_bytes_of_the_command_line_that_are_not_utf8_are_printed_as_bytes(tmp_path: Path) -> None:
    name = os.fsdecode(b"bad\xff\xfename")
    assert gpunode("explain", name).err.startswith("error: unknown check 'bad\\xff\\xfename'\n")
    directory = f"{tmp_path}/{name}"
    missing = f"error: --root {tmp_path}/bad\\xff\\xfename is not a directory\n"
    assert gpunode("doctor", "--root", directory).err.startswith(missing)


def test_error_names_the_root_of_its_path(tmp_path: Path) -> None:
    config = "/etc/nvidia-container-runtime/config.toml"
    (tmp_path / config[1:]).parent.mkdir(parents=True)
    (tmp_path / config[1:]).write_text("a = [")
    show = ("--root", str(tmp_path), "toolkit", "config", "get")
    assert gpunode(*show).err.startswith(f"error: {config}:1:1: invalid value (under --root {tmp_path})\n")
    typed = gpunode(*show, "--config", config)  # as the user named it
    assert typed.err.startswith(f"error: {config}:1:1: invalid value\n")


def test_hint_that_names_a_file_has_the_root(tmp_path: Path) -> None:
    root = recorded_host("docker-config-invalid-json", tmp_path / "node").root
    ran = gpunode("configure-runtime", "--runtime", "docker", "--root", str(root))
    edit = f"${{EDITOR:-vi}} +4 /etc/docker/daemon.json (under --root {root})"
    assert ran.err.endswith(f"\nhint: correct that line: {edit}\n"), ran.err


def test_hint_has_the_root_in_each_command_of_gpunode(tmp_path: Path) -> None:
    root = recorded_host("driver-lib-mismatch", tmp_path / "a node").root
    bundle = tmp_path / "b.tar.gz"
    assert gpunode("report", "--root", str(root), "--output-file", str(bundle)).code == 0
    for place in (root, bundle):
        ran = gpunode("gpus", "--root", str(place))
        assert ran.err.endswith(f"hint: find out why: gpunode --root {shlex.quote(str(place))} doctor\n")
    ran = gpunode("gpus", env={"GPUNODE_ROOT": str(root)})
    assert ran.err.endswith("hint: find out why: gpunode doctor\n")
