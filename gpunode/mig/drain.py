"""Stopping what the user names so that GPUs come free, and starting again what can be started."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from gpunode.dataclass import dataclass, replace
from gpunode.errors import GpunodeError, PreconditionError, UsageError
from gpunode.host import Completed, Host
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
        return tuple(argv for argv, _ in self.parts())

    def parts(self) -> Iterator[tuple[tuple[str, ...], Drained]]:
        """Each of these commands, with what it brings back."""
        if self.module:
            yield ("modprobe", DRM), Drained(module=True)
        for unit in self.units:
            yield ("systemctl", "start", unit), Drained(units=(unit,))
        for container in self.containers:
            engine, _, identifier = container.partition(":")
            yield (engine, "start", identifier), Drained(containers=(container,))

    def plus(self, other: Drained) -> Drained:
        """Both."""
        return Drained(
            (*self.units, *other.units),
            self.module or other.module,
            (*self.pids, *other.pids),
            (*self.containers, *other.containers),
        )


_NOTHING = Drained()


def drain(
    host: Host,
    words: Sequence[str],
    found: Sequence[Obstacle],
    progress: Progress,
    done: Drained = _NOTHING,
    keep: Callable[[Drained], None] = lambda _: None,
) -> Drained:
    """Stop what `words` name: units, process ids, containers, or nvidia_drm. All are looked at before the
    first. `done` stands still already; `keep` is told what will, each time before it is stopped.

    `UsageError` for a process or container that isn't in the way: its number may be another's by now.
    `PreconditionError` for what doesn't stop; what `keep` was told last is to be brought back then.
    """
    wanted = [word for word in dict.fromkeys(words) if not _rests(word, done, found)]
    for word in wanted:
        _check(word, found)
    for word in wanted:
        done = _stop(host, word, done, progress, keep)
    return done


def _rests(word: str, done: Drained, found: Sequence[Obstacle]) -> bool:
    """What a run that was killed has stopped: it isn't in the way now, though it was."""
    named = word in done.containers or word in map(str, done.pids)
    return named and word not in {str(one.pid) for one in found if one.pid} | {one.drain for one in found}


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


def _stop(
    host: Host, word: str, done: Drained, progress: Progress, keep: Callable[[Drained], None]
) -> Drained:
    if word.isdigit():
        now = replace(done, pids=_with(done.pids, int(word)))
        keep(now)
        _end(host, int(word), progress)
        return now
    if container := _CONTAINER.fullmatch(word):
        now = replace(done, containers=_with(done.containers, word))
        argv: tuple[str, ...] = (container[1], "stop", "-t", f"{_TERM_SECONDS:g}", container[2])
    elif word == DRM:
        now, argv = replace(done, module=True), ("modprobe", "-r", DRM)
    else:
        unit = word if "." in word else f"{word}.service"
        if not host.run(("systemctl", "is-active", "--quiet", unit), timeout=10.0).ok:
            if unit not in done.units:
                progress.note(f"{unit} isn't running")
            return done
        now, argv = replace(done, units=_with(done.units, unit)), ("systemctl", "stop", unit)
    keep(now)
    _call(host, argv, progress, refused=lambda: keep(done))
    return now


_Item = TypeVar("_Item")


def _with(known: tuple[_Item, ...], one: _Item) -> tuple[_Item, ...]:
    return known if one in known else (*known, one)


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


def _call(host: Host, argv: tuple[str, ...], progress: Progress, refused: Callable[[], None]) -> None:
    """`refused` where it surely goes on; what took too long may still stop."""
    with progress.step(" ".join(argv)):
        answer = host.run(argv, timeout=_STOP_SECONDS)
    if not answer.ok:
        if not answer.timed_out:
            refused()
        said = (answer.stderr or answer.stdout).strip().splitlines()
        reason = "took too long" if answer.timed_out else said[-1] if said else f"exit code {answer.code}"
        raise PreconditionError(f"{' '.join(argv)}: {reason}", hint="look at it by hand", code="mig-busy")


def bring_back(host: Host, done: Drained, progress: Progress) -> tuple[tuple[str, ...], Drained]:
    """Start again what was stopped; gives what didn't start, in words and as it is. What no longer exists is
    told once, and is no matter of ours any more."""
    troubles, still = [], Drained()
    for argv, one in done.parts():
        with progress.step(" ".join(argv)):
            answer = host.run(argv, timeout=_STOP_SECONDS)
        if not answer.ok:
            said = (answer.stderr or answer.stdout).strip().splitlines()
            troubles.append(f"{' '.join(argv)} failed: {said[-1] if said else f'exit code {answer.code}'}")
            if not _gone(argv, answer):
                still = still.plus(one)
    return tuple(troubles), still


def _gone(argv: Sequence[str], answer: Completed) -> bool:
    """A unit that isn't installed (LSB's exit code 5), a container that was removed when it stopped."""
    return answer.code == 5 if argv[0] == "systemctl" else "no such container" in answer.stderr.lower()
