"""The rules of docs/architecture.md that a program can check: import order, cycles, sizes."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from dataclasses import dataclass
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
COSTLY = HEAVY | {
    "argparse",
    "ctypes",
    "html",
    "http",
    "logging",
    "socket",
    "tarfile",
    "prometheus_client",
    "msgspec",
}
"""Libraries, Python's own included, that a function may import so that other runs don't load them: logging,
socket, html and ctypes take 12, 11, 8 and 8 of 298 million instructions of `gpunode --version` (valgrind)."""
_PLANNER = {"packages.driver_choice", "packages.driver_model"}
LAZY = {
    # after the signals are blocked, and where Ctrl-C is handled
    "__main__": {"cli"},
    # `--version` needs neither the machine nor the table of variables
    "commands.session": {"commands.variables", "host"},
    # Tab, and options for a duration, of which most runs have none
    "commands.options": {"host", "host.journal", "plugin.config.values", "runtime.find"},
    # the driver's planner is a twentieth of the doctor's start; the fixes of a few faults need it
    "checks.driver_packages": _PLANNER,
    "checks.preconditions": _PLANNER | {"packages.driver_plan", "packages.driver_source"},
    # another command, or another subcommand, than most runs
    "commands.configure_runtime": {"cdi.engines"},
    "commands.doctor": {"commands.doctor_fix"},
    "commands.plugin": {
        *("gpu.amd", "plugin.config.gke", "plugin.nvidia.platform", "plugin.simulate.faults"),
    },
    "commands.verify": {"commands.verify_kubernetes"},
    # one engine of several, and its daemon, which a dry run doesn't query where it is stopped or recorded
    "runtime.find": {"facts.containerd", "runtime.docker_rootless"},
    "runtime.containerd": {"daemons.cri"},
    "runtime.docker": {"daemons.docker"},
    "facts.daemons": {"daemons.cri"},
    "facts.docker": {"daemons.docker"},
    # what the service imports stays in its memory for as long as it runs
    "plugin.compose": {"plugin.amd", "plugin.labels.watch", "plugin.simulate.backend"},
    "plugin.nvidia.backend": {"plugin.nvidia.cdi"},
    # `labels` runs often, as a timer, and most nodes have no config file and no AMD GPU
    "plugin.config.resolve": {"plugin.config.file"},
    "plugin.labels.make": {"plugin.labels.amd"},
    "plugin.nvidia.platform": {"cdi.build", "facts.libraries"},
}
"""Other modules that functions may import, by importer: most runs of a command would load them in vain."""
LONGEST = 800  # lines of a module
MODULES = 300
AT_THE_TOP = 18  # packages, modules and other files directly in gpunode/
LONGEST_FUNCTION = 60


def name_of(path: Path) -> str:
    """gpunode/facts/node.py -> facts.node; the package itself is empty."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts).removesuffix("__init__").removesuffix(".")


BY_NAME = {name_of(path): path for path in FILES}
GENERATED = {name_of(path) for path in PACKAGE.rglob("*_pb2.py")}
NAMES = BY_NAME.keys() | GENERATED


@dataclass(frozen=True)
class Source:
    """What the rules need of a module. `imports` are modules of gpunode, lazily and for types, too;
    `libraries` other packages that it imports, not only for types. `at_import` are the modules and libraries
    that it loads itself, `in_functions` modules that its functions import. `wrong`: breaks of its own."""

    imports: frozenset[str]
    libraries: frozenset[str]
    at_import: frozenset[str]
    in_functions: frozenset[str]
    wrong: tuple[str, ...]


@cache
def source(path: Path) -> Source:
    """Each module is parsed once, and its tree isn't kept: that is a million objects for all of them."""
    text, name = path.read_text(), name_of(path)
    imports: set[str] = set()
    libraries: set[str] = set()
    wrong = [f"{name} is too long"] if text.count("\n") > LONGEST else []
    for_types: set[ast.AST] = set()
    in_functions: set[ast.AST] = set()
    at_import: set[str] = set()
    lazy: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                for_types.update(ast.walk(node))
            case ast.Import(names=names):
                packages = {top(alias.name) for alias in names if node not in for_types}
                libraries |= packages
                at_import |= packages if node not in in_functions else set()
            case ast.ImportFrom(module=module, names=names, level=level):
                assert level == 0, f"{name}:{node.lineno}: relative import"
                libraries |= {top(module or "")} if node not in for_types else set()
                modules = own(module or "", [alias.name for alias in names])
                imports |= modules
                if node in in_functions:
                    lazy |= modules
                elif node not in for_types:
                    at_import |= modules or {top(module or "")}
            case ast.FunctionDef(lineno=first, end_lineno=last):
                in_functions.update(ast.walk(node))
                lines = (last or 0) - first + 1
                wrong += [f"{name}: {node.name} has {lines} lines"] if lines > LONGEST_FUNCTION else []
            case ast.ClassDef():
                marks = [ast.unparse(mark) for mark in node.decorator_list]
                if any("dataclass" in mark and "frozen=True" not in mark for mark in marks):
                    wrong.append(f"{name}: {node.name} is not frozen")
            case ast.ExceptHandler(body=body) if all(isinstance(line, ast.Pass) for line in body):
                caught = ast.unparse(node.type) if node.type else "Exception"
                if caught in ("Exception", "BaseException"):
                    wrong.append(f"{name}:{node.lineno} swallows {caught}")
    here = {name, ""}
    return Source(
        frozenset(imports - here),
        frozenset(libraries),
        frozenset(at_import - here),
        frozenset(lazy - here),
        tuple(wrong),
    )


def top(module: str) -> str:
    return module.partition(".")[0]


def own(module: str, names: list[str]) -> set[str]:
    """The modules of gpunode of which an import from `module` imports `names`."""
    if top(module) != PACKAGE.name:
        return set()
    inner = module.removeprefix("gpunode").removeprefix(".")
    wholes = (f"{inner}.{name}".removeprefix(".") for name in names)
    return {whole if whole in NAMES else inner for whole in wholes}


def position(module: str) -> int | None:
    """A module's position in the order; None for errors and other modules that all may import."""
    package = top(module)
    if package == "__main__" or package.startswith("cli"):
        return ORDER.index("cli")
    return ORDER.index(package) if package in ORDER else None


def against_the_order(module: str, imported: str) -> bool:
    here, there = position(module), position(imported)
    if here is None:
        return there is not None and there > ORDER.index("output")
    pair = frozenset((top(module), top(imported)))
    return there is not None and (there > here or pair in APART)


def test_imports_run_downward_and_have_no_cycle() -> None:
    wrong = [
        f"{name_of(path)} imports {imported}"
        for path in FILES
        for imported in source(path).imports
        if against_the_order(name_of(path), imported)
    ]
    assert wrong == []
    try:
        TopologicalSorter({name_of(path): source(path).imports for path in FILES}).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@cache
def loaded_by(module: str) -> frozenset[str]:
    """What an import of this module of gpunode loads: other modules of gpunode, and libraries."""
    names: set[str] = set()
    queue = [module]
    while queue:
        if (name := queue.pop()) not in names:
            names.add(name)
            queue += source(BY_NAME[name]).at_import if name in BY_NAME else ()
    return frozenset(names | {"google"} if names & GENERATED else names)


def test_functions_import_only_what_costs_much() -> None:
    """Everything else is imported at the top of a module, where a reader looks for it."""
    light = {
        name: modules
        for name, path in BY_NAME.items()
        if (
            modules := {
                module
                for module in source(path).in_functions
                if not COSTLY & (loaded_by(module) - loaded_by(name))
            }
        )
    }
    assert light == LAZY  # an entry that isn't needed any more is an error, too


def test_guarded_modules_are_imported_in_one_place() -> None:
    wrong = []
    for path in FILES:
        for library in source(path).libraries:
            elsewhere = library in ONLY_HERE and name_of(path) not in ONLY_HERE[library]
            grpc = library == "grpc" and top(name_of(path)) not in GRPC_PACKAGES
            if elsewhere or grpc:
                wrong.append(f"{name_of(path)} imports {library}")
    assert wrong == []


def test_modules_and_functions_are_short_dataclasses_frozen_and_nothing_is_swallowed() -> None:
    assert [problem for path in FILES for problem in source(path).wrong] == []
    assert len(FILES) <= MODULES
    assert len([path for path in PACKAGE.iterdir() if path.name != "__pycache__"]) <= AT_THE_TOP


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
