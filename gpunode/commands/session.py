"""From a command line to an exit code: global options, signals, errors. `cli.py` has the commands."""

from __future__ import annotations

import inspect
import os
import re
import select
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, is_dataclass, replace
from functools import partial, wraps
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from gpunode.commands.help_page import HelpCommand
from gpunode.commands.options import DASHES, GLOBAL, flag_of, variables_of
from gpunode.errors import GpunodeError, UsageError
from gpunode.output.render import (
    ENVELOPES,
    Color,
    Output,
    StderrProgress,
    document,
    output_failed,
    output_for,
    printable,
    render,
    render_error,
    say,
)
from gpunode.output.result import Block, ErrorInfo, ExitCode, Progress, Result

if TYPE_CHECKING:
    from gpunode.host import Host

# `gpunode --version` needs no more; the first command loads the machine

Command = Callable[..., Result]
Variables = Mapping[str, tuple[str, ...]]
"""Options that a variable sets, by variable: the option's flags and the value."""
DOCUMENTED = ("DoctorReport",)
"""Kinds of result that are also drawn as a page and as metrics."""
READING = (
    *("DoctorReport", "CheckExplanation", "GpuInventory", "MigLayout", "MigExport"),
    *("RuntimeStatus", "CdiDevices", "DriverPlan"),
)
"""Kinds of result for which a support bundle may stand for a machine: nothing is changed for them."""

NO_OPTION = frozenset({"GPUNODE_STATE_DIR", "GPUNODE_SIMULATED", "GPUNODE_STUB_SCENARIO"})
"""Variables that set no option: the directory of the journal, what `--simulate` gives to a container (which
may run gpunode), and what the stub libraries of the tests read in our process."""
HELD = (signal.SIGHUP, signal.SIGUSR1)
"""Blocked since the process started (__main__.py): they must not end a service before it has its handlers."""
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
_PATH = re.compile(r"(?<![\w.:/-])/[a-z]+/[\w./@-]*\w")
"""An absolute path in a message."""
_NO_ROOT = frozenset({"completion", "demo", "explain", "help", "manifests", "report", "schema", "version"})
"""Commands that a hint names without --root: they look at no machine, or are to be run on the machine
itself."""


# The global options, and the decorator that makes a function a command.


def _option(*names: str, env: str, text: str, **more: Any) -> Any:
    return typer.Option(*names, envvar=f"GPUNODE_{env}", help=text, rich_help_panel=GLOBAL, **more)


_FORMAT = {"env": "OUTPUT", "metavar": "FORMAT", "show_default": "table"}
_FORMATS = "Output format: table, json or yaml; for doctor also html or prometheus."
_ROOT = (
    "Read and write files below this directory: a mounted host, a copied /etc, /sys and /proc, or (read only)"
    " a support bundle."
)


@dataclass(frozen=True)
class GlobalOptions:
    """The options of every command."""

    root: Annotated[
        Path | None, _option("--root", env="ROOT", metavar="PATH", text=_ROOT, show_default="/")
    ] = None
    output: Annotated[Output | None, _option("-o", "--output", **_FORMAT, text=_FORMATS)] = None
    color: Annotated[
        Color | None,
        _option(
            "--color",
            env="COLOR",
            metavar="WHEN",
            text="Use color: auto, always or never.",
            show_default="auto",
        ),
    ] = None
    verbose: Annotated[
        bool, _option("-v", "--verbose", env="VERBOSE", text="Print each command that is run.")
    ] = False
    quiet: Annotated[
        bool, _option("-q", "--quiet", env="QUIET", text="Print data, warnings and errors only.")
    ] = False
    debug: Annotated[bool, _option("--debug", env="DEBUG", text="Print tracebacks of errors.")] = False

    @property
    def format(self) -> Output:
        """The requested output format, or the default."""
        return Output(self.output or Output.TABLE)


def _options_of(group: Any) -> Mapping[str, inspect.Parameter]:
    """The options of a dataclass, one per field."""
    return inspect.signature(group, eval_str=True).parameters


_GLOBALS = _options_of(GlobalOptions)
_PLAIN = {**_FORMAT, "text": "Output format: table, json or yaml."}
_PlainOutput = Literal["table", "json", "yaml"] | None


def takes_globals(function: Callable[..., Any]) -> Callable[..., Any]:
    """For the root callback: the same options before the command's name become the command's defaults."""

    @wraps(function)
    def call(context: typer.Context, **options: Any) -> Any:
        context.obj = {name: options.pop(name) for name in _GLOBALS}
        return function(**options)

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
    service: Callable[[dict[str, Any]], bool] = lambda options: False,
) -> Callable[[Command], Command]:
    """Register a command: `function(session, ...) -> Result` gains the global options and loses `session`.

    A parameter whose type is a dataclass stands for one option per field, which several commands have.
    With `own_output` the command has an ``--output`` of its own, as nvidia-ctk's does; ours is ``-o`` then.
    A command class `cls` may have options that the signature doesn't name; they come as keywords.
    `service` says whether the command, with these options, runs until a signal ends it (`until_signal`).
    """
    globals_ = dict(_GLOBALS)
    if kind not in DOCUMENTED:
        flags = ("-o",) if own_output else ("-o", "--output")
        plain_output = Annotated[_PlainOutput, _option(*flags, **_PLAIN)]
        globals_["output"] = _GLOBALS["output"].replace(annotation=plain_output)

    def register(function: Command) -> Command:
        parameters = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
        groups: dict[str, Any] = {p.name: p.annotation for p in parameters if is_dataclass(p.annotation)}
        own = [
            option
            for p in parameters
            for option in (_options_of(p.annotation).values() if p.name in groups else [p])
            if option.kind is not inspect.Parameter.VAR_KEYWORD
        ]

        @wraps(function)
        def call(context: typer.Context, **options: Any) -> None:
            local = {option: options.pop(option) for option in _GLOBALS}
            outer = context.find_root().obj or {}
            merged: dict[str, Any] = {name: local[name] or outer.get(name) for name in _GLOBALS}
            chosen = GlobalOptions(**merged)
            for parameter, group in groups.items():
                options[parameter] = group(**{option: options.pop(option) for option in _options_of(group)})

            def checked(session: Session) -> Result:
                names = {name for name in os.environ if name.startswith("GPUNODE_")} - NO_OPTION
                if names:
                    from gpunode.commands.variables import check_environment

                    check_environment(context, {name: os.environ[name] for name in names})
                return function(session, **options)

            names = set(getattr(context.find_root().command, "commands", ())) - _NO_ROOT
            run = partial(_run, kind, chosen, _variables(context), names, checked)
            raise SystemExit(_serve(run) if service(options) else _interruptible(run))

        context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        _sign(call, [context, *own, *globals_.values()])
        app.command(name, cls=cls or HelpCommand)(call)
        return function

    return register


def _variables(context: typer.Context) -> Variables:
    options = [option for option in context.command.params if option.name]
    by_variable = {variable: option for option in options if (variable := _variable(context, option))}
    return {name: (*option.opts, *_values(option, os.environ[name])) for name, option in by_variable.items()}


def _values(option: Any, text: str) -> tuple[str, ...]:
    """What a message can quote of a variable: its value, or one of several with their reasons."""
    if getattr(option, "is_flag", False):
        return ()
    return (text, *re.split(r"[\s,:]+", text)) if option.multiple else (text,)


def _variable(context: typer.Context, option: Any) -> str:
    """The variable that sets an option here; empty if a flag, a default or nothing does."""
    source = context.get_parameter_source(option.name)
    if source is None or source.name != "ENVIRONMENT":
        return ""
    candidates = (*variables_of(option), f"{context.auto_envvar_prefix}_{option.name}".upper())
    return next((name for name in candidates if os.environ.get(name)), "")


def _sign(call: Callable[..., Any], parameters: Sequence[inspect.Parameter]) -> None:
    keyword_only = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    call.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    call.__annotations__ = {p.name: p.annotation for p in keyword_only}
    del call.__wrapped__  # type: ignore[attr-defined]


# Running a command and rendering its result.


@dataclass(frozen=True)
class Session:
    """What one command works with; `kind` is its result's."""

    host: Host
    progress: Progress
    kind: str
    options: GlobalOptions

    def confirm(self, question: str) -> bool:
        """Whether the user confirms on a terminal; False at once without a terminal, and at the end of the
        input."""
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            return False
        sys.stderr.write(f"{question} [y/N] ")
        sys.stderr.flush()
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    def show(self, *blocks: Block) -> None:
        """Print a part of the result now, while the command runs. JSON and YAML are printed at the end."""
        if self.options.format is Output.TABLE:
            render(Result(self.kind, blocks=blocks), Output.TABLE, self.options.color or Color.AUTO)


def _interruptible(run: Callable[[], int]) -> int:
    """Run a command; SIGTERM and SIGHUP interrupt it as Ctrl-C does."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
    return run()


def _serve(run: Callable[[], int]) -> int:
    """Run a service. Signals that arrive while it starts are delivered once its handlers exist
    (`until_signal`), and later ones can't change its outcome."""
    signal.pthread_sigmask(signal.SIG_BLOCK, (*_ENDING, *HELD))
    for number in (*_ENDING, *HELD):
        signal.signal(number, lambda *_: None)  # SIG_IGN would drop pending signals
    code = run()
    for number in (*_ENDING, *HELD):
        signal.signal(number, signal.SIG_IGN)  # at exit Python restores the default of its own handlers
    return code


def _run(
    kind: str,
    options: GlobalOptions,
    variables: Variables,
    names: Set[str],
    command: Callable[[Session], Result],
) -> int:
    """Run one command; every outcome becomes a rendered result and an exit code. `names` are those of the
    commands that hints may name."""
    report = partial(_report, kind, options, variables)
    output = options.format
    try:
        if output not in (Output.TABLE, *ENVELOPES) and kind not in DOCUMENTED:
            raise UsageError(f"this command has no -o {output}", hint="only gpunode doctor has; use -o json")
        if options.quiet and options.verbose:
            raise UsageError("--quiet and --verbose exclude each other", hint="give one of them")
        root = (options.root or Path("/")).absolute().resolve()
        at_root = partial(_at_root, root, names)
        with _session(kind, options, root, at_root) as session:
            result = command(session)
            result = replace(
                result,
                messages=tuple(map(at_root, result.messages)),
                errors=tuple(info._replace(hint=at_root(info.hint)) for info in result.errors),
            )
        if result.file:
            _write(result, options)
    except GpunodeError as error:
        return report(error)
    except KeyboardInterrupt:
        return report(GpunodeError("interrupted", code="interrupted", exit_code=ExitCode.INTERRUPTED))
    except Exception as error:  # noqa: BLE001 - the last line of defence: a bug is reported as one
        if isinstance(error, FileNotFoundError) and _directory_deleted():
            missing = GpunodeError(
                "the current directory was deleted",
                hint="change to a directory that exists: cd /",
                code="no-cwd",
            )
            return report(missing)
        bug = GpunodeError(
            f"{type(error).__name__}: {error}",
            code="internal",
            hint="this is a bug in gpunode; run the same command with --debug and report what it prints",
        )
        return report(bug)
    if not result.file and not _shown(result, options):
        return ExitCode.FAILED
    for info in result.errors:
        render_error(GpunodeError(info.message, hint=info.hint))
    return result.exit_code


def _directory_deleted() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False


def _write(result: Result, options: GlobalOptions) -> None:
    """Write to the requested file, on this machine whatever --root is."""
    from gpunode.host import Host

    output = options.format
    if output is Output.TABLE:
        output = output_for(result.file) or output
    text = document(result, output)
    Host(Path("/")).write_atomic(
        str(Path(result.file).absolute()), text.encode("utf-8", "backslashreplace"), mode=0o644
    )
    if not options.quiet:
        say(f"wrote {result.file}")


@contextmanager
def _session(
    kind: str, options: GlobalOptions, root: Path, at_root: Callable[[str], str]
) -> Iterator[Session]:
    from gpunode.host import Host

    progress = StderrProgress(bool(options.verbose), bool(options.quiet))
    with _root(kind, root) as directory, _named_in_errors(root, at_root):
        host = Host(directory, dict(os.environ), progress.trace)
        _ = host.recording  # a malformed recording is one error now, not one in every check
        yield Session(host, progress, kind, options)


@contextmanager
def _root(kind: str, root: Path) -> Iterator[Path]:
    """The directory to act on; a support bundle is unpacked for the duration of the command."""
    try:
        is_directory, packed = root.is_dir(), root.is_file()
    except PermissionError as error:
        raise UsageError(
            f"--root {root} can't be read by this user", hint="run as root, with sudo"
        ) from error
    if packed:
        from gpunode.host.bundle import unpacked

        if kind not in READING:
            raise UsageError(
                f"--root {root} is a file, and a support bundle can only be looked at",
                hint=f"gpunode doctor --root {root}",
            )
        with unpacked(root) as machine:
            yield machine
        return
    if not is_directory:
        raise UsageError(
            f"--root {root} is not a directory",
            hint="give the directory that holds etc, sys and proc, or a bundle of gpunode report",
        )
    yield root


@contextmanager
def _named_in_errors(root: Path, at_root: Callable[[str], str]) -> Iterator[None]:
    """Add the root to a message and a hint that name a file, because the file is below it. A path of the
    command line stays as it was typed; it may be of this machine."""
    try:
        yield
    except GpunodeError as error:
        typed = " ".join(sys.argv[1:])

        def suffix(text: str) -> str:
            paths = [path for path in _PATH.findall(text) if path not in typed]
            return f" (under --root {root})" if paths and str(root) not in text else ""

        if root != Path("/"):
            error.message += suffix(error.message)
            error.hint = at_root(error.hint) + suffix(error.hint)
        raise


def _at_root(root: Path, names: Set[str], text: str) -> str:
    """The text with --root in gpunode's commands `names`, so that they act on that machine, unless they
    compare files or are only for the node itself, or GPUNODE_ROOT is set to it."""
    if root == Path("/") or not names or str(root) == os.environ.get("GPUNODE_ROOT"):
        return text
    command = rf"\bgpunode(?= (?:{'|'.join(names)})\b)(?![^,;|&]* --(?:apply|compare|root)\b)"
    return re.sub(command, lambda _: f"gpunode --root {shlex.quote(str(root))}", text)


def _interrupt(number: int, _frame: FrameType | None) -> NoReturn:
    """SIGTERM and SIGHUP end a command as Ctrl-C does, so that its changes are rolled back."""
    raise KeyboardInterrupt(signal.Signals(number).name)


def _report(kind: str, options: GlobalOptions, variables: Variables, error: GpunodeError) -> ExitCode:
    if options.debug:
        import traceback

        sys.stderr.write(printable(traceback.format_exc()))  # it can contain untrusted text as well
    if error.exit_code == ExitCode.USAGE:
        error.message += _set_by(variables, error.message)
    render_error(error)
    if options.format in ENVELOPES:
        _shown(Result(kind, status="error", exit_code=error.exit_code, errors=(error.info(),)), options)
    return error.exit_code


def _set_by(variables: Variables, message: str) -> str:
    """Notes that name the variables which set the options and values of a message, because the user may not
    know of them."""
    words = set(re.findall(r"[^\s'\",;:()]+", message))
    names = [name for name, texts in variables.items() if words.intersection(texts)]
    return f" (set by {', '.join(names)})" if names else ""


def _shown(result: Result, options: GlobalOptions) -> bool:
    """Print to stdout; if that fails, report it on stderr."""
    try:
        render(result, options.format, options.color or Color.AUTO)
    except GpunodeError as error:
        render_error(error)
        return False
    return True


# Parsing of a command line.


def run_app(app: typer.Typer, argv: Sequence[str]) -> int:
    """Parse and run; usage errors have the same form as others, and the envelope if it was requested."""
    if "_GPUNODE_COMPLETE" in os.environ:
        return _complete(app)
    code = 0
    try:
        code = _parsed(app, argv)
        sys.stdout.flush()  # what --help and --version print is still in the buffer
    except OSError as error:
        failed = output_failed(error)
        if failed is not None:
            render_error(failed)
            return failed.exit_code
    return code


def _complete(app: typer.Typer) -> int:
    """Answer a shell's completion request (commands/completion.py). Nothing is written to the terminal.

    An invalid line or an unreadable file offers nothing; the command itself reports the reason.
    """
    from typer.completion import completion_init  # type: ignore[attr-defined]

    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    completion_init()
    try:
        app([], standalone_mode=False, prog_name="gpunode")
        sys.stdout.flush()
    except SystemExit as stop:
        return int(stop.code or 0)
    except (Exception, KeyboardInterrupt):  # noqa: BLE001 - an error has no place in a line that is being typed
        return 1
    return 0


def _parsed(app: typer.Typer, argv: Sequence[str]) -> int:
    try:
        code = app(list(argv), standalone_mode=False, prog_name="gpunode")
        return int(code or 0)
    except SystemExit as stop:
        return int(stop.code or 0)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        # Typer's own exceptions are in a private module; all of them have this method
        if not hasattr(error, "format_message"):
            raise
        context = getattr(error, "ctx", None)
        return _usage(error, argv, context.command_path if context is not None else _path(app, argv))


_PLAINER: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"^Invalid value for '?(.+?)'?: ", r"\1: "),
    (r"(?<= is not one of )'.*", lambda listed: listed[0].replace("'", "")),
    (r"is not a valid boolean\. Recognized values: .*", "is neither true nor false"),
    (r"is not a valid int(?: range)?$", "is not a whole number"),
    (r"(\S+) is not in the range x>=(\S+)", r"\1 is less than \2"),
    (r"(\S+) is not in the range (\S+)<=x<=(\S+)", r"must be \2 to \3, not \1"),
    (r"^Option '(\S+)' requires an argument", r"\1 needs a value"),
    (r"^Got unexpected extra argument\S* \((.*)\)$", r"unexpected argument: \1"),
)
"""Where the library's words are not those of a user."""
_NO_REMOVAL = "gpunode doesn't remove drivers; use the package manager"
_OTHER_WORDS = {
    "uninstall": "to undo everything that gpunode changed: gpunode reset",
    "remove": "to undo everything that gpunode changed: gpunode reset",
    "undo": "to undo one change: gpunode rollback",
    "toolkit uninstall": "to remove the toolkit: gpunode toolkit remove",
    "driver uninstall": _NO_REMOVAL,
    "driver remove": _NO_REMOVAL,
    "mig show": "did you mean gpunode mig list?",
    "mig status": "did you mean gpunode mig list?",
    "cdi remove": "to remove the specifications that gpunode wrote: gpunode cdi refresh --remove",
    "plugin start": "did you mean gpunode plugin serve?",
    "completion --shell": "name the shell alone: gpunode completion bash",
}
"""Hints for words that mean something in other programs: the nearest spelling would be the wrong command."""


def _path(app: typer.Typer, argv: Sequence[str]) -> str:
    """The command that a line names, for an error that lacks it."""
    command: Any = typer.main.get_command(app)
    path = ["gpunode"]
    for word in argv:
        command = command.get_command(None, word) if hasattr(command, "get_command") else None
        if command is None:
            break
        path.append(word)
    return " ".join(path)


def _usage(error: Any, argv: Sequence[str], path: str) -> int:
    """Report an invalid line; `path` is the command that it names."""
    if type(error).__name__ == "NoArgsIsHelpError":
        sys.stderr.write(f"{error.format_message()}\n")
        return ExitCode.USAGE
    context = getattr(error, "ctx", None)
    option = getattr(error, "param", None)
    if option is not None and context is not None and option.param_type_name == "option":
        error.param_hint = _variable(context, option) or f"'{flag_of(option)}'"
    message = " ".join(str(error.format_message()).split()).rstrip(".")
    for pattern, text in _PLAINER:
        message = re.sub(pattern, text, message)
    message, hint = _with_nearest(error, message, f"see {path} --help")
    hint = _special_hint(context, argv, path, message) or hint
    say(f"error: {message if message[:2].isupper() else message[:1].lower() + message[1:]}")
    say(f"hint: {hint}")
    output = _asked_output(argv)
    if output in ENVELOPES:
        info = ErrorInfo("usage", message, hint)
        render(Result("Error", status="error", exit_code=ExitCode.USAGE, errors=(info,)), output, Color.NEVER)
    return ExitCode.USAGE


def _with_nearest(error: Any, message: str, hint: str) -> tuple[str, str]:
    """The message, and the hint with the option or command that the user probably meant."""
    from difflib import get_close_matches

    offered = getattr(error, "possibilities", None) or ()
    possible = {name.lstrip("-"): name for name in offered if name != "--help"}
    wrong = error.option_name.lstrip("-") if possible else ""
    near = possible.get(next(iter(get_close_matches(wrong, possible, 1, 0.7)), ""), "")
    message = message.partition(" (Possible option")[0]
    if choice := re.search(r": '([^']+)' is not one of (.+)", message):
        near = next(iter(get_close_matches(choice[1].lower(), choice[2].split(", "), 1)), "")
    if command := re.search(r"\. Did you mean '([^']+)'.*", message):
        near, message = command[1], message[: command.start()]
    return message, f"did you mean {near}? {hint[:1].upper()}{hint[1:]}" if near else hint


def _special_hint(context: Any, argv: Sequence[str], path: str, message: str) -> str:
    """A hint for a word that is no spelling mistake: another program's word, a pasted dash, a value without
    its option. Empty if the line has none."""
    if pasted := next((argument for argument in argv if argument.startswith(tuple(DASHES))), ""):
        name = pasted.lstrip(f"{DASHES}-")
        return f"{pasted[0]!r} is not '-': type {'-' if len(name) == 1 else '--'}{name}"
    match = re.match(r"(?:No such command '|No such option: |unexpected argument: )([^\s']+)", message)
    word = match[1] if match else ""
    command = " ".join((*path.split()[1:], word))
    if command == "gpunode":
        rest = [*argv[: argv.index(word)], *argv[argv.index(word) + 1 :]] if word in argv else []
        return f"leave out the second gpunode: {shlex.join(('gpunode', *rest))}"
    if hint := _OTHER_WORDS.get(command):
        return hint
    if word.startswith("-") and "--" in argv:
        return "after -- no word is an option: leave out --"
    flag = _option_of(context, word) if word else ""
    return f"did you mean {flag} {word}? See {path} --help" if flag else ""


def _option_of(context: Any, word: str) -> str:
    """The option of the command for which Tab offers this word; empty if there is none."""
    command = context.command
    if default := getattr(command, "default", ""):
        command = command.get_command(context, default)
    for option in command.get_params(context):
        eligible = option.param_type_name == "option" and not option.hidden and word not in ("true", "false")
        offered = option.shell_complete(context, word) if eligible else ()
        if any((item.value, item.type) == (word, "plain") for item in offered):
            return flag_of(option)
    return ""


def _asked_output(argv: Sequence[str]) -> Output:
    """The requested output form, as far as an invalid command line shows it."""
    words = [os.environ.get("GPUNODE_OUTPUT", "")]
    for position, word in enumerate(argv):
        if word in ("-o", "--output"):
            words += argv[position + 1 : position + 2]
        elif word.startswith(("-o", "--output=")):
            words.append(word.removeprefix("--output=").removeprefix("-o"))
    formats = [word for word in words if word in list(Output)]
    return Output(formats[-1]) if formats else Output.TABLE


class ReceivedSignals(list[str]):
    """Names of the signals received that end the process, and the main thread's wait for them.

    What the handlers call takes no lock: they interrupt its holder. `wait` waits on a pipe, into which Python
    writes for each signal (`signal.set_wakeup_fd`): the kernel may give a signal to any thread, and it may
    arrive just before the wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hung_up = False
        self.on_end: Callable[[], None] = lambda: None
        self.let_go: Callable[[], None] = lambda: None
        # open until the process ends: a thread that hangs, and is abandoned, may still call `wake`
        self._woken, self.pipe = os.pipe()
        for end in (self._woken, self.pipe):
            os.set_blocking(end, False)
        self._poll = select.poll()
        self._poll.register(self._woken, select.POLLIN)

    def wait(self, seconds: float | None = None) -> None:
        """Wait for a signal or `wake`, at most `seconds`. Handlers of signals that arrived have run then."""
        self._poll.poll(None if seconds is None else seconds * 1000)
        with suppress(BlockingIOError):
            os.read(self._woken, 4096)
        # Python (3.11's ceval.c) keeps pending signals in a flag that is written without a lock, by whichever
        # thread the kernel has interrupted; this looks at the signals themselves
        signal.pthread_sigmask(signal.SIG_BLOCK, ())

    def wake(self) -> None:
        """End this wait, or the next one. Any thread may call it."""
        with suppress(BlockingIOError):  # the pipe is full: the wait ends anyway
            os.write(self.pipe, b"w")

    def take_hangup(self) -> bool:
        """Whether SIGHUP arrived since the last call."""
        if not self.hung_up:
            return False
        self.hung_up = False  # the caller's work comes after this: it includes a signal that arrives now
        return True


@contextmanager
def until_signal() -> Iterator[ReceivedSignals]:
    """Handle SIGHUP, SIGUSR1 and the signals that end the process instead of ending; only in the main
    thread."""
    signals = ReceivedSignals()

    def end(number: int, frame: FrameType | None) -> None:
        signals.append(signal.Signals(number).name)
        signals.on_end()

    def let_go(number: int, frame: FrameType | None) -> None:
        signals.let_go()

    def look_again(number: int, frame: FrameType | None) -> None:
        signals.hung_up = True

    before = {number: signal.signal(number, end) for number in _ENDING}
    before[signal.SIGHUP] = signal.signal(signal.SIGHUP, look_again)
    before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, let_go)
    descriptor = signal.set_wakeup_fd(signals.pipe, warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, before)  # deliver the signals that arrived before
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(descriptor)
