"""A node where systemd runs, for one gpunode at a time: stubs of systemctl and journalctl on PATH.

tests/machine has a real systemd. These are for what no such machine has: CRI-O, k3s and similar, other
releases of an engine, several engines of which one fails, and a node with only Docker.
They start, restart and reload a real daemon, by the same means: `restart` ends it and starts the unit's
ExecStart, `reload` sends SIGHUP, and journalctl shows its real output. A mount namespace has the directory
by which sd_booted(3) detects systemd, and the unit file.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from fixtures.engines import Engine
from tests.integration.configuring import SECONDS
from tests.waiting import PATIENCE

_SYSTEMCTL = """\
#!/bin/sh
# stand-in: see systemd_stand_in.py
echo "systemctl $*" >> {calls}
case "$*" in
{cases}
daemon-reload) exit 0 ;;
"enable --now gpunode-"*) test -e "/etc/systemd/system/$3" && exit 0 ;;
"disable --now gpunode-"*) exit 0 ;;
esac
echo "Unit $2 not found." >&2
exit 5
"""
_CASES = """\
"restart {unit}")
  {restart} > /dev/null 2>&1 && exit 0
  echo "Job for {unit} failed because the control process exited with error code." >&2
  exit 1 ;;
"reload {unit}") exec kill -HUP "$(cat {directory}/daemon.pid)" ;;
"""
_JOURNALCTL = """\
#!/bin/sh
# stand-in: see systemd_stand_in.py
echo "journalctl $*" >> {calls}
test "$1 $3 $5 $6 $7" = "-u -n --no-pager -o cat" || exit 1
case $2 in
{cases}
esac
exit 1
"""
_NAMESPACE = """\
mount -t tmpfs -o mode=755 tmpfs /run && mkdir -p /run/systemd/system &&
cp "$1"/*.service /run/systemd/system/
shift && exec "$@"
"""


@dataclass(frozen=True)
class Node:
    """Private engines as the packaged units of a node with systemd; `directory` is for scratch files.

    `engine` is the one that most tests are about, `others` run in addition.
    """

    engine: Engine
    directory: Path
    others: tuple[Engine, ...] = ()

    @property
    def engines(self) -> tuple[Engine, ...]:
        return (self.engine, *self.others)

    @property
    def state(self) -> Path:
        return self.directory / "state"

    def prepare(self) -> None:
        """Write the stubs and the unit file."""
        programs = self.directory / "bin"
        programs.mkdir()
        calls = self.directory / "calls"
        units, logs = [], []
        for engine in self.engines:
            unit = f"{engine.kind}.service"
            units.append(_CASES.format(unit=unit, restart=engine.restart_command, directory=engine.directory))
            logs.append(f'{unit}) exec tail -n "$4" {engine.directory}/daemon.log ;;')
            (self.directory / unit).write_text(f"[Service]\nExecStart={shlex.join(engine.argv)}\n")
        for name, text, cases in (("systemctl", _SYSTEMCTL, units), ("journalctl", _JOURNALCTL, logs)):
            (programs / name).write_text(text.format(calls=calls, cases="\n".join(cases)))
            (programs / name).chmod(0o755)
        runtime = programs / "nvidia-container-runtime"
        runtime.write_text('#!/bin/sh\nexec runc "$@"\n')
        runtime.chmod(0o755)

    def calls(self) -> list[str]:
        """Calls of systemctl and journalctl, in order."""
        file = self.directory / "calls"
        return file.read_text().splitlines() if file.exists() else []

    def gpunode(self, verb: str, *options: str) -> subprocess.CompletedProcess[str]:
        """Run gpunode on this node, as a user there would: without naming a file or a command."""
        programs = self.directory / "bin"
        environ = {**os.environ, "GPUNODE_STATE_DIR": str(self.state), "NO_COLOR": "1"}
        environ["PATH"] = f"{programs}:{os.environ['PATH']}"
        own = [sys.executable, "-m", "gpunode", verb, *options]
        if verb not in ("rollback", "reset"):
            own += [part for engine in self.engines for part in ("--runtime", engine.kind)]
        if verb == "configure-runtime":
            own += ["--nvidia-runtime-path", str(programs / "nvidia-container-runtime")]
        argv = ["unshare", "-m", "--propagation", "private", "sh", "-ec", _NAMESPACE, "sh"]
        return subprocess.run(
            [*argv, str(self.directory), *own],
            env=environ,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )


def require_namespace() -> None:
    """Skip where this user may not make a mount namespace."""
    argv = ["unshare", "-m", "--propagation", "private", "mount", "-t", "tmpfs", "tmpfs", "/run"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE, check=False)
    except FileNotFoundError:
        pytest.skip("needs unshare")
    if done.returncode != 0:
        pytest.skip(f"needs a mount namespace: {done.stderr.strip()}")
