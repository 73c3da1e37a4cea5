"""The registry of container engines against the places that name engines, and docs/adding-an-engine.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from gpunode.cdi.versions import UNKNOWN_ENGINE, oldest
from gpunode.commands.doctor import Preflight
from gpunode.commands.verify import VerifyPlace
from gpunode.errors import UsageError
from gpunode.facts import effective, engines
from gpunode.facts.daemons import Daemon
from gpunode.facts.registry import DAEMONS, DISTRIBUTIONS, ENGINES
from gpunode.facts.tables import numbers, table
from gpunode.host import Host
from gpunode.runtime import find
from gpunode.runtime.verify import run_program
from gpunode.runtime.verify.container import ContainerRequest
from tests.silent import SilentProgress

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "adding-an-engine.md"
WITHOUT_A_PLACE = {"facts/registry.py", "host/redact.py", "commands/demo.py"}
"""The registry itself; words that aren't secrets; a demonstration with two engines."""


def words(engine: str) -> tuple[str, ...]:
    """Names of an engine, its program and its units."""
    return (engine, ENGINES[engine].program, *ENGINES[engine].units)


NAMES = {word for engine in ENGINES for word in words(engine)}


def test_tables_have_an_entry_for_each_engine() -> None:
    assert set(engines.ROLES) == set(ENGINES)
    assert set(effective._READERS) == set(ENGINES)
    assert set(find.FINDERS) == {*ENGINES, *DISTRIBUTIONS}
    assert {one.value for one in VerifyPlace} == {*ENGINES, *DISTRIBUTIONS, "host", "kubernetes"}
    assert {one.value for one in Preflight} == {*ENGINES, "kubernetes"}


def test_first_release_with_cdi_is_that_of_the_tables() -> None:
    firsts: dict[str, tuple[int, ...]] = {}
    for row in table("cdi_versions").rows:
        firsts.setdefault(row["engine"], numbers(row["since"]))
    for row in table("version_gates").rows:
        if row["gate"] == "cdi":
            assert firsts[row["component"]] == numbers(row["since"])
    assert firsts == {name: (*engine.cdi, 0, 0)[:3] for name, engine in ENGINES.items()}


def test_unknown_engine_is_refused_and_not_treated_as_containerd(tmp_path: Path) -> None:
    request = ContainerRequest("lxd")
    with pytest.raises(UsageError, match="no program can be run in lxd"):
        run_program(Host(), request, SilentProgress())
    daemon = Daemon("lxd", None, (), "/etc/lxd.toml", "the default path", "/run/lxd.sock", None)
    with pytest.raises(ValueError, match="no engine for the daemon 'lxd'"):
        find.of_daemon(Host(tmp_path), daemon)
    assert oldest("lxd") == UNKNOWN_ENGINE


def test_every_engine_has_a_class_of_its_own(tmp_path: Path) -> None:
    found = {
        name: find.of_daemon(Host(tmp_path), Daemon(name, None, (), f"/etc/{name}", "", "", None))
        for name in ENGINES
    }
    assert len({type(engine) for engine in found.values()}) == len(ENGINES)


def test_only_daemons_have_units() -> None:
    assert set(ENGINES) - set(DAEMONS) == {"podman"}


def test_page_names_each_module_that_treats_engines_differently() -> None:
    places = set(re.findall(r"\b([a-z_]+/[a-z_/]+\.py)\b", PAGE.read_text()))
    modules = {str(path.relative_to(ROOT / "gpunode")): path for path in (ROOT / "gpunode").rglob("*.py")}
    differ = {name for name, path in modules.items() if len(engines_of(path)) > 1} - WITHOUT_A_PLACE
    assert differ - places == set(), "name them in docs/adding-an-engine.md, or use facts/registry.py"
    gone = {place for place in places - {*modules} if not (ROOT / place).exists()}
    assert gone == set()


def engines_of(path: Path) -> set[str]:
    """The engines that a module names as elements, keys, compared or assigned values, as topics of the node,
    or by their roles. A path into a configuration, as in ``dig(tree, "containerd", ...)``, doesn't count."""
    found: set[str] = set()
    text = path.read_text()
    if sum(any(word in text for word in words(name)) for name in ENGINES) < 2:
        return found  # most modules, so quickly
    for node in ast.walk(ast.parse(text)):
        values: list[ast.expr | None] = []
        match node:
            case ast.Tuple(elts=elements) | ast.List(elts=elements) | ast.Set(elts=elements):
                values = [*elements]
            case ast.Dict(keys=keys):
                values = keys
            case ast.Compare(left=left, comparators=others):
                values = [left, *others]
            case ast.Assign(value=value):
                values = [value]
            case ast.Attribute(value=ast.Name(id="node" | "self"), attr=name) if name in ENGINES:
                found.add(name)
            case ast.Name(id=name) if name.removesuffix("_role") in ENGINES and name.endswith("_role"):
                found.add(name.removesuffix("_role"))
        found |= {one.value for one in values if isinstance(one, ast.Constant) and one.value in NAMES}
    return {next(engine for engine in ENGINES if word in words(engine)) for word in found}
