"""gpunode's command line without a fresh interpreter for every run, for tests that run it a thousand times.

A process of its own imports gpunode once; each run is a fork of it that has its own environment, streams and
exit code and parses the same argument list as ``python -m gpunode`` would. The process has one thread, so
that forking it is safe; pytest's own may have more.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from threading import Lock
from types import TracebackType
from typing import Any

from fixtures.stubs import SCENARIO_VARIABLE
from tests.cli import Ran, clean_environment

SECONDS = 60


class ForkedCli:
    """One such process; several threads may share it, their runs then wait for each other."""

    def __init__(self, prefix: Sequence[str] = ()) -> None:
        """`prefix` comes before the command line that starts it: a namespace, for example."""
        self._lock = Lock()
        self._server = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.integration.forked_cli"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> ForkedCli:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._server:
            if self._server.stdin is not None:
                self._server.stdin.close()

    def run(self, *argv: str, env: Mapping[str, str]) -> Ran:
        """Run gpunode to its end; the environment is the process's with `env` laid over it."""
        return self._order({"argv": argv, "env": dict(env)})

    def program(self, *argv: str, env: Mapping[str, str]) -> Ran:
        """Run another program with `env` laid over the environment.

        From there, because starting programs from one of several threads fails now and then on some kernels
        (EFAULT).
        """
        return self._order({"program": argv, "env": dict(env)})

    def _order(self, what: Mapping[str, Any]) -> Ran:
        order = json.dumps(what)
        with self._lock:
            assert self._server.stdin is not None and self._server.stdout is not None
            self._server.stdin.write(order + "\n")
            self._server.stdin.flush()
            answer = self._server.stdout.readline()
        assert answer, "the process that runs gpunode has ended"
        return Ran(**json.loads(answer))


def _serve() -> None:
    import grpc  # noqa: F401 - only imported: its threads come with a child's first channel
    import tomlkit  # noqa: F401

    gc.freeze()  # a fork's collector would copy every page of what is imported here

    orders, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for order in orders:
        what = json.loads(order)
        answers.write(json.dumps(_program(what) if "program" in what else _fork(what)) + "\n")
        answers.flush()


def _program(order: dict[str, Any]) -> dict[str, Any]:
    done = subprocess.run(
        order["program"],
        env={**os.environ, **order["env"]},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    return {"code": done.returncode, "out": done.stdout, "err": done.stderr}


def _fork(order: dict[str, Any]) -> dict[str, Any]:
    streams = [os.memfd_create(name) for name in ("out", "err")]
    pid = os.fork()
    if pid == 0:
        _child(order, streams)
    _, status = os.waitpid(pid, 0)
    texts = []
    for stream in streams:
        with os.fdopen(stream, "rb") as file:
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return {"code": os.waitstatus_to_exitcode(status), "out": texts[0], "err": texts[1]}


def _child(order: dict[str, Any], streams: list[int]) -> None:
    """Never returns; SIGALRM ends a run that hangs, which shows as exit code -14."""
    import signal

    from gpunode.cli import app
    from gpunode.session import run_app

    signal.alarm(SECONDS)
    for number, stream in zip((1, 2), streams, strict=True):
        os.dup2(stream, number)
    stub = {name: value for name, value in os.environ.items() if name == SCENARIO_VARIABLE}
    inherited = clean_environment({**stub, **order["env"]})
    os.environ.clear()
    os.environ.update(inherited)
    code = 70
    try:
        code = run_app(app, order["argv"])
    except BaseException:  # noqa: BLE001 - a fork never returns into the server
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
