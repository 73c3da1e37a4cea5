"""Output of the doctor for a mistyped command."""

import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.machines import recorded_host
from gpunode.checks.catalogue import find_check
from gpunode.errors import UsageError
from tests.cli import gpunode
from tests.ordinary_user import AS_ORDINARY_USER, public_directory


@pytest.mark.parametrize(
    ("argv", "message", "hint"),
    [
        (["--apply"], "--apply goes with --fix", "gpunode doctor --fix --apply"),
        (
            ["--allow", "restart"],
            "--allow goes with --fix --apply",
            "gpunode doctor --fix --apply --allow restart",
        ),
        (
            ["--fix", "--allow", "drain", "--allow", "reboot"],
            "--allow goes with --fix --apply",
            "gpunode doctor --fix --apply --allow drain --allow reboot",
        ),
        (
            ["--fix", "--apply", "--allow", "everything"],
            "there is no allowance 'everything'",
            "one of restart, drain, reboot",
        ),
        (
            ["--output-file", "/nowhere/at/all/x.json"],
            "--output-file /nowhere/at/all/x.json: the directory doesn't exist",
            "create the directory: mkdir -p /nowhere/at/all",
        ),
    ],
)
def test_usage_error_suggests_the_intended_command(argv, message, hint, tmp_path):
    ran = gpunode("--root", str(tmp_path), "doctor", *argv)
    assert (ran.code, ran.out, ran.err) == (2, "", f"error: {message}\nhint: {hint}\n")


def test_recorded_machine_is_never_changed(tmp_path):
    recorded_host("nouveau-loaded", tmp_path)
    before = sorted(tmp_path.rglob("*"))
    ran = gpunode("--root", str(tmp_path), "doctor", "--fix", "--apply")
    assert (ran.code, ran.out) == (3, "")
    assert ran.err.startswith("error: a fix is only carried out on the node itself\n")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("machine", "permission"),
    [
        ("nouveau-loaded", "safe: --apply does it, except for systemctl reboot, which needs --allow reboot"),
        ("uvm-not-loaded", "safe: --apply does it"),
        ("driver-lib-mismatch", "needs --allow reboot"),
    ],
)
def test_plan_says_what_apply_does_without_a_further_option(machine, permission, tmp_path):
    recorded_host(machine, tmp_path)
    ran = gpunode("--root", str(tmp_path), "doctor", "--fix")
    assert permission in [line.strip() for line in ran.out.splitlines()]


def test_carrying_out_a_fix_needs_root():
    ran = gpunode("doctor", "--fix", "--apply", prefix=AS_ORDINARY_USER)
    assert (ran.code, ran.out) == (3, "")
    assert ran.err == "error: carrying out a fix needs root\nhint: run it again with sudo\n"


def test_prefix_of_an_id_suggests_the_matching_check():
    with pytest.raises(UsageError) as raised:
        find_check("driver-lib-")
    assert raised.value.hint == "did you mean driver-lib-mismatch?"


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["--compare", "--fix"], 2, "--compare and --fix are different things"),
        (
            ["--preflight", "docker", "driver-cve", "cdi-spec-stale"],
            2,
            "--preflight docker has none of these checks: driver-cve, cdi-spec-stale",
        ),
        (["--only", "pci-no-gpu,nonsense"], 2, "unknown check 'nonsense'"),
    ],
)
def test_contradicting_options_are_refused(argv, code, message, tmp_path):
    ran = gpunode("--root", str(tmp_path), "doctor", *argv)
    assert (ran.code, ran.err.splitlines()[0]) == (code, f"error: {message}")


@pytest.fixture
def root(tmp_path):
    """A machine with nothing on it."""
    for name in ("proc", "sys", "etc"):
        (tmp_path / name).mkdir()
    return tmp_path


def test_several_ids_may_follow_one_option(root):
    ran = gpunode("--root", str(root), "doctor", "--only", "pci-no-gpu,nvml-hang", "-o", "json")
    assert [one["id"] for one in ran.document["data"]["findings"]] == ["pci-no-gpu", "nvml-hang"]


def test_failed_write_to_stdout_gives_no_traceback(root):
    argv = [sys.executable, "-m", "gpunode", "--root", str(root), "doctor"]
    with Path("/dev/full").open("w") as full:
        for more in ([], ["-o", "json"], ["-o", "json", "--only", "nonsense"]):
            ran = subprocess.run([*argv, *more], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
            assert ran.returncode in (1, 2)
            assert "error: can't write to standard output: No space left on device\n" in ran.stderr
            assert "Traceback" not in ran.stderr


def test_unwritable_directory_is_named_before_the_node_is_examined():
    with public_directory() as place:
        closed = place / "closed"
        closed.mkdir(mode=0o700)
        for path in (closed / "x.json", place / "x.json"):
            ran = gpunode("--root", str(place), "doctor", "--output-file", str(path), prefix=AS_ORDINARY_USER)
            assert (ran.code, ran.out) == (3, "")
            assert (
                ran.err.splitlines()[0]
                == f"error: --output-file {path}: no permission to write in this directory"
            )


def test_strict_includes_warnings_of_a_fix_plan(tmp_path):
    recorded_host("driver-cve", tmp_path)
    for strict, code in (((), 0), (("--strict",), 1)):
        assert gpunode("--root", str(tmp_path), "doctor", "--fix", *strict).code == code


def test_fixes_are_in_the_order_of_the_page(tmp_path):
    """There a warning comes before the error that it may cause."""
    recorded_host("esxi-bar-without-room", tmp_path)
    report = gpunode("--root", str(tmp_path), "doctor", "-o", "json").document["data"]
    plan = gpunode("--root", str(tmp_path), "doctor", "--fix", "-o", "json").document["data"]["plan"]
    assert [one["id"] for one in plan] == report["order"]
    assert report["order"] == ["bar-too-small", "gpu-bound-other-driver", "cdi-spec-stale"]


def test_file_in_place_of_a_check_is_explained(tmp_path):
    ran = gpunode("--root", str(tmp_path), "doctor", "node.json")
    hint = "a file: gpunode doctor --compare FILE FILE, or gpunode doctor --root BUNDLE"
    assert (ran.code, ran.err) == (2, f"error: unknown check 'node.json'\nhint: {hint}\n")


@pytest.mark.parametrize(
    ("content", "problem"),
    [("", "the file is empty"), ("{}\nnode", "not JSON: line 2")],
)
def test_file_that_is_no_report_is_named(tmp_path, content, problem):
    path = tmp_path / "node.json"
    path.write_text(content)
    ran = gpunode("doctor", "--compare", str(path), str(path))
    assert ran.code != 0 and ran.err.splitlines()[0] == f"error: {path} is not a report: {problem}"


def test_check_that_is_selected_and_skipped_is_refused(root):
    ran = gpunode("--root", str(root), "doctor", "--only", "pci-no-gpu", "--skip", "pci-no-gpu:known")
    assert (ran.code, ran.err.splitlines()[0]) == (2, "error: pci-no-gpu is selected and skipped")


def test_directory_in_place_of_the_output_file_gets_a_hint(root, tmp_path):
    ran = gpunode("--root", str(root), "doctor", "--output-file", str(tmp_path), "-o", "json")
    assert (ran.code, ran.err.splitlines()[1]) == (
        2,
        f"hint: name a file in it: --output-file {tmp_path}/FILE",
    )
