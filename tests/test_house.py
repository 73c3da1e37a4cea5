"""The rules of the house against the code: who may import whom, what loads when, how large things get."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "gpunode"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if not path.name.endswith("_pb2.py"))
ROOM_MAY_IMPORT = {
    "result": set(),
    "errors": {"result"},
    "host": {"errors"},
    "journal": {"errors", "host", "result"},
    "gpu": {"errors", "host", "result"},
    "daemons": {"errors", "host", "result"},
    "tables": set(),
    "facts": {"daemons", "gpu", "tables", "errors", "host", "result"},
    "cdi": {"facts", "daemons", "gpu", "tables", "errors", "host", "result"},
    "checks": {"packages", "cdi", "facts", "gpu", "tables", "errors", "host", "result", "support"},
    "runtime": {"cdi", "facts", "daemons", "gpu", "journal", "errors", "host", "result"},
    "kubernetes": {"errors", "host", "result"},
    "packages": {"facts", "gpu", "tables", "journal", "errors", "host", "result"},
    "mig": {"cdi", "facts", "gpu", "tables", "journal", "kubernetes", "errors", "host", "result"},
    "plugin": {
        *("cdi", "facts", "daemons", "gpu", "tables", "errors", "host", "result"),  # daemons: gRPC
        "kubernetes",  # labels straight onto the node
    },
    "pages": set(),  # drawn from the JSON envelope alone
    "support": {"facts", "errors", "host", "result"},
    "output": set(),
    "render": {"errors", "output", "result"},
    "commands": {
        *("checks", "runtime", "plugin", "cdi", "gpu", "facts", "daemons", "journal", "host", "errors"),
        *("tables", "pages", "support", "packages", "mig", "kubernetes", "result"),
    },
    "outcome": {"errors", "host", "output", "render", "result"},
    "session": {"outcome", "errors", "output", "render", "result"},
    "light": {"outcome", "output", "gpu", "host"},
    "quick": {"outcome", "output", "commands", "gpu", "host"},
    "cli": {"session", "commands", "output", "errors", "result", "light", "quick"},
    "__main__": {"cli", "quick"},
    "__init__": set(),
    "dataclass": set(),
    "pattern": set(),
    "_spared": set(),
}
DRAWERS = {
    *(
        "_archive",
        "_bundle",
        "_files",
        "_forkable",
        "_process",
        "_reading",
        "_recorder",
        "_recording",
        "_sockets",
    ),
    *("_unnamed", "_waiting", "_watched"),
}
ONLY_HERE = {
    "subprocess": {"_process.py", "_watched.py"},
    "socket": {"_sockets.py"},
    "shutil": {"host/__init__.py"},
    "pynvml": {"gpu/nvml.py"},
    "tomlkit": {"runtime/toml_edit.py"},
    "rich": {"render.py"},
    "lightkube": {"kubernetes/client.py", "kubernetes/wire.py"},
    "httpx2": {"kubernetes/client.py", "kubernetes/refusals.py", "kubernetes/wire.py"},
}
GRPC_ROOMS = {"plugin", "daemons"}
HEAVY = {"grpc", "google", "pynvml", "rich", "tomlkit", "yaml", "asyncio", "ctypes", "lightkube", "httpx2"}

COMPILED_DATACLASSES = {"dataclass.py", "gpu/vectors.py"}


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def room_of(module: str) -> str:
    """gpunode.facts.node -> facts; the host's drawers belong to host."""
    part = module.removeprefix("gpunode").removeprefix(".").partition(".")[0] or "__init__"
    if part == "_manifest":
        return "journal"
    if part in DRAWERS:
        return "host"
    return "cli" if part.startswith("cli_") else part


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path) -> list[tuple[int, str]]:
    """Every imported module of a file with its line, imports for types only left out."""
    tree = parsed(path)
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    found = []
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: relative import"
            if node.module == "gpunode":
                found += [(node.lineno, f"gpunode.{alias.name}") for alias in node.names]
            else:
                found.append((node.lineno, node.module))
    return found


def test_imports_run_downward_only() -> None:
    assert [problem for path in FILES for problem in imports_upward(path)] == []


def imports_upward(path: Path) -> list[str]:
    room = room_of("gpunode." + name_of(path).removesuffix(".py").replace("/", "."))
    allowed = ROOM_MAY_IMPORT[room] | {room, "__init__", "__version__", "dataclass", "pattern", "_spared"}
    return [
        f"{name_of(path)}:{line} imports {module}"
        for line, module in imports(path)
        if module.partition(".")[0] == "gpunode" and room_of(module) not in allowed
    ]


def test_guarded_modules_are_imported_in_one_place() -> None:
    assert [problem for path in FILES for problem in guarded_imports(path)] == []


def guarded_imports(path: Path) -> list[str]:
    wrong = []
    for line, module in imports(path):
        top = module.partition(".")[0]
        if top in ONLY_HERE and name_of(path) not in ONLY_HERE[top]:
            wrong.append(f"{name_of(path)}:{line} imports {module}")
        if top == "grpc" and name_of(path).partition("/")[0] not in GRPC_ROOMS:
            wrong.append(f"{name_of(path)}:{line} imports grpc")
    return wrong


def test_files_and_functions_stay_small() -> None:
    assert [problem for path in FILES for problem in too_long(path)] == []


def too_long(path: Path) -> list[str]:
    text = path.read_text()
    long = [
        f"{name_of(path)}:{node.lineno} {node.name}"
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno + 1 > 60
    ]
    lines = text.count("\n")
    return [*long, f"{name_of(path)} has {lines} lines"] if lines > 800 else long


def test_dataclasses_are_frozen_and_nothing_is_swallowed() -> None:
    assert [problem for path in FILES for problem in not_frozen_or_swallowed(path)] == []


def not_frozen_or_swallowed(path: Path) -> list[str]:
    wrong = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ClassDef):
            marks = [ast.unparse(mark) for mark in node.decorator_list]
            if any("dataclass" in mark and "frozen=True" not in mark for mark in marks):
                wrong.append(f"{name_of(path)}:{node.lineno} {node.name} is not frozen")
        if isinstance(node, ast.ExceptHandler) and all(isinstance(line, ast.Pass) for line in node.body):
            caught = ast.unparse(node.type) if node.type else "everything"
            if caught in {"everything", "Exception", "BaseException"}:
                wrong.append(f"{name_of(path)}:{node.lineno} swallows {caught}")
    return wrong


def test_dataclasses_are_those_that_start_fast() -> None:
    """The standard library's compiles source at every start; a program for a container has nothing else."""
    others = [
        f"{name_of(path)}:{node.lineno}"
        for path in FILES
        if name_of(path) not in COMPILED_DATACLASSES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ImportFrom) and node.module == "dataclasses"
        if not {alias.name for alias in node.names} <= {"asdict"}
    ]
    assert others == []


def loaded_after(*argv: str) -> set[str]:
    """Top-level modules in sys.modules after a command line has run to its end."""
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
    return set(names)


@pytest.mark.parametrize("argv", [("--version",), ("--help",), ("doctor", "--help")], ids=" ".join)
def test_starting_loads_nothing_heavy(argv: tuple[str, ...]) -> None:
    assert loaded_after(*argv) & HEAVY == set()
