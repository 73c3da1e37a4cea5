"""From a command line to an exit code: global options, signals, errors. `cli.py` says which options exist."""

import functools
import inspect
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from gpunode.commands.outcome import DOCUMENTED, Session, run_command
from gpunode.output.render import ENVELOPES, Color, Output, PlainOutput

if TYPE_CHECKING:
    from gpunode.output.result import Result


# no `from __future__ import annotations`: Typer reads these annotations as objects. At the top only Typer is
# imported: `gpunode --version` needs nothing else, and a dataclass takes half a millisecond to make.


__all__ = ["Session", "run_app", "takes_globals", "verb"]
Command = Callable[..., "Result"]


def _option(*names: str, env: str, text: str, **more: Any) -> Any:
    return typer.Option(*names, envvar=f"GPUNODE_{env}", help=text, rich_help_panel="Global", **more)


def _global_options(
    root: Annotated[
        Path | None,
        _option("--root", env="ROOT", text="Act on another root: a mounted host or a recorded machine."),
    ] = None,
    output: Annotated[Output | None, _option("-o", "--output", env="OUTPUT", text="How to print.")] = None,
    color: Annotated[Color | None, _option("--color", env="COLOR", text="When to colour.")] = None,
    verbose: Annotated[
        int, _option("-v", "--verbose", env="VERBOSE", text="Say every command that is run.", count=True)
    ] = 0,
    debug: Annotated[bool, _option("--debug", env="DEBUG", text="Show tracebacks.")] = False,
) -> None:
    """Only its signature is used: the options that every command takes."""


def _with_output(annotation: Any) -> list[inspect.Parameter]:
    return [p.replace(annotation=annotation) if p.name == "output" else p for p in _GLOBALS.values()]


_GLOBALS = inspect.signature(_global_options).parameters
_SHORT = Annotated[PlainOutput | None, _option("-o", env="OUTPUT", text="How to print.")]
_PLAIN = Annotated[PlainOutput | None, _option("-o", "--output", env="OUTPUT", text="How to print.")]


def takes_globals(function: Callable[..., Any]) -> Callable[..., Any]:
    """For the root callback: the same options before the command's name, as defaults for it."""

    @functools.wraps(function)
    def call(context: typer.Context, **given: Any) -> Any:
        context.obj = {name: given.pop(name) for name in _GLOBALS}
        return function(**given)

    own = inspect.signature(function).parameters.values()
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    _sign(call, [context, *own, *_GLOBALS.values()])
    return call


def verb(
    app: typer.Typer,
    name: str,
    kind: str,
    *,
    own_output: bool = False,
    cls: Any = None,
    service: Callable[[dict[str, Any]], bool] = lambda given: False,
) -> Callable[[Command], Command]:
    """Register a command: `function(session, ...) -> Result` gains the global options and loses `session`.

    With `own_output` the command has an ``--output`` of its own, as nvidia-ctk's does; ours is ``-o`` then.
    A command class `cls` may have options that the signature doesn't name; they come as keywords.
    `service` says whether the command, with these options, runs until a signal ends it (`until_signal`).
    """
    documented = list(_GLOBALS.values())
    globals_ = documented if kind in DOCUMENTED else _with_output(_SHORT if own_output else _PLAIN)

    def register(function: Command) -> Command:
        function.__annotations__.pop("return", None)  # a name that only type checkers have
        hints = get_type_hints(function, include_extras=True)
        parameters = list(inspect.signature(function).parameters.values())[1:]
        named = [one.replace(annotation=hints[one.name]) for one in parameters]
        own = [one for one in named if one.kind is not inspect.Parameter.VAR_KEYWORD]

        @functools.wraps(function)
        def call(context: typer.Context, **given: Any) -> None:
            local = {option: given.pop(option) for option in _GLOBALS}
            outer = context.find_root().obj or {}
            chosen = {option: local[option] or outer.get(option) for option in _GLOBALS}
            chosen["output"] = Output(chosen["output"]) if chosen["output"] else None
            raise SystemExit(
                run_command(kind, chosen, lambda session: function(session, **given), service(given))
            )

        context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        _sign(call, [context, *own, *globals_])
        app.command(name, cls=cls)(call)
        return function

    return register


def _sign(call: Callable[..., Any], parameters: Sequence[inspect.Parameter]) -> None:
    keyword_only = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    call.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    call.__annotations__ = {p.name: p.annotation for p in keyword_only}
    del call.__wrapped__  # type: ignore[attr-defined]


def run_app(app: typer.Typer, argv: Sequence[str]) -> int:
    """Parse and run; usage errors speak the same words, and the envelope if one was asked for."""
    if "_GPUNODE_COMPLETE" in os.environ:  # Tab, see commands/completion.py
        from typer.completion import completion_init  # type: ignore[attr-defined]

        completion_init()
    code = 0
    try:
        code = _parsed(app, argv)
        sys.stdout.flush()  # what --help and --version print is still in the buffer
    except OSError as error:
        from gpunode.output.render import output_failed, render_error

        failed = output_failed(error)
        if failed is not None:
            render_error(failed)
            return failed.exit_code
    return code


def _parsed(app: typer.Typer, argv: Sequence[str]) -> int:
    try:
        code = app(list(argv), standalone_mode=False, prog_name="gpunode")
        return int(code or 0)
    except SystemExit as stop:
        return int(stop.code or 0)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        # Typer's own exceptions live in a private module; this method is what they all have
        if not hasattr(error, "format_message"):
            raise
        return _usage(error, argv)


def _usage(error: Any, argv: Sequence[str]) -> int:
    from gpunode.output.render import render, say
    from gpunode.output.result import ErrorInfo, ExitCode, Result

    if type(error).__name__ == "NoArgsIsHelpError":
        sys.stderr.write(f"{error.format_message()}\n")
        return ExitCode.USAGE
    context = getattr(error, "ctx", None)
    message = " ".join(str(error.format_message()).split()).rstrip(".")
    hint = f"see {context.command_path if context is not None else 'gpunode'} --help"
    say(f"error: {message[:1].lower() + message[1:]}")
    say(f"hint: {hint}")
    output = _asked_output(argv)
    if output in ENVELOPES:
        info = ErrorInfo("usage", message, hint)
        render(Result("Error", status="error", exit_code=ExitCode.USAGE, errors=(info,)), output, Color.NEVER)
    return ExitCode.USAGE


def _asked_output(argv: Sequence[str]) -> Output:
    """The output form, as far as a command line that didn't parse tells it."""
    words = [os.environ.get("GPUNODE_OUTPUT", "")]
    for position, word in enumerate(argv):
        if word in ("-o", "--output"):
            words += argv[position + 1 : position + 2]
        elif word.startswith(("-o", "--output=")):
            words.append(word.removeprefix("--output=").removeprefix("-o"))
    known = [word for word in words if word in list(Output)]
    return Output(known[-1]) if known else Output.TABLE
