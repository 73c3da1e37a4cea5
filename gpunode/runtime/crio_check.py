"""CRI-O's files before they are written: read by ``crio config``, and checked for what is known to end it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gpunode.dataclass import replace
from gpunode.errors import ConfigError, ValidationError
from gpunode.facts.containerd import dig, parse_toml
from gpunode.facts.crio import CrioConfig, CrioFile, compiled_default
from gpunode.facts.daemons import Daemon
from gpunode.facts.processes import option_value
from gpunode.host import COMMAND_NOT_FOUND, Host
from gpunode.runtime.crio_plan import order
from gpunode.runtime.engine import FileEdit, Wanted, text
from gpunode.runtime.refusals import refuse_untrusted

_SECONDS = 20.0


def after(config: CrioConfig, edits: Iterable[FileEdit], directory: str) -> CrioConfig:
    """The configuration as it will be; edits of files that CRI-O doesn't read change nothing of it."""
    files = {file.path: file for file in config.files}
    for edit in edits:
        if edit.path != config.path and not edit.path.startswith(f"{directory}/"):
            continue
        files.pop(edit.path, None)
        if edit.after is not None:
            content = text(edit.after)
            files[edit.path] = CrioFile(edit.path, content, parse_toml(content, edit.path))
    drop_ins = sorted(
        (file for path, file in files.items() if path != config.path), key=lambda f: order(f.path)
    )
    main = [files[config.path]] if config.path in files else []
    return replace(config, files=(*main, *drop_ins))


def validate(
    host: Host,
    daemon: Daemon,
    config: CrioConfig,
    directory: str,
    edits: tuple[FileEdit, ...],
    expected: Wanted | None,
) -> tuple[str, ...]:
    """`ValidationError` if CRI-O would refuse the files or read something else than `expected`; notes."""
    planned = after(config, edits, directory)
    default = planned.named_default
    if default and default not in planned.handlers and default != compiled_default(daemon.version):
        raise ValidationError(
            f"CRI-O would not start: default_runtime is {default}, and no file defines it",
            hint="nothing was written; name another default: grep -rn default_runtime " + directory,
        )
    if host.live and expected is not None:
        _refuse_without_monitor(host, daemon, planned, expected)
    if daemon.binary is None or not host.live:
        return ("CRI-O's files were checked for known mistakes only: its program can't be asked here",)
    with host.temporary_directory() as staging:
        _stage(host, planned, directory, staging)
        argv = [
            daemon.binary,
            "--config",
            f"{staging}/crio.conf",
            "--config-dir",
            f"{staging}/drop-ins",
            "config",
        ]
        answer = host.run(argv, timeout=_SECONDS)
    if answer.code == COMMAND_NOT_FOUND:
        return (f"CRI-O's files were checked for known mistakes only: {daemon.binary} can't be run",)
    refuse_untrusted(answer)
    if not answer.ok:
        said = (answer.stderr or answer.stdout).strip().splitlines()[-1:] or ["no reason given"]
        shown = said[0].replace(f"{staging}/crio.conf", config.path).replace(f"{staging}/drop-ins", directory)
        raise ValidationError(
            f"CRI-O refuses the new files: {shown}",
            hint="nothing was written; correct the file and run this again",
        )
    return _compare(answer.stdout, expected)


def _refuse_without_monitor(host: Host, daemon: Daemon, planned: CrioConfig, expected: Wanted) -> None:
    """``crio config`` doesn't look for the monitor; the start does, and ends without one for any handler."""
    given = planned.setting("runtime", "conmon") or option_value(daemon.argv[1:], "--conmon")
    for handler in expected.handlers:
        path = given or planned.handlers.get(handler.name, {}).get("monitor_path")
        if host.exists(path) if path else host.which("conmon") or host.unsafe_program("conmon"):
            continue
        raise ValidationError(
            f"CRI-O would not start: the handler {handler.name} has no monitor,"
            f" {path or 'conmon in PATH'} isn't there",
            hint="nothing was written; install conmon, or name it: monitor_path in [crio.runtime.runtimes]",
        )


def _stage(host: Host, planned: CrioConfig, directory: str, staging: Path) -> None:
    """Copies under the same names, so that they are read in the same order."""
    host.write_atomic(f"{staging}/crio.conf", b"", mode=0o600)  # naming a file that isn't there is fatal
    host.make_dirs(f"{staging}/drop-ins")
    for file in planned.files:
        main = file.path == planned.path
        place = f"{staging}/crio.conf" if main else f"{staging}/drop-ins{file.path.removeprefix(directory)}"
        host.make_dirs(place.rpartition("/")[0])
        host.write_atomic(place, file.text.encode("utf-8", "surrogateescape"), mode=0o600)


def _compare(printed: str, expected: Wanted | None) -> tuple[str, ...]:
    """What ``crio config`` prints, in which what equals the default is a comment, must have the handlers."""
    if expected is None:
        return ()
    try:
        tree = parse_toml(printed, "the output of crio config")
    except ConfigError as error:
        return (f"CRI-O accepts the new files, and what it prints of them can't be read: {error.message}",)
    for handler in expected.handlers:
        path = dig(tree, "crio", "runtime", "runtimes", handler.name, "runtime_path")
        if path != handler.path:
            raise ValidationError(
                f"CRI-O would read the handler {handler.name} as {path or 'absent'}, not {handler.path}",
                hint="nothing was written; see what it reads: crio config",
            )
    default = dig(tree, "crio", "runtime", "default_runtime")
    if expected.default and default != expected.default:
        raise ValidationError(
            f"CRI-O would take {default or 'its own'} as default, not {expected.default}",
            hint="nothing was written; see what it reads: crio config",
        )
    return ()
