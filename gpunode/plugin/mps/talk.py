"""What a control daemon writes into its log, and what of it is worth a line of ours. Pure.

The formats are those of nvidia-cuda-mps-control 535 to 580: ``[2026-01-31 10:05:06.065 Control 13013] text``.
"""

from __future__ import annotations

import re

from gpunode.dataclass import dataclass

_LINE = re.compile(r"\[\S+ \S+ +(?P<who>[A-Za-z ]+?) +\d+\] ?(?P<text>.*)")
_EXITED = re.compile(r"Server (\d+) exited with status (-?\d+)")
_READY = re.compile(r"NEW SERVER \d+: Ready")
_CHATTER = re.compile(
    r"Accepting connection\.\.\.|NEW UI|UI closed|Cmd:.*|[\d.]+[MG]?|User did not send valid .*|"
    r"NEW CLIENT .*|Removed Shm file.*|No default pinned memory limit set.*|"
    r"Starting control daemon .*|To connect CUDA applications .*|quit command issued .*|Exit with status 0|"
    r"Using log directory: .*"
)
_BAD = re.compile(
    r"exited with status (?!0)|fatal|fail|warning|error|invalid|unable|cannot|already running", re.IGNORECASE
)


@dataclass(frozen=True)
class Line:
    """One line: `text` without time and number of the process; `bad` lines deserve a warning.

    `server` is failed for a server that ended badly, ready for one that serves, else empty.
    """

    text: str
    bad: bool = False
    server: str = ""


def read_line(raw: str) -> Line | None:
    """None for chatter: what we ask and do ourselves, and every client that comes and goes."""
    found = _LINE.fullmatch(raw.strip())
    text = (found["text"] if found else raw).strip()
    if not text or _CHATTER.fullmatch(text):
        return None
    exited = _EXITED.search(text)
    if exited and exited[2] != "0":
        return Line(text, bad=True, server="failed")
    return Line(text, bool(_BAD.search(text)), "ready" if _READY.search(text) else "")


class ServerWatch:
    """Whether the daemon's MPS servers, which do the work, come up. The daemon itself lives on without."""

    _MANY = 3  # a driver under reset may well refuse one

    def __init__(self) -> None:
        self.failures = 0
        self.last = ""

    def hear(self, line: Line) -> None:
        if line.server == "failed":
            self.failures += 1
            self.last = line.text
        elif line.server == "ready":
            self.failures = 0

    @property
    def failing(self) -> bool:
        return self.failures >= self._MANY
