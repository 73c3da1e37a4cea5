"""Time limits of queries to the stub's NVML that end because a query hangs, not because time has passed.

The stub counts the calls that a `Fault` with `times` hangs, see `StubNode.fault_calls`. As soon as a child of
`HangingHost` is in such a call, the time for which its parent or itself waits passes at once.

``python -m tests.plugin.hanging_nvml plugin serve FLAGS...`` runs the plugin on such a host, with the
repository in `PYTHONPATH`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from fixtures.scenario import Fault
from fixtures.stubs import SCENARIO_VARIABLE
from gpunode.gpu import nvml_watcher
from gpunode.gpu.child import module_argv
from gpunode.host import Host
from gpunode.host.process import LineChild

ENDLESS = Fault("", hang=600.0, times=10**6)
"""A hang of a function, still to be named, that counts its calls."""
_MODULE = "tests.plugin.hanging_nvml"
_POLL_SECONDS = 0.01
_HOUR = 3600.0


class _Hangs:
    """True as soon as one more call hangs than at the start."""

    def __init__(self, scenario: Path) -> None:
        self._scenario = scenario
        self._before = self._calls()

    def _calls(self) -> int:
        calls = 0
        for counter in self._scenario.parent.glob(f"{self._scenario.name}.calls.*"):
            with suppress(FileNotFoundError):  # another scenario is being written
                calls += counter.stat().st_size
        return calls

    def __bool__(self) -> bool:
        return self._calls() > self._before


@dataclass(frozen=True)
class HangingHost(Host):
    """A host with NVIDIA's stubs in `environ`."""

    skipped: list[float] = field(default_factory=list, compare=False)

    def monotonic(self) -> float:
        return super().monotonic() + sum(self.skipped)

    def start_child(self, argv: Sequence[str]) -> LineChild:
        if nvml_watcher.__name__ not in argv:
            return super().start_child(argv)
        arguments = argv[argv.index(nvml_watcher.__name__) + 1 :]
        return _Child(self, module_argv(_MODULE, *arguments))


class _Child(LineChild):
    """While its NVML hangs, its reader waits on the host's clock only."""

    def __init__(self, host: HangingHost, argv: tuple[str, ...]) -> None:
        self._hangs = _Hangs(Path(host.environ[SCENARIO_VARIABLE]))
        self._skipped = host.skipped
        super().__init__(argv, host.environ)

    def read_line(self, timeout: float) -> str | None:
        line = super().read_line(min(timeout, _POLL_SECONDS))
        if line is None and self._hangs:
            self._skipped.append(timeout)
        return line


class _ChildClock:
    """Module `time` for `nvml_watcher` in the child, whose thread for events may hang as well."""

    def __init__(self) -> None:
        self._hangs = _Hangs(Path(os.environ[SCENARIO_VARIABLE]))

    def monotonic(self) -> float:
        return time.monotonic() + (_HOUR if self._hangs else 0.0)


def main() -> int:
    """The child: `nvml_watcher` with the arguments of its parent."""
    nvml_watcher.time = _ChildClock()  # type: ignore[assignment,attr-defined]
    return nvml_watcher.main()


if __name__ == "__main__":
    if sys.argv[1:3] != ["plugin", "serve"]:
        sys.exit(main())
    from gpunode.commands import plugin  # children start faster without it

    flags = sys.argv[3:]
    options = {name[2:].replace("-", "_"): value for name, value in zip(flags[::2], flags[1::2], strict=True)}
    plugin.serve(HangingHost(environ=dict(os.environ)), options)
