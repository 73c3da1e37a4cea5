"""Log lines, on a terminal and in the journal."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunode.plugin.logfmt import OnChange, Rarely, line, open_log, silent_log
from tests.plugin.nodes import MemoryLog


def test_line_has_time_level_message_and_fields() -> None:
    stream = io.StringIO()
    open_log(stream, {}).info("registered with the kubelet", resource="nvidia.com/gpu", count=8)
    assert re.fullmatch(
        r"time=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z level=info "
        r'msg="registered with the kubelet" resource=nvidia.com/gpu count=8\n',
        stream.getvalue(),
    )


def test_a_json_line_has_time_level_message_and_fields() -> None:
    stream = io.StringIO()
    log = open_log(stream, {}, "json")
    log.warning(
        'GPU "0"\nis unhealthy \N{BELL}', xid=79, healthy=False, seconds=1.5, wait=math.inf, name="GPU\udcff"
    )
    assert stream.getvalue().isascii() and stream.getvalue().count("\n") == 1
    written = json.loads(stream.getvalue())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", written.pop("time"))
    assert written == {
        **{"level": "warning", "msg": 'GPU "0"\nis unhealthy \N{BELL}', "xid": 79, "healthy": False},
        **{"seconds": 1.5, "wait": "inf", "name": "GPU\udcff"},
    }


def test_json_for_the_journal_has_a_priority_and_the_time(tmp_path: Path) -> None:
    with (tmp_path / "journal").open("w") as stream:
        seen = os.fstat(stream.fileno())
        open_log(stream, {"JOURNAL_STREAM": f"{seen.st_dev}:{seen.st_ino}"}, "json").info("x")
    priority, text = (tmp_path / "journal").read_text()[:3], (tmp_path / "journal").read_text()[3:]
    assert priority == "<6>" and list(json.loads(text)) == ["time", "level", "msg"]


def test_journal_gets_a_priority_and_keeps_its_own_time(tmp_path: Path) -> None:
    with (tmp_path / "journal").open("w") as stream:
        seen = os.fstat(stream.fileno())
        open_log(stream, {"JOURNAL_STREAM": f"{seen.st_dev}:{seen.st_ino}"}).error("GPU is unhealthy")
    assert (tmp_path / "journal").read_text() == '<3>level=error msg="GPU is unhealthy"\n'


def test_redirected_stderr_has_timestamps(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as stream:
        open_log(stream, {"JOURNAL_STREAM": "8:12345"}).warning("x")
    assert (tmp_path / "file").read_text().startswith("time=")


@given(st.text())
def test_any_value_is_quoted_correctly(value: str) -> None:
    text = line({"msg": value, "next": "1"})
    assert len(text.splitlines()) == 1
    assert re.fullmatch(r'msg=("([^"\\]|\\.)*"|[^ "=\\]+) next=1', text)


def test_state_is_logged_once_until_it_changes() -> None:
    log = MemoryLog()
    say = OnChange(log)
    for message in ("a", "a", "b", "a"):
        say.warning(message)
    say.reset()
    say.warning("a")
    assert log.messages() == ["a", "b", "a", "a"]


class FullDisk(io.StringIO):
    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_unwritable_log_stops_no_caller() -> None:
    stream = FullDisk()
    open_log(stream, {}).info("unheard")
    assert "unheard" in stream.getvalue()


def test_exception_of_a_value_is_raised() -> None:
    class Broken:
        def __str__(self) -> str:
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        open_log(io.StringIO(), {}).info("x", value=Broken())


def test_silent_log_writes_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    silent_log().error("GPU is unhealthy")
    assert capfd.readouterr() == ("", "")


def test_percent_sign_in_a_message_is_not_a_format() -> None:
    stream = io.StringIO()
    open_log(stream, {}).warning("90%s full")
    assert 'msg="90%s full"' in stream.getvalue()


def test_repeated_line_is_logged_occasionally_with_its_count() -> None:
    now = [0.0]
    rarely = Rarely(60, lambda: now[0])
    assert [rarely.times("a") for _ in range(3)] + [rarely.times("b")] == [1, 0, 0, 1]
    now[0] = 61
    assert rarely.times("a") == 3
    for number in range(1000):
        rarely.times(number)
    assert len(rarely._seen) == 256
