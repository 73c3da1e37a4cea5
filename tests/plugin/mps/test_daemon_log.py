"""Parsing of a daemon's log. The lines are the real program's (Debian, 535.261.03), or from reports of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunode.plugin.mps.daemon import Line, ServerWatch, read_line

HEAD = "[2026-11-21 10:05:06.065 Control 13013] "


@pytest.mark.parametrize(
    "text",
    [
        *("Accepting connection...", "NEW UI", "UI closed", "Cmd:get_server_list", "100.0", "25.0", "100M"),
        *("Cmd:quit -t 3", "NEW CLIENT 0 from user 1001: Server already exists", "Removed Shm file at ", ""),
        *(
            "Starting control daemon using socket /run/mps/pipe/control",
            "Exit with status 0",
            "Using log directory: /x",
        ),
    ],
)
def test_routine_lines_are_not_logged(text: str) -> None:
    assert read_line(HEAD + text) is None


@pytest.mark.parametrize(
    ("text", "bad", "server"),
    [
        ("Starting new server 13059 for user 0", False, ""),
        ("NEW SERVER 13059: Ready", False, "ready"),
        ("Server 13059 exited with status 1", True, "failed"),
        ("Server 13059 exited with status 0", False, ""),
        ("Server encountered a fatal exception. Shutting down", True, ""),
        ("Invalid percentage, expected between (0.0, 100.0]", True, ""),
        ("Warning: Failed writing log files to directory [/x]. No logs will be available.", True, ""),
    ],
)
def test_relevant_lines_are_logged_without_time_and_number(text: str, bad: bool, server: str) -> None:
    assert read_line(HEAD + text) == Line(text, bad, server)


def test_line_of_another_format_is_logged_unchanged() -> None:
    other = "An instance of this daemon is already running"
    assert read_line(other) == Line(other, bad=True)


def test_servers_that_never_start_are_failing_until_one_does() -> None:
    watch = ServerWatch()
    for _ in range(3):
        assert not watch.failing
        watch.hear(Line("Server 7 exited with status 1", True, "failed"))
    assert watch.failing
    assert watch.last == "Server 7 exited with status 1"
    watch.hear(Line("NEW SERVER 8: Ready", server="ready"))
    assert not watch.failing


@given(st.text())
def test_any_line_is_parsed(raw: str) -> None:
    line = read_line(raw)
    assert line is None or line.text
