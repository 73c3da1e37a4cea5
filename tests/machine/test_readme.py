"""README's quick start: each command, on a machine where README's commands were run."""

from __future__ import annotations

from scripts.generate_docs import stable
from tests.machine.booted import Machine
from tests.machine.readme import OMITTED, quick_start
from tests.machine.test_kubernetes import node

__all__ = ["node"]
_SERVES = "the kubelet watches"


def test_quick_start_prints_what_the_readme_shows(node: Machine) -> None:
    printed = {command: run(node, command) for command in quick_start()}
    for command, shown in quick_start().items():
        lines = iter([stable(line).rstrip() for line in printed[command].splitlines()])
        expected = [stable(line).rstrip() for line in shown if line.strip() not in ("", OMITTED)]
        missing = [line for line in expected if line not in lines]
        assert expected and missing == [], f"{command}:\n{printed[command]}"


def run(machine: Machine, command: str) -> str:
    """Terminal output: stdout, then stderr. `plugin serve` ends once the kubelet watches."""
    words = command.split()
    if "serve" not in words:
        done = machine.run(*words)
        return done.out + done.err
    process = machine.start(*words)
    try:
        assert process.stderr is not None
        log = ""
        while _SERVES not in log:
            line = process.stderr.readline()
            assert line, log
            log += line
        assert machine.run("pkill", "-INT", "-f", "bin/gpunode plugin serve").code == 0
        process.communicate(timeout=60)
        return log
    finally:
        process.kill()
