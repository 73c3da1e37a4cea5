"""gpunode's command line without a new interpreter for every run, for tests that run it a thousand times.

A separate process imports gpunode once; each run is a fork of it that has its own environment, directory,
streams and exit code, parses the same argument list as ``python -m gpunode`` would and ends the same way. The
process has one thread, so that forking it is safe; pytest's own may have more. If many commands run, it
imports all of gpunode first (`every_module`), because a command's imports take longer than its work.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any

from fixtures.stubs import SCENARIO_VARIABLE
from gpunode.host import Host
from tests.cli import REPOSITORY, Ran, clean_environment
from tests.waiting import PATIENCE

SECONDS = PATIENCE
_DESCRIPTORS = 64
"""More than the process has open; a run gets none of them but the standard streams."""
LIBRARIES = ("grpc", "rich.table", "tomlkit", "yaml", "httpx2", "lightkube")
"""Of others, and slow to import. No more than imported: gRPC's threads come with a child's first channel. The
last ones are an extra's, which may not be there."""


def every_module() -> list[str]:
    """The names of gpunode's modules."""
    files = (path.relative_to(REPOSITORY) for path in REPOSITORY.glob("gpunode/**/*.py"))
    names = {".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in files}
    return sorted(names - {"gpunode.__main__"})


class ForkedCli:
    """One such process; several threads may share it, their runs then wait for each other."""

    def __init__(
        self,
        prefix: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        modules: Sequence[str] = (),
        program: Sequence[str] = (sys.executable, "-m", "tests.integration.forked_cli"),
    ) -> None:
        """`prefix` precedes the command line that starts it: a namespace, for example. `environ` is its
        initial environment, by default this process's; `modules` are imported before any run. `program` runs
        this module, by default with this Python."""
        self._lock = Lock()
        self._server = subprocess.Popen(
            [*prefix, *program, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
            cwd=REPOSITORY,
        )

    def __enter__(self) -> ForkedCli:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._server:
            if self._server.stdin is not None:
                self._server.stdin.close()

    def run(self, *argv: str, env: Mapping[str, str], killed_before: int = 0) -> Ran:
        """Run gpunode to its end; the environment is the process's with `env` laid over it.

        `killed_before` is the number of the change before which SIGKILL ends it (tests/machine/killed.py).
        """
        order = {"argv": argv, "env": dict(env), "seconds": SECONDS}
        return self._gpunode({**order, "killed_before": killed_before})

    def run_in(
        self,
        environ: Mapping[str, str],
        *argv: str,
        seconds: float = SECONDS,
        constants: Mapping[str, Any] | None = None,
        sleepless: bool = False,
    ) -> Ran:
        """Run gpunode to its end with this whole environment, in the directory of this process.

        `constants` are other values for constants of gpunode, by ``module:NAME``: shorter pauses, mostly.
        With `sleepless`, `Host.sleep` advances the clocks of `Host` and returns at once.
        """
        order = {"argv": argv, "whole": dict(environ), "directory": os.getcwd(), "seconds": seconds}
        return self._gpunode({**order, "constants": dict(constants or {}), "sleepless": sleepless})

    def _gpunode(self, order: Mapping[str, Any]) -> Ran:
        """`TimeoutExpired`, as subprocess raises it."""
        ran = self._order(order)
        if ran.code == -signal.SIGALRM:
            raise subprocess.TimeoutExpired(["gpunode", *order["argv"]], order["seconds"], ran.out, ran.err)
        return ran

    def program(self, *argv: str, env: Mapping[str, str], seconds: float = SECONDS) -> Ran:
        """Run another program with `env` in addition to the environment.

        From there, because starting programs from one of several threads fails occasionally on some kernels
        (EFAULT).
        """
        return self._order({"program": argv, "env": dict(env), "seconds": seconds})

    def start(self, environ: Mapping[str, str], *argv: str, log: Path) -> Started:
        """A gpunode that continues. Its stderr is appended to `log`."""
        order = {"argv": argv, "whole": dict(environ), "directory": os.getcwd(), "log": str(log)}
        return Started(self, self._answer(order)["pid"])

    def reap(self, pid: int) -> int:
        """Exit code of a started process that has ended."""
        code: int = self._answer({"reap": pid})["code"]
        return code

    def _order(self, what: Mapping[str, Any]) -> Ran:
        return Ran(**self._answer(what))

    def _answer(self, what: Mapping[str, Any]) -> dict[str, Any]:
        order = json.dumps(what)
        with self._lock:
            assert self._server.stdin is not None and self._server.stdout is not None
            self._server.stdin.write(order + "\n")
            self._server.stdin.flush()
            answer = self._server.stdout.readline()
        assert answer, "the process that runs gpunode has ended"
        loaded: dict[str, Any] = json.loads(answer)
        return loaded


class Started:
    """A gpunode that `ForkedCli.start` has started, with the part of `subprocess.Popen` that tests use."""

    def __init__(self, cli: ForkedCli, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._cli = cli
        self._handle = os.pidfd_open(pid)  # readable once the process has ended

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            poller = select.poll()
            poller.register(self._handle, select.POLLIN)
            if not poller.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired("gpunode", timeout or 0)
            os.close(self._handle)
            self.returncode = self._cli.reap(self.pid)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _serve() -> None:
    for name in LIBRARIES:
        with suppress(ModuleNotFoundError):
            import_module(name)
    for name in ("gpunode.cli", *sys.argv[1:]):
        import_module(name)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which then ends this
    gc.freeze()  # a fork's garbage collector would copy every page that is imported here

    orders, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for order in orders:
        answers.write(json.dumps(_obey(json.loads(order))) + "\n")
        answers.flush()


def _obey(order: dict[str, Any]) -> dict[str, Any]:
    if "program" in order:
        return _program(order)
    if "log" in order:
        return {"pid": _start(order)}
    if "reap" in order:
        return {"code": os.waitstatus_to_exitcode(os.waitpid(order["reap"], 0)[1])}
    return _fork(order)


def _program(order: dict[str, Any]) -> dict[str, Any]:
    done = subprocess.run(
        order["program"],
        env={**os.environ, **order["env"]},
        capture_output=True,
        text=True,
        timeout=order["seconds"],
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


def _start(order: dict[str, Any]) -> int:
    pid = os.fork()
    if pid == 0:
        _child(order, [os.open(path, os.O_WRONLY | os.O_APPEND) for path in (os.devnull, order["log"])])
    return pid


def _child(order: dict[str, Any], streams: list[int]) -> None:
    """Never returns; SIGALRM ends a run that hangs."""
    from gpunode.__main__ import main

    signal.setitimer(signal.ITIMER_REAL, order.get("seconds", 0))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, stream in zip((1, 2), streams, strict=True):
        os.dup2(stream, number)
    os.closerange(3, _DESCRIPTORS)
    os.chdir(order.get("directory", "."))
    stub = {name: value for name, value in os.environ.items() if name == SCENARIO_VARIABLE}
    environ = order["whole"] if "whole" in order else clean_environment({**stub, **order["env"]})
    os.environ.clear()
    os.environ.update(environ)
    sys.argv[1:] = order["argv"]
    code = 1
    try:
        for place, value in order.get("constants", {}).items():
            _set(place, value)
        if order.get("sleepless"):
            _sleep_by_the_clocks_alone()
        if order.get("killed_before"):
            from tests.machine.killed import kill_before

            kill_before(order["killed_before"])
        main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:  # noqa: BLE001 - a fork never returns into the server
        traceback.print_exc()
    finally:
        _finish(code)


def _set(place: str, value: Any) -> None:
    module, _, name = place.partition(":")
    imported = import_module(module)
    assert type(getattr(imported, name)) is type(value) or isinstance(value, list), f"{place} isn't that"
    setattr(imported, name, value)


def _sleep_by_the_clocks_alone() -> None:
    skipped = 0.0
    now, monotonic = Host.now, Host.monotonic

    def sleep(self: Host, seconds: float) -> None:
        nonlocal skipped
        skipped += seconds

    Host.sleep = sleep  # type: ignore[method-assign]
    Host.now = lambda self: now(self) + skipped  # type: ignore[method-assign]
    Host.monotonic = lambda self: monotonic(self) + skipped  # type: ignore[method-assign]


def _finish(code: int) -> None:
    """Exit steps of an interpreter: it waits for threads, and runs the registered exit functions."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    _serve()
