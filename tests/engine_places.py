"""The lines of gpunode that name a container engine outside of that engine's own modules.

``python -m tests.engine_places`` prints them for docs/adding-an-engine.md: a new engine may belong there too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from gpunode.facts.registry import ENGINES

ROOT = Path(__file__).parent.parent
NOT_FOR_A_NEW_ONE = {"facts/registry.py", "host/redact.py", "commands/demo.py"}
"""The registry itself; words that aren't secrets; a demonstration with two engines."""
UNITS = {unit for engine in ENGINES.values() for unit in engine.units}
NAMES = {*ENGINES, *(engine.program for engine in ENGINES.values())}


def places() -> dict[str, tuple[int, ...]]:
    """The lines by module."""
    package = ROOT / "gpunode"
    modules = {str(path.relative_to(package)): path for path in sorted(package.rglob("*.py"))}
    lines = {
        name: tuple(sorted(set(lines_of(path.read_text()))))
        for name, path in modules.items()
        if name not in NOT_FOR_A_NEW_ONE and not is_own(path)
    }
    return {name: numbers for name, numbers in lines.items() if numbers}


def is_own(path: Path) -> bool:
    """Whether a module is about one engine: docker.py, docker_rootless.py, crio.py ..."""
    return path.stem.partition("_")[0] in ENGINES


def lines_of(text: str) -> Iterator[int]:
    """The lines with an engine's name or unit as a value, or with a topic of the node about it. A path into a
    configuration, as in ``dig(tree, "containerd", ...)``, doesn't count."""
    if not any(name in text for name in (*NAMES, *UNITS)):
        return  # most modules, so quickly
    keys: set[ast.AST] = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Call(func=ast.Name(id="dig"), args=arguments):
                keys.update(arguments)
            case ast.Constant() if node in keys:
                pass
            case ast.Constant(value=str(value)) if value in NAMES or any(unit in value for unit in UNITS):
                yield node.lineno
            case ast.Attribute(value=ast.Name(id="node" | "self"), attr=name) if name in ENGINES:
                yield node.lineno


if __name__ == "__main__":
    for module, numbers in places().items():
        source = (ROOT / "gpunode" / module).read_text().splitlines()
        for number in numbers:
            print(f"gpunode/{module}:{number}: {source[number - 1].strip()}")
