"""Options: those that several commands share, how they are read, and the values that Tab offers."""

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from gpunode.errors import UsageError

# no `from __future__ import annotations`: Typer reads these annotations as objects
# Values that Tab offers, for `autocompletion` of options and arguments.

_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
# NVIDIA MIG User Guide, "Supported MIG Profiles", without the variants with media engines; NVML isn't queried
# for a Tab, because it may hang
_MIG_PROFILES = (
    *("1g.5gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb"),  # A100 40 GB
    *("1g.6gb", "2g.12gb", "4g.24gb"),  # A30
    *("1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"),  # A100 and H100 80 GB
    *("1g.12gb", "2g.24gb", "3g.48gb", "4g.48gb", "7g.96gb"),  # H100 96 GB, GH200
    *("1g.18gb", "2g.35gb", "3g.71gb", "4g.71gb", "7g.141gb"),  # H200
    *("1g.23gb", "2g.45gb", "3g.90gb", "4g.90gb", "7g.180gb"),  # B200
    *("1g.24gb", "2g.48gb", "4g.96gb"),  # RTX PRO 6000 Blackwell
)


def one_of(*choices: str, comma: bool = False) -> Callable[[str], list[str]]:
    """Completions from a fixed set; with `comma` the option takes several values, separated by commas."""

    def offered(incomplete: str) -> list[str]:
        before = incomplete[: incomplete.rfind(",") + 1] if comma else ""
        return [before + word for word in choices]

    return offered


def engine_names(incomplete: str) -> list[str]:
    """Names of container engines."""
    from gpunode.runtime.find import FINDERS

    return [*FINDERS, "auto"]


def check_ids(incomplete: str) -> list[tuple[str, str]]:
    """IDs of the checks, with their titles."""
    from gpunode.checks.catalogue import ALL_CHECKS

    return [(check.id, check.title) for check in ALL_CHECKS]


def resource_names(incomplete: str) -> list[str]:
    """Resources of NVIDIA's GPUs and MIG devices."""
    return ["nvidia.com/gpu", *(f"nvidia.com/mig-{profile}" for profile in _MIG_PROFILES)]


def journal_entries(ctx: typer.Context) -> list[str]:
    """IDs of the journal's entries, if this user may read it."""
    from gpunode.host import Host
    from gpunode.host.journal import Journal

    roots = (context.params.get("root") for context in (ctx, ctx.find_root()))
    root = next((Path(value) for value in roots if value), Path("/"))
    return completable(entry.id for entry in Journal.of(Host(root.absolute())).entries())


def completable(names: Iterable[str]) -> list[str]:
    """The names without those that zsh, which evaluates completions, might take for something else."""
    return [name for name in names if _PLAIN.fullmatch(name)]


# How the options of a command line are read: the variables that set them, and the check of their values.

DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"
"""What editors and web pages make of '-'."""
GLOBAL = "Global options"
ONE_SHOT = (
    *("dry_run", "yes", "apply", "fix", "compare", "explain", "exit_code", "force", "version"),
    *("help", "plan", "upgrade", "create"),
)
"""Names of options that mean one run: no variable sets them."""
LIST = ",..."
"""End of the placeholder of an option that takes several values."""


def set_from_environment(option: Any) -> bool:
    """Whether a variable can set this option for every run."""
    return option.param_type_name == "option" and not option.hidden and option.name not in ONE_SHOT


def flag_of(option: Any) -> str:
    """The long name of an option."""
    return str(next((flag for flag in option.opts if flag.startswith("--")), option.opts[0]))


def variable_of(option: Any, prefix: str) -> str:
    """The variable of an option of the command with this prefix, named after the flag; Click would name it
    after the function's parameter."""
    flag = flag_of(option)
    name = flag.removeprefix("--") if flag.startswith("--") else option.name
    return f"{prefix}_{name}".upper().replace("-", "_")


def variables_of(option: Any) -> list[str]:
    """The variables that an option names itself."""
    return [option.envvar] if isinstance(option.envvar, str) else list(option.envvar or ())


def is_global(option: Any) -> bool:
    """Whether every command has this option."""
    return option.name == "help" or getattr(option, "rich_help_panel", "") == GLOBAL


class CheckedOptions:
    """Options that variables set, and their check, for a class that is a Typer command or group, too.

    `default` is the subcommand of a group that runs if none is named.
    """

    params: list[Any]
    default = ""

    def __init__(self, *args: Any, **attrs: Any) -> None:
        super().__init__(*args, **attrs)
        for option in self.params:
            if option.name in ONE_SHOT:
                option.allow_from_autoenv, option.envvar = False, None

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        has_command = args and (not args[0].startswith("-") or args[0] in ctx.help_option_names)
        if self.default and not has_command and not ctx.resilient_parsing:  # as for completion
            args = [self.default, *args]
        for option in filter(set_from_environment, self.params):
            if not is_global(option):
                variable = variable_of(option, ctx.auto_envvar_prefix or "")
                option.envvar = list(dict.fromkeys((variable, *variables_of(option))))
        if not ctx.resilient_parsing:  # as for completion
            self._check_values(ctx, args)
        parsed: list[str] = super().parse_args(ctx, args)  # type: ignore[misc]
        for option in self.params:
            if str(option.metavar).endswith(LIST) and (texts := ctx.params.get(option.name)):
                ctx.params[option.name] = words = _split(texts)
                if not words:
                    ctx.fail(f"{flag_of(option)} is empty")
        return parsed

    def _check_values(self, ctx: Any, args: list[str]) -> None:
        """A usage error where the parser would take a flag for a value, or silently the last of two values.

        An empty value is a script's unset variable: `gpunode rollback "$ID"` must not undo the last change.
        Where the default is a name, the command knows what an empty one means. An alias may have --output or
        --color, which the command line then overrides. The options of `plugin serve` aren't in `params`: the
        last value counts there, as for NVIDIA's plugin.
        """
        options = [param for param in self.params if param.param_type_name == "option" and not param.is_flag]
        single = [option for option in options if not option.multiple]
        parser = self.make_parser(ctx)  # type: ignore[attr-defined]
        for option in single:  # the parser would keep only the last value
            parser.add_option(obj=option, opts=option.opts, dest=option.name, action="append")
        parsed, _, _ = parser.parse_args(list(args))
        flags = {flag for param in self.params for flag in param.opts if flag.startswith("-")}
        for param in self.params:
            values = [value for value in _as_list(parsed.get(param.name)) if isinstance(value, str)]
            label = _display_name(param)
            if "" in values and param.default in (None, "", "auto"):
                ctx.fail(f"{label} is empty")
            if param not in options:
                for text in values if param.param_type_name == "argument" else ():
                    if text.startswith(tuple(DASHES)) or text.partition("=")[0] in flags:
                        ctx.fail(f"unexpected argument: {text}")
                continue
            swallowed = [value for value in values if value.startswith("--") or value in flags]
            if swallowed:
                ctx.fail(f"{label} needs a value, and {swallowed[0]} follows it")
            if param in single and len(set(values)) > 1 and param.name not in ("output", "color"):
                listed = " and ".join(map(repr, dict.fromkeys(values)))
                ctx.fail(f"{label} takes one value, and is given {listed}")


def _split(texts: Sequence[str]) -> list[str]:
    """The values of a list option: several with commas between, or the option several times."""
    return [word for text in texts for part in text.split(",") if (word := part.strip())]


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _display_name(param: Any) -> str:
    """An option's flag, or an argument's name in the help."""
    if param.param_type_name == "argument":
        return f"'{(param.metavar or param.name.upper()).strip('[].')}'"
    return flag_of(param)


# The options. Each says with `rich_help_panel` in which section of a long help page it is (help_page.py).

Strings = list[str] | None
OUTPUT = "Output options"
KUBERNETES = "Kubernetes options"
ENGINE = "Engine options"
DEVICE = "Device options"
DRIVER = "Driver and CDI options"


def duration_option(
    *flags: str, least: float, default: float | str, help: str, section: str | None = None
) -> Any:
    """An option for a duration in seconds: 500ms, 60s, 2m or 1h, or a number of seconds.

    `default` is shown in the help; a text where it depends on something else.
    """

    def parse(value: str | float) -> float:
        if isinstance(value, float):  # Typer passes the default, too
            return value
        from gpunode.plugin.config.values import duration

        try:
            return duration(value, least)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    shown_default = default if isinstance(default, str) else f"{default:g}s"
    return typer.Option(
        *flags,
        parser=parse,
        metavar="DURATION",
        help=help,
        show_default=shown_default,
        rich_help_panel=section,
    )


def wait_option(*, least: float, default: float) -> Any:
    """--wait, the time that the kubelet has."""
    text = "Time limit for the kubelet to report the resource as allocatable."
    return duration_option("--wait", least=least, default=default, help=text, section=KUBERNETES)


def runtime_option(
    metavar: str = "ENGINE,...", default: str = "auto, the kubelet's or the only one, else an error"
) -> Any:
    """--runtime, the names of container engines. `default` says which are meant without it."""
    return typer.Option(
        "--runtime",
        metavar=metavar,
        help="Engine: docker, containerd, crio, podman, k3s, rke2, k0s or microk8s.",
        show_default=default,
        autocompletion=engine_names,
    )


def pod_resource_option(default: str = "nvidia.com/gpu") -> Any:
    """--resource of a test pod. `default` says what it requests without it."""
    return typer.Option(
        "--resource",
        metavar="NAME",
        help="Resource that the pod requests.",
        show_default=default,
        autocompletion=resource_names,
        rich_help_panel=KUBERNETES,
    )


def changed(group: Any) -> dict[str, Any]:
    """The options of a dataclass (see `session.verb`) that differ from their defaults, by flag.

    Click knows the source of a value, but by the name of the field: the flag is the first argument of
    `typer.Option`, which Typer keeps under the name that it has without Annotated.
    """
    options = inspect.signature(type(group), eval_str=True).parameters
    return {
        option.annotation.__metadata__[0].default: getattr(group, name)
        for name, option in options.items()
        if getattr(group, name) != option.default
    }


LOCK_SECONDS = 600.0
LockOption = Annotated[
    float,
    duration_option(
        "--lock-timeout",
        least=0,
        default=LOCK_SECONDS,
        help="Time limit for another package manager to finish.",
    ),
]

RuntimeOption = Annotated[str, runtime_option("ENGINE")]
RuntimesOption = Annotated[Strings, runtime_option()]
NameOption = Annotated[
    str,
    typer.Option("--nvidia-runtime-name", help="Name of the runtime in the engine.", rich_help_panel=ENGINE),
]
ConfigOption = Annotated[
    str,
    typer.Option(
        "--config",
        metavar="PATH",
        help="Configuration file of the engine.",
        show_default="the daemon's own",
        rich_help_panel=ENGINE,
    ),
]
SocketOption = Annotated[
    str,
    typer.Option(
        "--socket",
        metavar="PATH",
        help="Socket of the daemon.",
        show_default="detected",
        rich_help_panel=ENGINE,
    ),
]
DryRunOption = Annotated[
    bool,
    typer.Option("--dry-run", help="Print what would change, and change nothing.", rich_help_panel=OUTPUT),
]
NoRestartOption = Annotated[
    bool,
    typer.Option("--no-restart", help="Write the files, and print what to restart.", rich_help_panel=ENGINE),
]
RestartCommandOption = Annotated[
    str,
    typer.Option(
        "--restart-command",
        metavar="CMD",
        help="Command that restarts the daemon where systemd doesn't manage it.",
        rich_help_panel=ENGINE,
    ),
]


def refuse_both(**options: object) -> None:
    """`UsageError` if both options, by their names, are given."""
    if all(options.values()):
        first, second = (f"--{name.replace('_', '-')}" for name in options)
        raise UsageError(f"{first} and {second} exclude each other", hint="give one of them")


def refuse_unknown(label: str, words: Iterable[str], known: Sequence[str]) -> None:
    """`UsageError` for the first word that is not known."""
    for word in words:
        if word not in known:
            raise UsageError(f"unknown {label} {word!r}", hint=f"known: {', '.join(known)}")


YesOption = Annotated[bool, typer.Option("-y", "--yes", help="Go ahead without confirmation.")]
HoldOption = Annotated[
    bool, typer.Option("--hold", help="Keep the packages at this version when the system is upgraded.")
]
KeyOption = Annotated[
    str,
    typer.Option("--key", metavar="FILE", help="Signing key of the mirror.", show_default="NVIDIA's"),
]
DriverRootOption = Annotated[
    str,
    typer.Option(
        "--driver-root",
        metavar="PATH",
        help="Directory of the driver on the node.",
        show_default="/",
        rich_help_panel=DRIVER,
    ),
]
DefaultOption = Annotated[
    bool,
    typer.Option(
        "--set-as-default", "--nvidia-set-as-default", help="Make nvidia the default runtime of the engine."
    ),
]
CdiOption = Annotated[
    bool,
    typer.Option(
        "--cdi",
        "--cdi.enabled",
        "--cdi.enable",
        "--enable-cdi",
        help="Enable CDI (GPUs described in a file) in the engine, and write and refresh that file.",
    ),
]
_KUBECONFIG: Any = {
    "metavar": "PATH",
    "show_default": "KUBECONFIG, the pod's account or ~/.kube/config",
    "rich_help_panel": KUBERNETES,
}
KubeconfigOption = Annotated[
    str,
    typer.Option("--kubeconfig", help="Kubeconfig file, or kubelet for the kubelet's own.", **_KUBECONFIG),
]
PodKubeconfigOption = Annotated[
    str,
    typer.Option("--kubeconfig", help="Kubeconfig file; the kubelet's may not create pods.", **_KUBECONFIG),
]
ContextOption = Annotated[
    str,
    typer.Option(
        "--context",
        metavar="NAME",
        help="Kubeconfig context.",
        show_default="the current one",
        rich_help_panel=KUBERNETES,
    ),
]
ServerOption = Annotated[
    str,
    typer.Option(
        "--server",
        metavar="URL",
        help="URL of a kubectl proxy, such as http://127.0.0.1:8001.",
        rich_help_panel=KUBERNETES,
    ),
]
NodeOption = Annotated[
    str,
    typer.Option(
        "--node",
        metavar="NAME",
        help="Name of the Node.",
        show_default="NODE_NAME or the host name",
        rich_help_panel=KUBERNETES,
    ),
]
PodNamespaceOption = Annotated[
    str,
    typer.Option(
        "--namespace",
        metavar="NAME",
        help="Namespace of the pod.",
        show_default="the context's",
        rich_help_panel=KUBERNETES,
    ),
]
