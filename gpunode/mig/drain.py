"""Stopping what the user names so that GPUs come free, and starting again what can be started."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from gpunode.dataclass import dataclass
from gpunode.errors import GpunodeError, PreconditionError, UsageError
from gpunode.host import Host
from gpunode.mig.busy import DRM, Obstacle
from gpunode.result import Progress

_STOP_SECONDS = 120.0
_TERM_SECONDS = 30.0
_CONTAINER = re.compile(r"(docker|podman):([0-9a-f]{12})", re.ASCII)
_UNIT = re.compile(r"[A-Za-z0-9:_.\\@-]{1,255}", re.ASCII)


@dataclass(frozen=True)
class Drained:
    """What was stopped. Units, containers (ENGINE:ID) and nvidia_drm, if it was unloaded, are brought back;
    processes are not."""

    units: tuple[str, ...] = ()
    module: bool = False
    pids: tuple[int, ...] = ()
    containers: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All of it."""
        return (
            *self.units,
            *((DRM,) if self.module else ()),
            *map(str, self.pids),
            *self.containers,
        )

    @property
    def again(self) -> tuple[tuple[str, ...], ...]:
        """The commands that bring it back."""
        modules = (("modprobe", DRM),) if self.module else ()
        started = (one.split(":") for one in self.containers)
        return (
            *modules,
            *(("systemctl", "start", unit) for unit in self.units),
            *((engine, "start", identifier) for engine, identifier in started),
        )


def drain(host: Host, words: Sequence[str], found: Sequence[Obstacle], progress: Progress) -> Drained:
    """Stop what `words` name: units, process ids, containers, or nvidia_drm. All are looked at before the
    first.

    `UsageError` for a process or container that isn't in the way: its number may be another's by now.
    `PreconditionError` for what doesn't stop; what had been stopped before is started again.
    """
    for word in words:
        _check(word, found)
    done = Drained()
    try:
        for word in dict.fromkeys(words):
            done = _stop(host, word, done, progress)
    except BaseException:
        bring_back(host, done, progress)
        raise
    return done


def _check(word: str, found: Sequence[Obstacle]) -> None:
    if word.isascii() and word.isdigit():
        pids = {one.pid for one in found if one.pid}
        if int(word) not in pids:
            known = ", ".join(map(str, sorted(pids))) or "none"
            raise UsageError(f"process {word} isn't in the way", hint=f"processes that are: {known}")
    elif word.startswith(("docker:", "podman:")):
        containers = sorted({one.drain for one in found if one.engine})
        if word not in containers:
            known = ", ".join(containers) or "none"
            raise UsageError(f"container {word} isn't in the way", hint=f"containers that are: {known}")
    elif not _UNIT.fullmatch(word) or word.startswith("-"):
        raise UsageError(
            f"{word!r} can't be drained",
            hint="name a systemd unit, a process id, a container (docker:ID), or nvidia_drm",
        )


def _stop(host: Host, word: str, done: Drained, progress: Progress) -> Drained:
    if word.isdigit():
        _end(host, int(word), progress)
        return replace(done, pids=(*done.pids, int(word)))
    if container := _CONTAINER.fullmatch(word):
        _call(host, (container[1], "stop", "-t", f"{_TERM_SECONDS:g}", container[2]), progress)
        return replace(done, containers=(*done.containers, word))
    if word == DRM:
        _call(host, ("modprobe", "-r", DRM), progress)
        return replace(done, module=True)
    unit = word if "." in word else f"{word}.service"
    if not host.run(("systemctl", "is-active", "--quiet", unit), timeout=10.0).ok:
        progress.note(f"{unit} isn't running")
        return done
    _call(host, ("systemctl", "stop", unit), progress)
    return replace(done, units=(*done.units, unit))


def _end(host: Host, pid: int, progress: Progress) -> None:
    with progress.step(f"end process {pid}"):
        try:
            host.signal(pid, "TERM")
        except ProcessLookupError:
            return
        except PermissionError as error:
            raise PreconditionError(
                f"process {pid} can't be ended: {error}", hint="run it as root"
            ) from error
        if not host.wait_until(lambda: not _lives(host, pid), _TERM_SECONDS):
            raise PreconditionError(
                f"process {pid} hasn't ended within {_TERM_SECONDS:g} s of SIGTERM",
                hint="end it yourself, then run this again",
                code="mig-busy",
            )


def _lives(host: Host, pid: int) -> bool:
    try:
        status = host.read_text(f"/proc/{pid}/stat") or ""
    except GpunodeError:
        return True
    state = status.rpartition(")")[2].split()[:1]
    return bool(state) and state != ["Z"]  # a zombie has closed its files


def _call(host: Host, argv: tuple[str, ...], progress: Progress) -> None:
    with progress.step(" ".join(argv)):
        answer = host.run(argv, timeout=_STOP_SECONDS)
    if not answer.ok:
        said = (answer.stderr or answer.stdout).strip().splitlines()
        reason = "took too long" if answer.timed_out else said[-1] if said else f"exit code {answer.code}"
        raise PreconditionError(f"{' '.join(argv)}: {reason}", hint="look at it by hand", code="mig-busy")


def bring_back(host: Host, done: Drained, progress: Progress) -> tuple[str, ...]:
    """Start again what was stopped; gives what didn't start, in words."""
    troubles = []
    for argv in done.again:
        with progress.step(" ".join(argv)):
            answer = host.run(argv, timeout=_STOP_SECONDS)
        if not answer.ok:
            said = (answer.stderr or answer.stdout).strip().splitlines()
            troubles.append(f"{' '.join(argv)} failed: {said[-1] if said else f'exit code {answer.code}'}")
    return tuple(troubles)
