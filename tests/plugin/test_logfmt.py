"""Log lines, on a terminal and in the journal."""

from __future__ import annotations

import io
import os
import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from gpunode.plugin.logfmt import LogfmtLog, OnChange, line
from tests.plugin.nodes import MemoryLog


def test_a_line_has_time_level_message_and_fields() -> None:
    stream = io.StringIO()
    LogfmtLog(stream, {}).info("registered with the kubelet", resource="nvidia.com/gpu", count=8)
    assert re.fullmatch(
        r"time=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z level=info "
        r'msg="registered with the kubelet" resource=nvidia.com/gpu count=8\n',
        stream.getvalue(),
    )


def test_the_journal_gets_a_priority_and_keeps_its_own_time(tmp_path: Path) -> None:
    with (tmp_path / "journal").open("w") as stream:
        seen = os.fstat(stream.fileno())
        LogfmtLog(stream, {"JOURNAL_STREAM": f"{seen.st_dev}:{seen.st_ino}"}).error("GPU is unhealthy")
    assert (tmp_path / "journal").read_text() == '<3>level=error msg="GPU is unhealthy"\n'


def test_stderr_that_was_redirected_away_from_the_journal_gets_the_time(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as stream:
        LogfmtLog(stream, {"JOURNAL_STREAM": "8:12345"}).warning("x")
    assert (tmp_path / "file").read_text().startswith("time=")


@given(st.text())
def test_no_value_breaks_the_line_or_its_quotes(value: str) -> None:
    text = line({"msg": value, "next": "1"})
    assert len(text.splitlines()) == 1
    assert re.fullmatch(r'msg=("([^"\\]|\\.)*"|[^ "=\\]+) next=1', text)


def test_a_state_is_said_once_until_another_one_was() -> None:
    log = MemoryLog()
    say = OnChange(log)
    for message in ("a", "a", "b", "a"):
        say.warning(message)
    say.reset()
    say.warning("a")
    assert log.messages() == ["a", "b", "a", "a"]
