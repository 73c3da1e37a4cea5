"""dockerd as the judge of the corpus: whether it accepts a file, and its contents before and after."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpunode.facts.daemons import parse_version
from tests.cli import Ran
from tests.integration.corpus_cells import NAME, Cell, Tree
from tests.integration.forked_cli import ForkedCli

VALIDATES = (23,)
# accepted by --validate since 25.0 but not by a start; test_corpus_docker.py starts it with such files
MISSES_RUNTIMES = (25,)
HAS_CDI_ON = (28, 2)  # features.cdi absent means on; test_cdi_docker.py has containers use it
_OURS = re.compile(r'"(default-runtime|runtimes|features|cdi|path|runtimeArgs|args)"|^(\{\}|null)$')


@dataclass(frozen=True)
class Docker:
    """The dockerd that comes first on `path`."""

    path: str
    release: tuple[int, ...]
    engine: str = "docker"

    @classmethod
    def on(cls, path: str) -> Docker:
        binary = shutil.which("dockerd", path=path) or "dockerd"
        said = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)
        return cls(path, parse_version(said.stdout))

    def load(self, main: Path, cli: ForkedCli) -> Tree | None:
        """The file's object as Go reads it; None if dockerd refuses to start with it."""
        takes = self._validates(main, cli) if self.release >= VALIDATES else self._gets_past(main, cli)
        if not takes:
            return None
        text = main.read_bytes().decode("utf-8-sig", errors="surrogateescape")
        if self.release >= MISSES_RUNTIMES and refused_at_start(text):
            return None
        return _tree(text)

    def _validates(self, main: Path, cli: ForkedCli) -> bool:
        return self._run(cli, "--validate", f"--config-file={main}").code == 0

    def _gets_past(self, main: Path, cli: ForkedCli) -> bool:
        """Releases without --validate: started where it must fail, with its file if that is wrong."""
        nowhere = main.parent.parent
        flags = [f"--pidfile=/proc/none/{nowhere.name}.pid", f"--exec-root={nowhere}/exec"]
        done = self._run(cli, f"--config-file={main}", f"--data-root={nowhere}/data", *flags)
        assert done.code != 0, "it has started"
        # dockerd mounts its root over itself, for its own propagation, and leaves it so
        cli.program("umount", "-l", str(nowhere / "data"), env={})
        return "unable to configure the Docker daemon with file" not in done.out + done.err

    def _run(self, cli: ForkedCli, *argv: str) -> Ran:
        binary = shutil.which("dockerd", path=self.path) or "dockerd"
        return cli.program(binary, *argv, env={"PATH": self.path})

    def has_runtime(self, tree: Tree) -> bool:
        return NAME in (tree.get("runtimes") or {})

    def ours(self, line: str) -> bool:
        return _OURS.search(line) is not None

    def away(self, before: Tree, after: Tree, variant: str) -> list[str]:
        same = _plain(before, variant) == _plain(after, variant)
        return [] if same else [f"was {before}, is {after}"]

    def right(self, before: Tree | None, after: Tree, variant: str, cell: Cell) -> list[str]:
        complaints = []
        entry = (after.get("runtimes") or {}).get(NAME) or {}
        if entry.get("path") != str(cell.program) or entry.get("runtimeArgs") or "runtimeType" in entry:
            complaints.append(f"nvidia is {entry}")
        if variant == "default" and after.get("default-runtime") != NAME:
            complaints.append("nvidia is not the default runtime")
        if (
            variant == "cdi"
            and (after.get("features") or {}).get("cdi", self.release >= HAS_CDI_ON) is not True
        ):
            complaints.append("CDI is not on")
        if before is not None and _plain(before, variant) != _plain(after, variant):
            complaints.append(f"was {before}, is {after}")
        return complaints


def refused_at_start(text: str) -> bool:
    """Whether runtimes in a file that --validate accepts are fatal when dockerd starts."""
    tree = _tree(text)
    runtimes = tree.get("runtimes") or {}
    default = tree.get("default-runtime") or "runc"
    if "runc" in runtimes or (default != "runc" and default not in runtimes):
        return True
    return any(bool(one.get("path")) == bool(one.get("runtimeType")) for one in runtimes.values())


def _plain(tree: Tree, variant: str) -> Tree:
    """The object without the runtime and the variant's request; null and empty count as absent."""
    plain = copy.deepcopy(tree)
    (plain.get("runtimes") or {}).pop(NAME, None)
    if variant == "default":
        plain.pop("default-runtime", None)
    if variant == "cdi":
        (plain.get("features") or {}).pop("cdi", None)
    for key in ("runtimes", "features", "default-runtime"):
        if not plain.get(key):
            plain.pop(key, None)
    return plain


def _tree(text: str) -> Tree:
    """Objects of one name are merged and text after the value is ignored, as by Go's decoder."""
    if not text.strip():
        return {}
    value, _ = json.JSONDecoder(object_pairs_hook=_merged).raw_decode(text.lstrip())
    return value if isinstance(value, dict) else {}


def _merged(pairs: list[tuple[str, Any]]) -> Tree:
    result: Tree = {}
    for key, value in pairs:
        here = result.get(key)
        result[key] = {**here, **value} if isinstance(here, dict) and isinstance(value, dict) else value
    return result
