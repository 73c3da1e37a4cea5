"""What speaks against a new daemon.json: dockerd's own flags, and what dockerd says of a staged copy."""

from __future__ import annotations

from gpunode.errors import ConfigError, ValidationError
from gpunode.facts.daemons import Daemon
from gpunode.facts.docker_file import parse_daemon_json
from gpunode.facts.docker_flags import flag_conflicts, flag_default, flag_place, flag_runtimes
from gpunode.facts.processes import environment
from gpunode.facts.units import read_unit
from gpunode.host import COMMAND_NOT_FOUND, Host
from gpunode.runtime import docker_plan
from gpunode.runtime.engine import FileEdit, decode
from gpunode.runtime.refusals import refuse_untrusted

_HAS_VALIDATE = (23,)


def refuse_conflicts(host: Host, daemon: Daemon, after: str) -> None:
    """dockerd refuses to start with a key that is both a flag and in its file; don't write one.

    The flags of the running process count, and those of its unit, which may have changed since.
    """
    tree = parse_daemon_json(after, daemon.config_path)
    conflicts = [key for argv in _command_lines(host, daemon) for key in flag_conflicts(argv, tree)]
    if conflicts:
        raise ConfigError(
            f"dockerd is started with a flag for {', '.join(dict.fromkeys(conflicts))}, and refuses to start"
            f" with the same setting in {daemon.config_path}",
            hint=_take_out(host, daemon, conflicts[0]),
        )


def refuse_flagged(host: Host, daemon: Daemon, names: tuple[str, ...]) -> None:
    """`ConfigError` if a runtime that should go is one of dockerd's flags: no file takes it out."""
    for argv in _command_lines(host, daemon):
        flags = {"runtimes": flag_runtimes(argv), "default-runtime": (flag_default(argv),)}
        for key, given in flags.items():
            name = next((one for one in given if one in names), "")
            if name:
                flag = "--add-runtime" if key == "runtimes" else "--default-runtime"
                raise ConfigError(
                    f"dockerd is started with {flag} for the runtime {name}, which no change of"
                    f" {daemon.config_path} takes back",
                    hint=_take_out(host, daemon, key),
                )


def _command_lines(host: Host, daemon: Daemon) -> tuple[tuple[str, ...], ...]:
    unit = read_unit(host, daemon.unit) if daemon.unit and not daemon.user else None
    own = unit.argv if unit is not None and unit.program == "dockerd" else daemon.argv
    return tuple(dict.fromkeys((daemon.argv, own)))


def _take_out(host: Host, daemon: Daemon, key: str) -> str:
    place = flag_place(host, daemon.unit, key)
    if place:
        path, _, line = place.rpartition(":")
        return f"take the flag out of {place}: ${{EDITOR:-vi}} +{line} {path}; then systemctl daemon-reload"
    return (
        f"take the flag out: {f'systemctl edit --full {daemon.unit}' if daemon.unit else 'its command line'}"
    )


def validate(host: Host, daemon: Daemon, edit: FileEdit) -> tuple[str, ...]:
    """`dockerd --validate` on a staged copy (23.0 and up), else the refusals that are known. Gives notes."""
    reason = docker_plan.refused_by_dockerd(decode(edit.after, edit.path), edit.path, daemon.version)
    if reason:
        there = edit.before is not None
        content = decode(edit.before, edit.path)
        before = docker_plan.refused_by_dockerd(content, edit.path, daemon.version) if there else ""
        raise _refused(edit, reason, before)
    if not host.live:
        return (f"{edit.path} was checked for known mistakes only: no program of that node is run here",)
    if daemon.version < _HAS_VALIDATE:
        return (f"{edit.path} was checked for known mistakes only: --validate came with dockerd 23.0",)
    if daemon.binary is None:
        return (f"{edit.path} was checked for known mistakes only: this dockerd can't be run by others",)
    _ask_dockerd(host, daemon, edit)
    return ()


def _ask_dockerd(host: Host, daemon: Daemon, edit: FileEdit) -> None:
    reason = _refusal(host, daemon, edit.after or b"")
    if reason:
        raise _refused(edit, reason, _refusal(host, daemon, edit.before) if edit.before is not None else "")


def _refused(edit: FileEdit, after: str, before: str) -> ValidationError:
    """Whether the file was broken before we came decides what a person has to do."""
    if before:
        line = before.partition(":")[0]
        return ValidationError(
            f"dockerd refuses {edit.path} as it is: {_placed(edit.path, before)}",
            hint=f"correct it first: ${{EDITOR:-vi}} {f'+{line} ' if line.isdecimal() else ''}{edit.path}",
        )
    return ValidationError(
        f"dockerd would refuse the new {edit.path}: {_placed(edit.path, after)}",
        hint="nothing was written; see the change with --dry-run",
    )


def _placed(path: str, reason: str) -> str:
    line, _, said = reason.partition(": ")
    return f"{path}:{line}: {said}" if line.isdecimal() else reason


def _refusal(host: Host, daemon: Daemon, content: bytes) -> str:
    """What ``dockerd --validate`` says against a file; empty if nothing."""
    with host.temporary_directory() as directory:
        staged = directory / "daemon.json"
        host.write_atomic(str(staged), content, mode=0o600)
        flags = _flags_without_config(daemon.argv)
        known = environment(host, daemon.process.pid) if daemon.process else {}
        answer = host.run(
            [daemon.binary or "dockerd", *flags, "--validate", f"--config-file={staged}"],
            timeout=20.0,
            env={"PATH": known["PATH"]} if "PATH" in known else {},  # where it looks for docker-proxy
        )
    if answer.ok or answer.code == COMMAND_NOT_FOUND:
        return ""
    refuse_untrusted(answer)
    said = (answer.stderr or answer.stdout).strip().splitlines()[-1:] or ["no reason given"]
    return said[0].replace(str(staged), daemon.config_path)


def _flags_without_config(argv: tuple[str, ...]) -> list[str]:
    """The daemon's own flags, so that a conflict between flag and file shows."""
    flags: list[str] = []
    skip = False
    for argument in argv[1:]:
        if skip or argument.startswith("--config-file"):
            skip = argument == "--config-file"
            continue
        flags.append(argument)
    return flags
