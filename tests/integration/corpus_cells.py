"""One cell of the corpus table: one file on one engine release, through gpunode's command line and back.

The engine is the judge: `Judge.load` is its own reading of a file. gpunode's report on the file is only
compared with it. A cell has one outcome (fixtures/corpus.py names them) and a list of complaints, each a
sentence; a cell without complaints passes.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fixtures.corpus import BROKEN, CONFIGURED, MAIN, MENDED, OPTIONS, REFUSED, UNCHANGED, Case
from tests.cli import Ran
from tests.integration.forked_cli import ForkedCli

Tree = dict[str, Any]
# gpunode's own temporary directories; the tests' have longer names
_STAGED = re.compile(r"/gpunode-\w{8}/")
Files = dict[str, bytes]
NAME = "nvidia"


class Judge(Protocol):
    """One engine release as the judge of files."""

    @property
    def engine(self) -> str: ...

    @property
    def release(self) -> tuple[int, ...]: ...

    @property
    def path(self) -> str:
        """The PATH on which it comes first."""

    def load(self, main: Path, cli: ForkedCli) -> Tree | None:
        """The engine's own view of the file and its imports; None if it refuses to start with them."""

    def right(self, before: Tree | None, after: Tree, variant: str, cell: Cell) -> list[str]:
        """Faults of the configured tree; `before` is None if only gpunode made the file load."""

    def away(self, before: Tree, after: Tree, variant: str) -> list[str]:
        """Faults of the tree after the runtime was removed from a file that had none.

        The changes of the variant are unknown without a journal; with one the bytes are compared as well.
        """

    def has_runtime(self, tree: Tree) -> bool:
        """Whether the runtime is registered."""

    def ours(self, line: str) -> bool:
        """Whether a changed or removed line is about a key that gpunode may set."""


@dataclass
class Cell:
    """A case on a release, in a directory of its own. gpunode finds the engines in `programs` first."""

    judge: Judge
    cli: ForkedCli
    case: Case
    variant: str
    directory: Path
    programs: Path
    end: str = ""
    complaints: list[str] = field(default_factory=list)

    @property
    def label(self) -> str:
        """How results.json names it within its release."""
        return f"{self.case.name} {self.variant}".strip()

    @property
    def program(self) -> Path:
        return self.directory / "bin/nvidia-container-runtime"

    @property
    def etc(self) -> Path:
        return self.directory / "etc"

    def run(self) -> Cell:
        """Run the whole sequence; fills `end` and `complaints`."""
        self.program.parent.mkdir(parents=True)
        self.program.write_text("#!/bin/sh\n")
        self.program.chmod(0o755)
        main = self.case.unpack(self.etc, self.program)
        original, before = self.files(), self.judge.load(main, self.cli)
        done = self.gpunode("configure-runtime", *OPTIONS[self.variant])
        if done.code:
            self.end = BROKEN if before is None else REFUSED
            self._judge_refusal(done, original)
        else:
            self._judge_change(main, original, before)
        expected, reason = self.case.expected(self.judge.release, self.variant)
        if expected != (self.end if self.end not in (CONFIGURED, UNCHANGED) else ""):
            said = f"\n{done.err.strip()}" if done.code else ""
            self.complaints.append(
                f"came to {self.end}; the index says {expected or 'to be configured'} {reason}{said}"
            )
        return self

    def gpunode(self, verb: str, *options: str, state: str = "state") -> Ran:
        """One run on this file; `state` separates journals."""
        argv = [verb, "--runtime", self.judge.engine, "--config", str(self.etc / MAIN[self.judge.engine])]
        argv += ["--no-restart", "--socket", str(self.directory / "none.sock"), "-o", "json", *options]
        if verb == "configure-runtime":
            argv += ["--nvidia-runtime-path", str(self.program)]
        environ = {
            "GPUNODE_STATE_DIR": str(self.directory / state),
            "PATH": f"{self.programs}:{self.judge.path}",
        }
        return self.cli.run(*argv, env=environ)

    def files(self) -> Files:
        """Every file below the engine's directory, by its path relative to it."""
        files = (path for path in self.etc.rglob("*") if path.is_file())
        return {str(path.relative_to(self.etc)): path.read_bytes() for path in files}

    def _stamps(self) -> dict[str, int]:
        return {name: (self.etc / name).stat().st_mtime_ns for name in self.files()}

    def _judge_refusal(self, done: Ran, original: Files) -> None:
        if self.files() != original:
            self.complaints.append("refused, but something was written")
        if "error:" not in done.err or "hint:" not in done.err:
            self.complaints.append(f"no error and hint: {done.err!r}")
        if str(self.etc) not in done.err and self.variant != "cdi":  # the release's own fault
            self.complaints.append(f"the refusal names no file: {done.err!r}")
        if self.case.line and f":{self.case.line}:" not in done.err:
            self.complaints.append(f"the refusal doesn't name line {self.case.line}: {done.err!r}")
        if _STAGED.search(done.err) or (self.end == BROKEN and "refuses the new" in done.err):
            self.complaints.append(f"the user's own file is to blame, not a staged or new one: {done.err!r}")
        if "bug in gpunode" in done.err:
            self.complaints.append(f"a bug: {done.err!r}")

    def _judge_change(self, main: Path, original: Files, before: Tree | None) -> None:
        after, written = self.judge.load(main, self.cli), self.files()
        self.end = MENDED if before is None else UNCHANGED if written == original else CONFIGURED
        if after is None:
            self.complaints.append("the engine refuses what gpunode wrote")
            return
        self.complaints += self.judge.right(before, after, self.variant, self)
        self.complaints += self._foreign(original, written)
        self._judge_second_run(written)
        had = before is not None and self.judge.has_runtime(before)
        self._judge_removal(main, original, before, had=had)

    def _judge_second_run(self, written: Files) -> None:
        stamps = self._stamps()
        again = self.gpunode("configure-runtime", *OPTIONS[self.variant])
        if again.code:
            self.complaints.append(f"the second run fails: {again.err!r}")
            return
        actions = {change["action"] for change in _changes(again.document["data"])}
        if actions != {UNCHANGED} or self.files() != written or self._stamps() != stamps:
            self.complaints.append(f"the second run is not unchanged: {sorted(actions)}")

    def _judge_removal(self, main: Path, original: Files, before: Tree | None, *, had: bool) -> None:
        """Without the journal, from the text alone, as after NVIDIA's own tools (one round); and with it."""
        written = self.files()
        if not self.variant:
            self._remove(main, original, before, "fresh", had=had)
        for name in set(self.files()) | set(written):
            (self.etc / name).unlink(missing_ok=True)
        for name, data in written.items():
            (self.etc / name).parent.mkdir(parents=True, exist_ok=True)
            (self.etc / name).write_bytes(data)
        self._remove(main, original, before, "state", had=had)
        if before is not None and not had and self.files() != original:
            changed = _differing(self.files(), original)
            self.complaints.append(f"unconfigure does not restore the bytes of {', '.join(changed)}")

    def _remove(self, main: Path, original: Files, before: Tree | None, state: str, *, had: bool) -> None:
        how = "with the journal" if state == "state" else "without a journal"
        done = self.gpunode("unconfigure-runtime", state=state)
        if done.code:
            self.complaints.append(f"unconfigure {how} fails: {done.err!r}")
            return
        after = (
            before if self.files() == original else self.judge.load(main, self.cli)
        )  # the same bytes, the same view
        if after is None:
            self.complaints.append(f"the engine refuses the file after unconfigure {how}")
            return
        if self.judge.has_runtime(after):
            self.complaints.append(f"the runtime is still there after unconfigure {how}")
        if before is not None and not had:
            wrong = self.judge.away(before, after, self.variant)
            self.complaints += [f"{one} (unconfigure {how})" for one in wrong]

    def _foreign(self, original: Files, written: Files) -> list[str]:
        """Lines that gpunode changed or removed and that aren't its own."""
        complaints = []
        for name, data in original.items():
            lost = _lost_lines(data.decode(), written.get(name, b"").decode())
            foreign = [line for line in lost if not self.judge.ours(line)]
            complaints += [f"{name}: a line that isn't gpunode's was changed: {line!r}" for line in foreign]
        return complaints


def _changes(data: Any) -> list[dict[str, Any]]:
    """The file changes of a report, also where it is about several engines."""
    if isinstance(data, dict) and isinstance(data.get("changes"), list):
        return [change for change in data["changes"] if isinstance(change, dict)]
    children = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    return [change for child in children for change in _changes(child)]


def _differing(one: Mapping[str, bytes], other: Mapping[str, bytes]) -> list[str]:
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))


def _lost_lines(before: str, after: str) -> list[str]:
    """Lines of `before` that are not in `after`, nor in a line there that only has something inserted."""
    old, new = before.split("\n"), after.split("\n")
    lost = []
    for kind, start, end, begin, stop in difflib.SequenceMatcher(
        None, old, new, autojunk=False
    ).get_opcodes():
        if kind in ("equal", "insert"):
            continue
        lost += [line for line in old[start:end] if not any(_grown(line, one) for one in new[begin:stop])]
    return [line for line in lost if line.strip()]


def _grown(line: str, other: str) -> bool:
    """Whether `other` is `line` with something inserted in one place."""
    if len(other) < len(line):
        return False
    same = next((n for n, (a, b) in enumerate(zip(line, other, strict=False)) if a != b), len(line))
    return same == len(line) or other.endswith(line[same:])


def explain(cell: Cell) -> str:
    """Text of a failed cell."""
    where = f"{cell.judge.engine} {'.'.join(map(str, cell.judge.release))}: {cell.label}"
    return "\n".join([where, *(f"- {complaint}" for complaint in cell.complaints)])
