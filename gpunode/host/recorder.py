"""A host that stores everything that is read from it, for support bundles and recorded machines.

A recording contains exactly what the doctor requested from such a host. Nothing else is read.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gpunode.errors import Unreadable
from gpunode.host import Host
from gpunode.host.files import READ_BYTES, follow_links
from gpunode.host.process import Completed
from gpunode.host.reading import DeviceNode, FileSystem
from gpunode.output.typed import plain

MOST_FILE = 8 << 20
MOST_BYTES = 96 << 20
# links of proc(5) whose text isn't their real target: files below one are stored below its own name
_MAGIC = re.compile(r"/proc/[0-9]+/(?:root|cwd)")
_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class Kept:
    """What was read, by path on the node: `files` with their bytes (empty for those only tested for
    existence), `links`, `directories`, `programs` that may be executed, `times` of change in seconds since
    the epoch, and the `recording` (docs/recorded-machines.md). `left_out` has the reason for paths that
    aren't kept."""

    files: dict[str, bytes] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    directories: dict[str, None] = field(default_factory=dict)
    programs: dict[str, None] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)
    recording: dict[str, dict[str, Any]] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RecordingHost(Host):
    """A `Host` that stores each of its answers."""

    kept: Kept = field(default_factory=Kept)

    # --- files -----------------------------------------------------------------------------------------

    def read_bytes(self, path: str, limit: int = READ_BYTES) -> bytes | None:
        data = self._noting_unreadable(path, lambda: Host.read_bytes(self, path, limit))
        real = self._trail(path)
        if data is not None:
            self._keep(real, data)
        return data

    def read_tail(self, path: str, limit: int) -> str:
        text = self._noting_unreadable(path, lambda: Host.read_tail(self, path, limit))
        real = self._trail(path)
        if text or self.is_file(path):
            self._keep(real, text.encode("utf-8", "surrogateescape"))
        return text

    def _mode(self, path: str, *, follow: bool = True) -> int:
        mode = self._noting_unreadable(path, lambda: Host._mode(self, path, follow=follow))
        real = self._trail(path)  # a link without a target exists as well
        if mode:
            self._place(real)
        return mode

    def readlink(self, path: str) -> str | None:
        target = self._noting_unreadable(path, lambda: Host.readlink(self, path))
        if target is not None:
            self.kept.links[self._trail(path, follow=False)] = target
        return target

    def realpath(self, path: str) -> str:
        self._trail(path)
        return Host.realpath(self, path)

    def listdir(self, path: str) -> tuple[str, ...]:
        names = self._noting_unreadable(path, lambda: Host.listdir(self, path))
        real = self._trail(path)
        if names or self.is_dir(path):
            self.kept.directories[real] = None
        for name in names:
            self._place(f"{real}/{name}")
        return names

    def stat(self, path: str) -> os.stat_result | None:
        status = self._noting_unreadable(path, lambda: Host.stat(self, path))
        real = self._trail(path)
        if status is not None:
            self._place(real)
            if self.live:
                self.heard("modes", path, f"{stat.S_IMODE(status.st_mode):04o}")
        return status

    def executable(self, path: str) -> bool:
        answer = Host.executable(self, path)
        if answer:
            self.kept.programs[self._trail(path)] = None
        return answer

    # --- what can't be a file --------------------------------------------------------------------------

    def device(self, path: str) -> DeviceNode | None:
        node = Host.device(self, path)
        if node is not None:
            facts = {"major": node.major, "minor": node.minor, "mode": f"{node.mode:04o}"}
            self.heard("devices", path, {**facts, "gid": node.gid} if node.gid else facts)
        return node

    def file_system(self, path: str) -> FileSystem | None:
        file_system = Host.file_system(self, path)
        if file_system is not None:
            self.heard("filesystems", path, plain(file_system))
        return file_system

    def kernel_log(self) -> tuple[str, ...] | None:
        lines = self._noting_unreadable("/dev/kmsg", lambda: Host.kernel_log(self))
        if lines is not None:
            self.kept.log[:] = self._latest(lines)
        return lines

    def _latest(self, lines: tuple[str, ...]) -> list[str]:
        """The end of a log that is larger than the limit of a file."""
        left = MOST_FILE
        for number, line in enumerate(reversed(lines)):
            left -= len(line) + 1
            if left < 0:
                self.kept.left_out["/dev/kmsg"] = f"the first {len(lines) - number} lines exceed the limit"
                return list(lines[-number:]) if number else []
        return list(lines)

    def listener(self, path: str) -> tuple[str, int]:
        answer = Host.listener(self, path)
        if answer[0] != "absent":
            self.heard("sockets", path, answer[0])
        return answer

    def run(self, argv: Sequence[str], **options: Any) -> Completed:
        done = Host.run(self, argv, **options)
        # queries of gpunode's own children have sections of their own; a missing program needs no entry
        if argv[0] != sys.executable and done.code != 127:
            answer: dict[str, Any] = {"code": done.code}
            for name, text in (("stdout", done.stdout), ("stderr", done.stderr)):
                answer[name] = text[:MOST_FILE]
                if len(text) > MOST_FILE:
                    self.kept.left_out[f"{name} of {shlex.join(argv)}"] = (
                        f"{len(text)} characters exceed the limit"
                    )
            self.heard("commands", shlex.join(argv), answer | ({"timedOut": True} if done.timed_out else {}))
        return done

    def heard(self, section: str, key: str, value: Any) -> None:
        """Objects are merged: a daemon's answers come one by one. A recording is copied unchanged."""
        if self.live:
            place = self.kept.recording.setdefault(section, {})
            before = place.get(key)
            merge = section == "daemons" and isinstance(before, dict) and isinstance(value, dict)
            place[key] = {**before, **value} if merge and before is not None else value

    # --- keeping ---------------------------------------------------------------------------------------

    def _noting_unreadable(self, path: str, read: Callable[[], _Answer]) -> _Answer:
        """Missing permission is stored as such, because the file would otherwise look missing."""
        try:
            return read()
        except Unreadable as error:
            self.heard("unreadable", path, error.message)
            raise

    def _keep(self, real: str, data: bytes) -> None:
        total = sum(map(len, self.kept.files.values()))
        if len(data) > MOST_FILE or total + len(data) > MOST_BYTES:
            self.kept.left_out[real] = f"{len(data)} bytes exceed the limit"
            self.kept.files.setdefault(real, b"")
        elif data or real not in self.kept.files:
            self.kept.files[real] = data
        self._place(real)

    def _place(self, real: str) -> None:
        """Records that a path exists: a directory, a link, or a file without its contents."""
        target = self._link(real)
        if target is not None:
            self.kept.links[real] = target
            return
        try:
            status = os.lstat(self._here(real))
        except OSError:
            return
        if stat.S_ISDIR(status.st_mode):
            self.kept.directories[real] = None
        else:
            self.kept.files.setdefault(real, b"")
            self.kept.times[real] = status.st_mtime

    def _trail(self, path: str, *, follow: bool = True) -> str:
        """Where a path leads on the node; every link in it is stored."""

        def target_of(step: str, last: bool) -> str:
            target = self._link(step) if follow or not last else None
            if target is None or (_MAGIC.fullmatch(step) and not last):
                return ""
            self.kept.links[step] = target
            return target

        try:
            return follow_links(path, target_of)
        except OSError:  # a loop
            return path

    def _link(self, step: str) -> str | None:
        try:
            return os.readlink(self._here(step))  # noqa: PTH115 - called for every part of every path
        except (OSError, ValueError):
            return None

    def _here(self, real: str) -> str:
        return real if self.live else f"{self.root}{real}"
