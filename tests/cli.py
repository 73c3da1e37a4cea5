"""Runs the command line as a user does: a child process with its own streams and exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent


@dataclass(frozen=True)
class Ran:
    """What one command line came to."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The JSON envelope on stdout."""
        loaded = json.loads(self.out)
        assert isinstance(loaded, dict)
        return loaded


def command(*argv: str) -> list[str]:
    """The argument list that starts gpunode with this interpreter."""
    return [sys.executable, "-m", "gpunode", *argv]


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This environment without what would steer gpunode, plus `extra`."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("GPUNODE_", "FORCE_COLOR"))
    }
    return {**kept, **(extra or {})}


def gpunode(
    *argv: str, env: Mapping[str, str] | None = None, timeout: float = 60, prefix: tuple[str, ...] = ()
) -> Ran:
    """Run gpunode to its end, by the program `prefix` if one is given (as another user, say)."""
    done = subprocess.run(
        [*prefix, *command(*argv)],
        env=clean_environment(env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr)
