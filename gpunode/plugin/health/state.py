"""What the judge knows of one GPU besides its marks: whether it was seen whole, and how often it failed."""

from __future__ import annotations

from gpunode.gpu.model import Reading
from gpunode.plugin.model import Problem

SIGHTINGS_TO_HEAL = 2
SETTLED_SECONDS = 10.0  # whole for so long is as good as a second sighting, if nobody looks again
_HOUR = 3600.0
_VANISHED = ("lost:", "(NVML 15)")  # remember.NOT_LISTED and NVML_ERROR_GPU_IS_LOST: no passing trouble


class GpuState:
    """One GPU. Times are seconds since the epoch."""

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid
        self.reading: Reading | None = None
        self.reading_at = 0.0
        self.last_good: Reading | None = None  # the last reading without an error
        self.problem: Problem | None = None  # lost, or the driver is broken
        self._sightings = 0
        self._whole_since = 0.0
        self._episodes: list[float] = []
        self._losses: list[float] = []
        self._vanished = False
        self._listed = False  # the inventory had nothing against it

    def lose(self, reason: str, now: float) -> None:
        """It can't be asked."""
        self._vanished = self._vanished or any(sign in reason for sign in _VANISHED)
        if self.problem is None or self.problem.code != "lost":
            self._losses = [*(when for when in self._losses if now - when < _HOUR), now]
            self.problem = Problem("lost", reason, now)
        elif self.problem.reason != reason:
            self.problem = Problem("lost", reason, self.problem.since)
        self._sightings = 0
        self._listed = False

    def mute(self, reason: str, now: float) -> None:
        """It is listed as whole, but can't be read."""
        listed = self._listed
        self.lose(reason, now)
        self._listed = listed

    def speaks(self, now: float) -> None:
        """It can be read again: a first sighting, unless the inventory says otherwise."""
        if self._listed:
            self._sightings, self._whole_since = 1, now

    def blind(self, problem: Problem) -> None:
        """No GPU can be asked."""
        if self.problem is None or self.problem.code != "lost":
            self.problem = problem
        self._sightings = 0

    def whole(self, now: float) -> None:
        """It was seen without an error."""
        if self._sightings == 0:
            self._whole_since = now
        self._sightings += 1
        self._listed = True

    def settle(self, now: float, hold: float) -> bool:
        """Let time pass; True if the GPU is back after it had vanished, which takes a reset."""
        if self.problem is None or self._sightings == 0 or (self.reading is not None and self.reading.error):
            return False
        whole = now - self._whole_since
        if self._sightings < SIGHTINGS_TO_HEAL and whole < SETTLED_SECONDS:
            return False
        lost = self.problem.code == "lost"
        if lost and len(self._losses) > 1 and whole < self.longer(hold, len(self._losses) - 2):
            return False
        vanished, self._vanished = self._vanished, False
        self.problem = None
        return vanished

    def episode(self, now: float) -> None:
        """It got a mark and had none."""
        self._episodes = [*self._episodes[-31:], now]

    def recent(self, now: float) -> int:
        """How often it was marked within the last hour."""
        return sum(now - when < _HOUR for when in self._episodes)

    def longer(self, hold: float, times: int) -> float:
        """Twice as long each time, up to an hour."""
        return max(hold, min(hold * 2.0 ** min(times, 16), _HOUR))
