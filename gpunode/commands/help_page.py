"""Help pages: sections of options, examples, and where the variables are listed."""

from __future__ import annotations

import re
from typing import Any

import typer
import typer.core

from gpunode.commands.options import GLOBAL, LIST, ONE_SHOT, CheckedOptions, flag_of, is_global

WIDTH = 110
_HYPHEN, _SPACE = "\N{NON-BREAKING HYPHEN}", "\N{NO-BREAK SPACE}"
_NAMES = 30  # columns for names; a longer one gets a line of its own
_TOGETHER = 24  # columns; a longer default may be folded
_MANY = 12  # more options than that are shown in sections
VALUES = (
    ("DURATION", "500ms, 60s, 2m or 1h; a number alone is in seconds."),
    (f"ID{LIST}", "Several values: separate them with commas, or repeat the option."),
)
"""Placeholders that mean the same on every page."""


def unbroken(text: str) -> str:
    """The text with non-breaking hyphens, so that a formatter doesn't break paths and flags, which users
    copy."""
    return text.replace("-", _HYPHEN)


def printed(page: str) -> str:
    """The page with normal hyphens and spaces restored."""
    return page.replace(_HYPHEN, "-").replace(_SPACE, " ")


class HelpPage(CheckedOptions):
    """The help page, for a class that is a Typer command or group, too."""

    help: str | None

    def get_help(self, ctx: Any) -> str:
        """The page as wide as the terminal."""
        ctx.max_content_width = WIDTH
        return printed(str(super().get_help(ctx)))  # type: ignore[misc]

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Required arguments are words, as kubectl and docker write them."""
        pieces: list[str] = super().collect_usage_pieces(ctx)  # type: ignore[misc]
        return [piece[1:-1] if piece.startswith("{") else piece for piece in pieces]

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """The description, then the paragraphs that are command lines."""
        paragraphs = [" ".join(block.split()) for block in (self.help or "").split("\n\n")]
        examples = [text for text in paragraphs if text.startswith(("gpunode ", "sudo gpunode "))]
        for paragraph in paragraphs:
            if paragraph and paragraph not in examples:
                formatter.write_paragraph()
                with formatter.indentation():
                    formatter.write_text(unbroken(paragraph))
        if examples:
            with formatter.section("Examples"):
                for example in examples:
                    formatter.write(f"  {example}\n")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Arguments and the command's own options; those of every command are on the first page."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        own_options = self.listed_options(ctx)
        arguments = [argument for argument in self.get_params(ctx) if argument.param_type_name == "argument"]  # type: ignore[attr-defined]
        for param in (*arguments, *own_options):
            heading = "Arguments" if param.param_type_name == "argument" else "Options"
            if is_global(param):
                heading = GLOBAL
            elif heading == "Options" and len(own_options) > _MANY:
                heading = param.rich_help_panel or heading
            sections.setdefault(heading, []).append(record(param, ctx))
        for heading, records in sections.items():
            if records:
                longest = max(len(word) for _, text in records for word in text.split(" "))
                with formatter.section(heading):  # a path isn't folded
                    columns = max(0, min(_NAMES, formatter.width - longest - 4))
                    formatter.write_dl(records, col_max=columns)

    def listed_options(self, ctx: Any) -> list[Any]:
        """The options on the page: on the first one all, on the others those of the command."""
        params = self.get_params(ctx)  # type: ignore[attr-defined]
        options = [param for param in params if param.param_type_name == "option" and not param.hidden]
        return [option for option in options if ctx.parent is None or not is_global(option)]

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        if ctx.parent is None:
            with formatter.section("Values"):
                formatter.write_dl([(name, unbroken(text)) for name, text in VALUES])
        super().format_epilog(ctx, formatter)  # type: ignore[misc]
        formatter.write_paragraph()
        if ctx.parent is not None:
            formatter.write_text("Global options, such as -o json and --root PATH: gpunode --help")
        if ctx.auto_envvar_prefix and (variables := self._variables(ctx)):
            formatter.write_text(unbroken(variables))

    def _variables(self, ctx: Any) -> str:
        """How the variables of the options are named, and what lists them; empty if there are none."""
        prefix = ctx.auto_envvar_prefix
        if ctx.parent is None:
            return f"Variables: {prefix}_<COMMAND>_<OPTION>; see gpunode help environment"
        options = self.listed_options(ctx)
        set_once = [flag_of(option) for option in options if option.name in ONE_SHOT]
        if len(set_once) == len(options):
            return ""
        has_plugin_variables = any(
            not getattr(option, "variable", prefix).startswith(prefix) for option in options
        )
        parts = [f"{prefix}_<OPTION>", *(["GPUNODE_PLUGIN_SERVE_<OPTION>"] if has_plugin_variables else [])]
        except_ = f" (not {', '.join(set_once)})" if set_once else ""
        path = " ".join(ctx.command_path.split()[1:])
        return f"Variables: {' or '.join(parts)}{except_}; see gpunode help environment {path}"


def record(option: Any, ctx: Any) -> tuple[str, str]:
    """Names and help of an option or argument, with its default where that says something; none is hidden."""
    option.show_envvar = False
    spellings = option.opts
    if option.param_type_name == "option":  # NVIDIA's other names for it are in docs/, not on each page
        option.opts = [
            *(flag for flag in spellings if not flag.startswith("--")),
            *[flag for flag in spellings if flag.startswith("--")][:1],
        ]
    texts = option.get_help_record(ctx)
    option.opts = spellings
    names = (
        texts[0].replace("<str>", "NAME").replace("<int>", "N").translate({ord("<"): None, ord(">"): None})
    )
    text, bracket, extra = unbroken(texts[1]).rpartition("  [")
    if not bracket:
        return names, extra
    # a default in words is in parentheses
    notes = [re.sub(r"^default: \((.*)\)$", r"default: \1", part) for part in extra[:-1].split("; ")]
    silent = ("default: false", "default: none", "default: 0", "default: ")
    visible = [part for part in notes if part.startswith(("default: ", "required")) and part not in silent]
    if not visible:
        return names, text
    note = f"[{'; '.join(visible)}]"
    return names, f"{text} {note if len(note) > _TOGETHER else note.replace(' ', _SPACE)}"


class HelpCommand(HelpPage, typer.core.TyperCommand):
    """A command with such a help page."""


class HelpGroup(HelpPage, typer.core.TyperGroup):
    """A group with such a help page."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self.format_commands(ctx, formatter)
        super().format_options(ctx, formatter)


def command_group(text: str, default: str = "") -> typer.Typer:
    """An application of several subcommands."""
    group = type("Group", (HelpGroup,), {"default": default})
    metavar = "[COMMAND] [ARGS]..." if default else None
    text = f"{text} Without COMMAND: {default}." if default else text
    return typer.Typer(
        help=text, cls=group, subcommand_metavar=metavar, no_args_is_help=not default, rich_markup_mode=None
    )
