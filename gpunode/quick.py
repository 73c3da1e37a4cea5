"""`gpunode labels` and `gpunode gpus` without the command line's parser, where their words need none.

Importing Typer takes longer than all else that such a command does, and timers and agents run it all day.
Only a line that can be read in one way is taken: each word is an option of the command's own table with its
value. All else is the command line's: help, mistakes, other spellings, variables that it knows.
"""

from __future__ import annotations

import gc
import os
import sys

TYPE_CHECKING = False  # `typing` itself can wait until the child is on its way
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, NoReturn

    from gpunode.commands.outcome import Session
    from gpunode.output.result import Result

    Line = tuple[str, str, tuple[Any, ...]]
    """The command, what `-o` said, and what is given to the command's `Options`."""

# one short process: collecting while modules are imported costs every command five milliseconds
gc.set_threshold(50_000)

_KINDS = {"labels": "NodeLabels", "gpus": "GpuInventory"}
_VARIABLES = ("ROOT", "OUTPUT", "COLOR", "VERBOSE", "DEBUG", "LABELS_WATCH", "LABELS_DRY_RUN")
_NOTHING = {"root": None, "color": None, "verbose": 0, "debug": False}
_FORMS = ("table", "json", "yaml")
_FLAGS = ("--dry-run", "--no-timestamp", "--use-node-feature-api", "--fail-on-init-error")
_VALUED = (
    *("-o", "--to", "--output-file", "--machine-type-file", "--mig-strategy", "--resource-name", "--include"),
    *("--exclude", "--kubeconfig", "--context", "--server", "--namespace", "--node-name", "--pod-name"),
)
"""Options that change nothing about this machine's NVML being asked, once and where the loader finds it."""
_DECISIVE = ("VENDOR", "SIMULATE", "DISCOVERY_STRATEGY", "CONFIG_FILE", "DRIVER_ROOT", "CTR_PATH", "ONESHOT")
"""How the names of our variables end that may change it, and those of NVIDIA's."""
_THEIRS = (
    *("DEVICE_DISCOVERY_STRATEGY", "CONFIG_FILE"),
    *("NVIDIA_DRIVER_ROOT", "CONTAINER_DRIVER_ROOT", "DRIVER_ROOT_CTR_PATH"),
)
_DRIVER_ROOT = "/driver-root"
"""Where a container has the driver; NVML is loaded from there."""


def run(argv: Sequence[str]) -> int | None:
    """The exit code; None, and nothing was done, where the command line has to read it."""
    if not _ours(argv, os.environ):
        return None
    from gpunode.gpu.child import begin, end_begun

    try:
        if asks_nvml(argv[1:], os.environ):
            begin("gpunode.gpu.probe")
        line = read(argv, os.environ)
        return None if line is None else _run(*line)
    finally:
        end_begun()


def _run(name: str, output: str, arguments: tuple[Any, ...]) -> int:
    from importlib import import_module

    from gpunode.commands.outcome import run_command
    from gpunode.output.render import Output

    def call(session: Session) -> Result:
        command = import_module(f"gpunode.commands.{name}")
        done: Result = command.run(session.host, command.Options(*arguments), session.progress)
        return done

    chosen = {"output": Output(output) if output else None, **_NOTHING}
    return run_command(_KINDS[name], chosen, call)


def asks_nvml(words: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether it is all but certain, before anything is loaded, that this machine's NVML will be asked.

    Nobody's NVML is to be started for a command that has nothing to do with it.
    """
    value = False  # whether the next word is an option's
    for word in words:
        option, equals, _ = word.partition("=")
        if not value and option not in _FLAGS and option not in _VALUED:
            return False
        value = not value and not equals and option in _VALUED
    ours = any(name.endswith(_DECISIVE) for name in environ if name.startswith(("GPUNODE_", "GFD_")))
    return not ours and not any(name in environ for name in _THEIRS) and not os.path.lexists(_DRIVER_ROOT)


def _ours(argv: Sequence[str], environ: Mapping[str, str]) -> bool:
    return bool(argv) and argv[0] in _KINDS and not any(f"GPUNODE_{name}" in environ for name in _VARIABLES)


def read(argv: Sequence[str], environ: Mapping[str, str]) -> Line | None:
    """What a command line says, None for one that isn't plain."""
    if not _ours(argv, environ):
        return None
    words, output = list(argv[1:]), ""
    if len(words) > 1 and words[-2] == "-o" and words[-1] in _FORMS:
        output = words[-1]
        del words[-2:]
    if argv[0] == "gpus":
        return None if words else ("gpus", output, ())
    return _labels(words, output)


def _labels(words: list[str], output: str) -> Line | None:
    if not words:
        return "labels", output, ({}, False)
    from gpunode.commands.labels import options
    from gpunode.commands.plugin_options import with_go_words

    rows = {flag: row for row in options() for flag in row.flags}
    given: dict[str, Any] = {}
    dry_run = False
    for word in with_go_words(words, options()):
        flag, equals, value = word.partition("=")
        row = rows.get(flag)
        if word == "--dry-run":
            dry_run = True
        elif row is None or not equals:
            return None
        elif row.takes_many:
            given[row.field] = (*given.get(row.field, ()), value)
        else:
            given[row.field] = value
    return "labels", output, (given, dry_run)


def leave(code: int) -> NoReturn:
    """Exit without the interpreter's last collection: 12 ms to find that everything goes anyway."""
    gc.freeze()
    sys.exit(code)


def leave_at_once(code: int) -> NoReturn:
    """Exit without taking the interpreter apart, 2 ms more: no thread and no exit handler waits for that."""
    from contextlib import suppress

    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # nobody reads it any more, or the disk is full: `render` has told
            stream.flush()
    os._exit(code)
