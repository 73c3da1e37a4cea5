"""The options of `plugin serve`, for the command line and for the commands that use them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
import typer.core

from gpunode.commands.help_page import HelpCommand
from gpunode.commands.options import is_global, one_of
from gpunode.errors import ConfigError
from gpunode.host import Host
from gpunode.output.result import ExitCode, Result
from gpunode.plugin.config.options import BY_FIELD, OPTIONS, Option, metavar
from gpunode.plugin.config.resolve import OptionSources, ResolvedSettings, option_value
from gpunode.plugin.config.settings import Settings
from gpunode.plugin.config.values import FALSE, TRUE, ConfigProblem

SERVING = tuple(option for option in OPTIONS if not option.part)
"""Those that have a flag where devices are served."""


def default_text(option: Option) -> str:
    """The default as a user would write it, empty for none."""
    return value_text(option, Settings())


def value_text(option: Option, settings: Settings) -> str:
    """An effective value as a user would write it."""
    value = option_value(settings, option)
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}s" if metavar(option) == "DURATION" else f"{value:g}"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def sources(host: Host, values: Mapping[str, Any], part: str = "", command: str = "") -> OptionSources:
    """Options of the command line, by field; those that it doesn't set are left out."""
    flags = {
        field: [value] if isinstance(value, str) else list(value)
        for field, value in values.items()
        if value is not None and value != ()
    }
    return OptionSources(host, flags, part, command or part or "plugin serve")


def refused(kind: str, problems: Sequence[ConfigProblem]) -> Result:
    """Every problem at once; usage (2) if all are on the command line or in the environment."""
    usage = all(problem.usage for problem in problems)
    code = ExitCode.USAGE if usage else ExitCode.FAILED
    errors = tuple(problem.info() for problem in problems)
    return Result(kind, status="error", exit_code=code, errors=errors)


def refuse_empty(source: OptionSources, resolved: ResolvedSettings) -> None:
    """`ConfigError` for a file without content. /dev/null is the config manager's word for no file."""
    if source.file and not resolved.content.strip() and source.reader.realpath(source.file) != "/dev/null":
        raise ConfigError(f"{source.file} is empty", hint="a config file begins with: version: v1")


def with_go_words(
    arguments: Sequence[str], options: Sequence[Option] = SERVING, *, words_follow: bool = True
) -> list[str]:
    """The same command line in our spelling: a boolean always with its value, two dashes before a name.

    Go's flag package takes ``-name`` for ``--name`` and a boolean without a value; existing deployments do.
    Where words may follow, as FILE does, a word behind a boolean is its value only if it is one.
    """
    booleans = {flag for option in options if option.kind == "boolean" for flag in option.flags}
    known = {flag for option in options for flag in option.flags}
    rewritten: list[str] = []
    remaining = list(arguments)
    while remaining:
        word = remaining.pop(0)
        name = word.partition("=")[0]
        if f"-{name}" in known:
            word, name = f"-{word}", f"-{name}"
        if word in booleans:
            valued = remaining and (
                remaining[0] in TRUE | FALSE or not (words_follow or remaining[0].startswith("-"))
            )
            word += f"={remaining.pop(0) if valued else 'true'}"
        elif word in known and remaining:
            word += f"={remaining.pop(0)}"  # a value may look like an option
        rewritten.append(word)
    return rewritten


# Commands that have the options of `plugin serve`, which are one table; see plugin/config/options.py.
#
# The table is read when such a command runs or shows its help, not at every start.


class SettingOption(typer.core.TyperOption):
    """One option of the table. Default and variable aren't resolved here, because their provenance is
    shown."""

    def __init__(self, row: Any, metavar: str, default: str) -> None:
        values = ("true", "false") if row.kind == "boolean" else (*row.allowed, *row.known)
        offered = one_of(*values, comma=row.takes_many)
        super().__init__(
            param_decls=[row.field, *row.flags],
            help=row.help,
            multiple=row.takes_many,
            metavar=metavar,
            show_envvar=True,
            show_default=default or False,
            rich_help_panel=_heading(row),
            autocompletion=lambda context, args, incomplete: offered(incomplete),
        )
        self.ignored = row.ignored
        self.variable = row.variable
        self.envvar = [row.variable, *row.variables]

    def resolve_envvar_value(self, ctx: Any) -> None:
        """Left to the command: see the class."""


def _heading(row: Option) -> str | None:
    return f"{row.section} options" if row.section else None


def plugin_option(field: str, *others: str, **attributes: Any) -> Any:
    """An option of `plugin serve` for a command that has few of them; `others` are more flags."""
    row = BY_FIELD[field]
    return typer.Option(*row.flags, *others, help=row.help, rich_help_panel=_heading(row), **attributes)


StateDirOption = Annotated[str, plugin_option("state_dir", metavar="PATH")]


class SettingsCommand(HelpCommand):
    """A command with every option of the table, after its own options and before the global ones."""

    _settings: list[SettingOption] | None = None

    def rows(self) -> Any:
        """The option's part of the table."""
        return SERVING

    def get_params(self, ctx: Any) -> list[Any]:
        if self._settings is None:
            self._settings = [
                SettingOption(row, metavar(row), row.default or default_text(row)) for row in self.rows()
            ]
        params = super().get_params(ctx)
        own_params = [param for param in params if not is_global(param)]
        return [*own_params, *self._settings, *(param for param in params if param not in own_params)]

    def listed_options(self, ctx: Any) -> list[Any]:
        return [option for option in super().listed_options(ctx) if not getattr(option, "ignored", False)]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        takes_words = any(param.param_type_name == "argument" for param in self.params)
        return super().parse_args(ctx, with_go_words(args, self.rows(), words_follow=takes_words))


class CheckConfigCommand(SettingsCommand):
    """Its help doesn't repeat that of `plugin serve`."""

    def listed_options(self, ctx: Any) -> list[Any]:
        return [option for option in super().listed_options(ctx) if not isinstance(option, SettingOption)]
