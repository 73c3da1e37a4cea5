"""Commands that take the options of `plugin serve`, which are one table; see plugin/config/options.py.

The table is read when such a command runs or shows its help, not at every start.
"""

from typing import Any

import typer.core


class SettingOption(typer.core.TyperOption):
    """One row of the table. Neither default nor variable are resolved here: their provenance is told."""

    def __init__(self, row: Any, metavar: str, default: str) -> None:
        super().__init__(
            param_decls=[row.field, *row.flags],
            help=row.help,
            multiple=row.takes_many,
            metavar=metavar,
            show_envvar=True,
            show_default=default or False,
        )
        self.variable = row.variable
        self.envvar = [row.variable, *row.variables]

    def resolve_envvar_value(self, ctx: Any) -> None:
        """Left to the command."""


class SettingsCommand(typer.core.TyperCommand):
    """Has every option of the table, before its own."""

    _settings: list[SettingOption] | None = None

    def get_params(self, ctx: Any) -> list[Any]:
        if self._settings is None:
            from gpunode.commands.plugin_options import OPTIONS, default_text, metavar

            self._settings = [SettingOption(row, metavar(row), default_text(row)) for row in OPTIONS]
        return [*self._settings, *super().get_params(ctx)]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from gpunode.commands.plugin_options import with_go_words

        return super().parse_args(ctx, with_go_words(args))
