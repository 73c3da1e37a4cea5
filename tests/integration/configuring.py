"""Drives the real command line against a private engine, with a journal and a lock of its own."""

from __future__ import annotations

import fcntl
import os
import pty
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fixtures.engines import Engine
from tests.cli import checked, gpunode
from tests.waiting import PATIENCE

SECONDS = PATIENCE


@dataclass(frozen=True)
class Cli:
    """`gpunode` on one private engine. `program` replaces nvidia-container-runtime."""

    engine: Engine
    state: Path
    program: Path

    @property
    def environ(self) -> dict[str, str]:
        return {**os.environ, "GPUNODE_STATE_DIR": str(self.state), "NO_COLOR": "1"}

    def argv(self, verb: str, *options: str, restart: str | None = None) -> list[str]:
        if verb == "reset":  # it has all of that from the journal
            return [sys.executable, "-m", "gpunode", verb, *options]
        command = self.engine.restart_command if restart is None else restart
        argv = [sys.executable, "-m", "gpunode", verb, *options]
        if "--no-restart" not in options:
            argv += ["--restart-command", command]
        if verb != "rollback":
            argv += ["--config", str(self.engine.config)]
        if verb == "configure-runtime":
            argv += ["--nvidia-runtime-path", str(self.program)]
        return argv

    def run(self, verb: str, *options: str, restart: str | None = None) -> subprocess.CompletedProcess[str]:
        argv = self.argv(verb, *options, restart=restart)
        ran = gpunode(*argv[argv.index("gpunode") + 1 :], env=self.environ)
        return subprocess.CompletedProcess(argv, ran.code, ran.out, ran.err)

    def on_terminal(self, typed: bytes, verb: str, *options: str) -> tuple[int, str]:
        """Exit code and the whole terminal output, with `typed` as input at the prompt."""
        ours, theirs = pty.openpty()
        with os.fdopen(ours, "r+b", buffering=0) as terminal:
            process = subprocess.Popen(
                self.argv(verb, *options),
                env=self.environ,
                stdin=theirs,
                stdout=theirs,
                stderr=theirs,
                # Ctrl-C reaches the processes of which this is the controlling terminal
                preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
                start_new_session=True,
            )
            os.close(theirs)
            shown = b""
            with suppress(OSError):  # EIO: the last process that had it open has ended
                while part := terminal.read(4096):
                    shown += part
                    if typed and shown.rstrip().endswith(b"[y/N]"):
                        terminal.write(typed)
                        typed = b""
            return process.wait(SECONDS), shown.decode()

    def data(self, verb: str, *options: str, restart: str | None = None) -> Any:
        """`data` of a run that must succeed."""
        done = self.run(verb, *options, "-o", "json", restart=restart)
        assert done.returncode == 0, done.stderr + done.stdout
        return checked(done.stdout)["data"]

    def start(self, verb: str, *options: str, restart: str | None = None) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.argv(verb, *options, restart=restart),
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def script(self, body: str) -> str:
        """An executable with this shell text, for --restart-command."""
        path = self.state.parent / f"restart-{len(list(self.state.parent.iterdir()))}"
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return str(path)


@contextmanager
def configuring(engine: Engine, tmp_path: Path) -> Iterator[Cli]:
    """Start `engine` and give the command line for it."""
    program = tmp_path / "stand-in-runtime"
    program.write_text('#!/bin/sh\nexec runc "$@"\n')
    program.chmod(0o755)
    with engine:
        yield Cli(engine, tmp_path / "state", program)
