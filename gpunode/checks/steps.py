"""Execution of a fix's steps: files through the journal, programs without a shell, links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpunode.errors import DaemonError, PreconditionError
from gpunode.gpu.child import module_argv
from gpunode.host import Host
from gpunode.host.journal import FileEdit, Journal, lock_path
from gpunode.host.transaction import LOCK_SECONDS, Restart, attempt, change_files
from gpunode.output.result import Change, Progress, Step

_OPERATION = "doctor-fix"
_SECONDS = 120.0  # an initramfs build, or a daemon that stops slowly
_OURS = "gpunode"


@dataclass(frozen=True)
class CarriedOut:
    """What was done. `journal` is the entry that rolls the files back, empty if none was written."""

    changes: tuple[Change, ...] = ()
    commands: tuple[str, ...] = ()
    journal: str = ""
    notes: tuple[str, ...] = ()


def carry_out(
    host: Host, check: str, steps: Sequence[Step], restart: Restart, progress: Progress
) -> CarriedOut:
    """Write files first, then create links and run programs in their order; roll back on failure.

    `restart` restarts the engine of another command's killed run; see `host.transaction.begin`.
    `DaemonError` for a program that fails, or `RolledBackError` if files were rolled back because of it.
    `PreconditionError` if this user has no permission.
    """
    if not host.live:
        raise PreconditionError("fixes can be applied only on the node itself", hint="remove --root")
    files = [step for step in steps if step.path and not step.link]
    rest = [step for step in steps if step.argv or step.link]
    shown = tuple(" ".join(step.argv) if step.argv else f"ln -s {step.link} {step.path}" for step in rest)

    def plan() -> tuple[FileEdit, ...]:
        return tuple(FileEdit(step.path, host.read_bytes(step.path), step.content.encode()) for step in files)

    def activate() -> None:
        _run(host, rest, progress)

    if not files:
        activate()
        _note(host, check, shown)
        return CarriedOut((), shown)
    context = {"check": check, "commands": list(shown)}
    done = change_files(host, _OPERATION, plan, restart, context=context, activate=activate)
    if not done.journal:  # the files already had the right contents
        activate()
    return CarriedOut(tuple(edit.change() for edit in done.edits), shown, done.journal, done.notes)


def _note(host: Host, check: str, commands: tuple[str, ...]) -> None:
    """Record in the journal what was run; no file needs to be restored."""
    journal = Journal.of(host)
    context = {"engine": "", "units": [], "check": check, "commands": list(commands)}
    with host.lock(lock_path(host), LOCK_SECONDS):
        journal.mark(journal.begin(_OPERATION, (), context), "committed")
        journal.prune()


def _run(host: Host, steps: Sequence[Step], progress: Progress) -> None:
    made: list[str] = []

    def each() -> None:
        for step in steps:
            if step.link:
                made.extend(_link(host, step))
            else:
                _call(host, step.argv, progress)

    def back(_error: BaseException) -> None:
        for path in made:
            host.remove(path)

    attempt(each, back)


def _link(host: Host, step: Step) -> list[str]:
    if host.readlink(step.path) == step.link:
        return []
    if host.is_symlink(step.path) or host.exists(step.path):
        raise PreconditionError(
            f"{step.path} already exists and is something else", hint=f"inspect it: ls -l {step.path}"
        )
    host.make_dirs(step.path.rpartition("/")[0])
    host.make_link(step.path, step.link)
    return [step.path]


def _call(host: Host, argv: tuple[str, ...], progress: Progress) -> None:
    words = module_argv(_OURS, *argv[1:]) if argv[0] == _OURS else argv
    with progress.step(" ".join(argv)):
        done = host.run(words, timeout=_SECONDS)
    if not done.ok:
        said = (done.stderr or done.stdout).strip().splitlines()
        reason = "timed out" if done.timed_out else (said[-1] if said else f"exit code {done.code}")
        raise DaemonError(
            f"{' '.join(argv)}: {reason}", hint="run the command manually to see its whole output"
        )
