"""Runs the command line as a user does: a child process with its own streams and exit code.

Most children are forks of one process that has imported the command line (tests/integration/forked_cli.py):
starting a thousand interpreters is minutes of the suite. If the interpreter's own start matters, for a
variable that only it reads, or another program before it, the child is a new one.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpunode.commands.schema import KINDS, schema_of
from gpunode.output.result import API_VERSION
from tests.waiting import PATIENCE

if TYPE_CHECKING:
    from jsonschema_rs import Draft202012Validator

    from tests.integration.forked_cli import ForkedCli, Started

REPOSITORY = Path(__file__).parent.parent


@dataclass(frozen=True)
class Ran:
    """Result of one command line; an envelope on stdout is checked against its JSON Schema."""

    code: int
    out: str
    err: str

    def __post_init__(self) -> None:
        if self.out.startswith("{") and API_VERSION in self.out:
            document = json.loads(self.out)
            if document.get("apiVersion") == API_VERSION:
                check_envelope(document)

    @property
    def document(self) -> dict[str, Any]:
        """The JSON envelope on stdout."""
        loaded = json.loads(self.out)
        assert isinstance(loaded, dict)
        return loaded


def check_envelope(document: Mapping[str, Any]) -> None:
    """Fail if the schema of the document's kind refuses it, or doesn't know one of its fields."""
    assert document["kind"] in KINDS, f"gpunode schema does not know {document['kind']}"
    validator = _validator(document["kind"])
    if not validator.is_valid(document):
        errors = validator.evaluate(document).errors()
        lines = [f"{error['instanceLocation']}: {error['error']}" for error in errors]
        raise AssertionError("\n".join([document["kind"], *lines]))


def checked(text: str) -> dict[str, Any]:
    """The envelope that a command printed, for tests that start it in their own way."""
    document: dict[str, Any] = json.loads(text)
    check_envelope(document)
    return document


@cache
def _validator(kind: str) -> Draft202012Validator:
    from jsonschema_rs import Draft202012Validator  # which a booted machine doesn't have

    return Draft202012Validator(_closed(schema_of([kind])))


def _closed(schema: Any) -> Any:
    """The schema without the fields of later releases."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    more = {"additionalProperties": False} if "properties" in schema and "required" in schema else {}
    return {**{key: _closed(value) for key, value in schema.items()}, **more}


def command(*argv: str) -> list[str]:
    """The argument list that starts gpunode with this interpreter."""
    return [sys.executable, "-m", "gpunode", *argv]


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This environment without variables that configure gpunode, plus `extra`."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("GPUNODE_", "FORCE_COLOR"))
    }
    return {**kept, **(extra or {})}


_READ_AT_START = ("GLIBC_", "GRPC_", "LANG", "LC_", "LD_", "MALLOC_", "PYTHON", "TZ")
_OURS = {"GRPC_ENABLE_FORK_SUPPORT": "0", "GRPC_VERBOSITY": "NONE"}  # gpunode.plugin sets them when imported
# gpunode loads no library that it finds by this: its children do (gpunode/gpu/child.py), which start with it
_FOR_CHILDREN = "LD_LIBRARY_PATH"
_FIRST = dict(os.environ)  # before any test has changed it


def gpunode(
    *argv: str,
    env: Mapping[str, str] | None = None,
    timeout: float = PATIENCE,
    space: tuple[str, ...] = (),
    prefix: tuple[str, ...] = (),
    constants: Mapping[str, Any] | None = None,
    sleepless: bool = False,
) -> Ran:
    """Run gpunode to its end, with the program `prefix` if there is one (as another user, say).

    `space` is a program before that, the same for many runs: a namespace in which one process forks all.
    `constants` and `sleepless`: see `ForkedCli.run_in`; a fresh interpreter has gpunode's own constants and
    sleeps.
    """
    environ = clean_environment(env)
    if not prefix and _at_start(environ) == _at_start(_FIRST):
        cli = _forked(space)
        return cli.run_in(environ, *argv, seconds=timeout, constants=constants, sleepless=sleepless)
    return fresh_gpunode(*argv, env=env, timeout=timeout, prefix=(*space, *prefix))


def fresh_gpunode(
    *argv: str, env: Mapping[str, str] | None = None, timeout: float = PATIENCE, prefix: tuple[str, ...] = ()
) -> Ran:
    """`gpunode` in its own interpreter, however slow."""
    done = subprocess.run(
        [*prefix, *command(*argv)],
        env=clean_environment(env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def start_gpunode(*argv: str, env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes] | Started:
    """Start gpunode in this environment, for tests that do something while it runs, and then end it. Its
    stderr is appended to `log`."""
    with log.open("ab") as stderr:
        if _at_start(env) == _at_start(_FIRST):
            return _forked().start(env, *argv, log=log)
        return subprocess.Popen(command(*argv), env=env, stdout=subprocess.DEVNULL, stderr=stderr)


def _at_start(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(_READ_AT_START) and _OURS.get(name) != value and name != _FOR_CHILDREN
    }


@cache
def _forked(space: tuple[str, ...] = ()) -> ForkedCli:
    """The one for this run of pytest; it ends with it."""
    from tests.integration.forked_cli import ForkedCli, every_module

    made = ForkedCli(space, _FIRST, every_module())
    atexit.register(made.__exit__, None, None, None)
    return made
