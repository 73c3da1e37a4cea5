"""Output for users and programs."""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import select
import struct
import subprocess
import sys
import termios
from contextlib import suppress

import pytest
import yaml

from gpunode.checks.finding import Evidence, Finding, FindingStatus
from gpunode.errors import GpunodeError
from gpunode.output.render import (
    SHOWN_SECONDS,
    Color,
    Output,
    StderrProgress,
    document,
    plain_lines,
    printable,
    render,
    render_error,
    wants_color,
)
from gpunode.output.result import Cell, Diff, ErrorInfo, ExitCode, Result, Style, Table, Text
from tests.waiting import PATIENCE

REPORT = Result(
    "DoctorReport",
    {
        "findings": (
            Finding("a-check", "A", FindingStatus.PASS, "error", "fine", (Evidence("/proc/x", "1", 3),)),
        )
    },
    messages=("a word on stderr",),
    blocks=(
        Text("Verdict", Style.GOOD),
        Table(("GPU", "NAME"), (("0", Cell("H100 [80GB]", Style.BAD)), ("10", "A"))),
        Diff("--- a\n+++ b\n@@ -1 +1 @@\n-x\n+y\n"),
    ),
)


def test_json_is_the_envelope(capsys: pytest.CaptureFixture[str]) -> None:
    render(REPORT, Output.JSON, Color.NEVER)
    document = json.loads(capsys.readouterr().out)
    assert list(document) == ["apiVersion", "kind", "status", "exitCode", "data", "messages", "errors"]
    assert document["apiVersion"] == "gpunode/v1"
    finding = document["data"]["findings"][0]
    assert finding["blockedBy"] is None
    assert finding["evidence"] == [{"source": "/proc/x", "value": "1", "line": 3}]


def test_yaml_holds_the_same_document(capsys: pytest.CaptureFixture[str]) -> None:
    render(REPORT, Output.YAML, Color.NEVER)
    assert yaml.safe_load(capsys.readouterr().out) == REPORT.envelope()


def test_table_is_plain_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    render(REPORT, Output.TABLE, Color.AUTO)
    seen = capsys.readouterr()
    assert seen.out == "Verdict\nGPU  NAME\n0    H100 [80GB]\n10   A\n--- a\n+++ b\n@@ -1 +1 @@\n-x\n+y\n"
    assert seen.err == "a word on stderr\n"


@pytest.fixture(autouse=True)
def capable_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dumb terminal, as CI often has, gets no colors."""
    monkeypatch.setenv("TERM", "xterm")


def test_color_keeps_the_text_and_its_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    render(REPORT, Output.TABLE, Color.ALWAYS)
    out = capsys.readouterr().out
    assert "\x1b[" in out
    assert "H100 [80GB]" in out


def test_terminal_lines_wrap_between_words_and_commands_do_not_wrap(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    prose, command = "  " + "explained " * 8, "  apt install " + "package-name-" * 5
    render(Result("X", blocks=(Text(prose), Text(command, Style.COMMAND))), Output.TABLE, Color.ALWAYS)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert lines[-1] == command
    assert all(line.startswith("  explained") and len(line) <= 40 for line in lines[:-1])
    assert " ".join(lines[:-1]).split() == ["explained"] * 8


def test_a_document_for_another_program_is_neither_colored_nor_wrapped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    line = "  description: " + "a word " * 20
    render(Result("X", blocks=(Text(line, Style.DOCUMENT),)), Output.TABLE, Color.ALWAYS)
    assert capsys.readouterr().out == line + "\n"


def test_text_from_a_file_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    render(Result("X", blocks=(Text("evil \x1b]0;title\x07 \x1b[2J"),)), Output.TABLE, Color.NEVER)
    assert "\x1b" not in capsys.readouterr().out
    assert printable("tab\tnewline\nbell\x07") == "tab\tnewline\nbell\\x07"
    assert printable("half \udc80 byte") == "half \\x80 byte"
    assert printable(r"\ud83d\udc80") == r"\ud83d\udc80"  # one character, as JSON escapes it


def test_no_control_character_in_json_reaches_the_terminal() -> None:
    evil = "a\x1b[2J\x7f\x9b2J\u202e\u2066 ü"
    text = document(Result("X", messages=(evil,)), Output.JSON)
    assert all(char == "\n" or char.isprintable() for char in text)
    assert json.loads(text)["messages"] == [evil] and "ü" in text


def test_columns_are_padded_except_the_last() -> None:
    assert plain_lines(Table(("", ""), (("a", "b"), ("long", "c")))) == ["a     b", "long  c"]


@pytest.mark.parametrize(
    ("color", "environ", "expected"),
    [
        (Color.AUTO, {}, False),
        (Color.AUTO, {"FORCE_COLOR": "1"}, True),
        (Color.AUTO, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        (Color.ALWAYS, {"NO_COLOR": "1"}, True),
        (Color.NEVER, {"FORCE_COLOR": "1"}, False),
    ],
)
def test_color_follows_option_environment_and_terminal(
    color: Color, environ: dict[str, str], expected: bool
) -> None:
    assert wants_color(color, io.StringIO(), environ) is expected


def test_errors_are_two_lines_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    render_error(GpunodeError("what", hint="do this"))
    seen = capsys.readouterr()
    assert seen.err == "error: what\nhint: do this\n"
    assert seen.out == ""


def test_error_result_has_its_exit_code_in_both_places() -> None:
    result = Result("X", status="error", exit_code=ExitCode.ROLLED_BACK, errors=(ErrorInfo("a", "b", "c"),))
    assert result.envelope()["exitCode"] == 4
    assert result.envelope()["errors"] == [{"code": "a", "message": "b", "hint": "c"}]


@pytest.mark.parametrize("columns", ["80", "60"])
def test_row_name_is_not_split(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    name = "20261121T081450Z-configure-runtime"
    table = Table(("ID", "FILES"), ((name, "/etc/" + "x" * 80),))
    render(Result("Journal", blocks=(table,)), Output.TABLE, Color.ALWAYS)
    assert name in capsys.readouterr().out


@pytest.mark.parametrize(("columns", "shown"), [("80", "GPU-c276364b-35d6"), ("20", "GPU-c276364b")])
def test_cell_is_truncated_if_the_table_is_wider_than_the_terminal(
    columns: str, shown: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    table = Table(("GPU", "DEVICE"), (("0", Cell("GPU-c276364b-35d6", short="GPU-c276364b")),))
    render(Result("X", blocks=(table,)), Output.TABLE, Color.ALWAYS)
    assert shown in capsys.readouterr().out.split()
    render(Result("X", blocks=(table,)), Output.TABLE, Color.NEVER)
    assert "GPU-c276364b-35d6" in capsys.readouterr().out.split()


def rest_of(main: int) -> str:
    """Output to a terminal whose other end is closed; it arrives in pieces."""
    shown = b""
    with suppress(OSError), os.fdopen(main, "rb", 0) as stream:  # EIO is its end
        while part := stream.read(4096):
            shown += part
    return shown.decode()


def test_messages_wrap_between_words_and_hints_do_not_wrap() -> None:
    message, hint = "a word " * 20, "run this command " * 10
    script = (
        "from gpunode.errors import GpunodeError as E; from gpunode.output.render import render_error as r;"
        f"r(E({message.strip()!r}, hint={hint.strip()!r}))"
    )
    main, side = os.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    subprocess.run([sys.executable, "-c", script], stderr=side, check=True, timeout=PATIENCE)
    os.close(side)
    lines = rest_of(main).splitlines()
    assert all(len(line) <= 40 and line.endswith(("a", "word")) for line in lines[:-1])
    assert lines[-1] == f"hint: {hint.strip()}"


def test_terminal_shows_a_step_while_it_runs() -> None:
    script = (
        "import sys\n"
        "from gpunode.output.render import StderrProgress\n"
        "with StderrProgress().step('a long look'): sys.stdin.read()\n"
    )
    main, side = os.openpty()
    env = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stderr=side, env=env
    ) as child:
        begun = ""
        while not begun.endswith("\x1b[K"):  # it may arrive in pieces
            assert select.select([main], [], [], PATIENCE)[0], f"nothing was printed after {begun!r}"
            begun += os.read(main, 4096).decode()
        child.communicate(b"")
    os.close(side)
    ended = rest_of(main)
    assert begun == "\r  a long look ...\x1b[K"
    assert ended.startswith("\r\x1b[K  a long look: done in ")


def on_a_terminal(script: str, term: str = "xterm") -> str:
    """What a terminal shows of a script that uses `progress`."""
    head = "import threading, time\nfrom gpunode.output.render import SHOWN_SECONDS, StderrProgress\n"
    main, side = os.openpty()
    env = {**os.environ, "TERM": term}
    program = [sys.executable, "-c", f"{head}progress = StderrProgress()\n{script}"]
    subprocess.run(program, stderr=side, env=env, timeout=PATIENCE, check=False)
    os.close(side)
    return rest_of(main)


def test_a_step_of_less_than_a_second_is_not_shown() -> None:
    assert SHOWN_SECONDS == 1.0
    shown = on_a_terminal(
        # a busy machine may need the second for this step
        f"from gpunode.output import render\nrender.SHOWN_SECONDS = {PATIENCE}\n"
        "with progress.step('a short look'): pass\nprogress.note('a file is missing')"
    )
    assert shown == "  a file is missing\r\n"


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_step_that_fails_after_a_second_is_shown_as_failed(term: str) -> None:
    shown = on_a_terminal(
        # the timer's thread ends when it has shown the step
        "with progress.step('look'):\n"
        "    while threading.active_count() > 1: time.sleep(0.01)\n"
        "    exit('broken')",
        term,
    )
    begun = {"xterm": "\r  look ...\x1b[K\r\x1b[K", "dumb": "  look ...\r\n"}[term]
    assert shown.startswith(f"{begun}  look: failed after ")
    assert re.search(r"[1-9]\d*\.\d s\r\nbroken\r\n$", shown)


def test_a_pipe_gets_notes_and_no_progress(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpunode.output.render.SHOWN_SECONDS", 0.0)
    progress = StderrProgress()
    with progress.step("a long look"), progress.following("apt-get install x", "apt-get") as show:
        show("Unpacking x")
        progress.note("a file is missing")
        progress.info("the repository has driver 580")
    assert capsys.readouterr().err == "  a file is missing\n  the repository has driver 580\n"


def test_quiet_hides_information_and_prints_problems(capsys: pytest.CaptureFixture[str]) -> None:
    progress = StderrProgress(quiet=True)
    progress.info("the repository has driver 580")
    progress.note("a file is missing")
    assert capsys.readouterr().err == "  a file is missing\n"
