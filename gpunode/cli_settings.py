"""Commands that take the options of `plugin serve`, which are one table; see plugin/config/options.py.

The table is read when such a command runs or shows its help, not at every start.
"""

import copy
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
        self.foreign = list(row.variables)

    def resolve_envvar_value(self, ctx: Any) -> None:
        """Left to the command."""

    def get_help_record(self, ctx: Any) -> Any:
        """Our own variable follows from the name, and so many would bury what the options mean."""
        shown = copy.copy(self)
        shown.envvar, shown.show_envvar = self.foreign, bool(self.foreign)
        return super(SettingOption, shown).get_help_record(ctx)


class SettingsCommand(typer.core.TyperCommand):
    """Has every option of the table, behind its own and before those that all commands have."""

    _settings: list[SettingOption] | None = None

    def rows(self) -> Any:
        """Its part of the table."""
        from gpunode.commands.plugin_options import SERVING

        return SERVING

    def get_params(self, ctx: Any) -> list[Any]:
        if self._settings is None:
            from gpunode.commands.plugin_options import default_text
            from gpunode.plugin.config.options import metavar

            self._settings = [SettingOption(row, metavar(row), default_text(row)) for row in self.rows()]
        named = super().get_params(ctx)
        own = [one for one in named if one.name != "help" and getattr(one, "rich_help_panel", "") != "Global"]
        return [*own, *self._settings, *(one for one in named if one not in own)]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from gpunode.commands.plugin_options import with_go_words

        return super().parse_args(ctx, with_go_words(args, self.rows()))
