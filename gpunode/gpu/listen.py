"""The thread of `sentinel` that waits for NVML's events and tells them as they come."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from threading import Condition, Thread

from gpunode.gpu.events import EventSet
from gpunode.gpu.model import Inventory
from gpunode.gpu.nvml import Nvml
from gpunode.gpu.nvml_errors import GPU_IS_LOST, NvmlError
from gpunode.result import plain

_WAIT_SECONDS = 2.0  # how late it notices that other GPUs are to be watched
_PAUSE_SECONDS = 0.5  # a lost GPU ends every wait at once
_LONGEST_PAUSE_SECONDS = 30.0
_RETRY_LOOKS = 10  # looks, after which a GPU that couldn't be watched is tried again

READ, LOOK = b"r", b"l"


class Listener:
    """Watches the GPUs that `watch` names. `wake_end` has READ or LOOK when the main thread should do so."""

    def __init__(
        self, nvml: Nvml, tell: Callable[..., None], patience: float, skip: Collection[int] | None
    ) -> None:
        """`patience` is how many seconds NVML may take. GPUs whose index is in `skip` aren't watched; with
        None no GPU is."""
        self._patience = patience
        self._skip = skip
        self._nvml = nvml
        self._tell = tell
        self._changed = Condition()
        self._wanted: tuple[tuple[str, int], ...] = ()
        self._version = 0
        self._failed = False
        self._looks = 0
        self._told: object = None
        self._alive = 0.0
        self.wake_end, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._thread = Thread(target=self._run, name="events", daemon=True)

    def watch(self, inventory: Inventory) -> None:
        """Watch every GPU that can be asked; one that can't would make every wait fail."""
        if self._skip is None:
            self._report({"count": 0, "unsupported": [], "failed": {}})
            return
        wanted = tuple(
            (gpu.uuid, gpu.index)
            for gpu in inventory.gpus
            if gpu.uuid and not gpu.error and gpu.index not in self._skip
        )
        with self._changed:
            self._looks += 1
            if wanted != self._wanted or (self._failed and self._looks >= _RETRY_LOOKS):
                self._wanted = wanted
                self._version += 1
                self._looks = 0
                self._changed.notify_all()
        if self._thread.ident is None:
            self._alive = time.monotonic()
            self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether the thread has died."""
        return self._thread.ident is not None and not self._thread.is_alive()

    def stuck(self, now: float) -> bool:
        """Whether NVML has not returned to the thread for longer than it may take."""
        return self._thread.ident is not None and now > self._alive + self._patience + _WAIT_SECONDS

    def _run(self) -> None:
        events: EventSet | None = None
        version = errors = 0
        while True:
            self._alive = time.monotonic()
            try:
                if version != self._version:
                    version, fresh = self._version, self._open()
                    if events is not None:  # only now, so that no event falls between the two
                        events.close()
                    events = fresh
                if events is None:
                    self._rest(_WAIT_SECONDS, version)
                    continue
                event = events.wait(_WAIT_SECONDS)
                errors = 0
            except NvmlError as error:
                if error.code != GPU_IS_LOST:
                    version = 0  # open the set anew
                    self._report({"error": str(error)})
                self._nudge(LOOK)
                errors += error.code != GPU_IS_LOST
                self._rest(min(_PAUSE_SECONDS * 2.0 ** min(errors, 10), _LONGEST_PAUSE_SECONDS), version)
                continue
            if event is not None:
                self._tell(event=plain(event))
                self._nudge(READ)

    def _open(self) -> EventSet | None:
        if not self._wanted:
            return None
        handles = {}
        for uuid, index in self._wanted:
            self._alive = time.monotonic()
            with suppress(NvmlError):  # then registering says what is wrong
                handles[uuid] = self._nvml.handle(index)
        events = self._nvml.watch_events([uuid for uuid, _ in self._wanted], handles)
        self._failed = bool(events.failed)
        self._report(
            {
                "count": len(self._wanted) - len(events.unsupported) - len(events.failed),
                "unsupported": list(events.unsupported),
                "failed": {uuid: str(error) for uuid, error in events.failed.items()},
            }
        )
        return events

    def _report(self, state: dict[str, object]) -> None:
        """Which GPUs are watched; not again while that stays so."""
        if state != self._told:
            self._told = state
            self._tell(watching=state)

    def _rest(self, seconds: float, version: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._version != version, seconds)

    def _nudge(self, what: bytes) -> None:
        with suppress(BlockingIOError):  # the main thread has plenty of them to read
            os.write(self._wake, what)
