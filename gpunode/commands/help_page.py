"""Help pages: sections of options, examples, and where the variables are listed."""

from __future__ import annotations

from typing import Any

import typer
import typer.core

WIDTH = 110
_HYPHEN = "\N{NON-BREAKING HYPHEN}"
DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"
"""What editors and web pages make of '-'."""
_MANY = 12  # more options than that are shown in sections
_GLOBAL = "Global options"
_SECTIONS = {
    "Output options": "--output-file --explain --compare --strict --exit-code --dry-run --no-timestamp",
    "Fix options": "--fix --apply --allow",
    "Kubernetes options": "--kubernetes --plugin --test-image --wait --node --node-name --pod-name"
    " --namespace --resource --runtime-class --kubeconfig --context --server --kubelet-socket --registration"
    " --pod-resources-socket --kube-api-qps --kube-api-burst --use-node-feature-api --label --plugin-image",
    "Engine options": "--config --drop-in-config --socket --restart-command --no-restart --no-verify"
    " --replace --also --nvidia-runtime-name --nvidia-runtime-path --engine",
    "Device options": "--vendor --include --exclude --resource-name --resource-naming-strategy --mig-strategy"
    " --shared-devices-allocation-policy --device-discovery-strategy --pass-device-specs"
    " --device-list-strategy --device-id-strategy --gdrcopy-enabled --gds-enabled --mofed-enabled"
    " --imex-channel-ids --imex-required --mps --mps-root --simulate",
    "Driver and CDI options": "--driver-root --dev-root --driver-root-ctr-path --cdi-annotation-prefix"
    " --nvidia-cdi-hook-path --cdi-feature-flags --cdi-disable-hooks",
    "Health options": "--health-disable --health-enable --health-hold-down --health-poll-interval"
    " --rediscover-seconds --listen --state-dir",
}
_HEADING = {flag: heading for heading, flags in _SECTIONS.items() for flag in flags.split()}
ONE_SHOT = (
    *("dry_run", "yes", "apply", "fix", "compare", "explain", "exit_code", "force", "list", "version"),
    *("help", "plan", "upgrade", "create"),
)
"""Names of options that mean one run: no variable sets them."""


def whole(text: str) -> str:
    """The text with non-breaking hyphens, so that a formatter doesn't break paths and flags, which users
    copy."""
    return text.replace("-", _HYPHEN)


def printed(page: str) -> str:
    """The page with normal hyphens restored."""
    return page.replace(_HYPHEN, "-")


def set_from_environment(option: Any) -> bool:
    """Whether a variable can set this option for every run."""
    return option.param_type_name == "option" and not option.hidden and option.name not in ONE_SHOT


class HelpPage:
    """The help page and the check of values, for a class that is a Typer command or group, too."""

    params: list[Any]
    help: str | None

    def __init__(self, *args: Any, **attrs: Any) -> None:
        super().__init__(*args, **attrs)
        for option in self.params:
            if option.name in ONE_SHOT:
                option.allow_from_autoenv, option.envvar = False, None

    def get_help(self, ctx: Any) -> str:
        """The page as wide as the terminal."""
        ctx.max_content_width = WIDTH
        return printed(str(super().get_help(ctx)))  # type: ignore[misc]

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Required arguments are words, as kubectl and docker write them."""
        pieces: list[str] = super().collect_usage_pieces(ctx)  # type: ignore[misc]
        return [piece[1:-1] if piece.startswith("{") else piece for piece in pieces]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:  # as for completion
            self._check_values(ctx, args)
        parsed: list[str] = super().parse_args(ctx, args)  # type: ignore[misc]
        return parsed

    def _check_values(self, ctx: Any, args: list[str]) -> None:
        """A usage error where the parser would take a flag for a value, or silently the last of two values.

        An empty value is a script's unset variable: `gpunode rollback "$ID"` must not undo the last change.
        Where the default is a name, the command knows what an empty one means. An alias may have --output or
        --color, which the command line then overrides. The options of `plugin serve` aren't in `params`: the
        last value counts there, as for NVIDIA's plugin.
        """
        options = [one for one in self.params if one.param_type_name == "option" and not one.is_flag]
        single = [one for one in options if not one.multiple and not one.count]
        for one in single:
            one.multiple = True  # so that the parser keeps every value
        parser = self.make_parser(ctx)  # type: ignore[attr-defined]
        for one in single:
            one.multiple = False
        given, _, _ = parser.parse_args(list(args))
        flags = {flag for one in self.params for flag in one.opts if flag.startswith("-")}
        for one in self.params:
            values = [value for value in _listed(given.get(one.name)) if isinstance(value, str)]
            named = _named(one)
            if "" in values and one.default in (None, "", "auto"):
                ctx.fail(f"{named} is empty")
            if one not in options:
                for text in values if one.param_type_name == "argument" else ():
                    if text.startswith(tuple(DASHES)) or text.partition("=")[0] in flags:
                        ctx.fail(f"unexpected argument: {text}")
                continue
            swallowed = [value for value in values if value.startswith("--") or value in flags]
            if swallowed:
                ctx.fail(f"{named} needs a value, and {swallowed[0]} follows it")
            if one in single and len(set(values)) > 1 and one.name not in ("output", "color"):
                listed = " and ".join(map(repr, dict.fromkeys(values)))
                ctx.fail(f"{named} takes one value, and is given {listed}")

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """The description, then the paragraphs that are command lines."""
        paragraphs = [" ".join(one.split()) for one in (self.help or "").split("\n\n")]
        examples = [one for one in paragraphs if one.startswith("gpunode ")]
        for paragraph in paragraphs:
            if paragraph and paragraph not in examples:
                formatter.write_paragraph()
                with formatter.indentation():
                    formatter.write_text(whole(paragraph))
        if examples:
            with formatter.section("Examples"):
                for example in examples:
                    formatter.write(f"  {example}\n")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Arguments, the command's own options, those of every command."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        common = []
        own = [one for one in self.get_params(ctx) if one.param_type_name == "option"]  # type: ignore[attr-defined]
        many = sum(not (one.hidden or _is_global(one)) for one in own) > _MANY
        for param in self.get_params(ctx):  # type: ignore[attr-defined]
            record = _record(param, ctx)
            if record is None:
                continue
            if param.param_type_name == "argument":
                sections["Arguments"].append(record)
            elif _is_global(param):
                common.append(record)
            else:
                heading = _HEADING.get(param.opts[0], "Options") if many else "Options"
                sections.setdefault(heading, []).append(record)
        for heading, records in {**sections, _GLOBAL: common}.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        super().format_epilog(ctx, formatter)  # type: ignore[misc]
        options = [one for one in self.get_params(ctx) if set_from_environment(one)]  # type: ignore[attr-defined]
        prefix = ctx.auto_envvar_prefix
        if prefix and options:
            own = not all(map(_is_global, options))
            scope = f"{prefix}_<COMMAND>" if ctx.parent is None else prefix if own else "GPUNODE"
            formatter.write_paragraph()
            formatter.write_text(whole(self._variables(ctx, scope)))

    def _variables(self, ctx: Any, scope: str) -> str:
        """Which options have variables, and what lists them."""
        words = ctx.command_path.split()[1:] if scope != "GPUNODE" else []
        rest = [f"--{one}".replace("_", "-") for one in ("dry_run", "yes") if self._has(ctx, one)]
        except_ = f"; {' and '.join(rest)} {'have' if len(rest) > 1 else 'has'} none" if rest else ""
        shared = any(
            not getattr(one, "variable", scope).startswith(scope)
            for one in self.get_params(ctx)  # type: ignore[attr-defined]
        )
        serve = " Those of plugin serve have GPUNODE_PLUGIN_SERVE_<OPTION>." if shared else ""
        return (
            f"Most options have a variable, {scope}_<OPTION>{except_}.{serve}"
            f" List: {' '.join(('gpunode help environment', *words))}"
        )

    def _has(self, ctx: Any, name: str) -> bool:
        return any(one.name == name for one in self.get_params(ctx))  # type: ignore[attr-defined]


def _is_global(option: Any) -> bool:
    return option.name == "help" or getattr(option, "rich_help_panel", "") == _GLOBAL


def _record(option: Any, ctx: Any) -> tuple[str, str] | None:
    """Names and help of an option or argument, with its default where that says something."""
    option.show_envvar = False
    spellings = option.opts
    if option.param_type_name == "option":  # NVIDIA's other names for it are in docs/, not on each page
        option.opts = [
            *(flag for flag in spellings if not flag.startswith("--")),
            *[flag for flag in spellings if flag.startswith("--")][:1],
        ]
    record = option.get_help_record(ctx)
    option.opts = spellings
    if record is None:
        return None
    record = record[0], whole(record[1])
    names = (
        record[0].replace("<str>", "NAME").replace("<int>", "N").translate({ord("<"): None, ord(">"): None})
    )
    text, bracket, extra = record[1].rpartition("  [")
    if not bracket:
        return names, record[1]
    notes = [
        one.replace("default: (", "default: ").rstrip(")") for one in extra.removesuffix("]").split("; ")
    ]
    silent = ("default: false", "default: none", "default: 0", "default: ")
    shown = [one for one in notes if one.startswith(("default: ", "required")) and one not in silent]
    return names, f"{text} [{'; '.join(shown)}]" if shown else text


class HelpCommand(HelpPage, typer.core.TyperCommand):
    """A command with such a help page."""


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _named(param: Any) -> str:
    """An option's flag, or an argument's name in the help."""
    if param.param_type_name == "argument":
        return f"'{(param.metavar or param.name.upper()).strip('[].')}'"
    return str(next((flag for flag in param.opts if flag.startswith("--")), param.opts[0]))


class HelpGroup(HelpPage, typer.core.TyperGroup):
    """A group with such a help page. `default` is the subcommand that runs if none is named."""

    default = ""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self.format_commands(ctx, formatter)
        super().format_options(ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = args and (not args[0].startswith("-") or args[0] in ctx.help_option_names)
        if self.default and not named and not ctx.resilient_parsing:  # as for completion
            args = [self.default, *args]
        return super().parse_args(ctx, args)


def command_group(text: str, default: str = "") -> typer.Typer:
    """An application of several subcommands."""
    group = type("Group", (HelpGroup,), {"default": default})
    return typer.Typer(help=text, cls=group, no_args_is_help=not default, rich_markup_mode=None)
