"""A forked run and one of a new interpreter have the same results."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from fixtures.scenario import machine
from tests import cli
from tests.gpu_node import NodeMaker, make_node
from tests.integration.forked_cli import Started
from tests.memory import temporary
from tests.waiting import PATIENCE, eventually, has_ended

__all__ = ["make_node"]


@pytest.mark.parametrize(
    "argv",
    [
        ("--version",),
        ("doctor", "--help"),
        ("explain", "driver-lib-mismatch"),
        ("explain", "-o", "no such form"),
        ("no such command",),
        ("journal", "list", "-o", "json"),
        (),
    ],
    ids=lambda argv: " ".join(argv) or "nothing",
)
def test_exit_code_and_streams_are_the_same(argv: tuple[str, ...], tmp_path: Path) -> None:
    environ = {"GPUNODE_STATE_DIR": str(tmp_path)}
    assert cli.gpunode(*argv, env=environ) == cli.fresh_gpunode(*argv, env=environ)


def test_run_has_its_own_environment_and_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("etc", "proc", "sys"):
        (tmp_path / name).mkdir()
    ran = cli.gpunode("report", "--output-file", "here.tar.gz", env={"GPUNODE_ROOT": str(tmp_path)})
    assert ran.code == 0, ran.err
    assert (tmp_path / "here.tar.gz").exists()
    assert json.loads(cli.gpunode("journal", "list", env={"GPUNODE_OUTPUT": "json"}).out)["kind"]


def test_timed_out_run_is_killed_and_the_next_one_works(tmp_path: Path) -> None:
    held = cli._forked()
    with pytest.raises(subprocess.TimeoutExpired):
        held.run_in(cli.clean_environment(), "--version", seconds=1e-6)
    assert held.run_in(cli.clean_environment(), "--version").code == 0


def test_a_forked_run_has_the_libraries_of_its_environment(make_node: NodeMaker) -> None:
    environ = make_node(machine(2)).env
    ran = cli.gpunode("gpus", env=environ)
    assert ran == cli.fresh_gpunode("gpus", env=environ)
    assert ran.out.count("NVIDIA H100") == 2


@pytest.mark.parametrize("variable", ["LD_PRELOAD", "PYTHONPATH", "TZ"])
def test_variables_read_at_interpreter_start_use_a_new_process(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "_forked", lambda space: pytest.fail("forked"))
    assert cli.gpunode("--version", env={variable: "/nonexistent"}).code == 0


@pytest.mark.parametrize("variables", [{}, {"TZ": "UTC"}], ids=["forked", "new interpreter"])
def test_started_run_continues_until_a_signal(variables: dict[str, str]) -> None:
    with temporary("gp-") as place:
        log, words = place / "log", ("--root", str(place), "plugin", "serve", "--kubelet-socket=")
        environ = cli.clean_environment(variables)
        process = cli.start_gpunode(*words, "--simulate", "h100:1", env=environ, log=log)
        assert isinstance(process, Started) == (variables == {})
        assert eventually(lambda: "serving" in log.read_text()), log.read_text()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0)
        assert process.poll() is None
        process.terminate()
        assert (process.wait(PATIENCE), process.returncode, process.poll()) == (0, 0, 0)
        assert has_ended(process.pid) and "msg=stopped" in log.read_text()
