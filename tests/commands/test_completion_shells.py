"""Tab in the real shells: what bash, zsh and fish make of gpunode's completion script and of the values."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import shlex
import shutil
import subprocess
import termios
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread

import pytest

from tests.cli import clean_environment, command, gpunode
from tests.waiting import eventually

ENTRY = "20261124T021435Z-configure-runtime"
START = {
    "bash": ("bash", "--norc", "--noprofile", "-i"),
    "zsh": ("zsh", "-f", "-i"),
    "fish": ("fish", "--no-config", "--interactive"),
}
"""Each without the user's own configuration."""
LOAD = {
    "bash": "source completions/bash",
    "zsh": "fpath=(completions/zsh $fpath); autoload -U compinit; compinit -u -D",
    "fish": "source completions/fish",
}
"""Zsh loads the script as the packages install it, bash and fish as a user's configuration does."""
RECORD = """\
import json, pathlib, sys
made = pathlib.Path("arguments.new")
made.write_text(json.dumps(sys.argv[1:]))
made.rename("arguments")
"""


@dataclass
class Shell:
    """A shell on a terminal. Its `gpunode` answers Tab, and otherwise writes its arguments to a file."""

    name: str
    directory: Path
    process: subprocess.Popen[bytes]
    terminal: int
    pieces: list[str] = field(default_factory=list)

    @property
    def shown(self) -> str:
        return "".join(self.pieces)

    def read(self) -> None:
        """Read what the terminal shows until the shell has ended."""
        with suppress(OSError):
            while piece := os.read(self.terminal, 4096):
                self.pieces.append(piece.decode(errors="replace"))

    def type(self, text: str) -> None:
        os.write(self.terminal, text.encode())

    def completed(self, line: str) -> str:
        """The command line that runs after `line`, Tab and Enter."""
        arguments = self.directory / "arguments"
        arguments.unlink(missing_ok=True)
        self.type(f"gpunode {line}\t\r")
        assert eventually(arguments.exists), f"{line}: {self.shown!r}"
        return " ".join(json.loads(arguments.read_text()))


@pytest.fixture(scope="module", params=START)
def shell(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    name: str = request.param
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    directory = tmp_path_factory.mktemp(name)
    prepare(directory, name)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        START[name],
        cwd=directory,
        env=clean_environment(
            {"HOME": str(directory), "PATH": f"{directory}/bin:{os.environ['PATH']}", "TERM": "xterm"}
        ),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        start_new_session=True,
    )
    os.close(theirs)
    made = Shell(name, directory, process, ours)
    reader = Thread(target=made.read, daemon=True)
    reader.start()
    made.type(f"{LOAD[name]}; echo LOA''DED\r")
    assert eventually(lambda: "LOADED" in made.shown), made.shown
    yield made
    process.kill()
    process.wait()
    reader.join()
    os.close(ours)


def prepare(directory: Path, name: str) -> None:
    """The script, the program, a node with a journal, and files of MIG configurations, some hostile."""
    script = directory / "completions" / name
    if name == "zsh":
        script = script / "_gpunode"
    script.parent.mkdir(parents=True)
    script.write_text(gpunode("completion", name).out)
    (directory / "record.py").write_text(RECORD)
    program = directory / "bin/gpunode"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\n[ -n "$_GPUNODE_COMPLETE" ] && exec {shlex.join(command())} "$@"\n'
        f'exec {shlex.quote(command()[0])} {directory}/record.py "$@"\n'
    )
    program.chmod(0o755)
    for entry in (ENTRY, "20261124T021436Z-$(touch evil)"):
        place = directory / "node/var/lib/gpunode/journal" / entry
        place.mkdir(parents=True)
        (place / "manifest.json").write_text('{"state": "committed"}')
    labels = ("all-balanced", r"\$(touch evil)", "'$(touch evil)'", "`touch evil`", "*", "a b", "-x")
    configs = {label: [{"devices": "all", "mig-enabled": False}] for label in labels}
    (directory / "mig.yaml").write_text(json.dumps({"version": "v1", "mig-configs": configs}))
    (directory / "broken.yaml").write_text("mig-configs: [")
    os.mkfifo(directory / "pipe.yaml")


def check(shell: Shell, line: str, word: str) -> None:
    before, _, begun = line.rpartition(" ")
    assert word.startswith(begun)
    assert shell.completed(line) == f"{before} {word}".strip(), shell.shown
    assert "Traceback" not in shell.shown and "rror:" not in shell.shown


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("verify --on kub", "kubernetes"),
        ("explain nvml-h", "nvml-hang"),
        ("mig plan -f mig.yaml -c ", "all-balanced"),
    ],
)
def test_tab_completes_values(shell: Shell, line: str, word: str) -> None:
    check(shell, line, word)


@pytest.mark.full
@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("unconf", "unconfigure-runtime"),
        ("doctor --expl", "--explain"),
        ("doctor --only uvm-lo", "uvm-lost-at-reboot"),
        ("doctor -o pro", "prometheus"),
        ("configure-runtime --runtime micro", "microk8s"),
        ("setup --plugin dae", "daemonset"),
        ("plugin serve --log-format js", "json"),
        ("labels --to file,std", "file,stdout"),
        ("cdi generate --hooks n", "none"),
        ("mig export --format js", "json"),
        ("node advertise --resource nvidia.com/mig-7g.14", "nvidia.com/mig-7g.141gb"),
        ("--root node rollback 2026", ENTRY),
        ("journal show --root node 2026", ENTRY),
        ("help mig pl", "plan"),
    ],
)
def test_tab_completes_other_values(shell: Shell, line: str, word: str) -> None:
    check(shell, line, word)


@pytest.mark.full
@pytest.mark.parametrize(
    "line",
    [
        "mig plan -f broken.yaml -c zz",
        "mig plan -f pipe.yaml -c zz",
        "mig plan -f nowhere.yaml -c zz",
        "rollback --root nowhere zz",
        "nonsense --only zz",
        "doctor --timeout zz",
    ],
)
def test_a_line_with_a_mistake_stays_as_it_is_and_nothing_is_printed(shell: Shell, line: str) -> None:
    shell.pieces.clear()
    check(shell, line, "zz")


def test_names_from_a_file_are_not_evaluated(shell: Shell) -> None:
    for line in ("mig plan -f mig.yaml -c ", "rollback --root node 2026"):
        shell.completed(line)
    assert not list(shell.directory.glob("**/evil"))
