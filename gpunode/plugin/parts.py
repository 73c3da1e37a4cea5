"""What runs beside the ledger and the kubelet links: each part is given its turn a few times a second."""

from __future__ import annotations

from typing import Protocol


class Part(Protocol):
    """MPS daemons, the config file's watch, the status file, the metrics server."""

    def tick(self, now: float) -> None:
        """Do what is due; `now` is monotonic seconds. Must not wait."""

    def close(self) -> None:
        """The end: give back what was taken."""
