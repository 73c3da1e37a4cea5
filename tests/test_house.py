"""The rules of docs/architecture.md that a program can check: import order, cycles, sizes."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("house")  # every module is parsed once
PACKAGE = Path(__file__).parent.parent / "gpunode"
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if not path.name.endswith("_pb2.py")]
ORDER = (
    *("output", "host", "daemons", "gpu", "facts", "cdi", "kubernetes", "packages", "mig", "runtime"),
    *("checks", "plugin", "commands", "cli"),
)
APART = {frozenset(pair) for pair in (("checks", "runtime"), ("checks", "plugin"), ("runtime", "plugin"))}
"""Packages that don't import each other."""
ONLY_HERE = {
    "subprocess": {"host.process"},
    "socket": {"host.sockets"},
    "shutil": {"host"},
    "pynvml": {"gpu.nvml"},
    "tomlkit": {"runtime.toml_edit"},
    "rich": {"output.render"},
    "lightkube": {"kubernetes.client", "kubernetes.kubeconfig"},
    "msgspec": {"kubernetes.kubeconfig"},
    "httpx2": {"kubernetes.client"},
    "httpcore2": {"kubernetes.client"},
}
GRPC_PACKAGES = {"plugin", "daemons"}
HEAVY = {"grpc", "google", "pynvml", "rich", "tomlkit", "yaml", "asyncio", "lightkube", "httpx2"}
LONGEST = 800  # lines of a module
LONGEST_FUNCTION = 60


def name_of(path: Path) -> str:
    """gpunode/facts/node.py -> facts.node; the package itself is empty."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts).removesuffix("__init__").removesuffix(".")


NAMES = {name_of(path) for path in FILES}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def own_imports(path: Path) -> frozenset[str]:
    """The modules of gpunode that a module imports: lazily and for types, too."""
    modules: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("gpunode."):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: relative import"
            module = (node.module or "").removeprefix("gpunode").removeprefix(".")
            for alias in node.names:
                whole = f"{module}.{alias.name}".removeprefix(".")
                modules.add(whole if whole in NAMES else module)
    return frozenset(modules - {name_of(path), ""})


def for_types(path: Path) -> set[ast.AST]:
    """Imports of a module for type checkers only."""
    return {
        inner
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }


def position(module: str) -> int | None:
    """A module's position in the order; None for errors and other modules that all may import."""
    top = module.partition(".")[0]
    if top in ("__main__",) or top.startswith("cli"):
        return ORDER.index("cli")
    return ORDER.index(top) if top in ORDER else None


def against_the_order(module: str, imported: str) -> bool:
    here, there = position(module), position(imported)
    if here is None:
        return there is not None and there > ORDER.index("output")
    pair = frozenset((module.partition(".")[0], imported.partition(".")[0]))
    return there is not None and (there > here or pair in APART)


def test_imports_run_downward_only() -> None:
    wrong = [
        f"{name_of(path)} imports {imported}"
        for path in FILES
        for imported in own_imports(path)
        if against_the_order(name_of(path), imported)
    ]
    assert wrong == []


def test_imports_have_no_cycle() -> None:
    try:
        TopologicalSorter({name_of(path): own_imports(path) for path in FILES}).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_guarded_modules_are_imported_in_one_place() -> None:
    wrong = []
    for path in FILES:
        for node in set(ast.walk(parsed(path))) - for_types(path):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for top in {module.partition(".")[0] for module in modules}:
                elsewhere = top in ONLY_HERE and name_of(path) not in ONLY_HERE[top]
                grpc = top == "grpc" and name_of(path).partition(".")[0] not in GRPC_PACKAGES
                if elsewhere or grpc:
                    wrong.append(f"{name_of(path)} imports {top}")
    assert wrong == []


def test_modules_and_functions_are_short_dataclasses_frozen_and_nothing_is_swallowed() -> None:
    wrong = [f"{name_of(path)} is too long" for path in FILES if path.read_text().count("\n") > LONGEST]
    for path in FILES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > LONGEST_FUNCTION:
                    wrong.append(f"{name_of(path)}: {node.name} has {lines} lines")
            if isinstance(node, ast.ClassDef):
                marks = [ast.unparse(mark) for mark in node.decorator_list]
                if any("dataclass" in mark and "frozen=True" not in mark for mark in marks):
                    wrong.append(f"{name_of(path)}: {node.name} is not frozen")
            if isinstance(node, ast.ExceptHandler) and all(isinstance(line, ast.Pass) for line in node.body):
                caught = ast.unparse(node.type) if node.type else "Exception"
                if caught in ("Exception", "BaseException"):
                    wrong.append(f"{name_of(path)}:{node.lineno} swallows {caught}")
    assert wrong == []


@pytest.mark.parametrize("argv", [("--version",), ("--help",), ("doctor", "--help")], ids=" ".join)
def test_start_loads_no_heavy_module(argv: tuple[str, ...]) -> None:
    program = (
        "import sys, json, io\n"
        f"sys.argv = {['gpunode', *argv]!r}\n"
        "from gpunode.cli import main\n"
        "stdout, sys.stdout = sys.stdout, io.StringIO()\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    code = stop.code\n"
        "sys.stdout = stdout\n"
        "print(json.dumps([code, sorted({name.partition('.')[0] for name in sys.modules})]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    code, names = json.loads(done.stdout)
    assert code in (0, None), done.stderr
    heavy = (
        HEAVY if argv[0] == "doctor" else HEAVY | {"ctypes"}
    )  # the doctor's module loads the one that queries NVML
    assert set(names) & heavy == set()
