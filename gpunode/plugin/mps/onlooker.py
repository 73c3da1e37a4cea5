"""Watching a daemon that somebody else keeps: NVIDIA's own, or `gpunode mps serve` in another service."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Event, Thread

from gpunode.errors import DaemonError
from gpunode.host import Host
from gpunode.plugin.model import Problem
from gpunode.plugin.mps.control import Control, find_program, taken
from gpunode.plugin.mps.layout import DaemonSpec
from gpunode.plugin.settings import Settings

_SECONDS = 10.0
_SOON_SECONDS = 1.0  # while it isn't there
_MOUNTED = "/mps"  # where NVIDIA's deployment mounts the node's MPS root in the plugin's container


class Onlooker:
    """Like a `Keeper`, without keeping."""

    def __init__(self, host: Host, settings: Settings, spec: DaemonSpec) -> None:
        self.spec = spec
        self.gpu_problems: Mapping[str, Problem] = {}
        self._host = host
        self._settings = settings
        self._absent = Problem(
            "mps",
            f"no MPS control daemon answers at {spec.pipe}; gpunode mps serve and plugin serve --mps run one",
            host.now(),
        )
        self.problem: Problem | None = self._absent
        self._stop = Event()
        self._thread = Thread(target=self._run, name=f"mps {spec.resource}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def adjust(self, spec: DaemonSpec) -> None:
        """Limits are the keeper's business."""
        self.spec = spec

    def stop(self, *, hurry: bool = False) -> None:
        self._stop.set()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        while not self._stop.is_set():
            up = self._answers()
            self.problem = None if up else self._absent
            self._stop.wait(_SECONDS if up else _SOON_SECONDS)

    def _answers(self) -> bool:
        pipe = self.spec.pipe
        mounted = f"{_MOUNTED}/{self.spec.resource}/pipe"
        if not self._host.is_dir(pipe) and self._host.is_dir(mounted):
            pipe = mounted
        if not self._host.exists(f"{pipe}/control"):
            return False
        try:
            program = find_program(self._host, self._settings)
        except DaemonError:  # a container without the driver's programs: whether somebody listens must do
            return taken(self._host, pipe)
        return Control(self._host, program, pipe).answers()
