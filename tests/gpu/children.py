"""Runs Python in a child: libraries are found by the environment that a process starts with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from tests.waiting import PATIENCE


def run_python(script: str, env: Mapping[str, str], *arguments: str) -> Any:
    """The JSON that `script` prints; it must end by itself."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
