"""containerd as the judge of the corpus: the output of its own ``config dump`` before and after."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpunode.facts.daemons import parse_version
from gpunode.output.typed import toml
from tests.integration.corpus_cells import NAME, Cell, Tree
from tests.integration.forked_cli import ForkedCli

PLUGINS = ("io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri")
CRI = ("cri", *PLUGINS, "io.containerd.cri.v1.images")
# the only lines of a user's file that may change or disappear; all others may at most be extended
_OURS = re.compile(
    r"^\s*(imports|version|disabled_plugins|default_runtime_name|enable_cdi|BinaryName|SystemdCgroup)\b|cri"
)


@dataclass(frozen=True)
class Containerd:
    """The containerd that comes first on `path`."""

    path: str
    release: tuple[int, ...]
    engine: str = "containerd"

    @classmethod
    def on(cls, path: str) -> Containerd:
        binary = shutil.which("containerd", path=path) or "containerd"
        said = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)
        return cls(path, parse_version(said.stdout))

    def load(self, main: Path, cli: ForkedCli) -> Tree | None:
        """Its merged view; None if it refuses the file.

        Since 2.0 `config dump` ignores a missing import, on which the daemon ends; test_corpus_containerd.py
        starts it.
        """
        binary = shutil.which("containerd", path=self.path) or "containerd"
        done = cli.program(binary, "--config", str(main), "config", "dump", env={})
        tree = toml(done.out) if done.code == 0 else None
        plain = (one for one in (tree or {}).get("imports", []) if "*" not in one)
        return tree if all(Path(main.parent, one).exists() for one in plain) else None

    def has_runtime(self, tree: Tree) -> bool:
        return NAME in _runtimes(tree)

    def ours(self, line: str) -> bool:
        return _OURS.search(line) is not None

    def away(self, before: Tree, after: Tree, variant: str) -> list[str]:
        if _switched_off(before) and not _switched_off(after):
            return []  # without a journal, nothing shows that the CRI was disabled before
        one, other = _plain(before, variant), _plain(after, variant)
        _forget_added_runc(one, other)
        return _differences(one, other)

    def right(self, before: Tree | None, after: Tree, variant: str, cell: Cell) -> list[str]:
        switched_on = before is None or _switched_off(before)
        base = self._fresh(after, cell.cli) if switched_on or before is None else before
        complaints = self._runtime(base, after, str(cell.program), fresh=switched_on)
        if variant == "default" and _containerd(after).get("default_runtime_name") != NAME:
            complaints.append("nvidia is not the default runtime")
        if variant == "cdi" and _cri(after).get("enable_cdi") is not True:
            complaints.append("CDI is not on")
        one, other = (_plain(tree, variant) for tree in (base, after))
        _forget_added_runc(one, other)
        if switched_on:  # only the CRI can be compared with a fresh file's; SystemdCgroup depends on the node
            one, other = (_only_cri(tree) for tree in (one, other))
        return complaints + _differences(one, other)

    def _fresh(self, after: Tree, cli: ForkedCli) -> Tree:
        """This containerd's view of a file with only a version."""
        with tempfile.TemporaryDirectory() as name:
            main = Path(name) / "config.toml"
            main.write_text(f"version = {min(after['version'], 3)}\n")
            tree = self.load(main, cli)
        assert tree is not None
        return tree

    def _runtime(self, before: Tree, after: Tree, program: str, *, fresh: bool) -> list[str]:
        actual = _entry(_runtimes(after).get(NAME))
        expected = self._expected(before, program)
        runc = _entry(_runtimes(after).get("runc")).get("options", {})
        if fresh and runc.get("SystemdCgroup"):  # nothing to inherit: the node's cgroups decide, for runc too
            expected["options"]["SystemdCgroup"] = True
        return [] if actual == expected else [f"nvidia is {actual}, should be {expected}"]

    def _expected(self, before: Tree, program: str) -> Tree:
        """Expected table of the runtime: its previous one, otherwise a copy of the runc that it replaces."""
        runtimes = {name: _entry(table) for name, table in _runtimes(before).items()}
        default = str(_containerd(before).get("default_runtime_name") or "runc")
        usable = [
            runtimes[name]
            for name in (default, "runc", "crun")
            if name in runtimes and not name.startswith(NAME) and _is_runc(runtimes[name])
        ]
        base = usable[0] if usable else {}
        table = copy.deepcopy(runtimes.get(NAME, base))
        table.setdefault("runtime_type", "io.containerd.runc.v2")
        options = {**table.get("options", {}), "BinaryName": program}
        own = default == NAME and options.get("SystemdCgroup") is True  # the runtime of every pod of the node
        if usable and not own:
            options["SystemdCgroup"] = base.get("options", {}).get("SystemdCgroup", False)
        return {**table, "options": {key: value for key, value in options.items() if value}}


def _switched_off(tree: Tree) -> bool:
    return any(one in CRI for one in tree.get("disabled_plugins", []))


def _cri(tree: Tree) -> Tree:
    plugins = tree.get("plugins", {})
    return next((plugins[name] for name in PLUGINS if "containerd" in plugins.get(name, {})), {})


def _containerd(tree: Tree) -> Tree:
    table = _cri(tree).get("containerd", {})
    return table if isinstance(table, dict) else {}


def _runtimes(tree: Tree) -> Tree:
    table = _containerd(tree).get("runtimes", {})
    return table if isinstance(table, dict) else {}


def _is_runc(entry: Tree) -> bool:
    kind = entry.get("runtime_type", "io.containerd.runc.v2")
    return kind.startswith("io.containerd.runc.") and NAME not in entry.get("options", {}).get(
        "BinaryName", ""
    )


def _entry(table: Any) -> Tree:
    """A handler's table without meaningless fields: empty values, and the default sandboxer."""
    if not isinstance(table, dict):
        return {}
    kept = {key: value for key, value in table.items() if value and value != "podsandbox"}
    if isinstance(kept.get("options"), dict):
        kept["options"] = {key: value for key, value in kept["options"].items() if value}
    return {key: value for key, value in kept.items() if value}


def _plain(tree: Tree, variant: str = "") -> Tree:
    """The tree without the runtime, the variant's request, and settings that only name files."""
    plain = copy.deepcopy(tree)
    plain.pop("imports", None)
    plain.pop("version", None)
    runtimes = _runtimes(plain)
    runtimes.pop(NAME, None)
    for name in runtimes:
        runtimes[name] = _entry(runtimes[name])
    if variant == "default":
        _containerd(plain).pop("default_runtime_name", None)
    if variant == "cdi":
        _cri(plain).pop("enable_cdi", None)
    return plain


def _forget_added_runc(one: Tree, other: Tree) -> None:
    """An engine without any runtime may have got the runc without which its CRI doesn't start."""
    if not _runtimes(one):
        _runtimes(other).pop("runc", None)


def _only_cri(tree: Tree) -> Tree:
    cri = copy.deepcopy(_cri(tree))
    for entry in _runtimes({"plugins": {PLUGINS[0]: cri}}).values():
        entry.pop("options", None)
    return cri


def _differences(one: Mapping[str, Any], other: Mapping[str, Any], place: str = "") -> list[str]:
    """Every key with different values in both."""
    differences = []
    for key in sorted({*one, *other}):
        here, there = one.get(key), other.get(key)
        if isinstance(here, dict) and isinstance(there, dict):
            differences += _differences(here, there, f"{place}{key}.")
        elif here != there:
            differences.append(f"{place}{key} was {here!r} and is {there!r}")
    return differences
