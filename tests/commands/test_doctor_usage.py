"""What the doctor says to somebody who has mistyped."""

import pytest

from gpunode.checks.catalogue import find_check
from gpunode.errors import UsageError
from tests.cli import gpunode


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
            ["--output-file", "/nowhere/at/all/x.json"],
            "--output-file /nowhere/at/all/x.json: there is no such directory",
            "make it first: mkdir -p /nowhere/at/all",
        ),
    ],
)
def test_a_mistake_is_named_with_the_command_that_was_meant(argv, message, hint, tmp_path):
    ran = gpunode("--root", str(tmp_path), "doctor", *argv)
    assert (ran.code, ran.out, ran.err) == (2, "", f"error: {message}\nhint: {hint}\n")


def test_the_beginning_of_an_id_names_the_check_that_begins_so():
    with pytest.raises(UsageError) as raised:
        find_check("driver-lib-")
    assert raised.value.hint == "did you mean driver-lib-mismatch?"


def test_the_variable_of_list_is_called_as_the_option_is():
    shown = gpunode("doctor", "--help").out.split()
    assert "GPUNODE_DOCTOR_LIST]" in shown
