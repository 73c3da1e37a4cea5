"""Environment variables: which of them set an option, and the report of those that set none."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import typer

from gpunode.commands.options import (
    ONE_SHOT,
    flag_of,
    is_global,
    set_from_environment,
    variable_of,
    variables_of,
)
from gpunode.errors import UsageError
from gpunode.output.render import say

PREFIX = "GPUNODE_"
_SERVICE = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)|_PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?")
"""How the variables end that the kubelet sets in pods, by the name of each Service of the namespace."""


class Variable(NamedTuple):
    """A variable that sets an option. `command` is empty where every command has the option."""

    name: str
    option: str
    command: str
    help: str
    others: tuple[str, ...] = ()


def _prefix(path: str) -> str:
    return f"{PREFIX}{path}".upper().replace("-", "_").replace(" ", "_")


def commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The commands that do something, with their full names."""
    names = list(getattr(command, "commands", {}))
    for name in names:
        yield from commands(command.get_command(None, name), f"{path} {name}".strip())
    if not names:
        yield path, command


def variables(root: Any) -> list[Variable]:
    """Every variable that sets an option of a command's help page, those of all commands first."""
    listed: dict[tuple[str, str], Variable] = {}
    for path, command in commands(root, ""):
        prefix = _prefix(path)
        for option in command.listed_options(typer.Context(command)):
            if not set_from_environment(option):
                continue
            names = variables_of(option)
            common = is_global(option)
            own = names[0] if common else getattr(option, "variable", "") or variable_of(option, prefix)
            others = tuple(name for name in names if name != own)
            variable = Variable(own, flag_of(option), "" if common else path, option.help, others)
            listed.setdefault((variable.command, own), variable)
    return sorted(listed.values(), key=lambda variable: bool(variable.command))


def check_environment(context: Any, environ: Mapping[str, str]) -> None:
    """Warn of those of the GPUNODE variables `environ` that set no option. `UsageError` for one named after a
    one-shot flag of this command: without --dry-run the command would change the node.

    Variables named after other commands are ignored: those commands check them.
    """
    names = sorted(name for name in environ if environ[name] and not _SERVICE.search(name))
    prefix = context.auto_envvar_prefix
    options, table = context.command.get_params(context), context.find_root().command
    for name in sorted(set(names) - _known(options, prefix)):
        for option in options:
            if option.name in ONE_SHOT and name == variable_of(option, prefix):
                hint = "give it on the command line"
                raise UsageError(f"{name}: {flag_of(option)} has no variable", hint=hint)
        if name.startswith(f"{prefix}_"):
            _warn(name, list(_known(options, prefix)))
        elif not any(name.startswith(f"{_prefix(command)}_") for command in table.commands):
            _warn(name, [variable.name for variable in variables(table)])


def _warn(name: str, known: list[str]) -> None:
    from difflib import get_close_matches

    suggestion = next(iter(get_close_matches(name, known, 1, 0.8)), "")
    say(f"warning: {name} is unknown" + (f"; did you mean {suggestion}?" if suggestion else ""))


def _known(options: list[Any], prefix: str) -> set[str]:
    automatic = [
        option for option in options if option.name not in ONE_SHOT and not getattr(option, "variable", "")
    ]
    declared = {name for option in options for name in variables_of(option)}
    own = {variable_of(option, prefix) for option in automatic if option.param_type_name == "option"}
    earlier = {f"{prefix}_{option.name}".upper() for option in automatic}  # Click's names, which still work
    return declared | own | earlier
