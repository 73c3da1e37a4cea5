"""The device plugins' benchmark, at small scale: it runs ours and a peer, and ours isn't slow."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.stubs import build, have_compiler
from tests.plugin.nodes import eventually

pytestmark = pytest.mark.full

PEER = f"{sys.executable} -m tests.plugin.placement.tiny_peer {{kubelet_socket}}"
SMALL = ("--rounds", "24", "--starts", "1", "--idle-seconds", "0.3", "-o", "json")
GENEROUS = 10.0  # multiple of the limit: a test machine may be busy
MORE_SO = 200.0  # for the slowest of 24 calls, for which one pause of the machine is enough


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "scripts.bench_plugin", *words], capture_output=True, text=True, check=False
    )


@pytest.mark.skipif(not have_compiler(), reason="gcc is not installed")
def test_every_row_is_measured_for_both_plugins() -> None:
    done = bench(*SMALL, "--peer", PEER)
    assert done.stdout, done.stderr
    document = json.loads(done.stdout)
    rows = {row["what"]: row for row in document["rows"]}
    assert len(rows) == 12
    assert all(row["peer"] is not None for row in rows.values())
    limited = {what: row for what, row in rows.items() if row["limit"] is not None}
    assert len(limited) == 9
    for what, row in limited.items():
        if row["unit"] == "ms" and "idle" not in what:
            assert row["ours"] < (MORE_SO if "p99" in what else GENEROUS) * row["limit"], what
        assert row["kept"] == (row["ours"] <= row["limit"]), what
    assert document["kept"] == all(row["kept"] for row in rows.values())
    assert done.returncode == (0 if document["kept"] else 1)


@pytest.mark.skipif(not have_compiler() or not shutil.which("setpriv"), reason="needs gcc and setpriv")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_killed_benchmark_leaves_no_plugin_behind(number: signal.Signals, short: Path) -> None:
    environ = {**os.environ, "TMPDIR": str(short)}
    stubs = build().parent  # else they are compiled there again
    (short / stubs.name).symlink_to(stubs)
    started = subprocess.Popen(
        [sys.executable, "-m", "scripts.bench_plugin", *SMALL],
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def left() -> list[str]:
        lines = [_cmdline(entry) for entry in Path("/proc").glob("[0-9]*")]
        return [line for line in lines if str(short) in line]

    try:
        assert eventually(lambda: any("serve" in line for line in left()), 300.0)
        started.send_signal(number)
        assert started.wait(60.0) == (128 + number if number == signal.SIGTERM else -number)
        assert eventually(lambda: not left(), 60.0), left()
    finally:
        started.kill()
        started.wait()


def _cmdline(entry: Path) -> str:
    try:
        return (entry / "cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


@pytest.mark.skipif(not have_compiler(), reason="gcc is not installed")
def test_peer_that_exits_is_named_with_its_last_words() -> None:
    done = bench(*SMALL, "--peer", f"{sys.executable} -c 'raise SystemExit(\"no such thing\")'")
    assert done.returncode == 1
    assert "it ended with 1" in done.stderr
    assert "no such thing" in done.stderr
