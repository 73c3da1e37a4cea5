"""Note of the question that NVML is being asked. The child writes it, for its parent.

The note is a file without a name that both processes have open. It survives the child, and unlike a line on
stdout it costs the parent nothing while all is well.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from threading import Lock

from gpunode.dataclass import dataclass

GPU, LINKS, EVENTS = "gpu", "links", "events"
"""What is given up when a question hangs or crashes: the GPU, its links, or its events."""

_LINK_FUNCTIONS = ("nvmlDeviceGetNvLink", "nvmlDeviceGetTopology")
_EVENT_FUNCTIONS = ("nvmlEventSet", "nvmlDeviceRegisterEvents", "nvmlDeviceGetSupportedEventTypes")
_RECORD_BYTES = 256
_QUESTION, _WAIT = 0, _RECORD_BYTES
_WAIT_FUNCTION = "nvmlEventSetWait"


@dataclass(frozen=True)
class NvmlQuestion:
    """An NVML function and the indices of the GPUs that it is about, none if it is about the driver."""

    function: str
    gpus: tuple[int, ...] = ()

    @property
    def part(self) -> str:
        """GPU, LINKS or EVENTS."""
        if self.function.startswith(_LINK_FUNCTIONS):
            return LINKS
        return EVENTS if self.function.startswith(_EVENT_FUNCTIONS) else GPU

    def __str__(self) -> str:
        gpus = " and ".join(f"GPU {index}" for index in self.gpus)
        return f"{self.function} of {gpus}" if gpus else self.function


class Note:
    """The child's side. `file` is the descriptor of the note, -1 if nobody reads it.

    One question is asked at a time, whatever the thread, so that the note is never ambiguous. Only the wait
    for events, which takes most of the time, has its own place in the note.
    """

    def __init__(self, file: int = -1) -> None:
        self._file = file
        self._lock = Lock()
        self._count = 0

    @contextmanager
    def asking(self, function: str, gpus: Sequence[int]) -> Iterator[None]:
        """Keep a note of the question while it is asked."""
        if self._file < 0:
            yield
            return
        waits = function == _WAIT_FUNCTION
        place = _WAIT if waits else _QUESTION
        with nullcontext() if waits else self._lock:
            self._count += not waits
            self._write(place, function, gpus)
            try:
                yield
            finally:
                self._write(place, "", ())

    def _write(self, place: int, function: str, gpus: Sequence[int]) -> None:
        record = json.dumps([self._count, function, list(gpus)])
        os.pwrite(self._file, record.encode().ljust(_RECORD_BYTES), place)


def read_note(data: bytes) -> tuple[int, NvmlQuestion | None, NvmlQuestion | None]:
    """How many questions were asked so far, the one that has no answer yet, and the wait for events.

    ValueError if the note is malformed.
    """
    return *_record(data[:_RECORD_BYTES]), _record(data[_WAIT:])[1]


def _record(data: bytes) -> tuple[int, NvmlQuestion | None]:
    text = data.rstrip(b" \0")
    if not text:
        return 0, None
    try:
        count, function, gpus = json.loads(text)
        return int(count), NvmlQuestion(str(function), tuple(map(int, gpus))) if function else None
    except (TypeError, RecursionError) as error:
        raise ValueError(f"malformed note {text[:100]!r}") from error
