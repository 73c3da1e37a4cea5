"""Following a daemon's control.log: its news become lines of ours, and the file stays small."""

from __future__ import annotations

from gpunode._files import empty_file, read_from
from gpunode.host import Host
from gpunode.plugin.logfmt import Log, Rarely
from gpunode.plugin.mps.layout import DaemonSpec
from gpunode.plugin.mps.talk import Line, ServerWatch, read_line

_MOST = 256 << 10  # bytes that the file may grow to, and that are read at once
_LINES = 20  # of ours at a time


class ControlLog:
    """One thread's own. `servers` hears every line, told or not; `last` is the last one's text."""

    def __init__(self, host: Host, spec: DaemonSpec, log: Log) -> None:
        self._path = host.path(f"{spec.log}/control.log")
        self._names = {"resource": spec.resource, "gpus": ",".join(spec.gpus)}
        self._log = log
        self._rarely = Rarely()
        self._offset = 0
        self._rest = b""
        self.last = ""
        self.servers = ServerWatch()

    def skip(self) -> None:
        """What is in the file by now is an earlier daemon's."""
        self._offset, self._rest, self.last = self._size(), b"", ""
        self.servers = ServerWatch()

    def follow(self) -> None:
        """Tell what is new."""
        size = self._size()
        if size == self._offset:
            return
        if size < self._offset:
            self._offset = 0
        try:
            data = read_from(self._path, self._offset, _MOST)
        except OSError:
            return  # gone; a new daemon makes a new one
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        news = [line for raw in lines if (line := read_line(raw.decode("utf-8", "replace")))]
        for line in news:
            self.servers.hear(line)
            self.last = line.text
        for line in news[-_LINES:]:
            self._tell(line)
        if self._offset >= _MOST:
            empty_file(self._path)
            self._offset, self._rest = 0, b""

    def _tell(self, line: Line) -> None:
        times = self._rarely.times("".join(c for c in line.text if not c.isdecimal()))
        if times:
            say = self._log.warning if line.bad else self._log.info
            more = {"times": times} if times > 1 else {}
            say("MPS", **self._names, said=line.text, **more)

    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except OSError:
            return 0
