"""Updates of the labels: a part of `plugin serve --labels`, and the core of `gpunode labels --watch`.

The caller passes the GPUs; it queries no driver. Its work may be slow (a distant API server), so it isn't
done in the part's turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from gpunode.errors import GpunodeError
from gpunode.gpu.model import Gpu, Inventory
from gpunode.host import Host
from gpunode.plugin.background import BackgroundTask
from gpunode.plugin.config.settings import LabelSettings, Settings
from gpunode.plugin.labels.make import cant_label, label_amd, label_gpus, query_tegra
from gpunode.plugin.labels.model import Labels, Machine
from gpunode.plugin.labels.nvidia import find_vgpus, is_tegra, read_machine
from gpunode.plugin.labels.sinks import Sink, make_sinks
from gpunode.plugin.logfmt import Log, OnChange

Source = Callable[[], tuple[Settings, Inventory | None] | None]
"""The settings and the GPUs as they are now; no inventory: there is no GPU. None: that is unknown yet."""
_LEAST_SECONDS = 1.0
_AGAIN_SECONDS = 5.0  # after a failure; then twice as long each time
_LONGEST_SECONDS = 300.0


class Labeller:
    """A part; see `gpunode.plugin.model.ServicePart`. At its end nothing is removed."""

    def __init__(self, host: Host, log: Log, source: Source) -> None:
        self._host = host
        self._log = log
        self._source = source
        self._say = OnChange(log)
        self._task = BackgroundTask("labels")
        self._sinks: tuple[LabelSettings, tuple[Sink, ...]] | None = None
        self._known: tuple[object, Machine] | None = None
        self._cuda: Inventory | None = None
        self._done: object = None
        self._next = 0.0
        self._failures = 0
        self._warned: tuple[str, ...] = ()
        self.passes = 0
        """How often labels were made."""

    def tick(self, now: float) -> float | None:
        if self._task.busy:
            return _LEAST_SECONDS
        work = self._source()
        if work is None or (work == self._done and now < self._due(work[0])):
            return None
        self._done = work
        self._next = now
        self._task.start(partial(self._pass, *work))
        return _LEAST_SECONDS

    def close(self) -> None:
        """Labels outlive us: those of a restarted plugin must not move any pod."""

    def _due(self, settings: Settings) -> float:
        """When everything is read again without any event."""
        regular = max(settings.labels.sleep_seconds, _LEAST_SECONDS)
        failed = min(_AGAIN_SECONDS * 2.0 ** min(self._failures - 1, 20), _LONGEST_SECONDS)
        return self._next + (min(regular, failed) if self._failures else regular)

    def _pass(self, settings: Settings, inventory: Inventory | None) -> None:
        self.passes += 1
        try:
            labels = self._labels(settings, inventory)
            for sink in self._places(settings):
                done = sink.put(labels.values, dry_run=False)
                if done.action != "unchanged":
                    self._log.info("labels", where=done.path, action=done.action, count=len(labels.values))
        except GpunodeError as error:
            self._failures += 1
            self._say.warning("the labels are unchanged", reason=error.message, hint=error.hint)
            return
        if self._failures:
            self._log.info("the labels are updated again")
        self._failures = 0
        self._say.reset()

    def _labels(self, settings: Settings, inventory: Inventory | None) -> Labels:
        if settings.vendor == "amd":
            labels = label_amd(self._host, settings)
        else:
            inventory = self._with_cuda(settings, inventory)
            machine = self._machine(settings, inventory.gpus if inventory else ())
            labels = label_gpus(self._host, settings, inventory, machine)
        for warning in labels.warnings:
            if warning not in self._warned:
                self._log.warning(warning)
        self._warned = labels.warnings
        return labels

    def _with_cuda(self, settings: Settings, inventory: Inventory | None) -> Inventory | None:
        """On a Tegra CUDA's report, queried until it has answered once, because those GPUs don't change."""
        if not is_tegra(self._host, settings, inventory):
            return inventory
        if self._cuda is None:
            self._cuda, why = query_tegra(self._host, settings, inventory)
            if self._cuda is None:
                raise cant_label(why)
        return self._cuda

    def _machine(self, settings: Settings, gpus: Sequence[Gpu]) -> Machine:
        """Read once for the same GPUs, because reading a device's configuration space wakes it."""
        of = settings.labels, tuple(gpu.pci for gpu in gpus)
        if self._known is None or self._known[0] != of:
            self._known = of, read_machine(self._host, settings.labels, gpus, find_vgpus(self._host))
        return self._known[1]

    def _places(self, settings: Settings) -> tuple[Sink, ...]:
        if self._sinks is None or self._sinks[0] != settings.labels:
            sinks = make_sinks(self._host, settings, LogProgress(self._log))
            self._sinks = settings.labels, sinks
        return self._sinks[1]


class LogProgress:
    """A `Progress` for a service: messages for the user go to the log."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def step(self, text: str) -> AbstractContextManager[None]:
        return nullcontext()

    def note(self, text: str) -> None:
        self._log.info(text)

    def info(self, text: str) -> None:
        self._log.info(text)

    def following(self, text: str, name: str) -> AbstractContextManager[Callable[[str], None]]:
        return nullcontext(lambda _last: None)
