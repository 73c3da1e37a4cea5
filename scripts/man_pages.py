"""Manual pages in roff, made from the command line's own definition; see man-pages(7) and groff_man(7).

`gpunode.1` lists the commands; each command, with its subcommands, has a page such as `gpunode-doctor.1`.
scripts/generate_docs.py writes them to docs/man/.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from gpunode import __version__
from gpunode.cli import COMMANDS, app
from gpunode.commands.help_page import VALUES, printed, record
from gpunode.output.result import ExitCode

_EXIT_STATUS = {
    ExitCode.OK: "Done, or nothing to do. Warnings are included.",
    ExitCode.FAILED: "The operation or a check failed.",
    ExitCode.USAGE: "Usage error.",
    ExitCode.PRECONDITION: "Refused before anything was written.",
    ExitCode.ROLLED_BACK: "Applied, failed, and rolled back: the node is unchanged.",
    ExitCode.DIFFERS: "Compared, and it differs from what was asserted.",
    ExitCode.INTERRUPTED: "Interrupted, and rolled back if anything was applied.",
}


def pages() -> dict[str, str]:
    """Text of each page by its file's name."""
    root: Any = typer.main.get_command(app)
    context = typer.Context(root, info_name="gpunode")
    result = {"gpunode.1": _main_page(root, context)}
    for name in COMMANDS:
        result[f"gpunode-{name}.1"] = _command_page(name, root.get_command(context, name), context)
    return result


def _main_page(root: Any, context: typer.Context) -> str:
    lines = [
        *_head("gpunode", str(root.help).rstrip(".")),
        '.B gpunode\n.RI [ OPTIONS "] " COMMAND " [" ARGUMENTS ]',
        ".SH DESCRIPTION",
        _text("gpunode configures the GPUs of one Linux node for containers and Kubernetes, and proves it."),
        ".SH COMMANDS",
    ]
    for name, (_, line) in COMMANDS.items():
        lines += [".TP", f".BR gpunode\\-{_text(name)} (1)", _text(line)]
    lines += [".SH OPTIONS", *_options(root, context)]
    lines += [".SH VALUES"]
    for name, text in VALUES:
        lines += [".TP", f".I {_text(name)}", _text(text)]
    lines += [".SH EXIT STATUS"]
    for code, meaning in _EXIT_STATUS.items():
        lines += [".TP", f".B {int(code)}", meaning]
    lines += [
        ".SH ENVIRONMENT",
        _text(
            "GPUNODE_<COMMAND>_<OPTION> sets an option; gpunode help environment lists these variables."
            " NO_COLOR and FORCE_COLOR are honoured."
        ),
        ".SH FILES",
        ".TP\n.I /var/lib/gpunode/journal\nChanges of this node, for " + r"\fBgpunode rollback\fR.",
    ]
    return "\n".join(lines) + "\n"


def _command_page(name: str, command: Any, parent: typer.Context) -> str:
    lines = _head(f"gpunode-{name}", COMMANDS[name][1].rstrip("."))
    parts = list(_parts(name, command, parent))
    for path, part, own in parts:
        lines += [_synopsis(path, part, own), ".br"]
    lines += [".SH DESCRIPTION"]
    for path, part, own in parts:
        lines += [f".SS gpunode {_text(path)}"] if path != name else []
        lines += [line for text in _paragraphs(part)[0] for line in (".PP", _text(text))]
        lines += _options(part, own)
    examples = [example for _, part, _ in parts for example in _paragraphs(part)[1]]
    if examples:
        lines += [".SH EXAMPLES", ".EX", *(_text(example) for example in examples), ".EE"]
    lines += [".SH SEE ALSO", ".BR gpunode (1)"]
    return "\n".join(lines) + "\n"


def _parts(path: str, command: Any, parent: typer.Context) -> Iterator[tuple[str, Any, typer.Context]]:
    """The command, or the subcommands of a group and of the groups in it, each with its path."""
    context = typer.Context(command, info_name=path.split()[-1], parent=parent)
    children = getattr(command, "commands", {})
    for child in children:
        yield from _parts(f"{path} {child}", command.get_command(context, child), context)
    if not children:
        yield path, command, context


def _head(name: str, line: str) -> list[str]:
    title = name.upper().replace("-", "\\-")
    return [
        f'.TH {title} 1 "" "gpunode {__version__}" "gpunode"',
        ".SH NAME",
        f"{_text(name)} \\- {_text(line[:1].lower() + line[1:])}",
        ".SH SYNOPSIS",
    ]


def _synopsis(path: str, command: Any, context: typer.Context) -> str:
    arguments = [p.make_metavar(context) for p in command.params if p.param_type_name == "argument"]
    return f".B gpunode {_text(path)}\n.RI {_quoted('[')} OPTIONS {_quoted('] ' + ' '.join(arguments))}"


def _options(command: Any, context: typer.Context) -> list[str]:
    lines: list[str] = []
    for param in command.listed_options(context):
        names = ", ".join(f"\\fB{_text(flag)}\\fR" for flag in (*param.opts, *param.secondary_opts))
        value = "" if param.is_flag else f" \\fI{_text(param.make_metavar(context))}\\fR"
        _, text = record(param, context)
        lines += [".TP", f"{names}{value}", _text(printed(text))]
    return lines


def _paragraphs(command: Any) -> tuple[list[str], list[str]]:
    """The text of a command's help, and its examples."""
    paragraphs = [
        part.strip() for text in (command.help, command.epilog) if text for part in text.split("\n\n")
    ]
    lines = [line.strip() for part in paragraphs for line in part.splitlines() if line.strip() != "Examples:"]
    examples = [line for line in lines if line.startswith(("gpunode ", "sudo gpunode "))]
    texts = [" ".join(part.split()) for part in paragraphs if part.splitlines()[0].strip() not in examples]
    return [text for text in texts if not text.startswith("Examples:")], examples


def _quoted(text: str) -> str:
    return '"' + _text(text).replace('"', "\\(dq") + '"'


def _text(text: str) -> str:
    """Text for roff: backslashes and hyphens as they are, and no line that looks like a request."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("\N{MULTIPLICATION SIGN}", "x")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped
